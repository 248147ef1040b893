"""The device that meta tensors stand for, as the code of a model asks for it.

Code branches on `x.device.type` or `x.is_cuda`. In a run on meta tensors it is told the device that the tensors would
be on, so that it takes the branch that it takes on real tensors; what it then makes on that device is made on meta.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_META = torch.device("meta")
#: Not `is_meta`: whoever asks for that wants to know whether a tensor has values, as hooks and tests do.
_FLAGS = {
    getattr(Tensor, f"is_{kind}").__get__: kind
    for kind in ("cpu", "cuda", "ipu", "maia", "mps", "mtia", "xla", "xpu")
    if hasattr(Tensor, f"is_{kind}")
}


class Placement:
    """Answers for one device.

    The answer to `x.device` is always the same object, which is known by its identity when it is an argument: a device
    that the code names itself is left as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        index = -1 if device.index is None else device.index
        self._answers: dict[Callable[..., Any], Any] = {
            Tensor.device.__get__: device,
            Tensor.get_device: index,
            torch.get_device: index,
            torch.device: device,
            **{getter: kind == device.type for getter, kind in _FLAGS.items()},
        }

    def query(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Answer code that asks a meta tensor for its device; NotImplemented for any other function.

        Called by a function mode. Code of torch's own that asks is told that the tensor is on meta.
        """
        if func not in self._answers:
            return NotImplemented
        if func is torch.device:  # a copy of a device, if of one
            return self._device if len(args) == 1 and args[0] is self._device else NotImplemented
        asking = sys._getframe(2).f_globals.get("__name__", "")
        return self._answers[func] if args[0].is_meta and _is_of_model(asking) else NotImplemented

    def redirect_to_meta(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a function with the meta device in place of the one that `query` gave."""
        for value in args:  # there are few, and `any` would take longer
            if value is self._device:
                args = tuple(_META if value is self._device else value for value in args)
                break
        for value in kwargs.values():
            if value is self._device:
                kwargs = {name: _META if value is self._device else value for name, value in kwargs.items()}
                break
        return args, kwargs


def _is_of_model(name: str) -> bool:
    """Whether a Python module may hold the code of a model: none of torch, and of ours the zoo."""
    top, _, rest = name.partition(".")
    return top != "torch" and (top != "microtome" or rest.startswith("zoo"))


class _Here(threading.local):
    placement: Placement | None = None


_here = _Here()


def current() -> Placement | None:
    """Return the placement of this thread; None: it has no meta tensors that stand for others."""
    return _here.placement


@contextmanager
def simulate_device(tensors: Iterable[Tensor]) -> Iterator[None]:
    """For the time of the block, have meta tensors of this thread stand for tensors on the one device of these."""
    devices = {tensor.device for tensor in tensors} - {_META}
    before, _here.placement = _here.placement, Placement(devices.pop()) if len(devices) == 1 else None
    try:
        yield
    finally:
        _here.placement = before
