"""The drop-in for torchstat under all its names: submodules, functions, arguments, attributes, and its warnings."""

from __future__ import annotations

import inspect
import warnings
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from microtome.compat import torchstat
from microtome.compat.torchstat import ModelHook, ModelStat, StatNode, StatTree, stat
from microtome.compat.torchstat.reporter import round_value
from microtome.compat.torchstat.statistics import convert_leaf_modules_to_stat_tree, get_parent_node
from microtome.errors import BadInputs, Unsupported

OF_A_CALL = "module inp out"
#: The names that torchstat's submodules define, with the arguments of each.
SUBMODULES: dict[str, dict[str, str]] = {
    "compute_flops": dict.fromkeys(
        [
            "compute_flops",
            *(f"compute_{kind}_flops" for kind in ("Conv2d", "BatchNorm2d", "ReLU", "Pool2d", "Linear", "Upsample")),
            *(f"compute_{kind}_flops" for kind in ("Conv3d", "BatchNorm3d", "Pool3d")),
        ],
        OF_A_CALL,
    ),
    "compute_madd": dict.fromkeys(
        [
            "compute_madd",
            *(f"compute_{kind}_madd" for kind in ("Conv2d", "ConvTranspose2d", "BatchNorm2d", "MaxPool2d")),
            *(f"compute_{kind}_madd" for kind in ("AvgPool2d", "ReLU", "Softmax", "Linear")),
            *(
                f"compute_{kind}_madd"
                for kind in ("Conv3d", "ConvTranspose3d", "BatchNorm3d", "MaxPool3d", "AvgPool3d")
            ),
        ],
        OF_A_CALL,
    )
    | {"compute_Bilinear_madd": "module inp1 inp2 out"},
    "compute_memory": dict.fromkeys(
        [
            "compute_memory",
            *(f"compute_{kind}_memory" for kind in ("ReLU", "PReLU", "Conv2d", "BatchNorm2d", "Linear", "Pool2d")),
        ],
        OF_A_CALL,
    )
    | {"num_params": "module"},
    "model_hook": {"ModelHook": "model input_size", "ModelHook.retrieve_leaf_modules": "self"},
    "reporter": {"round_value": "value binary", "report_format": "collected_nodes"},
    "stat_tree": {
        "StatTree": "root_node",
        "StatTree.get_same_level_max_node_depth": "self query_node",
        "StatTree.update_stat_nodes_granularity": "self",
        "StatTree.get_collected_stat_nodes": "self query_granularity",
        "StatNode": "name parent",
        "StatNode.find_child_index": "self child_name",
        "StatNode.add_child": "self node",
    },
    "statistics": {
        "get_parent_node": "root_node stat_node_name",
        "convert_leaf_modules_to_stat_tree": "leaf_modules",
        "ModelStat": "model input_size query_granularity",
        "ModelStat._analyze_model": "self",
        "ModelStat.show_report": "self",
        "stat": "model input_size query_granularity",
    },
    "__main__": {"main": ""},
}


