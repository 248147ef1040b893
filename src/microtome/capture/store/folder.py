"""Beginning or resuming a recording in a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from microtome.capture.store.index import INDEX, MANIFEST, IndexTotals, read_index, read_manifest, write_manifest
from microtome.capture.store.lock import LOCK, FolderLock
from microtome.capture.store.stats import Stats
from microtome.errors import BadFile, BadQuery
from microtome.files.reading import damage
from microtome.files.writing import open_own

#: What of a manifest must be the same to append to a recording.
_SAME = ("model", "layout", "selectors", "reduce")


def claim(folder: Path) -> FolderLock:
    """The lock of a folder that is empty or holds a recording; nothing is written to any other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {file.name for file in folder.iterdir()}
        others = sorted(name for name in names if name != LOCK and not _is_partial(name))
        if MANIFEST in others:
            read_manifest(folder)
        elif others:
            raise BadFile(
                f"{str(folder)!r} is not empty and holds no recording: it has {others[0]!r}; give an empty or a new one"
            )
        return FolderLock(folder)
    except OSError as error:
        raise refusal(folder, error) from error


def _is_partial(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def refusal(folder: Path, error: OSError) -> BadFile:
    return BadFile(f"cannot record to {str(folder)!r}: {error.strerror}")


def begin(
    folder: Path, manifest: Mapping[str, Any], no_stats: Stats, *, append: bool, keep: str, sync: bool
) -> IndexTotals:
    """What the folder holds so far; a manifest is written where there is none."""
    mine = _as_json(manifest)
    totals = IndexTotals()
    if not (folder / MANIFEST).exists():
        write_manifest(folder, mine, sync=sync)
        return totals
    lines, end = read_index(folder, checked=read_manifest(folder).checked)
    with damage(repr(str(folder / INDEX))):
        for line in lines:
            totals.add(line)
    if not append and not totals.count:  # one that ended before anything was recorded
        write_manifest(folder, mine, sync=sync)
        return totals
    if not append:
        raise BadFile(
            f"{str(folder)!r} already holds a recording of {totals.count} records; "
            f"append=True goes on with it, or record to another folder"
        )
    _check_same(folder, mine)
    _check_histogram(folder, totals, no_stats)
    if totals.full and keep == "all":
        raise BadFile(
            f"the recording in {str(folder)!r} reached its limit: {totals.dropped} of its {totals.count} records were "
            f"not kept, and what is added now would not line up with the rest; record to another folder, or go on with "
            f"the statistics alone: keep='stats'"
        )
    _cut_off(folder / INDEX, end)
    return totals


def _cut_off(index: Path, end: int) -> None:
    """Remove what a process that was killed left after the last whole run."""
    descriptor = open_own(index, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, end)
    finally:
        os.close(descriptor)


def _as_json(manifest: Mapping[str, Any]) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(json.dumps(dict(manifest)))
        return data
    except (TypeError, ValueError) as error:
        raise BadQuery(f"a manifest is what JSON can hold: {error}") from error


def _check_same(folder: Path, mine: dict[str, Any]) -> None:
    found = read_manifest(folder).content
    for key in _SAME:
        if found.get(key) != mine.get(key):
            raise BadFile(
                f"{str(folder)!r} is a recording of something else: its {key!r} is {found.get(key)!r}, "
                f"and here it is {mine.get(key)!r}; record to another folder"
            )


def _check_histogram(folder: Path, totals: IndexTotals, no_stats: Stats) -> None:
    for name, stats in totals.stats.items():
        if stats.new() != no_stats:
            raise BadFile(
                f"{str(folder)!r} was recorded with another histogram of {name!r}: {_edges(stats)}, "
                f"and here {_edges(no_stats)}; ask for the same, or record to another folder"
            )


def _edges(stats: Stats) -> str:
    histogram = stats.histogram
    return "none" if histogram is None else f"{histogram.bins} bins from {histogram.low} to {histogram.high}"
