"""Capture attention in repeated runs of a model, observing operators in the first run only where possible."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.capture.attention.probe import ATTENTION, AttentionProbe, WeightSource, split_heads
from microtome.engine import Call, Probe, Session
from microtome.engine.composite_ops import suspend_tracing
from microtome.engine.random_states import SavedRandomStates
from microtome.engine.selectors import CallSelection, select
from microtome.engine.torch_internals import count_dispatch_modes, own_buffers, own_parameters
from microtome.inputs import Inputs

Capture = Callable[[str, Tensor], object]


class CachedAttention:
    """Captures the attention of a model in each run, and caches which modules compute it.

    If `nn.Softmax` modules computed all attention of a run, later runs observe only these, at lower cost. A later run
    that calls them in another order is discarded, and repeated with all operators observed. In training mode this takes
    a process of one thread and a model on the CPU without buffers, so that the repeated run draws the same random
    numbers and nothing else has changed; elsewhere, and after a run that was discarded, all operators are observed.

    Args:
        capture: Called with the address and the weights of each layer, as by `AttentionProbe`.
        discard: Called before a run is repeated.
    """

    def __init__(self, capture: Capture, discard: Callable[[], object]) -> None:
        self._capture = capture
        self._discard = discard
        self._cache: _Cache | None = None
        self._may_repeat_training = True

    def run(self, model: nn.Module, inputs: Inputs, at: nn.Module | None) -> tuple[Any, AttentionProbe | None]:
        """Run the model, and return its output and the probe; None: only `nn.Softmax` modules were observed.

        Args:
            at: The module whose attention is captured; None: all.
        """
        cache, self._cache = self._cache, None
        modules = list(model.modules())
        is_training = any(module.training for module in modules)
        can_repeat = not is_training or (self._may_repeat_training and _has_state_on_cpu_only(modules))
        if cache is not None and can_repeat and cache.is_valid(modules):
            before = SavedRandomStates() if is_training else None
            with cache.session:
                output = inputs.run(model)
            if cache.probe.matches():
                self._cache = cache
                return output, None
            self._discard()
            if before is not None:
                self._may_repeat_training = False
                before.restore()
        probe = AttentionProbe(self._capture, at=None if at is None else CallSelection(model, at))
        with Session(model, [probe], composite=ATTENTION, other_threads="ignore"):
            output = inputs.run(model)
        sources = {address: source for address, source in probe.sources.items() if source is not None}
        has_selected = any(source.is_selected for source in sources.values())
        if has_selected and len(sources) == len(probe.sources) and not probe.fused_ops:
            softmax = _SoftmaxProbe(self._capture, sources)
            observed = list(select(model, softmax.paths).values())  # modules: fewer are compared than with paths
            session = Session(model, [softmax], at=observed, other_threads="ignore")
            self._cache = _Cache(softmax, session, modules, [module.training for module in modules])
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


def _has_state_on_cpu_only(modules: list[nn.Module]) -> bool:
    """Return whether random states of the CPU and this thread are all that a forward of the modules changes."""
    tensors = [tensor for module in modules for tensor in own_parameters(module).values() if tensor is not None]
    has_buffers = any(own_buffers(module) for module in modules)
    return not has_buffers and all(tensor.is_cpu for tensor in tensors) and threading.active_count() == 1


class _Cache(NamedTuple):
    probe: _SoftmaxProbe
    session: Session
    modules: list[nn.Module]
    modes: list[bool]

    def is_valid(self, modules: list[nn.Module]) -> bool:
        """Return whether a model still has the same modules, in the same training modes."""
        are_same = list(map(id, modules)) == list(map(id, self.modules))
        return are_same and [module.training for module in modules] == self.modes