def named(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_the_submodules_have_torchstats_names_and_arguments(submodule: str) -> None:
    module = import_module(f"microtome.compat.torchstat.{submodule}")
    for name, arguments in SUBMODULES[submodule].items():
        if submodule != "__main__":  # a command
            assert list(inspect.signature(named(module, name)).parameters) == arguments.split(), name
    top = {name for name in SUBMODULES[submodule] if hasattr(torchstat, name)}
    assert all(getattr(torchstat, name) is getattr(module, name) for name in top)


@pytest.mark.parametrize("submodule", [name for name in SUBMODULES if name != "__main__"])
def test_every_public_name_of_an_installed_torchstat_is_there(submodule: str) -> None:
    pytest.importorskip("torchstat")
    theirs, ours = (import_module(f"{package}.{submodule}") for package in ("torchstat", "microtome.compat.torchstat"))
    for name, value in vars(theirs).items():
        if name.startswith("_") or getattr(value, "__module__", None) != theirs.__name__:
            continue
        assert [*inspect.signature(value).parameters] == [*inspect.signature(getattr(ours, name)).parameters], name
        # Properties of torchstat's nodes are plain attributes of ours, which only an instance has.
        holder = ours.StatNode() if name == "StatNode" else getattr(ours, name)
        for attribute in vars(value) if isinstance(value, type) else ():
            assert attribute.startswith("_") or hasattr(holder, attribute), f"{name}.{attribute}"


def test_the_functions_of_the_package_are_not_their_submodules() -> None:
    import_module("microtome.compat.torchstat.compute_flops")
    x = torch.ones(1, 2)
    assert torchstat.compute_flops(nn.Linear(2, 3), x, torch.ones(1, 3)) == 6
    assert set(torchstat.__all__) >= {"report_format", "StatTree", "StatNode", "ModelHook", "stat", "ModelStat"}


KINDS = {
    "compute_flops": [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(1), nn.PReLU(), nn.MaxPool2d(2), nn.Upsample(scale_factor=2)],
    "compute_madd": [nn.Conv2d(1, 2, 3), nn.ConvTranspose2d(1, 2, 3), nn.BatchNorm2d(1), nn.MaxPool2d(2), nn.ReLU()],
    "compute_memory": [nn.ELU(), nn.PReLU(), nn.Conv2d(1, 2, 3), nn.BatchNorm2d(1), nn.AvgPool2d(2)],
}
GROUPS = {"PReLU": ["PReLU", "ReLU"], "ELU": ["ReLU"], "MaxPool2d": ["MaxPool2d", "Pool2d"], "AvgPool2d": ["Pool2d"]}


@pytest.mark.parametrize("submodule", KINDS)
def test_the_function_of_a_kind_counts_as_the_one_for_all_and_refuses_other_kinds(submodule: str) -> None:
    functions = import_module(f"microtome.compat.torchstat.{submodule}")
    quantity = submodule.removeprefix("compute_")
    x = torch.ones(1, 1, 8, 8)
    for module in KINDS[submodule]:
        kind = type(module).__name__
        names = [f"compute_{group}_{quantity}" for group in GROUPS.get(kind, [kind])]
        compute = next(getattr(functions, name) for name in names if hasattr(functions, name))
        out = module(x)
        assert compute(module, x, out) == getattr(functions, submodule)(module, x, out)
        with pytest.raises(AssertionError, match="expected a module of type .*, got GELU"):
            compute(nn.GELU(), x, x)


def test_bilinear_and_parameters() -> None:
    from microtome.compat.torchstat.compute_madd import compute_Bilinear_madd
    from microtome.compat.torchstat.compute_memory import num_params

    module = nn.Bilinear(3, 4, 5)
    one, two = torch.ones(2, 3), torch.ones(2, 4)
    # For each of 5 outputs 3*4 + 4 multiplications and one addition less, as torchstat has it: 5 * 31.
    assert compute_Bilinear_madd(module, one, two, module(one, two)) == 155
    assert num_params(module) == 3 * 4 * 5 + 5
    module.bias.requires_grad_(False)
    assert num_params(module) == 60


# -- nodes and trees ---------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A block of two layers, a layer that never runs, and a container whose layers never do."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.ReLU()))
        self.spare = nn.Linear(2, 2)
        self.unused = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Any:
        return self.pool(self.block(x))


def test_every_node_has_all_attributes_of_torchstats() -> None:
    names = "name granularity depth input_shape output_shape parameter_quantity inference_memory MAdd Flops Memory"
    for node in (StatNode(), *ModelStat(Net(), (3, 8, 8))._analyze_model()):
        for name in (*names.split(), "duration", "parent", "children", "_parameter_quantity", "_Flops", "_Memory"):
            getattr(node, name)
        for name in (*names.split(), "duration"):
            if name != "depth":
                setattr(node, name, getattr(node, name))


def test_a_model_is_analyzed_to_nodes_that_programs_can_format() -> None:
    nodes = ModelStat(model=Net(), input_size=[3, 8, 8], query_granularity=1)._analyze_model()
    rows = {node.name: (node.input_shape, node.output_shape) for node in nodes}
    assert rows["block.0"] == ([3, 8, 8], [4, 8, 8])
    assert rows["spare"] == rows["unused.0"] == ([0, 0, 0], [0, 0, 0])
    for node in nodes:
        assert " ".join(["{:>3d}"] * len(node.input_shape or ())).format(*node.input_shape or ())
        read, written = node.Memory
        assert read + written >= 0


@pytest.mark.parametrize("query", [1, 2, 3, 4])
def test_no_node_of_a_model_is_without_shapes(query: int) -> None:
    nodes = ModelStat(Net(), (3, 8, 8), query)._analyze_model()
    assert all(node.input_shape is not None and node.output_shape is not None for node in nodes)


def test_the_report_is_of_the_nodes_that_a_subclass_gives(capsys: pytest.CaptureFixture[str]) -> None:
    class Mine(ModelStat):
        def _analyze_model(self) -> list[StatNode]:
            return [StatNode("mine")]

    Mine(Net(), (3, 8, 8)).show_report()
    assert " mine " in capsys.readouterr().out


def test_granularity_can_be_set_and_is_updated_by_the_tree() -> None:
    tree = ModelStat(Net(), (3, 8, 8)).tree()
    block = tree.root_node.children[0]
    assert (StatNode().granularity, block.granularity) == (1, 1)
    block.granularity = 7
    assert block.granularity == 7
    tree.update_stat_nodes_granularity()
    # The block is of height 3, the tallest child of the root; in it a layer of height 1 and one of 2.
    assert [node.granularity for node in (tree.root_node, block, *block.children)] == [0, 3, 2, 2]
    assert tree.get_same_level_max_node_depth(block.children[0]) == 2
    block.granularity = 7
    tree.get_collected_stat_nodes(2)
    assert block.granularity == 3


def test_leaves_make_the_tree_that_the_model_does() -> None:
    hook = ModelHook(Net(), (3, 8, 8))
    leaves = hook.retrieve_leaf_modules()
    tree = convert_leaf_modules_to_stat_tree(leaves)
    whole = convert_leaf_modules_to_stat_tree(hook.modules)
    for query in (1, 2, 3, 4):
        rows = [
            [(node.name, node.MAdd, node.Flops, list(node.Memory), node.parameter_quantity, node.input_shape)
             for node in one.get_collected_stat_nodes(query)]
            for one in (tree, whole)
        ]  # fmt: skip
        assert rows[0] == rows[1]
    assert get_parent_node(tree.root_node, "block.1.0").name == "block.1"
    assert get_parent_node(tree.root_node, "block") is tree.root_node
    with pytest.raises(AssertionError, match="expected a node 'nowhere' above 'nowhere.0', got none under 'root'"):
        get_parent_node(tree.root_node, "nowhere.0")


@pytest.mark.parametrize(
    ("value", "binary", "text"),
    [
        (0, False, "0"),
        (999, False, "999"),
        (1000, False, "1.0K"),
        (1000, True, "1000"),
        (1024, True, "1.0K"),
        (2.5, False, "2.5"),
        (1_234_567, False, "1.23M"),
        (3 * 1024**3, True, "3.0G"),
        (5 * 10**15, False, "5000.0T"),
    ],
)
def test_round_value(value: float, binary: bool, text: str) -> None:
    assert round_value(value, binary) == text


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, torch.tensor, int])
def test_sizes_may_be_any_integers(kind: Any) -> None:
    sizes = [kind(size) for size in (3, 8, 8)]
    for given in (sizes, tuple(sizes)):
        node, *_ = ModelStat(Net(), given, kind(1))._analyze_model()
        assert node.input_shape == [3, 8, 8]
    assert ModelHook(Net(), torch.Size([3, 8, 8])).retrieve_leaf_modules()["pool"].output_shape == (4, 4, 4)


