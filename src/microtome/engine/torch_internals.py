"""Every private symbol of torch that microtome relies on, under a name of ours, with what is relied on.

All other files import them from here, and tests/test_layers.py finds those that do not. `self_test.py` checks, before
the first session of a process is opened, that they still do what is said here. The names of operators
(`torch.ops.aten._to_copy`) are not meant: they are part of an operator's schema.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn, overrides

from microtome.errors import Unsupported


def unsupported_torch(symbol: str, problem: str) -> Unsupported:
    """The error for a torch in which a symbol is missing or does something else."""
    return Unsupported(
        f"torch {torch.__version__} is not supported: {symbol} {problem}, which microtome relies on. "
        "Install another version of either"
    )


try:
    from torch._C import DisableTorchFunction, _disabled_torch_function_impl
    from torch._compile import _disable_dynamo
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch.utils import _python_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

    # -- calls of modules ----------------------------------------------------------------------------------------------

    #: The functions that run a call, by whose code a frame is recognised as one. `nn.Module.__call__` is the first, and
    #: it calls the second, whose local `self` is the module.
    WRAPPED_CALL: CodeType = nn.Module._wrapped_call_impl.__code__
    CALL: CodeType = nn.Module._call_impl.__code__

    # -- autograd ------------------------------------------------------------------------------------------------------

    #: The number that the next autograd node of this thread will have: it grows by one for each node.
    next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
    #: The autograd node whose backward runs now in this thread; None: none does.
    current_node: Callable[[], Any] = torch._C._current_autograd_node
    #: The number of the backward that runs now in this thread, -1: none does. Nested ones have numbers of their own.
    current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
    #: The class of the node that adds to the gradient of a leaf, which is its `variable`.
    AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
    #: Whether torch's profiler runs in this thread.
    is_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled

    # -- operators -----------------------------------------------------------------------------------------------------

    #: Whether an operator, by its name with the overload, has any kernel; and whether it has one for a dispatch key.
    has_kernel: Callable[[str], bool] = torch._C._dispatch_has_kernel
    has_kernel_for_key: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    #: Softmax with 0 for rows in which all is -inf, as in attention.
    safe_softmax: Callable[[Tensor, int], Tensor] = torch._safe_softmax
    #: Functions that read the lengths, their second argument, without an operator.
    pack_padded_sequence: Any = torch._VF._pack_padded_sequence
    pad_packed_sequence: Any = torch._VF._pad_packed_sequence

    # -- modes ---------------------------------------------------------------------------------------------------------

    #: Whether autocast is on in this thread for any device.
    is_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
    #: Whether a tensor is a wrapper of vmap, grad or another transform of functorch.
    is_functorch_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
    #: How many dispatch modes are active in this thread.
    count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
    #: Whether `__torch_function__` of modes and subclasses is called in this thread.
    is_torch_function_enabled: Callable[[], bool] = torch._C._is_torch_function_enabled
    #: The function modes of this thread, outermost first; and what pushes and pops one.
    function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
    push_function_mode: Callable[[Any], None] = overrides._push_mode
    pop_function_mode: Callable[[], Any] = overrides._pop_mode
    #: The same of dispatch modes. One of torch's own, such as a fake mode, has a key, by which it is popped.
    dispatch_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
    push_dispatch_mode: Callable[[Any], None] = _python_dispatch._push_mode
    _pop_dispatch_mode: Callable[[Any], Any] = _python_dispatch._pop_mode
except (ImportError, AttributeError) as error:
    raise unsupported_torch("a private symbol", f"is missing ({error})") from error

#: Have a function run as Python where dynamo traces its caller, without importing dynamo.
disable_dynamo = _disable_dynamo
#: A context manager in which no dispatch mode is active.
disable_current_modes = _disable_current_modes
#: What a class sets as `__torch_function__` to be a plain tensor to all functions.
disabled_torch_function = _disabled_torch_function_impl

#: The attribute that `nn.Module.__call__` reads of `self`, and calls in place of `_call_impl` if it is not None. A data
#: descriptor on the class answers for all instances.
MODULE_CALL = "_compiled_call_impl"
#: The global of `torch.autograd` through which `Tensor.backward` and `autograd.grad` run the engine.
RUN_BACKWARD = "_engine_run_backward"

#: Attributes of torch's objects that the engine reads in place, since a function around each would cost more than what
#: it reads. Nobody else names them: the functions below are for the other folders.
ATTRIBUTES = {
    "_call_impl": "of a module: runs its hooks and its forward",
    "_parameters": "of a module: its own parameters by name; writing there replaces them, past `__setattr__`",
    "_buffers": "of a module: its own buffers by name, likewise",
    "_modules": "of a module: its children by name",
    "_forward_hooks": "of a module: by the id of the handle; a replica of DataParallel shares it with its original",
    "_forward_hooks_with_kwargs": "of a module: the ids of those that take keyword arguments",
    "_schema": "of an operator: its name, arguments and returns, with what is aliased and written to",
    "_can_decompose": "of an operator: whether torch can make it of others",
    "_sequence_nr": "of an autograd node: the number that it got from its thread's count",
    "_cdata": "of a storage: its identity, while it lives",
    "_version": "of a tensor: how often it or a view of it was written into; inference tensors have none",
    "_make_wrapper_subclass": "of `Tensor`: makes a tensor of a subclass that has a shape and no memory",
}


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict in which a module holds its own parameters."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict in which a module holds its own buffers."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict in which a module holds its children."""
    return module._modules


