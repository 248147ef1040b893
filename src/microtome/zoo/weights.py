"""Weights from a file, all of them or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from microtome.errors import BadFile, BadWeights, Unsupported, describe_error
from microtome.files.tensors import read_tensors

_PICKLED = (".pt", ".pth")


def load_weights(model: nn.Module, file: str | Path, name: str, *, meta: bool) -> None:
    """Put the tensors of the file into the model; on meta, in the place of its tensors."""
    state = _read(Path(file))
    _share(model, state)
    _check(model, state, f"{file} does not fit {name}")
    model.load_state_dict(state, strict=True, assign=meta)
    left = [key for key, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if left:
        raise Unsupported(
            f"{_some(left)} of {name} would have no values: weights files do not hold them. Leave out meta"
        )


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix not in (".safetensors", *_PICKLED):
        raise BadWeights(f"expected a .safetensors, .pt or .pth file of weights, got {file}")
    if not file.is_file():
        raise BadWeights(f"there is no file {file}")
    if file.suffix in _PICKLED:
        return _read_pickled(file)
    try:
        return read_tensors(file)[0]
    except BadFile as error:
        raise BadWeights(f"{file} cannot be read: {describe_error(error)}") from error


def _read_pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a file of `torch.save`, read by torch's loader that runs no code."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises all kinds
        raise BadWeights(
            f"{file} cannot be read as tensors alone ({describe_error(error)}): where you trust it, "
            f"load it with torch and write torch.save(model.state_dict(), {str(file)!r})"
        ) from error
    if isinstance(state, Mapping) and all(isinstance(value, Tensor) for value in state.values()):
        return dict(state)
    held = f"a dict of {_some(map(repr, state))}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
    raise BadWeights(f"expected a dict of tensors in {file}, such as model.state_dict(), got {held}")


def _share(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give a tied parameter to all its names: files hold it under one of them, and it stays one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for same in names.values():
        held = next((state[name] for name in same if name in state), None)
        if len(same) > 1 and held is not None:
            tied = nn.Parameter(held, requires_grad=held.is_floating_point())
            state |= dict.fromkeys(same, tied)


def _check(model: nn.Module, state: dict[str, Tensor], what: str) -> None:
    wanted = model.state_dict()
    missing = [key for key in wanted if key not in state]
    foreign = [key for key in state if key not in wanted]
    differ = [
        f"{key} ({_shape(state[key])} in the file, {_shape(wanted[key])} in the model)"
        for key in wanted
        if key in state and isinstance(wanted[key], Tensor) and state[key].shape != wanted[key].shape
    ]
    said = [(missing, "not in the file"), (foreign, "not in the model"), (differ, "of another shape")]
    faults = [f"{len(keys)} {fault}: {_some(keys)}" for keys, fault in said if keys]
    if faults:
        raise BadWeights(f"{what}: {'; '.join(faults)}")


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (", …" if len(listed) > most else "")


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"
