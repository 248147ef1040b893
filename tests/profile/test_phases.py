"""The phases of language models, against closed forms."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadInputs, BadQuery, Unsupported
from microtome.results.measurements import Spread, Timing
from microtome.results.phases import Roof, flops_per_byte, moved_bytes, pass_seconds
from microtome.trace.phases import Prompt, state_bytes

LAYERS, HIDDEN, INNER, HEADS, GROUPS, WORDS = 3, 32, 48, 4, 2, 64
WIDTH = HIDDEN // HEADS
BATCH, LENGTH = 2, 5
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    zoo.import_torchvision()  # which transformers imports
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def llama(transformers: Any) -> nn.Module:
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    return model


def ids(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.arange(batch * length).reshape(batch, length) % WORDS


def llama_macs(tokens: int, keys: int) -> int:
    """MACs of a run on `tokens` of each sequence, which attend to `keys`."""
    rows = BATCH * tokens
    projections = rows * HIDDEN * WIDTH * (2 * HEADS + 2 * GROUPS)
    attention = 2 * BATCH * HEADS * tokens * keys * WIDTH
    gated = 3 * rows * HIDDEN * INNER
    return LAYERS * (projections + attention + gated) + BATCH * HIDDEN * WORDS  # logits of the last position


def macs_without_positions(profile: mt.Profile) -> int:
    """MACs without those of rotary embeddings, which some versions of transformers compute by a matrix product."""
    positions = sum(row.macs or 0 for row in profile if row.type == "LlamaRotaryEmbedding")
    return (profile.total.macs or 0) - positions


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_llama_has_the_counts_of_the_closed_forms(llama: nn.Module, device: str) -> None:
    model = (
        llama
        if device == "cpu"
        else zoo.resolve("hf:llama", args={**SIZES, "architectures": ["LlamaForCausalLM"]}, meta=True).model
    )
    with torch.no_grad():
        p = mt.profile(model, {"input_ids": ids().to(device)}, phases=("prefill", "decode"), strict=True)
    assert (p.batch, p.prompt_tokens, p.state) == (BATCH, LENGTH, ("past_key_values",))
    assert p.token_cache_bytes == 2 * LAYERS * GROUPS * WIDTH * 4  # keys and values of each layer
    assert p.cache_bytes == BATCH * LENGTH * p.token_cache_bytes
    assert macs_without_positions(p["prefill"]) == llama_macs(LENGTH, LENGTH)
    assert macs_without_positions(p["decode"]) == llama_macs(1, LENGTH + 1)
    assert all(profile.how == "meta tensors" for _, profile in p)
    measured = [p.first_token_s, p.token_s, p.tokens_per_s, p.roof, p.answer_s(3), p.bound("decode")]
    assert measured == [None] * len(measured)


def test_the_cache_has_the_dtype_of_the_model(transformers: Any) -> None:
    config = transformers.LlamaConfig(**SIZES, dtype=torch.bfloat16)
    model = transformers.LlamaModel._from_config(config).eval()
    p = mt.profile(model, {"input_ids": ids()}, phases=["decode"])
    assert p.token_cache_bytes == 2 * LAYERS * GROUPS * WIDTH * 2
    assert p.prefill is None


def test_decoding_one_token_of_a_mixture_reads_the_experts_of_that_token(transformers: Any) -> None:
    def moved(experts: int) -> int:
        sizes = {**SIZES, "num_local_experts": experts, "num_experts_per_tok": 2}
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).eval()
        with torch.no_grad():
            decode = mt.profile(model, {"input_ids": ids(1)}, phases="decode").decode
        assert decode is not None
        return sum(row.read_bytes or 0 for row in decode if row.type == "MixtralExperts")

    # Of each expert more there is an int32 offset for each of two products, and its place in histogram and sums.
    few, many = moved(4), moved(8)
    assert many - few < LAYERS * 4 * 64
    assert few > LAYERS * 2 * 3 * HIDDEN * INNER * 4  # the matrices of two experts


FAMILIES = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": WORDS},
    "mamba": {"num_hidden_layers": 2, "hidden_size": 16, "state_size": 4, "vocab_size": WORDS},
    "t5": {"num_layers": 2, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_heads": 2, "vocab_size": WORDS},
}
#: Bytes of the cache for one token: keys and values of 2 layers; the states of a recurrent model do not grow.
PER_TOKEN = {"gpt2": 2 * 2 * 16 * 4, "mamba": 0, "t5": 2 * 2 * 2 * 4 * 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_have_their_own_state(family: str, transformers: Any) -> None:
    found = zoo.resolve(f"hf:{family}", args=FAMILIES[family])
    with torch.no_grad():
        p = mt.profile(found.model, found.inputs, phases=("prefill", "decode"))
    assert p.token_cache_bytes == PER_TOKEN[family]
    assert p.cache_bytes > 0
    assert p.state == (("cache_params",) if family == "mamba" else ("past_key_values",))
    assert (p["decode"].total.macs or 0) < (p["prefill"].total.macs or 0) / 10
    if family == "t5":
        assert not p["decode"].by_module().keys() & {"encoder"}  # which ran for the prompt


def test_the_next_token_extends_masks_and_positions(llama: nn.Module) -> None:
    inputs = {
        "input_ids": ids(),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64),
        "position_ids": torch.arange(LENGTH).expand(BATCH, LENGTH),
    }
    with torch.no_grad():
        p = mt.profile(llama, inputs, phases="decode")
    assert p.decode is not None
    shapes = {tensor.shape for tensor in p.decode.total.inputs}
    assert {(BATCH, 1), (BATCH, LENGTH + 1)} <= shapes
    assert "position_ids 2x1:int64" in p.decode.inputs


def test_phases_compute_the_logits_that_generate_computes(llama: nn.Module) -> None:
    passed: list[dict[str, Any]] = []
    handle = llama.register_forward_pre_hook(lambda _, args, kwargs: passed.append(kwargs), with_kwargs=True)
    llama.generate(ids(), max_new_tokens=3, min_new_tokens=3, do_sample=False)  # type: ignore[operator]
    handle.remove()
    assert [kwargs["logits_to_keep"] for kwargs in passed] == [1, 1, 1]  # of the prompt, and of each token
    with torch.no_grad():
        p = mt.profile(llama, {"input_ids": ids()}, phases=("prefill", "decode"))
    assert p.logits_to_keep == 1
    for _, profile in p:
        assert [tensor.shape for tensor in profile.total.outputs] == [(BATCH, 1, WORDS)]
        assert profile["lm_head"].macs == BATCH * HIDDEN * WORDS
    assert "logits are those of the last position, as in generate: logits_to_keep=1" in str(p)


@pytest.mark.parametrize(("kept", "positions"), [(0, LENGTH), (2, 2), (torch.tensor([0, 3]), 2)])
def test_inputs_choose_the_logits_of_phases(llama: nn.Module, kept: Any, positions: int) -> None:
    with torch.no_grad():
        p = mt.profile(llama, {"input_ids": ids(), "logits_to_keep": kept}, phases="prefill")
    assert p["prefill"]["lm_head"].macs == BATCH * positions * HIDDEN * WORDS
    assert p.logits_to_keep == (kept if isinstance(kept, int) and kept else None)
    assert ("logits are those of the last 2 positions" in str(p)) == (p.logits_to_keep == 2)


def test_the_older_name_of_the_kept_logits_is_known() -> None:
    class Older(nn.Module):
        def forward(self, input_ids: Tensor, num_logits_to_keep: int = 0) -> Tensor:
            return input_ids

    assert Prompt.of(Older(), ids()).arguments["num_logits_to_keep"] == 1
    assert Prompt.of(Older(), {"input_ids": ids(), "num_logits_to_keep": 3}).logits_to_keep == 3
    decoder, tokens = zoo.build("tiny-decoder")
    assert Prompt.of(decoder, tokens).logits_to_keep is None


def test_times_are_of_one_prefill_and_one_token(llama: nn.Module, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in llama.state_dict().items()}
    with torch.no_grad():
        p = mt.profile(llama, {"input_ids": ids()}, phases=("prefill", "decode"), measure="time", repeat=3)
        after = mt.profile(llama, {"input_ids": ids()}, phases="decode", measure="time", repeat=3)
    assert all(value.equal(before[name]) for name, value in llama.state_dict().items())
    assert p.first_token_s == pass_seconds(p["prefill"])
    assert p.token_s == pass_seconds(p["decode"])
    assert p.token_s is not None
    assert p.first_token_s is not None
    assert p.tokens_per_s == BATCH / p.token_s
    assert p.answer_s(4) == p.first_token_s + 3 * p.token_s
    assert after.roof is None  # of one phase, no layer shows how fast the machine computes
    roof = p.roof
    assert roof is not None
    assert p.bound("decode") == ("memory" if (flops_per_byte(p["decode"]) or 0) < roof.ridge else "compute")
    assert mt.load(p.to_json(tmp_path / "phases.json")) == p
    text = " ".join(str(p).split())
    assert "time to first token:" in text
    assert re.search(r"time per token: .*, [\d,.]+ tokens per second", text)
    assert "so memory bounds a phase below" in text
    assert "bound by" in p._repr_html_()


def timed(profile: mt.Profile, ridge: float, host_s: float | None = None) -> mt.Profile:
    """The profile as if measured on a machine that moves 1 GB/s and computes `ridge` GFLOP/s; with `host_s` a GPU."""

    def spread(seconds: float) -> Spread:
        return Spread(seconds, seconds, seconds, seconds, seconds, 9, 0)

    field = "time_s" if host_s is None else "device_s"
    rows = []
    for row in profile:
        seconds = max((row.flops or 0) / ridge, (row.read_bytes or 0) + (row.write_bytes or 0)) / 1e9
        rows.append(replace(row, **{field: seconds}))  # type: ignore[arg-type]
    whole = getattr(rows[0], field)
    timing = Timing(spread(whole), 1.0, 0.0, 3)
    if host_s is not None:
        timing = replace(timing, bare=spread(host_s), device=spread(whole))
    return replace(profile, calls=tuple(rows), timing=timing)


def test_memory_bounds_the_phase_with_fewer_flops_for_each_byte(llama: nn.Module) -> None:
    with torch.no_grad():
        counted = mt.profile(llama, {"input_ids": ids(2, 200)}, phases=("prefill", "decode"))
    prefill, decode = (flops_per_byte(profile) or 0.0 for _, profile in counted)
    ridge = (prefill * decode) ** 0.5
    p = replace(counted, prefill=timed(counted["prefill"], ridge), decode=timed(counted["decode"], ridge))
    assert p.roof == pytest.approx(Roof(flops_per_s=ridge * 1e9, bytes_per_s=1e9))
    assert (p.bound("prefill"), p.bound("decode")) == ("compute", "memory")
    gpu = replace(p, decode=timed(counted["decode"], ridge, host_s=1.0))
    assert (gpu.token_s, gpu.bound("decode")) == (1.0, "host")
    assert "host: it takes longer to launch the kernels" in str(gpu)


def test_the_roof_is_of_the_lowest_calls_that_were_measured(llama: nn.Module) -> None:
    with torch.no_grad():
        options: dict[str, Any] = {"measure": "time", "repeat": 3, "depth": 1}
        p = mt.profile(llama, {"input_ids": ids()}, phases=("prefill", "decode"), **options)
    assert p.roof is not None


def test_many_equal_layers_define_the_roof_together(llama: nn.Module) -> None:
    layers = mt.profile(nn.Sequential(*(nn.Linear(16, 16) for _ in range(300))), "4x16")
    with torch.no_grad():
        counted = mt.profile(llama, {"input_ids": ids()}, phases=("prefill", "decode"))
    p = replace(counted, prefill=timed(layers, 8.0), decode=timed(layers, 8.0))
    rates = p.roof
    assert rates is not None
    assert max(row.time_s or 0.0 for row in p["decode"] if row.parent is not None) < 0.01 * (
        p["decode"].total.time_s or 0
    )
    assert rates.flops_per_s / 1e9 <= 8.0 * (1 + 1e-9)


def test_why_there_is_no_roof_is_said(llama: nn.Module) -> None:
    with torch.no_grad():
        counted = mt.profile(llama, {"input_ids": ids()}, phases=("prefill", "decode"))
    assert "measure='time' measures them" in str(counted)
    prefill = timed(counted["prefill"], 8.0)
    slow = replace(prefill, calls=(replace(prefill.total, time_s=1e6), *prefill.calls[1:]))
    p = replace(counted, prefill=slow, decode=timed(counted["decode"], 8.0))
    assert p.roof is None
    text = " ".join(str(p).split())
    assert "the times of the layers are too short, or too noisy, to measure them" in text
    alone = replace(counted, prefill=None, decode=timed(counted["decode"], 8.0))
    assert "measure='time' of both phases measures them" in " ".join(str(alone).split())


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_columns_that_do_not_fit_are_left_out_whole(
    llama: nn.Module, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        counted = mt.profile(llama, {"input_ids": ids()}, phases=("prefill", "decode"))
    p = replace(counted, prefill=timed(counted["prefill"], 8.0), decode=timed(counted["decode"], 8.0))
    monkeypatch.setenv("COLUMNS", str(width))
    lines = str(p).splitlines()
    header = [cell.strip() for cell in next(line for line in lines if "┃" in line).split("┃")]
    assert "…" not in header
    assert {"phase", "tokens", "time", "tokens/s"} <= set(header)
    left_out = next((line.removeprefix("no room for: ") for line in lines if line.startswith("no room for")), "")
    assert len(header) + len(left_out.split(", ") if left_out else []) == 12
    assert max(map(len, lines)) <= width


def test_a_busy_machine_is_noted_for_each_phase(llama: nn.Module, tmp_path: Path) -> None:
    with torch.no_grad():
        counted = mt.profile(llama, {"input_ids": ids()}, phases=("prefill", "decode"))
    decode = timed(counted["decode"], 8.0)
    assert decode.timing is not None
    wide = replace(decode.timing, bare=Spread(1.0, 0.5, 2.0, 0.6, 1.8, 30, 0))
    p = replace(counted, prefill=timed(counted["prefill"], 8.0), decode=replace(decode, timing=wide))
    text = " ".join(str(p).split())
    assert "decode: this machine was too busy for these times" in text
    assert "prefill: this machine" not in text


def test_a_report_has_a_row_for_each_phase(llama: nn.Module) -> None:
    with torch.no_grad():
        p = mt.profile(llama, {"input_ids": ids()}, phases=("prefill", "decode"))
    lines = str(p).splitlines()
    assert lines[0] == "LlamaForCausalLM: 2 prompts of 5 tokens, then one token at a time"
    assert [line.split()[0] for line in lines[3:5]] == ["prefill", "decode"]
    assert "cache (past_key_values): 3.75 KiB after the prompt, 384 B for each further token of a sequence" in lines
    first, second = p.to_csv().splitlines()[1:]
    assert first.startswith(f"prefill,{BATCH},{LENGTH},{p['prefill'].total.macs},")
    assert second.startswith(f"decode,{BATCH},1,{p['decode'].total.macs},")
    assert str(moved_bytes(p["decode"])) in second
    assert "<!doctype html>" in p.to_html()
    assert repr(p) == "<Phases of LlamaForCausalLM: prefill and decode, 2 x 5 tokens>"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"phases": "encode"}, BadQuery, "expected phases of 'prefill', 'decode', got 'encode'"),
        ({"phases": ()}, BadQuery, "expected phases of 'prefill', 'decode', got ()"),
        ({"phases": "decode", "backward": True}, BadQuery, "phases are of generation, which has no backward"),
    ],
)
def test_unknown_phases_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    decoder, tokens = zoo.build("tiny-decoder")
    with pytest.raises(error, match=re.escape(message)):
        mt.profile(decoder, tokens, **options)


def test_a_model_without_a_cache_is_refused(transformers: Any) -> None:
    bert = zoo.resolve("hf:bert", args={"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2})
    message = "BertModel returns no cache for the next token: .* got an output of last_hidden_state, pooler_output"
    with pytest.raises(Unsupported, match=message):
        mt.profile(bert.model, bert.inputs, phases="decode")
    decoder, tokens = zoo.build("tiny-decoder")
    with pytest.raises(
        Unsupported, match="Decoder returns no cache for the next token: .* got an output of logits, hidden_states"
    ):
        mt.profile(decoder, tokens, phases="decode")
    resnet, image = zoo.build("tiny-resnet")
    with pytest.raises(BadInputs, match="phases need token ids of shape .* of ResNet.forward, got x"):
        mt.profile(resnet, image, phases="decode")


class History:
    def __init__(self) -> None:
        self.states: list[Tensor] = []


class Switch:
    """An option, which the model does not return."""

    def __init__(self) -> None:
        self.on = True


class Remembers(nn.Module):
    """Takes an empty cache, and returns it with a state of each token, half of the columns of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 6), nn.Linear(3, 8)

    def forward(
        self, input_ids: Tensor, history: History | None = None, switch: Switch | None = None
    ) -> dict[str, Any]:
        assert switch is None
        state, other = self.mix(self.embed(input_ids)).chunk(2, -1)
        logits = self.head(state + other)
        if history is None:
            return {"logits": logits}
        history.states.append(state)
        return {"logits": logits + sum(one.sum() for one in history.states), "history": history}


