"""Fingerprints of a model: by its layout, or by its structure and the values of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from zlib import crc32

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from microtome.devices.pinned_memory import needs_staging, read_chunks
from microtome.engine.selectors import named_modules
from microtome.files.tensors import memory_of

#: Tensors from so many bytes on are not read again while their checksum is the same.
_MIN_KEPT_BYTES = 1 << 20
#: Of the table whose sums are the checksum, in words of 8 bytes.
_COLUMNS = 4096

#: Checksum and digest of tensors on GPUs.
_digests = WeakTensorKeyDictionary()


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


def modes_fingerprint(model: nn.Module) -> str:
    """The number of modules in training mode and, after a hyphen, a digest of their paths.

    >>> modes_fingerprint(nn.ReLU().eval()).partition("-")[0]
    '0'
    """
    training = [path for path, module in named_modules(model) if module.training]
    return f"{len(training)}-{xxhash.xxh3_64_hexdigest(';'.join(training).encode())}"


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a model."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest_values(model: nn.Module) -> str:
    digest = xxhash.xxh3_64()
    for _, tensor in named_weights(model):
        if tensor.is_meta:
            return "unknown"
        digest.update(_digest_tensor(tensor))
    return digest.hexdigest()


def _digest_tensor(tensor: Tensor) -> bytes:
    """The digest of a tensor's values; of a large one on a GPU, it is kept as long as the checksum stays the same."""
    plain = tensor.detach().contiguous()
    if not needs_staging(tensor) or tensor.nbytes < _MIN_KEPT_BYTES:
        return _digest_memory(plain)
    checksum = _checksum(plain)
    kept = _digests.get(tensor)
    if kept is None or kept[0] != checksum:
        _digests[tensor] = kept = checksum, _digest_memory(plain)
    return kept[1]


def _digest_memory(tensor: Tensor) -> bytes:
    digest = xxhash.xxh3_64()
    for chunk in read_chunks(tensor):
        digest.update(chunk)
    return digest.digest()


def _checksum(tensor: Tensor) -> bytes:
    """The sums of the rows and the columns of a tensor's memory: another value changes two of them.

    Writes through `.data` do not change the version of a tensor, so versions cannot tell whether its values changed.
    """
    data = tensor.reshape(-1).view(torch.uint8)
    table = len(data) - len(data) % (8 * _COLUMNS)
    words = data[:table].clone() if data.data_ptr() % 8 else data[:table]
    rows = words.view(torch.int64).view(-1, _COLUMNS)
    sums = torch.cat([rows.sum(0), rows.sum(1)]).view(torch.uint8)
    return xxhash.xxh3_128_digest(memory_of(torch.cat([sums, data[table:]]).cpu()))
