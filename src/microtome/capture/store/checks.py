"""Memory and limits of stores: copy tensors that are not theirs, and check arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from microtome.engine.torch_internals import storage_id
from microtome.errors import BadQuery

#: The memory of a tensor beside its values: the object, its storage, its entry in a store. About 820 bytes were
#: measured for any shape; without them, millions of scalars would take hundreds of times the limit.
OVERHEAD_BYTES = 1024


def memory_bytes(tensor: Tensor) -> int:
    """Return the memory that a stored tensor takes."""
    return tensor.nbytes + OVERHEAD_BYTES


def to_contiguous(tensor: Tensor) -> Tensor:
    """Return a detached contiguous tensor, which shares memory if the tensor is contiguous already."""
    if tensor.layout is not torch.strided:
        raise BadQuery(f"expected a dense tensor, got layout {tensor.layout}: convert it with .to_dense()")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def must_copy(contiguous: Tensor, tensor: Tensor, *, borrowed: bool) -> bool:
    """Return whether `to_contiguous(tensor)` shares borrowed memory, or is a view that pins a larger storage."""
    if contiguous.untyped_storage().nbytes() > contiguous.nbytes:
        return True
    return borrowed and storage_id(contiguous) == storage_id(tensor)


def own_copy(tensor: Tensor, *, borrowed: bool = False) -> Tensor:
    """Return a contiguous tensor with a storage of its own, copied only if necessary."""
    contiguous = to_contiguous(tensor)
    return contiguous.clone() if must_copy(contiguous, tensor, borrowed=borrowed) else contiguous


def check_limits(keep: str, **limits: int | None) -> None:
    if keep not in ("all", "stats"):
        raise BadQuery(f"expected keep to be 'all' or 'stats', got {keep!r}")
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise BadQuery(f"expected {name} to be at least 1, or None for no limit, got {limit}")
