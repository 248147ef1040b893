"""Replace the outputs or arguments of selected modules during a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, SupportsFloat
from zlib import crc32

import torch
from torch import Tensor, nn

from microtome.addresses import split_call_index
from microtome.capture.features import Features
from microtome.capture.targets import describe_call_count, explain_missing_call, model_never_ran
from microtome.engine import Call, Intervention, Probe, Replace, ReplaceInputs, Selector, Session, select
from microtome.engine.composite_ops import is_meta_or_fake
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.selectors import check_model, named_modules, reject_ambiguous_names
from microtome.errors import BadQuery, NoMatch, Unsupported, describe_value
from microtome.inputs import Inputs
from microtome.units import shape


class Edit:
    """An edit that depends on the call it is applied at; also callable as a function of the value alone.

    Args:
        change: Returns the replacement for the value at a call.
        text: Its `repr`.
        change_inputs: Returns the replacement for the arguments of a call, if that differs from `change`.
    """

    def __init__(
        self,
        change: Callable[[Call | None, Any], Any],
        text: str,
        change_inputs: Callable[[Call, Any], Any] | None = None,
    ) -> None:
        self.at = change
        self.inputs_at = change_inputs or change
        self._text = text

    def __call__(self, value: Any) -> Any:
        return self.at(None, value)

    def __repr__(self) -> str:
        return self._text


def scale(factor: float) -> Edit:
    """Multiply every floating-point tensor."""
    _check_number(factor, "factor")
    return Edit(lambda _, value: _map_floats(lambda tensor: tensor * factor, value), f"scale({factor})")


def zero() -> Edit:
    """Replace every tensor by zeros."""
    return Edit(lambda _, value: map_tensors(torch.zeros_like, value), "zero()")


def noise(std: float, *, seed: int | None = None) -> Edit:
    """Add normal noise to every floating-point tensor.

    Args:
        seed: Draws the same noise in every run, and different noise at each call, without using torch's global
            generator.
    """
    _check_number(std, "std")

    def add(call: Call | None, value: Any) -> Any:
        offset = 0 if call is None else crc32(call.address.encode())
        generators: dict[torch.device, torch.Generator] = {}

        def add_to(tensor: Tensor) -> Tensor:
            device = tensor.device
            if seed is not None and not tensor.is_meta and device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed + offset)
            sample = torch.randn(tensor.shape, dtype=tensor.dtype, device=device, generator=generators.get(device))
            return tensor + std * sample

        return _map_floats(add_to, value)

    return Edit(add, f"noise({std})")


def patch_from(feats: Features, *, rows: Any = None) -> Edit:
    """Replace a value by the one that `extract` captured at the same call, which must have the same shapes.

    Args:
        rows: The index of the part to patch, such as `(slice(None), 0)` for the first token; None: all of it.
    """
    if not isinstance(feats, Features):
        raise BadQuery(f"patch_from expected the Features that mt.extract returns, got a {type(feats).__name__}")

    def patch(call: Call | None, value: Any) -> Any:
        if call is None:
            raise BadQuery("patch_from must know the call it is applied at: pass it to mt.edit")
        captured = feats[_address_in(feats, call)]
        if rows is None:
            return _copy_captured(captured, value, call)
        if not isinstance(value, Tensor) or not isinstance(captured, Tensor):
            raise Unsupported(
                f"cannot patch rows of {call.address!r}: expected it to return a tensor, got a {type(value).__name__}"
            )
        patched = value.clone()
        patched[rows] = captured[rows].to(value)
        return patched

    def patch_inputs(call: Call, value: Any) -> Any:
        captured = feats.inputs(_address_in(feats, call))
        return _copy_captured((captured.args, captured.kwargs), value, call)

    return Edit(patch, f"patch_from({feats!r})", patch_inputs)


_RETURN_INPUTS = "its tensors are in inputs.args and inputs.kwargs; return mt.Inputs(*args, **kwargs)"

#: A function of the value, or an `Edit`.
Change = Callable[[Any], Any]


def edit(
    model: nn.Module,
    outputs: Mapping[Any, Change] | None = None,
    *,
    inputs: Mapping[Any, Change] | None = None,
) -> Session:
    """Replace the outputs or arguments of selected modules during a `with` block.

    Args:
        outputs: Edits of outputs, by selector: a path, a glob, a module type, …, or the address of one call, such as
            `"block#1"`. A function receives the output and returns its replacement.
        inputs: Edits of arguments, which a function receives and returns as an `Inputs`.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with edit(net, {"1": lambda out: out + 7, "0": zero()}):
    ...     net(torch.ones(1, 2))
    tensor([[7., 7.]])
    """
    check_model(model)
    for edits in (outputs, inputs):
        if edits is not None and not isinstance(edits, Mapping):
            raise BadQuery(f'expected edits as a dict, such as {{"blocks.5": mt.scale(0.5)}}, got {edits!r}')
    if not outputs and not inputs:
        raise BadQuery('expected at least one edit, got none: pass one, such as {"blocks.5": mt.scale(0.5)}')
    paths = {at for at in (*(outputs or ()), *(inputs or ())) if isinstance(at, str)}
    reject_ambiguous_names(path for path, _ in named_modules(model, remove_duplicate=False) if path in paths)
    return _EditSession(
        model,
        [_SelectedEdit(at, change) for at, change in (outputs or {}).items()],
        [_SelectedEdit(at, change) for at, change in (inputs or {}).items()],
    )


class _SelectedEdit:
    """An edit with its selector, and whether it was applied."""

    def __init__(self, at: Selector, change: Change) -> None:
        if not callable(change):
            raise BadQuery(
                f"expected an edit as a function of the value, or such as mt.scale(0.5), got {type(change).__name__}"
            )
        if change in (scale, zero, noise, patch_from):
            raise BadQuery(f"expected an edit, got the function that makes one: call it, as in mt.{change.__name__}(…)")
        self.at = at
        self.selector, self.index = split_call_index(at)
        self._change = change
        self.applied = False
        self.difference: str | None = None  # between the tensors that it received and returned in this run

    def output(self, call: Call, output: Any) -> Any:
        if not self._matches(call, output):
            return output
        replacement = _apply(self._change, call, output)
        self._compare(repr(call.address), output, replacement)
        return replacement

    def inputs(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._matches(call, (args, kwargs)):
            return args, kwargs
        if isinstance(self._change, Edit):
            changed: tuple[tuple[Any, ...], dict[str, Any]] = self._change.inputs_at(call, (args, kwargs))
        else:
            replacement = self._apply_to_inputs(call, Inputs(*args, **kwargs))
            if not isinstance(replacement, Inputs):
                raise Unsupported(
                    f"expected the edit of the inputs of {call.address!r} to return an Inputs, got "
                    f"{type(replacement).__name__}: {_RETURN_INPUTS}"
                )
            changed = replacement.args, replacement.kwargs
        self._compare(f"the inputs of {call.address!r}", (args, kwargs), changed)
        return changed

    def _apply_to_inputs(self, call: Call, inputs: Inputs) -> Any:
        try:
            return _apply(self._change, call, inputs)
        except (TypeError, AttributeError) as error:
            if "'Inputs' object" in str(error):
                error.add_note(f"The edit of the inputs of {call.address!r} receives an Inputs: {_RETURN_INPUTS}")
            raise

    def _compare(self, what: str, before: Any, after: Any) -> None:
        old, new = (
            [(tensor.shape, tensor.dtype) for tensor in tensors_in(value) if not tensor.is_nested]  # these have none
            for value in (before, after)
        )
        if old != new:
            self.difference = f"the edit of {what} changed {_describe(old)} to {_describe(new)}"

    def __repr__(self) -> str:
        return f"{self.at!r}: {self._change!r}"

    def _matches(self, call: Call, value: Any) -> bool:
        matches = self.index is None or call.index == self.index
        self.applied = self.applied or (matches and _has_values(value))
        return matches


def _describe(tensors: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{shape(size)}:{str(dtype).removeprefix('torch.')}" for size, dtype in tensors) or "nothing"


class _LastCalls(Probe):
    """Records the index of the last call of each module, by path, and whether a run failed.

    The error of a failed run gets a note for each edit that changed a shape or a dtype.
    """

    def __init__(self, edits: list[_SelectedEdit]) -> None:
        self._edits = edits
        self.indices: dict[str, int] = {}
        self.failed = False

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.parent is None:
            for edit in self._edits:
                edit.difference = None

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.indices.get(call.path, -1) < call.index and _has_values(output):
            self.indices[call.path] = call.index

    def fail(self, call: Call, error: BaseException) -> None:
        if call.parent is None:
            self.failed = True
            for difference in {edit.difference for edit in self._edits if isinstance(error, Exception)} - {None}:
                error.add_note(str(difference))


def _has_values(value: Any) -> bool:
    """Return whether tensors have values; `extract` may run the model without, to learn where to stop."""
    return not any(map(is_meta_or_fake, tensors_in(value)))


class _EditSession(Session):
    """Applies edits, and raises at the end of the block if one was never applied."""

    def __init__(self, model: nn.Module, outputs: list[_SelectedEdit], inputs: list[_SelectedEdit]) -> None:
        self._edits = [*outputs, *inputs]
        self._last_calls = _LastCalls(self._edits)
        interventions: list[Intervention] = [
            *(Replace(edit.selector, edit.output) for edit in outputs),
            *(ReplaceInputs(edit.selector, edit.inputs) for edit in inputs),
        ]
        super().__init__(model, [self._last_calls], interventions)

    def _tear_down(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super()._tear_down(kind, error, trace)
        last_calls, self._last_calls.indices = self._last_calls.indices, {}
        unused = [edit for edit in self._edits if not edit.applied]
        for edit in self._edits:
            edit.applied = False
        # A run that ended early, as `extract` may end it, did not reach all calls.
        if error is None and unused and not self._last_calls.failed:
            raise self._unused_error(unused[0], last_calls)

    def __repr__(self) -> str:
        return f"<edits of {type(self.model).__name__}: {', '.join(map(repr, self._edits))}>"

    def _unused_error(self, edit: _SelectedEdit, last_calls: dict[str, int]) -> NoMatch:
        assert self.model is not None
        if not last_calls:
            return model_never_ran(self.model, "nothing was edited")
        paths = list(select(self.model, edit.selector))
        counts = [(last_calls[path], path) for path in paths if path in last_calls]
        if not counts:
            reason = explain_missing_call(self.model, paths[0], set(last_calls))
            return NoMatch(f"the edit of {paths[0]!r} was not applied: it never ran: {reason}")
        return NoMatch(f"the edit of {edit.at!r} was not applied: {describe_call_count(*max(counts))}")


def _address_in(feats: Features, call: Call) -> str:
    """Return the address of the features captured at this call, or the path if its module ran once."""
    address = f"{call.path}#{call.index}"
    return address if address in feats else call.path


def _check_number(value: Any, name: str) -> None:
    if not isinstance(value, SupportsFloat | complex):
        raise BadQuery(f"expected {name} to be a number, got {value!r}")


def _copy_captured(captured: Any, value: Any, call: Call) -> Any:
    """Copy captured tensors, which the model may write to, to the device of the value that they replace."""
    shapes, expected = ([tuple(tensor.shape) for tensor in tensors_in(part)] for part in (captured, value))
    if shapes != expected:
        raise Unsupported(
            f"cannot patch {call.address!r}: expected captured shapes {expected}, got {shapes}: capture from inputs of "
            "the same shapes, or select a part with `rows`"
        )
    device = next((tensor.device for tensor in tensors_in(value)), None)
    return map_tensors(lambda tensor: tensor.to(device or tensor.device, copy=True), captured)


def _apply(change: Change, call: Call, value: Any) -> Any:
    replacement = change.at(call, value) if isinstance(change, Edit) else change(value)
    if replacement is None and value is not None:
        if isinstance(value, Inputs):
            raise Unsupported(
                f"expected the edit of the inputs of {call.address!r} to return an Inputs, got None: {_RETURN_INPUTS}"
            )
        raise Unsupported(
            f"expected the edit of {call.address!r} to return a {type(value).__name__}, got None: return the output"
        )
    has_values = not isinstance(replacement, Inputs) or replacement.args or replacement.kwargs
    if has_values and _has_tensors(value) and not _has_tensors(replacement):
        what = f"the inputs of {call.address!r}" if isinstance(value, Inputs) else repr(call.address)
        raise Unsupported(
            f"expected the edit of {what} to return tensors, got {describe_value(replacement)} without any: "
            "torch.as_tensor converts an array or a number"
        )
    return replacement


def _has_tensors(value: Any) -> bool:
    parts = (value.args, value.kwargs) if isinstance(value, Inputs) else value
    return next(tensors_in(parts), None) is not None


def _map_floats(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to the floating-point and complex tensors in a value."""

    def apply(tensor: Tensor) -> Tensor:
        return function(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor

    return map_tensors(apply, value)
