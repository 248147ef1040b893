"""The drop-in for torchstat: its numbers to the last digit, on models and at granularities that it could not do."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import microtome as mt
from microtome import zoo
from microtome.compat.torchstat import (
    ModelHook,
    ModelStat,
    StatNode,
    StatTree,
    compute_flops,
    compute_madd,
    compute_memory,
    report_format,
    stat,
)
from microtome.compat.torchstat.__main__ import main
from microtome.errors import BadInputs, BadQuery, NotAModule


def nodes_of(model: nn.Module, size: tuple[int, ...], query: int = 1) -> list[StatNode]:
    return ModelStat(model, size).tree().get_collected_stat_nodes(query)


def report(model: nn.Module, size: tuple[int, ...], query: int = 1) -> str:
    return report_format(nodes_of(model, size, query))


zeros_allowed = pytest.mark.filterwarnings("ignore:torchstat has no formula")


# -- the published example ---------------------------------------------------------------------------------------------


class Published(nn.Module):
    """The net of torchstat's own example. Pooling, ReLU and the second dropout are functions, and so have no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(56180, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


# An image of 3 x 224 x 224. conv1 gives 10 x 220 x 220, halved 10 x 110 x 110; conv2 gives 20 x 106 x 106, halved
# 20 x 53 x 53 = 56,180 numbers for fc1.
#   conv1: K = 3*5*5 = 75 products at each of 484,000 outputs. Parameters 10*75 + 10 = 760. MAdd: 75 multiplications, 74
#     additions and 1 for the bias, 150 * 484,000 = 72,600,000. Flops: (75 + 1) * 484,000 = 36,784,000.
#     Read (150,528 + 760) * 4 = 605,152 B, written 484,000 * 4 = 1,936,000 B = 1.85 MB.
#   conv2: K = 250, 224,720 outputs. 20*250 + 20 = 5,020. MAdd 500 * 224,720 = 112,360,000. Flops 251 * 224,720
#     = 56,404,720. Read (121,000 + 5,020) * 4 = 504,080, written 898,880 B.
#   conv2_drop: no formula, 0; its output takes as much memory as that of conv2.
#   fc1: 56,180*50 + 50 = 2,809,050. MAdd 50 * (2*56,180 - 1) = 5,617,950. Flops 56,180*50 = 2,809,000, no bias.
#     Read (56,180 + 2,809,050) * 4 = 11,460,920, written 200 B.
#   fc2: 510. MAdd 10 * 99 = 990. Flops 500. Read (50 + 510) * 4 = 2,240, written 40 B.
PUBLISHED = {
    "conv1": (760, 72_600_000, 36_784_000, (605_152, 1_936_000)),
    "conv2": (5_020, 112_360_000, 56_404_720, (504_080, 898_880)),
    "conv2_drop": (0, 0, 0, (0, 0)),
    "fc1": (2_809_050, 5_617_950, 2_809_000, (11_460_920, 200)),
    "fc2": (510, 990, 500, (2_240, 40)),
}


@zeros_allowed
def test_the_published_example_comes_out_to_the_last_digit() -> None:
    leaves = ModelHook(Published(), (3, 224, 224)).retrieve_leaf_modules()
    found = {name: (leaf.parameter_quantity, leaf.MAdd, leaf.Flops, leaf.Memory) for name, leaf in leaves.items()}
    assert list(found) == list(PUBLISHED)
    assert found == PUBLISHED
    assert leaves["conv1"].input_shape == (3, 224, 224)
    assert leaves["conv1"].output_shape == (10, 220, 220)
    assert leaves["conv1"].inference_memory == 1_936_000 / 2**20
    assert leaves["conv2"].input_shape == (10, 110, 110)
    assert leaves["fc1"].input_shape == (56180,)


