"""Sources of models: one file for each, with `names`, which it can build, and `find`."""

from __future__ import annotations

from microtome.zoo.sources import builtin, hf, timm, torchvision
from microtome.zoo.sources.source import ModelSource

#: By the word before the colon.
SOURCES: dict[str, ModelSource] = {"zoo": builtin, "torchvision": torchvision, "timm": timm, "hf": hf}
