"""Copies of what is recorded, made without holding up the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

#: So many bytes may be on their way from a GPU; before more are, the oldest are waited for.
_ON_THE_WAY = 256 * 2**20


class Add(Protocol):
    """Takes a tensor of its own, or, where it is borrowed, is done with it when it returns."""

    def __call__(self, name: str, tensor: Tensor, *, borrowed: bool = False, run: int | None = None) -> None: ...


class _Waiting(NamedTuple):
    """Something to be done in its turn, once a copy has arrived."""

    do: Callable[[], None]
    arrived: torch.cuda.Event | None = None
    nbytes: int = 0

    @property
    def is_ready(self) -> bool:
        return self.arrived is None or self.arrived.query()


class AsyncCopier:
    """Hands on tensors in the machine's memory.

    Those of the CPU are lent as they are. From a GPU they go through pinned memory on a stream of their own, which
    waits for the model's; the model's does not wait for it.

    Args:
        add: Takes a name and a tensor.
    """

    def __init__(self, add: Add) -> None:
        self._add = add
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def add(self, name: str, tensor: Tensor, *, fresh: bool = False, run: int | None = None) -> None:
        """Take a tensor, which the model may write to when this has returned.

        Args:
            fresh: Whether nobody else has it, so that it need not be copied.
            run: The number of the run that it is of.
        """
        if not tensor.is_cuda:
            self._add(name, tensor.cpu(), borrowed=not fresh and tensor.device.type == "cpu", run=run)
            return
        self._hand_on(done_only=True)
        while self._waiting and self._bytes + tensor.nbytes > _ON_THE_WAY:
            self._hand_on_one()
        self._send(name, tensor, run, fresh=fresh)

    def after_these(self, do: Callable[[], None]) -> None:
        """Call a function once everything that was added before is handed on."""
        if self._waiting:
            self._waiting.append(_Waiting(do))
        else:
            do()

    def drain(self) -> None:
        """Hand on everything, waiting for what is on its way."""
        self._hand_on(done_only=False)

    def _send(self, name: str, tensor: Tensor, run: int | None, *, fresh: bool) -> None:
        # On the model's stream, where it is quick: the model may write to the tensor while the slow copy is on its way.
        kept = tensor if fresh else tensor.clone(memory_format=torch.contiguous_format)
        if kept.device not in self._streams:
            self._streams[kept.device] = torch.cuda.Stream(kept.device)
        stream = self._streams[kept.device]
        stream.wait_stream(torch.cuda.current_stream(kept.device))
        with torch.cuda.stream(stream):
            there = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
            there.copy_(kept, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        kept.record_stream(stream)  # its memory is not given to others before
        self._waiting.append(_Waiting(partial(self._hand, name, there, run), arrived, there.nbytes))
        self._bytes += there.nbytes

    def _hand_on(self, *, done_only: bool) -> None:
        while self._waiting and (not done_only or self._waiting[0].is_ready):
            self._hand_on_one()

    def _hand_on_one(self) -> None:
        first = self._waiting.popleft()
        if first.arrived is not None:
            first.arrived.synchronize()
        self._bytes -= first.nbytes
        first.do()

    def _hand(self, name: str, there: Tensor, run: int | None) -> None:
        self._add(name, there.clone(), run=run)  # pinned memory is scarce
