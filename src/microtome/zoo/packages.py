"""Packages that microtome does not need, imported only when a model of theirs is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

from microtome.errors import BuildFailed, MicrotomeError, NotInstalled, describe_error


def installed(package: str) -> bool:
    return find_spec(package) is not None


def need(package: str, load: Callable[[], ModuleType] | None = None) -> ModuleType:
    """The package, imported; an error that says what to do where that does not work."""
    if not installed(package):
        raise NotInstalled(
            f"{package} is not installed: pip install {package} (with a constraints file that holds torch at its "
            "version, or pip may replace it)"
        )
    try:
        return load() if load is not None else importlib.import_module(package)
    except MicrotomeError:
        raise
    except Exception as error:
        raise BuildFailed(f"{package} is installed but cannot be imported: {describe_error(error)}") from error
