"""The table of the phases of a language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from microtome.report.notes import busy_notes, interval
from microtome.report.table import Column, Medium, Report, Table
from microtome.results.metrics import advise
from microtome.results.phases import Phase, Phases, flops_per_byte, moved_bytes, pass_seconds, pass_time
from microtome.results.profile import Profile
from microtome.units import UNKNOWN, count, plural, ratio, seconds, size, write


def report(phases: Phases, medium: Medium = "terminal") -> Report:
    """Describe each phase in a row."""
    counted = (
        Column("phase", lambda row: row[0], "left"),
        Column("tokens", lambda row: _tokens(phases, row[0]), importance=0),
        Column("MACs", lambda row: _count(row[1], "macs"), importance=5),
        Column("FLOPs", lambda row: _count(row[1], "flops"), importance=7),
        Column("moved", lambda row: size(moved_bytes(row[1])), importance=6),
        Column("FLOPs/B", lambda row: ratio(flops_per_byte(row[1]), pads=True), importance=8),
        Column("peak", lambda row: size(row[1].peak_bytes), importance=4),
    )
    measured = (
        Column("time", lambda row: write(pass_seconds(row[1]), "seconds"), importance=1),
        Column("tokens/s", lambda row: ratio(_tokens_per_s(phases, row), pads=True), importance=2),
        Column("FLOP/s", lambda row: count(_per_second(row[1], row[1].total.flops)), importance=9),
        Column("moved/s", lambda row: size(_per_second(row[1], moved_bytes(row[1]))), importance=10),
        Column("bound by", lambda row: phases.bound(row[0]) or UNKNOWN, "left", importance=3),
    )
    has_times = any(pass_seconds(profile) is not None for _, profile in phases)
    table = Table.of(counted + measured if has_times else counted, phases)
    return Report(_title(phases), (table,), tuple(_notes(phases)), figures=tuple(_figures(phases)))


def records(phases: Phases) -> list[dict[str, Any]]:
    """Return a record for each phase."""
    return [
        {
            "phase": phase,
            "batch": phases.batch,
            "tokens": phases.prompt_tokens if phase == "prefill" else 1,
            "macs": profile.total.macs,
            "flops": profile.total.flops,
            "moved_bytes": moved_bytes(profile),
            "peak_bytes": profile.peak_bytes,
            "cache_bytes": phases.cache_bytes,
            "token_cache_bytes": phases.token_cache_bytes,
            "time_s": pass_seconds(profile),
            "bound": phases.bound(phase),
        }
        for phase, profile in phases
    ]


def _title(phases: Phases) -> str:
    prompts = f"{plural(phases.batch, 'prompt')} of {plural(phases.prompt_tokens, 'token')}"
    return f"{phases.title}: {prompts}{', then one token at a time' if phases.decode is not None else ''}"


def _tokens(phases: Phases, phase: Phase) -> str:
    return f"{phases.batch} x {phases.prompt_tokens if phase == 'prefill' else 1}"


def _count(profile: Profile, name: str) -> str:
    number = count(getattr(profile.total, name))
    return f"≥ {number}" if profile.coverage.unknown else number


def _per_second(profile: Profile, amount: int | None) -> float | None:
    duration = pass_seconds(profile)
    return amount / duration if duration and amount is not None else None


def _tokens_per_s(phases: Phases, row: tuple[Phase, Profile]) -> float | None:
    return _per_second(row[1], phases.batch * (phases.prompt_tokens if row[0] == "prefill" else 1))


def _notes(phases: Phases) -> Iterator[str]:
    yield f"{plural(_any(phases).total.params, 'parameter')}, {size(_any(phases).total.param_bytes)}"
    name = " and ".join(phases.state)
    after = f"cache ({name}): {size(phases.cache_bytes)} after the prompt"
    per_token = phases.token_cache_bytes
    yield after if per_token is None else f"{after}, {size(per_token)} for each further token of a sequence"
    if phases.logits_to_keep is not None and phases.logits_to_keep < phases.prompt_tokens:
        last = plural(phases.logits_to_keep, "position") if phases.logits_to_keep > 1 else "position"
        yield f"logits are those of the last {last}, as in generate: logits_to_keep={phases.logits_to_keep}"
    for phase, profile in phases:
        yield f"{phase} counted: {profile.coverage}, on {profile.how}"
    if phases.prefill is not None and phases.prefill.timing is not None:
        yield f"time to first token: {seconds(phases.first_token_s)} ({interval(pass_time(phases.prefill))})"
    if phases.decode is not None and phases.decode.timing is not None:
        speed = f"{ratio(phases.tokens_per_s)} tokens per second"
        yield f"time per token: {seconds(phases.token_s)} ({interval(pass_time(phases.decode))}), {speed}"
    yield from _roofline(phases)
    yield from (f"{phase}: {note}" for phase, profile in phases for note in busy_notes(profile))


def _roofline(phases: Phases) -> Iterator[str]:
    """Explain which phase memory bounds: by the fastest layers that were measured, or else on which machines."""
    if any(phases.bound(phase) == "host" for phase, _ in phases):
        yield "host: it takes longer to launch the kernels of a pass than the device to run them"
    roof = phases.roof
    if roof is not None:
        rates = f"{count(roof.flops_per_s)}FLOP/s and {size(roof.bytes_per_s)}/s"
        yield (
            f"bound by: the fastest layers reach {rates}, so memory bounds a phase below {ratio(roof.ridge)} FLOPs per "
            "byte; this is not the limit of the machine"
        )
        return
    known = [(phase, intensity) for phase, profile in phases if (intensity := flops_per_byte(profile)) is not None]
    if known:
        texts = ", ".join(f"{phase} {ratio(intensity)}" for phase, intensity in known)
        yield f"memory bounds a phase above these FLOP/s for each B/s of the machine: {texts}; {_why_no_roof(phases)}"


def _why_no_roof(phases: Phases) -> str:
    """Return why the rates of the fastest layers are not known."""
    how = advise("measure='time'", "--time")
    if any(pass_seconds(profile) is None for _, profile in phases):
        return f"{how} measures them"
    if phases.prefill is None or phases.decode is None:
        return f"{how} of both phases measures them"
    return "the times of the layers are too short, or too noisy, to measure them"


def _figures(phases: Phases) -> Iterator[tuple[str, str]]:
    yield "params", count(_any(phases).total.params)
    yield "cache", size(phases.cache_bytes)
    if phases.token_cache_bytes is not None:
        yield "cache per token", size(phases.token_cache_bytes)
    if phases.first_token_s is not None:
        yield "first token", seconds(phases.first_token_s)
    if phases.tokens_per_s is not None:
        yield "tokens/s", ratio(phases.tokens_per_s)


def _any(phases: Phases) -> Profile:
    """Return the profile of a phase, for what is the same in all."""
    return next(profile for _, profile in phases)
