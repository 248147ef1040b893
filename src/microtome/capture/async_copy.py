"""Copy recorded tensors to host memory without blocking the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from microtome.capture.store import TensorStore
from microtome.devices.base import backend_of
from microtome.engine.torch_internals import storage_id
from microtome.errors import Unsupported

#: The most bytes of copies in flight; further copies wait for the oldest ones.
_IN_FLIGHT_BYTES = 256 * 2**20


class _PendingTask(NamedTuple):
    """A callback to run in order, once a copy has completed."""

    callback: Callable[[], None]
    completed: torch.Event | None = None
    nbytes: int = 0

    @property
    def is_ready(self) -> bool:
        return self.completed is None or self.completed.query()


class AsyncCopier:
    """Copies tensors to host memory and adds them to a store, in order.

    Tensors in host memory are lent to the store. Tensors on a device with streams are copied to pinned memory on a
    separate stream, which waits for the model's stream; the model's stream does not wait for the copy.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._pending: deque[_PendingTask] = deque()
        self._pending_bytes = 0
        self._streams: dict[torch.device, torch.Stream] = {}

    def add(self, name: str, tensor: Tensor, *, fresh: bool = False, run: int | None = None) -> None:
        """Copy a tensor, which the model may write to after this returns.

        Args:
            fresh: Whether nothing else refers to the tensor's memory, so that it need not be cloned.
            run: The number of the run that made it.
        """
        if not backend_of(tensor.device).has_streams:
            self._store.add(name, tensor.cpu(), borrowed=not fresh and tensor.device.type == "cpu", run=run)
            return
        while self._pending and self._pending[0].is_ready:
            self._complete_oldest()
        while self._pending and self._pending_bytes + tensor.nbytes > _IN_FLIGHT_BYTES:
            self._complete_oldest()
        self._start_copy(name, tensor, run, fresh=fresh)

    def call_after_pending(self, callback: Callable[[], None]) -> None:
        """Call a function once all tensors added before are in the store."""
        if self._pending:
            self._pending.append(_PendingTask(callback))
        else:
            callback()

    def drain(self) -> None:
        """Wait for all copies and add them to the store."""
        while self._pending:
            self._complete_oldest()

    def _start_copy(self, name: str, tensor: Tensor, run: int | None, *, fresh: bool) -> None:
        # On the model's stream, where it is fast: the model may write to the tensor during the slow copy.
        source = tensor if fresh else tensor.clone(memory_format=torch.contiguous_format)
        if source.device not in self._streams:
            self._streams[source.device] = torch.Stream(source.device)
        stream = self._streams[source.device]
        stream.wait_stream(torch.accelerator.current_stream(source.device))
        with stream:
            target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            target.copy_(source, non_blocking=True)
            completed = stream.record_event()
        source.record_stream(stream)  # so that the allocator does not reuse its memory before the copy ends
        self._pending.append(_PendingTask(partial(self._add_copy, name, target, run), completed, target.nbytes))
        self._pending_bytes += target.nbytes

    def _complete_oldest(self) -> None:
        oldest = self._pending.popleft()
        if oldest.completed is not None:
            oldest.completed.synchronize()
        self._pending_bytes -= oldest.nbytes
        oldest.callback()

    def _add_copy(self, name: str, target: Tensor, run: int | None) -> None:
        self._store.add(name, target.clone(), run=run)  # pinned memory is scarce


def check_copyable(name: str, tensor: Tensor) -> None:
    """Raise if a tensor has no values yet, or is not dense."""
    if backend_of(tensor.device).is_capturing():
        raise Unsupported(
            f"{name!r} ran during the capture of a CUDA graph, where tensors have no values yet and copies to host "
            "memory are not allowed: record the model outside of the capture, in eager mode"
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise Unsupported(
            f"{name!r} expected a dense tensor, got a sparse, nested or quantized one: use mt.extract instead"
        )


def is_new_memory(result: Tensor, tensor: Tensor) -> bool:
    """Return whether the result of an operation has a new storage, which holds nothing else."""
    if result.layout is not torch.strided or tensor.layout is not torch.strided:
        return False
    return storage_id(result) != storage_id(tensor) and result.untyped_storage().nbytes() == result.nbytes
