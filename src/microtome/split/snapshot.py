"""What a model holds, kept and put back around runs of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.engine.interrupts import uninterrupted
from microtome.engine.structure import dict_of


class _Kept(NamedTuple):
    """A tensor as it was: another tensor in its memory, a copy of its values, and its gradient."""

    tensor: Tensor
    alias: Tensor
    values: Tensor | None
    grad: Tensor | None


class Snapshot:
    """What the modules of a model hold: attributes, what lies in their containers and objects, and tensors.

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
            elif isinstance(item, dict | list | set | deque):
                self._holders.append((item, item.copy()))
                pending += item.values() if isinstance(item, dict) else item
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
        for holder, before in self._holders:
            if isinstance(holder, dict):
                _restore_dict(holder, before)
            elif isinstance(holder, set):
                holder.difference_update(holder - before)
                holder.update(before - holder)  # all of it would change the order of what is there
            elif len(holder) != len(before) or any(one is not other for one, other in zip(holder, before, strict=True)):
                holder.clear()
                holder.extend(before)
        for cls, attributes in self._classes:
            for name, value in list(vars(cls).items()):
                if name not in attributes:
                    delattr(cls, name)
                elif value is not attributes[name]:
                    setattr(cls, name, attributes[name])
        for kept in self._tensors:
            _restore_tensor(kept)


def _restore_dict(holder: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in [key for key in holder if key not in before]:
        del holder[key]
    for key, value in before.items():
        if key not in holder or holder[key] is not value:
            holder[key] = value
    if list(holder) != list(before):  # in the order in which they were
        for key, value in before.items():
            del holder[key]
            holder[key] = value


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
