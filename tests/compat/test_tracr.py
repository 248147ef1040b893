"""Edge and cloud are the model, at every layer; the rest of tracr's names mean what they meant."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import microtome as mt
from microtome import zoo
from microtome.compat.tracr import EarlyOutput, HookExitException, WrappedModel
from microtome.errors import BadBoundary, BadFile, BadInputs, BadQuery, NoMatch, NotAModule, Unsupported
from tests.marks import slow

LEAVES = 99


def same(one: Any, other: Any) -> bool:
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
    return bool(pairs) and all(a.equal(b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def check_every_layer(model: nn.Module, inputs: Any, *, depth: int, step: int = 1) -> None:
    """Edge and cloud at every layer, at batch 1 and 2, as objects and as bytes."""
    wrapped = WrappedModel(model, inputs, depth=depth, warmup_iterations=0)
    batches = [tree_map(lambda tensor, size=size: tensor[:size].clone(), inputs) for size in (1, 2)]
    with torch.no_grad():
        wholes = [mt.Inputs.of(batch).run(model) for batch in batches]
    last = wrapped.layer_count - 1
    assert last > 0
    for layer in sorted({*range(0, last, step), last}):
        for batch, whole in zip(batches, wholes, strict=True):
            early = wrapped(batch, end=layer)
            assert list(early()) == [layer]
            assert same(wrapped(early, start=layer), whole), (layer, wrapped.layers[layer])
        arrived = EarlyOutput.from_bytes(early.to_bytes())
        assert same(wrapped(arrived, start=layer), whole), (layer, wrapped.layers[layer])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The nets are so small that threads wait for each other more than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def resnet() -> tuple[nn.Module, Tensor]:
    model, x = zoo.build("tiny-resnet")
    assert isinstance(x, Tensor)
    return model, x


@pytest.fixture
def wrapped(resnet: tuple[nn.Module, Tensor]) -> WrappedModel:
    return WrappedModel(*resnet, warmup_iterations=0)


# -- edge and cloud are the model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, *slow(LEAVES)])
@pytest.mark.parametrize("name", zoo.names())
def test_built_in_models_are_exact_at_every_layer(name: str, depth: int) -> None:
    check_every_layer(*zoo.build(name), depth=depth)


@pytest.mark.parametrize("name", ["resnet18", *slow("mobilenet_v3_small", "googlenet", "densenet121")])
def test_models_of_torchvision_are_exact_at_every_layer(name: str) -> None:
    found = zoo.resolve(f"torchvision:{name}", inputs="2x3x32x32", args={"num_classes": 10})
    check_every_layer(found.model, found.inputs.args[0], depth=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "depth", "step"),
    [("resnet18", LEAVES, 1), ("mobilenet_v3_small", LEAVES, 7), ("googlenet", LEAVES, 7), ("densenet121", 3, 5)],
)
def test_models_of_torchvision_are_exact_inside_their_blocks(name: str, depth: int, step: int) -> None:
    found = zoo.resolve(f"torchvision:{name}", inputs="2x3x32x32", args={"num_classes": 10})
    check_every_layer(found.model, found.inputs.args[0], depth=depth, step=step)


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "googlenet", "densenet121", "vgg11", "swin_t", "vit_b_32"])
def test_models_of_torchvision_are_exact_after_every_leaf(name: str) -> None:
    found = zoo.resolve(f"torchvision:{name}", args={"num_classes": 10})
    x = found.inputs.args[0]
    check_every_layer(found.model, torch.cat([x, x.flip(-1)]), depth=LEAVES)


def vit() -> nn.Module:
    models = zoo.import_torchvision().models
    return models.VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=4)


def swin() -> nn.Module:
    models = zoo.import_torchvision().models
    return models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], window_size=[4, 4], num_classes=4)


@pytest.mark.parametrize("make", [vit, *slow(swin)])
def test_transformers_of_torchvision_are_exact_at_every_layer(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    check_every_layer(make().eval(), torch.randn(2, 3, 32, 32), depth=LEAVES)


class Reused(nn.Module):
    """One layer that runs three times, in place, around a skip and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.relu(self.first(x))
        y = self.relu(self.second(skip).view(-1, 2, 3)).flatten(1)
        return self.relu(self.second(y).add_(skip)) + x


