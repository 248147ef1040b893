"""Checkpoints of one side of a training run, as safetensors files that are written atomically."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from microtome.errors import BadFile, BadQuery, Unsupported, describe_error, describe_value
from microtome.files.reading import File, translate_read_errors
from microtome.files.tensors import read_metadata, read_tensors, write_tensors
from microtome.files.writing import make_folder, translate_write_errors
from microtome.units import plural

_NAME = re.compile(r"step-([0-9]{8,})\.safetensors")
#: How many checkpoints are kept: a side may be one behind the other.
_KEEP = 2
_WEIGHT, _STATE = "weight:", "state:"


class SavedRun(NamedTuple):
    """The training run and the stage that a checkpoint belongs to.

    Attributes:
        run: The id of the training run.
        fingerprint: The fingerprint of the model before its first step.
        at: The cut.
        side: The index of the stage.
    """

    run: str
    fingerprint: str
    at: str
    side: int


class Checkpoints:
    """The checkpoints in a folder, by the number of whole steps before each."""

    def __init__(self, folder: File) -> None:
        if not isinstance(folder, str | PathLike):
            raise BadQuery(f"expected checkpoint as the name of a folder, got {describe_value(folder)}")
        self.folder = Path(folder)
        make_folder(self.folder)

    def steps(self) -> list[int]:
        """The numbers of whole steps of all checkpoints, in order."""
        found = (_NAME.fullmatch(file.name) for file in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match is not None)

    def read_run(self) -> SavedRun | None:
        """The run that the last checkpoint belongs to; None: there is none.

        Raises:
            BadFile: It cannot be read.
        """
        steps = self.steps()
        return self._read_details(steps[-1])[0] if steps else None

    def save(self, step: int, run: SavedRun, weights: Mapping[str, Tensor], optimizer: Optimizer | None) -> None:
        """Write a checkpoint, and delete old ones."""
        state, tensors = _describe_optimizer(optimizer)
        tensors |= {_WEIGHT + name: weight for name, weight in weights.items()}
        values = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        details = {"run": json.dumps(run._asdict()), "step": str(step), "optimizer": json.dumps(state)}
        with translate_write_errors(repr(str(self.folder))):
            write_tensors(self._file(step), values, details, sync=True)
            for old in self.steps()[:-_KEEP]:
                self._file(old).unlink(missing_ok=True)

    def load(self, step: int, run: SavedRun, weights: Mapping[str, Tensor], optimizer: Optimizer | None) -> None:
        """Set weights and the optimizer to those of a checkpoint.

        Raises:
            BadFile: It cannot be read, is of another run, or has other weights.
        """
        file = self._file(step)
        saved, state = self._read_details(step)
        if saved != run:
            raise BadFile(f"expected a checkpoint of {run}, got one of {saved} in {str(file)!r}")
        with translate_read_errors(f"the checkpoint {str(file)!r}"):
            tensors, _ = read_tensors(file)
        values = {name.removeprefix(_WEIGHT): one for name, one in tensors.items() if name.startswith(_WEIGHT)}
        expected = {name: (weight.shape, weight.dtype) for name, weight in weights.items()}
        if (got := {name: (value.shape, value.dtype) for name, value in values.items()}) != expected:
            different = next(name for name in {**expected, **got} if expected.get(name) != got.get(name))
            raise BadFile(f"{str(file)!r} does not fit the model: {different!r} differs, or is in one of them alone")
        if optimizer is not None:  # first: it refuses what does not fit, and the weights are then as they were
            with translate_read_errors(f"the checkpoint {str(file)!r}"):
                _restore_optimizer(optimizer, state, tensors, str(file))
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(values[name])

    def delete_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, from which this run does not go on."""
        with translate_write_errors(repr(str(self.folder))):
            for later in (one for one in self.steps() if one > step):
                self._file(later).unlink(missing_ok=True)

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step:08}.safetensors"

    def _read_details(self, step: int) -> tuple[SavedRun, dict[str, Any]]:
        file = self._file(step)
        with translate_read_errors(f"the checkpoint {str(file)!r}"):
            details = read_metadata(file)
            return SavedRun(**json.loads(details["run"])), json.loads(details["optimizer"])


def _describe_optimizer(optimizer: Optimizer | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state of an optimizer as JSON and tensors.

    Raises:
        Unsupported: It has other values.
    """
    if optimizer is None:
        return {}, {}
    described = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, own in described["state"].items():
        tensors |= {f"{_STATE}{index}.{key}": value for key, value in own.items() if isinstance(value, Tensor)}
        numbers[str(index)] = {key: value for key, value in own.items() if not isinstance(value, Tensor)}
    state = {"kind": type(optimizer).__name__, "numbers": numbers, "groups": described["param_groups"]}
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise Unsupported(
            f"the state of {type(optimizer).__name__} has more than tensors and numbers, and cannot be saved: "
            f"{describe_error(error)}"
        ) from error
    return state, tensors


def _restore_optimizer(optimizer: Optimizer, state: dict[str, Any], tensors: dict[str, Tensor], file: str) -> None:
    name = type(optimizer).__name__
    if state.get("kind") != name:
        raise BadFile(f"expected the state of {name} in {file!r}, got that of {state.get('kind') or 'no optimizer'}")
    if len(state["groups"]) != len(optimizer.param_groups):
        raise BadFile(
            f"expected {plural(len(optimizer.param_groups), 'group')} of parameters of {name} in {file!r}, got "
            f"{len(state['groups'])}"
        )
    restored: dict[int, dict[str, Any]] = {int(index): dict(own) for index, own in state["numbers"].items()}
    for key, tensor in tensors.items():
        if key.startswith(_STATE):
            index, _, field = key.removeprefix(_STATE).partition(".")
            restored[int(index)][field] = tensor
    groups = [
        {key: tuple(value) if isinstance(old.get(key), tuple) else value for key, value in group.items()}
        for group, old in zip(state["groups"], optimizer.param_groups, strict=True)
    ]
    try:
        optimizer.load_state_dict({"state": restored, "param_groups": groups})
    except ValueError as error:
        raise BadFile(f"the state of {name} in {file!r} does not fit: {describe_error(error)}") from error