def test_the_report_of_the_published_example_is_torchstats(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="count as 0: MAdd, Flops, Memory of Dropout2d. microtome.profile"):
        stat(Published(), (3, 224, 224))
    header, *rows, total, line, params, rule, memory, madd, flops, moved = capsys.readouterr().out.rstrip().splitlines()
    assert re.split(" {2,}", header.strip()) == HEADINGS
    assert " ".join(rows[0].split()[:-2]) == (
        "0 conv1 3 224 224 10 220 220 760 1.85 72,600,000 36,784,000 605152 1936000"
    )
    # The sums of the columns, reads and writes too: torchstat shows the last layer's there.
    assert " ".join(total.split()) == ("total 2815340 3.56 190,578,940 95,998,220 12572392 2835120 100.00% 15407512")
    assert {len(row) for row in (header, *rows, total, line, rule)} == {len(header)}
    assert set(line) == {"="}
    assert set(rule) == {"-"}
    assert params == "Total params: 2,815,340"
    assert memory == "Total memory: 3.56MB"
    assert madd == "Total MAdd: 190.58MMAdd"
    assert flops == "Total Flops: 96.0MFlops"
    assert moved == "Total MemR+W: 14.69MB"


HEADINGS = [
    "module name", "input shape", "output shape", "params", "memory(MB)", "MAdd", "Flops", "MemRead(B)",
    "MemWrite(B)", "duration[%]", "MemR+W(B)",
]  # fmt: skip


# -- what a layer costs, by hand ---------------------------------------------------------------------------------------

IMAGE = (1, 4, 6, 6)  # 144 numbers
VOLUME = (1, 2, 4, 4, 4)  # 128 numbers

