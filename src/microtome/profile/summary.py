"""Summarize a model without running it."""

from __future__ import annotations

from torch import Tensor, nn

from microtome.engine.selectors import named_modules
from microtome.results.summary import ModelSummary, ModuleRow


def summarize(model: nn.Module) -> ModelSummary:
    """Return the tree of modules with the sizes of their parameters and buffers."""
    seen: set[int] = set()
    own: dict[str, list[int]] = {}
    modules = dict(named_modules(model))
    for path, module in modules.items():
        new = [tensor for tensor in module.parameters(recurse=False) if id(tensor) not in seen]
        seen.update(map(id, new))
        buffers = [tensor for tensor in module.buffers(recurse=False) if id(tensor) not in seen]
        seen.update(map(id, buffers))
        own[path] = [
            sum(tensor.numel() for tensor in new),
            sum(tensor.numel() for tensor in new if tensor.requires_grad),
            sum(map(_nbytes, new)),
            sum(map(_nbytes, buffers)),
        ]
    sums = {path: list(amounts) for path, amounts in own.items()}
    for path in reversed(sums):  # the modules inside a module come after it
        if path:
            parent = path.rpartition(".")[0]
            sums[parent] = [one + other for one, other in zip(sums[parent], sums[path], strict=True)]
    rows = []
    for path, module in modules.items():
        params, trainable, param_bytes, buffer_bytes = sums[path]
        depth = path.count(".") + 1 if path else 0
        shared = sum(tensor.numel() for tensor in module.parameters()) - params
        rows.append(ModuleRow(path, type(module).__name__, depth, params, trainable, param_bytes, buffer_bytes, shared))
    return ModelSummary(type(model).__name__, tuple(rows))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
