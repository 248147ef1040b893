"""Observe a backward by hooks on its autograd nodes."""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

from torch import Tensor

from microtome.engine import self_test
from microtome.engine.autograd_owners import MAX_GRAPH_DEPTH, AutogradOwners, Node, nodes_of
from microtome.engine.call import Call
from microtome.engine.dispatch import ProbeMethods, notify
from microtome.engine.module_calls import AnyCall
from microtome.engine.signals import signal_safe
from microtome.engine.threads import Thread, Threads
from microtome.engine.torch_internals import AccumulateGrad, current_graph_task, current_node, next_sequence_number
from microtome.errors import ProbeError, Unsupported


def observe_backward(
    run: AnyCall, owners: AutogradOwners, threads: Threads, methods: ProbeMethods, is_open: Callable[[], bool]
) -> AnyCall:
    """Wrap the function that runs autograd's engine; nodes get hooks only for probes and `create_graph`."""

    def run_backward(roots: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        self_test.BACKWARD.ensure()
        create_graph = bool(args[2])  # roots, grad_tensors, retain_graph, create_graph, inputs, ...
        roots = tuple(roots)
        nodes = [node for root in roots for node in (nodes_of(root) if isinstance(root, Tensor) else [root.node])]
        with ExitStack() as stack:
            stack.enter_context(owners.attribute_backward(nodes))
            if methods.enter_backward or methods.exit_backward or create_graph:
                backward = _ObservedBackward(owners, threads, methods, is_open, create_graph=create_graph)
                stack.enter_context(backward.watch(nodes))
            if methods.backward_moves:
                stack.enter_context(_watch_moves(owners, nodes, methods))
            return run(roots, *args, **kwargs)

    return run_backward


class _ObservedBackward:
    """A backward that is observed node by node, for probes or since it creates a graph (`create_graph=True`).

    During the backward, every node below the roots has a pre-hook, which notifies probes of the calls that the backward
    enters and leaves, and attributes the nodes that it creates.
    """

    def __init__(
        self,
        owners: AutogradOwners,
        threads: Threads,
        methods: ProbeMethods,
        is_open: Callable[[], bool],
        *,
        create_graph: bool,
    ) -> None:
        self._owners = owners
        self._threads = threads
        self._methods = methods
        self._is_open = is_open
        self._create_graph = create_graph
        self._thread = threads.current()
        # A reentrant checkpoint runs a backward inside a node of another: calls open there are not entered again.
        self._outer = self._thread.in_backward if current_graph_task() != -1 else ()
        # The calls whose backward is open, outermost first, by thread: on a GPU, nodes run in another one.
        self._open: dict[Thread, list[Call]] = {}
        self._handles: list[Any] = []

    @signal_safe
    def watch(self, roots: list[Node]) -> Iterator[None]:
        """Hook every node below the roots while the block runs."""
        try:
            for node in _nodes_below(roots):
                self._handles.append(node.register_prehook(self._before))
            yield
        except BaseException as error:
            try:
                self._end()
            except ProbeError as second:  # the error of the backward takes precedence
                error.add_note(str(second))
            raise
        self._end()

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._thread.in_backward = self._outer
        for thread, calls in self._open.items():
            self._move(thread, calls, ())

    def _before(self, _: Any) -> None:
        node = current_node()
        call = self._owners.owner(node)
        if call is None and type(node) is AccumulateGrad:
            return  # the gradient of an input, amid the nodes of the call that reads it
        thread = self._threads.current()
        stack = () if call is None or not self._is_open() else call.stack
        self._move(thread, self._open.setdefault(thread, []), tuple(c for c in stack if c not in self._outer))
        if self._create_graph and call is not None:
            self._tag_after(node, call)

    def _move(self, thread: Thread, calls: list[Call], target: tuple[Call, ...]) -> None:
        """Leave the calls that are not in the target, innermost first, and enter those that are."""
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(calls, target, strict=False)))
        here = self._threads.current()  # not `thread`, when calls of autograd's threads are left at the end
        try:
            while len(calls) > shared:
                here.notified_call = calls.pop()
                notify(self._methods.exit_backward, "exit_backward", here.notified_call)
            for call in target[shared:]:
                here.notified_call = call
                calls.append(call)
                notify(self._methods.enter_backward, "enter_backward", call)
        finally:
            here.notified_call = None
            thread.in_backward = (*self._outer, *calls)

    def _tag_after(self, node: Node, call: Call) -> None:
        start = next_sequence_number()

        def after(outputs: Sequence[Tensor | None], _: Any) -> None:
            handle.remove()
            self._owners.tag_graph(call, range(start, next_sequence_number()), outputs)

        handle = node.register_hook(after)


@signal_safe
def _watch_moves(owners: AutogradOwners, roots: list[Node], methods: ProbeMethods) -> Iterator[None]:
    """Notify when the backward moves from one call to another, and when it has ended.

    Autograd runs the nodes of a thread in reverse order of creation, so the places where it moves are known beforehand,
    and only those nodes get a hook. `AccumulateGrad` nodes run right after the node whose gradient they add.
    """
    handles: list[Any] = []
    last: Call | None = None
    try:
        nodes = [node for node in _nodes_below(roots) if type(node) is not AccumulateGrad]
        for node in sorted(nodes, key=lambda node: -node._sequence_nr()):
            call = owners.owner(node)
            if call is not last or not handles:
                handles.append(node.register_prehook(lambda _, call=call: methods.notify_move(call)))
            last = call
        yield
    finally:
        for handle in handles:
            handle.remove()
    methods.notify_move(None)


@signal_safe
def preserve_gradients(roots: Iterable[Tensor]) -> Iterator[None]:
    """Set the gradient of every leaf below these tensors to None in the block, and restore it afterwards."""
    before = [(leaf, leaf.grad) for leaf in leaves_below(roots)]
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in before:
            leaf.grad = grad


def watch_gradient(tensor: Tensor, callback: Callable[[Tensor], None], *, owner: object) -> None:
    """Call a function with each gradient of a tensor, in any backward, as long as the owner is alive."""
    weakref.finalize(owner, tensor.register_hook(callback).remove)


def leaves_below(roots: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that a backward from these tensors accumulates gradients in, also those that no module holds."""
    leaves: list[Tensor] = []
    pending = nodes_of(list(roots))
    visited = set(pending)
    while pending:
        node = pending.pop()
        if type(node) is AccumulateGrad:
            leaves.append(node.variable)
        below = {below for below, _ in node.next_functions if below is not None} - visited
        visited |= below
        pending.extend(below)
    return [*leaves, *(root for root in roots if root.is_leaf and root.requires_grad)]


def _nodes_below(roots: list[Node]) -> Iterator[Node]:
    """Every node of the graph below the roots; raise if it is too deep to be safe."""
    depths = dict.fromkeys(roots, 1)
    # Latest first: all nodes that lead to a node are visited before it, and its depth is final.
    pending = [(-node._sequence_nr(), index, node) for index, node in enumerate(roots)]
    heapq.heapify(pending)
    while pending:
        _, _, node = heapq.heappop(pending)
        if depths[node] > MAX_GRAPH_DEPTH:
            raise Unsupported(
                f"expected a graph of at most {MAX_GRAPH_DEPTH:,} autograd nodes in depth, got a deeper one: hooks on "
                "its nodes (for callbacks, backward probes or create_graph) may crash torch as it frees the graph. "
                "Detach at intervals, or track without callbacks."
            )
        yield node
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in depths:
                heapq.heappush(pending, (-below._sequence_nr(), len(depths), below))
            depths[below] = max(depths.get(below, 0), depths[node] + 1)
