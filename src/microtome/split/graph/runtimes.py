"""The runtimes of exported stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from microtome.errors import NotInstalled

Run = Callable[[Sequence[Tensor]], list[Tensor]]


def import_runtime(extra: str, *modules: str) -> Any:
    """Import modules of an extra; return the first one."""
    try:
        first, *_ = map(import_module, modules)
        return first
    except ImportError as error:
        raise NotInstalled(f"{error.name} is not installed: pip install 'microtome[{extra}]'") from error


def run_onnx(data: bytes) -> Run:
    """Load a model of ONNX; return a function that runs it on the CPU."""
    onnxruntime: Any = import_runtime("onnx", "onnxruntime")
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, arrays)]

    return run


def run_executorch(data: bytes) -> Run:
    """Load a program of ExecuTorch; return a function that runs it."""
    runtime: Any = import_runtime("executorch", "executorch.runtime")
    method = runtime.Runtime.get().load_program(data).load_method("forward")
    return lambda tensors: list(method.execute([tensor.contiguous() for tensor in tensors]))
