"""A torchvision that imports even where its compiled operators do not fit the installed torch."""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType

import torch

from microtome.zoo.packages import need

#: What torchvision 0.20 to 0.28 ask torch for while they are imported.
_SCHEMAS = {name: f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")}

#: An operator is gone when the library that declared it is.
_libraries: list[torch.library.Library] = []
_declared: list[str] = []


def import_torchvision() -> ModuleType:
    """torchvision, with the operators declared that it misses when its compiled part does not fit this torch.

    A declared operator has a signature and no kernel: models that do not call it work, the others say that it is
    missing when they run. Where torchvision imports by itself, nothing is declared.
    """
    return need("torchvision", _import)


def operators_note() -> tuple[str, ...]:
    """Notes on how torchvision was made to import; empty where it imported by itself."""
    if not _declared:
        return ()
    return (
        f"torchvision's compiled operators do not fit this torch: declared {', '.join(_declared)} so that its "
        "pure-PyTorch models work",
    )


def _import() -> ModuleType:
    before = set(sys.modules)
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if not re.search(r"operator torchvision::\w+ does not exist", str(error)):
            raise
    # Submodules that did import would not be bound to the package when it is imported again.
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "torchvision":
            del sys.modules[name]
    _declare()
    return importlib.import_module("torchvision")


def _declare() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    _libraries.append(library)
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
            _declared.append(name)
