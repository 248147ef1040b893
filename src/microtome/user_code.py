"""Python code of a user's, imported for the models in it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from microtome.errors import BuildFailed, NoMatch, describe_error


@contextmanager
def on_path(folder: Path, *, first: bool) -> Iterator[None]:
    """A folder where imports look, first for the neighbours of a file, last for the folder one happens to be in."""
    before = sys.path.copy()
    sys.path.insert(0 if first else len(sys.path), str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


def import_file(path: Path) -> ModuleType:
    """The module that a file makes, under a name of its own."""
    if not path.is_file():
        raise NoMatch(f"there is no file {path}")
    file = str(path.resolve())
    name = f"_microtome_{path.stem}_{abs(hash(file)):x}"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise BuildFailed(f"{path} cannot be imported: its name does not end in .py")
    module = module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and torch.jit look for what the file defines
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise BuildFailed(f"{path} cannot be imported: {describe_error(error)}{line_of(error, file)}") from error
    return module


def line_of(error: BaseException, file: str | None) -> str:
    """Name the line of a file in which an exception arose; empty where it did not arise there."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    return f" (line {lines[-1]} of {Path(file).name})" if file and lines else ""
