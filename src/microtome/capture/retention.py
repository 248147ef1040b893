"""How what is captured is kept: cut from the graph, copied where that is needed, moved, changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from microtome.engine import Probe
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.torch_internals import storage_id
from microtome.errors import BadQuery, said
from microtome.trace.op_schema import facts_of

Clone = Literal["auto"] | bool


@dataclass(frozen=True)
class Retention:
    """What is done to a captured value.

    Attributes:
        detach: Whether it is cut from the graph.
        clone: Whether it is copied: True, False, or "auto": where it would change later or pin more memory.
        device: Where it is moved.
        transform: Applied to the value, cut from the graph or not; what it returns is kept.
    """

    detach: bool = True
    clone: Clone = "auto"
    device: torch.device | str | None = None
    transform: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.clone not in ("auto", True, False):
            raise BadQuery(f"clone is True, False or 'auto', got {self.clone!r}")
        if self.transform is not None and not callable(self.transform):
            raise BadQuery(f"transform is a function of the output, got {self.transform!r}")
        try:
            torch.device(self.device or "cpu")
        except (RuntimeError, TypeError) as error:
            raise BadQuery(f"{self.device!r} is no device: {said(error)}") from error

    def keep(self, value: Any) -> Any:
        """The value as it is to be kept."""
        if self.detach:
            value = map_tensors(Tensor.detach, value)
        if self.transform is not None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
                value = self.transform(value)
            if self.detach:  # it may give back what is the model's own
                value = map_tensors(Tensor.detach, value)
        return map_tensors(self._place, value)

    def _place(self, tensor: Tensor) -> Tensor:
        if self.device is not None and (moved := tensor.to(self.device)) is not tensor:
            return moved
        if self.clone is True or (self.clone == "auto" and (not self.detach or _must_copy(tensor))):
            return tensor.clone()
        return tensor


def _must_copy(tensor: Tensor) -> bool:
    """Whether it is a view of something larger, or `CopyOnWrite` cannot watch its memory."""
    if not _has_one_memory(tensor):
        return True
    return not tensor.is_meta and tensor.untyped_storage().nbytes() > tensor.nbytes


def _has_one_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


class CopyOnWrite(Probe):
    """Copies what was captured right before an operator would write into it.

    In the graph this would come too late: there, captured tensors are copied at once.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[Tensor]] = {}

    def hold(self, value: Any) -> None:
        """Watch over the memory of the tensors in a value."""
        for tensor in tensors_in(value):
            if _has_one_memory(tensor):
                self._held.setdefault(storage_id(tensor), []).append(tensor)

    def op_begins(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._held or not (facts := facts_of(func)).may_write:
            return
        for tensor in facts.written(args, kwargs):
            self.release(tensor)

    def release(self, tensor: Tensor) -> None:
        """Have what was captured lie elsewhere than this tensor from now on."""
        if not _has_one_memory(tensor):
            return
        for held in self._held.pop(storage_id(tensor), ()):
            with torch.no_grad():
                held.set_(held.clone())  # type: ignore[call-overload]  # the same tensor, in memory of its own
