"""Every private symbol of torch that microtome relies on, with the behaviour that it relies on.

All other files import them from here; tests/test_layers.py enforces it. `self_test.py` checks this behaviour before the
first session of a process. Names of operators (`torch.ops.aten._to_copy`) are no private symbols: they are part of an
operator's schema.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn, overrides

from microtome.errors import Unsupported


def unsupported_torch(symbol: str, problem: str) -> Unsupported:
    """The error for a version of torch in which a symbol is missing or behaves differently."""
    return Unsupported(
        f"torch {torch.__version__} is not supported: {symbol} {problem}, which microtome relies on. "
        "Install another version of either"
    )


try:
    from torch._C import DisableTorchFunction as DisableTorchFunction
    from torch._C import DispatchKey
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch.utils import _python_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    # -- calls of modules ----------------------------------------------------------------------------------------------

    #: The code of the functions that run a call, by which frames are recognised. `nn.Module.__call__` is the first; it
    #: calls the second, whose local `self` is the module.
    WRAPPED_CALL: CodeType = nn.Module._wrapped_call_impl.__code__
    CALL: CodeType = nn.Module._call_impl.__code__
    #: Makes a function run as Python where dynamo traces its caller, without importing dynamo.
    disable_dynamo: Any = torch._compile._disable_dynamo

    # -- autograd ------------------------------------------------------------------------------------------------------

    #: The sequence number of the next autograd node of this thread.
    next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
    #: The autograd node whose backward runs now in this thread, or None.
    current_node: Callable[[], Any] = torch._C._current_autograd_node
    #: The id of the backward that runs now in this thread, or -1. A nested backward has an id of its own.
    current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
    #: Calls a function at the end of the backward that runs now in this thread, unless that backward fails.
    on_backward_end: Any = torch.autograd.Variable._execution_engine.queue_callback
    #: The class of the node that accumulates the gradient of a leaf, its `variable`.
    AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
    #: Whether torch's profiler runs in this thread.
    is_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled

    # -- operators -----------------------------------------------------------------------------------------------------

    #: Whether an operator, by name and overload, has any kernel, and whether it has one for a dispatch key.
    has_kernel: Callable[[str], bool] = torch._C._dispatch_has_kernel
    has_kernel_for_key: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    #: Softmax that is 0 in rows where all inputs are -inf, as in attention.
    safe_softmax: Callable[[Tensor, int], Tensor] = torch._safe_softmax
    #: Functions that read the values of their second argument, the lengths, without an operator.
    pack_padded_sequence: Any = torch._VF._pack_padded_sequence
    pad_packed_sequence: Any = torch._VF._pad_packed_sequence

    #: The number of references to a storage, by its identity.
    _count_references: Callable[[int], int] = torch._C._storage_Use_Count

    # -- modes ---------------------------------------------------------------------------------------------------------

    #: Whether autocast is on in this thread for any device.
    is_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
    #: Whether a tensor is wrapped by vmap, grad or another transform of functorch.
    is_functorch_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
    #: The number of dispatch modes that are active in this thread.
    count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
    #: A context manager in which no dispatch mode is active.
    disable_current_modes: Any = _python_dispatch._disable_current_modes
    #: A class with this as `__torch_function__` is a plain tensor to all functions.
    disabled_torch_function: Any = torch._C._disabled_torch_function_impl
    #: Whether `__torch_function__` of modes and subclasses is called in this thread.
    is_torch_function_enabled: Callable[[], bool] = torch._C._is_torch_function_enabled
    #: The stack of function modes of this thread, outermost first, and functions to push and pop one.
    function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
    push_function_mode: Callable[[Any], None] = overrides._push_mode
    pop_function_mode: Callable[[], Any] = overrides._pop_mode
    #: The same for dispatch modes. A mode of torch's own, such as a fake tensor mode, is popped by its key.
    dispatch_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
    push_dispatch_mode: Callable[[Any], None] = _python_dispatch._push_mode
    _pop_dispatch_mode: Callable[[Any], Any] = _python_dispatch._pop_mode
except (ImportError, AttributeError) as error:
    raise unsupported_torch("a private symbol", f"is missing ({error})") from error

#: The attribute of a module that `nn.Module.__call__` calls instead of `_call_impl` unless it is None. A data
#: descriptor on the class takes precedence over instance attributes.
MODULE_CALL = "_compiled_call_impl"
#: The global of `torch.autograd` through which `Tensor.backward` and `autograd.grad` run the engine.
RUN_BACKWARD = "_engine_run_backward"

#: Private attributes of torch's objects that the engine reads directly, since a function call would cost more than the
#: read. Other packages use the functions below.
ATTRIBUTES = {
    "_call_impl": "of a module: runs its hooks and its forward",
    "_parameters": "of a module: its own parameters by name; writing there replaces them without `__setattr__`",
    "_buffers": "of a module: its own buffers by name, likewise",
    "_modules": "of a module: its children by name",
    "_forward_hooks": "of a module: by the id of the handle; a replica of DataParallel shares it with its original",
    "_forward_hooks_with_kwargs": "of a module: the ids of the hooks that take keyword arguments",
    "_schema": "of an operator: its name, arguments and returns, with aliasing and mutation",
    "_can_decompose": "of an operator: whether torch can decompose it into others",
    "_sequence_nr": "of an autograd node: its sequence number in the thread that created it",
    "_cdata": "of a storage: its identity, while it is alive",
    "_version": "of a tensor: how often it or a view of it was mutated; inference tensors have none",
    "_make_wrapper_subclass": "of `Tensor`: makes a tensor of a subclass with a shape and no memory",
}


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict of a module's own parameters."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict of a module's own buffers."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict of a module's children."""
    return module._modules


