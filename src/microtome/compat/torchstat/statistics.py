"""`stat` and `ModelStat`: from a model to the report."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from microtome.compat.torchstat.hook import ModelHook, ModuleStat
from microtome.compat.torchstat.report import report_format
from microtome.compat.torchstat.tree import StatNode, StatTree


def stat(model: nn.Module, input_size: Sequence[int], query_granularity: int = 1) -> None:
    """Print what the layers of a model cost in a forward of one image.

    Args:
        input_size: The sizes of one image, such as `(3, 224, 224)`.
        query_granularity: 1 shows the leaves, 2 the modules of leaves in their place, and so on.
    """
    ModelStat(model, input_size, query_granularity).show_report()


class ModelStat:
    """The report of a model. Each time it is asked for, the model runs anew.

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
        """Run the model, and give all its modules as nodes."""
        nodes: dict[str, StatNode] = {}
        for path, module in ModelHook(self._model, self._input_size).modules.items():
            parent = nodes[path.rpartition(".")[0]] if path else None
            nodes[path] = _node(path or "root", module, parent)
        return StatTree(nodes[""])

    def show_report(self) -> None:
        """Run the model and print the report."""
        nodes = self.tree().get_collected_stat_nodes(self._query_granularity)
        print(report_format(nodes))  # noqa: T201  it is asked to


def _node(name: str, module: ModuleStat, parent: StatNode | None) -> StatNode:
    node = StatNode(name, parent)
    if parent is not None:
        parent.add_child(node)
    if module.input_shape is not None and module.output_shape is not None:
        node.input_shape, node.output_shape = module.input_shape, module.output_shape
    if module.leaf:
        node.inference_memory, node.duration = module.inference_memory, module.duration
        node.MAdd, node.Flops, node.Memory = module.MAdd, module.Flops, module.Memory
    # Parameters beside children have a row of their own, or the rows of the leaves would not add up to the model.
    holder = node if module.leaf or not module.parameter_quantity else StatNode(f"{name} (own)", node)
    holder.parameter_quantity = module.parameter_quantity
    if holder is not node:
        holder.input_shape = holder.output_shape = ()
        node.add_child(holder)
    return node
