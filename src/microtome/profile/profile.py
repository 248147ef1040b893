"""Profile the calls of a model: count from a trace, and measure in separate runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from microtome.engine.argument_names import describe_arguments
from microtome.engine.selectors import check_model, path_aliases, unwrap_model
from microtome.errors import BadInputs, BadQuery, Unsupported
from microtome.example_inputs import example_inputs
from microtome.inputs import Inputs
from microtome.trace.trace import record

if TYPE_CHECKING:
    from microtome.devices.meters import Meter
    from microtome.engine import Probe
    from microtome.flops.conventions.base import Convention
    from microtome.profile.accelerator import DeviceTimeMethod
    from microtome.profile.energy import EnergyModel
    from microtome.profile.measurement import MeasurementSpec
    from microtome.profile.passes import Progress
    from microtome.results.phases import Phases
    from microtome.results.profile import Coverage, Profile
    from microtome.results.summary import ModelSummary
    from microtome.results.trace import Trace
    from microtome.trace.costs import TraceCosts


@overload
def profile(model: nn.Module) -> Profile | ModelSummary: ...
@overload
def profile(
    model: nn.Module,
    inputs: Any,
    *,
    backward: bool = False,
    convention: str = "microtome",
    strict: bool = False,
    fake: bool | None = None,
    measure: Collection[str] = (),
    depth: int | None = None,
    warmup: int | None = None,
    repeat: int = 30,
    budget_s: float = 20.0,
    device_time: DeviceTimeMethod = "kernels",
    energy: Literal["share", "replay"] | EnergyModel = "share",
    meter: Meter | str | None = None,
    progress: Progress | None = None,
) -> Profile: ...
@overload
def profile(
    model: nn.Module,
    inputs: Any = ...,
    *,
    phases: Collection[str],
    convention: str = "microtome",
    strict: bool = False,
    fake: bool | None = None,
    measure: Collection[str] = (),
    depth: int | None = None,
    warmup: int | None = None,
    repeat: int = 30,
    budget_s: float = 20.0,
    device_time: DeviceTimeMethod = "kernels",
    energy: Literal["share", "replay"] | EnergyModel = "share",
    meter: Meter | str | None = None,
    progress: Progress | None = None,
) -> Phases: ...
def profile(
    model: nn.Module,
    inputs: Any = ...,
    *,
    phases: Collection[str] | None = None,
    backward: bool = False,
    convention: str = "microtome",
    strict: bool = False,
    fake: bool | None = None,
    measure: Collection[str] = (),
    depth: int | None = None,
    warmup: int | None = None,
    repeat: int = 30,
    budget_s: float = 20.0,
    device_time: DeviceTimeMethod = "kernels",
    energy: Literal["share", "replay"] | EnergyModel = "share",
    meter: Meter | str | None = None,
    progress: Progress | None = None,
) -> Profile | ModelSummary | Phases:
    """Count the parameters, MACs, FLOPs and bytes of each call of a model, and measure more if asked to.

    Counting computes nothing where the model can run on meta or fake tensors.

    Args:
        inputs: A tensor, a tuple, a dict, an `Inputs`, or a shape such as `"1x3x224x224"`; see `Inputs`. If left out,
            models of torchvision, timm and transformers run on example inputs, and other models do not run: the result
            is a `ModelSummary` of their modules and parameters.
        phases: Of a language model: `"prefill"`, the run over the prompt, `"decode"`, the run for one more token with
            the cache of the prompt, or both. The result is a `Phases`, with a profile of each.
        backward: Also count the backward of the sum of the outputs, and the memory saved for it.
        convention: The definition of a FLOP: `"microtome"` (twice the MACs, and every other operation), or that of
            `"torchvision"`, `"fvcore"`, `"ptflops"` or `"torchstat"`.
        strict: Raise if an operator has no formula, rather than list it in `Profile.coverage`.
        fake: As for `trace`: True runs on fake tensors; False runs the model as it is.
        measure: The quantities to measure in separate runs: `"time"`, `"memory"`, `"energy"`, `"load"`, or several.
        depth: The maximum depth of measured calls in the tree.
        warmup: The number of passes before; None: until two in a row take about the same time.
        repeat: The number of measured passes.
        budget_s: The time for each quantity after which no further pass begins; at least three are made.
        device_time: The method for times of an accelerator: `"kernels"`, their durations from torch's profiler, or
            `"graph"`, events in a CUDA graph of the forward.
        energy: `"share"`, the model's energy shared by time; `"replay"`, each layer run on its own; or an
            `EnergyModel`, whose coefficients make an estimate.
        meter: The source of energy readings: a `Meter`, its name, or `"csv:FILE"`; None: the first available one.
        progress: Called with the current task, the number of completed steps, and that of all steps.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> p = mt.profile(*zoo.build("tiny-resnet"))
    >>> p.total.params, p.total.macs
    (11122, 9355584)
    >>> p["layer1.0.conv1"].macs                    # 8 channels from 8, 3 x 3, at 2 x 32 x 32 places
    1179648
    >>> [(row.address, row.macs) for row in p.top(2, by="macs")]
    [('layer1.0.conv1', 1179648), ('layer1.0.conv2', 1179648)]
    """
    priced_by, spec = parse_options(
        convention=convention,
        measure=measure,
        depth=depth,
        warmup=warmup,
        repeat=repeat,
        budget_s=budget_s,
        device_time=device_time,
        energy=energy,
        meter=meter,
        progress=progress,
        backward=backward,
    )
    check_model(model)
    if inputs is ...:
        example = example_inputs(unwrap_model(model))
        if example is None:
            if spec is not None or backward or strict:
                raise BadInputs(
                    f"no example inputs are known for a {type(model).__name__}: pass inputs, such as (1, 3, 224, 224), "
                    "to measure it, to count its backward, or to check its operators"
                )
            from microtome.profile.summary import summarize

            return summarize(model)
        inputs = example

    def profile_run(run: Inputs, *probes: Probe, measured: bool = True) -> Profile:
        trace, costs = record(model, run, backward=backward, fake=fake, make_probes=lambda _: probes)
        static = profile_trace(trace, costs, model, run, priced_by, backward=backward)
        if strict and static.coverage.unknown:
            raise _unknown_op_error(static.coverage)
        if spec is None or not measured:
            return static
        from microtome.profile.measurement import measure as add_measurements

        return add_measurements(static, model, run, spec)

    if phases is None:
        return profile_run(Inputs.of(inputs, model))
    if backward:
        raise BadQuery("phases are of generation, which has no backward: leave out backward or phases")
    from microtome.profile.phases import profile_phases

    return profile_phases(model, inputs, phases, profile_run, needs_values=spec is not None and spec.needs_runs)


def parse_options(
    *,
    convention: str,
    measure: Collection[str],
    repeat: int,
    budget_s: float,
    warmup: int | None,
    progress: Progress | None,
    **options: Any,
) -> tuple[Convention, MeasurementSpec | None]:
    """Return the definition of a FLOP, and what to measure, from the options of `profile`.

    Args:
        options: Those that are fields of `MeasurementSpec`.

    Raises:
        BadQuery: One is invalid.
    """
    from microtome.flops.conventions import find_convention  # imported when needed: see `microtome.profile`
    from microtome.profile.measurement import MeasurementSpec
    from microtome.profile.passes import PassSchedule

    spec = MeasurementSpec.parse(measure, PassSchedule(repeat, budget_s, warmup, progress), **options)
    return find_convention(convention), spec


def profile_trace(
    trace: Trace, costs: TraceCosts, model: nn.Module, inputs: Inputs, convention: Convention, *, backward: bool
) -> Profile:
    """Build the profile of a trace in a convention, without running the model."""
    from microtome.profile.static import ProfileBuilder
    from microtome.results.profile import Profile

    builder = ProfileBuilder(trace, costs, model, convention, backward=backward)
    return Profile(
        model=type(model).__name__,
        inputs=describe_arguments(model, inputs),
        convention=convention.name,
        how=f"{trace.how.tensor_mode} tensors" + (f" ({trace.how.why})" if trace.how.why else ""),
        coverage=builder.coverage(),
        calls=builder.rows(),
        timeline=builder.timeline(),
        aliases=path_aliases(model),
        gradients=backward or (torch.is_grad_enabled() and any(one.requires_grad for one in model.parameters())),
    )


def _unknown_op_error(coverage: Coverage) -> Unsupported:
    ops = "; ".join(
        f"{op.name} (in {', '.join(repr(call) for call in op.calls[:3])}{', …' if len(op.calls) > 3 else ''})"
        for op in coverage.unknown
    )
    return Unsupported(
        f"no formula is known for {ops}: register one with microtome.register_formula(op, formula), "
        "or leave out strict to list it in coverage"
    )
