"""Write files atomically, and never outside of their folder.

The folder may contain hostile links. A file is created under an unused temporary name and then renamed, which replaces
a link rather than its target; a file that is written in place must be a regular one with a single name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from microtome.errors import BadFile, describe_error

#: The maximum number of buffers of one `writev` (IOV_MAX).
_MAX_BUFFERS = 1024

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_NEW |= getattr(os, "O_BINARY", 0)
_IN_PLACE = os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_IN_PLACE |= getattr(os, "O_BINARY", 0)


@contextmanager
def translate_write_errors(target: str) -> Iterator[None]:
    """Raise BadFile in place of errors of the system in the block.

    Args:
        target: The file or folder, for the message.
    """
    try:
        yield
    except OSError as error:
        advice = ": create the folder first" if isinstance(error, FileNotFoundError) else ""
        raise BadFile(f"cannot write {target}: {error.strerror or describe_error(error)}{advice}") from error


def make_folder(folder: Path) -> None:
    """Create a folder, and those around it, unless it exists."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise BadFile(f"expected a folder, got the file {str(folder)!r}")
    with translate_write_errors(repr(str(folder))):
        folder.mkdir(parents=True, exist_ok=True)


def open_for_writing(file: Path, flags: int) -> int:
    """Open or create a file to write it in place, after checking that it is regular and has no other name."""
    try:
        mode = os.lstat(file).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode):
        raise _foreign_file(file, "a link" if stat.S_ISLNK(mode) else "something else")
    descriptor = os.open(file, flags | _IN_PLACE, 0o666)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _foreign_file(file, "a file with another name beside this one")
    return descriptor


def _foreign_file(file: Path, got: str) -> BadFile:
    return BadFile(f"cannot write {str(file)!r}: expected a regular file of this folder, got {got}; remove it")


def write_atomically(file: Path, write: Callable[[int], None], *, sync: bool = False) -> None:
    """Write a file under a temporary name, then rename it; on an error nothing is left of it.

    Args:
        write: Writes to the file descriptor.
        sync: Make the file survive a power failure.
    """
    atomic = AtomicFile(file)
    try:
        write(atomic.descriptor)
        atomic.commit(sync=sync)
    except BaseException:
        atomic.discard()
        raise


class AtomicFile:
    """A new file under a temporary name, until it is complete."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._path = file.with_name(f".{file.name}.{os.urandom(4).hex()}.tmp")  # unique to this process
        self._is_open = True
        self.descriptor = os.open(self._path, _NEW, 0o666)

    def commit(self, *, sync: bool) -> None:
        """Close the file and rename it, replacing any other of its name."""
        if sync:
            os.fsync(self.descriptor)
        self._close()
        os.replace(self._path, self._file)
        if sync:
            _sync_folder(self._file.parent)

    def discard(self) -> None:
        """Delete the file, unless it is committed."""
        self._close()
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.descriptor)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # which cannot open a folder, and journals its changes
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_buffers(descriptor: int, buffers: Iterable[Any]) -> None:
    """Write all buffers, in as many system calls as it takes."""
    left = [memoryview(buffer) for buffer in buffers]
    left.reverse()
    while left:
        if hasattr(os, "writev"):
            done = os.writev(descriptor, left[: -_MAX_BUFFERS - 1 : -1])
        else:  # on Windows
            done = os.write(descriptor, left[-1])
        while left and done >= left[-1].nbytes:  # empty ones too
            done -= left.pop().nbytes
        if done:
            left[-1] = left[-1][done:]
