"""Check, once per process, that the private symbols of torch behave as `torch_internals` states.

A symbol that torch no longer uses fails silently: no call would be observed, and results would be wrong. So each group
of checks runs before it is first relied on: `CALLS` when a session opens, `BACKWARD` when one attributes a backward,
`SHAPES` and `FAKE` when a model runs without values. They use tiny tensors, in a thread of their own, where no mode,
autocast or grad mode of the user is active, and draw no random numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from microtome.engine import self_test_ops
from microtome.engine import torch_internals as internals
from microtome.engine.module_calls import AnyCall, chain
from microtome.errors import MicrotomeError, describe_error

_local = threading.local()


class SelfTest:
    """Checks that run once per process.

    Args:
        checks: Functions that return whether a symbol behaves as expected, by its name.
    """

    def __init__(self, checks: Mapping[str, Callable[[], bool]]) -> None:
        self.checks = checks
        self._passed = False
        self._problem: tuple[str, str] | None = None
        self._lock = threading.RLock()

    def ensure(self) -> None:
        """Run the checks, unless they have passed; raise `Unsupported` that names the first symbol that fails."""
        if self._passed or getattr(_local, "is_checking", False):
            return
        with self._lock:
            if not self._passed and self._problem is None:
                self._run_in_thread()
        if self._problem is not None:
            raise internals.unsupported_torch(*self._problem)

    def _run_in_thread(self) -> None:
        errors: list[MicrotomeError] = []

        def run() -> None:
            _local.is_checking = True
            try:
                self._problem = self._find_problem()
                self._passed = self._problem is None
            except MicrotomeError as error:  # a session cannot be opened now, whatever the version of torch
                errors.append(error)

        thread = threading.Thread(target=run, name="microtome-self-test", daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def _find_problem(self) -> tuple[str, str] | None:
        for symbol, check in self.checks.items():
            try:
                works = check()
            except MicrotomeError:
                raise
            except Exception as error:  # noqa: BLE001  whatever another torch raises
                return symbol, f"does not do what it did ({describe_error(error)})"
            if not works:
                return symbol, "does not do what it did"
        return None


# -- calls of modules --------------------------------------------------------------------------------------------------


class _Inner(nn.Module):
    def forward(self, x: Tensor, *, times: int) -> Tensor:
        return x * times


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, times=2)


class _RecordingSession:
    """Records the calls and backwards of this thread, and does not run its backwards."""

    changes_runs = replaces_inputs = False
    fast_paths = True
    ignored: Container[int] = ()

    def __init__(self) -> None:
        self.calls: list[tuple[type, dict[str, Any]]] = []
        self.backwards: list[tuple[tuple[Any, ...], Any]] = []
        self._thread = threading.get_ident()

    def wrap_call(self, inner: AnyCall | None) -> AnyCall:
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                self.calls.append((type(module), kwargs))
            return module._call_impl(*args, **kwargs) if inner is None else inner(module, *args, **kwargs)

        return call

    wrap_output = wrap_call

    def wrap_backward(self, inner: AnyCall) -> AnyCall:
        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return inner(roots, *args, **kwargs)
            self.backwards.append((tuple(roots), args[2]))
            return ()

        return run


def _observes_calls() -> bool:
    session, model, x = _RecordingSession(), _Outer(), torch.ones(1)
    chain.add(session)
    try:
        output = model(x)
    finally:
        chain.remove(session)
    model(x)
    return session.calls == [(_Outer, {}), (_Inner, {"times": 2})] and output.item() == 2


def _runs_calls() -> bool:
    hook_calls: list[Any] = []
    model = _Outer()
    handle = model.register_forward_hook(lambda *args: hook_calls.append(args))
    hooks = list(model._forward_hooks)
    output = model._call_impl(torch.ones(1))
    handle.remove()
    return output.item() == 2 and len(hook_calls) == 1 and hooks == [handle.id] and not model._forward_hooks


def _distinguishes_hooks_with_kwargs() -> bool:
    model = _Inner()
    plain = model.register_forward_hook(lambda *_: None)
    with_kwargs = model.register_forward_hook(lambda *_: None, with_kwargs=True)
    ids = model._forward_hooks_with_kwargs
    return with_kwargs.id in ids and plain.id not in ids


def _is_namespace(attribute: str, name: str) -> Callable[[], bool]:
    """Check that a module looks up an attribute in its dict of parameters, buffers or children."""

    def check() -> bool:
        model, other = _Outer(), _Outer()
        namespace = vars(model)[attribute]
        is_found = namespace[name] is getattr(model, name)
        namespace[name] = getattr(other, name)
        return is_found and list(namespace) == [name] and getattr(model, name) is getattr(other, name)

    return check


# -- autograd ----------------------------------------------------------------------------------------------------------


def _observes_backward() -> bool:
    """Check without running a backward: the first in a process starts autograd's threads."""
    session = _RecordingSession()
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    chain.add(session)
    try:
        y.backward()
        with suppress(TypeError, IndexError):  # there are no gradients
            torch.autograd.grad(y, x, create_graph=True)
    finally:
        chain.remove(session)
    return [(roots[0] is y, flag) for roots, flag in session.backwards] == [(True, False), (True, True)]


