"""The folder of a recording: its manifest, its lock, and how a recording is created or resumed in it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_hexdigest

from microtome.capture.store.index import INDEX, IndexTotals, read_index
from microtome.capture.store.stats import Stats
from microtome.errors import BadFile, BadQuery
from microtome.files.locking import lock_exclusively, unlock
from microtome.files.reading import read_json, translate_read_errors
from microtome.files.writing import open_for_writing, write_atomically, write_buffers

#: The entries of a manifest that must be equal to append to a recording.
EQUAL_ENTRIES = ("model", "layout", "selectors", "reduce")

LOCK = ".lock"
MANIFEST = "manifest.json"
KIND = "recording"
SCHEMA = 2

#: The version without checksums, which can still be read and appended to.
_UNCHECKED = 1


class FolderLock:
    """An exclusive lock of a folder, from its creation until `release` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = open_for_writing(folder / LOCK, os.O_RDWR)
        try:
            lock_exclusively(self._descriptor)
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.write(self._descriptor, str(os.getpid()).encode())
        except BlockingIOError as error:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            owner = os.read(self._descriptor, 32).decode(errors="replace") or "unknown"
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
            unlock(self._descriptor)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def claim(folder: Path) -> FolderLock:
    """Lock a folder that is empty or holds a recording; write nothing to any other."""
    if folder.exists() and not folder.is_dir():
        raise BadFile(f"expected a folder to record to, got the file {str(folder)!r}: record to another name")
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
    for key in EQUAL_ENTRIES:
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


class Manifest(NamedTuple):
    """The manifest of a recording.

    Attributes:
        content: The description of the recording.
        checked: Whether every line of its index has a checksum.
    """

    content: dict[str, Any]
    checked: bool


def write_manifest(folder: Path, manifest: dict[str, Any], *, sync: bool) -> None:
    data = {"kind": KIND, "schema": SCHEMA, "manifest": manifest, "sum": _manifest_sum(manifest)}
    text = json.dumps(data, indent=1) + "\n"
    write_atomically(folder / MANIFEST, lambda descriptor: write_buffers(descriptor, [text.encode()]), sync=sync)


def read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    if not file.exists():
        raise BadFile(f"expected a recording in {str(folder)!r}, got none: {MANIFEST}: No such file or directory")
    data = read_json(file)
    if not isinstance(data, dict) or data.get("kind") != KIND or not isinstance(data.get("manifest"), dict):
        raise BadFile(f"expected a recording in {str(folder)!r}, got none: its {MANIFEST} describes something else")
    if data.get("schema") not in (SCHEMA, _UNCHECKED):
        raise BadFile(
            f"{str(file)!r}: expected version {_UNCHECKED} to {SCHEMA} of a recording, got {data.get('schema')!r}"
        )
    checked = data["schema"] != _UNCHECKED
    if checked and data.get("sum") != (expected := _manifest_sum(data["manifest"])):
        raise BadFile(
            f"{str(file)!r} is corrupt: expected the checksum {expected}, got {data.get('sum')!r}; "
            f"restore it from a copy"
        )
    return Manifest(data["manifest"], checked)


def _manifest_sum(manifest: dict[str, Any]) -> str:
    return xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())
