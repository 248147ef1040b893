"""Models in training mode: refused before they run, or the same on both sides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import BadWeights, RemoteError, Unsupported
from microtome.remote.sweep import sweep
from tests.remote.small import small

pytestmark = pytest.mark.integration

Example = tuple[nn.Module, Tensor]


@pytest.fixture
def dropout() -> Example:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)).eval(), torch.ones(1, 4)


@pytest.fixture
def resnet() -> Example:
    return small()


@pytest.mark.parametrize("at", ["layer1", "(input)", "auto"])
def test_connect_refuses_a_model_that_would_change_its_buffers(resnet: Example, at: str) -> None:
    model, x = resnet
    training = copy.deepcopy(model).train()
    before = copy.deepcopy(training.state_dict())
    with mt.serve(model, x, listen="127.0.0.1:0") as server:
        with pytest.raises(Unsupported, match=r"carries the buffer 'stem.1.running_mean'.*Put the model in eval mode"):
            mt.connect(training, x, server.address, at=at)
        with pytest.raises(Unsupported, match="Put the model in eval mode"):
            sweep(training, x, server.address)
    with pytest.raises(Unsupported, match="Put the model in eval mode, train it with optimizer="):
        mt.serve(training, x, listen="127.0.0.1:0")
    assert all(value.equal(before[name]) for name, value in training.state_dict().items())


def test_connect_refuses_stages_of_a_model_that_would_change_its_buffers(resnet: Example) -> None:
    model, x = resnet
    with mt.serve(model, x, listen="127.0.0.1:0") as server:
        head, _ = mt.split(copy.deepcopy(model).train(), x, at="layer1")
        with pytest.raises(Unsupported, match="Put the model in eval mode"):
            mt.connect(head, x, server.address)


@pytest.mark.parametrize("at", ["0", "2", "(input)"])
@pytest.mark.parametrize("trains", ["client", "server"])
def test_dropout_on_one_side_alone_is_another_model(dropout: Example, at: str, trains: str) -> None:
    model, x = dropout
    sides = {"client": model, "server": model, trains: copy.deepcopy(model).train()}
    refused = pytest.raises(RemoteError, match="The weights are equal: .* in the same mode, eval or training")
    with mt.serve(sides["server"], x, listen="127.0.0.1:0") as server, refused:
        mt.connect(sides["client"], x, server.address, at=at)


def test_stages_that_drop_out_are_not_loaded_into_a_model_in_eval_mode(dropout: Example, tmp_path: Any) -> None:
    model, x = dropout
    mt.split(model.train(), x, at="0").save(tmp_path)
    with pytest.raises(BadWeights, match="It is loaded in eval mode"):
        mt.load_stage(lambda: model, tmp_path, 1)


@pytest.mark.parametrize("at", ["layer1", "(input)"])
@pytest.mark.parametrize(("path", "name"), [("", "the model"), ("layer2", "'layer2'")])
def test_a_module_put_in_training_mode_between_requests_is_refused(
    resnet: Example, at: str, path: str, name: str
) -> None:
    model, x = resnet
    here = copy.deepcopy(model)
    before = copy.deepcopy(here.state_dict())
    expected = f"expected {name} in eval mode, as when it was split, got training mode: call eval"
    with mt.serve(model, x, listen="127.0.0.1:0") as server, mt.connect(here, x, server.address, at=at) as remote:
        output = remote(x)
        here.get_submodule(path).train()
        for call in (remote, lambda value: list(remote.stream([value]))):
            with pytest.raises(Unsupported, match=expected):
                call(x)
        here.eval()
        assert remote(x).equal(output)
    assert all(value.equal(before[name]) for name, value in here.state_dict().items())


@pytest.mark.parametrize("connect_at", ["layer1", "(input)"])
def test_a_served_module_put_in_training_mode_does_not_run(resnet: Example, connect_at: str) -> None:
    model, x = resnet
    served = copy.deepcopy(model)
    with (
        mt.serve(served, x, listen="127.0.0.1:0") as server,
        mt.connect(model, x, server.address, at=connect_at, fallback=None) as remote,
    ):
        served.get_submodule("layer2").train()
        before = copy.deepcopy(served.state_dict())
        with pytest.raises(RemoteError, match="in eval mode, as when it was split, got training mode"):
            remote(x)
    assert all(value.equal(before[name]) for name, value in served.state_dict().items())


@pytest.mark.parametrize("run", [lambda stages, x: stages(x), lambda stages, x: stages[0](x)], ids=["all", "head"])
def test_a_stage_does_not_run_with_a_module_in_another_mode(resnet: Example, run: Callable[[Any, Tensor], Any]) -> None:
    model, x = resnet
    stages = mt.split(model, x, at="layer1")
    model.get_submodule("layer1.0").train()
    with pytest.raises(Unsupported, match=r"expected 'layer1.0' in eval mode, as when it was split"):
        run(stages, x)
