"""Attribute a backward to calls: find the call that created each autograd node."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from microtome.engine.call import Call, ModuleEntry, Run
from microtome.engine.composite_ops import CompositeOp
from microtome.engine.module_index import ModuleIndex
from microtome.engine.pytree import tensors_in
from microtome.engine.signals import signal_safe
from microtome.engine.threads import Thread, Threads
from microtome.engine.torch_internals import (
    AccumulateGrad,
    DisableTorchFunction,
    current_graph_task,
    current_node,
    next_sequence_number,
)

#: An autograd node: a `torch.autograd.graph.Node`, whose stub lacks much.
Node = Any

#: The longest chain of nodes that Python may visit: torch 2.13 overflows the stack as it frees some 40,000 of them.
MAX_GRAPH_DEPTH = 10_000
#: The number of nodes that are searched for the run that created a graph.
_SEARCH_LIMIT = 64
_REENTRANT = "CheckpointFunctionBackward"


def nodes_of(value: Any) -> list[Node]:
    """The `grad_fn` of each tensor in a value that has one."""
    with DisableTorchFunction():  # reading grad_fn must not reach the user's modes and subclasses
        return [node for tensor in tensors_in(value) if (node := _node_of(tensor)) is not None]


def _node_of(tensor: Tensor) -> Node:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view that became invalid when its base was changed in place
        return None


class AutogradOwners:
    """Finds the call that created an autograd node by the node's sequence number, which each run maps to its calls.

    Sequence numbers count per thread, and a node does not record its thread. It is attributed to the thread whose graph
    the backward traverses: the one whose output is near the roots, or the one that runs the backward. Graphs of several
    threads at once (DataParallel) need more: the runs of all threads except the one that opened the session tag their
    nodes. Not tagging is cheaper and safer: torch 2.13 frees nodes that Python has visited recursively, and overflows
    the stack if the graph is deep. All runs tag the nodes of their output, which keep the run alive.

    `AccumulateGrad` belongs to the first call of the parameter's module. A node created in a backward
    (`create_graph=True`) belongs to the call whose backward created it, and is tagged with that call.
    """

    def __init__(self, threads: Threads, index: ModuleIndex) -> None:
        self._threads = threads
        self._index = index
        # Keys in the metadata of nodes: objects, so that they are unique to this session.
        self._tag = object()
        self._foreign = object()
        # For each running backward, by its graph task: the thread whose graph it traverses, and a run that created it.
        self._graphs: dict[int, tuple[Thread, Run | None]] = {}

    # -- writing -------------------------------------------------------------------------------------------------------

    def mark_foreign_inputs(self, thread: Thread, inputs: Any) -> None:
        """Before a run begins, mark inputs of other threads whose sequence numbers the run's nodes may have, too."""
        for node in nodes_of(inputs):
            if node._sequence_nr() >= next_sequence_number():
                node.metadata[self._foreign] = thread.key

    def tag_outputs(self, run: Run, output: Any) -> None:
        """Keep the run alive as long as the graph of its output."""
        for node in nodes_of(output):
            if run.created(node._sequence_nr()):
                node.metadata.setdefault(self._tag, run)

    def tag_nodes(self, run: Run, output: Any) -> None:
        """Tag the nodes that the run created, back from its output."""
        numbers = range(run.start, next_sequence_number())
        if len(numbers) > MAX_GRAPH_DEPTH:
            self.tag_outputs(run, output)
        else:
            self.tag_graph(run, numbers, output)

    def tag_graph(self, owner: Run | Call, numbers: range, outputs: Any) -> None:
        """Tag the nodes back from the outputs that have these sequence numbers and no tag."""
        pending = nodes_of(outputs)
        while pending:
            node = pending.pop()
            tags = node.metadata
            if self._tag not in tags and self._foreign not in tags and node._sequence_nr() in numbers:
                tags[self._tag] = owner
                pending.extend(below for below, _ in node.next_functions if below is not None)

    # -- reading -------------------------------------------------------------------------------------------------------

    def current(self) -> Call | None:
        """The call whose backward runs now in this thread."""
        node = current_node()
        return None if node is None else self.owner(node)

    def owner(self, node: Node) -> Call | None:
        """The call that created a node of the backward that runs now in this thread."""
        if isinstance(tag := node.metadata.get(self._tag), Call):
            return tag
        if type(node) is AccumulateGrad:
            thread, run = self._graph_of_backward()
            return thread.first_call(self._index.paths_holding(node.variable, current_graph_task()), run)
        run = self._run_of(node)
        return None if run is None else run.owner(node._sequence_nr())

    def composite(self) -> CompositeOp | None:
        """The composite operator whose backward runs now in this thread."""
        node = current_node()
        if node is None or type(node) is AccumulateGrad:
            return None
        run = self._run_of(node)
        thread = self._graph_of_backward()[0] if run is None else self._threads.alive.get(run.thread)
        return None if thread is None else thread.composite_of_node(node._sequence_nr())

    def recomputed_call(self, entry: ModuleEntry) -> tuple[Call | None, int]:
        """The parent and the index of the call that a recomputation which begins now with this module repeats.

        A checkpoint of several modules at once does not tell which call of each it repeats; they are counted from 0.
        """
        node = current_node()
        if node is None:
            return None, 0
        owner, run = self.owner(node), self._run_of(node)
        repeated = next((call for call in owner.stack if call._entry is entry), None) if owner is not None else None
        if node.name() == _REENTRANT and run is not None:  # the node is created right before the checkpointed forward
            repeated = run.call_after(entry, node._sequence_nr())
        if repeated is not None:
            return repeated.parent, repeated.index
        while owner is not None and not owner._entry.contains(entry):
            owner = owner.parent
        return owner, 0

    def _run_of(self, node: Node) -> Run | None:
        tags = node.metadata
        if isinstance(tag := tags.get(self._tag), Run):
            return tag
        thread, _ = self._graph_of_backward()
        return None if tags.get(self._foreign) == thread.key else thread.run_of_node(node._sequence_nr())

    # -- graphs --------------------------------------------------------------------------------------------------------

    def _graph_of_backward(self) -> tuple[Thread, Run | None]:
        """The thread, and if known a run, that created the graph of the backward in this thread."""
        return self._graphs.get(current_graph_task()) or (self._threads.current(), None)

    @signal_safe
    def attribute_backward(self, roots: list[Node]) -> Iterator[None]:
        """In the block, attribute the backward from these nodes to the thread that created its graph."""
        run = self._find_run_near(roots)
        thread = None if run is None else self._threads.alive.get(run.thread)
        home = thread or self._threads.current()
        tasks: list[int] = []

        def begin(_: Any) -> None:
            tasks.append(current_graph_task())
            self._graphs[current_graph_task()] = home, run

        # A root runs before all else in its backward, in the thread, perhaps autograd's own, that runs the others.
        handles = [root.register_prehook(begin) for root in roots]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for task in tasks:
                self._graphs.pop(task, None)

    def _find_run_near(self, roots: list[Node]) -> Run | None:
        """The run whose output is near the roots, as it is below a loss."""
        pending = deque(roots)
        visited: set[Node] = set()
        while pending and len(visited) < _SEARCH_LIMIT:
            node = pending.popleft()
            if node is None or node in visited:
                continue
            if isinstance(tag := node.metadata.get(self._tag), Run):
                return tag
            visited.add(node)
            pending.extend(below for below, _ in node.next_functions)
        return None
