"""Facts of boundaries, derived from the shapes of the model's inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import microtome as mt
from microtome.errors import Unsupported
from microtome.split.graph.derived_facts import derive_facts, named_inputs
from tests.split.language_models import build as build_language_model

pytestmark = [
    pytest.mark.integration,
    # of the exporters and of what they import
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

IDS = torch.arange(3, 15).reshape(2, 6)


def check_facts(model: nn.Module, cut: Any, inputs: mt.Inputs) -> None:
    """Check that derived facts are those of a run."""
    with torch.no_grad():
        head, tail = mt.split(model, inputs, at=cut)
        boundary = head(*inputs.args, **inputs.kwargs)
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in named_inputs(model, inputs).items())
        found = derive_facts(tail, shapes)
        assert found.record == boundary.record
        output = tail(found.complete(mt.Boundary(boundary.at, boundary.fingerprint, boundary.tensors, {})))
        assert output["logits"].equal(inputs.run(model)["logits"])


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_facts_of_decoders_are_those_of_a_run(name: str) -> None:
    model, cut = build_language_model(name)  # whose masks are made on fake tensors alone, and not for these inputs
    check_facts(model, cut, mt.Inputs(IDS, use_cache=False))


def test_facts_with_a_mask_of_padding_are_those_of_a_run() -> None:
    model, cut = build_language_model("llama")
    mask = torch.ones_like(IDS)
    mask[0, 4:] = 0
    check_facts(model, cut, mt.Inputs(IDS, attention_mask=mask, use_cache=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_tail_of_a_model_goes_on_after_an_exported_head(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs microtome[onnx]")
    model, cut = build_language_model(name)
    with torch.no_grad():
        head, tail = mt.split(model, mt.Inputs(IDS, use_cache=False), at=cut)
        exported = head.export(tmp_path / "head.onnx")
        for ids in (IDS, IDS[:, :4].repeat(2, 1)):
            output, expected = tail(exported(ids))["logits"], model(ids, use_cache=False)["logits"]
            assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_model_that_reads_values_has_no_derived_facts(dtype: torch.dtype) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            y = x.float() if x.sum() > 0 else x.float() + 1
            return self.second(self.first(y.tile(1 if x.sum() > 0 else 2, 1)))

    _, tail = mt.split(Reading().eval(), torch.ones(2, 4, dtype=dtype), at="first")
    with pytest.raises(Unsupported, match=r"cannot derive the facts of the boundary for x of shape \(2, 4\)"):
        derive_facts(tail, (("x", (2, 4)),))
