"""Generation over stages on a CUDA device."""

from __future__ import annotations

import copy

import pytest
import torch

import microtome as mt
from tests.split.language_models import VOCABULARY, build

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens_equal_those_of_the_model(name: str, cache: str) -> None:
    model, at = build(name)
    model = model.to("cuda", torch.bfloat16)
    ids = torch.randint(3, VOCABULARY, (2, 9), device="cuda")
    stages = mt.split(model, ids, at=at)
    options = {"max_new_tokens": 20, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    for num_beams in (1, 3):
        tokens = [one.generate(ids, num_beams=num_beams, **options) for one in (model, stages)]
        assert tokens[0].equal(tokens[1])


@pytest.mark.parametrize("edge", ["cuda", "cpu"])
def test_a_server_on_a_gpu_generates_what_the_model_generates(edge: str) -> None:
    """The server's model is on the GPU; with an edge on the CPU the kernels differ, so only lengths are compared."""
    whole, at = build("llama")
    served, local = copy.deepcopy(whole).to("cuda"), whole.to(edge)
    ids = torch.randint(3, VOCABULARY, (2, 9), device=edge)
    options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 2}
    with (
        mt.serve(served, {"input_ids": ids.to("cuda")}, listen="127.0.0.1:0") as server,
        mt.connect(local, {"input_ids": ids}, server.address, at=at, codec="raw", fallback=None) as remote,
    ):
        tokens = remote.generate(ids, **options)
        assert {record.where for record in remote.requests} == {"cloud"}
    expected = local.generate(ids, **options)
    assert tokens.shape == expected.shape
    assert tokens.device.type == edge
    assert edge == "cpu" or tokens.equal(expected)
