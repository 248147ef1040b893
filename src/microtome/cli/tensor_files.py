"""Write the outputs of models to a folder or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microtome.engine.pytree import named_tensors
from microtome.errors import BadFile
from microtome.files.tensors import DTYPE_CODES, write_tensors
from microtome.files.writing import translate_write_errors

_FILE = ".safetensors"


@contextmanager
def open_tensors(to: str | None) -> Iterator[Callable[[Any], None]]:
    """Something to give outputs to, one after the other.

    A folder gets a file for each. A file that ends in .safetensors gets all in one, batch after batch, at the end.
    """
    if to is None:
        yield lambda output: None
    elif Path(to).suffix == _FILE:
        if not Path(to).absolute().parent.is_dir():
            raise BadFile(f"cannot write {to!r}: there is no folder {str(Path(to).parent)!r}")
        kept: list[dict[str, Tensor]] = []
        yield lambda output: kept.append(_named(output))
        _write(Path(to).resolve(), _joined(kept, to))
    else:
        folder = Path(to)
        with translate_write_errors(repr(to)):
            folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob(f"*{_FILE}")):
            raise BadFile(f"{to!r} already holds {_FILE} files: name another folder, or remove them")
        numbers = iter(range(10**9))
        yield lambda output: _write(folder / f"{next(numbers):06}{_FILE}", _named(output))


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_CODES:
            raise BadFile(f"cannot write {name!r} to {str(file)!r}: safetensors files do not hold {tensor.dtype}")
    with translate_write_errors(repr(str(file))):
        write_tensors(file, tensors)


def _named(output: Any) -> dict[str, Tensor]:
    """Copies of the tensors of an output by their places."""
    return {f"output{place}": tensor.detach().cpu().contiguous().clone() for place, tensor in named_tensors(output)}


def _joined(kept: list[dict[str, Tensor]], to: str) -> dict[str, Tensor]:
    try:
        return {name: torch.cat([one[name] for one in kept]) for name in (kept[0] if kept else ())}
    except (RuntimeError, KeyError) as error:
        raise BadFile(f"the outputs are not alike, so that they do not fit in {to!r}: name a folder") from error
