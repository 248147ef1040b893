"""Sources of models, one file each: `gs.py` with `PREFIX = "gs"`, `names` and `find` adds `gs:NAME`.

`python.py` has no prefix: it is the fallback for `package.module:NAME` and `./file.py:NAME`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import cast

from microtome.zoo.sources.base import ModelSource

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]

#: The sources by their prefixes.
SOURCES: dict[str, ModelSource] = {
    module.PREFIX: cast("ModelSource", module) for module in _MODULES if hasattr(module, "PREFIX")
}
