"""Gradients of the tensors of a boundary: copies that gradients flow through, and sending gradients back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from microtome.errors import BadBoundary, BadQuery
from microtome.split.boundary.tensor_bytes import copy_strided, duplicate

if TYPE_CHECKING:
    from microtome.split.boundary.boundary import Boundary

#: The facts of a boundary that holds gradients.
FACTS = {"kind": "gradients"}


def can_require_grad(tensor: Tensor) -> bool:
    """Whether a tensor may require a gradient here."""
    return (tensor.is_floating_point() or tensor.is_complex()) and torch.is_grad_enabled()


def have_same_gradient(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors with the same memory are the same value to autograd; `x` and `x.detach()` are not."""
    if one is other or not (one.requires_grad or other.requires_grad):
        return True
    return one.grad_fn is not None and one.grad_fn is other.grad_fn and one.output_nr == other.output_nr


def differentiable_copy(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Copy a tensor as `duplicate` does, so that its gradient flows through the copy."""
    copied: Tensor = _Copy.apply(tensor, device)
    return copied


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device | str | None) -> Tensor:
        ctx.device = tensor.device
        return _as_base(duplicate(tensor, device))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.device), None


def _as_base(copied: Tensor) -> Tensor:
    """The same memory in a tensor that is no view of another, which may be written to in place."""
    if copied.layout is not torch.strided or copied.is_nested or copied.is_quantized:
        return copied
    base = torch.empty(0, dtype=copied.dtype, device=copied.device)
    return base.set_(copied.untyped_storage(), copied.storage_offset(), copied.shape, copied.stride())


def gradients_of(boundary: Boundary) -> Boundary:
    """See `Boundary.gradients`."""
    gradients: dict[str, Tensor] = {}
    for name, tensor in boundary.tensors.items():
        if tensor.requires_grad and not tensor.is_leaf:
            raise BadQuery(
                f"{name!r} of the boundary at {boundary.at!r} belongs to the graph of the stage before, to which a "
                "backward of the output flows by itself: only a boundary that was deserialized collects gradients"
            )
        if tensor.grad is not None:
            gradients[name] = tensor.grad
    return type(boundary)(boundary.at, boundary.fingerprint, gradients, dict(FACTS))


def run_backward(boundary: Boundary, gradients: Boundary) -> None:
    """See `Boundary.backward`."""
    found = match_gradients(boundary, gradients)
    if found:
        tensors = [boundary.tensors[name] for name in found]
        torch.autograd.backward(tensors, list(found.values()))


def match_gradients(boundary: Boundary, gradients: Boundary) -> dict[str, Tensor]:
    """Return the gradients of a boundary's tensors, by name, on their devices.

    Raises:
        BadBoundary: They are not gradients of these tensors.
    """
    if gradients.record is not None or gradients.facts != FACTS:
        raise BadBoundary(f"expected the gradients of a boundary, from Boundary.gradients(), got {gradients!r}")
    if (gradients.at, gradients.fingerprint) != (boundary.at, boundary.fingerprint):
        raise BadBoundary(
            f"expected gradients of the boundary at {boundary.at!r} of {boundary.fingerprint}, got those at "
            f"{gradients.at!r} of {gradients.fingerprint}"
        )
    found: dict[str, Tensor] = {}
    for name, grad in gradients.tensors.items():
        tensor = boundary.tensors.get(name)
        if tensor is None or not tensor.requires_grad:
            raise BadBoundary(
                f"got a gradient of {name!r}, which requires none in this boundary: split with grad=True, and run the "
                "head with gradients enabled"
            )
        if (tensor.shape, tensor.dtype) != (grad.shape, grad.dtype):
            raise BadBoundary(
                f"expected a gradient of {name!r} with {tensor.dtype} and shape {tuple(tensor.shape)}, got "
                f"{grad.dtype} and {tuple(grad.shape)}"
            )
        found[name] = grad.to(tensor.device)
    return found


def restride(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The values of a received tensor with these strides; its gradient is contiguous, as it is sent."""
    restrided: Tensor = _Restride.apply(tensor, strides)
    return restrided


class _Restride(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        return tensor.view_as(tensor) if tensor.stride() == strides else _as_base(copy_strided(tensor, strides))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].contiguous(), None