def _numbers_nodes() -> bool:
    x = torch.ones(1, requires_grad=True)
    start = internals.next_sequence_number()
    first: Any = (x * 2).grad_fn
    between = internals.next_sequence_number()
    second: Any = (x * 2).grad_fn
    end = internals.next_sequence_number()
    return start <= first._sequence_nr() < between <= second._sequence_nr() < end


def _reaches_leaves() -> bool:
    x = torch.ones(1, requires_grad=True)
    node: Any = (x * 2).grad_fn
    below = node.next_functions[0][0]
    return type(below) is internals.AccumulateGrad and below.variable is x


def _in_backward(query: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """Call a function before, in and after a backward through one node, unobserved by open sessions."""
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    node: Any = y.grad_fn
    node.metadata["microtome"] = True
    results: list[Any] = []
    node.register_prehook(lambda _: results.append(query()))
    before = query()
    chain.run_untracked_backward((y,), (torch.ones(1),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    return before, results[0], query()


def _identifies_node() -> bool:
    before, node, after = _in_backward(lambda: (node := internals.current_node()) and node.metadata.get("microtome"))
    return (before, node, after) == (None, True, None)


def _identifies_task() -> bool:
    before, task, after = _in_backward(internals.current_graph_task)
    return bool(before == after == -1 and task >= 0)


#: Ordered so that a check relies only on those before it.
CALLS = SelfTest(
    {
        "torch.nn.Module._call_impl or torch.nn.Module._forward_hooks": _runs_calls,
        "torch.nn.Module._compiled_call_impl": _observes_calls,
        "torch.nn.Module._forward_hooks_with_kwargs": _distinguishes_hooks_with_kwargs,
        "torch.nn.Module._parameters": _is_namespace("_parameters", "weight"),
        "torch.nn.Module._buffers": _is_namespace("_buffers", "count"),
        "torch.nn.Module._modules": _is_namespace("_modules", "inner"),
        "torch.autograd._engine_run_backward": _observes_backward,
        "torch._C._autograd._get_sequence_nr or Node._sequence_nr": _numbers_nodes,
        "torch._C._functions.AccumulateGrad": _reaches_leaves,
        "OpOverload._schema": self_test_ops.reads_schemas,
        "torch._C._dispatch_has_kernel_for_dispatch_key or OpOverload._can_decompose": self_test_ops.finds_kernels,
        "torch.utils._python_dispatch.TorchDispatchMode": self_test_ops.observes_operators,
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack": self_test_ops.stacks_dispatch_modes,
        "torch._C._len_torch_dispatch_stack": self_test_ops.counts_dispatch_modes,
        "torch.utils._python_dispatch._disable_current_modes": self_test_ops.hides_operators,
        "torch.overrides._get_current_function_mode_stack": self_test_ops.stacks_function_modes,
        "torch._C.DisableTorchFunction": self_test_ops.hides_functions,
        "torch._VF._pack_padded_sequence": self_test_ops.observes_reads,
        "torch._C._is_any_autocast_enabled": self_test_ops.detects_autocast,
        "torch._safe_softmax": self_test_ops.masks_whole_rows,
        "UntypedStorage._cdata": self_test_ops.identifies_storages,
        "torch._C._storage_Use_Count": self_test_ops.counts_references,
        "Tensor._version": self_test_ops.counts_mutations,
        "Tensor._is_view": self_test_ops.recognizes_views,
        "Tensor._make_wrapper_subclass": self_test_ops.wraps_tensors,
    }
)
BACKWARD = SelfTest(
    {"torch._C._current_autograd_node": _identifies_node, "torch._C._current_graph_task_id": _identifies_task}
)
SHAPES = SelfTest({"the device 'meta'": self_test_ops.computes_shapes})
FAKE = SelfTest({"torch._subclasses.fake_tensor.FakeTensorMode": self_test_ops.computes_fake_shapes})
