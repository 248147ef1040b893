"""The dispatch mode of a session, which observes every operator below autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from microtome.engine import meta_tensors
from microtome.engine.kernel_outputs import CORRECTIONS, Correction, correct_outputs
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.random_states import mark_operators_observed, record_draw
from microtome.engine.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    grouped_product_output,
    has_kernel,
    has_kernel_for_key,
)

#: Called with the context, the operator, its arguments and, after it ran, its output.
OpCallback = Callable[..., None]

#: (size, stride, dtype) of each output of an operator on meta tensors, by signature; None if they are not cacheable.
_layouts: dict[Any, tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...] | None] = {}
_MAX_LAYOUTS = 100_000
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class OpMode(TorchDispatchMode):
    """Notifies callbacks before and after each operator; composite ones are observed as their decomposition.

    On meta tensors only shapes are computed, mostly in Python, so layouts are cached by signature.

    Attributes:
        silent: Whether callbacks are not notified.
        has_run: Whether an operator ran since this was last set to False.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled code runs eagerly in a session; True would import dynamo at the first operator

    def __init__(
        self,
        where: Callable[[], Any],
        before: list[OpCallback],
        after: list[OpCallback],
        replacements: Sequence[Callable[..., Any]] = (),
    ) -> None:
        super().__init__()
        mark_operators_observed()
        self._where = where
        self._before = before
        self._after = after
        self._replacements = replacements
        self.silent = False
        self.has_run = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        info = _infos.get(id(func)) or _add_info(func)
        is_silent = self.silent
        if is_silent:
            self.has_run = True
            output = _compute(info, args, kwargs)
        elif info.category == "metadata query":
            return func(*args, **kwargs)
        elif info.category == "composite" and not _has_kernel_for_types(types, args, kwargs):
            with self:  # in inference mode it reaches us undecomposed
                return func.decompose(*args, **kwargs)
        else:
            where = self._where()
            for callback in self._before:
                callback(where, func, args, kwargs)
            output = NotImplemented
            for replacement in self._replacements:
                if output is NotImplemented:
                    output = replacement(where, func, args, kwargs)
            if output is NotImplemented:
                output = _compute(info, args, kwargs)
        if info.is_random:
            record_draw(output, (*args, *kwargs.values()))
        if not is_silent:
            for callback in self._after:
                callback(where, func, args, kwargs, output)
        return output


class _OpInfo(NamedTuple):
    """The way to run an operator; it keeps the operator alive, since it is looked up by id.

    Attributes:
        category: `"metadata query"`: returns metadata of a tensor. Torch may call it from C++ code that cannot
            propagate exceptions, so it must not raise. `"grouped product"`: `_grouped_mm`, whose meta kernel accepts
            only bfloat16, while devices accept other dtypes. `"read"`: needs values, to return them or for a shape.
            `"functional"`: returns fresh tensors, one for each in its schema. `"copy"`: `_to_copy`, which is functional
            and may copy from meta to a device. `"composite"`: torch decomposes it, unless a type of tensor has a kernel
            for it.
        is_random: Whether it draws random numbers.
        correction: Returns the layouts of its outputs on the device, where those of its meta kernel differ.
    """

    func: Any
    category: Literal["metadata query", "grouped product", "read", "functional", "copy", "composite", "other"]
    is_random: bool
    correction: Correction | None


