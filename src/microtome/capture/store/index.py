"""What a recording says of itself: a manifest, and an index with one line of JSON for each shard."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from microtome.capture.store.shard import DTYPES, write_all, write_whole
from microtome.capture.store.stats import Stats
from microtome.errors import BadFile

MANIFEST = "manifest.json"
INDEX = "index.jsonl"
KIND = "recording"
SCHEMA = 1


@dataclass
class Piece:
    """What one line says of one name.

    Attributes:
        stats: Of the tensors given since the line before, kept or not.
        given: How many these were.
        dropped: How many of them were not kept because of the limit.
        first: The number among its name's of the first tensor in the shard.
        shapes: Of the tensors in the shard.
        dtypes: Theirs, as safetensors calls them.
    """

    stats: Stats
    given: int = 0
    dropped: int = 0
    first: int = 0
    shapes: list[list[int]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype in pairs)


@dataclass
class Line:
    """A line of the index: a shard, or, with no file, only what was counted.

    Attributes:
        file: The shard's name in the folder.
        file_bytes: How long it is.
        full: Whether the limit had been reached.
        pieces: By name.
    """

    file: str | None
    file_bytes: int
    full: bool
    pieces: dict[str, Piece]

    def text(self) -> bytes:
        pieces = {name: vars(piece) | {"stats": piece.stats.as_dict()} for name, piece in self.pieces.items()}
        return json.dumps(vars(self) | {"pieces": pieces}, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def parse(cls, text: bytes) -> Line:
        data = json.loads(text)
        pieces = {
            name: Piece(**(piece | {"stats": Stats.from_dict(piece["stats"])}))
            for name, piece in data["pieces"].items()
        }
        line = cls(**(data | {"pieces": pieces}))
        line._check()
        return line

    def _check(self) -> None:
        if self.file is not None and Path(self.file).name != self.file:
            raise ValueError("its shard is not in the folder")
        for piece in self.pieces.values():
            if not set(piece.dtypes) <= DTYPES.keys() or len(piece.shapes) != len(piece.dtypes):
                raise ValueError("a tensor of no dtype that is known")
            if piece.shapes and self.file is None:
                raise ValueError("a tensor in no shard")


@dataclass
class Totals:
    """What the lines read or written so far add up to.

    Attributes:
        count: How many tensors were given.
        written: How many of them are in shards.
        dropped: How many were not kept because of the limit.
        nbytes: Of those in shards.
        shards: How many shards there are.
        kept: How many tensors of each name are in shards.
    """

    count: int = 0
    written: int = 0
    dropped: int = 0
    nbytes: int = 0
    shards: int = 0
    full: bool = False
    kept: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Stats] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        self.shards += line.file is not None
        self.full |= line.full
        for name, piece in line.pieces.items():
            self.count += piece.given
            self.written += len(piece.shapes)
            self.dropped += piece.dropped
            self.nbytes += piece.nbytes
            self.kept[name] = self.kept.get(name, 0) + len(piece.shapes)
            if name not in self.stats:
                self.stats[name] = piece.stats.new()
            self.stats[name].merge(piece.stats)


def read_index(folder: Path) -> tuple[list[Line], int]:
    """The lines, and where the last whole one ends: a process that was killed may have left part of one after it."""
    try:
        data = (folder / INDEX).read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise BadFile(f"cannot read {str(folder / INDEX)!r}: {error.strerror}") from error
    lines: list[Line] = []
    end = 0
    *texts, rest = data.split(b"\n")
    for number, text in enumerate(texts, 1):
        try:
            lines.append(Line.parse(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if number == len(texts) and not rest:
                break
            raise BadFile(f"line {number} of {str(folder / INDEX)!r} is not one of a recording's index") from error
        end += len(text) + 1
    return lines, end


def append_line(descriptor: int, line: Line, *, sync: bool) -> None:
    """Add a line at the end; on an error the index is as before."""
    end = os.fstat(descriptor).st_size
    try:
        write_all(descriptor, [line.text()])
        if sync:
            os.fsync(descriptor)
    except BaseException:
        os.ftruncate(descriptor, end)
        raise


def write_manifest(folder: Path, manifest: dict[str, Any], *, sync: bool) -> None:
    text = json.dumps({"kind": KIND, "schema": SCHEMA, "manifest": manifest}, indent=1) + "\n"
    write_whole(folder / MANIFEST, lambda descriptor: write_all(descriptor, [text.encode()]), sync=sync)


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise BadFile(f"{str(folder)!r} holds no recording: {MANIFEST}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{str(folder / MANIFEST)!r} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != KIND or not isinstance(data.get("manifest"), dict):
        raise BadFile(f"{str(folder)!r} holds no recording: its {MANIFEST} is of something else")
    if data.get("schema") != SCHEMA:
        raise BadFile(f"{str(folder)!r} is of version {data.get('schema')!r} of a recording; this one reads {SCHEMA}")
    manifest: dict[str, Any] = data["manifest"]
    return manifest
