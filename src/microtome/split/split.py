"""Cutting a model into stages that give together what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from torch import nn

from microtome.engine.select import check_model
from microtome.errors import NoMatch
from microtome.inputs import Inputs, device_of
from microtome.split.cuts import list_cuts
from microtome.split.data import Cuts
from microtome.split.liveness import Liveness
from microtome.split.stage import Stage
from microtome.split.study import study
from microtome.split.trail import trail_to
from microtome.split.weights import digest_of, structure_of, weights_of


class Stages(Sequence[Stage]):
    def __init__(self, stages, cuts, fingerprint):
        self._stages = stages
        self.cuts = cuts
        self.fingerprint = fingerprint

    def __len__(self): return len(self._stages)
    def __getitem__(self, i): return self._stages[i]


def split(model: nn.Module, inputs: Any, at: str | Sequence[str]) -> Stages:
    given = Inputs.of(inputs, device=device_of(check_model(model)))
    seen = study(model, given)
    cuts = list_cuts(type(model).__name__, seen)
    wanted = [at] if isinstance(at, str) else list(at)
    chosen = [cuts[one] for one in wanted]
    liveness = Liveness(seen)
    crossings = [None, *(liveness.crossing(seen.ending[cut.index]) for cut in chosen), None]
    trails = [None if c is None else trail_to(seen, c) for c in crossings]
    fingerprint = f"{structure_of(seen, model)}-{digest_of(model)}"
    stages = [
        Stage(model, i, trails[i], trails[i + 1], seen.inputs, weights_of(seen, crossings[i], crossings[i + 1]), fingerprint, fast_paths=True)
        for i in range(len(chosen) + 1)
    ]
    return Stages(stages, cuts, fingerprint)
