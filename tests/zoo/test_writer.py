"""`zoo:tiny-writer`: a trained language model with a KV cache of its own class."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import microtome as mt
from microtome import zoo
from microtome.errors import BadInputs, BadQuery
from microtome.split.execution.placeholder import Placeholder
from microtome.zoo.writer import CHARACTERS, WEIGHTS, KVCache, Writer
from tests.remote.process import ServerProcess

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("tiny-writer")[0]


@pytest.fixture(scope="module")
def ids(model: Any) -> torch.Tensor:
    return torch.tensor([model.encode("The model "), model.encode("Each stage")])


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.received: list[list[Any]] = []
        self.is_ended = False

    def put(self, tokens: torch.Tensor) -> None:
        self.received.append(tokens.tolist())

    def end(self) -> None:
        self.is_ended = True


def test_it_writes_words_of_the_documentation(model: Any, ids: torch.Tensor) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    known = set(re.findall("[a-z]+", " ".join(page.read_text().lower() for page in pages)))
    for row in model.generate(ids, 80).tolist():
        words = re.findall("[a-z]+", model.decode(row[ids.shape[1] :]).lower())[1:-1]  # others may be cut
        assert len(words) >= 8
        assert sum(word in known for word in words) >= 0.9 * len(words), words


def test_the_file_of_weights_is_small_and_complete() -> None:
    assert WEIGHTS.stat().st_size < 250_000
    names = {name for name, _ in Writer().named_parameters()}
    assert names == set(zoo.build("tiny-writer")[0].state_dict()) - {"lm_head.weight"}  # which is that of the tokens


def test_text_is_encoded_by_characters(model: Any) -> None:
    assert model.decode(model.encode(CHARACTERS)) == CHARACTERS
    assert model.encode("\n !") == [0, 1, 2]
    with pytest.raises(BadInputs, match="expected characters of ASCII, got 'è', 'é'"):
        model.encode("cafés, crème")


@torch.no_grad()
def test_the_cache_gives_the_logits_of_one_pass(model: Any, ids: torch.Tensor) -> None:
    cache, whole = KVCache(), model(ids)["logits"]
    for begin, end in ((0, 4), (4, 5), (5, 10)):
        output = model(ids[:, begin:end], cache)
        assert output["cache"] is cache
        torch.testing.assert_close(output["logits"], whole[:, begin:end])
    assert cache.length == 10
    assert [tuple(keys.shape) for keys in cache.keys] == [(2, 4, 10, 12)] * 4  # batch, heads, tokens, width of a head


def test_sampling_depends_on_the_seed_and_keeps_to_the_most_probable(model: Any, ids: torch.Tensor) -> None:
    def sample(seed: int, **options: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        tokens: torch.Tensor = model.generate(ids, 20, do_sample=True, **options)
        return tokens

    assert sample(0).equal(sample(0))
    assert not sample(0).equal(sample(1))
    assert sample(0, top_k=1).equal(model.generate(ids, 20))
    assert sample(0, temperature=1e-4).equal(model.generate(ids, 20))


@pytest.mark.parametrize("option", [{"temperature": 0.7}, {"top_k": 5}])
def test_options_of_draws_are_refused_without_draws(model: Any, ids: torch.Tensor, option: dict[str, Any]) -> None:
    with pytest.raises(BadQuery, match="expected do_sample=True with temperature= or top_k="):
        model.generate(ids, 3, **option)


def test_a_streamer_gets_the_prompt_and_each_token(model: Any, ids: torch.Tensor) -> None:
    streamer = Recorder()
    tokens = model.generate(ids, 3, streamer=streamer)
    assert streamer.received == [ids.tolist(), *tokens[:, 10:].T.tolist()]
    assert streamer.is_ended


@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("at", ["layers.1", "layers.2.attn.qkv"])
def test_stages_generate_the_same(model: Any, ids: torch.Tensor, at: str, has_cache: bool) -> None:
    example = {"input_ids": ids, **({"cache": KVCache()} if has_cache else {})}
    stages = mt.split(model, example, at=at)
    assert stages.verified == "bit-equal"
    assert stages.generate(ids, max_new_tokens=30).equal(model.generate(ids, max_new_tokens=30))


@torch.no_grad()
def test_each_stage_has_its_part_of_the_cache(model: Any, ids: torch.Tensor) -> None:
    with mt.split(model, {"input_ids": ids, "cache": KVCache()}, at="layers.1").session() as session:
        cache = session(input_ids=ids, cache=KVCache())["cache"]
    assert [isinstance(keys, Placeholder) for keys in cache.keys] == [False, False, True, True]


@pytest.mark.integration
def test_a_server_generates_the_same(model: Any, ids: torch.Tensor) -> None:
    with (
        ServerProcess("zoo:tiny-writer") as server,
        mt.connect(model, {"input_ids": ids}, server.address, at="layers.1", fallback=None) as remote,
    ):
        assert remote.generate(ids, max_new_tokens=30).equal(model.generate(ids, max_new_tokens=30))
        assert {record.where for record in remote.requests} == {"cloud"}


def test_phases_are_profiled(model: Any, ids: torch.Tensor) -> None:
    phases = mt.profile(model, {"input_ids": ids, "cache": KVCache()}, phases=("prefill", "decode"))
    # Keys and values of 4 layers, each of 48 numbers of 4 bytes.
    assert phases.token_cache_bytes == 2 * 4 * 48 * 4


def test_it_is_built_on_the_meta_device_without_values() -> None:
    resolved = zoo.resolve("zoo:tiny-writer", meta=True)
    assert all(parameter.is_meta for parameter in resolved.model.parameters())