# Each: the module, the shape of its input, Flops, MAdd, elements read and written; None where torchstat has no formula.
BY_HAND: list[tuple[nn.Module, tuple[int, ...], int | None, int | None, tuple[int, int] | None]] = [
    # 8 x 4 x 4 outputs of K = 4*3*3 = 36; 8*36 + 8 = 296 parameters. 37*128; (2*36 - 1 + 1)*128; 144 + 296.
    (nn.Conv2d(4, 8, 3), IMAGE, 4_736, 9_216, (440, 128)),
    # Two groups and no bias: K = 18, 144 parameters. 18*128; 35*128; 144 + 144.
    (nn.Conv2d(4, 8, 3, groups=2, bias=False), IMAGE, 2_304, 4_480, (288, 128)),
    # Two images twice the Flops and the traffic, weights read for each, and as many MAdds.
    (nn.Conv2d(4, 8, 3), (2, 4, 6, 6), 9_472, 9_216, (880, 256)),
    # An image without a batch is one image.
    (nn.Conv2d(4, 8, 3), (4, 6, 6), 4_736, 9_216, (440, 128)),
    # Each of 6 x 6 inputs into 8 channels, K = 4*3*3 = 36 as torchstat has it: 36 * 8 * 72.
    (nn.ConvTranspose2d(4, 8, 3), IMAGE, None, 20_736, None),
    # Two Flops an element, one without weights; four MAdds. Two numbers a channel are read, weights or not: 144 + 8.
    (nn.BatchNorm2d(4), IMAGE, 288, 576, (152, 144)),
    (nn.BatchNorm2d(4, affine=False), IMAGE, 144, 576, (152, 144)),
    # 4 x 3 x 3 = 36 outputs, of 2*2 inputs: 3*36 and 4*36; 4 x 5 x 4 = 80 of 2*3: 5*80.
    (nn.MaxPool2d(2), IMAGE, 144, 108, (144, 36)),
    (nn.AvgPool2d(2), IMAGE, 144, 144, (144, 36)),
    (nn.MaxPool2d((2, 3), stride=1), IMAGE, 144, 400, (144, 80)),
    (nn.ReLU(), IMAGE, 144, 144, (144, 144)),
    (nn.ReLU6(), IMAGE, 144, 144, (144, 144)),
    (nn.ELU(), IMAGE, 144, None, (144, 144)),
    (nn.LeakyReLU(), IMAGE, 144, None, (144, 144)),
    (nn.PReLU(4), IMAGE, 144, None, (148, 144)),
    # An exponential, a division, and all but one addition for each.
    (nn.Softmax(dim=1), IMAGE, None, 431, None),
    # 6*5; 5*(6 + 5); 6 + 35.
    (nn.Linear(6, 5), (1, 6), 30, 55, (41, 5)),
    (nn.Linear(6, 5), (3, 6), 90, 55, (123, 15)),
    (nn.Linear(6, 5), (6,), 30, 55, (41, 5)),
    # Seven tokens, which torchstat cannot do.
    (nn.Linear(6, 5), (1, 7, 6), 210, 385, (77, 35)),
    # 12 x 12 pixels, whatever their channels.
    (nn.Upsample(scale_factor=2), IMAGE, 144, None, None),
    # 8 x 2 x 2 x 2 = 64 outputs of K = 2*3*3*3 = 54: 55*64; (2*54 - 1 + 1)*64. Traffic has no formula.
    (nn.Conv3d(2, 8, 3), VOLUME, 3_520, 6_912, None),
    # Two volumes twice the Flops, and as many MAdds; a volume without a batch is one.
    (nn.Conv3d(2, 8, 3), (2, *VOLUME[1:]), 7_040, 6_912, None),
    (nn.Conv3d(2, 8, 3), VOLUME[1:], 3_520, 6_912, None),
    # Each of 4 x 4 x 4 inputs into 8 channels, K = 2*27 = 54: 64 * 8 * 108.
    (nn.ConvTranspose3d(2, 8, 3), VOLUME, None, 55_296, None),
    (nn.BatchNorm3d(2), VOLUME, 256, 512, None),
    (nn.BatchNorm3d(2, affine=False), VOLUME, 128, 512, None),
    # 2 x 2 x 2 x 2 = 16 outputs, of 2*2*2 inputs: 7*16 and 8*16.
    (nn.MaxPool3d(2), VOLUME, 128, 112, None),
    (nn.AvgPool3d((2, 2, 2)), VOLUME, 128, 128, None),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is not supported")
@pytest.mark.parametrize(("module", "shape", "flops", "madd", "memory"), BY_HAND)
def test_a_layer_costs_what_was_worked_out_by_hand(
    module: nn.Module, shape: tuple[int, ...], flops: int | None, madd: int | None, memory: tuple[int, int] | None
) -> None:
    x = torch.zeros(shape)
    out = module(x)
    assert compute_flops(module, x, out) == (flops or 0)
    assert compute_madd(module, x, out) == (madd or 0)
    assert compute_memory(module, x, out) == (memory or (0, 0))


@pytest.mark.filterwarnings("ignore:.*is not supported")
def test_a_bilinear_layer_takes_two_inputs() -> None:
    # For each of 5 outputs: 3*4 + 4 multiplications and one addition less, as torchstat has it: 5 * 31.
    module = nn.Bilinear(3, 4, 5)
    given = torch.zeros(2, 3), torch.zeros(2, 4)
    out = module(*given)
    assert compute_madd(module, given, out) == 155
    assert compute_flops(module, given, out) == 0
    assert compute_memory(module, given, out) == (0, 0)


def test_frozen_parameters_are_not_counted_as_read() -> None:
    module = nn.Linear(6, 5).requires_grad_(False)
    assert compute_memory(module, torch.zeros(1, 6), torch.zeros(1, 5)) == (6, 5)


@pytest.mark.parametrize(
    ("compute", "what", "zero"),
    [(compute_flops, "Flops", 0), (compute_madd, "MAdd", 0), (compute_memory, "Memory", (0, 0))],
)
def test_a_type_without_a_formula_counts_zero_and_warns(compute: Any, what: str, zero: Any) -> None:
    module = nn.LSTM(2, 3)
    x = torch.zeros(4, 1, 2)
    with pytest.warns(UserWarning, match=rf"\[{what}\]: LSTM is not supported: counted as 0"):
        assert compute(module, x, module(x)) == zero


def test_all_types_without_a_formula_are_in_one_warning() -> None:
    net = nn.Sequential(nn.GELU(), nn.Softmax(dim=1), nn.GELU(), nn.Tanh(), nn.ELU(), nn.Conv2d(3, 4, 1))
    expected = "0: MAdd, Flops, Memory of GELU, Tanh; Flops, Memory of Softmax; MAdd of ELU. microtome.profile"
    with pytest.warns(UserWarning, match=expected) as said:
        ModelHook(net, (3, 4, 4))
    assert len(said) == 1


# -- what runs ---------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A layer that runs three times, one that never does, tuples, arguments by name, a parameter beside children."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.spare = nn.Linear(2, 2)
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.head = nn.ModuleDict({"rnn": nn.LSTM(16, 5, batch_first=True), "fc": nn.Linear(5, 4)})

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = self.conv(input=x)
        x, _ = self.pool(x)
        tokens, state = self.head["rnn"](x.flatten(2))
        return {"out": self.head["fc"](tokens), "state": state}


@zeros_allowed
def test_a_layer_that_runs_several_times_counts_every_run() -> None:
    # K = 27 at 3 x 8 x 8 = 192 outputs; 3*27 + 3 = 84 parameters, read each time. 28*192; 54*192; (192 + 84)*4; 192*4.
    conv = ModelHook(Odd(), (3, 8, 8)).retrieve_leaf_modules()["conv"]
    assert conv.runs == 3
    assert conv.Flops == 3 * 5_376
    assert conv.MAdd == 3 * 10_368
    assert conv.Memory == (3 * 1_104, 3 * 768)
    assert conv.inference_memory == 3 * 768 / 2**20
    assert conv.parameter_quantity == 84
    assert conv.duration > 0


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.pool(x))


