"""Copy tensors before a real run writes to them, and put their values back."""

from __future__ import annotations

import torch
from torch import Tensor


class WriteBackups:
    """The tensors that a real run may write to. Each is put back if it was copied before that."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[Tensor]] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._outside: dict[int, torch.UntypedStorage] = {}

    def watch(self, tensor: Tensor) -> None:
        self._by_storage.setdefault(id(tensor.untyped_storage()), []).append(tensor)

    def before_write(self, tensor: Tensor) -> None:
        """Copy what lies in the memory of this tensor, if it is watched."""
        for original in self._by_storage.pop(id(tensor.untyped_storage()), ()):
            self._copies.append((original, original.detach().to("cpu", copy=True)))  # a GPU may have no room for it

    def before_write_outside(self, tensor: Tensor) -> None:
        """Copy the whole memory of a tensor that was there before the run, and that no module holds."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._outside:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._outside[id(storage)] = storage
            self._copies.append((whole, whole.to("cpu", copy=True)))

    def copy_all(self) -> None:
        for originals in list(self._by_storage.values()):
            self.before_write(originals[0])

    def put_back(self) -> None:
        for original, before in self._copies:
            original.data.copy_(before)
