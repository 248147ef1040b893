"""What one call costs, and how costs add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from microtome.results.methods import Load
from microtome.results.spread import Spread


@dataclass(frozen=True, slots=True)
class Amounts:
    """Quantities that add up: those of the parts make those of the whole. None: not counted.

    Attributes:
        params: Parameters. One that is used in several places counts where it is first used, and there alone.
        trainable_params: Those that require a gradient.
        macs: Multiply-accumulates of the forward.
        flops: Floating-point operations of the forward, by the convention.
        madds: Multiplications and additions of the forward, each counted, by the convention.
        read_bytes: What operators of the forward read; a view reads nothing.
        write_bytes: What they write; a value that is changed in place counts once.
        backward_macs: Multiply-accumulates of the backward, what it computes again included.
        backward_flops: Its floating-point operations.
        saved_bytes: What the forward makes and the backward reads, and is kept in memory between them.
        time_s: Seconds that the host took for the forward, measured: the median of the passes. On a GPU it launches
            the work, and goes on before that is done.
        device_s: Seconds that the GPU worked for the forward.
        backward_s: As `time_s`, of the backward.
        backward_device_s: As `device_s`, of the backward.
        energy_j: Joules of a pass, the backward included if there was one.
        net_energy_j: The same, without what is drawn when nothing runs.
    """

    params: int = 0
    trainable_params: int = 0
    param_bytes: int = 0
    buffer_bytes: int = 0
    macs: int | None = 0
    flops: int | None = 0
    madds: int | None = 0
    read_bytes: int = 0
    write_bytes: int = 0
    backward_macs: int | None = None
    backward_flops: int | None = None
    saved_bytes: int | None = None
    time_s: float | None = None
    device_s: float | None = None
    backward_s: float | None = None
    backward_device_s: float | None = None
    energy_j: float | None = None
    net_energy_j: float | None = None

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte moved; None where none is."""
        return None if self.flops is None or not self.moved_bytes else self.flops / self.moved_bytes


AMOUNTS = tuple(field.name for field in fields(Amounts))


def add(several: Iterable[Amounts]) -> dict[str, Any]:
    """The sums, by the name of the quantity. What is None in all of them is None; what is not known adds nothing."""
    columns = zip(*([getattr(amounts, name) for name in AMOUNTS] for amounts in several), strict=True)
    sums = [sum(known) if (known := [value for value in column if value is not None]) else None for column in columns]
    return dict(zip(AMOUNTS, sums, strict=True)) if sums else {}


@dataclass(frozen=True, slots=True)
class Group(Amounts):
    """What several have in common and cost together.

    Attributes:
        name: The type of the modules, or the name of the operators.
        runs: How many calls, or how many runs of the operator.
    """

    name: str = ""
    runs: int = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """The shape and the dtype of a tensor that goes into a call or comes out of it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Row(Amounts):
    """One call, with all calls inside it.

    Attributes:
        parent: The address of the call that contains it; None for the root.
        height: 1 for a call without calls inside, else one more than the highest of those.
        own: What the call costs without the calls inside it.
        ops: The operators that its own code ran in the forward, by name.
        shared_params: Parameters that are used here and counted elsewhere: tied weights, modules that run again.
        output_bytes: What it returns.
        peak_bytes: The most bytes that live at once while its forward runs, weights and inputs included.
        measured_peak_bytes: The same as measured; None if it was not.
        until_s: Seconds of the host from the beginning of the run to the end of the call, measured in one run: what a
            run of layers takes, which is not the sum of what each takes.
        until_device_s: Seconds that the GPU worked for all that was launched until then.
        load: How busy the machine was; None if that was not sampled.
        spreads: Of measured quantities, by their names: how far the passes spread, and by which method.
    """

    address: str = ""
    path: str = ""
    type: str = ""
    depth: int = 0
    height: int = 1
    parent: str | None = None
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    shared_params: int = 0
    output_bytes: int = 0
    peak_bytes: int = 0
    own: Amounts = Amounts()
    ops: tuple[Group, ...] = ()
    measured_peak_bytes: int | None = None
    until_s: float | None = None
    until_device_s: float | None = None
    load: Load | None = None
    spreads: dict[str, Spread] = field(default_factory=dict)

    @property
    def is_launch_bound(self) -> bool | None:
        """Whether the host takes longer to launch the work than the GPU to do it; None without work, or times of it."""
        return self.time_s > self.device_s if self.device_s and self.time_s is not None else None