_QUERIES = frozenset(
    f"aten::{name}"
    for name in (
        *("dim", "is_contiguous", "is_non_overlapping_and_dense", "is_strides_like_format", "numel", "size", "stride"),
        *("storage_offset", "sym_is_contiguous", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride"),
    )
)
_infos: dict[int, _OpInfo] = {}


def _add_info(func: Any) -> _OpInfo:
    is_random = isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags
    info = _infos[id(func)] = _OpInfo(func, _categorize(func), is_random, CORRECTIONS.get(str(func)))
    return info


def _categorize(func: Any) -> Any:
    if not isinstance(func, OpOverload):  # a higher-order operator, such as flex_attention
        return "other"
    if func is torch.ops.aten._grouped_mm.default:
        return "grouped product"
    if func._schema.name in _QUERIES or not has_kernel(func.name()):
        return "metadata query"
    if func._can_decompose() and has_kernel_for_key(func.name(), "CompositeImplicitAutograd"):
        return "composite"
    if func is torch.ops.aten._to_copy.default:
        return "copy"
    if not meta_tensors.READING_TAGS.isdisjoint(func.tags):
        return "read"
    schema = func._schema
    aliases = any(item.alias_info is not None for item in (*schema.arguments, *schema.returns))
    is_fresh = not aliases and bool(schema.returns) and all(str(item.type) == "Tensor" for item in schema.returns)
    return "functional" if is_fresh else "other"


def _has_kernel_for_types(types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether nested tensors or subclasses among the arguments may have a kernel for a composite operator."""
    return not all(map(_is_fake, types)) or any(tensor.is_nested for tensor in tensors_in((args, kwargs)))


def _is_fake(cls: type) -> bool:
    return cls.__name__ == "FakeTensor"  # without importing it, which is slow


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, dtype: Any = None) -> Tensor:
    """The output of `_grouped_mm` on meta or fake tensors of any dtype."""
    if a.dtype is torch.bfloat16 or a.dtype is not b.dtype or bias is not None or dtype is not None:
        return torch.ops.aten._grouped_mm.default(a, b, offs, bias, dtype)
    if (a.dim(), b.dim()) != (2, 2) and a.shape[-1] != b.shape[-2]:  # else the contracted dimension is grouped
        raise RuntimeError(f"expected matrices that can be multiplied, got {tuple(a.shape)} and {tuple(b.shape)}")
    return grouped_product_output(a, b, offs, dtype)


def _device_type(tensor: Tensor) -> str | None:
    """The type of the device that a meta or fake tensor stands for, of which "cpu" if unknown; None for a real one."""
    if not _is_fake(type(tensor)) and not tensor.is_meta:
        return None
    simulated = meta_tensors.simulated_device()
    kind = simulated.type if tensor.is_meta and simulated is not None else tensor.device.type
    return "cpu" if kind == "meta" else kind


def _compute(info: _OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; in a run on meta tensors, also on the values of integers that are known."""
    func, category = info.func, info.category
    is_reader = category == "read" or category == "copy"
    output = meta_tensors.compute_read(func, args, kwargs) if is_reader else NotImplemented
    if output is NotImplemented:
        output = _run_cached(info, args, kwargs)
        if info.correction is not None and (device_type := _device_type(args[0])) is not None:
            output = correct_outputs(info.correction, args, output, device_type)
        last = output if output.__class__ is Tensor else output[-1] if output.__class__ is tuple and output else None
        if last.__class__ is Tensor and last.is_meta and last.dtype in meta_tensors.INTEGER_DTYPES:
            meta_tensors.propagate(func, args, kwargs, output)
    return output


def _run_cached(info: _OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; on meta tensors, return outputs with the cached layouts for its signature."""
    func, category = info.func, info.category
    first = args[0] if args else None
    if first.__class__ is list and first:
        first = first[0]
    if category == "grouped product" and isinstance(first, Tensor) and (first.is_meta or _is_fake(type(first))):
        return _grouped_product(*args, **kwargs)
    is_functional = category == "functional" or category == "copy"
    if not is_functional or not isinstance(first, Tensor) or not first.is_meta:
        return func(*args, **kwargs)
    tensors: list[Tensor] = []
    try:
        key = (func, torch.get_default_dtype(), signature(args, tensors), signature(tuple(kwargs.items()), tensors))
        is_plain = all(tensor.is_meta and type(tensor) in _PLAIN for tensor in tensors)
        layouts = _layouts.get(key, ()) if tensors and is_plain else None
    except TypeError:  # an argument that is unhashable
        layouts = None
    if layouts is None:
        return func(*args, **kwargs)
    if not layouts:
        if len(_layouts) >= _MAX_LAYOUTS:
            _layouts.clear()
        # Not on the tensors themselves: computing shapes leaves reference cycles, which would keep them alive.
        copies: list[Tensor] = []
        copied_args, copied_kwargs = map_tensors(partial(_copy_metadata, copies), (args, kwargs))
        layouts = _layouts[key] = _fresh_layouts(func(*copied_args, **copied_kwargs), copies)
        if layouts is None:
            return func(*args, **kwargs)
    outputs = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in layouts]
    return outputs[0] if len(func._schema.returns) == 1 else tuple(outputs)


def signature(value: Any, tensors: list[Tensor]) -> Any:
    """A key of the arguments that shapes depend on; append tensors to the list. TypeError if there is none."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([signature(item, tensors) for item in value])
    if isinstance(value, torch.Generator) or value != value:  # NaN is not equal to itself
        raise TypeError
    return type(value), value


def _copy_metadata(copies: list[Tensor], tensor: Tensor) -> Tensor:
    copies.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
    return copies[-1]


def _fresh_layouts(output: Any, inputs: list[Tensor]) -> Any:
    """The layouts of the outputs; None unless all are fresh meta tensors."""
    outputs = output if isinstance(output, tuple | list) else (output,)
    storages = {id(tensor.untyped_storage()) for tensor in inputs}
    for tensor in outputs:
        is_fresh = type(tensor) is Tensor and tensor.is_meta and id(tensor.untyped_storage()) not in storages
        if not is_fresh or tensor.storage_offset():
            return None
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in outputs)
