"""Inputs that are the same in each step of a session, such as the output of an encoder: they are sent once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from microtome.engine.torch_internals import storage_id, version_of
from microtome.errors import Unsupported
from microtome.files.tensors import memory_of
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import BoundaryRecord, SentTensor
from microtome.split.boundary.tensor_bytes import alignment_offset, to_cpu, to_dense

#: Smaller tensors are sent with each step.
_MIN_BYTES = 1 << 10


def _input_names(facts: Any) -> Iterator[str]:
    """The names of the inputs that cross; the facts may come from another machine, and are checked later."""
    inputs = facts.get("inputs") if isinstance(facts, dict) else None
    items = inputs.get("tensors") if isinstance(inputs, dict) else None
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("kind") == "sent" and isinstance(item.get("name"), str):
            yield item["name"]


def _sent_names(record: BoundaryRecord) -> Iterator[str]:
    """The names of the inputs that cross, in a boundary that a stage of this process made."""
    return (item.name for item in record.inputs.tensors if isinstance(item, SentTensor))


def _is_sent_once(tensor: Tensor) -> bool:
    """Whether an input is not sent again while it is the same."""
    return tensor.layout is torch.strided and tensor.nbytes >= _MIN_BYTES


class SentInputs:
    """The client's side: the inputs that the last step sent."""

    def __init__(self) -> None:
        self._digests: dict[str, Any] = {}

    def without_repeated(self, boundary: Boundary) -> Boundary:
        """The boundary of the next step, without the inputs that are the same as in the last one."""
        last, self._digests = self._digests, {}
        tensors = dict(boundary.tensors)
        for name in _sent_names(boundary.record):
            if name not in tensors or not _is_sent_once(tensors[name]):
                continue
            self._digests[name] = digest = _digest(tensors[name])
            if last.get(name) == digest:
                del tensors[name]
        return boundary.with_tensors(tensors)


def _digest(tensor: Tensor) -> Any:
    """All of a tensor that computing with it depends on."""
    layout = tensor.dtype, tuple(tensor.shape), tensor.stride(), alignment_offset(tensor)
    return layout, xxh3_128_digest(memory_of(to_cpu(to_dense(tensor.detach()))))


class _KeptInput(NamedTuple):
    tensor: Tensor
    version: int


class KeptInputs:
    """The server's side: the inputs of the last step, for those that the next one does not send."""

    def __init__(self) -> None:
        self._kept: dict[str, _KeptInput] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of memory that they keep alive, each storage once."""
        storages = {storage_id(kept.tensor): kept.tensor.untyped_storage().nbytes() for kept in self._kept.values()}
        return sum(storages.values())

    def restore(self, boundary: Boundary) -> None:
        """Add the inputs to a boundary that it has from the last step, and keep those of this one.

        Raises:
            Unsupported: The model wrote to one of them.
        """
        last, self._kept = self._kept, {}
        for name in _input_names(boundary.facts):
            if name not in boundary.tensors:
                if name not in last:
                    continue  # the tail reports it
                if version_of(last[name].tensor) != last[name].version:  # as a state that keeps it may do
                    raise Unsupported(f"the model modified input {name!r} in place, and not on the example")
                boundary.tensors[name] = last[name].tensor
            tensor = boundary.tensors[name]
            if _is_sent_once(tensor):
                self._kept[name] = _KeptInput(tensor, version_of(tensor))
