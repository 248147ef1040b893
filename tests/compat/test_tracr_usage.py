"""tracr's documented usage, line by line, with the import changed and nothing else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from microtome import zoo
from microtome.compat.tracr import (
    EarlyOutput,
    HookExitException,
    WrappedModel,
    create_forward_posthook,
    create_forward_prehook,
)
from microtome.errors import BadBoundary, BadInputs, BadQuery, BadWeights, Unsupported

CONFIG: dict[str, Any] = {
    "default": {"device": "cpu", "save_layer_images": False, "collect_metrics": True},
    "logging": {"log_level": "INFO", "log_file": "logs/app.log"},
    "model": {
        "model_name": "squeezenet1_1",
        "version": None,
        "pretrained": False,
        "weight_path": None,
        "input_size": [3, 64, 64],
        "num_classes": 10,
        "split_layer": 5,
        "save_layers": [2, 4, 6],
        "mode": "eval",
        "depth": 2,
        "flush_buffer_size": 100,
        "warmup_iterations": 1,
        "log_file": "logs/model.log",
    },
    "dataset": {"name": "imagenet", "root": "data/imagenet"},
    "dataloader": {"batch_size": 1},
    "compression": {"clevel": 3, "filter": "SHUFFLE", "codec": "ZSTD"},
}


def changed(**model: Any) -> dict[str, Any]:
    return CONFIG | {"model": CONFIG["model"] | model}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def squeezenet() -> WrappedModel:
    return WrappedModel(CONFIG)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


class MasterDict:
    """Of a dict it has only what tracr calls; empty, it is false."""

    def __init__(self) -> None:
        self.inner: dict[str, Any] = {}

    def update(self, new_info: dict[str, Any]) -> None:
        self.inner.update(new_info)

    def __len__(self) -> int:
        return len(self.inner)


# -- the usage examples of its manual ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dict, MasterDict])
def test_basic_analysis(x: Tensor, make: type) -> None:
    master_dict = make()
    model = WrappedModel(CONFIG, master_dict)
    output = model.forward(x, log=True)
    metrics = model.get_layer_metrics()
    assert output.equal(model.model(x))
    assert list(metrics) == list(range(model.layer_count))
    assert len(master_dict) == 0  # no inference_id
    model(x, inference_id="image")
    model.update_master_dict()
    held = master_dict.inner if isinstance(master_dict, MasterDict) else master_dict
    assert held["image"]["layer_information"] == model.get_layer_metrics()
    assert all(layer["inference_time"] > 0 for layer in held["image"]["layer_information"].values())


def test_the_second_positional_argument(x: Tensor) -> None:
    model, example = zoo.build("tiny-resnet")
    named = {"x": example}
    assert WrappedModel(model, named, warmup_iterations=0).inputs.kwargs.keys() == {"x"}
    assert WrappedModel(CONFIG, x, warmup_iterations=0).inputs.args[0].equal(x)
    assert WrappedModel(CONFIG, inputs={"x": x}, warmup_iterations=0).master_dict is None
    assert WrappedModel(CONFIG, None, warmup_iterations=0).master_dict is None
    with pytest.raises(TypeError, match="takes 1 or 2 positional arguments, got 3"):
        WrappedModel(model, example, {})
    with pytest.raises(TypeError, match="two values for 'inputs'"):
        WrappedModel(model, example, inputs=example)
    with pytest.raises(TypeError, match="two values for 'master_dict'"):
        WrappedModel(CONFIG, {}, master_dict={"run": {}})


def test_split_computing(x: Tensor, squeezenet: Any) -> None:
    cloud_model = WrappedModel(CONFIG)
    edge_output = squeezenet.forward(x, end=10)
    final_output = cloud_model.forward(edge_output, start=10)
    assert final_output.equal(squeezenet.model(x))


def test_analyzing_specific_layers(x: Tensor) -> None:
    model: Any = WrappedModel(CONFIG)
    model.save_layers = {5, 10, 15}
    output = model.forward(x)
    assert output.equal(model.model(x))
    features = model.model.features
    assert model.banked_output[5].equal(features[:6](x))
    assert model.banked_output[10].equal(features[:11](x))
    assert model.banked_output.keys() == {5, 10, 15}


def test_a_sweep_over_the_split_layers(x: Tensor, squeezenet: Any) -> None:
    whole = squeezenet.model(x)
    for split_layer in range(1, squeezenet.layer_count):
        with torch.no_grad():
            output = squeezenet(x, end=split_layer)
            # What its server does with what arrived.
            for key, value in output.inner_dict.items():
                output.inner_dict[key] = value.to(squeezenet.device, non_blocking=True)
            assert squeezenet(output, start=split_layer).equal(whole)


def energy_up_to(model: WrappedModel, split: int) -> dict[str, float]:
    """How tracr adds up the energy of the layers up to a split: it compares with 0 and adds without looking."""
    found = {"processing_energy": 0.0, "power_reading": 0.0, "memory_utilization": 0.0, "communication_energy": 0.0}
    metrics = model.get_layer_metrics()
    for layer in range(split + 1):
        if layer in metrics and metrics[layer].get("power_reading", 0) > 0:
            record = metrics[layer]
            found["power_reading"] = max(found["power_reading"], record.get("power_reading", 0))
            found["processing_energy"] += record.get("processing_energy", 0)
            if record.get("memory_utilization", 0) > 0:
                found["memory_utilization"] = max(found["memory_utilization"], record.get("memory_utilization", 0))
    for layer in sorted(model.forward_info):
        record = model.forward_info[layer]
        found["communication_energy"] += record.get("processing_energy", 0.0) + record.get("communication_energy", 0.0)
        assert record.get("layer_type", "Unknown") != "Unknown"
        assert "memory_utilization" not in record
    return found


def test_its_own_aggregation_meets_no_none(x: Tensor, squeezenet: Any) -> None:
    squeezenet(x, end=5)
    assert set(energy_up_to(squeezenet, 5).values()) == {0.0}


def test_records_are_dicts_that_can_be_copied_and_pickled(x: Tensor, squeezenet: Any) -> None:
    squeezenet(x)
    record = squeezenet.get_layer_metrics()[0]
    for other in (copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
        assert other == record
        assert other["power_reading"] is None
        assert other.get("power_reading", 0) == 0
    with pytest.raises(KeyError, match="power"):
        record["power"]


# -- the other names of its models -------------------------------------------------------------------------------------


def test_records_are_in_forward_info_and_in_the_collector(x: Tensor, squeezenet: Any) -> None:
    squeezenet(x, end=3)
    assert list(squeezenet.forward_info) == list(range(squeezenet.layer_count))
    assert squeezenet.forward_info[3]["layer_type"] == "Fire"
    assert squeezenet.forward_info[3]["output_bytes"] == squeezenet.model.features[:4](x).nbytes
    assert squeezenet.forward_info[4]["output_bytes"] is None
    collector = squeezenet.metrics_collector
    assert collector is not None
    collector.set_split_point(3)
    assert collector.current_split_point == 3
    assert collector.get_all_layer_metrics() == collector.layer_metrics == squeezenet.get_layer_metrics()
    assert collector.energy_monitor is squeezenet.energy_monitor is None
    squeezenet.forward_info[3]["host_battery_energy_mwh"] = 1.5  # as its experiments do
    assert squeezenet.get_layer_metrics()[3]["host_battery_energy_mwh"] == 1.5


def test_weights_go_in_and_out_under_the_names_of_the_model(x: Tensor) -> None:
    first: Any = WrappedModel(CONFIG)
    second: Any = WrappedModel(CONFIG)
    with torch.no_grad():
        second.model.classifier[1].weight.add_(0.01)
    state = copy.deepcopy(second.get_state_dict())
    assert "features.0.weight" in state
    old = first(x, end=3)
    first.load_state_dict(state)
    assert first(x).equal(second(x))
    assert first(second(x, end=3), start=3).equal(second(x))  # the cuts are of the new weights
    with pytest.raises(BadBoundary, match="the boundary is of another model"):
        first(old, start=3)
    with torch.no_grad():
        second.model.classifier[1].weight.add_(0.01)
    first.load_state_dict(second.state_dict())  # under the names of the wrapper
    assert first(x).equal(second(x))
    with pytest.raises(RuntimeError, match='Missing key.* "features.0.weight"'):
        first.load_state_dict({"features.0.bias": state["features.0.bias"]})
    first.load_state_dict({"features.0.bias": state["features.0.bias"]}, strict=False)


def test_a_model_that_holds_a_model_keeps_its_names() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    wrapped: Any = WrappedModel(Holder(), "1x2")
    other: Any = WrappedModel(Holder(), "1x2")
    for state in (other.get_state_dict(), other.state_dict()):
        wrapped.load_state_dict(state)
        assert wrapped.model.model.weight.equal(other.model.model.weight)
        nn.init.zeros_(wrapped.model.model.weight)


def test_cleanup_drops_outputs_and_cuts_and_the_model_still_runs(x: Tensor) -> None:
    wrapped = WrappedModel(CONFIG)
    whole = wrapped(x)
    early = wrapped(x, end=3)
    wrapped.cleanup()
    assert wrapped.banked_output == {}
    assert wrapped(early, start=3).equal(whole)


def test_modes_device_and_input_size(squeezenet: Any) -> None:
    assert squeezenet.get_mode() == "eval"
    assert squeezenet.device == "cpu"
    assert squeezenet.input_size == (3, 64, 64)
    squeezenet.set_mode("train")
    assert squeezenet.model.training
    assert squeezenet.get_mode() == "train"
    squeezenet.set_mode("eval")
    with pytest.raises(BadQuery, match="'eval' or 'train', got 'test'"):
        squeezenet.set_mode("test")


def test_the_functions_that_create_hooks_raise(squeezenet: Any) -> None:
    for make in (create_forward_prehook, create_forward_posthook):
        with pytest.raises(Unsupported, match="without hooks. Instead, register a .*of your own"):
            make(squeezenet, 0, "Conv2d", (0, 0), "cpu")


# -- early outputs -----------------------------------------------------------------------------------------------------


def test_early_outputs_return_the_dict_they_were_created_with() -> None:
    data = {"layer0": torch.ones(1, 1)}
    assert EarlyOutput(data)() is data
    assert EarlyOutput(data)("anything", at=3) is data
    assert EarlyOutput()() is None
    early = EarlyOutput()
    early.inner_dict = data
    assert early() is data
    assert HookExitException(data).result is data


def test_early_outputs_are_equal_if_what_they_hold_is() -> None:
    first, second = torch.arange(6.0), torch.arange(6.0)
    assert EarlyOutput({3: first, 4: [second, None]}) == EarlyOutput({3: second, 4: [first, None]})
    assert EarlyOutput(first) == EarlyOutput(second)
    assert EarlyOutput() == EarlyOutput(None)
    for other in ({3: second + 1}, {4: second}, {3: second.view(2, 3)}, {3: second.double()}, {3: [second]}, second):
        assert EarlyOutput({3: first}) != EarlyOutput(other)
    assert EarlyOutput({3: first}) != {3: first}


@pytest.mark.parametrize("layer", [3, 4, 6])  # a Fire, one whose output is saved too, and the last saved one
def test_tensors_are_pickled_once_and_a_cloud_resumes_from_them(x: Tensor, squeezenet: Any, layer: int) -> None:
    early = squeezenet(x, end=layer)
    data = pickle.dumps((early, (64, 64)))
    held = {tensor.data_ptr(): tensor.nbytes for tensor in (*early().values(), *early.boundary.tensors.values())}
    assert sum(held.values()) <= len(data) < sum(held.values()) + 8192
    arrived, size = pickle.loads(data)
    assert size == (64, 64)
    assert arrived == early
    assert arrived().keys() == {*(at for at in (2, 4, 6) if at < layer), layer}
    assert squeezenet(arrived, start=layer).equal(squeezenet.model(x))


def test_a_saved_output_that_crosses_is_pickled_once() -> None:
    model, example = zoo.build("tiny-resnet")
    wrapped = WrappedModel(model, example, depth=3, save_layers=[2])
    early = wrapped(example, end=4)  # inside a residual block: the stem's output crosses too, and is saved
    assert len(early.boundary.tensors) == 2
    assert len(pickle.dumps(early)) < early.boundary.nbytes + early()[2].nbytes + 8192
    assert wrapped(pickle.loads(pickle.dumps(early)), start=4).equal(model(example))


def test_a_cloud_takes_banked_outputs_that_were_changed(x: Tensor, squeezenet: Any) -> None:
    early = squeezenet(x, end=4)
    rest = nn.Sequential(*squeezenet.model.features[5:], squeezenet.model.classifier, nn.Flatten())
    early.inner_dict[4] = early.inner_dict[4].half().float()
    with torch.no_grad():
        assert squeezenet(early, start=4).equal(rest(early.inner_dict[4]))
        early.inner_dict[4].mul_(2)
        assert squeezenet(early, start=4).equal(rest(early.inner_dict[4]))


# -- configurations ----------------------------------------------------------------------------------------------------


def test_weights_of_a_pt_file(x: Tensor, tmp_path: Path) -> None:
    torch.manual_seed(3)
    trained: Any = zoo.resolve("torchvision:squeezenet1_1", args={"num_classes": 10}, inputs="1x3x64x64").model
    nn.init.normal_(trained.classifier[1].weight)
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    for pretrained in (True, False):
        wrapped = WrappedModel(changed(pretrained=pretrained, weight_path=str(tmp_path / "weights.pt")))
        assert wrapped(x).equal(trained(x))
    torch.save(trained, tmp_path / "whole.pt")
    with pytest.raises(BadWeights, match=r"cannot be read with weights_only=True .*torch.save\(model.state_dict"):
        WrappedModel(changed(weight_path=str(tmp_path / "whole.pt")))


def test_pretrained_without_weights_raises() -> None:
    message = r"set a `weight_path`, .* or pass the model: WrappedModel\(torchvision.models.get_model\('squeezenet1_1'"
    with pytest.raises(BadQuery, match=message):
        WrappedModel(changed(pretrained=True))


def test_an_unavailable_device_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(Unsupported, match=f"has `device: {device}`, and torch finds no such device: use `cpu`"):
            WrappedModel(CONFIG | {"default": {"device": device}})
    with pytest.raises(BadQuery, match="expected a device such as 'cpu' or 'cuda:0', got `device: gpu`"):
        WrappedModel(CONFIG | {"default": {"device": "gpu"}})


def test_the_template_may_leave_out_what_it_calls_optional() -> None:
    wrapped = WrappedModel({"model": {"model_name": "squeezenet1_1", "input_size": [3, 64, 64], "save_layers": None}})
    assert wrapped.save_layers == ()
    assert wrapped.depth == 2


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(64, 64), (90, 50)])
def test_an_image_of_pil_is_an_input(squeezenet: Any, size: tuple[int, int]) -> None:
    image_type = pytest.importorskip("PIL.Image")
    to_tensor = zoo.import_torchvision().transforms.ToTensor()
    pixels = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8)
    image = image_type.frombytes("RGB", size, bytes(pixels.flatten().tolist()))
    batch = to_tensor(image.resize((64, 64)))[None]
    assert squeezenet.parse_input(image).equal(batch)
    assert squeezenet(image).equal(squeezenet.model(batch))
    assert squeezenet(squeezenet(image, end=4), start=4).equal(squeezenet.model(batch))
    wide = WrappedModel(changed(input_size=[3, 64, 96]), warmup_iterations=0)
    assert wide.parse_input(image).equal(to_tensor(image.resize((96, 64)))[None])  # PIL says width and height
    with pytest.raises(
        BadInputs, match=r"expected an image of 3 channels of 8 bits, got mode 'L': image.convert\('RGB'"
    ):
        squeezenet(image.convert("L"))
    with pytest.raises(BadInputs, match=r"an image is channels x height x width, and the model's input is \(2,\)"):
        WrappedModel(nn.Linear(2, 2), "1x2").parse_input(image)


def test_arrays_and_tensors_are_parsed(squeezenet: Any, x: Tensor) -> None:
    assert squeezenet.parse_input(x) is x
    assert squeezenet.parse_input(x.numpy()).equal(x)
    with pytest.raises(BadInputs, match="expected an image, an array or a tensor, got a str"):
        squeezenet.parse_input("photo.png")
