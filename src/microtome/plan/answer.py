"""The costs of a whole answer of a language model: a run over the prompt, then a run for each further token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from microtome.errors import BadQuery
from microtome.plan.compatibility import check_profile
from microtome.plan.cost import DeviceChain, LinkCrossing, Placement
from microtome.plan.device_costs import CutPoint
from microtome.results.codec_costs import CodecCost
from microtome.results.cuts import Cut, Cuts, Live
from microtome.results.phases import Phases
from microtome.results.plan import Candidate
from microtome.results.profile import Profile
from microtome.results.rows import Row


@dataclass
class AnswerChain(DeviceChain):
    """A chain of devices on which a language model answers; costs are those of the whole answer.

    Attributes:
        prefill: The costs of the run over the prompt.
        decode: The costs of the run for one token, at the same points.
        steps: The number of tokens after the first, each of which costs as much as the first of them.
        prompt_state: Bytes of the cache before each point, after the prompt; `token_state`: after one more token.
    """

    prefill: DeviceChain
    decode: DeviceChain
    steps: int
    prompt_state: Sequence[int]
    token_state: Sequence[int]

    @classmethod
    def of(cls, prefill: DeviceChain, decode: DeviceChain, steps: int, cuts: Cuts) -> AnswerChain:
        """Combine the costs of both phases at their common points."""
        assert cuts.decode is not None
        fields = {name: getattr(prefill, name) for name in DeviceChain.__dataclass_fields__}
        fields["output_bytes"] = prefill.output_bytes + steps * decode.output_bytes
        states = [_state_before(prefill.points, found) for found in (cuts, cuts.decode)]
        return cls(**fields, prefill=prefill, decode=decode, steps=steps, prompt_state=states[0], token_state=states[1])

    @property
    def round_trips(self) -> int:
        return 1 + self.steps

    def codec_cost(self, device: int, crossing: LinkCrossing) -> CodecCost:
        first, each = (chain.codec_cost(device, crossing) for chain in (self.prefill, self.decode))
        return CodecCost(
            first.nbytes + self.steps * each.nbytes,
            first.encode_s + self.steps * each.encode_s,
            first.decode_s + self.steps * each.decode_s,
        )

    @cached_property
    def run_s(self) -> list[Tensor]:
        pairs = zip(self.prefill.run_s, self.decode.run_s, strict=True)
        return [first + self.steps * each for first, each in pairs]

    @cached_property
    def run_j(self) -> list[Tensor | None]:
        pairs = zip(self.prefill.run_j, self.decode.run_j, strict=True)
        return [None if first is None or each is None else first + self.steps * each for first, each in pairs]

    @cached_property
    def memory(self) -> list[Tensor]:
        """The memory of each part of the model in either phase, with its part of the cache after the last token."""
        before = torch.tensor(self.prompt_state, dtype=torch.float64)
        growth = torch.tensor(self.token_state, dtype=torch.float64) - before
        own = before[None, :] - before[:, None]
        # The peak of a step may be before the step adds to the cache.
        grown = (growth[None, :] - growth[:, None]) * self.steps
        tables = []
        for first, each in zip(self.prefill.memory, self.decode.memory, strict=True):
            # The peaks of a profile include the cache of all layers before, and while decoding of all layers.
            in_prefill = first - before[:, None]
            in_decode = each - (before[-1] - own) + grown
            tables.append(torch.maximum(in_prefill, in_decode if self.steps else in_prefill).clamp_(min=0.0))
        return tables

    def send_s(self, link: int, crossing: LinkCrossing) -> float:
        return self.prefill.send_s(link, crossing) + self.steps * self.decode.send_s(link, crossing)

    def back_s(self, link: int) -> float:
        return self.prefill.back_s(link) + self.steps * self.decode.back_s(link)

    def busy_s(self, device: int, crossing: LinkCrossing) -> float:
        return self.prefill.busy_s(device, crossing) + self.steps * self.decode.busy_s(device, crossing)

    def price(self, placement: Placement, *, is_baseline: bool = False) -> Candidate:
        first, each = (chain.price(placement).latency_s for chain in (self.prefill, self.decode))
        return replace(super().price(placement, is_baseline=is_baseline), first_token_s=first, token_s=each)


def check_tokens(tokens: Any, cuts: Cuts) -> tuple[int, int]:
    """Return the tokens of the prompt and of the answer; raise if the cuts are not of such a prompt."""
    try:
        prompt, new = map(int, tokens)
    except (TypeError, ValueError) as error:
        raise BadQuery(f"expected tokens of the prompt and of the answer, such as (512, 64), got {tokens!r}") from error
    if prompt < 1 or new < 1:
        raise BadQuery(f"expected 1 token or more of the prompt and of the answer, got {prompt} and {new}")
    if cuts.decode is None:
        reason = (
            f": {cuts.no_decode}" if cuts.no_decode else ": list them for a prompt, of a model that returns a cache"
        )
        raise BadQuery(f"the cuts of {cuts.model} have no next token{reason}")
    if cuts.prompt_tokens != prompt:
        raise BadQuery(f"expected cuts for a prompt of {prompt} tokens, got them for {cuts.prompt_tokens}")
    return prompt, new


def as_generated(cuts: Cuts, phases: Phases) -> Cuts:
    """Return the cuts of the prompt as `generate` runs it, which computes the logits of the last positions only.

    Cuts of a run with all logits have the same tensors up to the choice of these positions. Those after it, such as
    that at `lm_head`, are left out: nearly nothing is left to compute there.
    """
    if phases.logits_to_keep is None or phases.prefill is None or cuts.prompt_tokens is None:
        return cuts
    lengths = cuts.prompt_tokens, phases.logits_to_keep
    outputs = tuple(_shorten(value, phases.prefill.total, *lengths) for value in cuts.outputs)
    if outputs == cuts.outputs:
        return cuts
    rows = {row.address: row for row in phases.prefill}
    places = sorted((*cuts.offered, *cuts.refused), key=lambda cut: cut.index)
    shorter = [cut for cut in places if cut.at in rows and _is_shorter(cut, rows[cut.at], *lengths)]
    saved_macs = _saved_macs(places, shorter, rows)

    def adapt(kept: tuple[Cut, ...]) -> tuple[Cut, ...]:
        return tuple(
            replace(cut, tail_macs=None if cut.tail_macs is None or saved_macs is None else cut.tail_macs - saved_macs)
            for cut in kept
            if cut not in shorter
        )

    # The FLOPs of a whole run are those with all logits.
    return replace(cuts, outputs=outputs, offered=adapt(cuts.offered), refused=adapt(cuts.refused), flops=None)


def _shorten(value: Live, row: Row, length: int, kept: int) -> Live:
    """Return a tensor of a call with the last positions only, if it is so in the profile's row of the call."""
    if len(value.shape) < 2 or value.shape[-2] != length or kept >= length:
        return value
    shape = (*value.shape[:-2], kept, value.shape[-1])
    is_measured = any(tensor.shape == shape for tensor in row.outputs)
    return value._replace(shape=shape, nbytes=value.nbytes // length * kept) if is_measured else value


def _is_shorter(cut: Cut, row: Row, length: int, kept: int) -> bool:
    return any(_shorten(value, row, length, kept) is not value for value in cut.live if value.source == cut.at)


def _saved_macs(places: Sequence[Cut], shorter: Sequence[Cut], rows: Mapping[str, Row]) -> int | None:
    """Return the MACs of layers on all positions, less those on the last ones; None: not known."""
    saved, before = 0, 0
    for cut in places:
        macs = rows[cut.at].macs if cut.at in rows else None
        if cut.head_macs is None or macs is None:
            return None
        if cut in shorter and rows[cut.at].height == 1:
            saved += cut.head_macs - before - macs
        before = cut.head_macs
    return saved


def split_phases(cuts: Cuts, phases: Mapping[str, Phases]) -> tuple[dict[str, Profile], dict[str, Profile]]:
    """Return the profiles of each device in the prefill and in decoding, compared with the cuts."""
    assert cuts.decode is not None
    profiles: tuple[dict[str, Profile], dict[str, Profile]] = {}, {}
    for name, measured in phases.items():
        for place, found, phase, profile in (
            (profiles[0], cuts, "prefill", measured.prefill),
            (profiles[1], cuts.decode, "decode", measured.decode),
        ):
            if profile is None:
                raise BadQuery(f"the phases of {name!r} lack {phase!r}: profile the model there with both phases")
            if measured.prompt_tokens != cuts.prompt_tokens:
                got = f"got {measured.prompt_tokens} in the phases of {name!r}"
                raise BadQuery(f"expected a prompt of {cuts.prompt_tokens} tokens, as in the cuts; {got}")
            check_profile(found, f"{name}, {phase}", profile)
            place[name] = profile
    return profiles


def common_cuts(cuts: Cuts) -> Cuts:
    """Return the cuts of both phases, in the order of the prefill."""
    decode = cuts.decode
    assert decode is not None
    steps = {cut.at: cut for cut in decode if cut.head_state_bytes is not None}
    both = tuple(cut for cut in cuts if cut.at in steps and cut.head_state_bytes is not None)
    assert cuts.token is not None
    return replace(cuts, offered=both, token=replace(cuts.token, cuts=tuple(steps[cut.at] for cut in both)))


def _state_before(points: Sequence[CutPoint], cuts: Cuts) -> list[int]:
    """Return the bytes of the cache that calls before each point wrote."""
    by_address: dict[str | None, Cut] = {cut.at: cut for cut in cuts}
    total = max(((cut.head_state_bytes or 0) + (cut.tail_state_bytes or 0) for cut in cuts), default=0)
    return [0, *(by_address[point.at].head_state_bytes or 0 for point in points[1:-1]), total]
