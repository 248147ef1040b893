"""Load a model's weights from a file, all of them or none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from microtome.errors import BadFile, BadWeights, Unsupported, describe_error
from microtome.files.tensors import read_tensors
from microtome.units import shape, some

#: Keys under which checkpoints of training hold the weights.
_STATE_KEYS = ("state_dict", "model_state_dict", "model")
#: A colour code of a terminal in a message of torch, as `describe_error` sanitizes it.
_COLOUR = re.compile("\N{REPLACEMENT CHARACTER}\\[[0-9;]*m")
_PICKLE_SUFFIXES = (".pt", ".pth")
#: The most tensors that an error names.
_NAMES = 3


def load_weights(model: nn.Module, file: str | Path, name: str, *, meta: bool) -> None:
    """Load the tensors of a file into a model; on meta, they replace its tensors."""
    state = _read(Path(file))
    _tie(model, state)
    _check(model, state, f"{file} does not fit {name}")
    model.load_state_dict(state, strict=True, assign=meta)
    left = [key for key, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if left:
        raise Unsupported(
            f"{some(left, _NAMES)} of {name} would have no values: a state_dict omits them. Leave out meta"
        )


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix not in (".safetensors", *_PICKLE_SUFFIXES):
        raise BadWeights(f"expected a .safetensors, .pt or .pth file of weights, got {file}")
    if not file.is_file():
        raise BadWeights(f"there is no file {file}")
    if file.suffix in _PICKLE_SUFFIXES:
        return _read_pickle(file)
    try:
        return read_tensors(file)[0]
    except BadFile as error:
        raise BadWeights(f"{file} cannot be read: {describe_error(error)}") from error


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """Read a file that `torch.save` wrote, without running code in it."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises all kinds
        reason = _COLOUR.sub("", describe_error(error))
        other = file.with_stem(f"{file.stem}-weights")
        raise BadWeights(
            f"{file} cannot be read with weights_only=True ({reason}): if you trust it, load it with torch and write "
            f"torch.save(model.state_dict(), {str(other)!r})"
        ) from error
    if _is_state(state):
        return dict(state)
    inner = next((state[key] for key in _STATE_KEYS if state.get(key)), None) if isinstance(state, Mapping) else None
    if _is_state(inner):
        return dict(inner)
    got = (
        f"a dict of {some([*map(repr, state)], _NAMES)}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
    )
    raise BadWeights(f"expected a dict of tensors in {file}, such as model.state_dict(), got {got}")


def _is_state(value: Any) -> TypeGuard[Mapping[str, Tensor]]:
    return isinstance(value, Mapping) and all(isinstance(tensor, Tensor) for tensor in value.values())


def _tie(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Add a tied parameter to the state under all its names: a file may have it under only one of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for aliases in names.values():
        value = next((state[name] for name in aliases if name in state), None)
        if len(aliases) > 1 and value is not None:
            state |= dict.fromkeys(aliases, nn.Parameter(value, requires_grad=value.is_floating_point()))


def _check(model: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
    expected = model.state_dict()
    mismatched = [
        f"{key} ({shape(state[key].shape)} in the file, {shape(expected[key].shape)} in the model)"
        for key in expected
        if key in state and isinstance(expected[key], Tensor) and state[key].shape != expected[key].shape
    ]
    faults = {
        "not in the file": [key for key in expected if key not in state],
        "not in the model": [key for key in state if key not in expected],
        "of another shape": mismatched,
    }
    found = [f"{len(keys)} {fault}: {some(keys, _NAMES)}" for fault, keys in faults.items() if keys]
    if found:
        raise BadWeights(f"{prefix}: {'; '.join(found)}")
