"""The runtimes of exported stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from microtome.errors import NotInstalled

#: The name of the metadata in a program.
METADATA = "microtome"

#: Runs a program on its inputs.
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
    return load_onnx(data)[0]


def load_onnx(data: bytes) -> tuple[Run, str]:
    """Load a model of ONNX; return a function that runs it on the CPU, and its metadata."""
    onnxruntime: Any = import_runtime("onnx", "onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, arrays)]

    return run, session.get_modelmeta().custom_metadata_map.get(METADATA, "")


def run_executorch(data: bytes) -> Run:
    """Load a program of ExecuTorch; return a function that runs it."""
    return load_executorch(data)[0]


def load_executorch(data: bytes) -> tuple[Run, str]:
    """Load a program of ExecuTorch; return a function that runs it, and its metadata."""
    runtime: Any = import_runtime("executorch", "executorch.runtime")
    program = runtime.Runtime.get().load_program(data)
    method = program.load_method("forward")
    text = program.load_method(METADATA).execute([])[0] if METADATA in program.method_names else ""

    def run(tensors: Sequence[Tensor], keep: Any = program) -> list[Tensor]:
        """Run the method, which refers to the program without keeping it alive."""
        return list(method.execute([tensor.contiguous() for tensor in tensors]))

    return run, text


#: Functions that load a program, by the end of its file. That of torch.export may unpickle what it loads.
LOADERS: dict[str, Callable[[bytes], tuple[Run, str]]] = {".onnx": load_onnx, ".pte": load_executorch}
