"""Read a recording."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self

from microtome.addresses import Addresses
from microtome.capture.store.folder import read_manifest
from microtome.capture.store.index import IndexLine, IndexTotals, read_index, tensor_key
from microtome.capture.store.rows import RowId, RowRange, read_rows
from microtome.capture.store.series import Series, StoredTensor
from microtome.capture.store.shard import ShardReader
from microtome.capture.store.stats import Stats
from microtome.errors import BadFile, BadQuery, NoMatch
from microtome.files.reading import translate_read_errors
from microtome.files.tensors import CODE_DTYPES
from microtome.files.types import find_mismatch
from microtome.results.base import render
from microtome.units import plural, size


class Recording:
    """The tensors that a recorder wrote to a folder, by name, each read on access.

    It is a snapshot of the folder when it was opened; a recorder may continue to write.

    Attributes:
        manifest: The description of the recording: the model, the selectors, versions.
        rows: The rows of the data set that it is of; None: of none.
    """

    def __init__(
        self, folder: Path, manifest: dict[str, Any], lines: list[IndexLine], rows: RowRange | None = None
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.rows = rows
        self._totals = IndexTotals()
        files = [(line.file, line) for line in lines if line.file is not None]
        sums = {file: line.header_sum for file, line in files if line.header_sum is not None}
        self._shards = ShardReader(folder, {file: line.file_bytes for file, line in files}, sums)
        self._tensors: dict[str, list[StoredTensor]] = {}
        for line in lines:
            self._totals.add(line)
        for name in self._totals.stats:
            self._tensors[name] = []
        for line in lines:
            self._add(line)
        aliases = manifest.get("other_names") or {}
        if (mismatch := find_mismatch(aliases, dict[str, str])) is not None:
            raise ValueError(f"other_names{mismatch}")
        self._addresses = Addresses(self._tensors, aliases)

    def _add(self, line: IndexLine) -> None:
        for name, piece in line.pieces.items():
            tensors = self._tensors.get(name, [])  # all of an unknown name are of discarded runs
            for at, (shape, code) in enumerate(zip(piece.shapes, piece.dtypes, strict=True)):
                assert line.file is not None
                key = tensor_key(name, piece.first + at)
                checksum = piece.sums[at] if piece.sums else None
                run = piece.runs[at] if piece.runs else None
                if run in self._totals.discarded:
                    continue
                load = partial(self._shards.load, line.file, key, tuple(shape), CODE_DTYPES[code], checksum)
                tensors.append(StoredTensor(tuple(shape), CODE_DTYPES[code], load, run))

    @property
    def names(self) -> list[str]:
        return self._addresses.names

    @property
    def count(self) -> int:
        """The number of recorded tensors, written or not."""
        return self._totals.count

    @property
    def dropped(self) -> int:
        """The number of tensors not written because of the limit."""
        return self._totals.dropped

    @property
    def full(self) -> bool:
        """Whether the limit was reached, so that tensors were counted and not written."""
        return self._totals.full

    @property
    def nbytes(self) -> int:
        """The bytes of all written tensors."""
        return sum(tensor.nbytes for tensors in self._tensors.values() for tensor in tensors)

    def stats(self, name: str) -> Stats:
        """Return statistics of all tensors of a name, including those that were not written."""
        return self._totals.stats[self._resolve(name)]

    def __getitem__(self, name: str) -> Series:
        return self.series(self._resolve(name))

    def series(self, address: str) -> Series:
        """Return the tensors of a name as it is in the files."""
        if address not in self._tensors:
            raise self._missing_error(address)
        return Series(address, self._tensors[address])

    def ids(self, name: str) -> list[RowId]:
        """Return the id of each row of `recording[name].cat()`: of its batches along the first dimension, in order.

        Only a recording of a data set has ids, such as one that `microtome.scale.ray.record` wrote.
        """
        runs, by_run = self[name].runs, self._ids_by_run()
        if by_run is None:
            raise BadQuery(f"the recording {str(self.folder)!r} has no ids of rows: it is not of a data set")
        return [row for run in runs if run is not None for row in by_run[run]]

    def _ids_by_run(self) -> list[list[RowId]] | None:
        return None if self.rows is None else self.rows.of_runs()

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._addresses.matches(name))

    def close(self) -> None:
        """Prevent further reads; tensors that were read stay valid."""
        self._shards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        html: str = render("notebook.recording", self)
        return html

    def __repr__(self) -> str:
        tensors, dropped = sum(map(len, self._tensors.values())), f", {self.dropped} dropped" if self.dropped else ""
        counts = f"{plural(len(self), 'name')}, {plural(tensors, 'tensor')}"
        return f"<Recording {str(self.folder)!r}: {counts}, {size(self.nbytes)}{dropped}>"

    def _resolve(self, name: str) -> str:
        """Return the name in the files that a name means."""
        address = self._addresses.resolve(name)
        if address is None:
            raise self._missing_error(name)
        return address

    def _missing_error(self, name: str) -> NoMatch:
        near = difflib.get_close_matches(name, self.names, 5, 0.4) or self.names[:5]
        return NoMatch(
            f"the recording {str(self.folder)!r} has nothing named {name!r}; "
            f"the nearest of its {len(self)} names: {', '.join(map(repr, near)) or 'none'}"
        )


def open_folder(path: str | PathLike[str]) -> Recording:
    """Open a recording, which may still be written to."""
    folder = Path(path)
    if not folder.is_dir():
        raise BadFile(f"expected a recording in {str(folder)!r}, got none: it is not a folder")
    manifest = read_manifest(folder)
    lines, _ = read_index(folder, checked=manifest.checked)
    rows = read_rows(folder)
    with translate_read_errors(f"the recording in {str(folder)!r}"):
        return Recording(folder, manifest.content, lines, rows)