def test_a_layer_that_runs_several_times_takes_its_first_input_and_gives_its_last_output() -> None:
    pool = ModelHook(Reused(), (3, 8, 8)).retrieve_leaf_modules()["pool"]
    assert (pool.input_shape, pool.output_shape) == ((3, 8, 8), (3, 2, 2))


@zeros_allowed
def test_tensors_in_tuples_of_outputs_are_counted() -> None:
    leaves = ModelHook(Odd(), (3, 8, 8)).retrieve_leaf_modules()
    # 3 x 4 x 4 of 2*2: 3*48 MAdds.
    assert leaves["pool"].MAdd == 144
    assert leaves["head.rnn"].output_shape == (3, 5)
    # Three tokens of 5 float32, and the two states of 5.
    assert leaves["head.rnn"].inference_memory == (3 * 5 + 5 + 5) * 4 / 2**20
    # Three tokens: 3 * 4 * (2*5 - 1).
    assert leaves["head.fc"].MAdd == 108


@zeros_allowed
def test_a_layer_that_never_ran_is_zero_and_marked() -> None:
    hook = ModelHook(Odd(), (3, 8, 8))
    spare = hook.retrieve_leaf_modules()["spare"]
    assert (spare.runs, spare.input_shape, spare.output_shape) == (0, (0, 0, 0), (0, 0, 0))
    assert (spare.MAdd, spare.Flops, spare.Memory, spare.duration) == (0, 0, (0, 0), 0.0)
    assert spare.parameter_quantity == 6
    row = next(line for line in report(Odd(), (3, 8, 8)).splitlines() if " spare " in line)
    assert row.split()[1:9] == ["spare", *"000000", "6"]


@zeros_allowed
def test_parameters_beside_children_have_a_row_of_their_own() -> None:
    model = Odd()
    nodes = nodes_of(model, (3, 8, 8))
    assert [node.name for node in nodes] == ["root (own)", "conv", "spare", "pool", "head.rnn", "head.fc"]
    assert nodes[0].parameter_quantity == 7
    assert sum(node.parameter_quantity for node in nodes) == sum(p.numel() for p in model.parameters())
    assert report_format(nodes).splitlines()[1].split()[:4] == ["0", "root", "(own)", "7"]


def test_a_weight_that_two_layers_share_counts_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    leaves = ModelHook(net, (4,)).retrieve_leaf_modules()
    assert [leaf.parameter_quantity for leaf in leaves.values()] == [16, 0]


