"""One writer to a folder, in all processes."""

from __future__ import annotations

import os
from pathlib import Path

from microtome.errors import BadFile
from microtome.files.writing import open_own

LOCK = ".lock"


class FolderLock:
    """Held from when it is made until `release`, or until the process ends, however it does."""

    def __init__(self, folder: Path) -> None:
        import fcntl  # not on Windows, where all else works

        self._descriptor: int | None = open_own(folder / LOCK, os.O_RDWR)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        except BlockingIOError as error:
            owner = os.pread(self._descriptor, 32, 0).decode(errors="replace") or "unknown"
            self._close()
            here = " (this process)" if owner == str(os.getpid()) else ""
            raise BadFile(
                f"{str(folder)!r} is being recorded to by the process with pid {owner}{here}; "
                f"wait until it is done, or record to another folder"
            ) from error
        except BaseException:
            self._close()
            raise

    def release(self) -> None:
        if self._descriptor is not None:
            import fcntl

            # A child that was forked meanwhile has the lock too; closing alone would leave it to that.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
