"""How much energy each call takes: the whole model's shared by time, each layer replayed alone, or an estimate."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch
from torch import nn

from microtome.addresses import unnumbered
from microtome.devices.meters import Meter, RepeatedWork, metered
from microtome.devices.statistics import spreads
from microtome.engine import Call, Probe
from microtome.engine.pytree import clone_tensors
from microtome.errors import BadQuery, SensorFailed, Unsupported, said
from microtome.inputs import Inputs
from microtome.profile.call_tree import CallTree
from microtome.profile.repeats import Passes, Schedule
from microtome.results.methods import EnergyUse
from microtome.results.rows import Row
from microtome.results.spread import Spread

METHODS = {
    "share": "the whole model's energy, shared by time",
    "replay": "the layer, or one like it, run alone again and again",
}
_IDLE_S = 1.0
#: A layer is run alone for so many seconds, more where the budget allows it.
_REPLAY_S, _REPLAY_MOST_S = 1.0, 3.0


@dataclass(frozen=True)
class EnergyModel:
    """Coefficients for an estimate of energy, of your own hardware: none are known that hold everywhere.

    Attributes:
        joules_per_flop: For each floating-point operation.
        joules_per_byte: For each byte that operators read or write.
        watts: For each second that a call takes; needs the time to be measured.
    """

    joules_per_flop: float = 0.0
    joules_per_byte: float = 0.0
    watts: float = 0.0

    def __post_init__(self) -> None:
        values = (self.joules_per_flop, self.joules_per_byte, self.watts)
        if not all(map(math.isfinite, values)) or min(values) < 0 or not any(values):
            raise BadQuery(f"coefficients of energy are 0 or more, and one is above 0, got {self}")

    @classmethod
    def parse(cls, text: str) -> EnergyModel:
        """From a text such as `flop=0.5e-12,byte=20e-12,watts=3`."""
        names = {"flop": "joules_per_flop", "byte": "joules_per_byte", "watts": "watts"}
        given: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                if names[name.strip()] in given:
                    raise ValueError("it is there twice")
                given[names[name.strip()]] = float(value)
            except (KeyError, ValueError) as error:
                raise BadQuery(f"{part!r} is no coefficient: write flop=JOULES, byte=JOULES or watts=W") from error
        return cls(**given)


@dataclass(frozen=True)
class Energies:
    """What each call took itself, in joules; without what is drawn when nothing runs; and how sure that is.

    Attributes:
        spreads: Of each call with all calls inside it.
    """

    own: list[float | None]
    net: list[float | None]
    spreads: list[Spread | None]
    use: EnergyUse


@dataclass(frozen=True)
class _WholeModel:
    """A whole pass: its parts of the time, and what is drawn when nothing runs."""

    parts: list[RepeatedWork]
    idle_w: float

    def spread(self, method: str) -> Spread:
        return spreads(torch.tensor([[part.joules / part.runs] for part in self.parts]), method)[0]

    @property
    def pass_s(self) -> float:
        return sum(part.seconds for part in self.parts) / sum(part.runs for part in self.parts)

    def net(self) -> float:
        """Joules of a pass without what is drawn when nothing runs, the median."""
        return median((part.joules - self.idle_w * part.seconds) / part.runs for part in self.parts)


def share(runs: Passes, tree: CallTree, meter: Meter, schedule: Schedule, own_s: Sequence[float]) -> Energies:
    """The energy of the whole, measured in a plain loop, shared by the time that each call itself takes."""
    whole = _measure_whole(runs, meter, schedule)
    spread = whole.spread(METHODS["share"])
    parts = torch.tensor([own_s], dtype=torch.float64).clamp(min=0)  # a small one may be below, by noise
    if not parts.sum() > 0:
        raise SensorFailed("the calls take no time that could be measured, to share the energy by")
    parts /= parts.sum()
    own = [spread.median * part for part in parts[0].tolist()]
    net_j = whole.net()
    net = [net_j * part for part in parts[0].tolist()]
    use = _use("share", meter, whole, own, net)
    scaled = [_scaled(spread, part) for part in tree.inclusive(parts)[0].tolist()]
    return Energies(list(own), list(net), list(scaled), use)


def estimate(tree: CallTree, model: EnergyModel, own_s: Sequence[float | None], *, backward: bool) -> Energies:
    """What given coefficients say. None where a count or a time is not known."""
    if backward and model.joules_per_byte:
        raise Unsupported("the bytes that a backward moves are not counted: estimate without it, or without bytes")
    flops = tree.own_known([row.flops for row in tree.rows])
    backward_flops = tree.own_known([row.backward_flops if backward else 0 for row in tree.rows])
    moved = tree.own_known([row.moved_bytes for row in tree.rows])
    own: list[float | None] = []
    for at in range(len(tree)):
        terms = [
            (model.joules_per_flop, flops[at]),
            (model.joules_per_flop, backward_flops[at]),
            (model.joules_per_byte, moved[at]),
            (model.watts, own_s[at]),
        ]
        known = all(amount is not None for coefficient, amount in terms if coefficient)
        own.append(sum(c * a for c, a in terms if c and a is not None) if known else None)
    use = EnergyUse("estimate", "", None, None, None, None, None, {})
    return Energies(own, [None] * len(own), [None] * len(own), use)


# -- each layer alone --------------------------------------------------------------------------------------------------


class _Alone(NamedTuple):
    """Joules of a layer that was run alone, and those above idle."""

    spread: Spread
    net_j: float


class _ReplayInputs(Probe):
    """Keeps the arguments of the first call of each kind."""

    def __init__(self, kinds: dict[str, Any]) -> None:
        self._kinds = kinds
        self.layers: dict[Any, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = self._kinds.get(call.address)
        if kind is not None and kind not in self.layers and call.module is not None:
            with torch.no_grad():
                copied = clone_tensors((args, kwargs))
            self.layers[kind] = (call.module, *copied)


def replay(runs: Passes, tree: CallTree, meter: Meter, schedule: Schedule, own_s: Sequence[float]) -> Energies:
    """The energy of each layer, run alone; of layers of the same type, configuration and shapes, one is run.

    Those that take the most time come first; for some there may be no time left.
    """
    if runs.backward:
        raise Unsupported("a layer is replayed in the forward alone: leave out backward, or energy='replay'")
    began = perf_counter()
    whole = _measure_whole(runs, meter, schedule)
    leaves = {unnumbered(tree.rows[at].address): at for at in tree.leaves()}
    kinds = {address: _kind(tree.rows[at], runs.model) for address, at in leaves.items()}
    capture = _ReplayInputs(kinds)
    with runs.session(capture, tree):
        runs.once()
    times: dict[Any, float] = {}
    for address, kind in kinds.items():
        times[kind] = times.get(kind, 0.0) + own_s[leaves[address]]
    found: dict[Any, _Alone | str] = {}
    for done, kind in enumerate(sorted(times, key=lambda kind: -times[kind])):
        schedule.tell("replaying layers", done, len(times))
        left = schedule.budget_s - (perf_counter() - began)
        each = min(max(left / (len(times) - done), _REPLAY_S), _REPLAY_MOST_S)
        if each > left and found:
            found[kind] = f"no time was left for it: the budget is {schedule.budget_s:g} s"
            continue
        found[kind] = _alone(runs, capture.layers[kind], meter, each, whole.idle_w)
    return _replayed(tree, meter, whole, {at: found[kinds[address]] for address, at in leaves.items()})


def _kind(row: Row, model: nn.Module) -> Any:
    """What layers have in common that take the same energy: type, configuration, shapes, and all that is counted."""
    module = model.get_submodule(row.path)
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in (*row.inputs, *row.outputs))
    weights = tuple((tuple(p.shape), p.dtype) for p in (*module.parameters(), *module.buffers()))
    counts = (row.flops, row.read_bytes, row.write_bytes, tuple((op.name, op.runs) for op in row.ops))
    plain = (int, float, str, bool, type(None))
    settings = tuple(
        (name, value) for part in module.modules() for name, value in vars(part).items() if isinstance(value, plain)
    )
    return type(module), str(module), settings, shapes, weights, counts


def _alone(runs: Passes, layer: tuple[Any, ...], meter: Meter, seconds: float, idle_w: float) -> _Alone | str:
    """Joules of a run of the layer, and those above idle, or why they are not known."""
    module, args, kwargs = layer
    given = Inputs(*args, **kwargs)
    try:
        parts = metered(meter, _looped(lambda: given.run(module), runs.wait), seconds=seconds)
    except SensorFailed:
        raise
    except Exception as error:  # noqa: BLE001  a layer that cannot be run alone says so in its own way
        return f"it does not run alone: {said(error)}"
    alone = _WholeModel(parts, idle_w)
    return _Alone(alone.spread(METHODS["replay"]), alone.net())


def _replayed(tree: CallTree, meter: Meter, whole: _WholeModel, found: dict[int, _Alone | str]) -> Energies:
    own: list[float | None] = [None] * len(tree)
    net: list[float | None] = [None] * len(tree)
    of_calls: list[Spread | None] = [None] * len(tree)
    why: dict[str, str] = {}
    for at, result in found.items():
        if isinstance(result, str):
            why[tree.rows[at].address] = result
            continue
        of_calls[at], net[at] = result
        own[at] = result.spread.median
    return Energies(own, net, of_calls, _use("replay", meter, whole, own, net, why))


# -- the whole ---------------------------------------------------------------------------------------------------------


def _measure_whole(runs: Passes, meter: Meter, schedule: Schedule) -> _WholeModel:
    """First nothing, then the model, in a loop."""
    schedule.tell("measuring idle power", 0, 2)
    runs.wait()
    idle = metered(meter, lambda count: sleep(0.02 * count), seconds=min(_IDLE_S, schedule.budget_s / 4))
    schedule.tell("measuring the energy of the model", 1, 2)
    parts = metered(meter, _looped(runs.again, runs.wait), seconds=min(schedule.budget_s / 4, 5.0))
    return _WholeModel(parts, sum(part.joules for part in idle) / sum(part.seconds for part in idle))


def _looped(run: Callable[[], object], wait: Callable[[], object]) -> Callable[[int], None]:
    def work(count: int) -> None:
        for _ in range(count):
            run()
        wait()
        gc.collect(0)  # cycles that hold tensors would pile up

    return work


def _use(
    method: str,
    meter: Meter,
    whole: _WholeModel,
    own: Sequence[float | None],
    net: Sequence[float | None],
    why: dict[str, str] | None = None,
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
        not_replayed=why or {},
    )


def _scaled(spread: Spread, by: float) -> Spread:
    numbers = {name: by * getattr(spread, name) for name in ("median", "q1", "q3", "low", "high")}
    return replace(spread, **numbers)
