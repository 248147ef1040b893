"""Measure the time of a stage as it is: eager, compiled or exported."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from microtome.engine.meta_run import copy_inputs
from microtome.engine.pytree import accelerators_in
from microtome.errors import BadQuery
from microtome.inputs import Inputs
from microtome.split.boundary.boundary import Boundary


def time_runs(run: Callable[..., Any], example: Any, repeat: int, budget_s: float = 5.0) -> float:
    """Return the median seconds of a run, of `repeat` runs or as many as there is time for.

    Args:
        example: A boundary, or the inputs of the model.
    """
    if not isinstance(repeat, int) or repeat < 1:
        raise BadQuery(f"expected a repeat of 1 or more runs, got {repeat!r}")
    # A copy, since the model may write to its inputs.
    inputs = Inputs(example) if isinstance(example, Boundary) else copy_inputs(Inputs.of(example))
    with torch.no_grad():
        for _ in range(2):  # compilers and caches of shapes
            output = run(*inputs.args, **inputs.kwargs)
        tensors = output.tensors if isinstance(output, Boundary) else output
        on_accelerator = bool(accelerators_in((inputs.args, inputs.kwargs, tensors)))
        times: list[float] = []
        end = time.perf_counter() + budget_s
        while len(times) < repeat and (len(times) < 3 or time.perf_counter() < end):
            times.append(_time(run, inputs, on_accelerator))
    return median(times)


def _time(run: Callable[..., Any], inputs: Inputs, on_accelerator: bool) -> float:
    if on_accelerator:
        torch.accelerator.synchronize()
    begin = time.perf_counter()
    run(*inputs.args, **inputs.kwargs)
    if on_accelerator:
        torch.accelerator.synchronize()
    return time.perf_counter() - begin
