"""Facts about an operator that do not change between its calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microtome.engine.probes import AnyOp
from microtome.engine.torch_internals import OpOverload, schema_of

_BATCH_NORMS = {
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
}


_aten = torch.ops.aten
_GATHERS = {_aten.embedding, _aten.index, _aten._unsafe_index, _aten.index_select, _aten.gather, _aten.take, _aten._embedding_bag}  # fmt: skip  # noqa: E501
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution}


class OpSchema:
    """Of one operator.

    Attributes:
        writes: The positions and names of the arguments that its schema says it writes to.
        may_write: Whether it may write to any.
        is_view: Whether it only changes the shape of its first argument, in place.
        is_gather: Whether it reads of its first argument only what it returns.
        is_product: Whether it wants one dtype for all, which meta tensors do not check.
    """

    __slots__ = ("_func", "_is_batch_norm", "is_gather", "is_product", "is_view", "may_write", "name", "writes")

    def __init__(self, func: AnyOp) -> None:
        self._func = func  # held, since facts are found by its identity
        self.name = f"aten.{func.__name__}"
        self.writes: tuple[tuple[int, str], ...] = ()
        self.is_view = self._is_batch_norm = self.is_gather = self.is_product = False
        if isinstance(func, OpOverload):
            self.name = str(func)
            self.is_view = torch.Tag.inplace_view in func.tags
            self._is_batch_norm = func in _BATCH_NORMS
            self.is_gather = func.overloadpacket in _GATHERS
            self.is_product = func.overloadpacket in _PRODUCTS
            arguments = enumerate(schema_of(func).arguments)
            self.writes = tuple((at, a.name) for at, a in arguments if a.alias_info and a.alias_info.is_write)
        self.may_write = bool(self.writes) or self._is_batch_norm

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that it writes to."""
        if self._is_batch_norm and args[5]:
            return tensors(args[3:5])  # running statistics, which the schema does not say are written in training
        given = [args[at] if at < len(args) else kwargs.get(name) for at, name in self.writes]
        return [tensor for item in given for tensor in tensors(item)]


_known: dict[int, OpSchema] = {}


def op_schema(func: AnyOp) -> OpSchema:
    schema = _known.get(id(func))
    if schema is None:
        schema = _known[id(func)] = OpSchema(func)
    return schema


def tensors(argument: Any) -> list[Tensor]:
    """A tensor, or the tensors in a list of them, which is all that operators take and give."""
    if isinstance(argument, Tensor):
        return [argument]
    return [item for item in argument if isinstance(item, Tensor)] if isinstance(argument, list | tuple) else []
