"""Capture the outputs of modules and operators in one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from microtome.capture.feature_extractor import FeatureExtractor
from microtome.capture.features import Features
from microtome.capture.retention import Clone
from microtome.engine import Selector


def extract(
    model: nn.Module,
    model_inputs: Any,
    /,
    at: Selector,
    *,
    stop: bool = True,
    inputs: bool = False,
    grad: bool = False,
    detach: bool = True,
    clone: Clone = "auto",
    device: torch.device | str | None = None,
    transform: Callable[[Any], Any] | None = None,
) -> Features:
    """Run the model once and return the outputs of the selected modules. In a loop, use an `extractor`.

    Args:
        model_inputs: A tensor, a tuple, a dict, an `Inputs`, or a shape such as `"1x3x224x224"`.
        at: The modules: a path, a glob, a module type, … or several; `"path#1"` for one call of a module;
            `"path/operator"` for operators in their calls.
        stop: End the run after the last selected call. A run on tensors without values, which hooks and edits see too,
            finds that call; the result is cached. Models that branch on values or draw random numbers run to the end.
        inputs: Capture the arguments of the calls too.
        grad: Keep captured tensors in the autograd graph, run to the end, and collect gradients in a later backward.
        detach: Detach captured tensors from the autograd graph.
        clone: Clone them; `"auto"`: only those that are mutated later in the run or would pin a larger tensor.
        device: Move them to this device as they are captured.
        transform: Called with each output as it is captured, which it must not mutate; its result is kept.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> feats = extract(net, torch.ones(1, 2), nn.ReLU)
    >>> feats["1"].shape, feats.stopped
    (torch.Size([1, 3]), True)
    """
    options: dict[str, Any] = {"stop": stop, "inputs": inputs, "grad": grad, "detach": detach, "clone": clone}
    return FeatureExtractor(model, at, **options, device=device, transform=transform).run_once(model_inputs)


def extractor(model: nn.Module, at: Selector, **options: Any) -> FeatureExtractor:
    """Return a function of inputs that does what `extract` does, at lower cost from its second call on.

    The first call with inputs of some shapes analyzes the model, as `extract` does each time. Later calls only check
    that neither its modules nor their attributes have changed, and observe the selected modules alone.

    Args:
        at: The modules or operators, as for `extract`; selected again when the model has changed.
        options: Those of `extract`: `stop`, `inputs`, `grad`, `detach`, `clone`, `device` and `transform`.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> features = extractor(net, "1")
    >>> [features(torch.ones(size, 2))["1"].shape for size in (1, 4)]
    [torch.Size([1, 3]), torch.Size([4, 3])]
    """
    return FeatureExtractor(model, at, **options)
