"""Load and check the arguments of `plan`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from os import PathLike
from typing import Any, TypeVar, get_args

from microtome.errors import BadQuery, NotInstalled, describe_value
from microtome.plan.codec_benchmark import codec_costs
from microtome.plan.compatibility import check_codec_costs
from microtome.plan.device_costs import CutPoint, DeviceCosts, StageTimes
from microtome.results.base import load_result
from microtome.results.codec_costs import CodecCosts
from microtome.results.cuts import Cuts
from microtome.results.link import Link
from microtome.results.metrics import ENERGY, advise
from microtome.results.phases import Phases
from microtome.results.plan import Schedule
from microtome.results.profile import Profile
from microtome.split.boundary.codecs import parse_codec
from microtome.units import parse_size

#: The codec of compressed inputs, a baseline of every plan.
COMPRESSED = "zstd"

R = TypeVar("R", Cuts, Profile, Phases, CodecCosts)

#: What makes each argument, in Python and on the command line.
_SOURCES: dict[type, tuple[str, str]] = {
    Cuts: ("mt.cuts(model, x)", "microtome cuts --json"),
    Profile: ('mt.profile(model, x, measure="time")', "microtome profile --time --json"),
    Phases: (
        'mt.profile(model, x, phases=("prefill", "decode"), measure="time")',
        "microtome profile --prefill N --decode --time --json",
    ),
    CodecCosts: ("microtome.plan.codec_benchmark.codec_costs(…)", "microtome plan --measure-codecs"),
}


def load(argument: Any, result_type: type[R], name: str) -> R:
    """Return a result of this type, from a file if the argument is a path."""
    result = load_result(argument) if isinstance(argument, str | PathLike) else argument
    if not isinstance(result, result_type):
        source = advise(*_SOURCES[result_type])
        hint = ""
        if isinstance(result, Phases):
            hint = f": pass {advise('tokens=(512, 64)', '--tokens 512,64')} for a plan of a whole answer"
        expected = f"expected {name} as a {result_type.__name__} of {source}, or a file of one"
        raise BadQuery(f"{expected}, got {describe_value(result)}{hint}")
    return result


def check_mapping(value: Any, name: str, example: str) -> dict[str, Any]:
    """Return an argument that has a value for each device, by name; raise if it is no dict. None: it is empty."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadQuery(f"expected {name} as a dict by device, such as {example}, got {describe_value(value)}")
    return dict(value)


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
        if isinstance(devices, Sequence) and not isinstance(devices, str):
            devices = {f"device{i}": profile for i, profile in enumerate(devices)}
        if isinstance(links, str | Link) or not isinstance(links, Sequence | None):
            example = "['20Mbps', '1Gbps']"
            raise BadQuery(f"expected links as a list, such as {example}, got {describe_value(links)}")
        arguments = check_mapping(devices, "devices", '{"phone": profile, "cloud": profile}')
        chain_links = list(links or ())
        if len(arguments) < 2:
            several = advise("pass two devices or more", "repeat --profile")
            raise BadQuery(f"expected a chain of two devices or more, got {len(arguments)}: {several}")
        if len(chain_links) != len(arguments) - 1:
            raise BadQuery(
                "expected a link between each device and the next, got "
                f"{len(arguments)} devices, {len(chain_links)} links"
            )
    chain_links = [Link(one) if isinstance(one, str) else one for one in chain_links]
    for one in chain_links:
        if not isinstance(one, Link):
            raise BadQuery(f"expected a microtome.Link, such as Link('20Mbps', rtt='15ms'), got {describe_value(one)}")
    return {name: load(value, kind, f"{name!r}") for name, value in arguments.items()}, chain_links


def check_codecs(codec: Collection[str] | str) -> tuple[str, ...]:
    if not isinstance(codec, Collection):
        raise BadQuery(f"expected a codec or several, such as 'raw' or ['raw', 'zstd'], got {describe_value(codec)}")
    names = (codec,) if isinstance(codec, str) else tuple(dict.fromkeys(codec))
    if not names:
        raise BadQuery("a plan needs a codec or several, such as 'raw' or 'zstd'")
    for name in names:
        parse_codec(name)
    return names


def load_codec_costs(
    cuts: Cuts, codecs: tuple[str, ...], costs: Any, names: Sequence[str], *, of_inputs: tuple[str, ...] = ()
) -> tuple[list[CodecCosts], str]:
    """Return the costs of codecs on each device, and a description of their source.

    Args:
        of_inputs: The codecs that are measured on the inputs alone if they are installed.
    """
    if costs is None:
        table = _measure_codec_costs(cuts, codecs, of_inputs)
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


