"""Report the costs of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from torch import nn

from microtome.compat.torchstat.counting import InvalidArgument
from microtome.compat.torchstat.model_hook import ModelHook, ModuleStat
from microtome.compat.torchstat.reporter import report_format
from microtome.compat.torchstat.stat_tree import StatNode, StatTree


def stat(model: nn.Module, input_size: Sequence[int], query_granularity: int = 1) -> None:
    """Print the costs of a model's layers in a forward of one image.

    Args:
        input_size: The sizes of one image, such as `(3, 224, 224)`.
        query_granularity: 1 shows the leaves, 2 the modules that contain only leaves in their place, and so on.
    """
    ModelStat(model, input_size, query_granularity).show_report()


class ModelStat:
    """The report of a model, which runs for every report.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), nn.ReLU())
    >>> tree = ModelStat(net, (1, 8, 8)).tree()
    >>> [(node.name, node.MAdd) for node in tree.get_collected_stat_nodes(2)]
    [('0', 1368), ('1', 72)]
    """

    def __init__(self, model: nn.Module, input_size: Sequence[int], query_granularity: int = 1) -> None:
        self._model = model
        self._input_size = input_size
        self._query_granularity = query_granularity

    def tree(self) -> StatTree:
        """Run the model and return all its modules as a tree."""
        return convert_leaf_modules_to_stat_tree(ModelHook(self._model, self._input_size).modules)

    def _analyze_model(self) -> list[StatNode]:
        """Run the model and return the nodes of the report."""
        return self.tree().get_collected_stat_nodes(self._query_granularity)

    def show_report(self) -> None:
        """Run the model and print the report."""
        print(report_format(self._analyze_model()))  # noqa: T201  that is its purpose


def convert_leaf_modules_to_stat_tree(leaf_modules: Mapping[str, ModuleStat]) -> StatTree:
    """Build the tree of modules from their paths; parents that are missing have no shapes of their own."""
    root = StatNode("root")
    for path, module in leaf_modules.items():
        node = root
        for name in accumulate(path.split(".") if path else (), "{}.{}".format):
            node = _child(node, name)
        _fill(node, module)
    return StatTree(root)


def get_parent_node(root_node: StatNode, stat_node_name: str) -> StatNode:
    """Return the parent of the node with this path, whether that node exists or not."""
    node = root_node
    for name in accumulate(stat_node_name.split(".")[:-1], "{}.{}".format):
        index = node.find_child_index(name)
        if index == -1:
            raise InvalidArgument(f"expected a node {name!r} above {stat_node_name!r}, got none under {node.name!r}")
        node = node.children[index]
    return node


def _child(node: StatNode, name: str) -> StatNode:
    node.add_child(StatNode(name, node))
    return node.children[node.find_child_index(name)]


def _fill(node: StatNode, module: ModuleStat) -> None:
    if module.leaf or module.runs:  # a container that does not run itself has the shapes of its children
        node.input_shape, node.output_shape = list(module.input_shape), list(module.output_shape)
    if module.leaf:
        node.inference_memory, node.duration = module.inference_memory, module.duration
        node.MAdd, node.Flops, node.Memory = module.MAdd, module.Flops, list(module.Memory)
    # Parameters beside children get a row of their own, so that the leaves add up to the model.
    holder = node if module.leaf or not module.parameter_quantity else _child(node, f"{node.name} (own)")
    holder.parameter_quantity = module.parameter_quantity
    if holder is not node:
        holder.input_shape = holder.output_shape = []
