"""The runtimes of exported stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from microtome.errors import BadFile, NotInstalled

#: The name of the metadata in a program.
METADATA = "microtome"

#: Runs a program on its inputs.
Run = Callable[[Sequence[Tensor]], list[Tensor]]


#: The name of the digest that ends a file.
_DIGEST = b"microtome.digest"
_DIGEST_BYTES = 16


def append_digest(data: bytes) -> bytes:
    """Add a digest to a program, by which damage is found.

    It is one more property of an ONNX model, in the encoding of protobuf: field 14 of a message with a key and a value.
    ExecuTorch ignores what follows a program.
    """
    return data + _encode_digest(data)


def check_digest(data: bytes) -> bool:
    """Return whether a program has a digest.

    Raises:
        BadFile: It is another one than that of the contents.
    """
    size = len(_encode_digest(b""))
    contents, digest = data[:-size], data[-size:]
    if digest[:-_DIGEST_BYTES] != _encode_digest(b"")[:-_DIGEST_BYTES]:
        return False
    if digest != _encode_digest(contents):
        raise BadFile("the file is damaged: its contents do not have the digest at its end. Export the stage again")
    return True


def _encode_digest(data: bytes) -> bytes:
    text = xxh3_64_hexdigest(data).encode()
    item = b"\x0a" + bytes([len(_DIGEST)]) + _DIGEST + b"\x12" + bytes([len(text)]) + text
    return b"\x72" + bytes([len(item)]) + item


def import_runtime(extra: str, *modules: str) -> Any:
    """Import modules of an extra; return the first one."""
    try:
        first, *_ = map(import_module, modules)
        return first
    except ImportError as error:
        raise NotInstalled(f"{error.name} is not installed: pip install 'microtome[{extra}]'") from error


def run_onnx(data: bytes) -> Run:
    """Load an ONNX model; return a function that runs it on the CPU."""
    return load_onnx(data)[0]


def load_onnx(data: bytes) -> tuple[Run, str]:
    """Load an ONNX model; return a function that runs it on the CPU, and its metadata."""
    onnxruntime: Any = import_runtime("onnx", "onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Without the fallback to other providers: it prints a banner for each file that is no model.
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    names = [one.name for one in session.get_inputs()]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, arrays)]

    return run, session.get_modelmeta().custom_metadata_map.get(METADATA, "")


def run_executorch(data: bytes) -> Run:
    """Load an ExecuTorch program; return a function that runs it."""
    return load_executorch(data)[0]


def load_executorch(data: bytes) -> tuple[Run, str]:
    """Load an ExecuTorch program; return a function that runs it, and its metadata."""
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
