"""`plan`: where to cut a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from microtome.errors import BadQuery, NotInstalled, describe_error
from microtome.results.base import load_result
from microtome.units import parse_size

if TYPE_CHECKING:
    from microtome.plan.cost import DeviceChain
    from microtome.plan.device_costs import DeviceCosts
    from microtome.results.codec_costs import CodecCosts
    from microtome.results.cuts import Cuts
    from microtome.results.link import Link
    from microtome.results.plan import Candidate, Objective, Plan
    from microtome.results.profile import Profile

    Strategy = Callable[[tuple[Candidate, ...]], Candidate]

OBJECTIVES = ("latency", "energy", "throughput")
#: What the inputs are compressed with, to be listed beside the winner.
_COMPRESSED = "zstd"


def plan(
    cuts: Cuts | str | PathLike[str],
    *,
    edge: Profile | str | PathLike[str] | None = None,
    cloud: Profile | str | PathLike[str] | None = None,
    link: Link | None = None,
    devices: Mapping[str, Any] | Sequence[Any] | None = None,
    links: Sequence[Link] | None = None,
    objective: Objective = "latency",
    limits: Mapping[str, int | str] | None = None,
    codec: Collection[str] | str = "raw",
    costs: Any = None,
    energy_of: Collection[str] | None = None,
    strategy: Strategy | None = None,
) -> Plan:
    """Say where to cut a model, from what was measured on each device and the link between them.

    Args:
        cuts: Where it can be cut, or the file that holds that.
        edge: The profile that was made on the first device, with `measure="time"`, or the file that holds it.
        cloud: That of the second.
        link: What joins them.
        devices: In place of `edge` and `cloud`: the profiles of a chain of devices, by their names.
        links: In place of `link`: what joins each of those with the next.
        objective: `"latency"`, the time to a result; `"throughput"`, results a second when one pass follows on the
            other; `"energy"`, the joules of the first device, which needs a profile with `measure="energy"`.
        limits: The most memory that a device has, by its name: `{"edge": "512MB"}`.
        codec: How what crosses may be encoded, one or several: each cut is tried with each. Those that lose something
            are used if they are named.
        costs: What codecs cost, as `codec_costs` measured it, or the file that holds it; a dict by the names of devices
            where they differ. None: measured now, on this machine, with noise.
        energy_of: The names of the devices whose energy counts; None: the first.
        strategy: Chooses in place of the objective: given the candidates that limits allow, the best first, it returns
            one of them.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> here = mt.profile(model, x, measure="time", repeat=3)
    >>> plan = mt.plan(mt.cuts(model, x), edge=here, cloud=here, link=mt.Link("1Kbps", rtt="15ms"))
    >>> plan.winner.name                                    # nothing is worth sending so slowly
    'all on edge'
    >>> [candidate.name for candidate in plan.baselines]
    ['all on edge', 'all on cloud, input by zstd', 'all on cloud, raw input']
    """
    from microtome.plan import device_costs
    from microtome.plan.cost import DeviceChain
    from microtome.results.plan import Plan

    found = _cuts(cuts)
    profiles, joints = _chain_of(edge, cloud, link, devices, links)
    device_costs.check(found, profiles)
    if objective not in OBJECTIVES:
        raise BadQuery(f"objective is 'latency', 'energy' or 'throughput', got {objective!r}")
    places = device_costs.places(found, list(profiles.values()))
    chain_sides = [device_costs.DeviceCosts(name, profile, places) for name, profile in profiles.items()]
    counted = _counted(chain_sides, objective, energy_of)
    wanted = _codecs(codec)
    tables, compressed, source = _costs(found, wanted, costs, list(profiles))
    chain = DeviceChain(
        sides=chain_sides,
        links=joints,
        places=places,
        output_bytes=found.output_bytes,
        codecs=wanted,
        input_codecs=tuple(dict.fromkeys(("raw", *wanted, *compressed))),
        costs=tables,
        limits=_limits(limits, list(profiles)),
        energy_of=counted,
    )
    candidates = _candidates(chain, objective)
    chosen = _choose(candidates, strategy)
    return Plan(
        model=found.model,
        inputs=next(iter(profiles.values())).inputs,
        objective=objective,
        devices={name: _machine(profile) for name, profile in profiles.items()},
        links=tuple(joints),
        candidates=candidates,
        chosen=chosen,
        strategy="" if strategy is None else getattr(strategy, "__name__", type(strategy).__name__),
        limits=dict(chain.limits),
        codec_costs=source,
        energy_of=counted,
        notes=tuple(_notes(found, chain, compressed)),
    )


# -- what was given ----------------------------------------------------------------------------------------------------


def _chain_of(
    edge: Any, cloud: Any, link: Link | None, devices: Any, links: Sequence[Link] | None
) -> tuple[dict[str, Profile], list[Link]]:
    """The profiles by the names of devices, and the links between them."""
    from microtome.results.link import Link

    if devices is None:
        given = {"edge": edge, "cloud": cloud}
        joints = [link]
        for name, value in (*given.items(), ("link", link)):
            if value is None or links is not None:
                raise BadQuery(f"a plan needs edge, cloud and link, or devices and links: there is no {name}")
    else:
        if edge is not None or cloud is not None or link is not None:
            raise BadQuery("a plan has edge, cloud and link, or devices and links, not both")
        named = isinstance(devices, Mapping)
        given = dict(devices) if named else {f"device{at}": one for at, one in enumerate(devices)}
        joints = list(links or ())
        if len(given) < 2 or len(joints) != len(given) - 1:
            raise BadQuery(
                f"there is a link between each device and the next: {len(given)} devices, {len(joints)} links"
            )
    for joint in joints:
        if not isinstance(joint, Link):
            raise BadQuery(f"a link is a microtome.Link, such as Link('20Mbps', rtt='15ms'), got {joint!r}")
    return {name: _profile(name, value) for name, value in given.items()}, [one for one in joints if one is not None]


def _cuts(given: Any) -> Cuts:
    from microtome.results.cuts import Cuts

    found = load_result(given) if isinstance(given, str | PathLike) else given
    if not isinstance(found, Cuts):
        raise BadQuery(f"a plan needs what microtome.cuts gives, or the file that holds it, got {found!r:.200}")
    return found


def _profile(name: str, given: Any) -> Profile:
    from microtome.results.profile import Profile

    found = load_result(given) if isinstance(given, str | PathLike) else given
    if not isinstance(found, Profile):
        raise BadQuery(f"{name!r} is given by a profile, or the file that holds one, got {found!r}")
    return found


def _counted(chain: Sequence[DeviceCosts], objective: str, energy_of: Collection[str] | None) -> tuple[str, ...]:
    """The devices whose energy counts; none if it is not known and not needed."""
    first = chain[0].name
    names = (first,) if energy_of is None else tuple(energy_of)
    for name in names:
        side = next((side for side in chain if side.name == name), None)
        if side is None:
            raise BadQuery(f"there is no device {name!r}: there are {', '.join(repr(side.name) for side in chain)}")
        if side.energy_name is None:
            if objective != "energy" and energy_of is None:
                return ()
            why = side.profile.unavailable.get("energy")
            raise BadQuery(
                f"the profile of {name!r} has no energy{f' ({why})' if why else ''}: profile the model there with "
                "measure='energy' (microtome profile --energy), or estimate it with a microtome.EnergyModel"
            )
    return names


def _codecs(codec: Collection[str] | str) -> tuple[str, ...]:
    from microtome.split.codecs import parse_codec

    names = (codec,) if isinstance(codec, str) else tuple(dict.fromkeys(codec))
    if not names:
        raise BadQuery("a plan needs a codec or several, such as 'raw' or 'zstd'")
    for name in names:
        parse_codec(name)
    return names


def _costs(
    cuts: Cuts, codecs: tuple[str, ...], given: Any, names: Sequence[str]
) -> tuple[list[CodecCosts], tuple[str, ...], str]:
    """The costs of codecs on each device, what the inputs can be compressed with, and where the costs come from."""
    from microtome.plan.codec_benchmark import codec_costs
    from microtome.plan.compatibility import check_costs
    from microtome.results.codec_costs import CodecCosts

    compressed: tuple[str, ...]
    needed = tuple(dict.fromkeys((*codecs, "raw")))
    if given is None:
        table = codec_costs(cuts, needed)
        try:
            table = _with_inputs(table, cuts)
        except NotInstalled:
            compressed = ()
        else:
            compressed = (_COMPRESSED,)
        return [table] * len(names), compressed, f"measured on this machine for all devices, with {table.values}"
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
    tables: list[CodecCosts] = []
    for name in names:
        if name not in by_name:
            raise BadQuery(f"the costs of codecs on {name!r} are missing: there are those of {', '.join(by_name)}")
        found = load_result(by_name[name]) if isinstance(by_name[name], str | PathLike) else by_name[name]
        if not isinstance(found, CodecCosts):
            raise BadQuery(f"the costs of codecs are what microtome.plan.codec_costs gives, or a file, got {found!r}")
        check_costs(cuts, name, found)
        tables.append(found)
    compressed = (_COMPRESSED,) if all(_COMPRESSED in table.costs for table in tables) else ()
    where = [f"{table.environment.get('cpu', 'not said')}, with {table.values}" for table in tables]
    if not isinstance(given, Mapping):
        return tables, compressed, f"measured on one machine for all devices ({where[0]})"
    each = "; ".join(f"{name}: {machine}" for name, machine in zip(names, where, strict=True))
    return tables, compressed, f"measured on each device ({each})"


def _with_inputs(table: CodecCosts, cuts: Cuts) -> CodecCosts:
    """With what the inputs cost to compress, which is not asked for at cuts."""
    from dataclasses import replace

    from microtome.plan.codec_benchmark import codec_costs

    if _COMPRESSED in table.costs:
        return table
    inputs = replace(cuts, offered=())
    return replace(table, costs=table.costs | codec_costs(inputs, _COMPRESSED).costs)


def _limits(limits: Mapping[str, int | str] | None, names: Sequence[str]) -> dict[str, int]:
    for name in limits or ():
        if name not in names:
            raise BadQuery(f"there is no device {name!r} to limit: there are {', '.join(map(repr, names))}")
    return {name: parse_size(limit) for name, limit in (limits or {}).items()}


# -- what is chosen ----------------------------------------------------------------------------------------------------


def _candidates(chain: DeviceChain, objective: Objective) -> tuple[Candidate, ...]:
    """Of two devices every way to place the model, of more the best for each number of them; the best first."""
    from microtome.plan.cost import LinkCrossing
    from microtome.plan.search import best

    last = len(chain.links)
    whole = [(), *((LinkCrossing(0, codec),) * last for codec in chain.input_codecs)]
    others = [(crossing,) for crossing in chain.crossings] if last == 1 else best(chain, objective)
    found = {placement: chain.price(placement, is_baseline=True) for placement in whole}
    for placement in others:
        if placement not in found:
            found[placement] = chain.price(placement)
    return tuple(sorted(found.values(), key=lambda one: (one.refused is not None, one.rank(objective))))


def _choose(candidates: Sequence[Candidate], strategy: Strategy | None) -> int:
    able = tuple(candidate for candidate in candidates if candidate.refused is None)
    if not able:
        raise BadQuery(f"no way to place the model is within the limits; of the best, {candidates[0].refused}")
    if strategy is None:
        return 0
    try:
        choice = strategy(able)
    except Exception as error:
        raise BadQuery(f"the strategy raised {describe_error(error)}") from error
    if choice not in able:
        raise BadQuery(f"a strategy returns one of the candidates that it was given, got {choice!r:.200}")
    return candidates.index(choice)


# -- in words ----------------------------------------------------------------------------------------------------------


def _machine(profile: Profile) -> str:
    return profile.environment.get("gpu") or profile.environment.get("cpu", "not said")


def _notes(cuts: Cuts, chain: DeviceChain, compressed: tuple[str, ...]) -> list[str]:
    notes = []
    left_out = len(cuts) - (len(chain.places) - 2)
    if left_out:
        notes.append(f"{left_out} of {len(cuts)} cuts are left out: a profile has no times so deep")
    if cuts.refused:
        notes.append(f"at {len(cuts.refused)} places the model cannot be cut: `microtome.cuts` says why")
    if not compressed:
        notes.append(
            f"the inputs are not tried compressed: costs of {_COMPRESSED} were not measured, or it is not there"
        )
    if any(len(side.elapsed_s) > 1 for side in chain.sides):
        notes.append("on a GPU a part takes as long as its work, or as the host takes to launch it, if that is longer")
    for side in chain.sides:
        if side.name in chain.energy_of:
            above = "above what is drawn when nothing runs" if side.energy_name == "net_energy_j" else "with idle power"
            use = side.profile.energy
            notes.append(f"energy of {side.name}: {above}{f', by {use.method}' if use else ''}; without codecs")
    if chain.energy_of and all(link.joules_per_byte is None for link in chain.links):
        notes.append("what sending takes is not in the energy: give the link joules_per_byte")
    return notes
