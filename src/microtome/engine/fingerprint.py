"""Fingerprints of a model: by its layout, or by its structure and the values of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from zlib import crc32

import torch
import xxhash
from torch import Tensor, nn

from microtome.engine.selectors import named_modules


def model_fingerprint(model: nn.Module, calls: Iterable[str]) -> str:
    """Digest the calls that a model makes and the shapes of its weights, and, after a hyphen, the values of these.

    The second half is `unknown` where weights are on meta.

    Args:
        calls: Descriptions of the calls, in an order that is the same in every process.
    """
    return f"{structure_fingerprint(model, calls)}-{_digest_values(model)}"


def structure_fingerprint(model: nn.Module, calls: Iterable[str]) -> str:
    """The first half of `model_fingerprint`, which is the same where weights are on meta."""
    structure = xxhash.xxh3_64()
    for call in calls:
        structure.update(f"{call};".encode())
    for name, tensor in named_weights(model):
        structure.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
    return structure.hexdigest()


def structure_of(fingerprint: str) -> str:
    """The part of a fingerprint that `structure_fingerprint` computes."""
    return fingerprint.partition("-")[0]


def weights_fingerprint(model: nn.Module) -> str:
    """Digest the names, shapes and values of the weights; `unknown` where they are on meta."""
    names = xxhash.xxh3_64()
    for name, tensor in named_weights(model):
        names.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
    values = _digest_values(model)
    return values if values == "unknown" else f"{names.hexdigest()}-{values}"


def layout_fingerprint(model: nn.Module) -> str:
    """Digest the paths and types of the modules and the shapes of the parameters, as recordings on disk have it."""
    modules = [f"{path}:{type(module).__name__}" for path, module in named_modules(model)]
    shapes = [f"{name}:{tuple(value.shape)}" for name, value in model.named_parameters()]
    return f"{crc32(' '.join(modules + shapes).encode()):08x}"


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a model."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest_values(model: nn.Module) -> str:
    digest = xxhash.xxh3_64()
    for _, tensor in named_weights(model):
        if tensor.is_meta:
            return "unknown"
        plain = tensor.detach().cpu().contiguous()
        if plain.numel():
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
