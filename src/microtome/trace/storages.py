"""The tensors of a run as values, and the memory they lie in."""

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


@dataclass(slots=True, eq=False)
class StorageRecord:
    """A memory while the run goes on."""

    index: int
    nbytes: int
    begins: int
    ends: int | None = None
    values: dict[Any, ValueRecord] = field(default_factory=dict)
    first: ValueRecord | None = None
    alive: Any = None


@dataclass(slots=True, eq=False)
class ValueRecord:
    """A value while the run goes on."""

    index: int
    origin: Any
    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    nbytes: int
    producer: int | None
    memory: StorageRecord
    alias_of: int | None
    content: str | None = None
    consumers: list[int] = field(default_factory=list)
    mutated_by: list[int] = field(default_factory=list)


class Storages:
    """Knows each tensor by the memory it lies in and the shape it has there. It holds none: their memory must end.

    Attributes:
        clock: How many operators have run.
    """

    def __init__(self, device: str | None, *, digest_constants: bool = False) -> None:
        self._device = device
        self._digest_constants = digest_constants
        self._by_storage: dict[int, StorageRecord] = {}
        self._memories: list[StorageRecord] = []
        self._values: list[ValueRecord] = []
        self.clock = 0

    def __getitem__(self, index: int) -> ValueRecord:
        return self._values[index]

    def of(
        self, tensor: Tensor, origin: str = "constant", name: str | None = None, producer: int | None = None
    ) -> ValueRecord:
        """The value that a tensor is; what else is given holds if it is seen for the first time."""
        memory = self._by_storage.get(id(_storage_of(tensor))) or self._memory(tensor)
        key = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        value = memory.values.get(key)
        if value is None:
            first = memory.first
            value = memory.values[key] = ValueRecord(
                len(self._values),
                origin,
                name,
                tuple(key[0]),
                key[3],
                self._device or _device_name(tensor.device),
                tensor.nbytes,
                producer,
                memory,
                None if first is None else first.index,
                _content_of(tensor) if origin == "constant" and self._digest_constants else None,
            )
            self._values.append(value)
            if first is None:
                memory.first = value
            else:
                memory.nbytes = max(memory.nbytes, _storage_of(tensor).nbytes())  # it may have been resized
        return value

    def find(self, tensor: Tensor) -> ValueRecord | None:
        """The value that a tensor is, if it was seen before."""
        memory = self._by_storage.get(id(_storage_of(tensor)))
        key = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        return None if memory is None else memory.values.get(key)

    def is_external(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that was there before the run, and is of no parameter, buffer or input."""
        memory = self._by_storage.get(id(_storage_of(tensor)))
        return memory is None or (memory.first is not None and memory.first.origin == "constant")

    def indices_in(self, structure: Any) -> tuple[int, ...]:
        """The indices of the values in what a module takes or returns."""
        return tuple(self.of(tensor).index for tensor in tensors_in(structure))

    def operands_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ValueRecord]:
        """The values among the arguments of an operator, each once."""
        found: list[ValueRecord] = []
        for argument in (*args, *kwargs.values()) if kwargs else args:
            if argument.__class__ in _NO_TENSORS:
                continue
            for tensor in (argument,) if isinstance(argument, Tensor) else tensors(argument):
                value = self.of(tensor)
                if value not in found:
                    found.append(value)
        return found

    def as_data(self) -> tuple[tuple[Value, ...], tuple[Memory, ...]]:
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
                v.memory.index,
                v.content,
            )
            for v in self._values
        )
        return tuple(values), tuple(Memory(memory.nbytes, memory.begins, memory.ends) for memory in self._memories)

    def _memory(self, tensor: Tensor) -> StorageRecord:
        if tensor.is_nested:
            raise _no_single_storage("nested")
        storage = _storage_of(tensor)
        key = id(storage)
        memory = StorageRecord(len(self._memories), storage.nbytes(), self.clock)
        memory.alive = weakref.ref(storage, lambda _: self._end_lifetime(key))
        self._by_storage[key] = memory
        self._memories.append(memory)
        return memory

    def _end_lifetime(self, key: int) -> None:
        self._by_storage.pop(key).ends = self.clock


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    try:
        return tensor.untyped_storage()
    except NotImplementedError as error:
        if is_functorch_wrapped(tensor):
            raise Unsupported("a module runs inside a transform of torch.func (vmap, grad, jvp)") from error
        raise _no_single_storage(str(tensor.layout)) from error


def _content_of(tensor: Tensor) -> str | None:
    """A digest of the elements of a tensor; None if there are none to read."""
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return None
    with suspend_tracing(tensor.device):
        known = value_of(tensor) if is_meta_or_fake(tensor) else tensor
        if known is None:
            return None
        plain = known.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""
        return str(xxh3_64_hexdigest(data))


def _no_single_storage(kind: str) -> Unsupported:
    return Unsupported(f"the run has a tensor whose parts lie apart in memory ({kind}): it cannot be traced yet")


_device_name = cache(str)
#: Kinds of arguments that hold no tensor, so that they need not be looked at.
_NO_TENSORS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout))
