"""The run that a trace is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from microtome.engine import Probe, Session, tensors_in
from microtome.engine.arguments import CannotStand
from microtome.engine.backward import keep_gradients
from microtome.engine.meta_run import LOOKING, stand_in
from microtome.engine.pytree import clone_tensors
from microtome.engine.selectors import check_model
from microtome.engine.signals import grad_mode
from microtome.errors import BadInputs, MicrotomeError, Unsupported, said
from microtome.inputs import Inputs
from microtome.results.trace import TensorMode

if TYPE_CHECKING:
    from microtome.results.trace import How, Trace
    from microtome.trace.costs import TraceCosts
    from microtome.trace.recorder import TraceRecorder

_STANDS: tuple[TensorMode, ...] = ("meta", "fake", "real")


def trace(model: nn.Module, inputs: Any, *, backward: bool = False, fake: bool | None = None) -> Trace:
    """Run the model once and write down its calls, its operators, and the values they make and read.

    By default nothing is computed: the run is made on meta tensors in place of weights and inputs or, where the model
    does not allow that, on fake tensors, and on real ones only where its code reads values. `Trace.how` says which and
    why. The run has the gradient mode that is set. Afterwards model and random state are as they were; meanwhile, no
    other thread may use the model.

    Args:
        inputs: A tensor, a tuple, a dict, an `Inputs`, or a text such as `"1x3x224x224"`.
        backward: Also run the backward of the sum of the outputs.
        fake: True runs on fake tensors; False runs the model as it is.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> t = mt.trace(model, x)
    >>> t
    <Trace of 43 calls, 56 ops, 121 values, meta>
    >>> [t.ops[op].name for op in t["layer1.0"].ops]
    ['aten.add.Tensor']
    """
    return record(model, inputs, backward=backward, fake=fake)[0]


def record(
    model: nn.Module,
    inputs: Any,
    *,
    backward: bool = False,
    fake: bool | None = None,
    beside: Callable[[TraceRecorder], Iterable[Probe]] | None = None,
    after: Callable[[Callable[[Probe], None]], None] | None = None,
    values: bool = False,
) -> tuple[Trace, TraceCosts]:
    """Record a trace, and the costs from which any convention prices it.

    Args:
        beside: Makes probes that look at a run, given its recorder; the last ones made saw the run that is returned.
        after: Called when the run has ended, while the model holds what it left, with a function that runs the model
            once more under a probe.
        values: Run on real tensors where meta tensors will not do, if all are there: code that asks whether a tensor is
            fake would do something else than in a run. Also digest the elements of constants.
    """
    from microtome.results.trace import How  # not before it is needed: see `microtome.trace`
    from microtome.trace.recorder import TraceRecorder

    if fake not in (None, True, False):
        raise BadInputs(f"fake is True, False or None, got {fake!r}")
    check_model(model)
    inputs = Inputs.of(inputs)
    with LOOKING:  # while another thread looks at it, its weights are on meta
        device, empty = _devices(model, inputs)
    stands: tuple[TensorMode, ...] = (
        ("real",) if fake is False else ("fake",) if fake else _STANDS[:2] if empty else _STANDS
    )
    if values and not empty and fake is None:
        stands = ("meta", "real")
    why: list[str] = []
    stopped: tuple[int, str] | None = None
    for stand in stands:
        if stand == "meta" and device is None:
            why.append("not on meta tensors: weights and inputs lie on several devices")
            continue
        try:
            recorder = TraceRecorder(stand, device, digest_constants=values)
            probes = [recorder] if beside is None else [recorder, *beside(recorder)]
            made = _run(model, inputs, How(stand, "; ".join(why)), probes, backward=backward, after=after)
            if stand == "fake" and stopped is not None and not recorder.ran(*stopped):
                # Where the operator failed on meta tensors, none ran: the code asks whether its tensors have values.
                if stand != stands[-1]:
                    raise CannotStand(f"its code does without {stopped[1]} there")
                made = replace(made, how=How(stand, "; ".join([*why, f"a real run has {stopped[1]}, and may differ"])))
            return made, recorder.costs
        except Exception as error:  # whatever a model raises on stand-ins, it may run on dearer ones
            cause = error.__cause__ if isinstance(error.__cause__, CannotStand) else error
            if isinstance(cause, MicrotomeError):
                raise
            if stand == stands[-1]:
                if stand != "real":
                    raise Unsupported(f"the model cannot be traced without computing: {_brief(cause)}") from error
                raise
            why.append(f"not on {stand} tensors: {_brief(cause)}")
            stopped = None if isinstance(cause, CannotStand) else recorder.begun()
    raise AssertionError


def _devices(model: nn.Module, inputs: Inputs) -> tuple[str | None, bool]:
    """The one device that weights and inputs lie on, or None; and whether there are weights without any."""
    tensors = (*model.parameters(), *model.buffers(), *tensors_in((inputs.args, inputs.kwargs)))
    devices = {str(tensor.device) for tensor in tensors}
    placed = sorted(devices - {"meta"})
    return (placed[0] if placed else "meta") if len(placed) <= 1 else None, "meta" in devices


def _brief(error: BaseException) -> str:
    return str(error) if isinstance(error, CannotStand) else said(error)


def _run(
    model: nn.Module,
    inputs: Inputs,
    how: How,
    probes: list[Any],
    *,
    backward: bool,
    after: Callable[[Callable[[Probe], None]], None] | None,
) -> Trace:
    from microtome.flops.fused import WHOLE

    recorder: TraceRecorder = probes[0]

    with stand_in(model, inputs, how.tensor_mode, recorder.originals) as standing:
        recorder.name(model, standing)
        grad = torch.is_grad_enabled() or backward
        session = Session(model, probes, backward=backward, whole=WHOLE, other_threads="refused")
        with session, grad_mode(grad):
            output = standing.run(model)
            if backward:
                _backward(recorder, output)
        traced = recorder.trace(how)  # while the output is there: it outlives the run

        def again(probe: Probe) -> None:
            more = Session(model, [recorder.another(), probe], whole=WHOLE, other_threads="refused")
            args, kwargs = clone_tensors((standing.args, standing.kwargs))  # others than what the last run has left
            with more, grad_mode(grad):
                Inputs(*args, **kwargs).run(model)

        if after is not None:
            after(again)
        return traced


def _backward(recorder: TraceRecorder, output: Any) -> None:
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not outputs:
        hint = "leave inference_mode" if torch.is_inference_mode_enabled() else "give an input that does"
        raise Unsupported(f"there is no backward to run: no output of the model requires a gradient; {hint}")
    with recorder.paused():
        ones = [torch.ones_like(tensor) for tensor in outputs]  # the gradient of their sum
    with keep_gradients(outputs):
        torch.autograd.backward(outputs, ones)
