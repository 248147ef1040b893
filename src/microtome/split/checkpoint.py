"""Save stages to a folder, and load one of them with its own weights only."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from microtome.engine.fingerprint import structure_of
from microtome.engine.module_state import replace_tensors, set_attribute, set_buffer
from microtome.engine.selectors import check_model, named_modules
from microtome.engine.torch_internals import own_buffers, own_parameters
from microtome.errors import BadFile, BadQuery, BadWeights, Unsupported, describe_error
from microtome.files.reading import File, translate_read_errors
from microtome.files.tensors import DTYPE_CODES, read_tensors, write_tensors
from microtome.files.types import to_plain
from microtome.files.writing import make_folder, translate_write_errors, write_atomically, write_buffers
from microtome.split.description import SplitDescription, restore_inputs
from microtome.split.saved_split import PLAN, SavedSplit, SavedStage, read_plan, stage_file
from microtome.split.stage import Stage
from microtome.split.variants import StageVariants, Variant
from microtome.split.weights import attribute_tensors, strip_weights, tensor_at
from microtome.units import count

_MANIFEST = "manifest.json"  # of a recording, which microtome.load could no longer find beside a plan

#: Before the name of a tensor that is a plain attribute of a module, neither parameter nor buffer.
_ATTRIBUTE = "attribute:"


# -- saving ------------------------------------------------------------------------------------------------------------


def save_stages(
    folder: File, stages: Sequence[Stage], descriptions: Sequence[SplitDescription], fingerprint: str
) -> None:
    """Write what `load_stage` reads; the first description is that of the stages."""
    path, first = Path(folder), descriptions[0]
    _check_replaceable(path, first.at, fingerprint)
    make_folder(path)
    with translate_write_errors(repr(str(path))):
        (path / PLAN).unlink(missing_ok=True)
        for old in path.iterdir():
            if re.fullmatch(r"stage[0-9]+\.safetensors", old.name):
                old.unlink()
        saved = SavedSplit(
            model=type(stages[0].model).__qualname__,
            at=first.at,
            fingerprint=fingerprint,
            torch=torch.__version__,
            inputs=first.inputs,
            more=first.locations,
            continues=first.continues,
            state=first.state,
            variants=tuple(descriptions[1:]),
            parameters=_count_parameters(stages[0].model),
            stages=tuple(_save_stage(path, stage) for stage in stages),
        )
        text = json.dumps(to_plain(saved), indent=1) + "\n"
        # Last, so that a folder with this file is complete.
        write_atomically(path / PLAN, lambda descriptor: write_buffers(descriptor, [text.encode()]))


def _check_replaceable(folder: Path, at: Sequence[str], fingerprint: str) -> None:
    """Raise if a folder holds anything but the same model, cut at the same calls, possibly with other weights."""
    if os.path.lexists(folder / _MANIFEST):
        raise BadFile(f"{str(folder)!r} already holds a recording, which has a {_MANIFEST}: save to another folder")
    if not (folder / PLAN).is_file() or (folder / PLAN).is_symlink():  # a link is replaced, and not followed
        return
    advice = "save to another folder, or remove it first"
    try:
        saved = read_plan(folder)
    except BadFile as error:
        raise BadFile(f"cannot save stages to {str(folder)!r}, which has another {PLAN}: {advice}") from error
    if (saved.at, structure_of(saved.fingerprint)) != (list(at), structure_of(fingerprint)):
        cuts = ", ".join(map(repr, saved.at))
        raise BadFile(f"{str(folder)!r} already holds another split, of {saved.model} at {cuts}: {advice}")


def _save_stage(folder: Path, stage: Stage) -> SavedStage:
    """Write the weights of a stage."""
    weights = {name: _weight(stage, name) for name in stage.parameters_needed()}
    weights |= {f"{_ATTRIBUTE}{name}": tensor for name, tensor in attribute_tensors(stage.model)}
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    for name, tensor in weights.items():
        if tensor.dtype not in DTYPE_CODES:
            raise Unsupported(f"cannot save {name!r}: safetensors files have no {tensor.dtype}")
    file = stage_file(stage.index)
    digest = write_tensors(folder / file, weights)
    return SavedStage(file, sorted(weights), sum(tensor.nbytes for tensor in weights.values()), digest)


def _weight(stage: Stage, name: str) -> Tensor:
    tensor = tensor_at(stage.model, name)
    assert tensor is not None
    if tensor.is_meta:
        raise Unsupported(
            f"the weight {name!r} of stage {stage.index} is not loaded: save stages that were split without `load`"
        )
    return tensor


# -- loading -----------------------------------------------------------------------------------------------------------


def load_stage(
    model: Callable[[], nn.Module], folder: File, index: int | str, *, device: str | torch.device | None = None
) -> Stage:
    """Load one stage of a split model, with only its own weights in memory.

    Args:
        model: Builds the model: a class, or a function without arguments. It is built on `meta` if possible.
        folder: The folder that `Stages.save` wrote.
        index: The number of the stage, or `"head"` for the first and `"tail"` for the last.
        device: The device of its weights.

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
        raise BadQuery("expected a class or function that builds the model without weights, got a model")
    if isinstance(model, str | Path) and (Path(model) / PLAN).is_file():
        raise BadQuery(
            f"expected a class or function that builds the model, then the folder, got folder {str(model)!r} first: "
            f"load_stage(Net, {str(model)!r}, 'tail')"
        )
    if not callable(model):
        name = model if isinstance(model, str) else "SOURCE:NAME"
        raise BadQuery(
            f"expected a class or function that builds the model, got {model!r:.80}: pass "
            f"lambda: microtome.zoo.resolve({name!r}).model"
        )
    saved = read_plan(Path(folder))
    count = len(saved.stages)
    number = {"head": 0, "tail": count - 1}.get(index) if isinstance(index, str) else index
    if not isinstance(number, int) or not -count <= number < count:
        raise BadFile(
            f"expected a stage in {str(folder)!r}: 'head', 'tail' or a number from 0 to {count - 1}, got {index!r}"
        )
    index = number % count
    weights = _read_weights(Path(folder) / stage_file(index), saved.stages[index], device or "cpu")
    built = _build(model, weights)
    if type(built).__qualname__ != saved.model:
        raise BadWeights(f"expected a {saved.model}, as in {str(folder)!r}, got a {type(built).__qualname__}")
    built.eval()
    for name, tensor in weights.items():
        _check_weight(built, name.removeprefix(_ATTRIBUTE), tensor)
    first = SplitDescription(saved.at, saved.inputs, saved.more, bool(saved.continues), state=saved.state)
    variants = [_split_again(built, saved, first, Path(folder) / PLAN, is_first=True)]
    for description in saved.variants:
        with suppress(Unsupported):  # steps that cannot be analyzed without weights, such as with a static cache
            variants.append(_split_again(built, saved, description, Path(folder) / PLAN))
    for name, tensor in weights.items():  # after splitting, which needs all weights on one device
        _set_weight(built, name.removeprefix(_ATTRIBUTE), tensor)
    stage = variants[0].stages[index]
    stage.variants = StageVariants(variants)
    return stage


