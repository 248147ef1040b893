"""Capture the outputs of modules and operators in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microtome.addresses import split_call_index
from microtome.capture.execution_order import order_of
from microtome.capture.features import Features
from microtome.capture.retention import Clone, CopyOnWrite, Retention
from microtome.capture.targets import Targets, op_name
from microtome.engine import Call, Probe, Selector, Session, Stop, Stopped, tensors_in
from microtome.engine.backward import watch_gradient
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import map_tensors
from microtome.engine.selectors import check_model, named_modules, path_aliases
from microtome.engine.signals import grad_mode
from microtome.errors import BadQuery, Unsupported
from microtome.flops.composite import COMPOSITE_FORMULAS
from microtome.inputs import Inputs


def extract(
    model: nn.Module,
    model_inputs: Any,
    /,
    at: Selector,
    *,
    stop: bool = True,
    inputs: bool = False,
    grad: bool = False,
    detach: bool = True,
    clone: Clone = "auto",
    device: torch.device | str | None = None,
    transform: Callable[[Any], Any] | None = None,
) -> Features:
    """Run the model once and return the outputs of the selected modules.

    Args:
        model_inputs: A tensor, a tuple, a dict, an `Inputs`, or a shape such as `"1x3x224x224"`.
        at: The modules: a path, a glob, a module type, … or several; `"path#1"` for one call of a module;
            `"path/operator"` for operators in their calls.
        stop: End the run after the last selected call. A run on tensors without values, which hooks and edits see too,
            finds that call; the result is cached. Models that branch on values or draw random numbers run to the end.
        inputs: Capture the arguments of the calls too.
        grad: Keep captured tensors in the autograd graph, run to the end, and collect gradients in a later backward.
        detach: Detach captured tensors from the autograd graph.
        clone: Clone them; `"auto"`: only those that are mutated later in the run or would pin a larger tensor.
        device: Move them to this device as they are captured.
        transform: Called with each output as it is captured, which it must not mutate; its result is kept.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> feats = extract(net, torch.ones(1, 2), nn.ReLU)
    >>> feats["1"].shape, feats.stopped
    (torch.Size([1, 3]), True)
    """
    check_model(model)
    targets, run = Targets(model, at), Inputs.of(model_inputs, model)
    if not isinstance(inputs, bool):
        raise BadQuery(
            f"expected inputs=True or False, whether to capture the arguments of calls, got a {type(inputs).__name__}: "
            "pass the model's inputs as the second argument"
        )
    if grad and torch.is_inference_mode_enabled():
        raise BadQuery("gradients do not exist in inference mode: leave the mode, or leave out grad")
    if grad and (transform is not None or targets.owners):
        raise BadQuery("gradients are collected for outputs of modules: leave out transform and operators, or grad")
    retention = Retention(detach and not grad, clone, device, transform)
    order = order_of(model, run, fast_paths=targets.fast_paths) if stop and not grad else None
    capture = (_OpCapture if targets.owners else _ModuleCapture)(targets, retention, order, inputs=inputs, grad=grad)
    feats = capture.features
    session = Session(
        model,
        [capture] if capture.copy_on_write is None else [capture.copy_on_write, capture],
        capture.stops,
        backward=False,
        composite=COMPOSITE_FORMULAS if targets.owners else (),
        fast_paths=targets.fast_paths,
        other_threads="ignore",
    )
    try:
        with session, grad_mode(torch.is_grad_enabled() or grad):
            feats._output.append(run.run(model))
    except Stopped as stopped:
        if stopped.call is not capture.stopped_at:  # another session's
            raise
        feats.stopped = True
    finally:
        capture.stops.clear()  # break the reference cycle, which holds the captured tensors
    capture.finish(model, (run.args, run.kwargs), feats._output)
    return feats


class _ModuleCapture(Probe):
    """Captures the outputs of modules in one run.

    Args:
        order: The addresses of the calls in the order they end, if known.
    """

    def __init__(
        self, targets: Targets, retention: Retention, order: tuple[str, ...] | None, *, inputs: bool, grad: bool
    ) -> None:
        self._targets = targets
        self._retention = retention
        self._inputs = inputs
        self._grad = grad
        self._last_calls: dict[str, int] = {}
        self._op_names: dict[str, dict[str, None]] = {}
        self._completed = 0
        self.stopped_at: Call | None = None
        self._is_capturing = False
        self.features = Features()
        self.copy_on_write = CopyOnWrite() if retention.detach and retention.clone == "auto" else None
        self._paths = targets.modules.keys() | targets.owners.keys()
        ends = [address for address in order or () if split_call_index(address)[0] in self._paths]
        if not set(targets.addresses) <= set(ends):  # run to the end, to report how often the module ran
            ends = []
        self._last = (ends[-1], len(ends)) if ends else ("", -1)
        self.stops = [Stop(split_call_index(self._last[0])[0], when=self._is_last)] if ends else []

    def _is_last(self, call: Call) -> bool:
        """Return whether this is the last selected call; never if the run left the expected order."""
        if (call.address, self._completed) == self._last:
            self.stopped_at = call
        return self.stopped_at is not None

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inputs and call in self._targets.calls:
            retained = replace(self._retention, transform=None).apply((args, kwargs))
            self._watch(retained)
            self.features._inputs[self._targets.address(call)] = Inputs(*retained[0], **retained[1])

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._last_calls[call.path] = max(call.index, self._last_calls.get(call.path, 0))
        self._completed += call.path in self._paths
        if call in self._targets.calls:
            self._capture(call.path, self._targets.address(call), output)

    def _capture(self, name: str, address: str, output: Any) -> None:
        self._is_capturing = True  # operators that run meanwhile are not the model's
        try:
            if self._grad:
                self.features._grads[address] = _collect_gradients(output, self.features)
            retained = self._retention.apply(output)
        except Unsupported as error:
            error.add_note(f"in the output of {address!r}")
            raise
        finally:
            self._is_capturing = False
        self._watch(retained)
        self.features._values.setdefault(name, {})[address] = retained

    def _watch(self, retained: Any) -> None:
        if self.copy_on_write is not None:
            self.copy_on_write.watch(retained)

    def finish(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Copy captured tensors that share memory with the model or the user, and check that all targets ran."""
        feats = self.features
        if self.copy_on_write is not None:
            attributes = [vars(module) for _, module in named_modules(model)]
            for tensor in tensors_in((attributes, inputs, output)):
                self.copy_on_write.copy_sharing(tensor)
        names = {path: list(names) for path, names in self._op_names.items()}
        feats._other_names = path_aliases(model)
        feats.never_ran = self._targets.check(feats._values, self._last_calls, names)


