"""Measurements of a profile beside the metrics of its calls: spreads, methods, load, and memory over the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity, in its own unit.

    Attributes:
        q1: The first quartile; `q3` is the third.
        low: With `high`, the 95 % bootstrap interval of the median.
        count: The number of samples.
        outliers: The number of samples more than 1.5 times q3 - q1 outside the quartiles, which all else includes.
        method: The method of the measurement.
    """

    median: float
    q1: float
    q3: float
    low: float
    high: float
    count: int
    outliers: int
    method: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """The method of the times of a profile.

    Attributes:
        bare: Seconds of a whole forward without time stamps, run in turns with the others.
        ratio: A forward with time stamps over a bare one, the medians; see `is_same_code`.
        stamp_s: Seconds of the time stamps of a call, measured on empty modules, and subtracted from the calls around.
        warmups: The number of passes before.
        fast_paths: Whether fused operators of torch ran, as in bare passes; False where they would hide calls.
        backward: Seconds of a bare backward; None if there was none.
        backward_ratio: A backward with time stamps over a bare one.
        backward_stamp_s: Seconds of a time stamp in the backward, which are subtracted.
        device: Seconds of the kernels of a bare forward, by torch's profiler; None on a CPU.
        device_backward: Those of a bare backward.
        device_ratio: The device times of all calls over those of a bare forward.
        compiled: Whether bare passes ran compiled code, which runs as Python while calls are timed.
    """

    bare: Spread
    ratio: float
    stamp_s: float
    warmups: int
    fast_paths: bool = True
    backward: Spread | None = None
    backward_ratio: float | None = None
    backward_stamp_s: float | None = None
    device: Spread | None = None
    device_backward: Spread | None = None
    device_ratio: float | None = None
    compiled: bool = False

    @property
    def is_same_code(self) -> bool:
        """Whether bare passes ran the code that was timed, so that the ratios are the cost of time stamps."""
        return self.fast_paths and not self.compiled


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """The method of the energies of a profile.

    Attributes:
        method: `"share"`: the whole model's, shared by time. `"replay"`: each layer run alone. `"estimate"`: from
            counts and coefficients, not measured.
        meter: The meter; empty for an estimate.
        whole: Joules of a whole pass, with everything else that the meter measures; None for an estimate.
        idle_w: Watts of the idle machine; None: unknown.
        pass_s: Seconds of a pass while it was measured.
        closure_j: Joules of the whole, less those of its parts.
        net_closure_j: The same, above idle.
        not_replayed: The reason why a layer has no energy, by its address.
    """

    method: str
    meter: str
    whole: Spread | None
    idle_w: float | None
    pass_s: float | None
    closure_j: float | None
    net_closure_j: float | None
    not_replayed: dict[str, str]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The method of the measured memory of a profile.

    Attributes:
        rss_before_bytes: The resident set size of the process before the passes.
        rss_peak_bytes: Its peak while they ran, as sampled.
    """

    method: str
    rss_before_bytes: int
    rss_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the machine while a call ran, with all calls inside it; None where it cannot be read.

    Attributes:
        cpu: The fraction of all cores that was in use, from 0 to 1.
        gpu: The fraction of the time in which the GPU ran kernels.
        memory: The fraction of the machine's memory that was in use.
        gpu_memory: The fraction of the GPU's memory that was in use.
        watts: The power.
        samples: The number of samples that overlap with the call.
    """

    cpu: float | None
    gpu: float | None
    memory: float | None
    gpu_memory: float | None
    watts: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """The method of the load.

    Attributes:
        every_s: The median time between two samples. Shorter calls have the load of the time around them.
        samples: The number of samples.
        passes: The number of passes that ran meanwhile.
        missing: The reason why a quantity was not read, by its name.
    """

    every_s: float
    samples: int
    passes: int
    missing: dict[str, str]


Kind = Literal["parameter", "buffer", "input", "constant", "op", "rest"]


@dataclass(frozen=True, slots=True)
class Alive:
    """Memory that is live at the peak.

    Attributes:
        kind: `"op"` if an operator produced it, else the kind of value; `"rest"` for all others.
        name: The address of the call that produced it, or the name of an input; empty for several.
        count: The number of storages. All parameters are one entry, and so are all buffers.
    """

    kind: Kind
    name: str
    nbytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory of a run, operator by operator, weights and inputs included.

    Attributes:
        live_bytes: Bytes that are live while each operator runs.
        calls: The index of the row that each operator of the forward or of the backward belongs to.
        forward: The number of operators of the forward; those of the backward follow.
        alive: The values that are live at the peak, the largest first.
    """

    live_bytes: tuple[int, ...]
    calls: tuple[int, ...]
    forward: int
    alive: tuple[Alive, ...]

    @property
    def peak(self) -> int | None:
        """The index of the operator at the peak; None where none ran."""
        return max(range(len(self.live_bytes)), key=self.live_bytes.__getitem__, default=None)

    def check(self, rows: int) -> None:
        """Raise ValueError if it cannot be the timeline of a profile with so many rows."""
        if len(self.calls) != len(self.live_bytes) or not 0 <= self.forward <= len(self.calls):
            raise ValueError(f"expected a row for each of {len(self.live_bytes)} operators, got {len(self.calls)}")
        if outside := [at for at in self.calls if not 0 <= at < rows]:
            raise ValueError(f"expected operators of {rows} rows, got one of row {outside[0]}")