def test_layers_that_run_several_times_are_numbered_by_their_runs() -> None:
    torch.manual_seed(0)
    wrapped = WrappedModel(Reused(), torch.randn(2, 6))
    assert wrapped.layers == ("first", "relu#0", "second#0", "relu#1", "second#1", "relu#2")
    check_every_layer(Reused().eval(), torch.randn(2, 6), depth=1)


def test_layer_0_and_the_last_one(resnet: tuple[nn.Module, Tensor], wrapped: WrappedModel) -> None:
    model, x = resnet
    last = wrapped.layer_count - 1
    assert wrapped.layers[0] == "stem.0"
    assert wrapped.layers[last] == "fc"
    for layer in (0, last):
        early = wrapped.forward(x, "id", 0, layer, False)
        assert isinstance(early, EarlyOutput)
        assert same(wrapped.forward(early, "id", layer), model(x))
    assert same(wrapped(x, end=last)()[last], model(x))


def test_from_the_number_of_layers_on_the_whole_model_runs(resnet: Any, wrapped: WrappedModel) -> None:
    model, x = resnet
    for end in (wrapped.layer_count, wrapped.layer_count + 5, float("inf")):
        assert same(wrapped(x, end=end), model(x))
    assert wrapped.banked_output == {}


def test_an_edge_runs_no_layer_after_it_and_a_cloud_none_before(resnet: Any, wrapped: WrappedModel) -> None:
    model, x = resnet
    wrapped(x, end=4)  # looks at the model
    ran: Counter[str] = Counter()
    for path in ("stem.0", "layer1.1", "layer1.1.conv2", "layer2.0", "fc"):
        module = model.get_submodule(path)

        def counted(*args: Any, path: str = path, forward: Any = module.forward) -> Any:
            ran[path] += 1
            return forward(*args)

        module.forward = counted
    early = wrapped(x, end=4)
    assert set(ran) == {"stem.0", "layer1.1", "layer1.1.conv2"}
    ran.clear()
    wrapped(early, start=4)
    assert set(ran) == {"layer2.0", "fc"}


def test_models_may_take_several_inputs_and_inputs_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, other: Tensor) -> dict[str, Tensor]:
            return {"sum": self.left(x) + self.right(other), "other": other}

    model, x, other = Two(), torch.randn(2, 3), torch.randn(2, 3)
    wrapped = WrappedModel(model, (x, other))
    assert same(wrapped(wrapped((x, other), end=0), start=0), model(x, other))
    named = {"x": x, "other": other}
    by_name = WrappedModel(model, named)
    assert same(by_name(by_name(named, end=0), start=0), model(x, other))


def test_the_wrapper_may_be_moved(resnet: Any, wrapped: WrappedModel, device: str) -> None:
    _, x = resnet
    wrapped(x, end=3)
    wrapped.to(device)
    wrapped.master_dict = {}
    x = x.to(device)
    early = wrapped(x, "id", end=3)
    for arrived in (early, EarlyOutput.from_bytes(early.to_bytes())):
        found = wrapped(arrived, "id", start=3)
        assert found.device == x.device
        assert same(found, wrapped(x))


# -- how layers are numbered -------------------------------------------------------------------------------------------


def walk(module: nn.Module, depth: int) -> Iterator[nn.Module]:
    """tracr's numbering: the tree of modules down to a depth, in the order they were declared."""
    for child in module.children():
        if depth > 1 and list(child.children()):
            yield from walk(child, depth - 1)
        else:
            yield child


