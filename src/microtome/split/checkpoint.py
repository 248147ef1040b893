"""Stages in a folder: the weights of each, and how they belong together."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from microtome.engine.module_state import replace_tensors, set_attribute, set_buffer
from microtome.engine.selectors import check_model, named_modules
from microtome.engine.torch_internals import own_buffers, own_parameters
from microtome.errors import BadFile, BadQuery, BadWeights, Unsupported, describe_error
from microtome.files.reading import File, read_json, translate_read_errors
from microtome.files.tensors import DTYPE_CODES, read_tensors, write_tensors
from microtome.files.types import find_mismatch
from microtome.files.writing import translate_write_errors, write_atomically, write_buffers
from microtome.inputs import Inputs
from microtome.split.stage import Stage
from microtome.split.weights import strip, tensor_at

_PLAN = "plan.json"
_SCHEMA = 2  # since calls are numbered by rank


@dataclass(frozen=True)
class _SavedStage:
    """A stage as described in a folder.

    Attributes:
        file: Its weights.
        weights: Their names.
        nbytes: Of the weights.
        xxh3_128: The checksum of the file.
    """

    file: str
    weights: list[str]
    nbytes: int
    xxh3_128: str


@dataclass(frozen=True)
class _SavedSplit:
    """A split model as described in a folder.

    Attributes:
        at: The addresses of the cuts.
        inputs: The example, described.
        more: What else crosses each cut, as `Splitter.stages` takes it.
    """

    model: str
    at: list[str]
    fingerprint: str
    torch: str
    inputs: dict[str, Any]
    more: list[list[list[Any]]]
    stages: list[_SavedStage]


def save_stages(
    folder: File, stages: Sequence[Stage], given: Inputs, at: Sequence[str], fingerprint: str, more: Any
) -> None:
    """Write what `load_stage` reads."""
    known: dict[int, int] = {}
    inputs = {
        "args": [_described(value, f"args[{at}]", known) for at, value in enumerate(given.args)],
        "kwargs": {name: _described(value, name, known) for name, value in given.kwargs.items()},
    }
    path = Path(folder)
    with translate_write_errors(repr(str(path))):
        path.mkdir(parents=True, exist_ok=True)
        (path / _PLAN).unlink(missing_ok=True)
        for old in path.iterdir():
            if re.fullmatch(r"stage[0-9]+\.safetensors", old.name):
                old.unlink()
        plan = {
            "kind": "split",
            "schema": _SCHEMA,
            "model": type(stages[0].model).__qualname__,
            "at": list(at),
            "fingerprint": fingerprint,
            "torch": torch.__version__,
            "inputs": inputs,
            "more": more,
            "stages": [_save_stage(path, stage) for stage in stages],
        }
        text = json.dumps(plan, indent=1) + "\n"
        # Last, so that a folder that has it is whole.
        write_atomically(path / _PLAN, lambda descriptor: write_buffers(descriptor, [text.encode()]))


def _save_stage(folder: Path, stage: Stage) -> dict[str, Any]:
    """Write the weights of a stage; returns what the plan says of them."""
    weights = {name: _plain(stage, name) for name in stage.parameters_needed()}
    weights |= {f"{_ATTRIBUTE}{name}": tensor.detach().cpu() for name, tensor in _attributes(stage.model)}
    for name, tensor in weights.items():
        if tensor.dtype not in DTYPE_CODES:
            raise Unsupported(f"{name!r} is of {tensor.dtype}, which safetensors files cannot hold")
    file = _file_of(stage.index)
    digest = write_tensors(folder / file, {name: tensor.contiguous() for name, tensor in weights.items()})
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    return {"file": file, "weights": sorted(weights), "nbytes": nbytes, "xxh3_128": digest}


def _file_of(index: int) -> str:
    return f"stage{index}.safetensors"


def load_stage(
    model: Callable[[], nn.Module], folder: File, index: int, *, device: str | torch.device | None = None
) -> Stage:
    """One stage of a split model, with its own weights alone in memory.

    Args:
        model: Makes the model: a class, or a function without arguments. It is built on `meta` where it allows that.
        folder: What `Stages.save` wrote.
        index: Which stage: 0 is the head, -1 the last.
        device: Where its weights are put.

    >>> import tempfile
    >>> from microtome import zoo
    >>> from microtome import split
    >>> model, x = zoo.build("tiny-resnet")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     split(model, x, at="layer1").save(folder)
    ...     tail = load_stage(lambda: zoo.build("tiny-resnet")[0], folder, 1)
    >>> tail
    <Stage 1 of ResNet, from 'layer1' to the output>
    """
    if isinstance(model, nn.Module):
        raise BadQuery("give what makes the model, such as its class or a lambda, so that it is built without weights")
    plan = _read_plan(Path(folder))
    count = len(plan.stages)
    if not isinstance(index, int) or not -count <= index < count:
        raise BadFile(f"{str(folder)!r} has the stages 0 to {count - 1}, not {index!r}")
    index %= count
    weights = _read_weights(Path(folder) / _file_of(index), plan.stages[index], device or "cpu")
    built = _built(model, weights)
    if type(built).__qualname__ != plan.model:
        raise BadWeights(f"the folder is of a {plan.model}, and a {type(built).__qualname__} was made")
    built.eval()
    stages = _split_again(built, plan, Path(folder) / _PLAN)
    for name, tensor in weights.items():  # after it was looked at, for which it must lie in one place
        _put(built, name.removeprefix(_ATTRIBUTE), tensor)
    return stages[index]


def _split_again(model: nn.Module, plan: _SavedSplit, file: Path) -> list[Stage]:
    """The stages of a model without weights, as the plan in a file says."""
    with translate_read_errors(repr(str(file))):
        made: list[Tensor] = []
        args = [_remade(value, made) for value in plan.inputs["args"]]
        given = Inputs(*args, **{name: _remade(value, made) for name, value in plan.inputs["kwargs"].items()})
    from microtome.split.splitter import load_stages  # it imports this module

    try:
        stages = load_stages(model, given, plan.at, plan.fingerprint, plan.more)
    except Unsupported:  # the model cannot be run without weights, whatever the file says
        raise
    except Exception as error:  # the model's own code runs, on an example that is described in the file
        raise BadFile(f"{str(file)!r} does not fit the {plan.model} that was made: {describe_error(error)}") from error
    return stages


def _read_weights(file: Path, saved: _SavedStage, device: str | torch.device) -> dict[str, Tensor]:
    weights, digest = read_tensors(file, device)
    if digest != saved.xxh3_128:
        raise BadFile(
            f"{str(file)!r} was changed since it was saved: expected checksum {saved.xxh3_128:.40}, got {digest}. Save "
            "the stages again, or copy the folder again"
        )
    if sorted(weights) != saved.weights:
        raise BadFile(f"{str(file)!r} does not hold the weights that {_PLAN} lists: save the stages again")
    return weights


_ATTRIBUTE = "attribute:"


def _plain(stage: Stage, name: str) -> Tensor:
    tensor = tensor_at(stage.model, name)
    assert tensor is not None
    if tensor.is_meta:
        raise Unsupported(f"the weights {name!r} of stage {stage.index} are not here: save before they are dropped")
    return tensor.detach().cpu()


def _attributes(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Tensors that modules keep as plain attributes, of which `state_dict` does not know."""
    return [
        (f"{path}.{name}" if path else name, value)
        for path, module in named_modules(model)
        for name, value in module.__dict__.items()
        if isinstance(value, Tensor)
    ]


