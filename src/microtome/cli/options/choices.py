"""The choices of options that packages which import torch define; a test compares them with the definitions."""

from __future__ import annotations

CONVENTIONS = ("microtome", "torchvision", "fvcore", "ptflops", "torchstat")
DEVICE_TIMES = ("kernels", "graph")
OBJECTIVES = ("latency", "energy", "throughput", "training")
REDUCTIONS = ("mean", "max", "cls", "last")
SCHEDULES = ("gpipe", "1f1b")
#: The prefixes of the names of models.
SOURCES = ("zoo", "torchvision", "timm", "hf")
#: The models of `zoo:`.
BUILT_IN = ("tiny-decoder", "tiny-lstm", "tiny-resnet", "tiny-unet", "tiny-vit", "tiny-writer")
