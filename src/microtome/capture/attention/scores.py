"""Identify attention scores: results of elementwise operators, copies and masks on a batched matrix product."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from microtome.engine import Call
from microtome.engine.probes import AnyOp
from microtome.engine.torch_internals import OpOverload, schema_of, storage_id


class Role(Enum):
    """The effect of an operator on scores."""

    PRODUCT = auto()  # creates scores
    MIX = auto()  # mixes heads, if it multiplies scores by a parameter
    COPY = auto()
    PASS = auto()
    SOFTMAX = auto()
    FUSED = auto()  # computes attention without exposing scores
    NONE = auto()


class ScoreKind(Enum):
    SCORES = auto()
    WEIGHTS = auto()  # after the softmax
    PARAMETER = auto()  # of the model; or a buffer


class Origin(NamedTuple):
    """The origin of the values in a storage.

    Attributes:
        call: The call that computed the product.
        keys: The length of the product's rows.
        mixed: Whether a parameter has multiplied it since, as in talking-heads attention.
        memory: A weak reference, which prevents reuse of the storage's address.
    """

    kind: ScoreKind
    call: Call | None = None
    keys: int = 0
    mixed: bool = False
    memory: StorageWeakRef | None = None

    def are_scores(self, shape: torch.Size) -> bool:
        """Return whether a softmax over the last dimension of this shape gives weights, not a classifier's output."""
        return self.kind is ScoreKind.SCORES and len(shape) > 2 and (not self.mixed or self.keys == shape[-1])


_ROLES = {
    Role.PRODUCT: "bmm baddbmm",
    Role.MIX: "mm addmm convolution",
    Role.COPY: "_to_copy clone",
    Role.SOFTMAX: "_softmax _safe_softmax",
    Role.PASS: "copy copy_ masked_fill_ masked_scatter masked_scatter_ cat stack constant_pad_nd tril tril_ triu triu_ "
    "index index_select index_put index_put_ gather scatter scatter_ slice_scatter select_scatter repeat roll flip "
    "native_dropout",
}
_BY_NAME = {f"aten::{name}": role for role, names in _ROLES.items() for name in names.split()}
_roles: dict[Any, Role] = {}


def role_of(func: AnyOp) -> Role:
    role = _roles.get(func)
    if role is None:
        role = _roles[func] = _find_role(func)
    return role


def _find_role(func: AnyOp) -> Role:
    name = schema_of(func).name if isinstance(func, OpOverload) else str(func)
    if name in _BY_NAME:
        return _BY_NAME[name]
    if isinstance(func, OpOverload) and torch.Tag.pointwise in func.tags:
        return Role.PASS
    return Role.FUSED if "attention" in name or "attn" in name else Role.NONE


class Origins:
    """The origins of the storages of one run; views share that of their base."""

    def __init__(self) -> None:
        self._by_address: dict[int, Origin] = {}
        self._parameters: set[int] = set()

    def begin(self, root: torch.nn.Module | None) -> None:
        """Clear the origins of the run before, and collect the parameters of the root."""
        self._by_address.clear()
        tensors = () if root is None else (*root.parameters(), *root.buffers())
        self._parameters = {address for tensor in tensors if (address := _address(tensor)) is not None}

    def of(self, tensor: Any) -> Origin | None:
        address = _address(tensor) if isinstance(tensor, Tensor) else None
        if address is None:
            return None
        return self._by_address.get(address) or (_PARAMETER if address in self._parameters else None)

    def mark(self, tensor: Tensor, origin: Origin) -> None:
        address = _address(tensor)
        if address is not None:
            self._by_address[address] = origin._replace(memory=StorageWeakRef(tensor.untyped_storage()))

    def propagate(self, role: Role, call: Call, args: tuple[Any, ...], output: Any) -> None:
        """Mark the output of an operator with the origin of its arguments."""
        output = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(output, Tensor):
            return
        if role in (Role.PRODUCT, Role.MIX):
            origin = self._of_product(role, call, args, output)
        else:
            origins = [origin for tensor in _tensors(args) if (origin := self.of(tensor)) is not None]
            origin = next((one for one in origins if one.kind is ScoreKind.SCORES), None)
            origin = origin or next((one for one in origins if one.kind is ScoreKind.WEIGHTS), None)
            origin = origin or (origins[0] if origins and role is Role.COPY else None)
        if origin is not None:
            self.mark(output, origin)

    def _of_product(self, role: Role, call: Call, args: tuple[Any, ...], output: Tensor) -> Origin | None:
        """Return the origin of a product: scores, unless the second factor is a parameter, which may mix their heads.

        Weights times values are not scores.
        """
        factors = [tensor for tensor in args if isinstance(tensor, Tensor)]
        factors = factors[:2] if role is Role.MIX and len(args) > 3 else factors[-2:]  # a convolution's bias is last
        first, second = map(self.of, factors)
        if second is not None and second.kind is ScoreKind.PARAMETER:
            return first._replace(mixed=True) if first is not None and first.kind is ScoreKind.SCORES else None
        if role is Role.MIX or any(
            factor is not None and factor.kind is ScoreKind.WEIGHTS for factor in (first, second)
        ):
            return None
        return Origin(ScoreKind.SCORES, call, output.shape[-1])


_PARAMETER = Origin(ScoreKind.PARAMETER)


def _tensors(args: tuple[Any, ...]) -> Iterable[Any]:
    for value in args:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _address(tensor: Tensor) -> int | None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):  # a wrapper around another tensor
        return None