def _read_plan(folder: Path) -> _SavedSplit:
    file = folder / _PLAN
    if not os.path.lexists(file):
        raise BadFile(f"{str(folder)!r} holds no split model: {_PLAN}: No such file or directory")
    plan = read_json(file)
    if not isinstance(plan, dict) or plan.get("kind") != "split" or plan.get("schema") != _SCHEMA:
        raise BadFile(f"{str(file)!r} is no plan of a split model that this microtome reads")
    with translate_read_errors(repr(str(file))):
        known = {field.name: plan[field.name] for field in fields(_SavedSplit)}
        saved = _SavedSplit(**known | {"stages": [_SavedStage(**stage) for stage in plan["stages"]]})
        if (wrong := find_mismatch(saved, _SavedSplit)) is not None:
            raise BadFile(f"{str(file)!r}{wrong}")
        for index, stage in enumerate(saved.stages):
            if stage.file != _file_of(index):  # a path would lead out of the folder
                raise ValueError(f"expected the file {_file_of(index)!r} for stage {index}, got {stage.file!r:.80}")
        if len(saved.stages) != len(saved.at) + 1 or len(saved.more) != len(saved.at):
            raise ValueError(f"expected one stage more than cuts, got {len(saved.stages)} and {len(saved.at)}")
    return saved


