"""Names of modules without those that wrappers add are understood, and suggested."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.engine.selectors import path_aliases, unwrap_model
from microtome.errors import NoMatch


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.layer1 = checkpoint_wrapper(model.layer1)  # type: ignore[arg-type]
    return model


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    # By default it writes to the buffers before each forward, and cannot be cut.
    "DistributedDataParallel": lambda model: nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False),
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "checkpointed": checkpointed,
    "several": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.fixture(params=WRAPPERS)
def wrapped(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    if request.param in ("compiled", "several") and os.environ.get("TORCHDYNAMO_DISABLE"):
        pytest.skip("torch.compile is disabled")
    model, x = zoo.build("tiny-resnet")
    assert isinstance(x, Tensor)
    return WRAPPERS[request.param](model.eval()), x


def test_every_use_takes_the_names_of_the_model(wrapped: tuple[nn.Module, Tensor]) -> None:
    model, x = wrapped
    at = "layer1.0.conv1"
    with torch.no_grad():
        p, cuts, t = mt.profile(model, x), mt.cuts(model, x), mt.trace(model, x)
        assert p[at].macs == 1179648
        assert len(p["layer1.*.conv1"]) == 2
        assert (cuts[at].type, t[at].type) == ("Conv2d", "Conv2d")
        head, tail = mt.split(model, x, at=at)
        assert torch.equal(tail(head(x)), model(x))
        feats = mt.extract(model, x, ["layer1.*", at])
        assert feats[at].shape == feats["layer1.0"].shape == (2, 8, 32, 32)
        with mt.record(model, at) as recorded, mt.edit(model, {at: lambda output: output * 0}):
            model(x)
        assert not recorded[at].stack().any()
        assert list(mt.run_until(model, x, "layer1", save=[at]).saved)


def test_a_wrong_name_is_met_with_the_names_of_the_model(wrapped: tuple[nn.Module, Tensor]) -> None:
    model, x = wrapped
    with pytest.raises(NoMatch, match="Did you mean .*'layer1.0.conv1'"):
        mt.select(model, "layer1.0.conv")
    with pytest.raises(NoMatch, match="Did you mean .*'layer1.0.conv1'"):
        mt.profile(model, x)["layer1.0.conv"]


def test_the_inputs_have_the_names_of_the_model(wrapped: tuple[nn.Module, Tensor]) -> None:
    model, x = wrapped
    assert mt.profile(model, x).inputs == "x 2x3x32x32"


def test_names_that_the_model_has_are_not_changed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.model = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))

    net = Net()
    assert path_aliases(net) == {}
    assert unwrap_model(net) is net
    wrapper = nn.DataParallel(net)
    assert path_aliases(wrapper) == {"model": "module.model", "model.0": "module.model.0"}
    assert mt.select(wrapper, "module") == {"module": net}  # the name that is there, not that of the Linear
    assert unwrap_model(wrapper) is net


def test_peft_and_lightning_models_are_wrappers() -> None:
    peft, lightning = pytest.importorskip("peft"), pytest.importorskip("pytorch_lightning")
    model, x = zoo.build("tiny-resnet")
    config = peft.LoraConfig(target_modules=["fc"])

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.model(x)
            return y

    for wrapper in (Module(), peft.get_peft_model(model, config)):
        assert mt.extract(wrapper, x, "layer1.0")["layer1.0"].shape == (2, 8, 32, 32)
        assert mt.profile(wrapper, x)["layer1.0.conv1"].macs == 1179648
