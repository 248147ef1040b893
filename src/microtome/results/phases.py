"""The profiles of the two phases of a language model: the prefill, and decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from microtome.errors import BadQuery
from microtome.files.reading import File
from microtome.results.base import Result, render, write
from microtome.results.measurements import Spread
from microtome.results.profile import Profile
from microtome.results.rows import Row, group, upgrade_calls

Phase = Literal["prefill", "decode"]
#: Layers that together take less than this share of a phase do not define the roof: short times are imprecise.
_LEAST_SHARE = 0.01


class Roof(NamedTuple):
    """The highest rates that layers reached: not the limit of the machine.

    Attributes:
        flops_per_s: FLOPs per second of one layer.
        bytes_per_s: Bytes per second that one layer read and wrote.
    """

    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """The FLOPs per byte below which memory is the bound."""
        return self.flops_per_s / self.bytes_per_s


@dataclass(frozen=True)
class Phases(Result, kind="phases"):
    """The costs of a language model: of the run over the prompt, and of the run for one more token of each sequence.

    Attributes:
        model: The class of the model.
        name: The name of the model on the command line; None if it was run from Python.
        batch: The number of sequences.
        prompt_tokens: The tokens of each prompt.
        prefill: The run over the prompt, which fills the cache; None: not profiled.
        decode: The run for the next token, which reads the cache of the prompt; None: not profiled.
        state: The arguments that carry the state from run to run, such as `past_key_values`.
        cache_bytes: The bytes of the state of all sequences after the prompt.
        token_cache_bytes: The bytes that one token of one sequence adds to it: 0 of a recurrent state; None: no token
            was decoded.
        logits_to_keep: The number of last positions of the prompt whose logits were computed; None: all.
    """

    model: str
    batch: int
    prompt_tokens: int
    prefill: Profile | None
    decode: Profile | None
    state: tuple[str, ...]
    cache_bytes: int
    token_cache_bytes: int | None
    name: str | None = None
    logits_to_keep: int | None = None

    @property
    def title(self) -> str:
        """The name of the model, or else its class."""
        return self.name or self.model

    def __getitem__(self, phase: str) -> Profile:
        """Return the profile of a phase."""
        profiles = dict(self)
        if phase not in profiles:
            raise BadQuery(f"expected a phase of {', '.join(map(repr, profiles))}, got {phase!r}")
        return profiles[phase]

    def __iter__(self) -> Iterator[tuple[Phase, Profile]]:
        """Iterate over the phases and their profiles."""
        if self.prefill is not None:
            yield "prefill", self.prefill
        if self.decode is not None:
            yield "decode", self.decode

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first token; None: not measured."""
        return None if self.prefill is None else pass_seconds(self.prefill)

    @property
    def token_s(self) -> float | None:
        """Seconds for each further token; None: not measured."""
        return None if self.decode is None else pass_seconds(self.decode)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second, of all sequences; None: not measured."""
        return self.batch / self.token_s if self.token_s else None

    def answer_s(self, tokens: int) -> float | None:
        """Return the seconds of an answer of so many tokens, each at the cost of the first; None: not measured."""
        if tokens < 1:
            raise BadQuery(f"expected an answer of 1 token or more, got {tokens!r}")
        if self.first_token_s is None or self.token_s is None:
            return None
        return self.first_token_s + (tokens - 1) * self.token_s

    @property
    def roof(self) -> Roof | None:
        """The highest rates of a layer in either phase; None: not measured in both."""
        # Layers of the prefill reach the highest rate of FLOPs, those of decoding that of bytes.
        by_phase = [list(_layer_rates(profile)) for _, profile in self]
        if len(by_phase) < 2 or not all(by_phase):
            return None
        rates = [rate for rates in by_phase for rate in rates]
        return Roof(max(rate.flops_per_s for rate in rates), max(rate.bytes_per_s for rate in rates))

    def bound(self, phase: Phase) -> Literal["memory", "compute", "host"] | None:
        """Return which bounds a phase, by the roof and the phase's FLOPs per byte; None: unknown.

        `"host"`: on a GPU, the host takes longer to launch the kernels than they run.
        """
        timing = self[phase].timing
        if timing is not None and timing.device is not None and timing.device.median < timing.bare.median:
            return "host"
        roof, intensity = self.roof, flops_per_byte(self[phase])
        if roof is None or intensity is None:
            return None
        return "memory" if intensity < roof.ridge else "compute"

    def to_html(self, file: File | None = None) -> str:
        """Export one self-contained HTML page, to the file or as text: the prefill, compared with decoding."""
        first, *others = (profile for _, profile in self)
        return write(render("html.document.html", first, compare=others[0] if others else None), file)

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {phase: profile.as_dict() for phase, profile in self}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        profiles = {phase: data[phase] for phase in ("prefill", "decode") if data[phase] is not None}
        upgraded = {phase: one | {"calls": upgrade_calls(one["calls"])} for phase, one in profiles.items()}
        return super().from_dict(data | upgraded)

    def check(self) -> None:
        if self.prefill is None and self.decode is None:
            raise ValueError("it has no phase")
        for _, profile in self:
            profile.check()

    def __repr__(self) -> str:
        phases = " and ".join(phase for phase, _ in self)
        return f"<Phases of {self.model}: {phases}, {self.batch} x {self.prompt_tokens} tokens>"


def pass_time(profile: Profile) -> Spread | None:
    """Return the time of a pass: on a GPU, the longer of its kernels and the host's time to launch them."""
    timing = profile.timing
    if timing is None or timing.device is None:
        return None if timing is None else timing.bare
    return max(timing.bare, timing.device, key=lambda spread: spread.median)


def pass_seconds(profile: Profile) -> float | None:
    """Return the median of the seconds of a pass."""
    spread = pass_time(profile)
    return None if spread is None else spread.median


def moved_bytes(profile: Profile) -> int | None:
    """Return the bytes that a pass reads and writes."""
    total = profile.total
    return None if total.read_bytes is None or total.write_bytes is None else total.read_bytes + total.write_bytes


def flops_per_byte(profile: Profile) -> float | None:
    """Return the FLOPs for each byte that a pass moves."""
    moved = moved_bytes(profile)
    return None if profile.total.flops is None or not moved else profile.total.flops / moved


def _layer_rates(profile: Profile) -> Iterator[Roof]:
    """Yield the rates of the lowest measured calls; those of a class with equal costs are taken together."""

    def seconds_of(row: Row) -> float | None:
        return row.time_s if row.device_s is None else row.device_s

    whole = seconds_of(profile.total)
    lowest = [row for row in profile if not any(seconds_of(child) is not None for child in profile.children(row))]
    known = [row for row in lowest if row.flops and seconds_of(row) is not None]
    alike = group((f"{row.type} {row.flops} {row.read_bytes} {row.write_bytes}", row) for row in known)
    for rows in alike.values():
        seconds = sum(seconds_of(row) or 0.0 for row in rows)
        if whole is not None and seconds > 0 and seconds >= _LEAST_SHARE * whole:
            moved = sum((row.read_bytes or 0) + (row.write_bytes or 0) for row in rows)
            yield Roof(sum(row.flops or 0 for row in rows) / seconds, moved / seconds)
