"""Read regular files of bounded size; raise BadFile for anything wrong with them.

microtome opens no file for reading elsewhere. A pipe, device or folder is refused before it is opened, since opening
one may block or have side effects.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any, BinaryIO

from microtome.errors import BadFile, describe_error, describe_value
from microtome.units import plural, size

File = str | PathLike[str]

#: The maximum memory of the objects of a JSON document: a profile of about 40,000 calls.
JSON_LIMIT = 2 << 30

#: Errors of decoding corrupt content. RuntimeError is not among them: torch raises it if a device is unavailable or
#: out of memory, whatever the file. Its subclass RecursionError is: a document may be nested too deep.
_DECODE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, EOFError)

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def translate_read_errors(source: str) -> Iterator[None]:
    """Raise BadFile in place of errors that corrupt or forged content causes in the block.

    Args:
        source: The file, and the location in it, for the message.
    """
    try:
        yield
    except BadFile:
        raise
    except OSError as error:
        raise BadFile(f"cannot read {source}: {error.strerror or describe_error(error)}") from error
    except _DECODE_ERRORS as error:
        raise BadFile(f"{source} is corrupt: {describe_error(error)}") from error


def _check_regular(mode: int, source: str) -> None:
    if not stat.S_ISREG(mode):
        got = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise BadFile(f"cannot read {source}: expected a regular file, got {got}")


def _check_name(file: File) -> None:
    """Raise if the text of a file, or something else, was passed in place of its name."""
    if not isinstance(file, str | PathLike):
        raise BadFile(f"expected the name of a file, got {describe_value(file)}")
    text = os.fspath(file)
    is_json = text.lstrip().startswith("{")
    if (is_json or "\n" in text) and not os.path.lexists(text):
        got = "JSON text" if is_json else f"text of {plural(text.count(chr(10)) + 1, 'line')}"
        raise BadFile(f'expected the name of a file, got {got}: write it with to_json("p.json"), and pass that name')


@contextmanager
def open_regular(file: File) -> Iterator[BinaryIO]:
    """Open a regular file for reading; errors that its content causes in the block become BadFile."""
    _check_name(file)
    source = repr(os.fspath(file))
    with translate_read_errors(source):
        _check_regular(os.stat(file).st_mode, source)
        # It may have been replaced since: do not block on a pipe, and check what was opened.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(file, flags), "rb") as stream:
            _check_regular(os.fstat(stream.fileno()).st_mode, source)
            yield stream


def read_bytes(file: File, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes."""
    with open_regular(file) as stream:
        nbytes = os.fstat(stream.fileno()).st_size
        data = stream.read(min(nbytes, limit) + 1)
        while len(data) <= limit and (chunk := stream.read(1 << 16)):  # files of the kernel report no size
            data += chunk
        nbytes = max(nbytes, len(data))
        if nbytes > limit:
            raise BadFile(f"cannot read {os.fspath(file)!r}: expected at most {size(limit)}, got {size(nbytes)}")
        return data


def read_json(file: File) -> Any:
    """Read a JSON file; NaN and Infinity become floats."""
    return parse_json(read_bytes(file, JSON_LIMIT), repr(os.fspath(file)), finite=False)


def parse_json(text: str | bytes, source: str, limit: int = JSON_LIMIT, *, finite: bool = True) -> Any:
    """Parse JSON.

    Args:
        source: The origin of the text, for errors.
        limit: The maximum memory of the objects.
        finite: Turn NaN and Infinity, which are not JSON, into strings instead of floats.
    """
    nbytes = json_memory_bound(text)
    if nbytes > limit:
        raise BadFile(
            f"{source} is too large: reading it may take {size(nbytes)} of memory, the limit is {size(limit)}"
        )
    try:
        return json.loads(text, parse_constant=str if finite else float)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{source} is not JSON: {describe_error(error)}") from error


def json_memory_bound(text: str | bytes) -> int:
    """Return an upper bound of the bytes of memory that parsing JSON takes.

    Decoded text takes up to four bytes per byte, and so do its substrings. A dict of one entry takes 184 bytes, an
    entry with its key and value at most 240.
    """
    comma, bracket, brace = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    entries = text.count(comma) + text.count(brace)  # type: ignore[arg-type]
    return 8 * len(text) + 240 * entries + 120 * text.count(bracket)  # type: ignore[arg-type]
