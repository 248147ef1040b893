"""Load and check the arguments of `plan`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from os import PathLike
from typing import Any, TypeVar

from microtome.errors import BadQuery, NotInstalled
from microtome.plan.codec_benchmark import codec_costs
from microtome.plan.compatibility import check_codec_costs
from microtome.plan.device_costs import DeviceCosts
from microtome.results.base import load_result
from microtome.results.codec_costs import CodecCosts
from microtome.results.cuts import Cuts
from microtome.results.link import Link
from microtome.results.metrics import ENERGY, advise
from microtome.results.phases import Phases
from microtome.results.profile import Profile
from microtome.split.boundary.codecs import parse_codec
from microtome.units import parse_size

#: The codec of compressed inputs, a baseline of every plan.
COMPRESSED = "zstd"

R = TypeVar("R", Cuts, Profile, Phases, CodecCosts)


def load(argument: Any, result_type: type[R], name: str) -> R:
    """Return a result of this type, from a file if the argument is a path."""
    result = load_result(argument) if isinstance(argument, str | PathLike) else argument
    if not isinstance(result, result_type):
        hint = ""
        if isinstance(result, Phases):
            hint = f": pass {advise('tokens=(512, 64)', '--tokens 512,64')} for a plan of a whole answer"
        elif result_type is Phases:
            both = advise('phases=("prefill", "decode")', "--prefill N --decode")
            hint = f": profile the model with {both}"
        raise BadQuery(f"expected {name} as a {result_type.__name__}, or a file of one, got {result!r:.200}{hint}")
    return result


def load_chain(
    kind: type[R], edge: Any, cloud: Any, link: Any, devices: Any, links: Sequence[Any] | None
) -> tuple[dict[str, R], list[Link]]:
    """Return the profiles by device, each a result of this kind, and the links between the devices."""
    arguments: dict[str, Any]
    if devices is None:
        arguments = {"edge": edge, "cloud": cloud}
        chain_links = [link]
        for name, value in (*arguments.items(), ("link", link)):
            if value is None or links is not None:
                raise BadQuery(f"a plan needs edge, cloud and link, or devices and links: there is no {name}")
    else:
        if edge is not None or cloud is not None or link is not None:
            raise BadQuery("expected edge, cloud and link, or devices and links, got both")
        is_named = isinstance(devices, Mapping)
        arguments = dict(devices) if is_named else {f"device{i}": profile for i, profile in enumerate(devices)}
        chain_links = list(links or ())
        if len(arguments) < 2 or len(chain_links) != len(arguments) - 1:
            raise BadQuery(
                "expected a link between each device and the next, got "
                f"{len(arguments)} devices, {len(chain_links)} links"
            )
    chain_links = [Link(one) if isinstance(one, str) else one for one in chain_links]
    for one in chain_links:
        if not isinstance(one, Link):
            raise BadQuery(f"expected a microtome.Link, such as Link('20Mbps', rtt='15ms'), got {one!r}")
    return {name: load(value, kind, f"{name!r}") for name, value in arguments.items()}, chain_links


def check_codecs(codec: Collection[str] | str) -> tuple[str, ...]:
    names = (codec,) if isinstance(codec, str) else tuple(dict.fromkeys(codec))
    if not names:
        raise BadQuery("a plan needs a codec or several, such as 'raw' or 'zstd'")
    for name in names:
        parse_codec(name)
    return names


def load_codec_costs(
    cuts: Cuts, codecs: tuple[str, ...], costs: Any, names: Sequence[str]
) -> tuple[list[CodecCosts], str]:
    """Return the costs of codecs on each device, and a description of their source."""
    if costs is None:
        table = _measure_codec_costs(cuts, codecs)
        return [table] * len(names), f"measured on this machine for all devices, with {table.values}"
    by_name = costs if isinstance(costs, Mapping) else dict.fromkeys(names, costs)
    tables = []
    for name in names:
        if name not in by_name:
            raise BadQuery(f"the costs of codecs on {name!r} are missing: there are those of {', '.join(by_name)}")
        table = load(by_name[name], CodecCosts, "the costs of codecs")
        check_codec_costs(cuts, name, table)
        tables.append(table)
    sources = [f"{table.environment.get('cpu', 'unknown')}, with {table.values}" for table in tables]
    if not isinstance(costs, Mapping):
        return tables, f"measured on one machine for all devices ({sources[0]})"
    each = "; ".join(f"{name}: {source}" for name, source in zip(names, sources, strict=True))
    return tables, f"measured on each device ({each})"


def measure_step_codecs(cuts: Cuts, codecs: tuple[str, ...], devices: int) -> list[CodecCosts]:
    """Measure codecs on the small values that cross for one token, on this machine for all devices."""
    return [codec_costs(cuts, codecs)] * devices


def _measure_codec_costs(cuts: Cuts, codecs: tuple[str, ...]) -> CodecCosts:
    table = codec_costs(cuts, tuple(dict.fromkeys((*codecs, "raw"))))
    if COMPRESSED not in table.costs:
        try:
            inputs_only = codec_costs(replace(cuts, offered=()), COMPRESSED)
        except NotInstalled:
            return table
        table = replace(table, costs=table.costs | inputs_only.costs)
    return table


def parse_limits(limits: Mapping[str, int | str] | None, names: Sequence[str]) -> dict[str, int]:
    for name in limits or ():
        if name not in names:
            raise BadQuery(f"expected limits of {', '.join(map(repr, names))}, got one of {name!r}")
    return {name: parse_size(limit) for name, limit in (limits or {}).items()}


def check_factors(slower: Mapping[str, float] | None, names: Sequence[str]) -> dict[str, float]:
    """Return the factors on the times of devices; raise if one is not a positive number, or of no device."""
    for name, factor in (slower or {}).items():
        if name not in names:
            raise BadQuery(f"expected slower of {', '.join(map(repr, names))}, got one of {name!r}")
        if not isinstance(factor, int | float) or not 0 < factor < inf:
            raise BadQuery(f"expected a factor above 0 on the times of {name!r}, got {factor!r}")
    return dict(slower or {})


def devices_with_energy(
    devices: Sequence[DeviceCosts], objective: str, energy_of: Collection[str] | None
) -> tuple[str, ...]:
    """Return the devices whose energy counts; none if it was not measured and is not needed."""
    by_name = {device.name: device for device in devices}
    names = (devices[0].name,) if energy_of is None else tuple(energy_of)
    for name in names:
        if name not in by_name:
            raise BadQuery(f"expected energy_of {', '.join(map(repr, by_name))}, got {name!r}")
        if by_name[name].energy_field is None:
            if objective != "energy" and energy_of is None:
                return ()
            reason = by_name[name].profile.unavailable.get("energy")
            raise BadQuery(
                f"the profile of {name!r} has no energy{f' ({reason})' if reason else ''}: profile the model there "
                f"with {ENERGY.advice}, or estimate it with {advise('a microtome.EnergyModel', '--energy-model')}"
            )
    return names
