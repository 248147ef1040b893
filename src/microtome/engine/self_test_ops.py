"""Checks of torch's operators, modes and tensors; see `self_test.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from microtome.engine import torch_internals as internals
from microtome.engine.function_mode import FunctionMode
from microtome.engine.op_mode import OpMode

# -- operators and modes -----------------------------------------------------------------------------------------------


def _op_mode(observed: list[str]) -> OpMode:
    return OpMode(lambda: None, [], [lambda _, func, *__: observed.append(internals.schema_of(func).name)])


def observes_operators() -> bool:
    observed: list[str] = []
    x = torch.ones(1)
    with _op_mode(observed):
        x.mul(2)
    x.mul(2)
    return observed == ["aten::mul"]


def hides_operators() -> bool:
    observed: list[str] = []
    x = torch.ones(1)
    with _op_mode(observed), internals.disable_current_modes():
        x.mul(2)
    return not observed and not internals.dispatch_modes()


def stacks_dispatch_modes() -> bool:
    mode = _op_mode([])
    internals.push_dispatch_mode(mode)
    during = internals.dispatch_modes()
    internals.pop_dispatch_mode(mode)
    return during == [mode] and internals.dispatch_modes() == []


def counts_dispatch_modes() -> bool:
    with _op_mode([]):
        during = internals.count_dispatch_modes()
    return (during, internals.count_dispatch_modes()) == (1, 0)


def counts_references() -> bool:
    x = torch.ones(1)
    alone = internals.count_references(x)
    alias = x.detach()
    return (alone, internals.count_references(x), internals.count_references(alias)) == (1, 2, 2)


def _function_mode(observed: list[Any], reads: list[Tensor]) -> FunctionMode:
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        observed.append(func)
        return func(*args, **kwargs)

    return FunctionMode([nn.functional.softmax], run, reads.append)


def stacks_function_modes() -> bool:
    mode = _function_mode([], [])
    internals.push_function_mode(mode)
    during = internals.function_modes()
    internals.pop_function_mode()
    return during == [mode] and internals.function_modes() == []


def hides_functions() -> bool:
    observed: list[Any] = []
    x = torch.ones(1)
    with _function_mode(observed, []):
        nn.functional.softmax(x, 0)
        enabled = internals.is_torch_function_enabled()
        with internals.DisableTorchFunction():
            nn.functional.softmax(x, 0)
            disabled = not internals.is_torch_function_enabled()
    return len(observed) == 1 and enabled and disabled


def observes_reads() -> bool:
    reads: list[Tensor] = []
    x, lengths = torch.ones(1, 1, 1), torch.tensor([1])
    with _function_mode([], reads):
        pack_padded_sequence(x, lengths)
    return len(reads) == 1


def detects_autocast() -> bool:
    before = internals.is_autocast_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return internals.is_autocast_enabled() and not before


def finds_kernels() -> bool:
    composite = "CompositeImplicitAutograd"
    matmul: Any = torch.ops.aten.matmul.default
    has, has_for_key = internals.has_kernel, internals.has_kernel_for_key
    return (
        has("aten::mm")
        and has_for_key("aten::matmul", composite)
        and not has_for_key("aten::mm", composite)
        and bool(matmul._can_decompose())
    )


def reads_schemas() -> bool:
    schema = internals.schema_of(torch.ops.aten.add_.Tensor)
    first, second = schema.arguments[:2]
    return schema.name == "aten::add_" and first.alias_info.is_write and second.alias_info is None


def masks_whole_rows() -> bool:
    return not internals.safe_softmax(torch.full((1, 2), -torch.inf), -1).any()


# -- tensors -----------------------------------------------------------------------------------------------------------


def identifies_storages() -> bool:
    x, other = torch.ones(2), torch.ones(2)
    return internals.storage_id(x) == internals.storage_id(x[1:]) != internals.storage_id(other)


def counts_mutations() -> bool:
    x = torch.ones(2)
    before = internals.version_of(x)
    x[1:].add_(1)
    versions = internals.version_of(x), *internals.versions_of([x]), *internals.recorded_versions([x])
    return set(versions) == {before + 1}


def recognizes_views() -> bool:
    x = torch.ones(2)
    return internals.is_view(x[1:]) and not internals.is_view(x)


class _TensorWrapper(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(func)


def wraps_tensors() -> bool:
    """Check without running an operator on it: the first that a subclass handles makes torch import its compiler."""
    wrapper = internals.make_wrapper_subclass(_TensorWrapper, (3, 2), strides=(1, 3), dtype=torch.float32, device="cpu")
    return type(wrapper) is _TensorWrapper and wrapper.shape == (3, 2) and wrapper.stride() == (1, 3)


def computes_shapes() -> bool:
    """Check meta tensors, and so import the code that computes their shapes.

    Torch imports it at the first operator that needs it, and a cycle then keeps all running frames alive, with the
    tensors in them: those of the model, if it were running.
    """
    x = torch.empty(2, 3, device="meta")
    product = x.clone().add(x) @ x.t()
    return product.is_meta and product.shape == (2, 2)


def computes_fake_shapes() -> bool:
    fake_tensor, fake_mode = internals.fake_tensor_types()
    real = torch.ones(2, 3)
    with fake_mode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(real)
        product = x @ x.t()
    fake = isinstance(x, fake_tensor) and isinstance(product, fake_tensor)
    return fake and product.shape == (2, 2) and product.device.type == "cpu"
