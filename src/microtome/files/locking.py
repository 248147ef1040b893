"""Lock an open file against other processes, with flock or, on Windows, by a region of the file."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

#: The locked byte on Windows, where others cannot read it: beyond the content of any lock file.
_LOCKED_BYTE = 1 << 30


def lock_exclusively(descriptor: int) -> None:
    """Lock a file until `unlock` or the end of the process.

    Raises:
        BlockingIOError: Another process has locked it, or another descriptor of this one.
    """
    try:
        import fcntl
    except ImportError:
        try:
            _lock_region(descriptor, "LK_NBLCK")
        except OSError as error:  # EACCES or EDEADLOCK
            raise BlockingIOError(error.errno, error.strerror) from error
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(descriptor: int) -> None:
    """Release the lock of a file."""
    try:
        import fcntl
    except ImportError:
        _lock_region(descriptor, "LK_UNLCK")
    else:
        # A child forked meanwhile has the descriptor too; closing it here alone would not release the lock.
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _lock_region(descriptor: int, mode: str) -> None:
    msvcrt: Any = import_module("msvcrt")  # on Windows only
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    msvcrt.locking(descriptor, getattr(msvcrt, mode), 1)
