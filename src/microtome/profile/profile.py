"""`profile`: what each call of a model costs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from microtome.errors import Unsupported
from microtome.inputs import Inputs
from microtome.trace.trace import record

if TYPE_CHECKING:
    from microtome.devices.meters import Meter
    from microtome.profile.cuda import Way
    from microtome.profile.energy import EnergyModel
    from microtome.profile.measurement import MeasurementSpec
    from microtome.profile.repeats import Progress
    from microtome.results.profile import Coverage, Profile
    from microtome.results.rows import Row


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
    device_time: Way = "kernels",
    energy: Literal["share", "replay"] | EnergyModel = "share",
    meter: Meter | str | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Say what each call of a model costs: parameters, MACs, FLOPs, bytes. Nothing is computed where it need not be.

    Args:
        inputs: A tensor, a tuple, a dict, an `Inputs`, or a text such as `"1x3x224x224"`.
        backward: Also count the backward of the sum of the outputs, and what is kept in memory for it.
        convention: What counts as a FLOP: `"microtome"` (twice the MACs, and every other operation), or as
            `"torchvision"`, `"fvcore"`, `"ptflops"` or `"torchstat"` count.
        strict: Raise where an operator has no formula, rather than list it in `Profile.coverage`.
        fake: As for `trace`: True runs on fake tensors; False runs the model as it is.
        measure: What to measure too, in runs of their own: `"time"`, `"memory"`, `"energy"`, `"load"`, or several.
        depth: Measure calls down to here in the tree, and nothing below.
        warmup: How many passes to make before; None: until two in a row take about the same.
        repeat: How many passes to measure.
        budget_s: For each thing that is measured: after so many seconds no further pass begins, but three are made.
        device_time: How the times of a GPU are taken: `"kernels"`, their durations from torch's profiler, or
            `"graph"`, events in a CUDA graph of the forward.
        energy: `"share"`, the whole model's energy shared by time; `"replay"`, each layer run alone; or an
            `EnergyModel`, whose coefficients make an estimate.
        meter: What energy is read from: a `Meter`, the name of one, `"csv:FILE"`; None: the first that is there.
        progress: Told what is being done, how many steps of it are done, and how many there are to be.

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
    from microtome.flops.conventions.base import convention as find
    from microtome.profile.static import ProfileBuilder  # not before they are needed: see `microtome.profile`
    from microtome.results.profile import Profile

    wish: MeasurementSpec | None = None
    if not isinstance(measure, tuple) or measure:
        from microtome.profile.measurement import MeasurementSpec, wished
        from microtome.profile.repeats import Schedule

        schedule = Schedule(repeat, budget_s, warmup, progress)
        asked = wished(measure)
        wish = MeasurementSpec(asked, schedule, depth, device_time, energy, meter) if asked else None
    given = Inputs.of(inputs)
    trace, by_module = record(model, given, backward=backward, fake=fake, convention=convention)
    builder = ProfileBuilder(trace, model, find(convention), by_module, backward=backward)
    coverage = builder.coverage()
    if strict and coverage.unknown:
        raise _not_known(coverage)
    static = Profile(
        model=type(model).__name__,
        inputs=repr(given),
        convention=convention,
        how=f"{trace.how.tensor_mode} tensors" + (f" ({trace.how.why})" if trace.how.why else ""),
        coverage=coverage,
        calls=builder.rows(),
        timeline=builder.timeline(),
        gradients=backward or (torch.is_grad_enabled() and any(one.requires_grad for one in model.parameters())),
    )
    return static if wish is None else _measured(static, model, given, wish, backward=backward)


def _measured(static: Profile, model: nn.Module, inputs: Inputs, wish: MeasurementSpec, *, backward: bool) -> Profile:
    """The profile with what was wished for."""
    from microtome.flops.conventions.base import convention as find
    from microtome.profile import measurement
    from microtome.profile.static import ProfileBuilder

    found = measurement.measure(static.calls, model, inputs, wish, backward=backward)
    if "memory" in wish.measure and found.memory is None:

        def real_rows() -> tuple[Row, ...]:
            run, modules = record(model, inputs, backward=backward, fake=False, convention=static.convention)
            return ProfileBuilder(run, model, find(static.convention), modules, backward=backward).rows()

        measurement.host_memory(found, wish, real_rows)
    return replace(static, calls=tuple(found.rows), **found.how())


def _not_known(coverage: Coverage) -> Unsupported:
    listed = "; ".join(
        f"{op.name} (in {', '.join(repr(call) for call in op.calls[:3])}{', …' if len(op.calls) > 3 else ''})"
        for op in coverage.unknown
    )
    return Unsupported(
        f"no formula is known for {listed}: say what it costs with microtome.register_formula(op, formula), "
        "or leave out strict to have it listed in coverage"
    )
