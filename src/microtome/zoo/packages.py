"""Import optional packages, torchvision with incompatible compiled operators included."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

import torch

from microtome.errors import BuildFailed, MicrotomeError, NotInstalled, describe_error

#: The operators that torchvision 0.20 to 0.28 look up during import.
_SCHEMAS = {name: f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")}

#: The errors of torchvision and of torch if a model calls an operator that is not there, or has no kernel.
_OPERATOR_ERROR = re.compile(r"torchvision::\w+|custom C\+\+ ops")

#: Deleting a library removes the operators that it declares.
_libraries: list[torch.library.Library] = []
_declared: list[str] = []


def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def import_package(package: str, load: Callable[[], ModuleType] | None = None) -> ModuleType:
    """Import an optional package, or raise an error that says how to install it.

    Args:
        load: Imports the package, if `importlib.import_module(package)` is not enough.
    """
    if not is_installed(package):
        raise NotInstalled(
            f"{package} is not installed: pip install {package} (with a constraints file that pins torch, or pip may "
            "replace it)"
        )
    try:
        return load() if load is not None else importlib.import_module(package)
    except MicrotomeError:
        raise
    except Exception as error:
        raise BuildFailed(f"{package} is installed but cannot be imported: {describe_error(error)}") from error


def import_torchvision() -> ModuleType:
    """Import torchvision, declaring the operators that are missing if its compiled library does not fit this torch.

    A declared operator has a schema and no kernel: models that do not call it work, others raise when they reach it.
    If torchvision imports as it is, nothing is declared.
    """
    return import_package("torchvision", _import_torchvision)


def explain_missing_operators() -> str | None:
    """Explain why torchvision's operators are missing; None if they are not, or torchvision is not imported."""
    if not _declared:
        return None
    return (
        f"the compiled operators of this torchvision do not fit torch {torch.__version__}: install the torchvision "
        "that was built for it"
    )


def explain_operator_error(error: BaseException) -> str | None:
    """Explain an error of a model that called a missing operator of torchvision; None: it is another error."""
    return explain_missing_operators() if _OPERATOR_ERROR.search(str(error)) else None


def _import_torchvision() -> ModuleType:
    before = set(sys.modules)
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if not re.search(r"operator torchvision::\w+ does not exist", str(error)):
            raise
    # Importing again does not bind submodules that are already in sys.modules to the package.
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "torchvision":
            del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    _libraries.append(library)
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
            _declared.append(name)
    return importlib.import_module("torchvision")