class Windows(nn.Module):
    """Cuts an image into windows that are a batch for its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(16, 1, 12))


def test_all_windows_of_one_image_count() -> None:
    # 8 x 8 in windows of 2 x 2: 16, each of 12 numbers. 16*2 outputs of 12 products; the weight is read once.
    fc = ModelHook(Windows(), (3, 8, 8)).retrieve_leaf_modules()["fc"]
    assert (fc.Flops, fc.MAdd, fc.Memory) == (32 * 12, 32 * 23, ((192 + 24) * 4, 32 * 4))


def test_a_model_of_one_layer_is_its_own_leaf() -> None:
    hook = ModelHook(nn.ReLU(), (3, 4, 4))
    assert list(hook.retrieve_leaf_modules()) == [""]
    assert [node.name for node in nodes_of(nn.ReLU(), (3, 4, 4))] == ["root"]


def test_the_image_has_the_dtype_of_the_weights() -> None:
    conv = ModelHook(nn.Sequential(nn.Conv2d(3, 2, 1)).double(), (3, 4, 4)).retrieve_leaf_modules()["0"]
    assert conv.Memory == ((48 + 8) * 8, 32 * 8)
    assert conv.inference_memory == 32 * 8 / 2**20


def test_a_model_without_weights_is_counted_and_not_timed() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 2, 1))
    conv = ModelHook(model, (3, 4, 4)).retrieve_leaf_modules()["0"]
    assert (conv.Flops, conv.duration) == (32 * 4, 0.0)


def vision_models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torchvision = zoo.import_torchvision()
    models = torchvision.models
    swin = {"patch_size": [4, 4], "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": [4, 4]}
    vit = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    return {
        "vit": (models.VisionTransformer(**vit), (3, 32, 32)),
        "swin": (models.SwinTransformer(**swin), (3, 32, 32)),
        "densenet": (models.DenseNet(4, (2, 2), 8, num_classes=3), (3, 32, 32)),
        "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 8)),
    }


@zeros_allowed
@pytest.mark.parametrize("name", ["vit", "swin", "densenet", "encoder"])
def test_the_rows_of_every_granularity_make_the_whole(name: str) -> None:
    model, size = vision_models()[name]
    tree = ModelStat(model, size).tree()
    every = [tree.get_collected_stat_nodes(q) for q in range(1, 9)]
    assert [node.name for node in every[-1]] == ["root"]
    leaves = {path for path, module in model.named_modules() if not any(module.children())}
    assert {node.name for node in every[0] if not node.name.endswith("(own)")} == leaves
    total = every[-1][0]
    assert total.parameter_quantity == sum(p.numel() for p in model.parameters())
    assert total.Flops > 0
    for nodes in every:
        for quantity in ("parameter_quantity", "MAdd", "Flops"):
            assert sum(getattr(node, quantity) for node in nodes) == getattr(total, quantity)
        assert list(map(sum, zip(*(node.Memory for node in nodes), strict=True))) == total.Memory


@zeros_allowed
def test_a_module_with_children_has_the_shapes_of_its_own_call() -> None:
    # The last child of the attention never runs, and its first, the parameters of its own, has no shape.
    model, size = vision_models()["encoder"]
    attention = next(node for node in nodes_of(model, size, 2) if node.name == "self_attn")
    assert [child.name for child in attention.children] == ["self_attn (own)", "self_attn.out_proj"]
    assert (attention.input_shape, attention.output_shape) == ([5, 8], [5, 8])


class SmallCNN(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, groups=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, groups=4, bias=False),
            nn.PReLU(8),
            nn.Upsample(scale_factor=2),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 5 * 5, 10),
            nn.Softmax(dim=1),
        )


@zeros_allowed
@pytest.mark.parametrize("name", ["small", "resnet18"])
def test_profile_with_the_convention_of_torchstat_gives_the_same_totals(name: str) -> None:
    model = SmallCNN() if name == "small" else zoo.import_torchvision().models.resnet18()
    size = (3, 16, 16) if name == "small" else (3, 64, 64)
    (root,) = nodes_of(model, size, 9)
    total = mt.profile(model.eval(), torch.zeros(1, *size), convention="torchstat").total
    assert (root.Flops, root.MAdd) == (total.flops, total.madds)
    assert tuple(root.Memory) == (total.read_bytes, total.write_bytes)
    assert root.parameter_quantity == total.params
    assert total.flops


# -- the tree ----------------------------------------------------------------------------------------------------------

shapes: st.SearchStrategy[Any] = st.recursive(st.just([]), lambda inside: st.lists(inside, max_size=4), max_leaves=25)


def tree_of(shape: Any, name: str = "root", parent: StatNode | None = None) -> StatNode:
    node = StatNode(name, parent)
    node.MAdd, node.Memory = 1, (1, 2)
    for at, inside in enumerate(shape):
        node.add_child(tree_of(inside, f"{name}.{at}", node))
    return node


def below(node: StatNode) -> Iterator[StatNode]:
    yield node
    for child in node.children:
        yield from below(child)


def height(node: StatNode) -> int:
    return 1 + max((height(child) for child in node.children), default=0)


@given(shapes, st.integers(1, 6))
def test_a_query_covers_every_leaf_once_by_its_highest_node_of_that_height(shape: Any, query: int) -> None:
    root = tree_of(shape)
    collected = StatTree(root).get_collected_stat_nodes(query)
    leaves = [node for node in below(root) if not node.children]
    assert [leaf for node in collected for leaf in below(node) if not leaf.children] == leaves
    for node in collected:
        assert height(node) == node.depth <= query
        assert node.parent is None or height(node.parent) > query
        assert node.parent is None or node.granularity == height(node.parent) - 1 >= query


@given(shapes)
def test_a_node_has_what_it_and_all_below_it_have(shape: Any) -> None:
    root = tree_of(shape)
    count = len(list(below(root)))
    assert root.MAdd == count
    assert list(root.Memory) == [count, 2 * count]


@pytest.mark.parametrize("query", [0, -1, 1.5, "1", None])
def test_a_granularity_below_the_leaves_is_refused(query: Any) -> None:
    with pytest.raises(
        BadQuery, match=rf"query_granularity to be an integer of at least 1 \(the leaves\), got {query!r}"
    ):
        StatTree(StatNode("root")).get_collected_stat_nodes(query)


def test_a_child_is_found_by_its_name_and_not_added_twice() -> None:
    root = StatNode("root")
    for name in ("a", "b", "a"):
        root.add_child(StatNode(name, root))
    assert [child.name for child in root.children] == ["a", "b"]
    assert (root.find_child_index("b"), root.find_child_index("c")) == (1, -1)


def test_a_node_without_shapes_has_those_of_its_children() -> None:
    root = StatNode("root")
    for name, shape in (("never", None), ("a", [1, 2]), ("b", [3, 4]), ("after", None)):
        child = StatNode(name, root)
        if shape is not None:
            child.input_shape = child.output_shape = shape
        root.add_child(child)
    assert (root.input_shape, root.output_shape) == ([1, 2], [3, 4])
    root.input_shape = [5]
    assert root.input_shape == [5]


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_report_of_nothing_is_a_total_of_zeros() -> None:
    lines = report_format([]).splitlines()
    assert lines[1].split() == ["total", "0", "0.00", "0", "0", "0", "0", "0.00%", "0"]
    assert lines[-1] == "Total MemR+W: 0B"


def test_durations_are_shares_of_the_leaves() -> None:
    nodes = [StatNode("a"), StatNode("b")]
    nodes[0].duration, nodes[1].duration = 0.3, 0.1
    lines = report_format(nodes).splitlines()
    assert [line.split()[-2] for line in lines[1:4]] == ["75.00%", "25.00%", "100.00%"]


# -- as found ----------------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "training": [module.training for module in model.modules()],
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "attributes": {path: set(vars(module)) for path, module in model.named_modules()},
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "classes": [vars(cls).get("__call__") for cls in (nn.Module, nn.Conv2d, nn.BatchNorm2d, nn.ReLU)],
        "random": torch.get_rng_state(),
        "grad": torch.is_grad_enabled(),
        "path": sys.path.copy(),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


class Touchy(nn.Module):
    """Draws random numbers, counts its runs, and raises on an image of the wrong size."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)
        self.inner = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2))
        self.inner.eval()
        self.runs = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs.add_(1)
        self.last = torch.rand(3)
        return self.inner(self.bn(x))


