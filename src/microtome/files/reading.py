"""Read regular files of bounded size, and raise BadFile for whatever is wrong with them.

Every file that microtome reads is opened here. A pipe, a device or a folder in place of a file is refused before it is
opened: opening one may wait forever, or have an effect.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any, BinaryIO

from microtome.errors import BadFile, describe_error
from microtome.units import size

File = str | PathLike[str]

#: The most memory that the objects of one JSON document may take: some 40,000 calls of a profile.
JSON_LIMIT = 2 << 30

#: Errors that malformed content raises in code that decodes it. Not RuntimeError, but for a document that is nested
#: too deep: torch raises it where a device is out of memory or not there, which says nothing of the file.
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, EOFError)

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def damage(what: str) -> Iterator[None]:
    """Raise BadFile in place of any error that damaged or forged content causes.

    Args:
        what: The file, and the place in it, for the message.
    """
    try:
        yield
    except BadFile:
        raise
    except OSError as error:
        raise BadFile(f"cannot read {what}: {error.strerror or describe_error(error)}") from error
    except _DAMAGE as error:
        raise BadFile(f"{what} is damaged: {describe_error(error)}") from error


def check_regular(mode: int, what: str) -> None:
    """Raise if the mode of a file is not that of a regular one."""
    if not stat.S_ISREG(mode):
        got = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise BadFile(f"cannot read {what}: expected a regular file, got {got}")


@contextmanager
def opened(file: File) -> Iterator[BinaryIO]:
    """A regular file, open for reading; what the block raises because of its content is a BadFile."""
    what = repr(os.fspath(file))
    with damage(what):
        check_regular(os.stat(file).st_mode, what)
        # It may have been replaced meanwhile: do not wait for the other end of a pipe, and look again.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(file, flags), "rb") as stream:
            check_regular(os.fstat(stream.fileno()).st_mode, what)
            yield stream


def read_bytes(file: File, limit: int) -> bytes:
    """The content of a regular file.

    Args:
        limit: The most bytes that it may have.
    """
    with opened(file) as stream:
        there = os.fstat(stream.fileno()).st_size
        data = stream.read(min(there, limit) + 1)
        while len(data) <= limit and (more := stream.read(1 << 16)):  # files of the kernel state no size
            data += more
        there = max(there, len(data))
        if there > limit:
            raise BadFile(f"cannot read {os.fspath(file)!r}: expected at most {size(limit)}, got {size(there)}")
        return data


def read_json(file: File) -> Any:
    """The document in a file of JSON; NaN and Infinity are floats."""
    return parse_json(read_bytes(file, JSON_LIMIT), repr(os.fspath(file)), finite=False)


def parse_json(text: str | bytes, what: str, limit: int = JSON_LIMIT, *, finite: bool = True) -> Any:
    """The document that a text in JSON holds.

    Args:
        what: Where the text comes from, for errors.
        limit: The most memory that the objects may take.
        finite: Whether NaN and Infinity, which are no numbers of JSON, become strings; else they are floats.
    """
    need = json_cost(text)
    if need > limit:
        raise BadFile(f"{what} is too large: reading it may take {size(need)} of memory, the limit is {size(limit)}")
    try:
        return json.loads(text, parse_constant=str if finite else float)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{what} is not JSON: {describe_error(error)}") from error


def json_cost(text: str | bytes) -> int:
    """An upper bound of the memory that parsing JSON takes, in bytes.

    Decoded text takes up to four bytes for a byte, and so do the strings cut from it. A dict with one entry takes 184
    bytes, and an entry with its key and its value at most 240.
    """
    comma, bracket, brace = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    entries = text.count(comma) + text.count(brace)  # type: ignore[arg-type]
    return 8 * len(text) + 240 * entries + 120 * text.count(bracket)  # type: ignore[arg-type]