def saved_cuts(folder: File) -> list[str]:
    """Return the addresses of the cuts between the stages in a folder."""
    return list(read_plan(Path(folder)).at)


def _split_again(
    model: nn.Module, saved: SavedSplit, description: SplitDescription, file: Path, *, is_first: bool = False
) -> Variant:
    """Split a model without weights as it was split before.

    Args:
        is_first: Whether the fingerprint is of a run on this example.
    """
    from microtome.split.splitter import Splitter  # it imports this module

    try:
        with translate_read_errors(repr(str(file))):
            example = restore_inputs(description.inputs, model)
        splitter = Splitter(model, example, saved.fingerprint, description.state)
        if is_first:
            _check_structure(model, splitter.structure, saved, file.parent)
        return splitter.load(description)
    except (BadFile, BadWeights):
        raise
    except Unsupported as error:  # the model cannot run without weights, or not on the example of the file
        raise Unsupported(f"cannot split the {saved.model} as {str(file)!r} describes: {error}") from error
    except Exception as error:  # from the model's code, which runs on the example of the file
        # A location of a call that this model does not make; errors of the model's code have notes.
        is_foreign = isinstance(error, IndexError | KeyError) and not hasattr(error, "__notes__")
        reason = "its calls are not those of the model that was saved" if is_foreign else describe_error(error)
        raise BadFile(f"{str(file)!r} does not fit this {saved.model}: {reason}") from error


