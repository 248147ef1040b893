"""Every operator that runs, shown to a session's probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microtome.engine import meta_tensors
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.random_states import mark_operators_observed, record_draw
from microtome.engine.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    grouped_product_output,
    has_kernel,
    has_kernel_for_key,
)

#: Takes where it runs, the operator, its arguments and, when it ran, its output.
OpCallback = Callable[..., None]

#: What an operator on meta tensors gave, by its signature: (size, stride, dtype) of each output. For all sessions.
_memo: dict[Any, tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...] | None] = {}
_MEMO_LIMIT = 100_000


class OpMode(TorchDispatchMode):
    """Tells of each operator before and after it ran. Operators that torch composes of others are seen as those others.

    On meta tensors nothing is computed but shapes, and that mostly in Python: what an operator gave for the same
    signature is remembered.

    Attributes:
        silent: Whether nothing is told now.
        has_run: Whether an operator ran since this was last set to False.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # compiled code runs as Python in a session; skipping would import the compiler at the first operator
        )

    def __init__(
        self,
        where: Callable[[], Any],
        begins: list[OpCallback],
        ends: list[OpCallback],
        replaces: Sequence[Callable[..., Any]] = (),
    ) -> None:
        super().__init__()
        mark_operators_observed()
        self._where = where
        self._begins = begins
        self._ends = ends
        self._replaces = replaces
        self.silent = False
        self.has_run = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kinds.get(id(func)) or _kind_of(func)
        if self.silent:
            self.has_run = True
            output = _compute(kind, func, args, kwargs)
            if kind.is_random:
                record_draw(output, (*args, *kwargs.values()))
            return output
        if kind is _METADATA_QUERY:
            return func(*args, **kwargs)
        if kind.__class__ is _Composite and not _has_kernels_of_its_own(types, args, kwargs):
            with self:  # it reaches us whole in inference mode
                return func.decompose(*args, **kwargs)
        where = self._where()
        for callback in self._begins:
            callback(where, func, args, kwargs)
        output = NotImplemented
        for replace in self._replaces:
            if output is NotImplemented:
                output = replace(where, func, args, kwargs)
        if output is NotImplemented:
            output = _compute(kind, func, args, kwargs)
        if kind.is_random:
            record_draw(output, (*args, *kwargs.values()))
        for callback in self._ends:
            callback(where, func, args, kwargs, output)
        return output


class _OpKind:
    """The way to run an operator. It holds the operator, since kinds are found by its identity.

    Attributes:
        is_random: Whether it draws random numbers.
    """

    __slots__ = ("func", "is_random")

    def __init__(self, func: Any = None) -> None:
        self.func = func
        self.is_random = isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags


class _GroupedProduct(_OpKind):
    """`_grouped_mm`, whose kernel for meta tensors takes bfloat16 alone, while those of devices take other dtypes."""

    __slots__ = ()


class _ReadOp(_OpKind):
    """One that needs values: it gives them to Python, or a shape that depends on them."""

    __slots__ = ()


class _Functional(_OpKind):
    """One whose outputs are fresh tensors, one for each that the schema names."""

    __slots__ = ()


class _Copy(_Functional):
    """One that may take values off meta: `_to_copy`."""

    __slots__ = ()


class _Composite(_OpKind):
    """One that torch makes of others, unless a kind of tensor has a kernel of its own for it."""

    __slots__ = ()


