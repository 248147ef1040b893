"""Models by name: small built-in models, and those of torchvision, timm, transformers and any Python code.

The built-in models need only torch and have the same weights on every machine; the demo, the examples and the tests
use them. Other packages are imported only when one of their models is requested.

>>> names()
('tiny-decoder', 'tiny-lstm', 'tiny-resnet', 'tiny-unet', 'tiny-vit', 'tiny-writer')
>>> model, inputs = build("tiny-resnet")
>>> model(inputs).shape
torch.Size([2, 10])
>>> resolved = resolve("zoo:tiny-resnet", inputs="1x3x64x64", args={"classes": 4})
>>> resolved.inputs.run(resolved.model).shape
torch.Size([1, 4])
"""

from __future__ import annotations

from microtome.zoo.catalogue import Listing, listing
from microtome.zoo.packages import import_torchvision
from microtome.zoo.resolver import Resolved, resolve
from microtome.zoo.sources.builtin import Inputs, build, names

__all__ = ["Inputs", "Listing", "Resolved", "build", "import_torchvision", "listing", "names", "resolve"]
