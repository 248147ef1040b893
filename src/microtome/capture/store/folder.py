"""Create a recording in a folder, or resume one, with one writer in all processes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from microtome.capture.store.index import INDEX, MANIFEST, IndexTotals, read_index, read_manifest, write_manifest
from microtome.capture.store.stats import Stats
from microtome.errors import BadFile, BadQuery
from microtome.files.reading import translate_read_errors
from microtome.files.writing import open_for_writing

#: The entries of a manifest that must be equal to append to a recording.
_EQUAL_ENTRIES = ("model", "layout", "selectors", "reduce")


LOCK = ".lock"


class FolderLock:
    """An exclusive lock of a folder, from its creation until `release` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        import fcntl  # not on Windows, where everything else works

        self._descriptor: int | None = open_for_writing(folder / LOCK, os.O_RDWR)
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
                f"wait until it ends, or record to another folder"
            ) from error
        except BaseException:
            self._close()
            raise

    def release(self) -> None:
        if self._descriptor is not None:
            import fcntl

            # A child forked meanwhile has the descriptor too; closing it here alone would not release the lock.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def claim(folder: Path) -> FolderLock:
    """Lock a folder that is empty or holds a recording; write nothing to any other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {file.name for file in folder.iterdir()}
        others = sorted(name for name in names if name != LOCK and not _is_partial(name))
        if MANIFEST in others:
            read_manifest(folder)
        elif others:
            raise BadFile(
                f"expected a new or empty folder or a recording, got {str(folder)!r}, which has {others[0]!r}: record "
                "to another folder"
            )
        return FolderLock(folder)
    except OSError as error:
        raise record_error(folder, error) from error


def _is_partial(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def record_error(folder: Path, error: OSError) -> BadFile:
    return BadFile(f"cannot record to {str(folder)!r}: {error.strerror}")


def open_recording(
    folder: Path, manifest: Mapping[str, Any], empty_stats: Stats, *, append: bool, keep: str, sync: bool
) -> IndexTotals:
    """Return the totals of the recording in a folder; create it if there is none."""
    content = _to_json(manifest)
    totals = IndexTotals()
    if not (folder / MANIFEST).exists():
        write_manifest(folder, content, sync=sync)
        return totals
    lines, end = read_index(folder, checked=read_manifest(folder).checked)
    with translate_read_errors(repr(str(folder / INDEX))):
        for line in lines:
            totals.add(line)
    if not append and not totals.count:  # the recording ended before anything was recorded
        write_manifest(folder, content, sync=sync)
        return totals
    if not append:
        raise BadFile(
            f"{str(folder)!r} already holds a recording of {totals.count} records; "
            f"append=True continues it, or record to another folder"
        )
    _check_manifest(folder, content)
    _check_histogram(folder, totals, empty_stats)
    if totals.full and keep == "all":
        raise BadFile(
            f"the recording in {str(folder)!r} reached its limit: {totals.dropped} of its {totals.count} records were "
            f"not kept, so further tensors would not align with the rest; record to another folder, or continue with "
            f"statistics only: keep='stats'"
        )
    _truncate_index(folder / INDEX, end)
    return totals


def _truncate_index(index: Path, end: int) -> None:
    """Remove what a killed process left after the last complete run."""
    descriptor = open_for_writing(index, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, end)
    finally:
        os.close(descriptor)


def _to_json(manifest: Mapping[str, Any]) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(json.dumps(dict(manifest)))
        return data
    except (TypeError, ValueError) as error:
        raise BadQuery(f"expected a manifest that JSON can represent: {error}") from error


def _check_manifest(folder: Path, content: dict[str, Any]) -> None:
    existing = read_manifest(folder).content
    for key in _EQUAL_ENTRIES:
        if existing.get(key) != content.get(key):
            raise BadFile(
                f"{str(folder)!r} is a recording of something else: expected {key!r} to be {existing.get(key)!r}, "
                f"got {content.get(key)!r}; record to another folder"
            )


def _check_histogram(folder: Path, totals: IndexTotals, empty_stats: Stats) -> None:
    for name, stats in totals.stats.items():
        if stats.new() != empty_stats:
            raise BadFile(
                f"{str(folder)!r} has another histogram of {name!r}: expected {stats.histogram or 'none'}, "
                f"got {empty_stats.histogram or 'none'}; use the same, or record to another folder"
            )
