"""Changing what flows through a model, on purpose, for the time of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, SupportsFloat
from zlib import crc32

import torch
from torch import Tensor, nn

from microtome.addresses import call_of
from microtome.capture.features import Features
from microtome.capture.targets import never_ran, times_ran, why_not
from microtome.engine import Call, Intervention, Probe, Replace, ReplaceInputs, Selector, Session, select
from microtome.engine.call_selection import refuse_names
from microtome.engine.composite_ops import is_stand_in
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.selectors import check_model, names
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
    _check_number(factor, "a factor")
    return Edit(lambda _, value: _floats(lambda tensor: tensor * factor, value), f"scale({factor})")


def zero() -> Edit:
    """Put zeros in the place of every tensor."""
    return Edit(lambda _, value: map_tensors(torch.zeros_like, value), "zero()")


def noise(std: float, *, seed: int | None = None) -> Edit:
    """Add normal noise to every floating-point tensor.

    Args:
        seed: For the same noise in every run, another for each call; the random state of torch is then left alone.
    """
    _check_number(std, "a standard deviation")

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
    """Put in what an earlier look captured at the same call, of the same shapes.

    Args:
        rows: An index of what is patched, such as `(slice(None), 0)` for the first token; None: all of it.
    """
    if not isinstance(feats, Features):
        raise BadQuery(f"patch_from takes what mt.extract returned, got a {type(feats).__name__}")

    def patch(call: Call | None, value: Any) -> Any:
        if call is None:
            raise BadQuery("patch_from is for edits: it must know at which call it is")
        kept = feats[_captured(feats, call)]
        if rows is None:
            return _copied(kept, value, call)
        if not isinstance(value, Tensor) or not isinstance(kept, Tensor):
            raise Unsupported(f"rows of {call.address!r} cannot be patched: it returns a {type(value).__name__}")
        patched = value.clone()
        patched[rows] = kept[rows].to(value)
        return patched

    def arguments(call: Call, value: Any) -> Inputs:
        given = feats.inputs(_captured(feats, call))
        args, kwargs = _copied((given.args, given.kwargs), value, call)
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
    for given in (outputs, inputs):
        if given is not None and not isinstance(given, Mapping):
            raise BadQuery(f'edits are a dict, such as {{"blocks.5": mt.scale(0.5)}}, got {given!r}')
    if not outputs and not inputs:
        raise BadQuery('nothing is to be changed: give such as {"blocks.5": mt.scale(0.5)}')
    texts = {at for at in (*(outputs or ()), *(inputs or ())) if isinstance(at, str)}
    refuse_names(path for path, _ in names(model) if path in texts)
    edits = [_Wanted(at, change) for at, change in (outputs or {}).items()]
    feeds = [_Wanted(at, change) for at, change in (inputs or {}).items()]
    return _Edits(model, edits, feeds)


class _Wanted:
    """One of the changes that are to be made, and whether it was made."""

    def __init__(self, at: Selector, change: Change) -> None:
        if not callable(change):
            raise BadQuery(f"an edit is a function of the value, or such as mt.scale(0.5), got {type(change).__name__}")
        if change in (scale, zero, noise, patch_from):
            raise BadQuery(f"{change.__name__} makes an edit when it is called: write such as mt.scale(0.5), mt.zero()")
        self.at = at
        self.selector, self.index = call_of(at)
        self._change = change
        self.made = False

    def output(self, call: Call, output: Any) -> Any:
        if not self._is_meant(call, output):
            return output
        return _changed(self._change, call, output)

    def inputs(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._is_meant(call, (args, kwargs)):
            return args, kwargs
        if isinstance(self._change, Edit):
            return self._change.inputs(call, args, kwargs)
        changed = _changed(self._change, call, Inputs(*args, **kwargs))
        if not isinstance(changed, Inputs):
            raise Unsupported(
                f"an edit of the inputs of {call.address!r} returns an Inputs, got {type(changed).__name__}"
            )
        return changed.args, changed.kwargs

    def _is_meant(self, call: Call, value: Any) -> bool:
        meant = self.index is None or call.index == self.index
        self.made = self.made or (meant and _is_real(value))
        return meant


class _CallCount(Probe):
    """Which modules ran, and the index of the last call of each."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self.failed = False

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.last.get(call.path, -1) < call.index and _is_real(output):
            self.last[call.path] = call.index

    def fail(self, call: Call, error: BaseException) -> None:
        self.failed |= call.parent is None


def _is_real(value: Any) -> bool:
    """Whether it is of a run with values; `extract` may run the model without, to learn where to stop."""
    return not any(map(is_stand_in, tensors_in(value)))


class _Edits(Session):
    """Makes changes, and says at the end of the block which was never made."""

    def __init__(self, model: nn.Module, outputs: list[_Wanted], inputs: list[_Wanted]) -> None:
        self._ran = _CallCount()
        self._wanted = [*outputs, *inputs]
        changes: list[Intervention] = [
            *(Replace(wanted.selector, wanted.output) for wanted in outputs),
            *(ReplaceInputs(wanted.selector, wanted.inputs) for wanted in inputs),
        ]
        super().__init__(model, [self._ran], changes)

    def _tear_down(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super()._tear_down(kind, error, trace)
        ran, self._ran.last = self._ran.last, {}
        lost = [wanted for wanted in self._wanted if not wanted.made]
        for wanted in self._wanted:
            wanted.made = False
        # A run that ended early, as `extract` ends it too, did not come to all that it would.
        if error is None and lost and not self._ran.failed:
            raise self._not_made(lost[0], ran)

    def _not_made(self, wanted: _Wanted, ran: dict[str, int]) -> NoMatch:
        assert self.model is not None
        if not ran:
            return never_ran(self.model, "nothing was edited")
        paths = list(select(self.model, wanted.selector))
        runs = [(ran[path], path) for path in paths if path in ran]
        if not runs:
            return NoMatch(f"{paths[0]!r} was to be edited and never ran: {why_not(self.model, paths[0], set(ran))}")
        return NoMatch(f"{wanted.at!r} was to be edited and never ran: {times_ran(*max(runs))}")


def _captured(feats: Features, call: Call) -> str:
    """What was captured at this call; at another one only if the module ran once then."""
    address = f"{call.path}#{call.index}"
    return address if address in feats else call.path


def _check_number(given: Any, what: str) -> None:
    if not isinstance(given, SupportsFloat | complex):
        raise BadQuery(f"{what} is a number, got {given!r}")


def _copied(kept: Any, value: Any, call: Call) -> Any:
    """A copy, since the model may write to it, on the device of what it comes in the place of."""
    there, here = ([tuple(tensor.shape) for tensor in tensors_in(one)] for one in (kept, value))
    if there != here:
        raise Unsupported(
            f"what was captured at {call.address!r} has shapes {there}, and here they are {here}: patch from inputs of "
            "the same shapes, or choose a part with `rows`"
        )
    device = next((tensor.device for tensor in tensors_in(value)), None)
    return map_tensors(lambda tensor: tensor.to(device or tensor.device, copy=True), kept)


def _changed(change: Change, call: Call, value: Any) -> Any:
    changed = change.at(call, value) if isinstance(change, Edit) else change(value)
    if changed is None and value is not None:
        raise Unsupported(f"the edit of {call.address!r} returned None in place of a {type(value).__name__}")
    return changed


def _floats(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    def changed(tensor: Tensor) -> Tensor:
        return change(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor

    return map_tensors(changed, value)
