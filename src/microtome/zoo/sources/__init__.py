"""Where models come from: one file a source, each with `names`, what it can build, and `find`."""

from __future__ import annotations

from microtome.zoo.sources import builtin, hf, timm, torchvision
from microtome.zoo.sources.found import Source

#: By the word before the colon.
SOURCES: dict[str, Source] = {"zoo": builtin, "torchvision": torchvision, "timm": timm, "hf": hf}