def _check_structure(model: nn.Module, structure: str, saved: SavedSplit, folder: Path) -> None:
    """Raise if a model makes other calls, or has weights of other shapes, than the one that was saved."""
    if structure == structure_of(saved.fingerprint):
        return
    there = "" if saved.parameters is None else f"{count(saved.parameters)} parameters, "
    raise BadWeights(
        f"expected the {saved.model} that was saved in {str(folder)!r} ({there}structure "
        f"{structure_of(saved.fingerprint):.40}), got one of other layers or calls ({count(_count_parameters(model))} "
        f"parameters, structure {structure}): build the model that was saved, by the same code with the same "
        "arguments. It is loaded in eval mode"
    )


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _read_weights(file: Path, saved: SavedStage, device: str | torch.device) -> dict[str, Tensor]:
    weights, digest = read_tensors(file, device)
    if digest != saved.xxh3_128:
        raise BadFile(
            f"{str(file)!r} was changed since it was saved: expected checksum {saved.xxh3_128:.40}, got {digest}. Save "
            "the stages again, or copy the folder again"
        )
    if sorted(weights) != saved.weights:
        raise BadFile(f"{str(file)!r} does not hold the weights that {PLAN} lists: save the stages again")
    return weights


def _build(make: Callable[[], nn.Module], weights: dict[str, Tensor]) -> nn.Module:
    """Build the model on meta or, if its code needs values, build it whole and drop the weights."""
    try:
        with torch.device("meta"):
            model = check_model(make())
        saved = {name.removeprefix(_ATTRIBUTE) for name in weights}
        if all(name in saved or not tensor.is_meta for name, tensor in _hidden_tensors(model)):
            strip_weights(model)  # those that its code made on another device
            return model
    except (NotImplementedError, RuntimeError):  # it reads values while it is built
        pass
    model = check_model(make())
    strip_weights(model)
    return model


def _hidden_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors in attributes of modules, also in lists and tuples."""
    yield from attribute_tensors(model)
    for path, module in named_modules(model):
        for name, value in module.__dict__.items():
            if isinstance(value, list | tuple) and not name.startswith("_"):
                yield from ((f"{path}.{name}[]", item) for item in value if isinstance(item, Tensor))


def _check_weight(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Raise if a model has no tensor of this name, shape and dtype."""
    path, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        built = f"expected the {type(model).__name__} that was saved"
        raise BadWeights(f"{built}, got one without the module {path!r} of the folder") from error
    tensors = own_parameters(module) | own_buffers(module)
    if last not in tensors:
        if not isinstance(getattr(module, last, None), Tensor | None):
            got = type(getattr(module, last)).__name__
            raise BadWeights(f"{name!r}: expected a tensor, as in the folder, got a {got}")
        return
    old = tensors[last]
    if old is not None and is_lazy(old):
        return
    if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
        got = "nothing" if old is None else f"{tuple(old.shape)} {old.dtype}"
        raise BadWeights(f"{name!r}: expected {tuple(tensor.shape)} {tensor.dtype}, as in the folder, got {got}")


def _set_weight(model: nn.Module, name: str, tensor: Tensor) -> None:
    _check_weight(model, name, tensor)  # again: the model may have made it in its first run
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    if last in own_parameters(module):
        old = own_parameters(module)[last]
        parameter = nn.Parameter(tensor, requires_grad=old is not None and old.requires_grad)
        replace_tensors(model, lambda other: parameter if other is old else other)  # tied weights stay tied
    elif last in own_buffers(module):
        set_buffer(module, last, tensor)
    else:
        set_attribute(module, last, tensor)
