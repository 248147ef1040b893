"""Generation over stages on a CUDA device."""

from __future__ import annotations

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