@pytest.mark.parametrize(("name", "depth"), [("resnet18", 2), ("densenet121", 2), ("vgg11", 2), ("googlenet", 1)])
def test_layers_have_the_numbers_that_tracr_gives_where_they_run_as_declared(name: str, depth: int) -> None:
    # GoogLeNet drops its auxiliary outputs in eval mode; they are declared, and do not run.
    found = zoo.resolve(f"torchvision:{name}", inputs="1x3x32x32", args={"num_classes": 4})
    wrapped = WrappedModel(found.model, found.inputs, depth=depth, warmup_iterations=0)
    theirs = [module for module in walk(found.model, depth) if not type(module).__name__.startswith("InceptionAux")]
    assert [found.model.get_submodule(path) for path in wrapped.layers] == theirs
    assert wrapped.layer_count == len(theirs)


def test_a_list_of_modules_is_a_level_and_no_layer() -> None:
    model, x = zoo.build("tiny-vit")
    blocks = ("patch_embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head")
    assert WrappedModel(model, x, depth=1).layers == blocks
    assert WrappedModel(model, x, depth=2).layers == blocks
    assert "blocks.0.attn" in WrappedModel(model, x, depth=3).layers


def test_a_model_without_layers_inside_runs_whole() -> None:
    model = nn.Linear(2, 2)
    wrapped = WrappedModel(model, torch.ones(1, 2))
    assert wrapped.layer_count == 0
    assert same(wrapped(torch.ones(1, 2), end=0), model(torch.ones(1, 2)))
    assert wrapped.get_layer_metrics() == {}


# -- what is kept ------------------------------------------------------------------------------------------------------