#: Asks a tensor for its metadata. Torch may ask in the middle of C++ code that cannot pass an exception on, so running
#: one must not raise: the process would abort.
_METADATA_QUERY = _OpKind()
_QUERIES = frozenset(
    f"aten::{name}"
    for name in (
        *("dim", "is_contiguous", "is_non_overlapping_and_dense", "is_strides_like_format", "numel", "size", "stride"),
        *("storage_offset", "sym_is_contiguous", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride"),
    )
)
_kinds: dict[int, _OpKind] = {}


_READERS = (_ReadOp, _Copy)


def _kind_of(func: Any) -> _OpKind:
    kind = _kinds[id(func)] = _find_kind(func)
    return kind


def _find_kind(func: Any) -> _OpKind:
    if not isinstance(func, OpOverload):  # an operator on functions, such as flex_attention
        return _OpKind(func)
    if func is torch.ops.aten._grouped_mm.default:
        return _GroupedProduct(func)
    if func._schema.name in _QUERIES or not has_kernel(func.name()):
        return _METADATA_QUERY
    composed = "CompositeImplicitAutograd"
    if func._can_decompose() and has_kernel_for_key(func.name(), composed):
        return _Composite(func)
    if func is torch.ops.aten._to_copy.default:
        return _Copy(func)
    if not meta_tensors.READING_TAGS.isdisjoint(func.tags):
        return _ReadOp(func)
    schema = func._schema
    aliases = any(item.alias_info is not None for item in (*schema.arguments, *schema.returns))
    fresh = not aliases and bool(schema.returns) and all(str(item.type) == "Tensor" for item in schema.returns)
    return _Functional(func) if fresh else _OpKind(func)


def _has_kernels_of_its_own(types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a composite operator on these arguments is not made of others: nested tensors and subclasses decide."""
    if not all(map(_is_fake, types)):
        return True
    return any(tensor.is_nested for tensor in tensors_in((args, kwargs)))


def _is_fake(cls: type) -> bool:
    return cls.__name__ == "FakeTensor"  # slow to import, seldom needed


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, dtype: Any = None) -> Tensor:
    """An output of `_grouped_mm` without values, as torch's kernel for meta tensors makes it, for any dtype."""
    if a.dtype is torch.bfloat16 or a.dtype is not b.dtype or bias is not None or dtype is not None:
        return torch.ops.aten._grouped_mm.default(a, b, offs, bias, dtype)
    if (a.dim(), b.dim()) != (2, 2) and a.shape[-1] != b.shape[-2]:  # else the groups are of the contracted dimension
        raise RuntimeError(f"expected matrices that can be multiplied, got {tuple(a.shape)} and {tuple(b.shape)}")
    return grouped_product_output(a, b, offs, dtype)


def _compute(kind: _OpKind, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; in a run on meta tensors, also on the values of integers that are known."""
    output = meta_tensors.compute_read(func, args, kwargs) if kind.__class__ in _READERS else NotImplemented
    if output is NotImplemented:
        output = _run_memoized(kind, func, args, kwargs)
        made = output if output.__class__ is Tensor else output[-1] if output.__class__ is tuple and output else None
        if made.__class__ is Tensor and made.is_meta and made.dtype in meta_tensors.INTEGER_DTYPES:
            meta_tensors.propagate(func, args, kwargs, output)
    return output


def _run_memoized(kind: _OpKind, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; on meta tensors, give what it gave for the same signature."""
    first = args[0] if args else None
    if first.__class__ is list and first:
        first = first[0]
    if kind.__class__ is _GroupedProduct and isinstance(first, Tensor) and (first.is_meta or _is_fake(type(first))):
        return _grouped_product(*args, **kwargs)
    if not isinstance(kind, _Functional) or not isinstance(first, Tensor) or not first.is_meta:
        return func(*args, **kwargs)
    tensors: list[Tensor] = []
    try:
        key = (
            func,
            torch.get_default_dtype(),
            signature(args, tensors),
            signature(tuple(kwargs.items()), tensors),
        )
        plain = all(tensor.is_meta and type(tensor) in _PLAIN for tensor in tensors)
        known = _memo.get(key, ()) if tensors and plain else None
    except TypeError:  # an argument that cannot be a key
        known = None
    if known is None:
        return func(*args, **kwargs)
    if not known:
        if len(_memo) >= _MEMO_LIMIT:
            _memo.clear()
        # Not on the tensors themselves: what computes shapes leaves cycles behind, which would keep them alive.
        shadows: list[Tensor] = []
        shadowed = map_tensors(partial(_shadow, shadows), (args, kwargs))
        known = _memo[key] = _layout(func(*shadowed[0], **shadowed[1]), shadows)
        if known is None:
            return func(*args, **kwargs)
    made = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in known]
    return made[0] if len(func._schema.returns) == 1 else tuple(made)


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def signature(value: Any, tensors: list[Tensor]) -> Any:
    """Collect the arguments that shapes depend on, tensors into the list; raise TypeError for others."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([signature(item, tensors) for item in value])
    if isinstance(value, torch.Generator) or value != value:  # not a number is not equal to itself
        raise TypeError
    return type(value), value


def _shadow(shadows: list[Tensor], tensor: Tensor) -> Tensor:
    shadows.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
    return shadows[-1]


def _layout(output: Any, inputs: list[Tensor]) -> Any:
    """Describe how to make the output again; None where it is not a fresh meta tensor."""
    outputs = output if isinstance(output, tuple | list) else (output,)
    memory = {id(tensor.untyped_storage()) for tensor in inputs}
    for tensor in outputs:
        fresh = type(tensor) is Tensor and tensor.is_meta and id(tensor.untyped_storage()) not in memory
        if not fresh or tensor.storage_offset():
            return None
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in outputs)