def _measure_codec_costs(cuts: Cuts, codecs: tuple[str, ...], of_inputs: tuple[str, ...]) -> CodecCosts:
    table = codec_costs(cuts, codecs)
    if not of_inputs:
        return table
    try:
        inputs_only = codec_costs(replace(cuts, offered=()), of_inputs)
    except NotInstalled:
        return table
    return replace(table, costs=table.costs | inputs_only.costs)


def parse_limits(limits: Mapping[str, int | str] | None, names: Sequence[str]) -> dict[str, int]:
    checked = check_mapping(limits, "limits", '{"edge": "512MB"}')
    for name in checked:
        if name not in names:
            raise BadQuery(f"expected limits of {', '.join(map(repr, names))}, got one of {name!r}")
    return {name: parse_size(limit) for name, limit in checked.items()}


def check_factors(slower: Mapping[str, float] | None, names: Sequence[str]) -> dict[str, float]:
    """Return the factors on the times of devices; raise if one is not a positive number, or of no device."""
    checked = check_mapping(slower, "slower", '{"edge": 10}')
    for name, factor in checked.items():
        if name not in names:
            raise BadQuery(f"expected slower of {', '.join(map(repr, names))}, got one of {name!r}")
        if not isinstance(factor, int | float) or not 0 < factor < inf:
            raise BadQuery(f"expected a factor above 0 on the times of {name!r}, got {factor!r}")
    return checked


def check_unused(values: Mapping[str, Any]) -> None:
    """Raise if an argument is set that a plan of training does not have."""
    for name, value in values.items():
        if value is not None:
            raise BadQuery(f"expected no {name} in a plan of training, got {describe_value(value)}")


def check_no_training(objective: str, values: Mapping[str, Any]) -> None:
    """Raise if an argument is set that only a plan of training has."""
    for name, value in values.items():
        if value is not None:
            argument = advise(f"{name}=", f"--{name.replace('_', '-')}")
            expected = advise("objective='training'", "--objective training")
            raise BadQuery(f"{argument} is of training: expected {expected}, got {objective!r}")


def check_training(micro_batches: Any, schedule: Any, optimizer_state: Any) -> tuple[int, Schedule, float]:
    schedule = "1f1b" if schedule is None else schedule
    optimizer_state = 2.0 if optimizer_state is None else optimizer_state
    if type(micro_batches) is not int or micro_batches < 1:
        argument = advise("micro_batches=8", "--micro-batches 8")
        raise BadQuery(
            f"a plan of training needs micro-batches, such as {argument}, got {describe_value(micro_batches)}"
        )
    if schedule not in get_args(Schedule):
        raise BadQuery(f"expected schedule {' or '.join(map(repr, get_args(Schedule)))}, got {schedule!r}")
    if not isinstance(optimizer_state, int | float) or not 0 <= optimizer_state < inf:
        raise BadQuery(f"expected optimizer_state of 0 or more, such as 2 for Adam, got {optimizer_state!r}")
    return micro_batches, schedule, optimizer_state


def devices_with_energy(
    devices: Sequence[DeviceCosts], objective: str, energy_of: Collection[str] | None
) -> tuple[str, ...]:
    """Return the devices whose energy counts; none if it was not measured and is not needed."""
    by_name = {device.name: device for device in devices}
    names: tuple[str, ...] = (devices[0].name,)
    if energy_of is not None:
        if isinstance(energy_of, str) or not isinstance(energy_of, Collection):
            raise BadQuery(f"expected energy_of as names of devices, such as ['edge'], got {describe_value(energy_of)}")
        names = tuple(energy_of)
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


def check_stages(
    stages: Mapping[str, StageTimes] | None,
    names: Sequence[str],
    points: Sequence[CutPoint],
    objective: str,
) -> dict[str, StageTimes]:
    """Return the measured seconds of stages by device, with addresses of cuts."""
    if stages is None:
        return {}
    if objective == "energy":
        raise BadQuery("the energy of compiled and exported stages is not known: plan without stages=")
    if unknown := [name for name in stages if name not in names]:
        raise BadQuery(f"expected stages of {' or '.join(names)}, got those of {unknown[0]!r}")
    addresses = [point.at for point in points]
    for measured in stages.values():
        for key, elapsed_s in measured.items():
            if not isinstance(key, tuple) or len(key) != 2:
                raise BadQuery(f"expected where a stage begins and ends, such as (None, 'layer1'), got {key!r}")
            for at in key:
                if at not in addresses:
                    raise BadQuery(f"no plan can cut at {at!r}, where a stage begins or ends")
            if not isinstance(elapsed_s, int | float) or not elapsed_s > 0:
                raise BadQuery(f"expected the seconds of the stage {key}, more than 0, got {elapsed_s!r}")
    return {name: dict(measured) for name, measured in stages.items()}
