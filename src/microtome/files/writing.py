"""Write files into a folder, whole or not at all, and nowhere else.

Whoever prepared the folder may have left links in it. A file is made under a name of its own that must not be there,
and then renamed, which replaces a link and not what it points to; a file that is written in place must be the folder's
own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from microtome.errors import BadFile, describe_error

#: The most buffers that the system takes in one call.
_BUFFERS = 1024

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_NEW |= getattr(os, "O_BINARY", 0)
_OWN = os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


@contextmanager
def failure(what: str) -> Iterator[None]:
    """Raise BadFile if the system refuses to write.

    Args:
        what: The file or folder, for the message.
    """
    try:
        yield
    except OSError as error:
        raise BadFile(f"cannot write {what}: {error.strerror or describe_error(error)}") from error


def open_own(file: Path, flags: int) -> int:
    """Open a file of a folder for writing, made if missing: a regular file without another name, and no link."""
    try:
        found = os.lstat(file).st_mode
    except FileNotFoundError:
        found = stat.S_IFREG
    if not stat.S_ISREG(found):
        raise _not_own(file, "a link" if stat.S_ISLNK(found) else "something else")
    descriptor = os.open(file, flags | _OWN, 0o666)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _not_own(file, "a file with another name beside this one")
    return descriptor


def _not_own(file: Path, got: str) -> BadFile:
    return BadFile(f"cannot write {str(file)!r}: expected a regular file of this folder, got {got}; remove it")


def write_whole(file: Path, write: Callable[[int], None], *, sync: bool = False) -> None:
    """Have a file written under another name, then give it its own; on an error nothing is left of it."""
    partial = Partial(file)
    try:
        write(partial.descriptor)
        partial.finish(sync=sync)
    except BaseException:
        partial.discard()
        raise


class Partial:
    """A file that has another name until it is whole."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._path = file.with_name(f".{file.name}.{os.urandom(4).hex()}.tmp")  # another process may write it too
        self._is_open = True
        self.descriptor = os.open(self._path, _NEW, 0o666)

    def finish(self, *, sync: bool) -> None:
        """Give it its name."""
        if sync:
            os.fsync(self.descriptor)
        self._close()
        os.replace(self._path, self._file)
        if sync:
            sync_folder(self._file.parent)

    def discard(self) -> None:
        """Leave nothing of it, unless it is finished."""
        self._close()
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.descriptor)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, buffers: Iterable[Any]) -> None:
    """Write buffers of bytes, whatever part of them the system takes at a time."""
    left = [memoryview(buffer) for buffer in buffers]
    left.reverse()
    while left:
        if hasattr(os, "writev"):
            done = os.writev(descriptor, left[: -_BUFFERS - 1 : -1])
        else:  # on Windows
            done = os.write(descriptor, left[-1])
        while left and done >= left[-1].nbytes:  # empty ones too
            done -= left.pop().nbytes
        if done:
            left[-1] = left[-1][done:]
