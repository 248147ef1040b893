"""Changing what flows through a model, on purpose, for the time of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from microtome.capture.features import Features
from microtome.engine import Call, Feed, Replace, Selector, Session
from microtome.engine.select import check_model
from microtome.engine.structure import map_tensors, tensors_in
from microtome.errors import BadQuery, NoMatch, Unsupported
from microtome.inputs import Inputs


class Edit:
    """A change of a value: `change(call, value)` returns what comes in its place. It can be used as a function too."""

    def __init__(
        self,
        change: Callable[[Call | None, Any], Any],
        text: str,
        inputs: Callable[[Call, Any], Inputs] | None = None,
    ) -> None:
        self._change = change
        self._text = text
        self._inputs = inputs

    def __call__(self, value: Any) -> Any:
        return self._change(None, value)

    def at(self, call: Call, value: Any) -> Any:
        return self._change(call, value)

    def inputs(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments that come in the place of these."""
        if self._inputs is not None:
            given = self._inputs(call, (args, kwargs))
            return given.args, given.kwargs
        changed: tuple[Any, Any] = self._change(call, (args, kwargs))
        return changed

    def __repr__(self) -> str:
        return self._text


def scale(factor: float) -> Edit:
    """Multiply every floating-point tensor."""
    return Edit(lambda _, value: _floats(lambda tensor: tensor * factor, value), f"scale({factor})")


def zero() -> Edit:
    """Put zeros in the place of every tensor."""
    return Edit(lambda _, value: map_tensors(torch.zeros_like, value), "zero()")


def noise(std: float, *, seed: int | None = None) -> Edit:
    """Add normal noise to every floating-point tensor.

    Args:
        seed: For the same noise in every run, another for each call; the random state of torch is then left alone.
    """

    def add(call: Call | None, value: Any) -> Any:
        place = 0 if call is None else crc32(call.address.encode())
        generators: dict[torch.device, torch.Generator] = {}

        def add_to(tensor: Tensor) -> Tensor:
            device = tensor.device
            if seed is not None and not tensor.is_meta and device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed + place)
            drawn = torch.randn(tensor.shape, dtype=tensor.dtype, device=device, generator=generators.get(device))
            return tensor + std * drawn

        return _floats(add_to, value)

    return Edit(add, f"noise({std})")


def patch_from(feats: Features, *, rows: Any = None) -> Edit:
    """Put in what an earlier look captured at the same call.

    Args:
        rows: An index of what is patched, such as `(slice(None), 0)` for the first token; None: all of it.
    """

    def patch(call: Call | None, value: Any) -> Any:
        if call is None:
            raise BadQuery("patch_from is for edits: it must know at which call it is")
        kept = feats[_captured(feats, call)]
        if rows is None:
            return _copied(kept, value)
        if not isinstance(value, Tensor) or not isinstance(kept, Tensor):
            raise Unsupported(f"rows of {call.address!r} cannot be patched: it returns a {type(value).__name__}")
        patched = value.clone()
        patched[rows] = kept[rows].to(value)
        return patched

    def arguments(call: Call, value: Any) -> Inputs:
        given = feats.inputs(_captured(feats, call))
        args, kwargs = _copied((given.args, given.kwargs), value)
        return Inputs(*args, **kwargs)

    return Edit(patch, f"patch_from({feats!r})", arguments)


#: What makes an edit: a function of the value, or one of ours.
Change = Callable[[Any], Any]


def edit(
    model: nn.Module,
    outputs: Mapping[Any, Change] | None = None,
    *,
    inputs: Mapping[Any, Change] | None = None,
) -> Session:
    """Change what selected modules return or are given, for the time of a `with` block.

    Args:
        outputs: What is done to the outputs, by a selector: a path, a glob, a module type, …, or the address of one
            call, such as `"block#1"`. A function gets the output and returns what comes in its place.
        inputs: What is done to the arguments, which a function gets and returns as an `Inputs`.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with edit(net, {"1": lambda out: out + 7, "0": zero()}):
    ...     net(torch.ones(1, 2))
    tensor([[7., 7.]])
    """
    check_model(model)
    if not outputs and not inputs:
        raise BadQuery('nothing is to be changed: give such as {"blocks.5": mt.scale(0.5)}')
    changes: list[Replace | Feed] = []
    for at, change in (outputs or {}).items():
        selector, index = _selected(at)
        changes.append(Replace(selector, _output_change(change, index)))
    for at, change in (inputs or {}).items():
        selector, index = _selected(at)
        changes.append(Feed(selector, _input_change(change, index)))
    return Session(model, interventions=changes)


def _selected(at: Selector) -> tuple[Selector, int | None]:
    """The selector, and which call if one of each module alone is meant."""
    if isinstance(at, str) and "#" in at:
        path, _, index = at.rpartition("#")
        if index.isdigit():
            return path, int(index)
    return at, None


def _captured(feats: Features, call: Call) -> str:
    """What was captured at this call; at another one only if the module ran once then."""
    if call.address not in feats.addresses and len(feats.calls(call.path)) > 1:
        raise NoMatch(f"{call.address!r} was not captured, only {', '.join(map(repr, feats.addresses))}")
    return call.address if call.address in feats.addresses else call.path


def _copied(kept: Any, value: Any) -> Any:
    """A copy, since the model may write to it, on the device of what it comes in the place of."""
    device = next((tensor.device for tensor in tensors_in(value)), None)
    return map_tensors(lambda tensor: tensor.to(device or tensor.device, copy=True), kept)


def _output_change(change: Change, index: int | None) -> Callable[[Call, Any], Any]:
    _check(change)

    def by(call: Call, output: Any) -> Any:
        if index is not None and call.index != index:
            return output
        return _changed(change, call, output)

    return by


def _input_change(change: Change, index: int | None) -> Callable[..., Any]:
    _check(change)

    def by(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if index is not None and call.index != index:
            return args, kwargs
        if isinstance(change, Edit):
            return change.inputs(call, args, kwargs)
        changed = _changed(change, call, Inputs(*args, **kwargs))
        if not isinstance(changed, Inputs):
            raise Unsupported(
                f"an edit of the inputs of {call.address!r} returns an Inputs, got {type(changed).__name__}"
            )
        return changed.args, changed.kwargs

    return by


def _check(change: Any) -> None:
    if not callable(change):
        raise BadQuery(f"an edit is a function of the value, or such as mt.scale(0.5), got {type(change).__name__}")


def _changed(change: Change, call: Call, value: Any) -> Any:
    changed = change.at(call, value) if isinstance(change, Edit) else change(value)
    if changed is None and value is not None:
        raise Unsupported(f"the edit of {call.address!r} returned None in place of a {type(value).__name__}")
    return changed


def _floats(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    def changed(tensor: Tensor) -> Tensor:
        return change(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor

    return map_tensors(changed, value)
