"""Checks of what is relied on in torch's operators, modes and tensors; `self_test.py` says when they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from microtome.engine import torch_internals as internals
from microtome.engine.function_mode import FunctionMode
from microtome.engine.op_mode import OpMode

# -- operators and modes -----------------------------------------------------------------------------------------------


def _nobody(*_: Any) -> None:
    return None


def _op_mode(seen: list[str]) -> OpMode:
    return OpMode(_nobody, [], [lambda _, func, *__: seen.append(internals.schema_of(func).name)])


def sees_operators() -> bool:
    seen: list[str] = []
    x = torch.ones(1)
    with _op_mode(seen):
        x.mul(2)
    x.mul(2)
    return seen == ["aten::mul"]


def hides_operators() -> bool:
    seen: list[str] = []
    x = torch.ones(1)
    with _op_mode(seen), internals.disable_current_modes():
        x.mul(2)
    return not seen and not internals.dispatch_modes()


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


def _function_mode(seen: list[Any], reads: list[Tensor]) -> FunctionMode:
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(func)
        return func(*args, **kwargs)

    return FunctionMode([nn.functional.softmax], run, reads.append)


def stacks_function_modes() -> bool:
    mode = _function_mode([], [])
    internals.push_function_mode(mode)
    during = internals.function_modes()
    internals.pop_function_mode()
    return during == [mode] and internals.function_modes() == []


def hides_functions() -> bool:
    seen: list[Any] = []
    x = torch.ones(1)
    with _function_mode(seen, []):
        nn.functional.softmax(x, 0)
        enabled = internals.is_torch_function_enabled()
        with internals.DisableTorchFunction():
            nn.functional.softmax(x, 0)
            disabled = not internals.is_torch_function_enabled()
    return len(seen) == 1 and enabled and disabled


def sees_reads() -> bool:
    reads: list[Tensor] = []
    x, lengths = torch.ones(1, 1, 1), torch.tensor([1])
    with _function_mode([], reads):
        pack_padded_sequence(x, lengths)
    return len(reads) == 1


def knows_autocast() -> bool:
    before = internals.is_autocast_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return internals.is_autocast_enabled() and not before


def knows_kernels() -> bool:
    composed = "CompositeImplicitAutograd"
    matmul: Any = torch.ops.aten.matmul.default
    has, has_for_key = internals.has_kernel, internals.has_kernel_for_key
    return (
        has("aten::mm")
        and has_for_key("aten::matmul", composed)
        and not has_for_key("aten::mm", composed)
        and bool(matmul._can_decompose())
    )


def knows_schemas() -> bool:
    schema = internals.schema_of(torch.ops.aten.add_.Tensor)
    first, second = schema.arguments[:2]
    return schema.name == "aten::add_" and first.alias_info.is_write and second.alias_info is None


def takes_masked_rows() -> bool:
    return not internals.safe_softmax(torch.full((1, 2), -torch.inf), -1).any()


# -- tensors -----------------------------------------------------------------------------------------------------------


def knows_storages() -> bool:
    x, other = torch.ones(2), torch.ones(2)
    return internals.storage_id(x) == internals.storage_id(x[1:]) != internals.storage_id(other)


def counts_writes() -> bool:
    x = torch.ones(2)
    before = internals.version_of(x)
    x[1:].add_(1)
    return internals.version_of(x) == before + 1


class _TensorWrapper(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(func)


def wraps() -> bool:
    """Without an operator on it: the first that a subclass handles has torch import its compiler."""
    made = internals.make_wrapper_subclass(_TensorWrapper, torch.ones(2, 3).t(), torch.device("cpu"))
    return type(made) is _TensorWrapper and made.shape == (3, 2) and made.stride() == (1, 3)


def computes_shapes() -> bool:
    """This imports what computes the shapes of meta tensors.

    Torch does so at the first operator that needs it, and the frames that run then are kept by a cycle, with all
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