class _OpCapture(_ModuleCapture):
    """Captures operators too, which requires a dispatch mode and so costs time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counts: dict[tuple[Call, str], int] = {}

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = where.call
        if self._is_capturing or call is None or where.phase != "forward" or call.path not in self._targets.owners:
            return
        name = op_name(func)
        index = self._counts.get((call, name), 0)
        self._counts[call, name] = index + 1
        self._op_names.setdefault(call.path, {})[f"{name}#{index}"] = None
        if self._targets.includes_op(call, f"{name}#{index}"):
            self._capture(f"{call.path}/{name}", f"{self._targets.address(call)}/{name}#{index}", output)


def _collect_gradients(output: Any, feats: Features) -> Callable[[], Any]:
    """Accumulate gradients in later backwards; return a function that gives them in the structure of the output.

    They are accumulated while the features live: a tensor of the model or of the user may live longer.
    """
    grads: dict[int, Tensor] = {}
    indices: dict[int, int] = {}

    def accumulate(index: int, grad: Tensor) -> None:
        grads[index] = grads[index] + grad if index in grads else grad

    def register(tensor: Tensor) -> Tensor:
        placeholder = torch.empty(0)
        indices[id(placeholder)] = index = len(indices)
        if tensor.requires_grad:
            watch_gradient(tensor, partial(accumulate, index), owner=feats)
        return placeholder

    structure = map_tensors(register, output)
    return lambda: map_tensors(lambda placeholder: grads.get(indices[id(placeholder)]), structure)
