"""Correct the outputs of operators whose meta kernels differ from the kernels of the device in shape or dtype.

Statistics of norms that are saved for the backward have another dtype on the CPU than on CUDA, and batch norm in eval
saves none there. Meta kernels follow CUDA; those of fake tensors ignore the dtype of the weights. Of all operators in
torch's own test samples, these norms and the bags of embeddings differ (tests/engine/test_kernel_outputs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_REDUCED = (torch.bfloat16, torch.float16)
_SUM = 0
_MAX = 2

#: The size and dtype of an output; None if the kernel returns none there.
Layout = tuple[Sequence[int], torch.dtype] | None
#: Returns the layouts of the outputs that may differ, by index, from the arguments, the outputs and the device type.
Correction = Callable[[tuple[Any, ...], Sequence[Any], str], dict[int, Layout]]


def correct_outputs(correction: Correction, args: tuple[Any, ...], output: Any, device_type: str) -> Any:
    """The outputs of an operator on meta or fake tensors, in the layouts of the kernel of the device they stand for."""
    outputs = list(output) if isinstance(output, tuple | list) else [output]
    for index, layout in correction(args, outputs, device_type).items():
        like = outputs[index]
        if layout is None or like is None:
            outputs[index] = None
        elif (tuple(like.shape), like.dtype) != (tuple(layout[0]), layout[1]):
            outputs[index] = like.new_empty(layout[0], dtype=layout[1])
    return tuple(outputs)


def _statistics_dtype(x: Tensor, *parameters: Any) -> torch.dtype:
    """The dtype of the statistics that a norm saves on the CPU: that of its input, or float32 if parameters have it."""
    is_mixed = any(isinstance(tensor, Tensor) and tensor.dtype is torch.float32 for tensor in parameters)
    return torch.float32 if x.dtype in _REDUCED and is_mixed else x.dtype


def _batch_norm(parameters: slice, is_training: Callable[[tuple[Any, ...]], bool]) -> Correction:
    def correct(args: tuple[Any, ...], outputs: Sequence[Any], device_type: str) -> dict[int, Layout]:
        # A functional one also returns the running statistics.
        layouts: dict[int, Layout] = {
            index: (args[index].shape, args[index].dtype) for index in (3, 4) if len(outputs) >= 5
        }
        if device_type == "cpu":
            dtype = _statistics_dtype(args[0], *args[parameters])
            size = (args[0].shape[1],) if is_training(args) else (0,)
            layouts |= {1: (size, dtype), 2: (size, dtype)}
        return layouts

    return correct


def _batch_norm_backward(args: tuple[Any, ...], outputs: Sequence[Any], device_type: str) -> dict[int, Layout]:
    x, mask = args[1], args[9]
    layouts: dict[int, Layout] = {} if mask[0] else {0: None}
    if device_type == "cpu":
        dtype = _statistics_dtype(x, *args[2:7])
        layouts |= {index: (x.shape[1:2], dtype) if mask[index] else None for index in (1, 2)}
    return layouts


def _any_batch_norm_backward(args: tuple[Any, ...], outputs: Sequence[Any], device_type: str) -> dict[int, Layout]:
    """Of the operator for all backends, some of which on a GPU return gradients that the mask leaves out."""
    return _batch_norm_backward(args, outputs, device_type) if device_type == "cpu" else {}


def _layer_or_group_norm(parameters: slice) -> Correction:
    def correct(args: tuple[Any, ...], outputs: Sequence[Any], device_type: str) -> dict[int, Layout]:
        if device_type != "cpu":
            return {}
        dtype = _statistics_dtype(args[0], *args[parameters])
        return {index: (outputs[index].shape, dtype) for index in (1, 2)}

    return correct


def _group_norm_backward(args: tuple[Any, ...], outputs: Sequence[Any], device_type: str) -> dict[int, Layout]:
    return {0: (args[1].shape, args[1].dtype)}


def _embedding_bag(*, forward_only: bool) -> Correction:
    def correct(args: tuple[Any, ...], outputs: Sequence[Any], device_type: str) -> dict[int, Layout]:
        if device_type != "cpu":
            return {}
        weight, indices, offsets, _, mode, _, scale, has_last, padding = args + _BAG_DEFAULTS[len(args) :]
        bags = offsets.shape[0] - bool(has_last)
        is_fast = weight.dtype in (torch.float32, *_REDUCED) and weight.stride(1) == 1 and padding < 0
        needs_bags = mode != _SUM or not is_fast or (scale is not None and scale.stride(0) != 1)
        sizes = (offsets.shape[0] if forward_only and mode == _SUM else bags,)
        dtype = offsets.dtype
        return {
            1: ((indices.shape[0] if needs_bags else 0,), dtype),
            2: (sizes, dtype),
            3: ((bags, weight.shape[1]) if mode == _MAX else sizes, dtype),
        }

    return correct


_BAG_DEFAULTS = (None, None, None, False, _SUM, False, None, False, -1)

_trains = _batch_norm(slice(1, 5), lambda args: args[5])
_updates = _batch_norm(slice(1, 5), lambda args: True)
_evaluates = _batch_norm(slice(1, 5), lambda args: False)

#: By the name of the operator.
CORRECTIONS: dict[str, Correction] = {
    "aten.native_batch_norm.default": _trains,
    "aten._native_batch_norm_legit.default": _trains,
    "aten._native_batch_norm_legit_functional.default": _trains,
    "aten._native_batch_norm_legit.no_stats": _batch_norm(slice(1, 3), lambda args: args[3]),
    "aten._native_batch_norm_legit_no_training.default": _evaluates,
    "aten._batch_norm_with_update.default": _updates,
    "aten._batch_norm_no_update.default": _evaluates,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.batch_norm_backward.default": _any_batch_norm_backward,
    "aten.native_layer_norm.default": _layer_or_group_norm(slice(2, 4)),
    "aten.native_group_norm.default": _layer_or_group_norm(slice(1, 3)),
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten._embedding_bag.default": _embedding_bag(forward_only=False),
    "aten._embedding_bag_forward_only.default": _embedding_bag(forward_only=True),
}
