"""Read several recordings as one."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from microtome.addresses import Addresses
from microtome.capture.store.folder import EQUAL_ENTRIES
from microtome.capture.store.index import IndexTotals
from microtome.capture.store.parts import read_parts
from microtome.capture.store.recording import Recording, open_folder
from microtome.capture.store.rows import RowId
from microtome.errors import BadFile, BadQuery
from microtome.units import plural, size


class MergedRecording(Recording):
    """Several recordings of one model as one, read only.

    The series of a name are those of the recordings, one after the other. Numbers of runs continue from one recording
    to the next, so that tensors of one run still have the same. Counts, statistics and histograms, also of tensors that
    were not written, are those of one recording of the same tensors, to the last bit: sums are kept without rounding
    (see `Stats`).

    Attributes:
        folder: That of the first recording, or the one whose parts they are.
        manifest: That of the first recording.
        recordings: The recordings, in order.

    Raises:
        BadFile: The recordings are of different models, weights, selectors, reductions, histograms or dtypes.
    """

    def __init__(self, folder: Path, recordings: Sequence[Recording]) -> None:
        for other in recordings[1:]:
            _check_same(recordings[0], other)
        self.folder = folder
        self.manifest = recordings[0].manifest
        self.rows = None
        self.recordings = tuple(recordings)
        self._totals = IndexTotals()
        self._tensors = {}
        for recording in recordings:
            self._append(recording)
        self._addresses = Addresses(self._tensors, self.manifest.get("other_names") or {})

    def _append(self, recording: Recording) -> None:
        first_run = self._totals.next_run
        for name, tensors in recording._tensors.items():
            ours = self._tensors.setdefault(name, [])
            if ours and tensors and ours[0].dtype != tensors[0].dtype:
                expected, got = ours[0].dtype, tensors[0].dtype
                raise _differs(recording, f"the dtype of {name!r}", expected, got)
            ours += [one if one.run is None else one._replace(run=first_run + one.run) for one in tensors]
        for name, stats in recording._totals.stats.items():
            empty = self._totals.stats.setdefault(name, stats.new()).new()
            if empty != stats.new():
                raise _differs(recording, f"the histogram of {name!r}", empty.histogram, stats.histogram)
        self._totals.merge(recording._totals)

    def _ids_by_run(self) -> list[list[RowId]] | None:
        """Return the ids of the rows of each run; None if a recording has none."""
        ids: list[list[RowId]] = []
        for recording in self.recordings:
            of_runs = recording._ids_by_run()
            if of_runs is None:
                return None
            ids += of_runs[: recording._totals.next_run]
        return ids

    def close(self) -> None:
        for recording in self.recordings:
            recording.close()

    def __repr__(self) -> str:
        counts = f"{plural(len(self), 'name')}, {plural(self._totals.written, 'tensor')}, {size(self.nbytes)}"
        return f"<{plural(len(self.recordings), 'recording')} from {str(self.folder)!r}: {counts}>"


def open_recordings(folders: Sequence[str | PathLike[str]]) -> Recording:
    """Open recordings, in parts or not, as one."""
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise BadQuery("expected at least one recording to load, got an empty list")
    parts = [part for path in paths for part in read_parts(path)]
    seen: set[Path] = set()
    for part in parts:
        if part.resolve() in seen:
            raise BadQuery(f"expected different recordings, got {str(part)!r} twice")
        seen.add(part.resolve())
    recordings = [open_folder(part) for part in parts]
    if len(recordings) == 1 and parts == paths:
        return recordings[0]
    return MergedRecording(paths[0], recordings)


def _check_same(first: Recording, other: Recording) -> None:
    for entry in EQUAL_ENTRIES:
        if first.manifest.get(entry) != other.manifest.get(entry):
            raise _differs(other, repr(entry), first.manifest.get(entry), other.manifest.get(entry))
    weights = [recording.rows.weights for recording in (first, other) if recording.rows is not None]
    if len(set(weights)) > 1:
        raise _differs(other, "the fingerprint of the weights", *weights)


def _differs(recording: Recording, what: str, expected: object, got: object) -> BadFile:
    return BadFile(
        f"{str(recording.folder)!r} is a recording of something else: expected {what} to be {expected or 'none'!r}, "
        f"got {got or 'none'!r}; load recordings of one model and the same options together"
    )
