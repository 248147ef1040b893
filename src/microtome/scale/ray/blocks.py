"""Divide the rows of a data set into parts of whole batches, wherever its blocks end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from microtome.scale.ray.columns import Batch


@dataclass(frozen=True)
class RowSlice:
    """Rows of a block, from `start` to before `stop`.

    Attributes:
        block: A reference to the block.
    """

    block: Any
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass
class DatasetPart:
    """Consecutive rows, which one task records.

    Attributes:
        number: Its number among the parts.
        first: The position of its first row in the data set.
    """

    number: int
    first: int
    slices: list[RowSlice] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.slices))


def divide(slices: Iterable[RowSlice], rows: int) -> Iterator[DatasetPart]:
    """Yield parts of so many rows, the last of which may have less.

    >>> [(part.first, len(part.slices), len(part)) for part in divide([RowSlice("a", 0, 5), RowSlice("b", 2, 4)], 3)]
    [(0, 1, 3), (3, 2, 3), (6, 1, 1)]
    """
    part = DatasetPart(0, 0)
    for row_slice in slices:
        start = row_slice.start
        while start < row_slice.stop:
            stop = min(row_slice.stop, start + rows - len(part))
            part.slices.append(RowSlice(row_slice.block, start, stop))
            start = stop
            if len(part) == rows:
                yield part
                part = DatasetPart(part.number + 1, part.first + rows)
    if part.slices:
        yield part


def row_slices(dataset: Any) -> Iterator[RowSlice]:
    """Execute a data set and yield its blocks in order, as they are computed."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        for bundle in dataset.iter_internal_ref_bundles():
            slices = getattr(bundle, "slices", None) or [None] * len(bundle.block_refs)
            for block, metadata, one in zip(bundle.block_refs, bundle.metadata, slices, strict=True):
                start, stop = (0, metadata.num_rows) if one is None else (one.start_offset, one.end_offset)
                yield RowSlice(block, start, stop)
    finally:
        options.preserve_order = before


def read_rows(blocks: Iterable[Any], ranges: Iterable[tuple[int, int]], columns: list[str] | None) -> Batch:
    """Return rows of several blocks as arrays, by the name of the column."""
    from ray.data.block import BlockAccessor

    tables = []
    for block, (start, stop) in zip(blocks, ranges, strict=True):
        rows = BlockAccessor.for_block(BlockAccessor.for_block(block).slice(start, stop))
        tables.append(rows.to_numpy(rows.column_names() if columns is None else columns))
    return {name: _join([table[name] for table in tables]) for name in tables[0]}


def _join(arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def split_batches(rows: Batch, size: int) -> Iterator[Batch]:
    """Yield batches of so many rows; the last may have less."""
    count = len(next(iter(rows.values())))
    for start in range(0, count, size):
        yield {name: values[start : start + size] for name, values in rows.items()}
