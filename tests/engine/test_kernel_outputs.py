"""Outputs on meta and fake tensors have the shapes and dtypes of the kernels of the device that they stand for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from microtome.engine.kernel_outputs import CORRECTIONS
from microtome.engine.meta_tensors import simulate_device
from microtome.engine.op_mode import OpMode
from microtome.engine.pytree import map_tensors
from microtome.engine.torch_internals import fake_tensor_types

aten = torch.ops.aten
Case = tuple[Any, tuple[Any, ...]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MASKS = ([True, True, True], [True, False, False], [False, True, True])


def ones(dtype: torch.dtype | None, *size: int) -> Tensor | None:
    return None if dtype is None else torch.ones(*size, dtype=dtype)


def batch_norms(dtype: torch.dtype) -> Iterator[Case]:
    """Batch norms of four channels with weights and running statistics of each dtype, or without."""
    x = torch.ones(2, 4, 3, 3, dtype=dtype)
    for weight_dtype, stats_dtype in itertools.product((None, *DTYPES), repeat=2):
        affine = (ones(weight_dtype, 4), ones(weight_dtype, 4))
        stats = (ones(stats_dtype, 4), ones(stats_dtype, 4))
        modes = (True, False) if stats_dtype else (True,)  # kernels on the CPU crash without statistics in eval
        for training in modes:
            args = (x, *affine, *stats, training, 0.1, 1e-5)
            yield (forward := (aten.native_batch_norm.default, args))
            if stats_dtype:
                yield aten._native_batch_norm_legit.default, args
                yield aten._native_batch_norm_legit_functional.default, args
            for mask in MASKS:
                back = (x, x, affine[0], *stats, forward, training, 1e-5, mask)
                yield aten.native_batch_norm_backward.default, back
                if weight_dtype and x.is_cpu:  # on a GPU, the gradients it returns depend on the backend
                    yield aten.batch_norm_backward.default, (*back, torch.ones(0, dtype=torch.uint8))
        if stats_dtype:
            yield aten._native_batch_norm_legit_no_training.default, (x, *affine, *stats, 0.1, 1e-5)
            if weight_dtype:  # else torch's meta kernel raises
                yield aten._batch_norm_with_update.default, (x, *affine, *stats, 0.1, 1e-5)
                yield aten._batch_norm_no_update.default, (x, *affine, *stats, 0.1, 1e-5)
        else:
            yield aten._native_batch_norm_legit.no_stats, (x, *affine, True, 0.1, 1e-5)


def layer_and_group_norms(dtype: torch.dtype) -> Iterator[Case]:
    x = torch.ones(2, 4, 3, 3, dtype=dtype)
    for weight_dtype in (None, *DTYPES):
        rows, channels = ones(weight_dtype, 3), ones(weight_dtype, 4)
        layer = aten.native_layer_norm.default, (x, [3], rows, rows, 1e-5)
        group = aten.native_group_norm.default, (x, channels, channels, 2, 4, 9, 2, 1e-5)
        yield layer
        yield group
        for mask in MASKS if weight_dtype else MASKS[1:2]:
            yield aten.native_layer_norm_backward.default, (x, x, [3], layer, rows, rows, mask)
            yield aten.native_group_norm_backward.default, (x, x, group, channels, 2, 4, 9, 2, mask)


def embedding_bags(dtype: torch.dtype) -> Iterator[Case]:
    tables = (torch.ones(10, 4, dtype=dtype), torch.ones(4, 10, dtype=dtype).t())
    for table, index_dtype, mode, scale, has_last, padding in itertools.product(
        tables, (torch.int64, torch.int32), (0, 1, 2), (None, dtype), (False, True), (-1, 1)
    ):
        indices, offsets = (torch.tensor(values, dtype=index_dtype) for values in ([1, 2, 3, 4, 5], [0, 2]))
        if scale is None or mode == 0:
            args = (table, indices, offsets, False, mode, False, ones(scale, 5), has_last, padding)
            yield aten._embedding_bag.default, args
            yield aten._embedding_bag_forward_only.default, args


def layouts(outputs: tuple[Any, ...]) -> list[Any]:
    return [None if out is None else (tuple(out.shape), out.dtype) for out in outputs]


def run(func: Any, args: tuple[Any, ...], convert: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """Run an operator; where an argument is a forward, on the statistics that it saves."""
    converted: list[Any] = []
    for arg in args:
        if isinstance(arg, tuple):
            converted += run(arg[0], arg[1], convert)[1:3]
        else:
            converted.append(map_tensors(convert, arg))
    return tuple(func(*converted))


def as_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def compare(cases: Iterator[Case], device: str) -> set[str]:
    """Compare the layouts of outputs, and return the operators of which a case ran on the device."""
    compared = set()
    with torch.device(device):
        every = list(cases)
    for func, args in every:
        try:
            real = layouts(run(func, args, Tensor.clone))
        except RuntimeError:  # the device has no kernel for these dtypes
            continue
        compared.add(str(func))
        with simulate_device([torch.empty(0, device=device)]), OpMode(lambda: None, [], []):
            assert layouts(run(func, args, as_meta)) == real, (func, args)
        with fake_tensor_types()[1]() as fake_mode, OpMode(lambda: None, [], []):
            assert layouts(run(func, args, fake_mode.from_tensor)) == real, (func, args)
    return compared


FAMILIES = (batch_norms, layer_and_group_norms, embedding_bags)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cases", FAMILIES)
def test_outputs_have_the_layouts_of_the_kernels_of_the_cpu(cases: Any, dtype: torch.dtype) -> None:
    assert compare(cases(dtype), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cases", FAMILIES)
def test_outputs_have_the_layouts_of_the_kernels_of_a_gpu(cases: Any, dtype: torch.dtype) -> None:
    assert compare(cases(dtype), "cuda")


def test_every_correction_is_of_an_operator_that_is_compared() -> None:
    compared = {name for cases in FAMILIES for name in compare(cases(torch.bfloat16), "cpu")}
    assert compared >= {*CORRECTIONS}


def test_tensors_of_no_known_device_stand_for_those_of_a_cpu() -> None:
    x = torch.empty(2, 4, 3, device="meta", dtype=torch.bfloat16)
    with OpMode(lambda: None, [], []):
        _, mean, _ = aten.native_batch_norm.default(x, None, None, None, None, True, 0.1, 1e-5)
    assert mean.dtype == torch.bfloat16