def outputs_of(model: nn.Module, paths: tuple[str, ...], x: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    hooks = [
        model.get_submodule(path).register_forward_hook(lambda _, __, output: kept.append(output.clone()))
        for path in paths
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return kept


def test_layers_to_save_are_in_the_bank() -> None:
    found = zoo.resolve("torchvision:resnet18", inputs="2x3x32x32")
    model, x = found.model, found.inputs.args[0]
    wrapped = WrappedModel(model, x, save_layers={1, 4, 6})
    expected = dict(zip((1, 4, 6), outputs_of(model, ("bn1", "layer1.0", "layer2.0"), x), strict=True))
    assert wrapped.layers[1] == "bn1"  # a ReLU writes into its output
    with torch.no_grad():
        assert same(wrapped(x), model(x))
    assert same(wrapped.banked_output, expected)
    early = wrapped(x, end=6)
    assert same(early(), expected)
    assert same(wrapped.banked_output, expected)
    early = wrapped(x, end=4)
    assert early().keys() == {1, 4}
    wrapped.save_layers = [0]
    assert wrapped(x, end=4)().keys() == {0, 4}


def test_in_a_cloud_the_bank_is_what_came(resnet: Any) -> None:
    model, x = resnet
    wrapped = WrappedModel(model, x, save_layers=[2])
    early = wrapped(x, end=3)
    wrapped(x)
    assert wrapped.banked_output.keys() == {2}
    wrapped(early, start=3)
    assert same(wrapped.banked_output, early())
    arrived = EarlyOutput.from_bytes(early.to_bytes("zstd"))
    assert same(arrived(), {3: early()[3]})
    assert arrived.layer == 3
    assert arrived.shape is None
    assert EarlyOutput(x).shape == x.shape


def test_nothing_is_in_the_bank_after_an_error(resnet: Any) -> None:
    wrapped = WrappedModel(*resnet, save_layers=[2])
    wrapped(resnet[1])
    with pytest.raises(RuntimeError, match="expected input"):
        wrapped(torch.ones(1, 4, 8, 8))
    assert wrapped.banked_output == {}


def test_a_saved_layer_inside_a_fused_operator_is_an_error() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    wrapped = WrappedModel(nn.Sequential(layer).eval(), torch.ones(1, 3, 8), depth=2, save_layers=[0])
    with pytest.raises(Unsupported, match="layer 0 of save_layers, '0.self_attn', was not observed"):
        wrapped(torch.ones(1, 3, 8))


# -- ending a run by hand ----------------------------------------------------------------------------------------------


def test_a_hook_may_end_the_run(resnet: Any, wrapped: WrappedModel) -> None:
    model, x = resnet

    def leave(_: nn.Module, __: Any, output: Tensor) -> None:
        raise HookExitException({"mine": output})

    hook = model.layer1.register_forward_hook(leave)
    early = wrapped(x)
    hook.remove()
    assert isinstance(early, EarlyOutput)
    assert same(early()["mine"], outputs_of(model, ("layer1",), x)[0])
    with pytest.raises(BadInputs, match="has only outputs of layers"):
        wrapped(early, start=2)
    with pytest.raises(BadInputs, match="has only outputs of layers"):
        early.to_bytes()


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_a_cut_that_is_not_exact_is_refused_with_the_reason() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    wrapped = WrappedModel(nn.Sequential(layer, nn.Linear(8, 8)), torch.ones(1, 3, 8), depth=2)
    with pytest.raises(Unsupported, match="cannot stop a run after layer 0: .*runs as one fused operator"):
        wrapped(torch.ones(1, 3, 8), end=0)


def test_a_model_whose_head_writes_a_buffer_that_its_tail_reads_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.BatchNorm1d(2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.first(x)) * self.first.running_mean
            return y

    wrapped = WrappedModel(Counts(), torch.ones(2, 2))
    with pytest.raises(Unsupported, match="put the model in eval mode"):
        wrapped(torch.ones(2, 2), end=0)


def test_an_edge_with_other_weights_is_refused(resnet: Any, wrapped: WrappedModel) -> None:
    model, x = resnet
    early = wrapped(x, end=3)
    with torch.no_grad():
        model.fc.bias.add_(1)
    with pytest.raises(BadBoundary, match="the boundary is of another model"):
        wrapped(early, start=3)
    assert same(wrapped(wrapped(x, end=3), start=3), model(x))


def test_invalid_arguments_of_forward_raise(resnet: Any, wrapped: WrappedModel) -> None:
    _, x = resnet
    early = wrapped(x, end=3)
    with pytest.raises(BadInputs, match="start=3 resumes a run: expected the EarlyOutput of .*got a Tensor"):
        wrapped(x, start=3)
    with pytest.raises(BadQuery, match="stopped after 'layer1.0': expected start=3, got start=4"):
        wrapped(early, start=4)
    with pytest.raises(BadQuery, match="stopped after 'layer1.0': expected start=3, got start=0"):
        wrapped(early)
    with pytest.raises(BadQuery, match="a cloud runs to the end, got end=5"):
        wrapped(early, start=3, end=5)
    for wrong in (-1, 2.5, "3", None):
        with pytest.raises(BadQuery, match="expected end to be an integer of at least 0, got"):
            wrapped(x, end=wrong)
    with pytest.raises(BadQuery, match="expected start to be an integer of at least 0, got -1"):
        wrapped(x, start=-1)
    with pytest.raises(BadBoundary, match="'layer1.0', which is not a layer here: use the same depth on both"):
        WrappedModel(*resnet, depth=1)(early, start=3)
    wrapped.save_layers = {40}
    with pytest.raises(BadQuery, match="expected save_layers from 0 to 8, got 40"):
        wrapped(x)
    with pytest.raises(BadQuery, match="expected iterations to be an integer of at least 0, got -2"):
        wrapped.warmup(-2)


def test_invalid_arguments_of_the_wrapper_raise(resnet: Any) -> None:
    model, x = resnet
    with pytest.raises(BadInputs, match="expected inputs for the model, got none"):
        WrappedModel(model)
    with pytest.raises(BadQuery, match="expected depth to be an integer of at least 1, got 0"):
        WrappedModel(model, x, depth=0)
    with pytest.raises(BadQuery, match="expected an nn.Module or a configuration, got a int"):
        WrappedModel(3)  # type: ignore[arg-type]
    with pytest.raises(BadQuery, match="expected collect_metrics from 'time', .*got 'power'"):
        WrappedModel(model, x, collect_metrics=["power"])


def test_bytes_that_are_no_early_output(resnet: Any, wrapped: WrappedModel) -> None:
    model, x = resnet
    head, _ = mt.split(model, x, at="layer1")
    with pytest.raises(BadBoundary, match="expected the bytes of an EarlyOutput, got a boundary"):
        EarlyOutput.from_bytes(head(x).to_bytes())
    with pytest.raises(BadBoundary, match="truncated boundary"):
        EarlyOutput.from_bytes(wrapped(x, end=1).to_bytes()[:-1])


# -- the model as found ------------------------------------------------------------------------------------------------


def test_the_model_is_as_found(resnet: Any) -> None:
    model, x = resnet
    model.layer2.train()
    state = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    names = [sorted(vars(module)) for module in model.modules()]
    before, random = x.clone(), torch.random.get_rng_state()
    wrapped = WrappedModel(model, x, save_layers=[1], warmup_iterations=1)
    wrapped.get_layer_metrics()
    assert same(wrapped(x, log=False), wrapped(x))
    wrapped(x, end=3)
    assert [module.training for module in model.modules()] == modes
    model.eval()
    wrapped(wrapped(x, end=3), start=3)
    assert x.equal(before)
    assert torch.random.get_rng_state().equal(random)
    assert [sorted(vars(module)) for module in model.modules()] == names
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    after = model.state_dict()
    changed = [name for name in state if not state[name].equal(after[name])]
    assert all(name.startswith("layer2") for name in changed), changed
    assert list(state) == list(after)


def test_in_eval_mode_no_graph_is_made(resnet: Any, wrapped: WrappedModel) -> None:
    model, x = resnet
    assert not wrapped(x).requires_grad
    assert not wrapped(wrapped(x, end=2), start=2).requires_grad
    model.train()
    assert wrapped(x).requires_grad
    with torch.no_grad():
        assert not wrapped(x).requires_grad


def test_a_wrapper_can_be_copied(resnet: Any, wrapped: WrappedModel) -> None:
    _, x = resnet
    early = wrapped(x, end=3)
    other = copy.deepcopy(wrapped)
    assert other.model is not wrapped.model
    assert same(other(early, start=3), wrapped(x))


# -- warming up --------------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            self.modes.append(self.training)
        return self.norm(x)


def test_it_warms_up_in_eval_mode_the_requested_number_of_times() -> None:
    model = Counts()
    wrapped = WrappedModel(model, "2x2", warmup_iterations=3, collect_metrics=False)
    assert model.modes == [False] * 3
    wrapped.warmup()
    wrapped.warmup(iterations=2)
    assert model.modes == [False] * 8
    assert model.training
    assert model.norm.training
    assert model.norm.num_batches_tracked == 0


# -- metrics -----------------------------------------------------------------------------------------------------------

#: Of tracr's record, what cannot be taken of one layer in one run.
NOT_MEASURED = (
    "processing_energy",
    "communication_energy",
    "total_energy",
    "power_reading",
    "gpu_utilization",
    "memory_utilization",
    "cpu_utilization",
    "host_battery_energy_mwh",
)


class Hooked:
    """What plain hooks see of modules: for each call, when it began and ended, and what it returned."""

    def __init__(self, model: nn.Module, layers: tuple[str, ...]) -> None:
        self._seen: dict[str, list[dict[str, Any]]] = {}
        for path in dict.fromkeys(layer.partition("#")[0] for layer in layers):
            self._hook(model.get_submodule(path), self._seen.setdefault(path, []))

    def _hook(self, module: nn.Module, calls: list[dict[str, Any]]) -> None:
        def note(_: nn.Module, __: Any, output: Tensor) -> None:
            if calls and "end" not in calls[-1]:  # of a call that a cloud skips, only this hook runs
                calls[-1]["end"] = perf_counter()
                calls[-1]["output_bytes"] = output.numel() * output.element_size()
                calls[-1]["output_shape"] = list(output.shape)
                calls[-1]["output_dtype"] = str(output.dtype)

        module.register_forward_pre_hook(lambda *_: calls.append({"begin": perf_counter()}))
        module.register_forward_hook(note)

    def take(self) -> dict[str, list[dict[str, Any]]]:
        """What was seen since this was called last."""
        seen = {path: list(calls) for path, calls in self._seen.items()}
        for calls in self._seen.values():
            calls.clear()
        return seen


def check_records(wrapped: WrappedModel, expected: range, hooked: dict[str, list[dict[str, Any]]]) -> None:
    """All fields of the records of a run are what hooks saw of it."""
    records = wrapped.get_layer_metrics()
    assert list(records) == list(expected)
    for at, record in records.items():
        path, _, index = wrapped.layers[at].partition("#")
        truth = hooked[path][int(index or 0)]
        assert record["layer_id"] == at
        assert record["layer_name"] == wrapped.layers[at]
        assert record["layer_type"] == type(wrapped.model.get_submodule(path)).__name__
        for name in ("output_bytes", "output_shape", "output_dtype"):
            assert record[name] == truth[name], (name, wrapped.layers[at])
        # A layer's hooks run inside its call, so that its time contains the time between them.
        assert record["inference_time"] >= truth["end"] - truth["begin"], wrapped.layers[at]
        assert all(record[name] is None for name in NOT_MEASURED)
    written = wrapped.master_dict["run"]
    assert written["layer_information"] == records
    assert sum(record["inference_time"] for record in records.values()) <= written["total_time"] / 1e9


class Reusing(nn.Module):
    """Runs one module in several places, some of them inside others."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 1), self.act)
        self.second = nn.Sequential(self.act, nn.Conv2d(4, 4, 1, stride=2))
        self.third = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.act(self.first(x)))
        return self.third(self.act(x)) + self.act(x)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", [lambda: zoo.build("tiny-resnet")[0], Reusing])
def test_every_number_of_a_run_is_of_that_run(make: Callable[[], nn.Module], depth: int) -> None:
    # The example has batch 1 and 16 x 16 pixels; the runs have other batches, resolutions and a new input each.
    torch.manual_seed(0)
    model = make().eval()
    wrapped = WrappedModel(model, "1x3x16x16", depth=depth, master_dict={}, warmup_iterations=1)
    hooks = Hooked(model, wrapped.layers)
    count = wrapped.layer_count
    for batch, pixels in ((1, 16), (8, 16), (1, 32), (8, 32)):
        x = torch.randn(batch, 3, pixels, pixels)
        for cut in range(count):
            wrapped(x, end=cut)  # looks at the model
            hooks.take()
            early = wrapped(x, "run", end=cut)
            head = hooks.take()
            check_records(wrapped, range(cut + 1), head)
            wrapped(early, "run", start=cut)
            tail = hooks.take()
            check_records(wrapped, range(cut + 1, count), {path: head[path] + tail[path] for path in head})
        wrapped(x, "run")
        check_records(wrapped, range(count), hooks.take())


def test_bytes_are_those_of_the_batch_that_ran() -> None:
    # 8 images of 64 channels at 32 x 32 places, 4 bytes each, and one image.
    model = nn.Sequential(nn.Conv2d(3, 64, 1), nn.ReLU())
    wrapped = WrappedModel(model, torch.ones(1, 3, 32, 32))
    wrapped(torch.ones(8, 3, 32, 32))
    assert [record["output_bytes"] for record in wrapped.get_layer_metrics().values()] == [2_097_152, 2_097_152]
    wrapped(torch.ones(1, 3, 32, 32))
    assert [record["output_bytes"] for record in wrapped.get_layer_metrics().values()] == [262_144, 262_144]


def test_before_a_run_and_after_one_that_raised_there_are_no_numbers(resnet: Any) -> None:
    model, x = resnet
    wrapped = WrappedModel(model, x)
    assert wrapped.get_layer_metrics() == {}
    assert wrapped.forward_info[3] == {"layer_id": 3, "layer_name": "layer1.0", "layer_type": "ResidualBlock"}
    wrapped(x)
    with pytest.raises(RuntimeError, match="expected input"):
        wrapped(torch.ones(1, 4, 8, 8))
    assert wrapped.get_layer_metrics() == {}
    assert wrapped.forward_info[3]["output_bytes"] is None


def test_metrics_are_of_the_layers_that_ran(resnet: Any) -> None:
    _, x = resnet
    wrapped = WrappedModel(*resnet, collect_metrics="time")
    early = wrapped(x, end=3)
    assert list(wrapped.get_layer_metrics()) == [0, 1, 2, 3]
    wrapped(early, start=3)
    assert list(wrapped.get_layer_metrics()) == [4, 5, 6, 7, 8]
    wrapped(x, end=0, log=False)
    assert list(wrapped.get_layer_metrics()) == [4, 5, 6, 7, 8]
    wrapped(x)
    assert list(wrapped.get_layer_metrics()) == list(range(9))


def test_layers_that_a_fused_operator_hides_have_no_numbers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    wrapped = WrappedModel(nn.Sequential(layer, nn.Linear(8, 8)).eval(), torch.ones(1, 3, 8), depth=2)
    wrapped(torch.ones(2, 3, 8))
    last = wrapped.layer_count - 1
    assert list(wrapped.get_layer_metrics()) == [last]
    assert wrapped.forward_info[last]["output_bytes"] == 2 * 3 * 8 * 4
    assert wrapped.forward_info[0]["output_bytes"] is None


def test_a_hook_that_ends_a_run_leaves_the_layers_before_it(resnet: Any, wrapped: WrappedModel) -> None:
    model, x = resnet

    def leave(_: nn.Module, __: Any, output: Tensor) -> None:
        raise HookExitException(output)

    hook = model.layer1[1].register_forward_hook(leave)
    wrapped(x)
    assert list(wrapped.get_layer_metrics()) == [0, 1, 2, 3]
    with pytest.raises(Unsupported, match="after layer 5: a hook or a layer raises HookExitException before"):
        wrapped(x, end=5)  # what the hook gives there is the example's
    hook.remove()


def test_times_are_of_the_device_that_computed(resnet: Any, device: str) -> None:
    model, x = resnet
    wrapped = WrappedModel(model.to(device), x.to(device), collect_metrics="time", master_dict={})
    wrapped(x.to(device), "run")
    times = [record["inference_time"] for record in wrapped.get_layer_metrics().values()]
    assert min(times) > 0
    assert sum(times) <= wrapped.master_dict["run"]["total_time"] / 1e9


def test_without_metrics_there_are_none(resnet: Any) -> None:
    model, x = resnet
    wrapped = WrappedModel(model, x, collect_metrics=False, master_dict={})
    wrapped(x, "run")
    assert wrapped.get_layer_metrics() == {}
    assert wrapped.metrics_collector is None
    record = wrapped.master_dict["run"]["layer_information"][3]
    assert record["output_bytes"] == 2 * 8 * 32 * 32 * 4
    assert record["inference_time"] is None
    assert wrapped.profile.timing is None


def test_the_profile_is_of_the_example(resnet: Any) -> None:
    model, x = resnet
    wrapped = WrappedModel(model, x, depth=1)
    wrapped(x[:1])
    assert wrapped.profile["layer1"].output_bytes == 2 * 8 * 32 * 32 * 4
    assert wrapped.profile["layer1"].time_s > 0
    assert wrapped.profile.energy is not None or "energy" in wrapped.profile.unavailable
    assert wrapped.profile.sampling is not None or "load" in wrapped.profile.unavailable


def test_runs_are_written_under_their_ids(resnet: Any) -> None:
    model, x = resnet
    written: dict[str, Any] = {}
    wrapped = WrappedModel(model, x, master_dict=written, collect_metrics=False)
    early = wrapped(x, "frame", end=2)
    assert written["frame"]["inference_id"] == "frame.0"
    assert list(written["frame"]["layer_information"]) == [0, 1, 2]
    assert written["frame"]["total_time"] > 0
    wrapped(early, "frame.0", start=2)
    assert written["frame"]["inference_id"] == "frame.1"
    assert list(written["frame"]["layer_information"]) == [3, 4, 5, 6, 7, 8]
    wrapped(x, "image.png")
    assert written["image.png"]["inference_id"] == "image.png.0"
    wrapped(x)
    wrapped(x, "quiet", log=False)
    assert set(written) == {"frame", "image.png"}


# -- tracr's configuration ---------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "default": {"device": "cpu", "collect_metrics": False},
    "model": {
        "model_name": "squeezenet1_1",
        "input_size": [3, 32, 32],
        "num_classes": 4,
        "depth": 1,
        "save_layers": [0],
        "warmup_iterations": 0,
        "split_layer": 3,
    },
    "dataset": {"module": "imagenet"},
}


def test_a_configuration_makes_the_model() -> None:
    wrapped = WrappedModel(config=CONFIG)
    assert type(wrapped.model).__name__ == "SqueezeNet"
    assert not wrapped.model.training
    assert wrapped.layers == ("features", "classifier")
    assert wrapped.save_layers == [0]
    x = torch.randn(2, 3, 32, 32)
    cloud = WrappedModel(CONFIG)  # of another process: the same weights
    early = EarlyOutput.from_bytes(wrapped(x, end=0).to_bytes())
    assert same(cloud(early, start=0), wrapped(x))
    assert wrapped(x).shape == (2, 4)


def test_arguments_come_before_the_configuration() -> None:
    assert WrappedModel(CONFIG, depth=2, collect_metrics=True).depth == 2
    model = CONFIG["model"] | {"model_name": "zoo:tiny-resnet", "num_classes": None, "mode": "train", "depth": None}
    wrapped = WrappedModel({"model": model}, inputs="3x3x16x16")
    assert wrapped.model.training
    assert wrapped.depth == 2
    assert repr(wrapped.inputs) == "Inputs(3x3x16x16:float32)"


def test_a_configuration_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "split.yaml"
    file.write_text("model:\n  model_name: zoo:tiny-resnet\n  input_size: [3, 32, 32]\n  depth: 1\n")
    for path in (file, str(file)):
        assert WrappedModel(path).layers == ("stem", "layer1", "layer2", "pool", "fc")
    with pytest.raises(BadFile, match="none.yaml cannot be read as a configuration: BadFile: .* No such file"):
        WrappedModel(tmp_path / "none.yaml")
    file.write_text("model: [")
    with pytest.raises(BadFile, match="split.yaml cannot be read as a configuration: ParserError"):
        WrappedModel(file)
    file.write_text("resnet18")
    with pytest.raises(BadQuery, match="an nn.Module or a configuration, got a str"):
        WrappedModel(file)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"model_name": None}, BadQuery, "expected 'model_name' in the section `model`"),
        ({"input_size": None}, BadQuery, "expected 'input_size' in the section `model`"),
        (
            {"pretrained": True},
            BadQuery,
            "downloads nothing: set a `weight_path`.*get_model.'squeezenet1_1'",
        ),
        ({"mode": "test"}, BadQuery, "'eval' or 'train', got 'test'"),
        ({"model_name": "yolov8s"}, NoMatch, "torchvision has no model 'yolov8s'"),
        ({"depth": "two"}, BadQuery, "expected depth to be an integer of at least 1, got 'two'"),
    ],
)
def test_invalid_configurations_raise(change: dict[str, Any], error: type[Exception], match: str) -> None:
    model = {key: value for key, value in (CONFIG["model"] | change).items() if value is not None}
    with pytest.raises(error, match=match):
        WrappedModel({"model": model})


def test_a_factory_that_returns_no_module_is_refused() -> None:
    with pytest.raises(NotAModule, match="expected builtins:dict to return an nn.Module, got dict"):
        WrappedModel({"model": CONFIG["model"] | {"model_name": "builtins:dict", "num_classes": None}})