@pytest.mark.parametrize("size", [(), 224, "3x8x8", (3, 0, 8), (3, 2.5), (3, None), np.ones(3, dtype=int)])
def test_other_sizes_are_refused_with_an_assertion_error_too(size: Any) -> None:
    with pytest.raises(
        AssertionError, match="expected input_size to be the sizes of one image without the batch"
    ) as raised:
        stat(Net(), size)
    assert isinstance(raised.value, BadInputs)


def test_a_subclass_of_model_hook_has_the_model_and_the_size() -> None:
    class Mine(ModelHook):
        def __init__(self, model: nn.Module, input_size: Any) -> None:
            super().__init__(model, input_size)
            self.output = self._model(torch.rand(1, *self._input_size))

    assert Mine(Net(), (3, 8, 8)).output.shape == (1, 4, 4, 4)


@pytest.mark.parametrize("name", ["_hook_model", "_register_buffer", "_sub_module_call_hook", "_retrieve_leaf_modules"])
def test_a_hook_that_overrides_what_is_never_called_is_refused(name: str) -> None:
    with pytest.raises(
        Unsupported, match=f"expected a subclass of ModelHook .* got Mine with {name}, which microtome's"
    ):
        type("Mine", (ModelHook,), {name: lambda self: None})


# -- warnings ----------------------------------------------------------------------------------------------------------

TELLING = [
    lambda: stat(nn.Sequential(nn.GELU()), (3, 4, 4)),
    lambda: ModelStat(nn.Sequential(nn.GELU()), (3, 4, 4)).show_report(),
    lambda: ModelStat(nn.Sequential(nn.GELU()), (3, 4, 4))._analyze_model(),
    lambda: ModelHook(nn.Sequential(nn.GELU()), (3, 4, 4)),
    lambda: torchstat.compute_flops(nn.GELU(), torch.ones(1), torch.ones(1)),
    lambda: torchstat.compute_madd(nn.GELU(), torch.ones(1), torch.ones(1)),
    lambda: torchstat.compute_memory(nn.GELU(), torch.ones(1), torch.ones(1)),
]


@pytest.mark.parametrize("call", TELLING)
def test_warnings_name_the_callers_line_on_every_call(call: Any) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            call()
    assert [(warning.filename, warning.lineno) for warning in said] == [(__file__, call.__code__.co_firstlineno)] * 3


def test_warning_filters_apply() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        TELLING[0]()
    assert said == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="torchstat has no formula for these"):
            TELLING[0]()


def test_a_tree_of_ones_own_nodes_has_no_shapes_as_in_torchstat() -> None:
    assert StatNode("leaf").input_shape is None
    assert StatTree(StatNode("root")).root_node.output_shape is None
