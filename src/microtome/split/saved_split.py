"""The description of a saved split, in the `plan.json` of its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from microtome.errors import BadFile
from microtome.files.reading import read_json, translate_read_errors
from microtome.files.types import find_mismatch, from_plain
from microtome.split.description import SplitDescription

PLAN = "plan.json"
_SCHEMA = 2  # since calls are numbered by rank


class SavedStage(NamedTuple):
    """The weights of a stage: their file, names, total bytes, and the checksum of the file."""

    file: str
    weights: list[str]
    nbytes: int
    xxh3_128: str


class SavedSplit(NamedTuple):
    """The contents of `plan.json`.

    Attributes:
        model: The qualified name of the model's class.
        at: The addresses of the cuts.
        inputs: The example without values.
        more: The locations of the further values that cross each cut, from `Splitter.export_locations`. It keeps the
            name of the key in the file.
        continues: Whether the stages also compute the next steps of a sequence; None in older files.
        state: The names of the arguments that the user says are state.
        variants: The same cuts for inputs of other structures.
        parameters: The number of parameters of the whole model; None in older files.
    """

    model: str
    at: list[str]
    fingerprint: str
    torch: str
    inputs: dict[str, Any]
    more: list[list[list[Any]]]
    stages: tuple[SavedStage, ...]
    continues: bool | None = None
    state: tuple[str, ...] = ()
    variants: tuple[SplitDescription, ...] = ()
    parameters: int | None = None
    schema: int = _SCHEMA
    kind: str = "split"


def stage_file(index: int) -> str:
    """The name of the file with the weights of a stage."""
    return f"stage{index}.safetensors"


def read_plan(folder: Path) -> SavedSplit:
    """Read and check the description in a folder."""
    file = folder / PLAN
    if not os.path.lexists(file):
        raise BadFile(f"{str(folder)!r} holds no split model: {PLAN}: No such file or directory")
    plan = read_json(file)
    kind = plan.get("kind") if isinstance(plan, dict) else None
    if kind != "split":
        got = f"a file of kind {kind!r:.80}" if isinstance(kind, str) else "another file"
        writers = "Stages.save and microtome split write one"
        raise BadFile(f"{str(folder)!r} holds no split model: expected one in {PLAN}, got {got}; {writers}")
    if plan.get("schema") != _SCHEMA:
        got = f"got {plan.get('schema')!r:.80}"
        raise BadFile(f"{str(file)!r}: expected version {_SCHEMA} of a split model, {got}: save the stages again")
    with translate_read_errors(repr(str(file))):
        saved: SavedSplit = from_plain(plan, SavedSplit)
        if (mismatch := find_mismatch(saved, SavedSplit)) is not None:
            raise BadFile(f"{str(file)!r}{mismatch}")
        for index, stage in enumerate(saved.stages):
            if stage.file != stage_file(index):  # a path could lead out of the folder
                raise ValueError(f"expected the file {stage_file(index)!r} for stage {index}, got {stage.file!r:.80}")
        if len(saved.stages) != len(saved.at) + 1 or len(saved.more) != len(saved.at):
            raise ValueError(f"expected one stage more than cuts, got {len(saved.stages)} and {len(saved.at)}")
    return saved