@zeros_allowed
@pytest.mark.parametrize("size", [(3, 8, 8), (3, 9, 9)])
def test_model_and_process_are_as_found_also_when_the_forward_raises(size: tuple[int, ...]) -> None:
    model = Touchy()
    before = snapshot(model)
    if size == (3, 8, 8):
        report(model, size)
    else:
        with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
            report(model, size)
        assert raised.value.__notes__ == [
            "in the call 'inner.2' (Linear)",
            "The model ran on Inputs(1x3x9x9:float32).",
        ]
    assert same(snapshot(model), before)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(), 224, "3x224x224", (3, 0, 4), (3, 2.5), None])
def test_invalid_sizes_are_refused(size: Any) -> None:
    with pytest.raises(
        BadInputs,
        match="sizes of one image without the batch, such as .3, 224, 224., got",
    ):
        ModelHook(nn.ReLU(), size)


def test_a_tensor_in_place_of_sizes_is_not_printed() -> None:
    with pytest.raises(BadInputs, match=r"got a tensor: pass its sizes, \(3, 8, 8\)$"):
        stat(nn.ReLU(), torch.ones(1, 3, 8, 8))  # type: ignore[arg-type]
    with pytest.raises(BadInputs, match=r"got a tuple of tensors$"):
        stat(nn.ReLU(), (torch.ones(1, 3, 8, 8),))  # type: ignore[arg-type]


