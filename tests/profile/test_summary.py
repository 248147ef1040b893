"""A profile without inputs: an example of a known package, or a summary that needs no run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import BadInputs, NoMatch, NotAModule
from microtome.example_inputs import example_inputs
from microtome.results.summary import ModelSummary
from microtome.zoo.packages import import_torchvision


class Net(nn.Module):
    """Has tied weights, a module under two names, a buffer, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.alias = self.body[0]
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.tokens.weight
        self.body[1].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("it does not run")


@pytest.fixture
def summary() -> ModelSummary:
    found = mt.profile(Net())
    assert isinstance(found, ModelSummary)
    return found


def test_a_model_without_inputs_is_summarized(summary: ModelSummary) -> None:
    model = Net()
    assert summary.total.params == sum(one.numel() for one in model.parameters())  # each once
    assert summary.total.trainable_params == sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert summary.total.buffer_bytes == sum(one.numel() * one.element_size() for one in model.buffers())
    assert [row.path for row in summary] == [path for path, _ in model.named_modules()]
    assert (summary["head"].params, summary["head"].shared_params) == (0, 40)
    assert summary.total.shared_params == 0
    assert summary["body"].params == 4 * 4 + 4 + 4 + 4


def test_the_rows_of_a_summary_add_up(summary: ModelSummary) -> None:
    top = [row for row in summary if row.depth == 1]
    for name in ("params", "trainable_params", "param_bytes", "buffer_bytes"):
        assert sum(getattr(row, name) for row in top) == getattr(summary.total, name)


def test_a_summary_says_what_inputs_would_add(summary: ModelSummary, capsys: pytest.CaptureFixture[str]) -> None:
    summary.show(sort="params", top=2, columns=["params"])
    shown = capsys.readouterr().out
    assert "pass inputs, such as mt.profile(model, (1, 3, 224, 224)), for MACs" in shown.replace("\n", " ")
    assert "2 of 6 modules shown" in shown
    assert "parameters in brackets are counted elsewhere" in str(summary)


def test_a_summary_is_saved_and_loaded(summary: ModelSummary, tmp_path: Path) -> None:
    assert mt.load(summary.to_json(tmp_path / "s.json")) == summary
    assert summary.to_csv().splitlines()[1].startswith(",Net,0,")
    assert "`tokens`" in summary.to_markdown()
    assert "tokens" in summary._repr_html_()
    assert repr(summary) == "<ModelSummary of Net, 6 modules, 68 params>"
    assert repr(summary["head"]) == "<head: Linear, 0 params, 0 B>"
    with pytest.raises(NoMatch, match="no module at path 'boby'. Did you mean 'body'"):
        summary["boby"]


@pytest.mark.parametrize("options", [{"measure": ["time"]}, {"backward": True}, {"strict": True}])
def test_what_needs_a_run_needs_inputs(options: dict[str, Any]) -> None:
    with pytest.raises(BadInputs, match="no example inputs are known for a Net: pass inputs, such as"):
        mt.profile(Net(), **options)


def test_what_is_not_a_model_is_refused() -> None:
    with pytest.raises(NotAModule, match="expected a torch.nn.Module, got"):
        mt.profile("resnet50")  # type: ignore[call-overload]


def test_models_of_known_packages_bring_their_inputs() -> None:
    torchvision = import_torchvision()
    timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")
    state = torch.get_rng_state()
    models = {
        torchvision.models.resnet18: "x 1x3x224x224",
        torchvision.models.inception_v3: "x 1x3x299x299",
        lambda **_: timm.create_model("vit_tiny_patch16_384").bfloat16(): "x 1x3x384x384:bfloat16",
        lambda **_: transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_positions=16)): "input_ids 1x16:int64",
    }
    for build, inputs in models.items():
        with torch.device("meta"):
            model = build(**({"init_weights": False} if build is torchvision.models.inception_v3 else {}))
        found = mt.profile(model.eval())
        assert isinstance(found, mt.Profile)
        assert found.inputs == inputs
    torch.set_rng_state(state)


def test_example_inputs_leave_the_random_state_as_it_was() -> None:
    model = import_torchvision().models.squeezenet1_1()
    state = torch.get_rng_state()
    first, second = example_inputs(model), example_inputs(model)
    assert first is not None
    assert second is not None
    assert torch.equal(first.args[0], second.args[0])
    assert torch.equal(torch.get_rng_state(), state)
