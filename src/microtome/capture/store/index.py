"""The index of a recording: a line of JSON for each shard, which ends with its checksum."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from microtome.capture.store.shard import ShardSums
from microtome.capture.store.stats import Stats
from microtome.errors import BadFile
from microtome.files.reading import JSON_LIMIT, open_regular, parse_json, translate_read_errors
from microtome.files.tensors import CODE_DTYPES
from microtome.files.types import find_mismatch
from microtome.files.writing import write_buffers

INDEX = "index.jsonl"

#: The maximum length of a line: the objects of a longer one would take too much memory.
_LINE_BYTES = JSON_LIMIT // 8

_SUM, _SUM_END = b',"sum":"', b'"}'
_SUM_BYTES = len(_SUM) + 16 + len(_SUM_END)


@dataclass
class SeriesEntry:
    """The entry of one name in a line.

    Attributes:
        stats: Statistics of the tensors added since the line before, written or not.
        given: The number of these tensors.
        dropped: The number of them not written because of the limit.
        first: The number of the first tensor in the shard among those of its name.
        shapes: The shapes of the tensors in the shard.
        dtypes: Their dtypes, as in safetensors.
        sums: Their checksums; empty in a recording without.
        runs: The numbers of the runs that made them; empty in a recording without.
    """

    stats: Stats
    given: int = 0
    dropped: int = 0
    first: int = 0
    shapes: list[list[int]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    runs: list[int | None] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * CODE_DTYPES[dtype].itemsize for shape, dtype in pairs)

    def truncate(self, count: int) -> None:
        """Keep only the first tensors."""
        for entries in (self.shapes, self.dtypes, self.runs):
            del entries[count:]


@dataclass
class IndexLine:
    """A line of the index: a shard, or counts only if there is no file.

    Attributes:
        file: The name of the shard in the folder.
        file_bytes: Its length.
        full: Whether the limit had been reached.
        pieces: The entries, by name.
        ends_run: False if the shard ends inside a run of the model, which the next line continues.
        header_sum: The checksum of the shard's header; None in a recording without.
        discarded: The numbers of runs that did not end: their tensors, in this line or those before, do not count.
    """

    file: str | None
    file_bytes: int
    full: bool
    pieces: dict[str, SeriesEntry]
    ends_run: bool = True
    header_sum: str | None = None
    discarded: list[int] = field(default_factory=list)

    def add_sums(self, sums: ShardSums) -> None:
        """Add the checksums of a shard; drop a tensor without, whose addition a signal interrupted."""
        self.header_sum = sums.header
        for name, piece in self.pieces.items():
            keys = (tensor_key(name, piece.first + at) for at in range(len(piece.shapes)))
            piece.sums = [sums.tensors[key] for key in keys if key in sums.tensors]
            piece.truncate(len(piece.sums))

    def text(self) -> bytes:
        pieces = {name: vars(piece) | {"stats": piece.stats.as_dict()} for name, piece in self.pieces.items()}
        body = json.dumps(vars(self) | {"pieces": pieces}, separators=(",", ":")).encode()
        return body[:-1] + _SUM + xxh3_64_hexdigest(body).encode() + _SUM_END + b"\n"

    @classmethod
    def parse(cls, text: bytes, *, checked: bool = True) -> IndexLine:
        """Parse a line.

        Args:
            checked: Whether it must have a checksum.
        """
        data = parse_json(_verified(text) if checked or _has_sum(text) else text, "it", finite=False)
        pieces = {
            name: SeriesEntry(**(piece | {"stats": Stats.from_dict(piece["stats"])}))
            for name, piece in data["pieces"].items()
        }
        line = cls(**(data | {"pieces": pieces}))
        if (wrong := find_mismatch(line, cls, finite=False)) is not None:
            raise ValueError(wrong.removeprefix("."))
        line._check()
        return line

    def _check(self) -> None:
        if self.file is not None and not re.fullmatch(r"shard-[0-9]{5,}\.safetensors", self.file):
            raise ValueError(f"expected the name of a shard in the folder, got {self.file!r:.80}")
        for name, piece in self.pieces.items():
            numbers = [self.file_bytes, piece.given, piece.dropped, piece.first, piece.stats.count]
            if not all(0 <= number < 2**62 for number in chain(numbers, *piece.shapes)):
                raise ValueError(f"expected counts and sizes of {name!r:.80} from 0 to 2**62")
            if piece.stats.squares < 0:
                raise ValueError(f"expected squares of {name!r:.80} of at least 0, got {piece.stats.squares}")
            if not set(piece.dtypes) <= CODE_DTYPES.keys() or len(piece.shapes) != len(piece.dtypes):
                raise ValueError(f"expected a known dtype for each tensor of {name!r:.80}")
            if piece.sums and len(piece.sums) != len(piece.shapes):
                raise ValueError(f"expected {len(piece.shapes)} checksums, got {len(piece.sums)}")
            if piece.runs and len(piece.runs) != len(piece.shapes):
                raise ValueError(f"expected {len(piece.shapes)} numbers of runs, got {len(piece.runs)}")
            if piece.shapes and self.file is None:
                raise ValueError(f"expected a shard for the tensors of {name!r:.80}, got none")
        if (needed := sum(piece.nbytes for piece in self.pieces.values())) > self.file_bytes:
            raise ValueError(f"expected a shard of at least {needed} bytes, got {self.file_bytes}")


def tensor_key(name: str, number: int) -> str:
    """Return the key of a tensor in its shard."""
    return f"{name}:{number}"


def _has_sum(text: bytes) -> bool:
    return text[-_SUM_BYTES:].startswith(_SUM) and text.endswith(_SUM_END)


def _verified(text: bytes) -> bytes:
    """Verify the checksum of a line, and return the line without it."""
    if not _has_sum(text):
        raise ValueError("expected a checksum at its end")
    body, got = text[:-_SUM_BYTES] + b"}", text[-_SUM_BYTES + len(_SUM) : -len(_SUM_END)].decode(errors="replace")
    if got != (expected := xxh3_64_hexdigest(body)):
        raise ValueError(f"expected the checksum {expected}, got {got!r}")
    return body


@dataclass
class IndexTotals:
    """The totals of all lines read or written so far.

    Attributes:
        count: The number of tensors added.
        written: The number of them in shards.
        dropped: The number not written because of the limit.
        nbytes: The bytes of those in shards.
        shards: The number of shards.
        counts: The number of tensors in shards, by name.
        next_run: One above the largest number of a run.
        discarded: The numbers of runs that did not end.
    """

    count: int = 0
    written: int = 0
    dropped: int = 0
    nbytes: int = 0
    shards: int = 0
    full: bool = False
    next_run: int = 0
    discarded: set[int] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Stats] = field(default_factory=dict)

    def add(self, line: IndexLine) -> None:
        self.shards += line.file is not None
        self.full |= line.full
        self.discarded.update(line.discarded)
        self.next_run = max(self.next_run, *(run + 1 for run in line.discarded), 0)
        for name, piece in line.pieces.items():
            self.count += piece.given
            self.written += len(piece.shapes)
            self.dropped += piece.dropped
            self.nbytes += piece.nbytes
            self.next_run = max(self.next_run, *(run + 1 for run in piece.runs if run is not None), 0)
            self.counts[name] = self.counts.get(name, 0) + len(piece.shapes)
            if piece.given:  # else its tensors are of an open run, whose line follows, or of a discarded one
                self._merge_stats(name, piece.stats)

    def merge(self, other: IndexTotals) -> None:
        """Add the totals of a recording that continues this one: its runs are after those of this one."""
        self.discarded |= {self.next_run + run for run in other.discarded}
        for name in ("count", "written", "dropped", "nbytes", "shards", "next_run"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.full |= other.full
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for name, stats in other.stats.items():
            self._merge_stats(name, stats)

    def _merge_stats(self, name: str, stats: Stats) -> None:
        if name not in self.stats:
            self.stats[name] = stats.new()
        self.stats[name].merge(stats)


def read_index(folder: Path, *, checked: bool) -> tuple[list[IndexLine], int]:
    """Read the lines of all complete runs; return them and the offset at which the last of them ends.

    A killed process may have left an incomplete line after them, or lines of an incomplete run.

    Args:
        checked: Whether every line must have a checksum.
    """
    file = folder / INDEX
    if not os.path.lexists(file):
        return [], 0
    lines: list[IndexLine] = []
    ends = [0]
    with open_regular(file) as stream:
        while (text := stream.readline(_LINE_BYTES)).endswith(b"\n"):
            lines.append(_parse(file, len(lines) + 1, text[:-1], checked=checked))
            ends.append(ends[-1] + len(text))
    if text and _is_line(text[:-1]):  # a complete line with another character in place of the newline
        raise _damaged(file, len(lines) + 1, "expected a newline at its end")
    if len(text) == _LINE_BYTES:
        raise _damaged(file, len(lines) + 1, f"expected less than {_LINE_BYTES} bytes")
    while lines and not lines[-1].ends_run:
        lines.pop()
    return lines, ends[len(lines)]


def _parse(file: Path, number: int, text: bytes, *, checked: bool) -> IndexLine:
    try:
        with translate_read_errors("it"):
            return IndexLine.parse(text, checked=checked)
    except BadFile as error:
        raise _damaged(file, number, str(error)) from error


def _is_line(text: bytes) -> bool:
    try:
        with translate_read_errors("it"):
            IndexLine.parse(text)
    except BadFile:
        return False
    return True


def _damaged(file: Path, number: int, why: str) -> BadFile:
    return BadFile(
        f"line {number} of {str(file)!r} is not a valid line of an index: {why}; restore the file from a copy, or "
        f"remove the line, and with it the tensors of one shard, to read the rest"
    )


def append_lines(descriptor: int, lines: Sequence[IndexLine], *, sync: bool) -> None:
    """Append lines to the index; on an error it is unchanged."""
    end = os.fstat(descriptor).st_size
    try:
        write_buffers(descriptor, [b"".join(line.text() for line in lines)])
        if sync:
            os.fsync(descriptor)
    except BaseException:
        os.ftruncate(descriptor, end)
        raise
