"""Plans for a whole answer of a language model: the prompt once, then a run and a round trip for each token."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadQuery
from microtome.plan import search
from microtome.plan.answer import AnswerChain
from microtome.plan.cost import Placement
from microtome.results.plan import Candidate

PROMPT = 6
LINK = mt.Link("10Mbps", rtt="4ms", jitter="1ms")


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    zoo.import_torchvision()  # which transformers imports
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4)).eval()
    return model


INPUTS = {"input_ids": torch.zeros(2, PROMPT, dtype=torch.int64)}


@pytest.fixture(scope="module")
def cuts(llama: nn.Module) -> mt.Cuts:
    with torch.no_grad():
        return mt.cuts(llama, INPUTS)


@pytest.fixture(scope="module")
def kept(llama: nn.Module) -> mt.Cuts:
    """The cuts of the prompt as `generate` runs it."""
    with torch.no_grad():
        return mt.cuts(llama, INPUTS | {"logits_to_keep": 1})


@pytest.fixture(scope="module")
def phases(llama: nn.Module) -> mt.Phases:
    with torch.no_grad():
        return mt.profile(llama, INPUTS, phases=("prefill", "decode"), measure="time", repeat=3)


def plan(cuts: mt.Cuts, phases: Any, new: int, **options: Any) -> mt.Plan:
    return mt.plan(cuts, edge=phases, cloud=phases, link=LINK, tokens=(PROMPT, new), **options)


def test_an_answer_takes_the_prefill_and_each_further_token(kept: mt.Cuts, phases: mt.Phases) -> None:
    assert kept.decode is not None
    once = mt.plan(kept, edge=phases["prefill"], cloud=phases["prefill"], link=LINK)
    each = mt.plan(kept.decode, edge=phases["decode"], cloud=phases["decode"], link=LINK)
    for new in (1, 2, 9):
        answer = plan(kept, phases, new)
        assert answer.tokens == (PROMPT, new)
        assert len(answer) == len(once)
        for candidate in answer:
            first, step = once[candidate.name], each[candidate.name]
            for kinds in (("run",), ("send", "back")):  # codecs are measured anew for each plan
                expected = first.seconds(*kinds) + (new - 1) * step.seconds(*kinds)
                assert candidate.seconds(*kinds) == pytest.approx(expected)
            assert sum(candidate.sent_bytes) == sum(first.sent_bytes) + (new - 1) * sum(step.sent_bytes)
            assert candidate.back_bytes == first.back_bytes + (new - 1) * step.back_bytes
            assert candidate.late_s == pytest.approx(new * first.late_s)
            assert candidate.first_token_s is not None
            assert candidate.token_s is not None
            assert candidate.latency_s == pytest.approx(candidate.first_token_s + (new - 1) * candidate.token_s)


def test_cuts_of_all_logits_are_planned_with_those_that_generate_computes(
    cuts: mt.Cuts, kept: mt.Cuts, phases: mt.Phases
) -> None:
    given, generated = plan(cuts, phases, 9), plan(kept, phases, 9)
    # Of 2 sequences, logits of 64 words at one position for each token.
    assert given.baselines[-1].back_bytes == 9 * 2 * 64 * 4
    # At `lm_head`, of which the cuts have more logits, nothing would be left to compute.
    assert {one.name for one in generated} - {one.name for one in given} == {"lm_head"}
    for candidate in given:
        other = generated[candidate.name]
        assert (candidate.sent_bytes, candidate.back_bytes) == (other.sent_bytes, other.back_bytes)
        assert (candidate.memory_bytes, candidate.seconds("back")) == (other.memory_bytes, other.seconds("back"))


def test_cuts_of_all_logits_of_another_model_are_still_refused(cuts: mt.Cuts, phases: mt.Phases) -> None:
    def other(cut: mt.Cut) -> mt.Cut:
        return replace(cut, tail_macs=(cut.tail_macs or 0) + 1)

    with pytest.raises(BadQuery, match=r"expected [\d,]+ MACs, as in the cuts; got [\d,]+ MACs in the profile"):
        plan(replace(cuts, offered=tuple(map(other, cuts.offered))), phases, 9)
    with pytest.raises(BadQuery, match=r"expected 2x6x64 from 'lm_head', as in the cuts; got 2x1x64 from 'lm_head'"):
        mt.plan(cuts, edge=phases["prefill"], cloud=phases["prefill"], link=LINK)


@pytest.mark.integration
def test_the_bytes_back_are_those_that_generate_receives() -> None:
    zoo.import_torchvision()
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    words, prompt, new = 5000, 16, 4
    config = transformers.Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=words, eos_token_id=None)
    qwen, ids = transformers.Qwen2ForCausalLM(config).eval(), torch.arange(prompt)[None]
    with torch.no_grad():
        cuts = mt.cuts(qwen, {"input_ids": ids})
        here = mt.profile(qwen, {"input_ids": ids}, phases=("prefill", "decode"), measure="time", repeat=3)
    planned = mt.plan(cuts, edge=here, cloud=here, link=LINK, tokens=(prompt, new))["model.layers.0"]
    with (
        mt.serve(qwen, {"input_ids": ids}, listen="127.0.0.1:0") as server,
        mt.connect(qwen, {"input_ids": ids}, server.address, at="model.layers.0", codec="raw") as remote,
    ):
        remote.generate(ids, max_new_tokens=new, do_sample=False)
        received = [request.received_bytes for request in remote.requests]
    assert len(received) == new
    assert planned.back_bytes == new * words * 4  # of each token, logits of one position
    # A reply also describes its tensors, and how the cache has changed.
    assert planned.back_bytes <= sum(received) <= planned.back_bytes + new * 1000


def test_round_trips_of_many_tokens_keep_a_model_on_the_edge(cuts: mt.Cuts, phases: mt.Phases) -> None:
    # The cloud is faster by more than a round trip for the prompt, and by less for a token.
    slow = 2 * 0.004 / (phases.first_token_s or 0.0) + 2
    near = replace(phases, decode=_with_times(phases["decode"], 1e-6))
    link = mt.Link("10Gbps", rtt="4ms")
    options: dict[str, Any] = {"edge": near, "cloud": near, "link": link, "slower": {"edge": slow}}
    once = mt.plan(cuts, **options, tokens=(PROMPT, 1))
    assert once.winner.at == (None,)
    best = next(candidate for candidate in once if any(candidate.at))
    assert once.notes[-1].startswith(f"generate over a server needs a cut at a layer: {best.name}, the best, takes ")
    long = mt.plan(cuts, **options, tokens=(PROMPT, 500))
    assert long.winner.name == "all on edge"
    assert "generate over a server" not in " ".join(long.notes)


def _with_times(profile: mt.Profile, factor: float) -> mt.Profile:
    rows = (replace(row, elapsed_s=factor * (row.elapsed_s or 0.0)) for row in profile)
    return replace(profile, calls=tuple(rows))


def test_memory_has_the_cache_of_each_side_after_the_last_token(cuts: mt.Cuts, phases: mt.Phases) -> None:
    token, batch = phases.token_cache_bytes, phases.batch
    assert token is not None
    short, long = plan(cuts, phases, 1000), plan(cuts, phases, 3000)
    grown = 2000 * batch * token

    def growth(name: str) -> list[int]:
        return [b - a for a, b in zip(short[name].memory_bytes, long[name].memory_bytes, strict=True)]

    assert growth("all on edge") == [grown, 0]
    assert growth("model.layers.0") == [grown // 2, grown // 2]  # one of two layers
    assert growth("model.layers.1") == [grown, 0]
    # Each side has its parameters and its cache, and little else.
    for at in ("model.layers.0", "model.layers.1"):
        sides = zip(
            long[at].memory_bytes,
            (cuts[at].head_param_bytes, cuts[at].tail_param_bytes),
            (cuts[at].head_state_bytes, cuts[at].tail_state_bytes),
            strict=True,
        )
        for memory, params, cache in sides:
            expected = params + (cache or 0) * (PROMPT + 2999) // PROMPT
            assert expected <= memory <= expected + 30_000
    limit = {"edge": long["model.layers.0"].memory_bytes[0] - 1}
    assert plan(cuts, phases, 3000, limits=limit)["model.layers.0"].refused is not None
    assert plan(cuts, phases, 1000, limits=limit)["model.layers.0"].refused is None


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_chain_has_the_best_of_all_placements(
    cuts: mt.Cuts, phases: mt.Phases, objective: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains: list[AnswerChain] = []
    find = search.candidates

    def candidates(chain: Any, wanted: Any) -> tuple[Candidate, ...]:
        chains.append(chain)
        return find(chain, wanted)

    monkeypatch.setattr(search, "candidates", candidates)
    few = replace(cuts, offered=tuple(cut for cut in cuts if cut.depth <= 2))
    found = mt.plan(
        few,
        devices={"a": phases, "b": phases, "c": phases},
        links=["1Gbps", LINK],
        slower={"a": 30, "b": 5},
        objective=objective,
        tokens=(PROMPT, 4),
    )
    (chain,) = chains
    crossings = chain.crossings
    placements: list[Placement] = [(), *((one,) for one in crossings)]
    placements += [(a, b) for a, b in itertools.product(crossings, crossings) if a == b or a.point < b.point]
    best = min(chain.price(placement).rank(objective) for placement in placements)
    assert found.winner.rank(objective) == pytest.approx(best)


def test_the_best_cut_by_bandwidth_counts_every_round_trip(cuts: mt.Cuts, phases: mt.Phases) -> None:
    answer = plan(cuts, phases, 20, slower={"edge": 50})
    for span in answer.over_bandwidths()[1:]:
        link = mt.Link(8 * span.from_bytes_per_s * 1.01, rtt="4ms", jitter="1ms")
        there = mt.plan(cuts, edge=phases, cloud=phases, link=link, slower={"edge": 50}, tokens=(PROMPT, 20))
        # Codecs are measured anew, so the winner may be another of about the same latency.
        assert there.winner.latency_s == pytest.approx(there[span.candidate.name].latency_s, rel=0.1)


def test_a_report_has_the_time_to_the_first_token(cuts: mt.Cuts, phases: mt.Phases, tmp_path: Path) -> None:
    answer = plan(cuts, phases, 7)
    text = " ".join(str(answer).split())
    assert f"LlamaForCausalLM, an answer of 7 tokens to a prompt of {PROMPT}: " in text
    assert "first token" in text
    assert "a pass is a whole answer" in text
    assert "every token after the first takes as long as the second" in text
    assert mt.load(answer.to_json(tmp_path / "plan.json")) == answer
    assert "first_token_s,token_s" in answer.to_csv()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (PROMPT, "expected tokens of the prompt and of the answer, such as (512, 64), got 6"),
        ((PROMPT, 0), "expected 1 token or more of the prompt and of the answer, got 6 and 0"),
        ((9, 2), "expected cuts for a prompt of 9 tokens, got them for 6"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(cuts: mt.Cuts, phases: mt.Phases, tokens: Any, message: str) -> None:
    with pytest.raises(BadQuery, match=re.escape(message)):
        mt.plan(cuts, edge=phases, cloud=phases, link=LINK, tokens=tokens)


def test_profiles_of_another_kind_are_refused(cuts: mt.Cuts, phases: mt.Phases) -> None:
    with pytest.raises(BadQuery, match=r"expected 'edge' as a Phases of mt\.profile\(.*phases=.*, got a Profile$"):
        plan(cuts, phases["prefill"], 2)
    with pytest.raises(BadQuery, match=r"expected 'edge' as a Profile of .*: pass tokens=\(512, 64\)"):
        mt.plan(cuts, edge=phases, cloud=phases, link=LINK)
    with pytest.raises(BadQuery, match="the phases of 'edge' lack 'decode': profile the model there with both"):
        plan(cuts, replace(phases, decode=None), 2)
    with pytest.raises(BadQuery, match="expected a prompt of 6 tokens, as in the cuts; got 5 in the phases of 'edge'"):
        plan(cuts, replace(phases, prompt_tokens=5), 2)
    with pytest.raises(BadQuery, match="the cuts of LlamaForCausalLM have no next token: list them for a prompt"):
        plan(replace(cuts, token=None), phases, 2)
