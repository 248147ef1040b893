"""Run torchvision's detectors without its compiled operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from microtome import zoo


@contextmanager
def detection_runs() -> Iterator[None]:
    """Replace the one compiled operator that detectors need, and the installed torchvision may lack, by Python code."""
    ops = zoo.import_torchvision().ops
    with patch.object(ops.boxes, "nms", _suppress), patch.object(ops, "nms", _suppress):
        yield


def _suppress(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the best boxes that do not overlap a better one by more than the threshold."""
    box_iou = zoo.import_torchvision().ops.box_iou
    left = scores.argsort(descending=True)
    kept = []
    while left.numel():
        kept.append(left[0])
        overlap = box_iou(boxes[left[:1]], boxes[left[1:]])[0]
        left = left[1:][overlap <= iou_threshold]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.int64)
