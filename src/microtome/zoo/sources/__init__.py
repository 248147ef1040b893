"""Sources of models. To add `gs:NAME`, write `gs.py` with `PREFIX = "gs"`, `names` and `find`, and import it here.

`python.py` has no prefix: it is the fallback for `package.module:NAME` and `./file.py:NAME`.
"""

from __future__ import annotations

from microtome.zoo.sources import builtin, hf, timm, torchvision
from microtome.zoo.sources.base import ModelSource

#: In the order in which models are listed and suggested.
_MODULES: tuple[ModelSource, ...] = (builtin, torchvision, timm, hf)

#: The sources by their prefixes.
SOURCES = {module.PREFIX: module for module in _MODULES}