def _built(make: Callable[[], nn.Module], weights: dict[str, Tensor]) -> nn.Module:
    """The model without weights: on meta or, where its code cannot be run there, built and emptied."""
    try:
        with torch.device("meta"):
            model = check_model(make())
        known = {name.removeprefix(_ATTRIBUTE) for name in weights}
        lost = [name for name, tensor in _hidden_tensors(model) if tensor.is_meta and name not in known]
        if not lost:
            strip(model, ())  # what its code made elsewhere
            return model
    except (NotImplementedError, RuntimeError):  # it reads values while it is made
        pass
    model = check_model(make())
    strip(model, ())
    return model


def _hidden_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    found = _attributes(model)
    for path, module in named_modules(model):
        for name, value in module.__dict__.items():
            if isinstance(value, list | tuple) and not name.startswith("_"):
                found += [(f"{path}.{name}[]", item) for item in value if isinstance(item, Tensor)]
    return found


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise BadWeights(f"the model that was made has no module {path!r}: {describe_error(error)}") from error
    if last in own_parameters(module):
        held = own_parameters(module)[last]
        _check(name, held, tensor)
        parameter = nn.Parameter(tensor, requires_grad=held is not None and held.requires_grad)
        replace_tensors(model, lambda other: parameter if other is held else other)  # tied weights stay tied
    elif last in own_buffers(module):
        _check(name, own_buffers(module)[last], tensor)
        set_buffer(module, last, tensor)
    elif isinstance(getattr(module, last, None), Tensor | None):
        set_attribute(module, last, tensor)
    else:
        raise BadWeights(
            f"{name!r} is a tensor in the folder and a {type(getattr(module, last)).__name__} in the model"
        )


def _check(name: str, held: Tensor | None, tensor: Tensor) -> None:
    if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
        got = "nothing" if held is None else f"{tuple(held.shape)} {held.dtype}"
        raise BadWeights(f"{name!r} is {tuple(tensor.shape)} {tensor.dtype} in the folder and {got} in the model")


def _described(value: Any, place: str, known: dict[int, int]) -> Any:
    """A value as JSON; a tensor that is there again by how many different ones came before it."""
    if isinstance(value, Tensor):
        if id(value) in known:
            return {"repeats": known[id(value)]}
        known[id(value)] = len(known)
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, bool | int | float | str | None):
        return {"value": value}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_described(item, f"{place}[{at}]", known) for at, item in enumerate(value)]}
    if type(value) is dict:
        return {"dict": [[key, _described(item, f"{place}[{key!r}]", known)] for key, item in value.items()]}
    raise Unsupported(f"the example's {place} is a {type(value).__name__}, which a folder cannot describe")


def _remade(value: dict[str, Any], made: list[Tensor]) -> Any:
    if "repeats" in value:
        return made[value["repeats"]]
    if "shape" in value:
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch {torch.__version__} has no dtype {value['dtype']!r:.80}")
        made.append(torch.empty(value["shape"], dtype=dtype, device="meta"))
        return made[-1]
    if "value" in value:
        return value["value"]
    if "dict" in value:
        return {key: _remade(item, made) for key, item in value["dict"]}
    kind, items = next(iter(value.items()))
    return {"list": list, "tuple": tuple}[kind](_remade(item, made) for item in items)
