"""Write the outputs of a model as safetensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microtome.engine.pytree import named_tensors
from microtome.errors import BadFile
from microtome.files.tensors import DTYPE_CODES, write_tensors
from microtome.files.writing import make_folder, translate_write_errors
from microtome.units import plural, size

_SUFFIX = ".safetensors"


@contextmanager
def open_tensors(to: str | None) -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes an output.

    In a folder, each output is a file. In a .safetensors file, outputs are concatenated and written at the end.
    """
    if to is None:
        yield lambda output: None
    elif Path(to).suffix == _SUFFIX:
        if not Path(to).absolute().parent.is_dir():
            raise BadFile(f"cannot write {to!r}: there is no folder {str(Path(to).parent)!r}")
        outputs: list[dict[str, Tensor]] = []
        yield lambda output: outputs.append(_copy_tensors(output))
        _write(Path(to).resolve(), _concatenate(outputs, to))
    else:
        folder = Path(to)
        make_folder(folder)
        if any(folder.glob(f"*{_SUFFIX}")):
            raise BadFile(f"{to!r} already contains {_SUFFIX} files: name another folder, or remove them")
        numbers = count()
        yield lambda output: _write(folder / f"{next(numbers):06}{_SUFFIX}", _copy_tensors(output))


def describe_tensors(to: str) -> str:
    """Return the name and the size of the file, or of the folder with the number of its files."""
    path = Path(to)
    files = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]
    number = f"{plural(len(files), 'file')}, " if path.is_dir() else ""
    return f"{to} ({number}{size(sum(file.stat().st_size for file in files))})"


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_CODES:
            raise BadFile(f"cannot write {name!r} to {str(file)!r}: safetensors files cannot store {tensor.dtype}")
    with translate_write_errors(repr(str(file))):
        write_tensors(file, tensors)


def _copy_tensors(output: Any) -> dict[str, Tensor]:
    """Copy the tensors of an output, by their paths in it."""
    return {f"output{path}": tensor.detach().cpu().contiguous().clone() for path, tensor in named_tensors(output)}


def _concatenate(outputs: list[dict[str, Tensor]], to: str) -> dict[str, Tensor]:
    try:
        return {name: torch.cat([output[name] for output in outputs]) for name in (outputs[0] if outputs else ())}
    except (RuntimeError, KeyError) as error:
        raise BadFile(f"outputs of different structure cannot be concatenated in {to!r}: name a folder") from error
