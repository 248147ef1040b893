"""Properties of an operator that are the same in every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microtome.engine.probes import AnyOp
from microtome.engine.torch_internals import OpOverload, schema_of

_aten = torch.ops.aten
_BATCH_NORMS = {
    _aten.native_batch_norm.default,
    _aten.cudnn_batch_norm.default,
    _aten.miopen_batch_norm.default,
}
_GATHERS = {
    *(_aten.embedding, _aten._embedding_bag, _aten.index, _aten._unsafe_index),
    *(_aten.index_select, _aten.gather, _aten.take),
}
_GROUPED_PRODUCTS = {
    *("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"),
    "transformers::grouped_mm_fallback",
}
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution}


class OpSchema:
    """Properties of one operator.

    Attributes:
        may_write: Whether it may mutate arguments.
        is_view: Whether it only changes the shape of its first argument, in place.
        is_gather: Whether it reads only those elements of its first argument that it returns.
        is_grouped_product: Whether its second argument may be a matrix for each of several groups of rows.
        is_product: Whether it requires one dtype for all operands, which meta kernels do not check.
    """

    __slots__ = (
        "_func", "_is_batch_norm", "_writes", "is_gather", "is_grouped_product", "is_product", "is_view", "may_write",
        "name",
    )  # fmt: skip

    def __init__(self, func: AnyOp) -> None:
        self._func = func  # kept alive, since schemas are looked up by its id
        self.name = f"aten.{func.__name__}"
        self._writes: tuple[tuple[int, str], ...] = ()
        self.is_view = self._is_batch_norm = self.is_gather = self.is_grouped_product = self.is_product = False
        if isinstance(func, OpOverload):
            self.name = str(func)
            self.is_view = torch.Tag.inplace_view in func.tags
            self._is_batch_norm = func in _BATCH_NORMS
            self.is_gather = func.overloadpacket in _GATHERS
            self.is_product = func.overloadpacket in _PRODUCTS
            schema = schema_of(func)
            self.is_grouped_product = schema.name in _GROUPED_PRODUCTS
            arguments = enumerate(schema.arguments)
            self._writes = tuple((index, a.name) for index, a in arguments if a.alias_info and a.alias_info.is_write)
        self.may_write = bool(self._writes) or self._is_batch_norm

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that a call with these arguments mutates."""
        if self._is_batch_norm and args[5]:
            return tensors(args[3:5])  # running statistics, whose mutation in training the schema does not declare
        written = [args[index] if index < len(args) else kwargs.get(name) for index, name in self._writes]
        return [tensor for item in written for tensor in tensors(item)]


_schemas: dict[int, OpSchema] = {}


def op_schema(func: AnyOp) -> OpSchema:
    schema = _schemas.get(id(func))
    if schema is None:
        schema = _schemas[id(func)] = OpSchema(func)
    return schema


def tensors(argument: Any) -> list[Tensor]:
    """The tensors in an argument or output of an operator: a tensor, or a list that may contain some."""
    if isinstance(argument, Tensor):
        return [argument]
    return [item for item in argument if isinstance(item, Tensor)] if isinstance(argument, list | tuple) else []
