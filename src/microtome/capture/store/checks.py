"""What the stores ask of tensors and of their own arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from microtome.engine.torch_internals import storage_id
from microtome.errors import BadQuery

#: What a tensor takes in memory beside its values: itself, its storage, its place in a store. About 820 bytes were
#: measured, whatever its shape; without these, millions of scalars would take hundreds of times the limit.
BESIDE_BYTES = 1024


def cost(tensor: Tensor) -> int:
    """What keeping a tensor takes in memory."""
    return tensor.nbytes + BESIDE_BYTES


def in_order(tensor: Tensor) -> Tensor:
    """The tensor with its values in order; the same memory where they are so already."""
    if tensor.layout is not torch.strided:
        raise BadQuery(f"a tensor of layout {tensor.layout} cannot be kept; make it dense first: .to_dense()")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def is_lent(ordered: Tensor, tensor: Tensor, *, borrowed: bool) -> bool:
    """Whether memory of `in_order(tensor)` is somebody else's, or pins more than it is: a view's."""
    if ordered.untyped_storage().nbytes() > ordered.nbytes:
        return True
    return borrowed and storage_id(ordered) == storage_id(tensor)


def owned(tensor: Tensor, *, borrowed: bool = False) -> Tensor:
    """The tensor with its values in order, in memory that holds nothing else; copied only where it is not so."""
    ordered = in_order(tensor)
    return ordered.clone() if is_lent(ordered, tensor, borrowed=borrowed) else ordered


def check_limits(keep: str, **limits: int | None) -> None:
    if keep not in ("all", "stats"):
        raise BadQuery(f"keep is 'all' or 'stats', not {keep!r}")
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise BadQuery(f"{name} is {limit}; it must be at least 1, or None for no limit")
