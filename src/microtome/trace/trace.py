"""Trace a model: run it once on the cheapest kind of tensors that gives the calls and operators of a real run."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from microtome.engine import Probe, Session, tensors_in
from microtome.engine.arguments import CannotSubstitute
from microtome.engine.backward import preserve_gradients
from microtome.engine.meta_run import SUBSTITUTION_LOCK, substitute_tensors
from microtome.engine.pytree import clone_tensors
from microtome.engine.selectors import check_model, path_aliases
from microtome.engine.signals import grad_mode
from microtome.errors import BadInputs, MicrotomeError, NeedsValues, Unsupported, describe_error
from microtome.inputs import Inputs
from microtome.results.trace import How, TensorMode, Trace

if TYPE_CHECKING:  # imported when needed: formulas take long to import
    from microtome.trace.costs import TraceCosts
    from microtome.trace.recorder import TraceRecorder

RunAgain = Callable[[Probe], None]

_WITHOUT_VALUES = re.compile(r"fake|meta\b|data pointer|data-dependent", re.IGNORECASE)


def trace(model: nn.Module, inputs: Any, *, backward: bool = False, fake: bool | None = None) -> Trace:
    """Run the model once and record its calls, its operators, and the values they read and create.

    By default nothing is computed: meta tensors replace weights and inputs or, if the model does not support that, fake
    tensors; real ones are used only if its code reads values. `Trace.how` tells which, and why. The current gradient
    mode applies. Afterwards model and random state are as before; meanwhile, no other thread may use the model.

    Args:
        inputs: A tensor, a tuple, a dict, an `Inputs`, or a shape such as `"1x3x224x224"`; see `Inputs`.
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
    after_run: Callable[[RunAgain], None] | None = None,
    values: bool = False,
) -> tuple[Trace, TraceCosts]:
    """Record a trace, and the costs from which any convention prices it.

    Args:
        make_probes: Returns probes to attach beside a recorder. Called once per attempted run; the probes of the last
            attempt observed the trace that is returned.
        after_run: Called after the run, before the model's state is restored, with a function that runs the model
            again under a probe.
        values: Prefer real tensors, if none is on meta, to fake ones, on which code may branch differently than in a
            real run. Also digest the elements of constants.
    """
    from microtome.trace.recorder import TraceRecorder

    if fake not in (None, True, False):
        raise BadInputs(f"expected fake to be True, False or None, got {fake!r}")
    check_model(model)
    inputs = Inputs.of(inputs, model)
    with SUBSTITUTION_LOCK:  # while another thread traces the model, its weights are on meta
        device, has_meta = _devices(model, inputs)
    reasons: list[str] = []
    stopped_at: tuple[int, str] | None = None
    modes = _tensor_modes(fake, prefer_real=values, has_meta=has_meta)
    for mode in modes:
        if mode == "meta" and device is None:
            reasons.append("not on meta tensors: weights and inputs are on several devices")
            continue
        recorder = TraceRecorder(mode, device, digest_constants=values)
        try:
            probes = [recorder] if make_probes is None else [recorder, *make_probes(recorder)]
            trace = _run(model, inputs, How(mode, "; ".join(reasons)), probes, backward=backward, after_run=after_run)
            if mode == "fake" and stopped_at is not None and not recorder.has_op(*stopped_at):
                # The operator that failed on meta tensors did not run: the code asks whether its tensors have values.
                if mode != modes[-1]:
                    raise CannotSubstitute(f"its code does not run {stopped_at[1]} there")
                reasons.append(f"a real run has {stopped_at[1]}, and may differ")
                trace = replace(trace, how=How(mode, "; ".join(reasons)))
            return replace(trace, aliases=path_aliases(model)), recorder.costs
        except Exception as error:  # whatever a model raises, it may run on more expensive tensors
            cause = error.__cause__ if isinstance(error.__cause__, CannotSubstitute) else error
            if isinstance(cause, MicrotomeError) or mode == modes[-1] == "real":
                raise
            message = str(cause) if isinstance(cause, CannotSubstitute) else describe_error(cause)
            if mode == modes[-1]:
                if not isinstance(cause, CannotSubstitute) and not _needs_values(cause):
                    raise
                raise NeedsValues(f"the model cannot be traced without computing: {message}") from error
            reasons.append(f"not on {mode} tensors: {message}")
            stopped_at = None if isinstance(cause, CannotSubstitute) else recorder.unfinished_op()
    raise AssertionError


def _needs_values(error: Exception) -> bool:
    """Whether an exception on fake tensors tells that these have no values, or torch that it does not support them."""
    is_torch = type(error).__module__.partition(".")[0] == "torch"
    if isinstance(error, AssertionError) and (frames := traceback.extract_tb(error.__traceback__)):
        is_torch = Path(torch.__file__).parent in Path(frames[-1].filename).parents  # an assertion of torch's own
    return is_torch or isinstance(error, NotImplementedError) or _WITHOUT_VALUES.search(str(error)) is not None


def _tensor_modes(fake: bool | None, *, prefer_real: bool, has_meta: bool) -> tuple[TensorMode, ...]:
    """The kinds of tensors to try, in order."""
    if fake is not None:
        return ("fake",) if fake else ("real",)
    if has_meta:
        return ("meta", "fake")
    return ("meta", "real") if prefer_real else ("meta", "fake", "real")


def _devices(model: nn.Module, inputs: Inputs) -> tuple[str | None, bool]:
    """The device of all weights and inputs, or None if there are several; and whether any is on meta."""
    tensors = (*model.parameters(), *model.buffers(), *tensors_in((inputs.args, inputs.kwargs)))
    devices = {str(tensor.device) for tensor in tensors}
    placed = sorted(devices - {"meta"})
    return (placed[0] if placed else "meta") if len(placed) <= 1 else None, "meta" in devices


def _run(
    model: nn.Module,
    inputs: Inputs,
    how: How,
    probes: list[Any],
    *,
    backward: bool,
    after_run: Callable[[RunAgain], None] | None,
) -> Trace:
    from microtome.flops.composite import COMPOSITE_FORMULAS

    recorder: TraceRecorder = probes[0]
    with substitute_tensors(model, inputs, how.tensor_mode, recorder.backups) as substitute_inputs:
        recorder.register_tensors(model, substitute_inputs)
        grad = torch.is_grad_enabled() or backward
        make_session = partial(Session, model, composite=COMPOSITE_FORMULAS, other_threads="refuse")
        with make_session(probes, backward=backward), grad_mode(grad):
            output = substitute_inputs.run(model)
            if backward:
                _backward(recorder, output)
        trace = recorder.trace(how)  # before the output is freed: it outlives the run

        def run_again(probe: Probe) -> None:
            # The first run may have mutated its inputs.
            args, kwargs = clone_tensors((substitute_inputs.args, substitute_inputs.kwargs))
            with make_session([recorder.fork(), probe]), grad_mode(grad):
                Inputs(*args, **kwargs).run(model)

        if after_run is not None:
            after_run(run_again)
        return trace


def _backward(recorder: TraceRecorder, output: Any) -> None:
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not outputs:
        hint = "leave inference_mode" if torch.is_inference_mode_enabled() else "pass an input that does"
        raise Unsupported(f"there is no backward to run: no output of the model requires a gradient; {hint}")
    with recorder.paused():
        ones = [torch.ones_like(tensor) for tensor in outputs]  # the gradient of their sum
    with preserve_gradients(outputs):
        torch.autograd.backward(outputs, ones)
