"""`pkg.mod:NAME` and `./file.py:NAME`: a factory, an nn.Module class or an nn.Module of any Python code."""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from microtome.errors import BuildFailed, NoMatch, NotAModule, Unsupported, describe_error
from microtome.user_code import import_file, line_of, on_path
from microtome.zoo.packages import installed
from microtome.zoo.sources.source import FoundModel


def find(place: str, name: str, args: dict[str, Any], *, meta: bool) -> FoundModel:
    """The model that a name stands for in a file or a module that can be imported from here."""
    is_file = place.endswith(".py")
    folder = Path(place).resolve().parent if is_file else Path.cwd()
    with on_path(folder, first=is_file):
        module = import_file(Path(place)) if is_file else _import_module(place)
    target = _look_up(place, module, name)
    file = getattr(module, "__file__", None)

    def make() -> Any:
        with on_path(folder, first=is_file):
            return target(**args)

    if isinstance(target, nn.Module):
        if args:
            raise BuildFailed(f"{place}:{name} is a built {type(target).__name__}: it takes no arguments")
        if meta:
            raise Unsupported(f"{place}:{name} is a built {type(target).__name__}, weights included: leave out meta")
        built = target
        # A copy, since the resolver sets eval mode and loads weights.
        return FoundModel(lambda: copy.deepcopy(built), lambda model: _example(model, module), file=file)
    if not callable(target):
        raise NotAModule(f"{place}:{name} is a {type(target).__name__}: name an nn.Module class, or what returns one")
    _check_arguments(f"{place}:{name}", target, args)
    return FoundModel(make, lambda model: _example(model, module), file=file)


def exists(place: str) -> bool:
    """Whether there is such a file, or a package of that name to import from."""
    if place.endswith(".py"):
        return True  # the message about a file that is missing is another one
    with on_path(Path.cwd(), first=False):
        return all(word.isidentifier() for word in place.split(".")) and installed(place.partition(".")[0])


def _import_module(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place + ".").startswith(error.name + "."):
            raise NoMatch(f"there is no module {error.name!r} to import {place} from") from error
        raise BuildFailed(f"{place} cannot be imported: {describe_error(error)}") from error
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        raise BuildFailed(f"{place} cannot be imported: {describe_error(error)}{line_of(error, last)}") from error


def _look_up(place: str, module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [word for word in vars(found) if not word.startswith("_")]
            near = difflib.get_close_matches(part, known, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(f'{place}:{other}' for other in near)}?" if near else ""
            raise NoMatch(f"{place} has no {name!r}.{hint}")
        found = getattr(found, part)
    return found


def _check_arguments(name: str, target: Callable[..., Any], args: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return  # compiled code need not tell
    try:
        signature.bind(**args)
    except TypeError as error:
        takes = [str(parameter) for parameter in signature.parameters.values()]
        raise BuildFailed(
            f"{name} cannot be called so: {error}. It takes ({', '.join(takes)}): give arguments as --arg NAME=VALUE"
        ) from error


def _example(model: nn.Module, module: ModuleType) -> Any:
    """Return `example_inputs` of the model's class, or else of the module."""
    example = getattr(model, "example_inputs", None)
    if example is None:
        example = getattr(module, "example_inputs", None)
    return example() if callable(example) else example