def schema_of(func: OpOverload) -> Any:
    """The schema of an operator: its name, arguments and returns, with what is aliased and written to."""
    return func._schema


def storage_id(tensor: Tensor) -> int:
    """The identity of the memory that a tensor lies in, while that lives."""
    return tensor.untyped_storage()._cdata


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor and its views; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def make_wrapper_subclass(cls: type[Any], like: Tensor, device: torch.device) -> Any:
    """Make a tensor of a subclass with the shape, strides and dtype of another, and no memory."""
    return Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)


def pop_dispatch_mode(mode: Any) -> None:
    """Pop the innermost dispatch mode, which this is."""
    _pop_dispatch_mode(getattr(mode, "_mode_key", None))


# -- flags of modes ----------------------------------------------------------------------------------------------------

#: One of the flags that torch keeps in C too, with the function that sets it there; older ones have neither.
_FLAG_IN_C = "_is_in_any_mode_without_ignore_compile_internals"
_set_flag_in_c = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
_FLAGS = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]


def mode_flags() -> dict[str, bool]:
    """The flags that torch sets as dispatch modes are entered and left."""
    return {name: getattr(_python_dispatch, name) for name in _FLAGS}


def set_mode_flags(flags: dict[str, bool]) -> None:
    """Set the flags that torch sets as dispatch modes are entered and left."""
    for name, value in flags.items():
        setattr(_python_dispatch, name, value)
    if _set_flag_in_c is not None:
        _set_flag_in_c(flags[_FLAG_IN_C])


# -- what is slow to import, and seldom needed -------------------------------------------------------------------------

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
    """`FakeTensor`, a tensor with a device and no values, and `FakeTensorMode`, which makes them."""
    try:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    except ImportError as error:
        raise unsupported_torch("torch._subclasses.fake_tensor", f"cannot be imported ({error})") from error
    return FakeTensor, FakeTensorMode


def grouped_product_output(a: Tensor, b: Tensor, offsets: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """An empty output of `torch.ops.aten._grouped_mm`, as its kernel for meta tensors lays it out."""
    try:
        from torch._meta_registrations import _create_grouped_mm_output_tensor
    except ImportError as error:
        raise unsupported_torch("torch._meta_registrations", f"lacks a function ({error})") from error
    return _create_grouped_mm_output_tensor(a, b, offsets, dtype)


def is_dynamo_imported() -> bool:
    """Whether anything can have been compiled in this process."""
    return "torch._dynamo" in sys.modules


def count_compiled_graphs() -> int:
    """Count the graphs that dynamo has compiled in this process; it must have been imported."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


#: What `self_test.py` does not check, and why.
UNCHECKED = {
    "ATTRIBUTES": "is a list",
    "CALL": "a frame that is not recognised is taken for one outside a call, in other threads alone",
    "FAKE_TENSOR_LOGGER": "another logger leaves a message more on the screen",
    "HigherOrderOperator": "a class, for isinstance",
    "MODULE_CALL": "is checked by what `intercept.py` does with it",
    "OPERATOR_FILES": "what is not there is not found in any stack",
    "OpOverloadPacket": "a class, for isinstance",
    "RUN_BACKWARD": "is checked by what `intercept.py` does with it",
    "WRAPPED_CALL": "where the reads are not found in its code, there is none to wait for",
    "count_compiled_graphs": "needs dynamo, which is slow to import; for a warning",
    "disable_dynamo": "needs dynamo, which is slow to import",
    "disabled_torch_function": "is the base class's own: what a subclass does with it is tested by torch",
    "grouped_product_output": "needs decompositions, which are slow to import",
    "is_dynamo_imported": "asks Python",
    "is_functorch_wrapped": "needs functorch, which is slow to import",
    "is_profiler_enabled": "needs a profiler, which is slow to start",
    "mode_flags": "flags that are not there are not restored",
    "own_buffers": "is checked as `_buffers`",
    "own_children": "is checked as `_modules`",
    "own_parameters": "is checked as `_parameters`",
    "pad_packed_sequence": "goes with `pack_padded_sequence`",
    "set_mode_flags": "flags that are not there are not restored",
    "UNCHECKED": "is a list",
}

__all__ = [
    "ATTRIBUTES",
    "CALL",
    "FAKE_TENSOR_LOGGER",
    "MODULE_CALL",
    "OPERATOR_FILES",
    "RUN_BACKWARD",
    "UNCHECKED",
    "WRAPPED_CALL",
    "AccumulateGrad",
    "DisableTorchFunction",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "count_compiled_graphs",
    "count_dispatch_modes",
    "current_graph_task",
    "current_node",
    "disable_current_modes",
    "disable_dynamo",
    "disabled_torch_function",
    "dispatch_modes",
    "fake_tensor_types",
    "function_modes",
    "grouped_product_output",
    "has_kernel",
    "has_kernel_for_key",
    "is_autocast_enabled",
    "is_dynamo_imported",
    "is_functorch_wrapped",
    "is_profiler_enabled",
    "is_torch_function_enabled",
    "make_wrapper_subclass",
    "mode_flags",
    "next_sequence_number",
    "own_buffers",
    "own_children",
    "own_parameters",
    "pack_padded_sequence",
    "pad_packed_sequence",
    "pop_dispatch_mode",
    "pop_function_mode",
    "push_dispatch_mode",
    "push_function_mode",
    "safe_softmax",
    "schema_of",
    "set_mode_flags",
    "storage_id",
    "unsupported_torch",
    "version_of",
]
