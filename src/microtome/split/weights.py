"""Which weights a part of a model reads, and what tells two models apart."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor, nn

from microtome.split.liveness import Crossing
from microtome.split.study import Study


def weights_of(seen: Study, begins: Crossing | None, ends: Crossing | None) -> list[str]:
    """The names of the parameters and buffers that operators of a stage read, those it runs again included."""
    trace = seen.trace
    first = 0 if begins is None else begins.cut.ends
    last = len(trace.ops) if ends is None else ends.cut.ends
    run = set(range(first, last))
    if begins is not None:
        run |= {at for level in begins.levels for at in level.call.ops if at < first}
    memories = {trace.values[at].memory for index in run for at in trace.ops[index].inputs}
    held = [value for value in trace.values if value.origin in ("parameter", "buffer") and value.memory in memories]
    return [value.name for value in held if value.name is not None]


def structure_of(seen: Study, model: nn.Module) -> str:
    """A few letters for the calls of a model and the shapes of its weights: another model has others."""
    digest = xxhash.xxh3_64()
    for call, shape in zip(seen.trace.calls, seen.shapes, strict=True):
        digest.update(f"{call.address}:{call.type}:{call.parent}:{shape.output.text};")
    for name, tensor in _held(model):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};")
    return str(digest.hexdigest())


def digest_of(model: nn.Module) -> str | None:
    """A few letters for the values of all weights; None where some are not there."""
    digest = xxhash.xxh3_64()
    for _, tensor in _held(model):
        if tensor.is_meta:
            return None
        plain = tensor.detach().cpu().contiguous()
        digest.update(plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b"")
    return str(digest.hexdigest())


def _held(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
