"""The tensors of a run as values, and the lifetimes of their storages."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from microtome.engine import tensors_in
from microtome.engine.composite_ops import is_meta_or_fake, suspend_tracing
from microtome.engine.meta_tensors import value_of
from microtome.engine.torch_internals import is_functorch_wrapped
from microtome.errors import Unsupported
from microtome.results.trace import Memory, Value
from microtome.trace.op_schema import tensors

#: Types of arguments that contain no tensor.
_NO_TENSORS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout))
_device_name = cache(str)


@dataclass(slots=True, eq=False)
class StorageRecord:
    """A storage during the run; `begins` and `ends` count operators."""

    index: int
    nbytes: int
    begins: int
    ends: int | None = None
    values: dict[Any, ValueRecord] = field(default_factory=dict)
    first: ValueRecord | None = None
    ref: Any = None


@dataclass(slots=True, eq=False)
class ValueRecord:
    """A value during the run, with the fields of `Value`."""

    index: int
    origin: Any
    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    nbytes: int
    producer: int | None
    storage: StorageRecord
    alias_of: int | None
    content: str | None = None
    consumers: list[int] = field(default_factory=list)
    mutated_by: list[int] = field(default_factory=list)


class Storages:
    """Identifies each tensor by its storage and its layout there. It keeps no storage alive.

    Args:
        device: The device of all values; None: that of each tensor.
        digest_constants: Digest the elements of tensors that are neither inputs, weights, nor outputs of operators.

    Attributes:
        clock: The number of operators that have run.
    """

    def __init__(self, device: str | None, *, digest_constants: bool = False) -> None:
        self._device = device
        self._digest_constants = digest_constants
        self._by_id: dict[int, StorageRecord] = {}
        self._storages: list[StorageRecord] = []
        self._values: list[ValueRecord] = []
        self.clock = 0

    def __getitem__(self, index: int) -> ValueRecord:
        return self._values[index]

    def record(
        self, tensor: Tensor, origin: str = "constant", name: str | None = None, producer: int | None = None
    ) -> ValueRecord:
        """The value of a tensor; the other arguments describe it if it is new."""
        storage = self._by_id.get(id(_storage_of(tensor))) or self._add_storage(tensor)
        key = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        value = storage.values.get(key)
        if value is None:
            first = storage.first
            value = storage.values[key] = ValueRecord(
                len(self._values),
                origin,
                name,
                tuple(key[0]),
                key[3],
                self._device or _device_name(tensor.device),
                tensor.nbytes,
                producer,
                storage,
                None if first is None else first.index,
                _digest(tensor) if origin == "constant" and self._digest_constants else None,
            )
            self._values.append(value)
            if first is None:
                storage.first = value
            else:
                storage.nbytes = max(storage.nbytes, _storage_of(tensor).nbytes())  # it may have been resized
        return value

    def find(self, tensor: Tensor) -> ValueRecord | None:
        """The value of a tensor, or None if it has not been recorded."""
        storage = self._by_id.get(id(_storage_of(tensor)))
        key = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        return None if storage is None else storage.values.get(key)

    def is_external(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage existed before the run and is not that of a parameter, buffer or input."""
        storage = self._by_id.get(id(_storage_of(tensor)))
        return storage is None or (storage.first is not None and storage.first.origin == "constant")

    def indices_in(self, structure: Any) -> tuple[int, ...]:
        """The indices of the values in the arguments or the output of a module."""
        return tuple(self.record(tensor).index for tensor in tensors_in(structure))

    def operands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ValueRecord]:
        """The distinct values among the arguments of an operator."""
        found: list[ValueRecord] = []
        for argument in (*args, *kwargs.values()) if kwargs else args:
            if argument.__class__ in _NO_TENSORS:
                continue
            for tensor in (argument,) if isinstance(argument, Tensor) else tensors(argument):
                value = self.record(tensor)
                if value not in found:
                    found.append(value)
        return found

    def to_data(self) -> tuple[tuple[Value, ...], tuple[Memory, ...]]:
        values = (
            Value(
                v.index,
                v.origin,
                v.name,
                v.shape,
                v.dtype,
                v.device,
                v.nbytes,
                v.producer,
                tuple(v.consumers),
                tuple(v.mutated_by),
                v.alias_of,
                v.storage.index,
                v.content,
            )
            for v in self._values
        )
        return tuple(values), tuple(Memory(storage.nbytes, storage.begins, storage.ends) for storage in self._storages)

    def _add_storage(self, tensor: Tensor) -> StorageRecord:
        if tensor.is_nested:
            raise _no_single_storage("nested")
        storage = _storage_of(tensor)
        key = id(storage)
        record = StorageRecord(len(self._storages), storage.nbytes(), self.clock)
        record.ref = weakref.ref(storage, lambda _: self._end_lifetime(key))
        self._by_id[key] = record
        self._storages.append(record)
        return record

    def _end_lifetime(self, key: int) -> None:
        self._by_id.pop(key).ends = self.clock


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    try:
        return tensor.untyped_storage()
    except NotImplementedError as error:
        if is_functorch_wrapped(tensor):
            raise Unsupported("a module runs inside a transform of torch.func (vmap, grad, jvp)") from error
        raise _no_single_storage(str(tensor.layout)) from error


def _no_single_storage(layout: str) -> Unsupported:
    return Unsupported(f"expected tensors with one storage each, got a {layout} tensor in the run: it cannot be traced")


def _digest(tensor: Tensor) -> str | None:
    """A digest of the elements of a tensor; None if they are unknown."""
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return None
    with suspend_tracing(tensor.device):
        values = value_of(tensor) if is_meta_or_fake(tensor) else tensor
        if values is None:
            return None
        contiguous = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = contiguous.reshape(-1).view(torch.uint8).numpy().data if contiguous.numel() else b""
        return str(xxh3_64_hexdigest(data))
