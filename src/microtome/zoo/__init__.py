"""Models by name: small built-in ones, and those of torchvision, timm, transformers and of any Python code.

The built-in models need torch alone and have the same weights on every machine: what the demo, the examples and the
tests run on. The other packages are imported only when one of their models is asked for.

>>> names()
('tiny-decoder', 'tiny-lstm', 'tiny-resnet', 'tiny-unet', 'tiny-vit')
>>> model, inputs = build("tiny-resnet")
>>> model(inputs).shape
torch.Size([2, 10])
>>> found = resolve("zoo:tiny-resnet", inputs="1x3x64x64", args={"classes": 4})
>>> found.inputs.run(found.model).shape
torch.Size([1, 4])
"""

from __future__ import annotations

from microtome.zoo.builtin import Inputs, build, names
from microtome.zoo.catalogue import Listing, listing
from microtome.zoo.resolver import Resolved, resolve
from microtome.zoo.torchvision_import import import_torchvision

__all__ = ["Inputs", "Listing", "Resolved", "build", "import_torchvision", "listing", "names", "resolve"]
