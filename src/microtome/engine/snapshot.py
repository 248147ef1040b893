"""Keep the state that a model holds, and restore it around runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.engine.container_state import CONTAINERS, copy_container, restore_containers
from microtome.engine.pytree import dict_of
from microtome.engine.signals import uninterrupted


class _Kept(NamedTuple):
    """A tensor as it was: another tensor in its memory, a copy of its values, and its gradient."""

    tensor: Tensor
    alias: Tensor
    values: Tensor | None
    grad: Tensor | None


class Snapshot:
    """The state that the modules of a model hold: attributes, containers and objects with their items, and tensors.

    Values of parameters are kept by name only, where a run is known to write into them: they take the most memory.
    """

    def __init__(self, model: nn.Module, written: Collection[str] = ()) -> None:
        wanted = {id(parameter) for name, parameter in model.named_parameters() if name in written}
        self._holders: list[tuple[Any, Any]] = []
        self._tensors: list[_Kept] = []
        modules = list(model.modules())
        classes = {cls for module in modules for cls in type(module).__mro__}
        self._classes = [(cls, dict(vars(cls))) for cls in classes if not cls.__module__.startswith(_TORCHS)]
        pending: list[Any] = [vars(module) for module in modules]
        seen: set[int] = set()
        while pending:
            item = pending.pop()
            if isinstance(item, _ATOMS) or id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, Tensor):
                self._keep(item, copies=not isinstance(item, nn.Parameter) or id(item) in wanted)
            elif isinstance(item, CONTAINERS):
                before = copy_container(item)
                self._holders.append((item, before))
                pending += before.values() if isinstance(before, dict) else before
            elif isinstance(item, tuple):
                pending += item
            elif isinstance(item, nn.Module) or is_dataclass(item):
                pending.append(dict_of(item))

    def _keep(self, tensor: Tensor, *, copies: bool) -> None:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            return
        values = tensor.detach().clone() if copies else None
        grad = tensor.grad if tensor.is_leaf else None
        self._tensors.append(_Kept(tensor, tensor.detach(), values, grad))

    def restore(self) -> None:
        """Have the model hold what it held; again, if it was interrupted."""
        restore_containers(self._holders)
        for cls, attributes in self._classes:
            for name, value in list(vars(cls).items()):
                if name not in attributes:
                    delattr(cls, name)
                elif value is not attributes[name]:
                    setattr(cls, name, attributes[name])
        for kept in self._tensors:
            _restore_tensor(kept)


def _restore_tensor(kept: _Kept) -> None:
    tensor = kept.tensor
    if tensor.data_ptr() != kept.alias.data_ptr():  # another was set as its `data`
        tensor.data = kept.alias
    if kept.values is not None and not torch.equal(tensor, kept.values):  # batch norms write without torch counting it
        with torch.inference_mode(tensor.is_inference()):
            tensor.detach().copy_(kept.values)
    if tensor.is_leaf and tensor.grad is not kept.grad:
        tensor.grad = kept.grad


@uninterrupted
def restored(model: nn.Module, written: Collection[str] = ()) -> Iterator[Snapshot]:
    """Have the model hold after the block what it held before, also if the block raises."""
    snapshot = Snapshot(model, written)
    try:
        yield snapshot
    finally:
        snapshot.restore()


_ATOMS = (str, int, float, bool, type(None), type)
_TORCHS = ("torch.", "builtins")
