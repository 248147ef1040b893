"""Measure the energy of each call: the model's energy shared by time, layers replayed one by one, or an estimate."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
from torch import nn

from microtome.addresses import strip_first_index
from microtome.devices.meters import Meter, RepeatedWork, metered
from microtome.devices.statistics import spreads
from microtome.engine import Call, Probe
from microtome.engine.pytree import clone_tensors
from microtome.errors import BadQuery, SensorFailed, Unsupported, describe_error
from microtome.inputs import Inputs
from microtome.profile.call_tree import CallTree
from microtome.profile.passes import Passes, PassSchedule
from microtome.results.measurements import EnergyUse, Spread
from microtome.results.rows import Row

METHODS = {
    "share": "the whole model's energy, shared by time",
    "replay": "the layer, or an equal one, run repeatedly on its own",
}
_IDLE_S = 1.0
#: The minimum and maximum seconds for which a layer is replayed.
_REPLAY_S, _MAX_REPLAY_S = 1.0, 3.0


@dataclass(frozen=True)
class EnergyModel:
    """Coefficients of your hardware for an estimate of energy; none hold in general.

    Attributes:
        joules_per_flop: For each floating-point operation.
        joules_per_byte: For each byte that operators read or write.
        watts: For each second of a call; requires measured times.
    """

    joules_per_flop: float = 0.0
    joules_per_byte: float = 0.0
    watts: float = 0.0

    def __post_init__(self) -> None:
        values = (self.joules_per_flop, self.joules_per_byte, self.watts)
        if not all(map(math.isfinite, values)) or min(values) < 0 or not any(values):
            raise BadQuery(f"expected coefficients of at least 0, and one above 0, got {self}")

    @classmethod
    def parse(cls, text: str) -> EnergyModel:
        """Parse a string such as `flop=0.5e-12,byte=20e-12,watts=3`."""
        names = {"flop": "joules_per_flop", "byte": "joules_per_byte", "watts": "watts"}
        coefficients: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                if names[name.strip()] in coefficients:
                    raise ValueError("duplicate")
                coefficients[names[name.strip()]] = float(value)
            except (KeyError, ValueError) as error:
                raise BadQuery(
                    f"expected a coefficient once each, as flop=JOULES, byte=JOULES or watts=W, got {part!r}"
                ) from error
        return cls(**coefficients)


@dataclass(frozen=True)
class Energies:
    """The measured energies of all calls, in joules.

    Attributes:
        own: The own energy of each call.
        net: The same above the idle power.
        spreads: The spread of each call, including the calls inside it.
        use: How they were measured.
    """

    own: list[float | None]
    net: list[float | None]
    spreads: list[Spread | None]
    use: EnergyUse


@dataclass(frozen=True)
class _LoopEnergy:
    """The energy of a loop over a model or a layer, in parts of its duration, and the idle power."""

    parts: list[RepeatedWork]
    idle_w: float

    def spread(self, method: str) -> Spread:
        return spreads(torch.tensor([[part.joules / part.runs] for part in self.parts]), method)[0]

    @property
    def pass_s(self) -> float:
        return sum(part.seconds for part in self.parts) / sum(part.runs for part in self.parts)

    def net(self) -> float:
        """Return the median joules of a pass above the idle power."""
        return median((part.joules - self.idle_w * part.seconds) / part.runs for part in self.parts)


def share(runs: Passes, tree: CallTree, meter: Meter, schedule: PassSchedule, own_s: Sequence[float]) -> Energies:
    """Measure the energy of the model in a loop, and share it by the own time of each call."""
    whole = _measure_model(runs, meter, schedule)
    spread = whole.spread(METHODS["share"])
    parts = torch.tensor([own_s], dtype=torch.float64).clamp(min=0)  # noise may make a small one negative
    if not parts.sum() > 0:
        raise SensorFailed("cannot share the energy by time: no call takes measurable time")
    parts /= parts.sum()
    own = [spread.median * part for part in parts[0].tolist()]
    net_j = whole.net()
    net = [net_j * part for part in parts[0].tolist()]
    use = _use("share", meter, whole, own, net)
    scaled = [_scale(spread, part) for part in tree.inclusive(parts)[0].tolist()]
    return Energies(list(own), list(net), list(scaled), use)


def estimate(tree: CallTree, model: EnergyModel, own_s: Sequence[float | None], *, backward: bool) -> Energies:
    """Estimate energies from coefficients; None where a count or a time is unknown."""
    if backward and model.joules_per_byte:
        raise Unsupported("the bytes that a backward moves are not counted: leave out backward, or joules_per_byte")
    flops = tree.own_known([row.flops for row in tree.rows])
    backward_flops = tree.own_known([row.backward_flops if backward else 0 for row in tree.rows])
    moved = tree.own_known([row.moved_bytes for row in tree.rows])
    own: list[float | None] = []
    for index in range(len(tree)):
        terms = [
            (model.joules_per_flop, flops[index]),
            (model.joules_per_flop, backward_flops[index]),
            (model.joules_per_byte, moved[index]),
            (model.watts, own_s[index]),
        ]
        is_known = all(amount is not None for coefficient, amount in terms if coefficient)
        own.append(sum(c * a for c, a in terms if c and a is not None) if is_known else None)
    use = EnergyUse("estimate", "", None, None, None, None, None, {})
    return Energies(own, [None] * len(own), [None] * len(own), use)


# -- replaying layers --------------------------------------------------------------------------------------------------


class _ReplayInputs(Probe):
    """Captures the arguments of the first call of each kind."""

    def __init__(self, kinds: dict[str, Any]) -> None:
        self._kinds = kinds
        self.layers: dict[Any, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = self._kinds.get(call.address)
        if kind is not None and kind not in self.layers and call.module is not None:
            with torch.no_grad():
                copied = clone_tensors((args, kwargs))
            self.layers[kind] = (call.module, *copied)


def replay(runs: Passes, tree: CallTree, meter: Meter, schedule: PassSchedule, own_s: Sequence[float]) -> Energies:
    """Measure the energy of each layer on its own, once for layers of the same type, configuration and shapes.

    Layers that take the most time come first; the budget may not suffice for all.
    """
    if runs.backward:
        raise Unsupported("layers are replayed in the forward only: leave out backward, or energy='replay'")
    began = perf_counter()
    whole = _measure_model(runs, meter, schedule)
    leaves = {strip_first_index(tree.rows[index].address): index for index in tree.leaves()}
    kinds = {address: _kind(tree.rows[index], runs.model) for address, index in leaves.items()}
    capture = _ReplayInputs(kinds)
    with runs.session(capture, tree):
        runs.once()
    times: dict[Any, float] = {}
    for address, kind in kinds.items():
        times[kind] = times.get(kind, 0.0) + own_s[leaves[address]]
    results: dict[Any, _LoopEnergy | str] = {}
    for done, kind in enumerate(sorted(times, key=lambda kind: -times[kind])):
        schedule.report("replaying layers", done, len(times))
        left = schedule.budget_s - (perf_counter() - began)
        seconds = min(max(left / (len(times) - done), _REPLAY_S), _MAX_REPLAY_S)
        if seconds > left and results:
            results[kind] = f"the budget of {schedule.budget_s:g} s was spent before it"
            continue
        results[kind] = _measure_layer(runs, capture.layers[kind], meter, seconds, whole.idle_w)
    return _collect_layers(tree, meter, whole, {index: results[kinds[address]] for address, index in leaves.items()})


def _kind(row: Row, model: nn.Module) -> Any:
    """Return a key that is equal for layers of equal energy: type, configuration, shapes and counts."""
    module = model.get_submodule(row.path)
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in (*row.inputs, *row.outputs))
    weights = tuple((tuple(p.shape), p.dtype) for p in (*module.parameters(), *module.buffers()))
    counts = (row.flops, row.read_bytes, row.write_bytes, tuple((op.name, op.runs) for op in row.ops))
    plain = (int, float, str, bool, type(None))
    settings = tuple(
        (name, value) for part in module.modules() for name, value in vars(part).items() if isinstance(value, plain)
    )
    return type(module), str(module), settings, shapes, weights, counts


def _measure_layer(
    runs: Passes, layer: tuple[Any, ...], meter: Meter, seconds: float, idle_w: float
) -> _LoopEnergy | str:
    """Return the energy of a loop over the layer, or the reason why it is unknown."""
    module, args, kwargs = layer
    inputs = Inputs(*args, **kwargs)
    try:
        parts = metered(meter, _loop(lambda: inputs.run(module), runs.synchronize), seconds=seconds)
    except SensorFailed:
        raise
    except Exception as error:  # noqa: BLE001  a layer that cannot run on its own may raise anything
        return f"it does not run on its own: {describe_error(error)}"
    return _LoopEnergy(parts, idle_w)


def _collect_layers(
    tree: CallTree, meter: Meter, whole: _LoopEnergy, results: dict[int, _LoopEnergy | str]
) -> Energies:
    own: list[float | None] = [None] * len(tree)
    net: list[float | None] = [None] * len(tree)
    call_spreads: list[Spread | None] = [None] * len(tree)
    reasons: dict[str, str] = {}
    for index, result in results.items():
        if isinstance(result, str):
            reasons[tree.rows[index].address] = result
            continue
        spread = call_spreads[index] = result.spread(METHODS["replay"])
        own[index], net[index] = spread.median, result.net()
    return Energies(own, net, call_spreads, _use("replay", meter, whole, own, net, reasons))


# -- the whole model ---------------------------------------------------------------------------------------------------


def _measure_model(runs: Passes, meter: Meter, schedule: PassSchedule) -> _LoopEnergy:
    """Measure the idle power, then the energy of the model in a loop."""
    schedule.report("measuring idle power", 0, 2)
    runs.synchronize()
    idle = metered(meter, lambda count: sleep(0.02 * count), seconds=min(_IDLE_S, schedule.budget_s / 4))
    schedule.report("measuring the energy of the model", 1, 2)
    parts = metered(meter, _loop(runs.once_async, runs.synchronize), seconds=min(schedule.budget_s / 4, 5.0))
    return _LoopEnergy(parts, sum(part.joules for part in idle) / sum(part.seconds for part in idle))


def _loop(run: Callable[[], object], synchronize: Callable[[], object]) -> Callable[[int], None]:
    def work(count: int) -> None:
        for _ in range(count):
            run()
        synchronize()
        gc.collect(0)  # reference cycles that hold tensors would accumulate

    return work


def _use(
    method: str,
    meter: Meter,
    whole: _LoopEnergy,
    own: Sequence[float | None],
    net: Sequence[float | None],
    reasons: dict[str, str] | None = None,
) -> EnergyUse:
    spread = whole.spread("a plain loop")
    return EnergyUse(
        method=method,
        meter=meter.what,
        whole=spread,
        idle_w=whole.idle_w,
        pass_s=whole.pass_s,
        closure_j=spread.median - sum(joules for joules in own if joules is not None),
        net_closure_j=whole.net() - sum(joules for joules in net if joules is not None),
        not_replayed=reasons or {},
    )


def _scale(spread: Spread, factor: float) -> Spread:
    return replace(spread, **{name: factor * getattr(spread, name) for name in ("median", "q1", "q3", "low", "high")})
