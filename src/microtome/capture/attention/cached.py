"""Capture attention weights at the modules where an earlier run found them, without observing operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from microtome.capture.attention.probe import AttentionProbe, WeightSource, split_heads
from microtome.engine import Call, Probe
from microtome.engine.composite_ops import suspend_tracing
from microtome.engine.torch_internals import count_dispatch_modes


class CachedAttention(Probe):
    """Passes the weights of each layer to `capture(address, weights)`, as `AttentionProbe` does, at lower cost.

    It requires a run in which `nn.Softmax` modules computed all attention, and is valid for runs that call these in
    the same order, which `matches` checks.

    Attributes:
        paths: The modules that a session with this probe must observe.
    """

    def __init__(self, capture: Callable[[str, Tensor], object], sources: dict[str, WeightSource]) -> None:
        self._capture = capture
        self._sources = sources
        self._calls: list[str] = []
        self.paths = list(dict.fromkeys(address.rpartition("#")[0] or address for address in sources))

    @classmethod
    def from_run(cls, probe: AttentionProbe, capture: Callable[[str, Tensor], object]) -> CachedAttention | None:
        """Create one from the probe of a run; None if other code than `nn.Softmax` modules computed attention."""
        sources = {address: source for address, source in probe.sources.items() if source is not None}
        is_complete = sources and len(sources) == len(probe.sources) and not probe.fused_ops
        return cls(capture, sources) if is_complete else None

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not call.path or call.phase != "forward":
            return
        self._calls.append(call.address)
        source = self._sources.get(call.address)
        if source is not None and source.is_selected:
            with suspend_tracing(output.device) if count_dispatch_modes() else torch.no_grad():
                self._capture(source.address, split_heads(output, source.layer).clone())

    def matches(self) -> bool:
        """Return whether the run called the same modules in the same order, and reset for the next run."""
        calls, self._calls = self._calls, []
        return calls == list(self._sources)