@pytest.mark.parametrize("measure", [(), ("time",)])
def test_an_empty_cache_is_passed_to_a_model_that_returns_it(measure: tuple[str, ...]) -> None:
    p = mt.profile(Remembers().eval(), {"input_ids": ids()}, phases=("prefill", "decode"), measure=measure, repeat=3)
    # 3 numbers of 4 bytes for each token; views of one tensor have their own bytes only
    assert (p.state, p.cache_bytes, p.token_cache_bytes) == (("history",), BATCH * LENGTH * 12, 12)
    assert p.decode is not None
    assert p.decode.inputs == "history <History>, input_ids 2x1:int64"


@pytest.mark.parametrize("views", [1, 2])
def test_views_of_one_storage_are_counted_together(views: int) -> None:
    state = torch.zeros(4, 6)
    assert state_bytes({"cache": [*state.chunk(2)[:views], state[:2]]}) == views * 2 * 6 * 4


def test_the_peak_of_decoding_has_one_cache(llama: nn.Module) -> None:
    with torch.no_grad():
        p = mt.profile(llama, {"input_ids": ids(2, 200)}, phases="decode")
    assert p.decode is not None
    assert p.cache_bytes < p.decode.peak_bytes - p.decode.total.param_bytes < 1.6 * p.cache_bytes