def test_a_class_is_no_model() -> None:
    with pytest.raises(NotAModule, match="expected a torch.nn.Module, got the class ReLU; create it first"):
        stat(nn.ReLU, (3, 4, 4))  # type: ignore[arg-type]


# -- the command line --------------------------------------------------------------------------------------------------

FILE = """
from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchstat_neighbour import CHANNELS

@dataclass
class Config:
    channels: int = CHANNELS

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, Config().channels, 3), nn.ReLU())

built = Net()
number = 3

def nothing():
    return None

def broken():
    raise ValueError("no weights")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "torchstat_neighbour.py").write_text("CHANNELS = 10\n")
    (tmp_path / "net.py").write_text(FILE)
    return tmp_path / "net.py"


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.mark.parametrize("name", ["Net", "built"])
def test_the_command_prints_the_report(file: Path, name: str) -> None:
    path = sys.path.copy()
    result = run("-f", file, "-m", name)
    assert result.exit_code == 0, result.output
    # 10 x 222 x 222 outputs of 27 products and a bias, and of one comparison.
    assert "13,799,520" in result.output
    assert "Total params: 280" in result.output
    assert sys.path == path


def test_the_command_runs_as_a_module_with_long_options(file: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "microtome.compat.torchstat",
        "--file",
        str(file),
        "--model",
        "Net",
        "--size",
        "3x8x8",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    # 10 x 6 x 6 = 360 outputs: 28*360 + 360.
    assert "Total Flops: 10.44KFlops" in result.stdout
    assert not result.stderr


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = run("-f", tmp_path / "none.py", "-m", "Net")
    assert result.exit_code == 2
    assert result.output == f"Error: there is no file {tmp_path / 'none.py'}\n"


def test_a_file_that_is_no_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.txt").write_text("hello")
    result = run("-f", tmp_path / "net.txt", "-m", "Net")
    assert result.exit_code == 2
    assert result.output.endswith("net.txt cannot be imported: its name does not end in .py\n")


def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import not_there_at_all\n")
    result = run("-f", tmp_path / "net.py", "-m", "Net")
    assert result.exit_code == 2
    assert "net.py cannot be imported: ModuleNotFoundError: No module named 'not_there_at_all'" in result.output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nett", "net.py has no 'Nett'; its models are: Net\n"),
        ("number", "number() of {file} returns no model: TypeError: 'int' object is not callable\n"),
        ("nothing", "nothing() of {file} returns no model: expected a torch.nn.Module, got NoneType None\n"),
        ("broken", "broken() of {file} returns no model: ValueError: no weights\n"),
    ],
)
def test_a_name_that_is_no_model_is_refused(file: Path, name: str, message: str) -> None:
    result = run("-f", file, "-m", name)
    assert result.exit_code == 2
    assert result.output.endswith(message.format(file=file))


@pytest.mark.parametrize("size", ["3x", "3,8,8", "0x8x8", "axb"])
def test_a_size_that_cannot_be_read_is_refused(file: Path, size: str) -> None:
    result = run("-f", file, "-m", "Net", "-s", size)
    assert result.exit_code == 2
    assert result.output.startswith(
        f"Error: expected a size as channels x height x width, such as 3x224x224, got {size!r}"
    )


def test_an_image_that_the_model_cannot_take_is_refused(file: Path) -> None:
    result = run("-f", file, "-m", "Net", "-s", "4x8x8")
    assert result.exit_code == 2
    assert result.output.startswith("Error: Net does not run on an image of 4x8x8: RuntimeError: Given groups=1")
    assert result.output.endswith("(in the call '0' (Conv2d))\n")


def test_file_and_model_must_be_named() -> None:
    result = run("-m", "Net")
    assert result.exit_code == 2
    assert "Missing option '-f' / '--file'" in result.output


def test_the_statistics_of_a_module_cannot_be_changed() -> None:
    conv = ModelHook(nn.Sequential(nn.Conv2d(3, 4, 1)), (3, 8, 8)).retrieve_leaf_modules()["0"]
    with pytest.raises(FrozenInstanceError):
        conv.MAdd = 0  # type: ignore[misc]


def test_the_sizes_of_a_batch_are_named_if_the_model_fails_on_them() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(RuntimeError) as caught:
        stat(net, (1, 3, 8, 8))
    note = "expected the sizes of one image without the batch, such as (3, 8, 8), got input_size (1, 3, 8, 8)"
    assert note in caught.value.__notes__
