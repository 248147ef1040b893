"""The tensors of a boundary, as a tail takes them out of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from microtome.engine.arguments import as_non_leaf
from microtome.engine.torch_internals import version_of
from microtome.errors import BadBoundary, Unsupported, describe_error
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.gradients import can_require_grad, differentiable_copy
from microtome.split.boundary.schema import (
    PLACEHOLDER_DTYPES,
    ArgumentView,
    BoundaryRecord,
    PlaceholderSpec,
    SentTensor,
    StorageView,
    TensorItem,
)
from microtome.split.boundary.size_bounds import SizeBudget
from microtome.split.boundary.tensor_bytes import duplicate, is_on, moved
from microtome.split.cuts.crossing import ValueLocation
from microtome.split.execution.placeholder import Placeholder, unwrap
from microtome.split.execution.schedule import Schedule


class ReceivedTensors:
    """Restores tensors from a boundary: those that were sent, views of them, and placeholders for the others.

    Args:
        device: The device to move tensors to; None: they stay.
        release: Drop each tensor from the boundary after its last use.
        grad: Let gradients flow to the tensors of the boundary. Those without a graph, such as deserialized ones,
            become leaves that require a gradient.
    """

    def __init__(
        self,
        schedule: Schedule,
        boundary: Boundary,
        record: BoundaryRecord,
        device: torch.device | None,
        *,
        release: bool,
        grad: bool = False,
    ) -> None:
        self._grad = grad
        self._tensors = boundary.tensors
        self._device = device
        self._written = schedule.written
        self._overlapping = frozenset(record.overlapping)
        self._requires_grad = frozenset(record.requires_grad)
        self._budget = SizeBudget(boundary, schedule.example)
        self.is_limited = boundary.spare_bytes is not None
        self._remaining_uses = _count(record.sent_names()) if release else None
        self._restored: dict[str, Tensor] = {}
        self._unmodified: list[tuple[str, Tensor, int]] = []

    def restore(self, item: TensorItem, owner: str, location: ValueLocation | None) -> Tensor:
        """The tensor that an item describes.

        Args:
            owner: The call or operator that returned it, for messages.
            location: Where the value is located in a run.
        """
        if isinstance(item, SentTensor):
            return self._take(item.name, location)
        if isinstance(item, StorageView):
            storage = self._take(item.name, location)
            self._budget.charge(owner, item.shape, item.strides, storage.dtype)
            return _as_strided(storage, item, item.offset, owner)
        return self._placeholder(item, owner, location)

    def charge(self, owner: str, spec: PlaceholderSpec) -> None:
        """Raise if the boundary states more bytes than it explains."""
        self._budget.charge(owner, spec.shape, spec.strides, PLACEHOLDER_DTYPES[spec.dtype])

    def restore_view(self, item: ArgumentView, argument: Tensor, owner: str) -> Tensor:
        """The view of an argument that a skipped call returned."""
        argument = unwrap(argument)
        self._budget.charge(owner, item.shape, item.strides, argument.dtype)
        if isinstance(argument, Placeholder):
            owner, location = argument.owner, argument.location
            return Placeholder(item.shape, item.strides, argument.dtype, argument.device, owner, location)
        if list(argument.stride()) != item.argument_strides:
            raise Unsupported(
                f"{owner!r} returns a view of an argument with strides {item.argument_strides} in the head, got "
                f"{list(argument.stride())} on this side"
            )
        return _as_strided(argument, item, int(argument.storage_offset()) + item.offset, owner)

    def array(self, name: str) -> Tensor:
        """The tensor of a numpy array, which the caller copies."""
        self._check_present(name)
        return self._tensors[name] if self._remaining_uses is None else self._tensors.pop(name)

    def expect_unmodified(self, name: str, tensor: Tensor) -> None:
        """Have `check_unmodified` raise if the tensor is written to."""
        self._unmodified.append((name, tensor, version_of(tensor)))

    def check_unmodified(self) -> None:
        """Raise if the tail wrote to a tensor that shares memory which it does not share in the whole model."""
        for name, tensor, version in self._unmodified:
            if version_of(tensor) != version:
                raise Unsupported(
                    f"{name!r} or its argument was modified in place after the cut, and not on the example. Split the "
                    "model on an example where it is"
                )

    def _take(self, name: str, location: ValueLocation | None) -> Tensor:
        if name not in self._restored:
            self._restored[name] = self._prepare(name, is_written=location in self._written)
        tensor = self._restored[name]
        if self._remaining_uses is not None:
            self._remaining_uses[name] -= 1
            if not self._remaining_uses[name]:
                del self._restored[name], self._tensors[name]
        return tensor

    def _prepare(self, name: str, *, is_written: bool) -> Tensor:
        """The tensor on this device; a copy if the model writes to it, as the boundary may be used again."""
        self._check_present(name)
        sent = self._tensors[name]
        if is_written and name in self._overlapping:
            raise Unsupported(
                f"expected {name!r} to have memory of its own, got a tensor that overlaps another in memory, and the "
                "model modifies it in place. Pass tensors that do not overlap, or split the model on an example where "
                "they overlap"
            )
        if self._grad and name in self._requires_grad and can_require_grad(sent):
            return self._prepare_differentiable(name, sent, is_written=is_written)
        tensor = sent if self._device is None else moved(sent, self._device)
        if tensor is sent and (is_written or (sent.is_inference() and not torch.is_inference_mode_enabled())):
            tensor = duplicate(tensor)
        if name in self._requires_grad:
            tensor = _require_grad(tensor)
        if not is_written and (self._remaining_uses is None or name in self._overlapping):
            self.expect_unmodified(name, tensor)
        return tensor

    def _prepare_differentiable(self, name: str, sent: Tensor, *, is_written: bool) -> Tensor:
        """The tensor on this device, through which gradients flow to the boundary's."""
        if not sent.requires_grad:
            sent.requires_grad_()
        tensor = sent
        if is_written or not is_on(sent, self._device):
            tensor = differentiable_copy(sent, self._device)
        if not is_written and (self._remaining_uses is None or name in self._overlapping):
            self.expect_unmodified(name, tensor)
        return tensor

    def _check_present(self, name: str) -> None:
        if name not in self._tensors:
            raise BadBoundary(f"the boundary lacks tensor {name!r}: send it again")

    def _placeholder(self, spec: PlaceholderSpec, owner: str, location: ValueLocation | None) -> Tensor:
        dtype = PLACEHOLDER_DTYPES[spec.dtype]
        self._budget.charge(owner, spec.shape, spec.strides, dtype)
        device = self._device or torch.device("cpu")
        try:
            placeholder = Placeholder(spec.shape, spec.strides, dtype, device, owner, location)
        except RuntimeError as error:
            raise BadBoundary(f"{owner!r}: no tensor has shape {spec.shape!r:.80}: {describe_error(error)}") from error
        return _require_grad(placeholder) if spec.requires_grad else placeholder


def _count(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:  # few: a `Counter` takes longer to make
        counts[name] = counts.get(name, 0) + 1
    return counts


def _as_strided(tensor: Tensor, item: StorageView | ArgumentView, offset: int, owner: str) -> Tensor:
    try:
        return tensor.as_strided(item.shape, item.strides, offset)
    except RuntimeError as error:
        raise BadBoundary(f"{owner!r}: {item!r:.200} is out of bounds: {describe_error(error)}") from error


def _require_grad(tensor: Tensor) -> Tensor:
    """A tensor that requires a gradient, as it did in the head.

    No gradient reaches the head. But kernels are chosen by `requires_grad`, and the code of a model may read it.
    """
    return as_non_leaf(tensor.detach()) if can_require_grad(tensor) else tensor
