"""Whose backward runs: which call made which autograd node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from microtome.engine.calls import Call, Run, Site
from microtome.engine.threads import Thread, Threads

next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
graph_task: Callable[[], int] = torch._C._current_graph_task_id
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_REENTRANT = "CheckpointFunctionBackward"

#: An autograd node: a `torch.autograd.graph.Node`, whose stub lacks `_sequence_nr`.
Node = Any
Tell = Callable[[Call], None]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a module's output. Tuples, lists, sets, mappings and dataclasses are looked into."""
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


class Owners:
    """Writes into each autograd node which run made it, and reads that back while the node runs.

    A node's sequence number says when it was made, and a run knows which call ran when, so one tag per node, its run,
    is enough. Numbers count per thread: hence the tag. A node that no module returned has none and is looked up by its
    number, in the thread that made it. A node made by a backward (`create_graph=True`) belongs to the call whose
    backward made it and is tagged with that.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._tag = object()  # our entry's name in a node's metadata: an object, so that it is this session's alone

    def claim(self, run: Run, output: Any) -> None:
        """Tag what the output was computed from, back to where the run began. Each node is tagged once."""
        if type(output) is Tensor and not _function_modes():
            if output.grad_fn is not None:
                self._claim(run, output.grad_fn)
            return
        with torch._C.DisableTorchFunction():  # reading grad_fn must not show in the user's modes and subclasses
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    self._claim(run, tensor.grad_fn)

    def _claim(self, run: Run, root: Node) -> None:
        tag, start = self._tag, run.start
        pending = [root]
        while pending:
            node = pending.pop()
            number = node._sequence_nr()
            tags = node.metadata
            if tag in tags or number < start:
                continue
            tags[tag] = run
            for below, _ in node.next_functions:
                if type(below) is _AccumulateGrad:
                    self._claim_leaf(run, number, below)
                elif below is not None:
                    pending.append(below)

    def _claim_leaf(self, run: Run, number: int, leaf: Node) -> None:
        """Accumulating a gradient belongs to the call that used the leaf first: it runs right after its backward."""
        tags = leaf.metadata
        old = tags.get(self._tag)
        if old is None or old[0] is not run or number < old[1]:
            tags[self._tag] = (run, number)

    def claim_made(self, call: Call, made: range, outputs: Sequence[Tensor | None]) -> None:
        """Tag the nodes that the backward of a call made, all with numbers in the range, for the call."""
        pending = [tensor.grad_fn for tensor in outputs if tensor is not None]
        while pending:
            node: Node = pending.pop()
            if node is None or node._sequence_nr() not in made or self._tag in node.metadata:
                continue
            node.metadata[self._tag] = call
            pending.extend(below for below, _ in node.next_functions)

    def owner(self, node: Node) -> Call | None:
        """The call that made the node."""
        tag = node.metadata.get(self._tag)
        if isinstance(tag, Run):
            return tag.owner(node._sequence_nr())
        if isinstance(tag, tuple):
            run, number = tag
            return run.owner(number)
        return tag or self._threads.owner(node._sequence_nr())

    def current(self) -> Call | None:
        """The call whose backward runs now in this thread."""
        node = _current_node()
        return None if node is None else self.owner(node)

    def original(self, site: Site) -> tuple[Call | None, int]:
        """Of a recomputation that begins now with this site: the call it hangs under, and the index of what it repeats.

        A checkpoint of several modules at once does not tell which run of each it repeats; they are then counted from
        0.
        """
        node = _current_node()
        call = None if node is None else self.owner(node)
        index = 0
        if call is not None and isinstance(run := node.metadata.get(self._tag), Run) and node.name() == _REENTRANT:
            index = run.index_after(
                site, node._sequence_nr()
            )  # this node is made right before the checkpointed forward
        while call is not None and not call._site.contains(site):
            if call._site is site:
                index = call.index
            call = call.parent
        return call, index


class Backward:
    """One run of autograd's engine, watched node by node. Made only where somebody must be told as it goes.

    Every node below the roots carries a pre-hook for the time of the run. It tells which calls' backwards are entered
    and left, and, when the run makes a graph of its own, whose nodes those are.
    """

    def __init__(self, owners: Owners, threads: Threads, *, create_graph: bool, enter: Tell, leave: Tell) -> None:
        self._owners = owners
        self._threads = threads
        self._create_graph = create_graph
        self._enter = enter
        self._leave = leave
        self._thread = threads.here()
        # A reentrant checkpoint runs a backward inside a node of another: what is open there is not entered again.
        self._outer = self._thread.in_backward if graph_task() != -1 else ()
        # By thread, for on a GPU the nodes run in another one: the calls whose backward is open, outermost first.
        self._open: dict[Thread, list[Call]] = {}
        self._handles: list[Any] = []

    @contextmanager
    def watch(self, roots: Sequence[Any]) -> Iterator[None]:
        """Hook every node below the roots, tensors or gradient edges, while the block runs."""
        with torch._C.DisableTorchFunction():
            pending: list[Node] = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
        seen = set()
        try:
            while pending:
                node = pending.pop()
                if node is not None and node not in seen:
                    seen.add(node)
                    self._handles.append(node.register_prehook(self._before))
                    pending.extend(below for below, _ in node.next_functions)
            seen.clear()  # the graph must be free to go as the engine runs through it
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            for thread, calls in self._open.items():
                self._move(thread, calls, ())
            self._thread.in_backward = self._outer

    def _before(self, _: Any) -> None:
        node = _current_node()
        call = self._owners.owner(node)
        thread = self._threads.here()
        stack = () if call is None else call.stack
        self._move(thread, self._open.setdefault(thread, []), tuple(call for call in stack if call not in self._outer))
        if self._create_graph and call is not None:
            self._claim_after(node, call)

    def _move(self, thread: Thread, calls: list[Call], target: tuple[Call, ...]) -> None:
        """Leave the open calls that do not run any more, innermost first, and enter those that do."""
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(calls, target, strict=False)))
        while len(calls) > shared:
            self._leave(calls.pop())
        for call in target[shared:]:
            calls.append(call)
            self._enter(call)
        thread.in_backward = (*self._outer, *calls)

    def _claim_after(self, node: Node, call: Call) -> None:
        start = next_number()

        def after(outputs: Sequence[Tensor | None], _: Any) -> None:
            handle.remove()
            self._owners.claim_made(call, range(start, next_number()), outputs)

        handle = node.register_hook(after)
