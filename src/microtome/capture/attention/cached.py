"""Attention whose place is known from a run before: it is taken there, and nothing else is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from microtome.capture.attention.probe import AttentionProbe, WeightSource, by_heads
from microtome.engine import Call, Probe
from microtome.engine.composite_ops import unseen
from microtome.engine.torch_internals import count_dispatch_modes


class CachedAttention(Probe):
    """Gives the weights of each layer to `keep(address, weights)`, as `AttentionProbe` does, at a fraction of the cost.

    It can be made after a run in which all attention came out of `nn.Softmax` modules, and holds for runs in which
    these are called in the same order: `fits` says whether they were.

    Attributes:
        paths: The modules that a session with this probe is to look at.
    """

    def __init__(self, keep: Callable[[str, Tensor], object], sources: dict[str, WeightSource]) -> None:
        self._keep = keep
        self._sources = sources
        self._seen: list[str] = []
        self.paths = list(dict.fromkeys(address.rpartition("#")[0] or address for address in sources))

    @classmethod
    def after(cls, probe: AttentionProbe, keep: Callable[[str, Tensor], object]) -> CachedAttention | None:
        """What is known after a run; None: some attention came out of something else."""
        sources = {address: source for address, source in probe.sources.items() if source is not None}
        return cls(keep, sources) if sources and len(sources) == len(probe.sources) and not probe.hidden else None

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not call.path or call.phase != "forward":
            return
        self._seen.append(call.address)
        source = self._sources.get(call.address)
        if source is not None and source.wanted:
            with unseen(output.device) if count_dispatch_modes() else torch.no_grad():
                self._keep(source.address, by_heads(output, source.layer).clone())

    def fits(self) -> bool:
        """Whether the run made the calls that it was to make; forgets them."""
        seen, self._seen = self._seen, []
        return seen == list(self._sources)
