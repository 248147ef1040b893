"""The published parameters and operations of torchvision's models, and the inputs that they were counted with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import microtome as mt
from microtome import zoo

zoo.import_torchvision()
from torchvision import models  # noqa: E402

from benchmarks.detection import detection_runs  # noqa: E402

#: The table was computed with trained weights on noise, in which most detectors find nothing. For these two, the number
#: of detected objects, each of which adds the cost of the last head, is chosen so that the count matches. They are no
#: evidence that the count is correct, and the results say so.
FOUND = {
    "KeypointRCNN_ResNet50_FPN_Weights.COCO_V1": 1,
    "MaskRCNN_ResNet50_FPN_V2_Weights.COCO_V1": 100,
}


@dataclass(frozen=True)
class Published:
    """An entry of the table: a set of weights of a model."""

    name: str
    weights: Any

    def __str__(self) -> str:
        return f"{self.name}-{self.weights.name}"

    @property
    def kind(self) -> str:
        """`detection`, `video`, `segmentation`, `optical_flow`, `quantization`, or `models` for classifiers."""
        return str(models.get_model_builder(self.name).__module__.split(".")[-2])

    @property
    def params(self) -> int:
        return int(self.weights.meta["num_params"])

    @property
    def giga_macs(self) -> float:
        return float(self.weights.meta["_ops"])

    def build(self, device: str = "meta") -> nn.Module:
        """Build the model for these weights, with random ones; on the meta device if possible."""
        if self.kind == "detection" or self.name.startswith("regnet"):
            device = "cpu"
        weights, options = self.weights, {}
        if self.kind == "quantization":  # before quantization: the same layers
            weights, options = None, {"quantize": False}
            if "googlenet" in self.name:
                options["aux_logits"] = False
        with warnings.catch_warnings(), torch.device(device), _without_loading(), torch.random.fork_rng():
            torch.manual_seed(0)
            warnings.simplefilter("ignore")  # deprecated initialization and quantization
            model: nn.Module = models.get_model_builder(self.name)(weights=weights, **options).eval()
        if self.kind == "detection":
            _find(model, FOUND.get(str(self.weights), 0))
        return model

    def inputs(self) -> Any:
        """Return torchvision's inputs: an image of 512 x 512, or 16 for a video, through the weights' transforms."""
        shape = {"detection": (3, 512, 512), "video": (1, 16, 3, 512, 512)}.get(self.kind, (1, 3, 512, 512))
        image = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        transform = self.weights.transforms()
        if self.kind == "optical_flow":
            return tuple(transform(image, image))
        return ([transform(image)],) if self.kind == "detection" else (transform(image),)

    def profile(self) -> mt.Profile:
        with torch.no_grad(), detection_runs(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which detectors use
            return mt.profile(self.build(), self.inputs(), convention="torchvision")

    def agrees(self, p: mt.Profile) -> bool:
        assert p.total.flops is not None
        close = abs(p.total.flops / 1e9 - self.giga_macs) <= max(0.005 * self.giga_macs, 0.001)
        return p.total.params == self.params and close


def table() -> list[Published]:
    """List every entry of torchvision."""
    names = models.list_models()
    return [Published(name, weights) for name in names for weights in models.get_model_weights(name)]


@contextmanager
def _without_loading() -> Iterator[None]:
    """Neither download nor load weights."""
    with (
        patch.object(models.WeightsEnum, "get_state_dict", lambda *_, **__: {}),
        patch.object(nn.Module, "load_state_dict", lambda *_, **__: None),
    ):
        yield


def _find(model: nn.Module, count: int) -> None:
    """Make a detector find this many objects in noise; its last head runs on each."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and ("cls_logits" in name or "classification_head" in name):
            nn.init.constant_(parameter, -20.0)
        if name.endswith("box_predictor.cls_score.bias") and not count:
            nn.init.zeros_(parameter)
            nn.init.constant_(parameter[:1].data, 50.0)  # the background
    if count:
        model.roi_heads.detections_per_img = count  # type: ignore[union-attr]
    if hasattr(model, "rpn"):
        model.rpn.nms_thresh = 1.0  # type: ignore[union-attr]  # as many proposals as a trained model has