def schema_of(func: OpOverload) -> Any:
    """The schema of an operator: its name, arguments and returns, with aliasing and mutation."""
    return func._schema


def storage_id(tensor: Tensor) -> int:
    """The identity of a tensor's storage, while that is alive."""
    return tensor.untyped_storage()._cdata


def count_references(tensor: Tensor) -> int:
    """The number of tensors that share a tensor's storage, itself included, and of other references to the storage."""
    storage = tensor.untyped_storage()
    return _count_references(storage._cdata) - 1  # that of `storage`


_get_version = attrgetter("_version")


def versions_of(tensors: Iterable[Tensor]) -> list[Any]:
    """The version counters of tensors; a new object for an inference tensor, which may always have been written to."""
    tensors = list(tensors)
    try:
        return list(map(_get_version, tensors))
    except RuntimeError:
        return [object() if tensor.is_inference() else tensor._version for tensor in tensors]


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor and its views; 0 for an inference tensor, other than `versions_of`."""
    return 0 if tensor.is_inference() else tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view to autograd, which cannot be detached in place."""
    return tensor._is_view()


def recorded_versions(tensors: list[Tensor]) -> list[int]:
    """The `version_of` each tensor."""
    try:
        return list(map(_get_version, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


#: Makes a tensor of a subclass without memory; without strides, it is contiguous.
make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass


def pop_dispatch_mode(mode: Any) -> None:
    """Pop this dispatch mode, which is the innermost."""
    _pop_dispatch_mode(getattr(mode, "_mode_key", None))


# -- flags of modes ----------------------------------------------------------------------------------------------------

#: A flag that torch stores in C too, and the function that sets it there; older versions have neither.
_FLAG_IN_C = "_is_in_any_mode_without_ignore_compile_internals"
_set_flag_in_c = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
_FLAGS = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]


def mode_flags() -> dict[str, bool]:
    """The global flags that torch sets as dispatch modes are pushed and popped."""
    return {name: getattr(_python_dispatch, name) for name in _FLAGS}


def set_mode_flags(flags: dict[str, bool]) -> None:
    """Set the global flags that torch sets as dispatch modes are pushed and popped."""
    for name, value in flags.items():
        setattr(_python_dispatch, name, value)
    if _set_flag_in_c is not None:
        _set_flag_in_c(flags[_FLAG_IN_C])


# -- imported only when needed -----------------------------------------------------------------------------------------

#: Files and folders of torch that implement operators in Python, and push and pop modes.
OPERATOR_FILES = (
    "_decomp",
    "_library",
    "_meta_registrations",
    "_ops.py",
    "_prims",
    "_refs",
    "_subclasses",
    "autograd/grad_mode.py",
    "overrides.py",
    "utils/_python_dispatch.py",
)
#: The logger of fake tensors.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"


def fake_tensor_types() -> tuple[type[Tensor], type[Any]]:
    """`FakeTensor`, a tensor with a device and without values, and `FakeTensorMode`, which creates them."""
    try:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    except ImportError as error:
        raise unsupported_torch("torch._subclasses.fake_tensor", f"cannot be imported ({error})") from error
    return FakeTensor, FakeTensorMode


def make_fx(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `function` on fake tensors and returns its operators as a `GraphModule`."""
    try:
        from torch.fx.experimental import proxy_tensor
    except ImportError as error:
        raise unsupported_torch("torch.fx.experimental.proxy_tensor", f"cannot be imported ({error})") from error
    traced: Callable[..., Any] = proxy_tensor.make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    return traced


#: The operators that interpolate. Their overload `vec` takes a size or scale factors, `default` a size and scales.
_INTERPOLATIONS = (
    *(f"upsample_nearest{dims}d" for dims in (1, 2, 3)),
    *(f"_upsample_nearest_exact{dims}d" for dims in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)


@contextmanager
def keep_interpolations() -> Iterator[None]:
    """Keep `make_fx` from decomposing interpolations, since the decompositions round differently.

    They are Python kernels of the operators, which are replaced for the block in the whole process.
    """
    before: list[tuple[Any, dict[Any, Any]]] = []
    try:
        for name in _INTERPOLATIONS:
            packet = getattr(torch.ops.aten, name)
            for overload in packet.default, packet.vec:
                before.append((overload, dict(overload.py_kernels)))
                for key in DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd:
                    overload.py_kernels.pop(key, None)
            packet.vec.py_kernels[DispatchKey.CompositeImplicitAutograd] = partial(_interpolate, packet.default)
            packet.default._dispatch_cache.clear()
            packet.vec._dispatch_cache.clear()
        yield
    finally:
        for overload, kernels in before:
            overload.py_kernels.clear()
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()


def _interpolate(function: OpOverload, x: Tensor, size: Any, *others: Any) -> Any:
    """Call the overload `default` of an operator with the arguments of `vec`."""
    *align_corners, scales = others
    if size is None:
        factors = zip(x.shape[2:], scales, strict=True)
        size = [n * int(s) if int(s) == s else torch.sym_int(torch.sym_float(n) * s) for n, s in factors]
    return function(x, list(size), *align_corners, *(scales or [None] * len(size)))


def interpret_sizes(expression: Any, sizes: Mapping[Any, Any]) -> Any:
    """Evaluate an expression of sympy on values of its symbols, which may be proxies of a graph."""
    try:
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis
    except ImportError as error:
        raise unsupported_torch("torch.utils._sympy", "it is missing") from error

    def call(function: Callable[[Any], Any], value: Any) -> Any:
        if isinstance(value, fx.Proxy):  # which the functions of `math` do not take
            return value.tracer.create_proxy("call_function", function, (value,), {})
        return function(value)

    class SizeAnalysis(PythonReferenceAnalysis):
        """Divides as Python does where torch's analysis makes an expression of sympy."""

        truediv = int_truediv = staticmethod(operator.truediv)
        ceil_to_int = staticmethod(lambda value, dtype: call(math.ceil, value))
        floor_to_int = staticmethod(lambda value, dtype: call(math.floor, value))
        trunc_to_int = staticmethod(lambda value, dtype: call(math.trunc, value))

    return sympy_interp(SizeAnalysis, dict(sizes), expression)


class SizeFunctions(NamedTuple):
    """The functions of sympy in which torch expresses sizes."""

    floor_div: Any
    remainders: tuple[Any, ...]

    @property
    def divisions(self) -> tuple[Any, ...]:
        """All functions with a divisor."""
        return (self.floor_div, *self.remainders)


def size_functions() -> SizeFunctions:
    """The functions of sympy in which torch expresses sizes."""
    try:
        from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod
    except ImportError as error:
        raise unsupported_torch("torch.utils._sympy", f"lacks a function ({error})") from error
    return SizeFunctions(FloorDiv, (Mod, PythonMod))


def grouped_product_output(a: Tensor, b: Tensor, offsets: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """An empty output of `torch.ops.aten._grouped_mm` in the layout of its meta kernel."""
    try:
        from torch._meta_registrations import _create_grouped_mm_output_tensor
    except ImportError as error:
        raise unsupported_torch("torch._meta_registrations", f"lacks a function ({error})") from error
    return _create_grouped_mm_output_tensor(a, b, offsets, dtype)


def is_dynamo_imported() -> bool:
    """Whether dynamo is imported, without which nothing is compiled."""
    return "torch._dynamo" in sys.modules


def is_compiled_function(function: Any) -> bool:
    """Whether a value is a function or method that torch.compile returned, not one that torch.compiler.disable did."""
    if not isinstance(function, FunctionType | MethodType):  # other objects may run code when they are asked
        return False
    is_disabled = getattr(function, "_torchdynamo_disable", False)
    return getattr(function, "_torchdynamo_orig_callable", None) is not None and not is_disabled


def count_compiled_graphs() -> int:
    """Count the graphs that dynamo has compiled in this process; it must have been imported."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
