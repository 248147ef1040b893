"""Answers of meta tensors as if they were real: the device they stand for, and the values of small integer tensors.

Code branches on `x.device.type` or `x.is_cuda`, and on lengths, positions and masks. In a run on meta tensors it gets
the device of the tensors that they replace; what it then creates on that device is created on meta. The values of
integer and boolean tensors are computed beside the run where they follow from inputs, buffers and constants. So the run
takes the branches that it takes on real tensors.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.torch_internals import DisableTorchFunction, OpOverload, disable_current_modes

# -- devices -----------------------------------------------------------------------------------------------------------

_META = torch.device("meta")
_CPU = torch.device("cpu")
#: Not `is_meta`: whoever reads that wants to know whether a tensor has values, as hooks and tests do.
_FLAGS = {
    getattr(Tensor, f"is_{kind}").__get__: kind
    for kind in ("cpu", "cuda", "ipu", "maia", "mps", "mtia", "xla", "xpu")
    if hasattr(Tensor, f"is_{kind}")
}


class SimulatedDevice:
    """The device that the meta tensors of a run stand for.

    `x.device` always returns the same object, which is recognised by identity when it is passed as an argument: a
    device that the code names itself stays as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.type = device.type
        index = -1 if device.index is None else device.index
        self._results: dict[Callable[..., Any], Any] = {
            Tensor.device.__get__: device,
            Tensor.get_device: index,
            torch.get_device: index,
            torch.device: device,
            **{getter: kind == device.type for getter, kind in _FLAGS.items()},
        }

    def query(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Answer a query for the device of a meta tensor; NotImplemented for any other function.

        Called by a function mode. Torch's own code gets the meta device.
        """
        if func not in self._results:
            return NotImplemented
        if func is torch.device:  # a copy of a device, if its argument is one
            return self._device if len(args) == 1 and args[0] is self._device else NotImplemented
        caller = sys._getframe(2).f_globals.get("__name__", "")
        return self._results[func] if args[0].is_meta and _may_be_model_code(caller) else NotImplemented

    def redirect_to_meta(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the device that `query` returned by the meta device in the arguments of a function."""
        for value in args:  # there are few, and `any` would take longer
            if value is self._device:
                args = tuple(_META if value is self._device else value for value in args)
                break
        for value in kwargs.values():
            if value is self._device:
                kwargs = {name: _META if value is self._device else value for name, value in kwargs.items()}
                break
        return args, kwargs


def _may_be_model_code(python_module: str) -> bool:
    """Whether a Python module may contain the code of a model: none of torch does, and of microtome only the zoo."""
    top, _, rest = python_module.partition(".")
    return top != "torch" and (top != "microtome" or rest.startswith("zoo"))


class _ThreadState(threading.local):
    device: SimulatedDevice | None = None


_thread = _ThreadState()


def simulated_device() -> SimulatedDevice | None:
    """The device that meta tensors of this thread stand for; None outside a run on meta tensors."""
    return _thread.device


@contextmanager
def simulate_device(tensors: Iterable[Tensor]) -> Iterator[None]:
    """In the block, let meta tensors of this thread stand for tensors on the one device of these."""
    devices = {tensor.device for tensor in tensors} - {_META}
    before, _thread.device = _thread.device, SimulatedDevice(devices.pop()) if len(devices) == 1 else None
    try:
        yield
    finally:
        _thread.device = before


# -- values of integers ------------------------------------------------------------------------------------------------

INTEGER_DTYPES = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
#: The values of larger storages are not computed.
_MAX_BYTES = 2**24

#: By the id of a storage on meta: a weak reference to it, and a storage with its values.
_values: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.UntypedStorage]] = {}

#: Operators whose result, or what they add to a storage, is uninitialised.
_UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        *("resize_", "resize_as_", "set_"),
    )
)
#: Tags of operators that return values to Python, or a shape that depends on them.
READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def copy_values(storage: torch.UntypedStorage, values: torch.UntypedStorage) -> None:
    """Record a copy of these as the values of a storage on meta."""
    if values.nbytes() <= _MAX_BYTES:
        _store(storage, values.cpu() if values.device.type != "cpu" else values.clone())


