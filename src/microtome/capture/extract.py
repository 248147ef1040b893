"""One look: the values that modules and operators make in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microtome.addresses import call_of
from microtome.capture.execution_order import order_of
from microtome.capture.features import Features
from microtome.capture.retention import Clone, CopyOnWrite, Retention
from microtome.capture.targets import Targets, op_name
from microtome.engine import Call, Probe, Selector, Session, Stop, Stopped, tensors_in
from microtome.engine.backward import watch_gradient
from microtome.engine.call_selection import other_names
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import map_tensors
from microtome.engine.selectors import check_model, named
from microtome.engine.signals import grad_mode
from microtome.errors import BadQuery, Unsupported
from microtome.flops.fused import WHOLE
from microtome.inputs import Inputs, device_of


def extract(
    model: nn.Module,
    given: Any,
    at: Selector,
    /,
    *,
    stop: bool = True,
    inputs: bool = False,
    grad: bool = False,
    detach: bool = True,
    clone: Clone = "auto",
    device: torch.device | str | None = None,
    transform: Callable[[Any], Any] | None = None,
) -> Features:
    """Run the model once and return what the selected modules gave.

    Args:
        given: The inputs of the model: a tensor, a tuple, a dict, an `Inputs`, or a text such as `"1x3x224x224"`.
        at: Which modules: a path, a glob, a module type, … or several; `"path#1"` for one call of a module;
            `"path/operator"` for operators in their calls.
        stop: End the run when all is there. When that is, is learned from a run on tensors without values, which hooks
            and edits see too, and remembered. Models that branch on values or on chance run to their end.
        inputs: Capture the arguments of the calls too.
        grad: Keep what is captured in the graph, run to the end, and collect gradients in a later backward.
        detach: Cut what is captured from the graph.
        clone: Copy it; `"auto"`: only where it is written to later in the run, or would pin a larger tensor.
        device: Move it there as it is captured.
        transform: Called with each output as it is captured, which it must not write to; what it returns is kept.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> feats = extract(net, torch.ones(1, 2), nn.ReLU)
    >>> feats["1"].shape, feats.stopped
    (torch.Size([1, 3]), True)
    """
    check_model(model)
    targets, run = Targets(model, at), Inputs.of(given, device=device_of(model))
    if not isinstance(inputs, bool):
        raise BadQuery("inputs=True captures the arguments of calls; what the model is given comes second")
    if grad and torch.is_inference_mode_enabled():
        raise BadQuery("in inference mode there are no gradients: leave it, or grad")
    if grad and (transform is not None or targets.owners):
        raise BadQuery("gradients are those of what modules return: leave out transform and operators, or grad")
    keeping = Retention(detach and not grad, clone, device, transform)
    order = order_of(model, run, fast_paths=targets.fast_paths) if stop and not grad else None
    kind = _OpCapture if targets.owners else _ModuleCapture
    capture = kind(targets, keeping, order, inputs=inputs, grad=grad)
    guards = [] if capture.guard is None else [capture.guard]
    whole = WHOLE if targets.owners else ()
    feats = capture.features
    enabled = torch.is_grad_enabled() or grad
    try:
        with (
            Session(
                model,
                [*guards, capture],
                capture.stops,
                whole=whole,
                fast_paths=targets.fast_paths,
                other_threads="unseen",
            ),
            grad_mode(enabled),
        ):
            feats._output.append(run.run(model))
    except Stopped as stopped:
        if stopped.call is not capture.stopped_at:  # somebody else's
            raise
        feats.stopped = True
    finally:
        capture.stops.clear()  # which holds the capture, and that what was captured
    capture.end(model, (run.args, run.kwargs), feats._output)
    return feats


class _ModuleCapture(Probe):
    """Captures in one run."""

    def __init__(
        self, targets: Targets, keeping: Retention, order: tuple[str, ...] | None, *, inputs: bool, grad: bool
    ) -> None:
        self._targets = targets
        self._keeping = keeping
        self._inputs = inputs
        self._grad = grad
        self._ran: dict[str, int] = {}
        self._op_names: dict[str, dict[str, None]] = {}
        self._ended = 0
        self.stopped_at: Call | None = None
        self._keeps = False
        self.features = Features()
        self.guard = CopyOnWrite() if keeping.detach and keeping.clone == "auto" else None
        self._wanted = targets.modules.keys() | targets.owners.keys()
        ends = [address for address in order or () if call_of(address)[0] in self._wanted]
        if not set(targets.addresses) <= set(ends):  # the run is to say how often it ran
            ends = []
        self._last = (ends[-1], len(ends)) if ends else ("", -1)
        self.stops = [Stop(call_of(self._last[0])[0], when=self._is_last)] if ends else []

    def _is_last(self, call: Call) -> bool:
        """Whether all is there; never where the run went another way than it was expected to."""
        if (call.address, self._ended) == self._last:
            self.stopped_at = call
        return self.stopped_at is not None

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inputs and call in self._targets.calls:
            kept = replace(self._keeping, transform=None).keep((args, kwargs))
            self._hold(kept)
            self.features._inputs[self._targets.address(call)] = Inputs(*kept[0], **kept[1])

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._ran[call.path] = max(call.index, self._ran.get(call.path, 0))
        self._ended += call.path in self._wanted
        if call in self._targets.calls:
            self._keep(call.path, self._targets.address(call), output)

    def _keep(self, name: str, address: str, output: Any) -> None:
        self._keeps = True  # and is no part of the model meanwhile
        try:
            if self._grad:
                self.features._grads[address] = _collect(output, self.features)
            kept = self._keeping.keep(output)
        except Unsupported as error:
            error.add_note(f"in what {address!r} gave")
            raise
        finally:
            self._keeps = False
        self._hold(kept)
        self.features._values.setdefault(name, {})[address] = kept

    def _hold(self, kept: Any) -> None:
        if self.guard is not None:
            self.guard.hold(kept)

    def end(self, model: nn.Module, given: Any, output: Any) -> None:
        feats = self.features
        if self.guard is not None:  # what the model or the user has too may be written to later
            held = [vars(module) for _, module in named(model)]
            for tensor in tensors_in((held, given, output)):
                self.guard.release(tensor)
        names = {path: list(found) for path, found in self._op_names.items()}
        feats._others = other_names(model)
        feats.never_ran = self._targets.check(feats._values, self._ran, names)


class _OpCapture(_ModuleCapture):
    """Captures operators too. To be told of every operator costs time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counts: dict[tuple[Call, str], int] = {}

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = where.call
        if self._keeps or call is None or where.phase != "forward" or call.path not in self._targets.owners:
            return
        name = op_name(func)
        index = self._counts.get((call, name), 0)
        self._counts[call, name] = index + 1
        self._op_names.setdefault(call.path, {})[f"{name}#{index}"] = None
        if self._targets.wants_op(call, f"{name}#{index}"):
            self._keep(f"{call.path}/{name}", f"{self._targets.address(call)}/{name}#{index}", output)


def _collect(output: Any, feats: Features) -> Callable[[], Any]:
    """Note the gradients of a value when they come; what is returned gives them, in the value's structure.

    They are noted as long as the features live: a tensor of the model or of the user may live longer.
    """
    grads: dict[int, Tensor] = {}
    places: dict[int, int] = {}

    def note(at: int, grad: Tensor) -> None:
        grads[at] = grads[at] + grad if at in grads else grad

    def placed(tensor: Tensor) -> Tensor:
        place = torch.empty(0)
        places[id(place)] = at = len(places)
        if tensor.requires_grad:
            watch_gradient(tensor, partial(note, at), owner=feats)
        return place

    structure = map_tensors(placed, output)
    return lambda: map_tensors(lambda place: grads.get(places[id(place)]), structure)
