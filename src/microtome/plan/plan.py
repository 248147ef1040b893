"""`plan`: where to cut a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from microtome.errors import BadQuery, describe_error
from microtome.units import seconds

if TYPE_CHECKING:
    from microtome.plan.cost import DeviceChain
    from microtome.plan.device_costs import CutPoint
    from microtome.results.cuts import Cut, Cuts
    from microtome.results.link import Link
    from microtome.results.phases import Phases
    from microtome.results.plan import Candidate, Objective, Plan, Schedule
    from microtome.results.profile import Profile

    Strategy = Callable[[tuple[Candidate, ...]], Candidate]

OBJECTIVES = ("latency", "energy", "throughput", "training")


def plan(
    cuts: Cuts | str | PathLike[str],
    *,
    edge: Profile | Phases | str | PathLike[str] | None = None,
    cloud: Profile | Phases | str | PathLike[str] | None = None,
    link: Link | str | None = None,
    devices: Mapping[str, Any] | Sequence[Any] | None = None,
    links: Sequence[Link | str] | None = None,
    objective: Objective = "latency",
    limits: Mapping[str, int | str] | None = None,
    slower: Mapping[str, float] | None = None,
    codec: Collection[str] | str | None = None,
    costs: Any = None,
    energy_of: Collection[str] | None = None,
    strategy: Strategy | None = None,
    tokens: tuple[int, int] | None = None,
    stages: Mapping[str, Mapping[tuple[str | None, str | None], float]] | None = None,
    micro_batches: int | None = None,
    schedule: Schedule | None = None,
    optimizer_state: float | None = None,
) -> Plan:
    """Choose where to cut a model, from its profile on each device and the link between them.

    Args:
        cuts: The cuts of the model, or a file of them.
        edge: The profile on the first device, with `measure="time"`, or a file of it.
        cloud: The profile on the second device.
        link: The link between the two; a string such as `"20Mbps"` is one without delay.
        devices: Instead of `edge` and `cloud`: the profiles of a chain of devices, by name.
        links: Instead of `link`: the link between each device and the next.
        objective: `"latency"`, the time to a result; `"throughput"`, results per second of a pipeline; `"energy"`, the
            joules of the first device, which needs a profile with `measure="energy"`; `"training"`, the time of a step
            of training in a pipeline, which needs profiles with `backward=True`.
        limits: The most memory of a device, by name: `{"edge": "512MB"}`.
        slower: Factors on the measured times of a device, by name: `{"edge": 10}` for one that is ten times slower than
            the profiled one. Costs of codecs and energy stay as measured.
        codec: The codecs of boundaries and of the inputs, one or several: each cut is tried with each, and no other.
            None: `"raw"`, and for the inputs also `"zstd"`.
        costs: The costs of codecs from `codec_costs`, or a file of them; a dict by device if they differ. None: measure
            them now, on this machine, with noise.
        energy_of: The names of the devices whose energy counts; None: the first.
        strategy: Chooses instead of the objective: called with the candidates within the limits, the best first, it
            returns one of them.
        tokens: Of a language model: the tokens of the prompt and of the answer, such as `(512, 64)`. The plan is for
            the whole answer: a run over the prompt, and one for each further token, each with a round trip. Needs cuts
            for such a prompt, and profiles with `phases=("prefill", "decode")`. As in `generate` of transformers, the
            logits of one position come back for each token.
        stages: Measured seconds of compiled or exported stages by device, and by the cuts where each begins and ends,
            in place of the times in the profile: `{"edge": {(None, "layer2"): head.time(x)}}`.
        micro_batches: Of training: the number of micro-batches of a step, each of the inputs of the profiles.
        schedule: Of training: `"gpipe"`, all forwards before all backwards; `"1f1b"`, a backward as soon as possible,
            the default.
        optimizer_state: Of training: the bytes that the optimizer keeps for each byte of a trainable parameter: 2 for
            Adam, the default, 1 for SGD with momentum, 0 for SGD.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> here = mt.profile(model, x, measure="time", repeat=3)
    >>> plan = mt.plan(mt.cuts(model, x), edge=here, cloud=here, link=mt.Link("1Kbps", rtt="15ms"))
    >>> plan.winner.name                                    # sending anything would be slower
    'all on edge'
    >>> [candidate.name for candidate in plan.baselines]
    ['all on edge', 'all on cloud, input by zstd', 'all on cloud, raw input']
    """
    # Imported here since `import microtome` imports this file, and these take longer than all the rest of it.
    from microtome.plan import answer, arguments
    from microtome.plan.compatibility import check_profile
    from microtome.plan.cost import DeviceChain
    from microtome.plan.device_costs import DeviceCosts, cut_points
    from microtome.plan.search import candidates
    from microtome.results.cuts import Cuts
    from microtome.results.phases import Phases
    from microtome.results.plan import Plan
    from microtome.results.profile import Profile

    cuts = arguments.load(cuts, Cuts, "the cuts")
    if objective not in OBJECTIVES:
        raise BadQuery(f"expected objective 'latency', 'energy', 'throughput' or 'training', got {objective!r}")
    if objective == "training":
        unused = {
            "tokens": tokens,
            "stages": stages,
            "costs": costs,
            "energy_of": energy_of,
            "codec": None if codec in ("raw", ("raw",)) else codec,  # raw is what training has
        }
        arguments.check_unused(unused)
        profiles, chain_links = arguments.load_chain(Profile, edge, cloud, link, devices, links)
        training = arguments.check_training(micro_batches, schedule, optimizer_state)
        return _plan_training(cuts, profiles, chain_links, limits, slower, strategy, *training)
    arguments.check_no_training(
        objective, {"micro_batches": micro_batches, "schedule": schedule, "optimizer_state": optimizer_state}
    )
    decode_profiles: dict[str, Profile] = {}
    if tokens is None:
        profiles, chain_links = arguments.load_chain(Profile, edge, cloud, link, devices, links)
        for name, profile in profiles.items():
            check_profile(cuts, name, profile)
    else:
        tokens = answer.check_tokens(tokens, cuts)
        phases, chain_links = arguments.load_chain(Phases, edge, cloud, link, devices, links)
        cuts = answer.as_generated(cuts, next(iter(phases.values())))
        profiles, decode_profiles = answer.split_phases(cuts, phases)
        cuts = answer.common_cuts(cuts)
    names, timed = list(profiles), [*profiles.values(), *decode_profiles.values()]
    points = cut_points(cuts, timed)
    factors = arguments.check_factors(slower, names)
    if tokens is not None and stages is not None:
        raise BadQuery("stages= are for one run, and tokens= for many: a compiled or exported stage keeps no cache")
    times = arguments.check_stages(stages, names, points, objective)
    chain_devices = [
        DeviceCosts(name, one, points, factors.get(name, 1.0), times.get(name, {}), cuts.shared_weights)
        for name, one in profiles.items()
    ]
    codecs = arguments.check_codecs("raw" if codec is None else codec)
    memory_limits = arguments.parse_limits(limits, names)
    energy_devices = arguments.devices_with_energy(chain_devices, objective, energy_of)
    # Last, after all checks: it may measure every codec.
    added = () if codec is not None else (arguments.COMPRESSED,)
    tables, source = arguments.load_codec_costs(cuts, codecs, costs, names, of_inputs=added)
    compressed = tuple(one for one in added if all(one in table.costs for table in tables))
    chain = DeviceChain(
        devices=chain_devices,
        links=chain_links,
        points=points,
        output_bytes=cuts.output_bytes,
        codecs=codecs,
        input_codecs=(*codecs, *compressed),
        codec_costs=tables,
        limits=memory_limits,
        energy_of=energy_devices,
    )
    if tokens is not None and cuts.decode is not None:
        step_points = cut_points(cuts.decode, timed)
        step = replace(
            chain,
            devices=[DeviceCosts(name, decode_profiles[name], step_points, factors.get(name, 1.0)) for name in names],
            points=step_points,
            output_bytes=cuts.decode.output_bytes,
            codec_costs=arguments.measure_step_codecs(cuts.decode, chain.input_codecs, len(names)),
        )
        chain = answer.AnswerChain.of(chain, step, tokens[1] - 1, cuts)
    ranked = candidates(chain, objective)
    chosen = _choose(ranked, strategy)
    return Plan(
        model=cuts.model,
        name=cuts.name,
        inputs=next(iter(profiles.values())).inputs,
        objective=objective,
        devices={name: _machine(profile) for name, profile in profiles.items()},
        links=tuple(chain_links),
        candidates=ranked,
        chosen=chosen,
        strategy=_strategy_name(strategy),
        limits=dict(chain.limits),
        codec_costs=source,
        energy_of=tuple(chain.energy_of),
        notes=(
            *(_slower_note(name, factor, energy_devices) for name, factor in factors.items()),
            *([_default_codecs_note(compressed)] if codec is None else []),
            *_notes(cuts, chain),
            *_stage_notes(times),
            *([] if tokens is None else _session_notes(ranked, chosen)),
        ),
        aliases=cuts.aliases,
        tokens=tokens,
    )


def _plan_training(
    cuts: Cuts,
    profiles: Mapping[str, Profile],
    links: Sequence[Link],
    limits: Mapping[str, int | str] | None,
    slower: Mapping[str, float] | None,
    strategy: Strategy | None,
    micro_batches: int,
    schedule: Schedule,
    optimizer_state: float,
) -> Plan:
    """Choose the stages of a model in training."""
    from microtome.plan import arguments
    from microtome.plan.compatibility import check_backward, check_profile
    from microtome.plan.device_costs import DeviceCosts, cut_points
    from microtome.plan.training import Pipeline
    from microtome.plan.training_search import candidates
    from microtome.results.plan import Plan

    for name, profile in profiles.items():
        check_profile(cuts, name, profile)
        check_backward(name, profile)
    trainable = replace(cuts, offered=tuple(cut for cut in cuts if _grad_refusal(cut) is None))
    points = cut_points(trainable, list(profiles.values()))
    factors = arguments.check_factors(slower, list(profiles))
    pipeline = Pipeline(
        devices=[
            DeviceCosts(name, one, points, factors.get(name, 1.0), shared_weights=cuts.shared_weights)
            for name, one in profiles.items()
        ],
        links=links,
        points=points,
        schedule=schedule,
        micro_batches=micro_batches,
        optimizer_state=optimizer_state,
        limits=arguments.parse_limits(limits, list(profiles)),
    )
    ranked, unproved = candidates(pipeline)
    return Plan(
        model=cuts.model,
        name=cuts.name,
        inputs=next(iter(profiles.values())).inputs,
        objective="training",
        devices={name: _machine(profile) for name, profile in profiles.items()},
        links=tuple(links),
        candidates=ranked,
        chosen=_choose(ranked, strategy),
        strategy=_strategy_name(strategy),
        limits=dict(pipeline.limits),
        codec_costs="",
        energy_of=(),
        notes=(
            *(_slower_note(name, factor, ()) for name, factor in factors.items()),
            *unproved,
            *_grad_notes(cuts),
            *_cut_notes(trainable, points),
            *_training_notes(optimizer_state),
        ),
        aliases=cuts.aliases,
        micro_batches=micro_batches,
        schedule=schedule,
    )


def _grad_refusal(cut: Cut) -> str | None:
    """The reason why gradients cannot cross a cut; None: none is known."""
    if cut.head_state_bytes is not None:
        return "the model has a cache, so list the cuts of a single pass, such as with use_cache=False"
    return cut.grad_refused


def _grad_notes(cuts: Cuts) -> Iterator[str]:
    refused = [f"{cut.at}: {reason}" for cut in cuts if (reason := _grad_refusal(cut)) is not None]
    if refused:
        yield f"{len(refused)} of {len(cuts)} cuts are left out: gradients cannot cross them, as at {refused[0]}"
    yield "gradients are compared when the model is split with grad=True, which may refuse a cut"


def _training_notes(optimizer_state: float) -> Iterator[str]:
    yield "a micro-batch is one pass of the profiles; the loss and the optimizer's step are not timed"
    yield "gradients return for all floating-point values that cross; links send while devices compute"
    yield (
        f"memory: weights, gradients, an optimizer state of {optimizer_state:g} times the trainable weights, and for "
        "each micro-batch in flight what is saved, received and sent; without temporary tensors"
    )


def _choose(candidates: Sequence[Candidate], strategy: Strategy | None) -> int:
    """Return the index of the winner."""
    allowed = tuple(candidate for candidate in candidates if candidate.refused is None)
    if not allowed:
        raise BadQuery(f"no placement of the model is within the limits: for the best, {candidates[0].refused}")
    if strategy is None:
        return 0
    try:
        choice = strategy(allowed)
    except Exception as error:
        raise BadQuery(f"the strategy raised {describe_error(error)}") from error
    if choice not in allowed:
        raise BadQuery(f"expected one of its candidates from the strategy, got {choice!r:.200}")
    return candidates.index(choice)


def _strategy_name(strategy: Strategy | None) -> str:
    return "" if strategy is None else getattr(strategy, "__name__", type(strategy).__name__)


def _slower_note(name: str, factor: float, energy_of: Collection[str]) -> str:
    energy = "; its energy stays as measured" if name in energy_of else ""
    return f"{name}: measured times multiplied by {factor:g}{energy}"


def _session_notes(candidates: Sequence[Candidate], chosen: int) -> list[str]:
    """Return a note if the winner sends the inputs: `generate` over a server keeps a cache on both sides of a cut."""
    if not candidates[chosen].at or any(candidates[chosen].at):
        return []
    cuts = (one for one in candidates if one.refused is None and any(one.at))
    best = next(cuts, None)
    other = "" if best is None else f": {best.name}, the best, takes {seconds(best.latency_s)}"
    return [f"generate over a server needs a cut at a layer{other}"]


def _machine(profile: Profile) -> str:
    return profile.environment.get("gpu") or profile.environment.get("cpu", "unknown")


def _cut_notes(cuts: Cuts, points: Sequence[CutPoint]) -> Iterator[str]:
    left_out = len(cuts) - (len(points) - 2)
    if left_out:
        yield f"{left_out} of {len(cuts)} cuts are left out: a profile has no times so deep"
    if cuts.refused:
        yield f"the model cannot be cut at {len(cuts.refused)} calls: see `microtome.cuts` for the reasons"


def _default_codecs_note(compressed: tuple[str, ...]) -> str:
    if compressed:
        return f"no codec was named: cuts are tried raw, and the inputs raw and by {', '.join(compressed)}"
    return "compressed inputs are not considered: zstd is not installed, or its costs were not measured"


def _stage_notes(stages: Mapping[str, Mapping[tuple[str | None, str | None], float]]) -> Iterator[str]:
    for name, times in stages.items():
        for begins_at, ends_at in times:
            part = f"from {begins_at or 'the input'} to {ends_at or 'the output'}"
            yield f"the time of {name} {part} is that of a stage that was measured by itself, not of the profile"


def _notes(cuts: Cuts, chain: DeviceChain) -> list[str]:
    notes = list(_cut_notes(cuts, chain.points))
    if chain.round_trips > 1:
        notes.append("every token after the first takes as long as the second, although the cache grows")
    if any(len(device.elapsed_s) > 1 for device in chain.devices):
        notes.append("on a GPU, a part takes the longer of its kernels and the host's time to launch them")
    for device in chain.devices:
        if device.name in chain.energy_of:
            idle = "without idle power" if device.energy_field == "net_energy_j" else "with idle power"
            use = device.profile.energy
            notes.append(f"energy of {device.name}: {idle}{f', by {use.method}' if use else ''}; without codecs")
    if chain.energy_of and all(link.joules_per_byte is None for link in chain.links):
        notes.append("the energy of the radio is not included: set joules_per_byte of the link")
    return notes
