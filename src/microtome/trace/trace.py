"""The run that a trace is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from microtome.engine import Probe, Session, tensors_in
from microtome.engine.arguments import CannotSubstitute
from microtome.engine.backward import preserve_gradients
from microtome.engine.meta_run import SUBSTITUTION_LOCK, substitute_tensors
from microtome.engine.pytree import clone_tensors
from microtome.engine.selectors import check_model
from microtome.engine.signals import grad_mode
from microtome.errors import BadInputs, MicrotomeError, Unsupported, describe_error
from microtome.inputs import Inputs
from microtome.results.trace import TensorMode

if TYPE_CHECKING:
    from microtome.results.trace import How, Trace
    from microtome.trace.costs import TraceCosts
    from microtome.trace.recorder import TraceRecorder

_TENSOR_MODES: tuple[TensorMode, ...] = ("meta", "fake", "real")


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
    make_probes: Callable[[TraceRecorder], Iterable[Probe]] | None = None,
    after_run: Callable[[Callable[[Probe], None]], None] | None = None,
    values: bool = False,
) -> tuple[Trace, TraceCosts]:
    """Record a trace, and the costs from which any convention prices it.

    Args:
        make_probes: Returns probes to attach beside a recorder. Called once per attempted run; the probes of the last
            attempt observed the trace that is returned.
        after_run: Called after the run, before the model's state is restored, with a function that runs the model
            again under a probe.
        values: Run on real tensors where meta tensors will not do, if all are there: code that asks whether a tensor is
            fake would do something else than in a run. Also digest the elements of constants.
    """
    from microtome.results.trace import How  # not before it is needed: see `microtome.trace`
    from microtome.trace.recorder import TraceRecorder

    if fake not in (None, True, False):
        raise BadInputs(f"fake is True, False or None, got {fake!r}")
    check_model(model)
    inputs = Inputs.of(inputs)
    with SUBSTITUTION_LOCK:  # while another thread looks at it, its weights are on meta
        device, empty = _devices(model, inputs)
    tensor_modes: tuple[TensorMode, ...] = (
        ("real",) if fake is False else ("fake",) if fake else _TENSOR_MODES[:2] if empty else _TENSOR_MODES
    )
    if values and not empty and fake is None:
        tensor_modes = ("meta", "real")
    why: list[str] = []
    stopped: tuple[int, str] | None = None
    for tensor_mode in tensor_modes:
        if tensor_mode == "meta" and device is None:
            why.append("not on meta tensors: weights and inputs lie on several devices")
            continue
        try:
            recorder = TraceRecorder(tensor_mode, device, digest_constants=values)
            probes = [recorder] if make_probes is None else [recorder, *make_probes(recorder)]
            made = _run(model, inputs, How(tensor_mode, "; ".join(why)), probes, backward=backward, after_run=after_run)
            if tensor_mode == "fake" and stopped is not None and not recorder.has_op(*stopped):
                # Where the operator failed on meta tensors, none ran: the code asks whether its tensors have values.
                if tensor_mode != tensor_modes[-1]:
                    raise CannotSubstitute(f"its code does without {stopped[1]} there")
                made = replace(
                    made, how=How(tensor_mode, "; ".join([*why, f"a real run has {stopped[1]}, and may differ"]))
                )
            return made, recorder.costs
        except Exception as error:  # whatever a model raises on stand-ins, it may run on dearer ones
            cause = error.__cause__ if isinstance(error.__cause__, CannotSubstitute) else error
            if isinstance(cause, MicrotomeError):
                raise
            if tensor_mode == tensor_modes[-1]:
                if tensor_mode != "real":
                    raise Unsupported(f"the model cannot be traced without computing: {_brief(cause)}") from error
                raise
            why.append(f"not on {tensor_mode} tensors: {_brief(cause)}")
            stopped = None if isinstance(cause, CannotSubstitute) else recorder.unfinished_op()
    raise AssertionError


def _devices(model: nn.Module, inputs: Inputs) -> tuple[str | None, bool]:
    """The one device that weights and inputs lie on, or None; and whether there are weights without any."""
    tensors = (*model.parameters(), *model.buffers(), *tensors_in((inputs.args, inputs.kwargs)))
    devices = {str(tensor.device) for tensor in tensors}
    placed = sorted(devices - {"meta"})
    return (placed[0] if placed else "meta") if len(placed) <= 1 else None, "meta" in devices


def _brief(error: BaseException) -> str:
    return str(error) if isinstance(error, CannotSubstitute) else describe_error(error)


def _run(
    model: nn.Module,
    inputs: Inputs,
    how: How,
    probes: list[Any],
    *,
    backward: bool,
    after_run: Callable[[Callable[[Probe], None]], None] | None,
) -> Trace:
    from microtome.flops.composite import COMPOSITE_FORMULAS

    recorder: TraceRecorder = probes[0]

    with substitute_tensors(model, inputs, how.tensor_mode, recorder.backups) as substitute_inputs:
        recorder.register_tensors(model, substitute_inputs)
        grad = torch.is_grad_enabled() or backward
        session = Session(model, probes, backward=backward, composite=COMPOSITE_FORMULAS, other_threads="refuse")
        with session, grad_mode(grad):
            output = substitute_inputs.run(model)
            if backward:
                _backward(recorder, output)
        traced = recorder.trace(how)  # while the output is there: it outlives the run

        def run_again(probe: Probe) -> None:
            more = Session(model, [recorder.fork(), probe], composite=COMPOSITE_FORMULAS, other_threads="refuse")
            args, kwargs = clone_tensors(
                (substitute_inputs.args, substitute_inputs.kwargs)
            )  # others than what the last run has left
            with more, grad_mode(grad):
                Inputs(*args, **kwargs).run(model)

        if after_run is not None:
            after_run(run_again)
        return traced


def _backward(recorder: TraceRecorder, output: Any) -> None:
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not outputs:
        hint = "leave inference_mode" if torch.is_inference_mode_enabled() else "give an input that does"
        raise Unsupported(f"there is no backward to run: no output of the model requires a gradient; {hint}")
    with recorder.paused():
        ones = [torch.ones_like(tensor) for tensor in outputs]  # the gradient of their sum
    with preserve_gradients(outputs):
        torch.autograd.backward(outputs, ones)
