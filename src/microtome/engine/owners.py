"""Whose backward runs: which call made which autograd node."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from microtome.engine.calls import Call, Run, Site
from microtome.engine.sites import Sites
from microtome.engine.threads import Thread, Threads

#: An autograd node: a `torch.autograd.graph.Node`, whose stub lacks much.
Node = Any

next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
graph_task: Callable[[], int] = torch._C._current_graph_task_id
current_node: Callable[[], Node] = torch._C._current_autograd_node
AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

_REENTRANT = "CheckpointFunctionBackward"
#: How many nodes of a backward are looked at to find whose graph it is.
_NEAR = 64


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a module's inputs or output. Tuples, lists, sets, mappings and dataclasses are looked into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def nodes_of(value: Any) -> list[Node]:
    """The autograd nodes that made the tensors in a value."""
    with torch._C.DisableTorchFunction():  # reading grad_fn must not show in the user's modes and subclasses
        return [node for tensor in tensors_in(value) if (node := tensor.grad_fn) is not None]


class Owners:
    """Knows which call made an autograd node, from the node's sequence number: a run knows which call ran when.

    Numbers count per thread, and a node does not tell which thread made it. So runs of any thread but the one that
    opened the session tag all their nodes; an untagged node is one of the opener's. The opener's runs tag their last
    node alone, and live as long as that does. Not tagging is cheaper, and safer: torch 2.13 frees a graph by recursion
    where Python has seen its nodes, and a deep one then overflows the stack.

    The accumulation of a gradient belongs to the parameter's module: to its first call. A node that a backward made
    (`create_graph=True`) belongs to the call whose backward made it, and is tagged with that call.
    """

    def __init__(self, threads: Threads, sites: Sites) -> None:
        self._threads = threads
        self._sites = sites
        # The names of our entries in a node's metadata: objects, so that they are this session's alone.
        self._tag = object()
        self._wall = object()
        # For each backward now running, by its graph task: the thread whose graph it is, and a run that made it.
        self._homes: dict[int, tuple[Thread, Run | None]] = {}

    # -- writing -------------------------------------------------------------------------------------------------------

    def bound(self, inputs: Any) -> None:
        """Keep the run that begins with these inputs from tagging what they were computed from."""
        for node in nodes_of(inputs):
            node.metadata[self._wall] = True

    def anchor(self, run: Run, output: Any) -> None:
        """Have the run live as long as the graph of its output."""
        for node in nodes_of(output):
            node.metadata.setdefault(self._tag, run)

    def claim(self, run: Run, output: Any) -> None:
        """Tag what the output was computed from, back to where the run began. Each node is tagged once."""
        pending = nodes_of(output)
        while pending:
            node = pending.pop()
            tags = node.metadata
            if self._tag in tags or self._wall in tags or type(node) is AccumulateGrad:
                continue
            if node._sequence_nr() >= run.start:
                tags[self._tag] = run
                pending.extend(below for below, _ in node.next_functions if below is not None)

    def claim_made(self, call: Call, made: range, outputs: Sequence[Tensor | None]) -> None:
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
            thread, run = self._home()
            return thread.first_call(self._sites.holding(node.variable), run)
        run = self._run_of(node)
        return None if run is None else run.owner(node._sequence_nr())

    def original(self, site: Site) -> tuple[Call | None, int]:
        """Of a recomputation that begins now with this site: the call it hangs under, and the index of what it repeats.

        A checkpoint of several modules at once does not tell which run of each it repeats; they are counted from 0.
        """
        node = current_node()
        if node is None:
            return None, 0
        call, index = self.owner(node), 0
        if node.name() == _REENTRANT and (run := self._run_of(node)) is not None:
            index = run.index_after(site, node._sequence_nr())  # the node is made right before the checkpointed forward
        while call is not None and not call._site.contains(site):
            if call._site is site:
                index = call.index
            call = call.parent
        return call, index

    def _run_of(self, node: Node) -> Run | None:
        tag: Run | None = node.metadata.get(self._tag)
        thread, _ = self._home()
        return tag if tag is not None or thread.tags else thread.run_that_made(node._sequence_nr())

    # -- whose graph ---------------------------------------------------------------------------------------------------

    def _home(self) -> tuple[Thread, Run | None]:
        """Whose graph the backward runs through that runs now in this thread."""
        return self._homes.get(graph_task()) or (self._threads.here(), None)

    @contextmanager
    def home(self, roots: list[Node]) -> Iterator[None]:
        """While a backward runs from these nodes, know whose graph it is: its caller's, unless the opener's is seen."""
        thread, opener = self._threads.here(), self._threads.opener
        run = self._near(roots)
        home = opener if run is not None and opener.holds(run) else thread
        tasks: list[int] = []

        def begin(_: Any) -> None:
            tasks.append(graph_task())
            self._homes[graph_task()] = home, run

        # A root runs before all else in its backward, and in the thread, perhaps autograd's own, that others ask from.
        handles = [root.register_prehook(begin) for root in roots]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for task in tasks:
                self._homes.pop(task, None)

    def _near(self, roots: list[Node]) -> Run | None:
        """The run whose output lies near the roots, as it does below a loss."""
        pending = deque(roots)
        for _ in range(_NEAR):
            if not pending:
                break
            node = pending.popleft()
            if isinstance(tag := node.metadata.get(self._tag), Run):
                return tag
            pending.extend(below for below, _ in node.next_functions if below is not None)
        return None
