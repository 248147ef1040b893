"""Import the user's Python code for the models in it."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from microtome.errors import BuildFailed, NoMatch, describe_error
from microtome.units import some


@contextmanager
def on_path(folder: Path, *, first: bool) -> Iterator[None]:
    """Add a folder to `sys.path` in the block: first for the neighbours of a file, last for the working directory."""
    before = sys.path.copy()
    sys.path.insert(0 if first else len(sys.path), str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


def import_file(path: Path) -> ModuleType:
    """Import a file under a unique module name."""
    if not path.is_file():
        raise NoMatch(f"there is no file {path}")
    file = str(path.resolve())
    name = f"_microtome_{path.stem}_{abs(hash(file)):x}"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise BuildFailed(f"{path} cannot be imported: its name does not end in .py")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch.jit look up definitions there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise BuildFailed(f"{path} cannot be imported: {describe_error(error)}{line_of(error, file)}") from error
    return module


def line_of(error: BaseException, file: str | None) -> str:
    """Describe the line of a file that raised an exception; empty if it raised elsewhere."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    return f" (line {lines[-1]} of {Path(file).name})" if file and lines else ""


def suggest_argument(error: BaseException, passed: Container[str]) -> str:
    """Name the parameter nearest to an unexpected argument, or all of them; empty for any other error.

    Args:
        passed: The names of the arguments that the user passed.
    """
    match = re.search(r"([\w.<>]+)\(\) got an unexpected keyword argument '(\w+)'$", str(error))
    callee = None if match is None else _find_callable(error, match[1].removesuffix(".__init__"))
    if match is None or callee is None or match[2] not in passed:
        return ""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    names = [name for name, one in inspect.signature(callee).parameters.items() if one.kind in kinds]
    near = difflib.get_close_matches(match[2], names, n=1)
    return f". Did you mean {near[0]!r}?" if near else f". It takes {some(names, 8) or 'none'}"


def _find_callable(error: BaseException, name: str) -> Callable[..., Any] | None:
    """Find a class or a function by its qualified name in the frame that called it."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            if isinstance(value, type | FunctionType) and value.__qualname__ == name:
                return value
    return None
