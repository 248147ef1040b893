"""`profile`: what each call of a model costs."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import nn

from microtome.errors import BadQuery, Unsupported
from microtome.inputs import Inputs
from microtome.trace.run import record

if TYPE_CHECKING:
    from microtome.profile.data import Coverage, Profile
    from microtome.profile.timing import Progress


def profile(
    model: nn.Module,
    inputs: Any,
    *,
    backward: bool = False,
    convention: str = "microtome",
    strict: bool = False,
    fake: bool | None = None,
    measure: Collection[str] = (),
    repeat: int = 30,
    budget_s: float = 20.0,
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
        measure: What to measure too, in passes of its own: `"time"`, on a CPU.
        repeat: How many passes to measure.
        budget_s: After so many seconds no further pass begins; three are made in any case.
        progress: Told of each pass: how many are done, and how many there are to be.

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
    from microtome.count.conventions import convention as find
    from microtome.profile.build import Builder  # not before they are needed: see `microtome.profile`
    from microtome.profile.data import Profile

    given = Inputs.of(inputs)
    trace, by_module = record(model, given, backward=backward, fake=fake, convention=convention)
    builder = Builder(trace, model, find(convention), by_module, backward=backward)
    coverage = builder.coverage()
    if strict and coverage.unknown:
        raise _not_known(coverage)
    rows, timing = builder.rows(), None
    if _wants_time(measure):
        from microtome.profile.measured import timed

        rows, timing = timed(rows, model, given, repeat=repeat, budget_s=budget_s, progress=progress)
    return Profile(
        model=type(model).__name__,
        inputs=repr(given),
        convention=convention,
        how=f"{trace.how.stand} tensors" + (f" ({trace.how.why})" if trace.how.why else ""),
        coverage=coverage,
        calls=rows,
        timing=timing,
    )


def _wants_time(measure: Collection[str]) -> bool:
    names = (measure,) if isinstance(measure, str) else tuple(measure)
    for name in names:
        if name != "time":
            raise BadQuery(f"{name!r} cannot be measured: write 'time'")
    return bool(names)


def _not_known(coverage: Coverage) -> Unsupported:
    listed = "; ".join(
        f"{op.name} (in {', '.join(repr(call) for call in op.calls[:3])}{', …' if len(op.calls) > 3 else ''})"
        for op in coverage.unknown
    )
    return Unsupported(
        f"no formula is known for {listed}: say what it costs with microtome.register_formula(op, formula), "
        "or leave out strict to have it listed in coverage"
    )
