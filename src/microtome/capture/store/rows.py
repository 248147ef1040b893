"""The rows of the data set that a recording covers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from microtome.errors import BadFile
from microtome.files.reading import read_json, translate_read_errors
from microtome.files.types import find_mismatch, from_plain
from microtome.files.writing import write_atomically, write_buffers

ROWS = "rows.json"
KIND = "rows of a recording"
SCHEMA = 1

#: The id of a row: its value in a column, or its position in the data set.
RowId = int | float | str


@dataclass(frozen=True)
class RowRange:
    """The consecutive rows of a data set that a recording is of, one batch a run.

    Attributes:
        first: The position of the first row in the data set.
        sizes: The number of rows of each run.
        weights: The fingerprint of the model's weights.
        ids: The id of each row; None: its position.
    """

    first: int
    sizes: tuple[int, ...]
    weights: str
    ids: tuple[RowId, ...] | None = None

    def of_runs(self) -> list[list[RowId]]:
        """Return the ids of the rows of each run.

        >>> RowRange(4, (2, 1), "").of_runs()
        [[4, 5], [6]]
        """
        count = sum(self.sizes)
        ids = range(self.first, self.first + count) if self.ids is None else self.ids
        return [list(ids[begin:end]) for begin, end in pairwise(accumulate(self.sizes, initial=0))]

    def write(self, folder: Path) -> None:
        """Write the file of the rows in the folder of a recording."""
        content = asdict(self)
        data = {"kind": KIND, "schema": SCHEMA, "rows": content, "sum": _sum(content)}
        text = json.dumps(data).encode() + b"\n"
        write_atomically(folder / ROWS, lambda descriptor: write_buffers(descriptor, [text]))

    def check(self) -> None:
        """Raise ValueError if there is not one id for each row."""
        if self.first < 0 or min(self.sizes, default=0) < 0:
            raise ValueError("expected a first row and sizes of at least 0")
        if self.ids is not None and len(self.ids) != sum(self.sizes):
            raise ValueError(f"expected {sum(self.sizes)} ids, got {len(self.ids)}")


def read_rows(folder: Path) -> RowRange | None:
    """Read the rows of the recording in a folder; None if it is of no data set."""
    file = folder / ROWS
    if not file.exists():
        return None
    data = read_json(file)
    with translate_read_errors(repr(str(file))):
        if data["kind"] != KIND or data["schema"] != SCHEMA:
            raise BadFile(f"{str(file)!r}: expected version {SCHEMA} of {KIND}, got {data['schema']!r:.80}")
        if data["sum"] != (expected := _sum(data["rows"])):
            raise BadFile(f"{str(file)!r} is corrupt: expected the checksum {expected}, got {data['sum']!r:.80}")
        rows: RowRange = from_plain(data["rows"], RowRange)
        if (mismatch := find_mismatch(rows, RowRange, finite=False)) is not None:
            raise ValueError(mismatch.removeprefix("."))
        rows.check()
    return rows


def _sum(content: dict[str, object]) -> str:
    return xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
