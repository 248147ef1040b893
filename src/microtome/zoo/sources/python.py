"""`package.module:NAME` and `./file.py:NAME`: an nn.Module, an nn.Module class or a factory in any Python code."""

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

from microtome.errors import BuildFailed, NeedsValues, NoMatch, NotAModule, describe_error
from microtome.user_code import import_file, line_of, on_path
from microtome.zoo.packages import is_installed
from microtome.zoo.sources.base import ModelSpec


def find(place: str, name: str, args: dict[str, Any], *, meta: bool) -> ModelSpec:
    """Look up a model in a file or an importable module."""
    is_file = place.endswith(".py")
    folder = Path(place).resolve().parent if is_file else Path.cwd()
    with on_path(folder, first=is_file):
        module = import_file(Path(place)) if is_file else _import_module(place)
    target = _look_up(place, module, name)
    file = getattr(module, "__file__", None)

    def build() -> Any:
        with on_path(folder, first=is_file):
            return target(**args)

    if isinstance(target, nn.Module):
        if args:
            raise BuildFailed(f"{place}:{name} is a {type(target).__name__} instance: it takes no arguments")
        if meta:
            raise NeedsValues(f"{place}:{name} is a {type(target).__name__} instance with weights: leave out meta")
        instance = target
        # A copy, since the resolver sets eval mode and loads weights.
        return ModelSpec(lambda: copy.deepcopy(instance), lambda model: _example(model, module), file=file)
    if not callable(target):
        raise NotAModule(
            f"{place}:{name}: expected an nn.Module, a class or a factory of one, got {type(target).__name__}"
        )
    _check_arguments(f"{place}:{name}", target, args)
    return ModelSpec(build, lambda model: _example(model, module), file=file)


def exists(place: str) -> bool:
    """Return whether the name is that of a Python file, or starts with an installed package."""
    if place.endswith(".py"):
        return True  # `find` raises if the file is missing
    with on_path(Path.cwd(), first=False):
        return all(word.isidentifier() for word in place.split(".")) and is_installed(place.partition(".")[0])


def _import_module(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place + ".").startswith(error.name + "."):
            raise NoMatch(f"cannot import {place}: there is no module {error.name!r}") from error
        raise BuildFailed(f"{place} cannot be imported: {describe_error(error)}") from error
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        raise BuildFailed(f"{place} cannot be imported: {describe_error(error)}{line_of(error, last)}") from error


def _look_up(place: str, module: ModuleType, name: str) -> Any:
    target: Any = module
    for part in name.split("."):
        if not _has_attribute(place, target, part):
            public = [word for word in vars(target) if not word.startswith("_")]
            near = difflib.get_close_matches(part, public, n=3, cutoff=0.5)
            near = near or [word for word in public if _is_model(vars(target)[word])][:3]
            hint = f"Did you mean {' or '.join(f'{place}:{other}' for other in near)}?"
            raise NoMatch(f"{place} has no {name!r}. {hint if near else 'It defines no nn.Module.'}")
        target = getattr(target, part)
    return target


def _has_attribute(place: str, target: Any, name: str) -> bool:
    try:
        return hasattr(target, name)
    except Exception as error:  # a module may import its attributes when they are first used
        raise BuildFailed(f"{place}:{name} cannot be imported: {describe_error(error)}") from error


def _is_model(value: Any) -> bool:
    is_class = isinstance(value, type) and issubclass(value, nn.Module) and value is not nn.Module
    return is_class or isinstance(value, nn.Module)


def _check_arguments(name: str, target: Callable[..., Any], args: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return  # compiled code may have no signature
    try:
        signature.bind(**args)
    except TypeError as error:
        parameters = ", ".join(map(str, signature.parameters.values()))
        raise BuildFailed(
            f"invalid arguments for {name}: {error}. Its parameters are ({parameters}): pass them as --arg NAME=VALUE"
        ) from error


def _example(model: nn.Module, module: ModuleType) -> Any:
    """Return `example_inputs` of the model's class, or else of the module."""
    example = getattr(model, "example_inputs", None)
    if example is None:
        example = getattr(module, "example_inputs", None)
    return example() if callable(example) else example