def _store(storage: torch.UntypedStorage, values: torch.UntypedStorage) -> None:
    key = id(storage)
    _values[key] = weakref.ref(storage, lambda _: _values.pop(key, None) and None), values


def compute_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that needs values, if those of all its arguments are known; else return NotImplemented."""
    if not _values or not isinstance(func, OpOverload) or func.namespace != "aten":
        return NotImplemented
    leaves_meta = func is torch.ops.aten._to_copy.default and kwargs.get("device") == _CPU
    if not leaves_meta and READING_TAGS.isdisjoint(func.tags):
        return NotImplemented
    with DisableTorchFunction():
        if not any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            return NotImplemented  # a real run, while meta tensors of another run are still alive
        output = _compute(func, args, kwargs)
        return output if leaves_meta or output is NotImplemented else map_tensors(_as_meta, output)


def propagate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Compute the values of the integer outputs of an operator, if those of all its arguments are known."""
    if not isinstance(func, OpOverload):
        return
    with DisableTorchFunction():
        outputs = [tensor for tensor in tensors_in(output) if tensor.is_meta]
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)
        storages = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        if not writes and any(id(tensor.untyped_storage()) in storages for tensor in outputs):
            return  # a view shares the storage of its base
        values = _compute(func, args, kwargs)
        if values is not NotImplemented and not writes:
            for tensor, value in zip(outputs, tensors_in(values), strict=True):
                _set_values(tensor, value)
        elif values is NotImplemented and writes:
            for tensor in outputs:
                _values.pop(id(tensor.untyped_storage()), None)


def tensorize_index(index: Any) -> Any:
    """Replace lists in an index by tensors: torch would convert them unobserved, and their values would be unknown."""
    if isinstance(index, tuple):
        return tuple(tensorize_index(item) for item in index)
    if not isinstance(index, list) or not index or not all(type(item) in (int, bool) for item in index):
        return index
    with DisableTorchFunction(), disable_current_modes():
        return _as_meta(torch.tensor(index))


def _compute(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the values of its arguments; NotImplemented if some are unknown."""
    if func.namespace != "aten" or func._schema.name in _UNINITIALISED:
        return NotImplemented
    if torch.Tag.nondeterministic_seeded in func.tags:
        return NotImplemented
    try:
        args, kwargs = map_tensors(_value, (args, kwargs))
    except _UnknownValue:
        return NotImplemented
    if kwargs.get("device") == _META:
        kwargs = {**kwargs, "device": _CPU}
    try:
        return func(*args, **kwargs)
    except (RuntimeError, IndexError, NotImplementedError):  # the run itself raises it, if it needs this
        return NotImplemented


def value_of(tensor: Tensor) -> Tensor | None:
    """The values of an integer tensor, also of one on meta; None if they are unknown."""
    try:
        return _value(tensor)
    except _UnknownValue:
        return None


class _UnknownValue(Exception):
    """The values of a tensor are unknown."""


def _value(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu" and type(tensor) is Tensor and tensor.dtype in INTEGER_DTYPES:
        return tensor
    entry = _values.get(id(tensor.untyped_storage())) if tensor.is_meta else None
    if entry is None or tensor.dtype not in INTEGER_DTYPES:
        raise _UnknownValue
    return _view_like(entry[1], tensor)


def _view_like(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


def _set_values(tensor: Tensor, value: Tensor) -> None:
    storage = tensor.untyped_storage()
    if tensor.dtype not in INTEGER_DTYPES or value.shape != tensor.shape or storage.nbytes() > _MAX_BYTES:
        return
    values = torch.UntypedStorage(storage.nbytes(), device="cpu")
    _view_like(values, tensor).copy_(value)
    _store(storage, values)


def _as_meta(value: Tensor) -> Tensor:
    meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    _set_values(meta, value)
    return meta
