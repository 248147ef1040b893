"""Check, once in a process, that the private symbols of torch do what `torch_internals` says of them.

A symbol that torch no longer reads fails silently: no call would be seen, and results would be wrong. So each group of
checks is run before it is first relied on: `CALLS` when a session is opened, `BACKWARD` when one follows a backward,
`SHAPES` and `FAKE` when a model runs without values. They run on tiny tensors in a thread of their own, where no mode,
autocast or grad mode of the user's is active, and draw no random numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from microtome.engine import torch_internals as internals
from microtome.engine.functions import FunctionMode
from microtome.engine.intercept import AnyCall, chain
from microtome.engine.ops import OpMode
from microtome.errors import MicrotomeError, said

_local = threading.local()


class SelfTest:
    """Checks that are made once in a process.

    Args:
        checks: By the name of the symbol, a function that returns whether it does what is relied on.
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
        refused: list[MicrotomeError] = []

        def run() -> None:
            _local.is_checking = True
            try:
                self._problem = self._find_problem()
                self._passed = self._problem is None
            except MicrotomeError as error:  # of a session that cannot be opened now: it says nothing of torch
                refused.append(error)

        thread = threading.Thread(target=run, name="microtome-self-test", daemon=True)
        thread.start()
        thread.join()
        if refused:
            raise refused[0]

    def _find_problem(self) -> tuple[str, str] | None:
        for symbol, check in self.checks.items():
            try:
                works = check()
            except MicrotomeError:
                raise
            except Exception as error:  # noqa: BLE001  whatever another torch raises
                return symbol, f"does not do what it did ({said(error)})"
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


class _Watch:
    """Notes the calls and backwards of this thread as a session would, and runs no backward of it."""

    changes_runs = feeds = False
    fast_paths = True
    others: Container[int] = ()

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

    wrap_change = wrap_call

    def wrap_backward(self, inner: AnyCall) -> AnyCall:
        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return inner(roots, *args, **kwargs)
            self.backwards.append((tuple(roots), args[2]))
            return ()

        return run


def _sees_calls() -> bool:
    watch, model, x = _Watch(), _Outer(), torch.ones(1)
    chain.add(watch)
    try:
        output = model(x)
    finally:
        chain.remove(watch)
    model(x)
    return watch.calls == [(_Outer, {}), (_Inner, {"times": 2})] and output.item() == 2


def _runs_calls() -> bool:
    told: list[Any] = []
    model = _Outer()
    handle = model.register_forward_hook(lambda *given: told.append(given))
    hooks = list(model._forward_hooks)
    output = model._call_impl(torch.ones(1))
    handle.remove()
    return output.item() == 2 and len(told) == 1 and hooks == [handle.id] and not model._forward_hooks


def _knows_hooks_with_kwargs() -> bool:
    model = _Inner()
    plain = model.register_forward_hook(lambda *_: None)
    with_kwargs = model.register_forward_hook(lambda *_: None, with_kwargs=True)
    known = model._forward_hooks_with_kwargs
    return with_kwargs.id in known and plain.id not in known


def _holds(space: str, name: str) -> Callable[[], bool]:
    """Whether a module finds what its dict of parameters, buffers or children holds."""

    def check() -> bool:
        model = _Outer()
        held, other = vars(model)[space], _Outer()
        was = held[name] is getattr(model, name)
        held[name] = getattr(other, name)
        return was and list(held) == [name] and getattr(model, name) is getattr(other, name)

    return check


# -- autograd ----------------------------------------------------------------------------------------------------------


def _sees_backward() -> bool:
    """Without running one: the first in a process starts autograd's threads."""
    watch = _Watch()
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    chain.add(watch)
    try:
        y.backward()
        with suppress(TypeError, IndexError):  # there are no gradients
            torch.autograd.grad(y, x, create_graph=True)
    finally:
        chain.remove(watch)
    return [(roots[0] is y, flag) for roots, flag in watch.backwards] == [(True, False), (True, True)]


