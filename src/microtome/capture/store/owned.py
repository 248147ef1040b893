"""What the stores ask of tensors and of their own arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from microtome.errors import BadQuery


def owned(tensor: Tensor) -> Tensor:
    """The tensor with its values in order, in memory that holds nothing else; copied only where it is not so."""
    if tensor.layout is not torch.strided:
        raise BadQuery(f"a tensor of layout {tensor.layout} cannot be kept; make it dense first: .to_dense()")
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A view pins all that it is a view of.
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def check_limits(keep: str, **limits: int | None) -> None:
    if keep not in ("all", "stats"):
        raise BadQuery(f"keep is 'all' or 'stats', not {keep!r}")
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise BadQuery(f"{name} is {limit}; it must be at least 1, or None for no limit")
