"""Retain captured values: detach, clone, move and transform them, and copy those that are mutated later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from microtome.engine import Probe
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.torch_internals import count_references, storage_id
from microtome.errors import BadQuery, describe_error
from microtome.trace.op_schema import op_schema

Clone = Literal["auto"] | bool


def check_device(device: torch.device | str | None) -> None:
    """Raise if tensors cannot be moved to this device."""
    try:
        if device is not None:
            torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError, ImportError) as error:  # the kind depends on the device
        raise BadQuery(f"expected a device of this machine, got {str(device)!r}: {describe_error(error)}") from error


@dataclass(frozen=True)
class Retention:
    """Options for retaining captured values.

    Attributes:
        detach: Detach them from the autograd graph.
        clone: True, False, or "auto": clone those that are mutated later or would pin more memory.
        device: Move them to this device.
        transform: Applied after detaching; its result is retained.
    """

    detach: bool = True
    clone: Clone = "auto"
    device: torch.device | str | None = None
    transform: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.clone not in ("auto", True, False):
            raise BadQuery(f"expected clone to be True, False or 'auto', got {self.clone!r}")
        if self.transform is not None and not callable(self.transform):
            raise BadQuery(f"expected transform to be a function of the output, got {self.transform!r}")
        check_device(self.device)

    def apply(self, value: Any) -> Any:
        """Return the value to retain."""
        if self.detach:
            value = map_tensors(Tensor.detach, value)
        if self.transform is not None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
                value = self.transform(value)
            if self.detach:  # it may return a tensor of the model
                value = map_tensors(Tensor.detach, value)
        return map_tensors(self._move_or_clone, value)

    def _move_or_clone(self, tensor: Tensor) -> Tensor:
        if self.device is not None and (moved := tensor.to(self.device)) is not tensor:
            return moved
        if self.clone is True or (self.clone == "auto" and (not self.detach or _must_copy(tensor))):
            return tensor.clone()
        return tensor


def _must_copy(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of a larger storage, or has none that `CopyOnWrite` can watch."""
    if not _has_storage(tensor):
        return True
    return not tensor.is_meta and tensor.untyped_storage().nbytes() > tensor.nbytes


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


class CopyOnWrite(Probe):
    """Copies captured tensors right before an operator mutates their storage.

    For tensors in the autograd graph this would be too late: they are cloned when they are captured.
    """

    def __init__(self) -> None:
        self._watched: dict[int, list[Tensor]] = {}

    def clear(self) -> None:
        """Watch no tensors any longer."""
        self._watched.clear()

    def owns_storages(self) -> bool:
        """Return whether nothing else refers to the storages of the watched tensors."""
        return all(
            count_references(tensors[0]) == len({id(tensor) for tensor in tensors})
            for tensors in self._watched.values()
        )

    def watch(self, value: Any) -> None:
        """Watch the storages of the tensors in a value."""
        for tensor in tensors_in(value):
            if _has_storage(tensor):
                self._watched.setdefault(storage_id(tensor), []).append(tensor)

    def op_begins(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._watched or not (schema := op_schema(func)).may_write:
            return
        for tensor in schema.written(args, kwargs):
            self.copy_sharing(tensor)

    def copy_sharing(self, tensor: Tensor) -> None:
        """Copy the watched tensors that share a storage with this one."""
        if not _has_storage(tensor):
            return
        for watched in self._watched.pop(storage_id(tensor), ()):
            with torch.no_grad():
                watched.set_(watched.clone())  # type: ignore[call-overload]  # the same tensor, in a new storage
