"""Owners of autograd nodes: the call that made each, so that a backward can be attributed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
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

#: The most nodes in a row that Python may look at: torch 2.13 overflows the stack as it frees some 40,000 of them.
MAX_GRAPH_DEPTH = 10_000
#: How many nodes of a backward are looked at to find whose graph it is.
_SEARCH_LIMIT = 64
_REENTRANT = "CheckpointFunctionBackward"


def nodes_of(value: Any) -> list[Node]:
    """The autograd nodes that made the tensors in a value."""
    with DisableTorchFunction():  # reading grad_fn must not show in the user's modes and subclasses
        return [node for tensor in tensors_in(value) if (node := _node_of(tensor)) is not None]


def _node_of(tensor: Tensor) -> Node:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view that may not be used any more, since its base was changed in place
        return None


class AutogradOwners:
    """Knows which call made an autograd node, from the node's sequence number: a run knows which call ran when.

    Numbers count per thread, and a node does not tell which thread made it. It is taken for one of the thread whose
    graph the backward runs through: the one whose output lies below the roots, or the one that called the backward.
    Graphs of several threads at once (DataParallel) need more: the runs of all threads but the one that opened the
    session tag their nodes. Not tagging is cheaper, and safer: torch 2.13 frees a graph by recursion where Python has
    seen its nodes, and a deep one then overflows the stack. All runs tag the nodes of their output, and live as long.

    The accumulation of a gradient belongs to the parameter's module: to its first call. A node that a backward made
    (`create_graph=True`) belongs to the call whose backward made it, and is tagged with that call.
    """

    def __init__(self, threads: Threads, index: ModuleIndex) -> None:
        self._threads = threads
        self._index = index
        # The names of our entries in a node's metadata: objects, so that they are this session's alone.
        self._tag = object()
        self._foreign = object()
        # For each backward now running, by its graph task: the thread whose graph it is, and a run that made it.
        self._graphs: dict[int, tuple[Thread, Run | None]] = {}

    # -- writing -------------------------------------------------------------------------------------------------------

    def mark_foreign_inputs(self, thread: Thread, inputs: Any) -> None:
        """Before a run begins: note which of its inputs another thread made, with a number that could be the run's."""
        for node in nodes_of(inputs):
            if node._sequence_nr() >= next_sequence_number():
                node.metadata[self._foreign] = thread.key

    def tag_outputs(self, run: Run, output: Any) -> None:
        """Have the run live as long as the graph of its output."""
        for node in nodes_of(output):
            if run.made(node._sequence_nr()):
                node.metadata.setdefault(self._tag, run)

    def tag_nodes(self, run: Run, output: Any) -> None:
        """Tag what the output was computed from, back to where the run began. Each node is tagged once."""
        pending = nodes_of(output)
        made = range(run.start, next_sequence_number())
        if len(made) > MAX_GRAPH_DEPTH:
            self.tag_outputs(run, output)
            return
        while pending:
            node = pending.pop()
            tags = node.metadata
            if self._tag not in tags and self._foreign not in tags and node._sequence_nr() in made:
                tags[self._tag] = run
                pending.extend(below for below, _ in node.next_functions if below is not None)

    def tag_backward_nodes(self, call: Call, made: range, outputs: Sequence[Tensor | None]) -> None:
        """Tag the nodes that the backward of a call made, all with numbers in the range, for the call."""
        pending = nodes_of(outputs)
        while pending:
            node = pending.pop()
            if node._sequence_nr() in made and self._tag not in node.metadata:
                node.metadata[self._tag] = call
                pending.extend(below for below, _ in node.next_functions if below is not None)

    # -- reading -------------------------------------------------------------------------------------------------------

    def current(self) -> Call | None:
        """The call whose backward runs now in this thread."""
        node = current_node()
        return None if node is None else self.owner(node)

    def owner(self, node: Node) -> Call | None:
        """The call that made a node of the backward that runs now in this thread."""
        if isinstance(tag := node.metadata.get(self._tag), Call):
            return tag
        if type(node) is AccumulateGrad:
            thread, run = self._graph_of_backward()
            return thread.first_call(self._index.paths_holding(node.variable, current_graph_task()), run)
        made_by = self._run_of(node)
        return None if made_by is None else made_by.owner(node._sequence_nr())

    def composite(self) -> CompositeOp | None:
        """The function shown whole whose backward runs now in this thread."""
        node = current_node()
        if node is None or type(node) is AccumulateGrad:
            return None
        run = self._run_of(node)
        thread = self._graph_of_backward()[0] if run is None else self._threads.alive.get(run.thread)
        return None if thread is None else thread.composite_that_made(node._sequence_nr())

    def recomputed_call(self, entry: ModuleEntry) -> tuple[Call | None, int]:
        """Of a recomputation that begins now with this site: the call it hangs under, and the index of what it repeats.

        A checkpoint of several modules at once does not tell which run of each it repeats; they are counted from 0.
        """
        node = current_node()
        if node is None:
            return None, 0
        owner, run = self.owner(node), self._run_of(node)
        repeated = next((call for call in owner.stack if call._entry is entry), None) if owner is not None else None
        if node.name() == _REENTRANT and run is not None:  # the node is made right before the checkpointed forward
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
        return None if tags.get(self._foreign) == thread.key else thread.run_that_made(node._sequence_nr())

    # -- whose graph ---------------------------------------------------------------------------------------------------

    def _graph_of_backward(self) -> tuple[Thread, Run | None]:
        """Return the graph that the backward of this thread runs through."""
        return self._graphs.get(current_graph_task()) or (self._threads.current(), None)

    @signal_safe
    def attribute_backward(self, roots: list[Node]) -> Iterator[None]:
        """While a backward runs from these nodes, know whose graph it is."""
        run = self._find_run_near(roots)
        thread = None if run is None else self._threads.alive.get(run.thread)
        home = thread or self._threads.current()
        tasks: list[int] = []

        def begin(_: Any) -> None:
            tasks.append(current_graph_task())
            self._graphs[current_graph_task()] = home, run

        # A root runs before all else in its backward, and in the thread, perhaps autograd's own, that others ask from.
        handles = [root.register_prehook(begin) for root in roots]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for task in tasks:
                self._graphs.pop(task, None)

    def _find_run_near(self, roots: list[Node]) -> Run | None:
        """The run whose output lies near the roots, as it does below a loss."""
        pending = deque(roots)
        seen: set[Node] = set()
        while pending and len(seen) < _SEARCH_LIMIT:
            node = pending.popleft()
            if node is None or node in seen:
                continue
            if isinstance(tag := node.metadata.get(self._tag), Run):
                return tag
            seen.add(node)
            pending.extend(below for below, _ in node.next_functions)
        return None
