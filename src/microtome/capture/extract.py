"""One look: the values that modules and operators make in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microtome.capture.features import Features
from microtome.capture.keep import Clone, CopyOnWrite, Keeping
from microtome.capture.order import order_of
from microtome.capture.targets import Targets, op_name
from microtome.count.whole import WHOLE
from microtome.engine import Call, Probe, Selector, Session, Stop, Stopped, tensors_in
from microtome.engine.probes import AnyOp, Where
from microtome.engine.select import check_model
from microtome.engine.structure import map_tensors
from microtome.errors import BadQuery
from microtome.inputs import Inputs


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
        at: Which modules: a path, a glob, a module type, … or several; `"path/operator"` for operators in their calls.
        stop: End the run when all is there. Models that may branch on values run to their end.
        inputs: Capture the arguments of the calls too.
        grad: Keep what is captured in the graph, run to the end, and collect gradients in a later backward.
        detach: Cut what is captured from the graph.
        clone: Copy it; `"auto"`: only where it is written to later in the run, or would pin a larger tensor.
        device: Move it there as it is captured.
        transform: Called with each output as it is captured; what it returns is kept in its place.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> feats = extract(net, torch.ones(1, 2), nn.ReLU)
    >>> feats["1"].shape, feats.stopped
    (torch.Size([1, 3]), True)
    """
    check_model(model)
    where = next((str(tensor.device) for tensor in (*model.parameters(), *model.buffers())), "cpu")
    targets, run = Targets(model, at), Inputs.of(given, device=where)
    if grad and (transform is not None or targets.owners):
        raise BadQuery("gradients are those of what modules return: leave out transform and operators, or grad")
    keeping = Keeping(detach and not grad, clone, device, transform)
    order = order_of(model, run) if stop and not grad else None
    kind = _OpCapture if targets.owners else _Capture
    capture = kind(targets, keeping, order, inputs=inputs, grad=grad)
    guards = [] if capture.guard is None else [capture.guard]
    whole = WHOLE if targets.owners else ()
    feats = capture.features
    enabled = torch.is_grad_enabled() or grad
    try:
        with (
            Session(model, [*guards, capture], capture.stops, whole=whole, fast_paths=targets.fast_paths),
            torch.set_grad_enabled(enabled),
        ):
            feats._output.append(run.run(model))
    except Stopped as stopped:
        if stopped.call.module is None or not capture.stops:
            raise
        feats.stopped = True
    capture.end(model)
    return feats


class _Capture(Probe):
    """Captures in one run."""

    def __init__(
        self, targets: Targets, keeping: Keeping, order: tuple[str, ...] | None, *, inputs: bool, grad: bool
    ) -> None:
        self._targets = targets
        self._keeping = keeping
        self._inputs = inputs
        self._grad = grad
        self._modules = {id(module) for module in targets.modules.values()}
        self._ran: dict[str, None] = {}
        self._op_names: dict[str, dict[str, None]] = {}
        self._ended = 0
        self.features = Features()
        self.guard = CopyOnWrite() if keeping.detach and keeping.clone == "auto" else None
        wanted = targets.modules.keys() | targets.owners.keys()
        ends = [(address, at) for at, address in enumerate(order or ()) if address.partition("#")[0] in wanted]
        self._last = ends[-1] if ends else ("", -1)
        self.stops = [Stop(self._last[0].partition("#")[0], when=self._is_last)] if ends else []

    def _is_last(self, call: Call) -> bool:
        """Whether all is there; never where the run went another way than it was expected to."""
        return (call.address, self._ended - 1) == self._last

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inputs and id(call.module) in self._modules:
            kept = replace(self._keeping, transform=None).keep((args, kwargs))
            self._hold(kept)
            self.features._inputs[call.address] = Inputs(*kept[0], **kept[1])

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._ran[call.path] = None
        self._ended += 1
        if id(call.module) in self._modules:
            self._keep(call.path, call.address, output)

    def _keep(self, name: str, address: str, output: Any) -> None:
        if self._grad:
            self.features._grads[address] = _collect(output)
        kept = self._keeping.keep(output)
        self._hold(kept)
        self.features._values.setdefault(name, {})[address] = kept

    def _hold(self, kept: Any) -> None:
        if self.guard is not None:
            self.guard.hold(kept)

    def end(self, model: nn.Module) -> None:
        feats = self.features
        if self.guard is not None:  # what the model keeps may be written to in its next run
            for tensor in (*model.parameters(), *model.buffers()):
                self.guard.release(tensor)
        names = {path: list(found) for path, found in self._op_names.items()}
        feats.never_ran = self._targets.check(feats._values, self._ran, names)


class _OpCapture(_Capture):
    """Captures operators too. To be told of every operator costs time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counts: dict[tuple[Call, str], int] = {}

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = where.call
        if call is None or where.phase != "forward" or call.path not in self._targets.owners:
            return
        name = op_name(func)
        index = self._counts.get((call, name), 0)
        self._counts[call, name] = index + 1
        self._op_names.setdefault(call.path, {})[f"{name}#{index}"] = None
        if self._targets.wants_op(call.path, f"{name}#{index}"):
            self._keep(f"{call.path}/{name}", f"{call.address}/{name}#{index}", output)


def _collect(output: Any) -> Callable[[], Any]:
    """Note the gradients of a value when they come; what is returned gives them, in the value's structure."""
    grads: dict[int, Tensor] = {}
    places: dict[int, int] = {}

    def note(at: int, grad: Tensor) -> None:
        grads[at] = grads[at] + grad if at in grads else grad

    for at, tensor in enumerate(tensors_in(output)):
        places[id(tensor)] = at
        if tensor.requires_grad:
            tensor.register_hook(partial(note, at))
    shape = map_tensors(lambda tensor: _Place(places[id(tensor)]), output)
    return lambda: _filled(shape, grads)


class _Place(int):
    """Stands for a tensor in a structure."""


def _filled(value: Any, grads: dict[int, Tensor]) -> Any:
    if isinstance(value, _Place):
        return grads.get(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_filled(item, grads) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_filled(item, grads) for item in value)
    if isinstance(value, dict):
        return {name: _filled(item, grads) for name, item in value.items()}
    return value
