"""Capture attention in repeated runs of a model, observing operators in the first run only where possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.capture.attention.probe import ATTENTION, AttentionProbe, WeightSource, split_heads
from microtome.engine import Call, Probe, Session
from microtome.engine.composite_ops import suspend_tracing
from microtome.engine.selectors import CallSelection
from microtome.engine.torch_internals import count_dispatch_modes
from microtome.inputs import Inputs

Capture = Callable[[str, Tensor], object]


class CachedAttention:
    """Captures the attention of a model in each run, and caches which modules compute it.

    If `nn.Softmax` modules computed all attention of a run, later runs observe only these, at lower cost. A later run
    that calls them in another order is discarded, and repeated with all operators observed. In training mode a repeated
    run would differ, so all operators are observed.

    Args:
        capture: Called with the address and the weights of each layer, as by `AttentionProbe`.
        discard: Called before a run is repeated.
    """

    def __init__(self, capture: Capture, discard: Callable[[], object]) -> None:
        self._capture = capture
        self._discard = discard
        self._cache: _Cache | None = None

    def run(self, model: nn.Module, inputs: Inputs, at: nn.Module | None) -> tuple[Any, AttentionProbe | None]:
        """Run the model, and return its output and the probe; None: only `nn.Softmax` modules were observed.

        Args:
            at: The module whose attention is captured; None: all.
        """
        cache, self._cache = self._cache, None
        modules = list(model.modules())
        if cache is not None and cache.is_valid(modules):
            with cache.session:
                output = inputs.run(model)
            if cache.probe.matches():
                self._cache = cache
                return output, None
            self._discard()
        probe = AttentionProbe(self._capture, at=None if at is None else CallSelection(model, at))
        with Session(model, [probe], composite=ATTENTION, other_threads="ignore"):
            output = inputs.run(model)
        sources = {address: source for address, source in probe.sources.items() if source is not None}
        has_selected = any(source.is_selected for source in sources.values())
        if has_selected and len(sources) == len(probe.sources) and not probe.fused_ops:
            softmax = _SoftmaxProbe(self._capture, sources)
            session = Session(model, [softmax], at=softmax.paths, other_threads="ignore")
            self._cache = _Cache(softmax, session, modules)
        return output, probe


class _SoftmaxProbe(Probe):
    """Captures the outputs of the `nn.Softmax` calls that computed all attention of an earlier run.

    Attributes:
        paths: The modules that a session with this probe must observe.
    """

    def __init__(self, capture: Capture, sources: dict[str, WeightSource]) -> None:
        self._capture = capture
        self._sources = sources
        self._calls: list[str] = []
        self.paths = list(dict.fromkeys(address.rpartition("#")[0] or address for address in sources))

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


class _Cache(NamedTuple):
    probe: _SoftmaxProbe
    session: Session
    modules: list[nn.Module]

    def is_valid(self, modules: list[nn.Module]) -> bool:
        """Return whether a model still has the same modules, all in eval mode."""
        return list(map(id, modules)) == list(map(id, self.modules)) and not any(module.training for module in modules)