def _numbers_nodes() -> bool:
    x = torch.ones(1, requires_grad=True)
    start = internals.next_sequence_number()
    first: Any = (x * 2).grad_fn
    between = internals.next_sequence_number()
    second: Any = (x * 2).grad_fn
    end = internals.next_sequence_number()
    return start <= first._sequence_nr() < between <= second._sequence_nr() < end


def _knows_leaves() -> bool:
    x = torch.ones(1, requires_grad=True)
    made: Any = (x * 2).grad_fn
    below = made.next_functions[0][0]
    return type(below) is internals.AccumulateGrad and below.variable is x


def _in_backward(ask: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """What is answered before, in and after a backward through one node; past open sessions, which would see it."""
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    node: Any = y.grad_fn
    node.metadata["microtome"] = True
    answers: list[Any] = []
    node.register_prehook(lambda _: answers.append(ask()))
    before = ask()
    chain.run_unseen_backward((y,), (torch.ones(1),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    return before, answers[0], ask()


def _knows_node() -> bool:
    before, node, after = _in_backward(lambda: (node := internals.current_node()) and node.metadata.get("microtome"))
    return (before, node, after) == (None, True, None)


def _knows_task() -> bool:
    before, task, after = _in_backward(internals.current_graph_task)
    return bool(before == after == -1 and task >= 0)


# -- operators and modes -----------------------------------------------------------------------------------------------


def _nobody(*_: Any) -> None:
    return None


def _op_mode(seen: list[str]) -> OpMode:
    return OpMode(_nobody, [], [lambda _, func, *__: seen.append(internals.schema_of(func).name)])


def _sees_operators() -> bool:
    seen: list[str] = []
    x = torch.ones(1)
    with _op_mode(seen):
        x.mul(2)
    x.mul(2)
    return seen == ["aten::mul"]


def _hides_operators() -> bool:
    seen: list[str] = []
    x = torch.ones(1)
    with _op_mode(seen), internals.disable_current_modes():
        x.mul(2)
    return not seen and not internals.dispatch_modes()


def _stacks_dispatch_modes() -> bool:
    mode = _op_mode([])
    internals.push_dispatch_mode(mode)
    during = internals.dispatch_modes()
    internals.pop_dispatch_mode(mode)
    return during == [mode] and internals.dispatch_modes() == []


def _counts_dispatch_modes() -> bool:
    with _op_mode([]):
        during = internals.count_dispatch_modes()
    return (during, internals.count_dispatch_modes()) == (1, 0)


def _function_mode(seen: list[Any], reads: list[Tensor]) -> FunctionMode:
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(func)
        return func(*args, **kwargs)

    return FunctionMode([nn.functional.softmax], run, reads.append)


def _stacks_function_modes() -> bool:
    mode = _function_mode([], [])
    internals.push_function_mode(mode)
    during = internals.function_modes()
    internals.pop_function_mode()
    return during == [mode] and internals.function_modes() == []


def _hides_functions() -> bool:
    seen: list[Any] = []
    x = torch.ones(1)
    with _function_mode(seen, []):
        nn.functional.softmax(x, 0)
        enabled = internals.is_torch_function_enabled()
        with internals.DisableTorchFunction():
            nn.functional.softmax(x, 0)
            disabled = not internals.is_torch_function_enabled()
    return len(seen) == 1 and enabled and disabled


def _sees_reads() -> bool:
    reads: list[Tensor] = []
    x, lengths = torch.ones(1, 1, 1), torch.tensor([1])
    with _function_mode([], reads):
        pack_padded_sequence(x, lengths)
    return len(reads) == 1


def _knows_autocast() -> bool:
    before = internals.is_autocast_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return internals.is_autocast_enabled() and not before


def _knows_kernels() -> bool:
    composed = "CompositeImplicitAutograd"
    matmul: Any = torch.ops.aten.matmul.default
    has, has_for_key = internals.has_kernel, internals.has_kernel_for_key
    return (
        has("aten::mm")
        and has_for_key("aten::matmul", composed)
        and not has_for_key("aten::mm", composed)
        and bool(matmul._can_decompose())
    )


def _knows_schemas() -> bool:
    schema = internals.schema_of(torch.ops.aten.add_.Tensor)
    first, second = schema.arguments[:2]
    return schema.name == "aten::add_" and first.alias_info.is_write and second.alias_info is None


def _takes_masked_rows() -> bool:
    return not internals.safe_softmax(torch.full((1, 2), -torch.inf), -1).any()


# -- tensors -----------------------------------------------------------------------------------------------------------


def _knows_storages() -> bool:
    x, other = torch.ones(2), torch.ones(2)
    return internals.storage_id(x) == internals.storage_id(x[1:]) != internals.storage_id(other)


def _counts_writes() -> bool:
    x = torch.ones(2)
    before = internals.version_of(x)
    x[1:].add_(1)
    return internals.version_of(x) == before + 1


class _Wrapper(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(func)


def _wraps() -> bool:
    """Without an operator on it: the first that a subclass handles has torch import its compiler."""
    made = internals.make_wrapper_subclass(_Wrapper, torch.ones(2, 3).t(), torch.device("cpu"))
    return type(made) is _Wrapper and made.shape == (3, 2) and made.stride() == (1, 3)


def _computes_shapes() -> bool:
    """This imports what computes the shapes of meta tensors.

    Torch does so at the first operator that needs it, and the frames that run then are kept by a cycle, with all
    tensors in them: those of the model, if it were running.
    """
    x = torch.empty(2, 3, device="meta")
    product = x.clone().add(x) @ x.t()
    return product.is_meta and product.shape == (2, 2)


def _computes_fake_shapes() -> bool:
    fake_tensor, fake_mode = internals.fake_tensor_types()
    real = torch.ones(2, 3)
    with fake_mode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(real)
        product = x @ x.t()
    fake = isinstance(x, fake_tensor) and isinstance(product, fake_tensor)
    return fake and product.shape == (2, 2) and product.device.type == "cpu"


#: In such an order that a check relies only on those before it.
CALLS = SelfTest(
    {
        "torch.nn.Module._call_impl or torch.nn.Module._forward_hooks": _runs_calls,
        "torch.nn.Module._compiled_call_impl": _sees_calls,
        "torch.nn.Module._forward_hooks_with_kwargs": _knows_hooks_with_kwargs,
        "torch.nn.Module._parameters": _holds("_parameters", "weight"),
        "torch.nn.Module._buffers": _holds("_buffers", "count"),
        "torch.nn.Module._modules": _holds("_modules", "inner"),
        "torch.autograd._engine_run_backward": _sees_backward,
        "torch._C._autograd._get_sequence_nr or Node._sequence_nr": _numbers_nodes,
        "torch._C._functions.AccumulateGrad": _knows_leaves,
        "OpOverload._schema": _knows_schemas,
        "torch._C._dispatch_has_kernel_for_dispatch_key or OpOverload._can_decompose": _knows_kernels,
        "torch.utils._python_dispatch.TorchDispatchMode": _sees_operators,
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack": _stacks_dispatch_modes,
        "torch._C._len_torch_dispatch_stack": _counts_dispatch_modes,
        "torch.utils._python_dispatch._disable_current_modes": _hides_operators,
        "torch.overrides._get_current_function_mode_stack": _stacks_function_modes,
        "torch._C.DisableTorchFunction": _hides_functions,
        "torch._VF._pack_padded_sequence": _sees_reads,
        "torch._C._is_any_autocast_enabled": _knows_autocast,
        "torch._safe_softmax": _takes_masked_rows,
        "UntypedStorage._cdata": _knows_storages,
        "Tensor._version": _counts_writes,
        "Tensor._make_wrapper_subclass": _wraps,
    }
)
BACKWARD = SelfTest(
    {"torch._C._current_autograd_node": _knows_node, "torch._C._current_graph_task_id": _knows_task},
)
SHAPES = SelfTest({"the device 'meta'": _computes_shapes})
FAKE = SelfTest({"torch._subclasses.fake_tensor.FakeTensorMode": _computes_fake_shapes})
