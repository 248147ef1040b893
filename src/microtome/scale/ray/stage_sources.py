"""Where a replica has its stage from: the object store of the cluster, or a folder that all nodes see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from microtome.addresses import INPUT
from microtome.engine.selectors import check_model
from microtome.errors import BadQuery, Unsupported
from microtome.inputs import Inputs
from microtome.remote.payloads import INPUTS
from microtome.remote.stage_ref import StageRef, describe_stage
from microtome.results.cuts import Cut
from microtome.split.boundary.boundary import Boundary
from microtome.split.checkpoint import load_stage, saved_cuts
from microtome.split.stage import Stage
from microtome.split.stages import Stages
from microtome.split.weights import fill_weights, move_attributes, tensor_at

#: Memory that decoding weights may take, for each byte of them and beside: layouts need temporary copies.
_DECODING_FACTOR, _DECODING_BYTES = 8, 64 << 20


class StageSource(Protocol):
    """Makes a stage in a replica."""

    def load(self, device: str) -> Stage:
        """Return the stage with its weights, and no others, on a device."""


@dataclass(frozen=True, eq=False)
class PackedStage:
    """A stage and its weights. Ray keeps arrays in shared memory, where the replicas of a node read them.

    Attributes:
        stage: The stage, with all weights on meta.
        weights: Its weights by name, as the bytes of a boundary.
    """

    stage: Stage
    weights: np.ndarray[Any, Any]

    def load(self, device: str) -> Stage:
        limit = _DECODING_FACTOR * len(self.weights) + _DECODING_BYTES
        weights = Boundary.from_bytes(self.weights.data, limit=limit).to(device).tensors
        fill_weights(self.stage.model, weights)
        move_attributes(self.stage.model, device)
        return self.stage


@dataclass(frozen=True, eq=False)
class FolderStage:
    """A stage in a folder that `Stages.save` wrote.

    Attributes:
        model: Builds the model, as for `mt.load_stage`.
    """

    model: Callable[[], nn.Module]
    folder: str
    index: int

    def load(self, device: str) -> Stage:
        return load_stage(self.model, self.folder, self.index, device=device)


class StageSet:
    """The stages of a model, packed or saved.

    Attributes:
        at: The addresses of the cuts between them.
        example: The inputs of the example; None: not known.
    """

    def __init__(
        self, stages: Stages | str | Path, model: Callable[[], nn.Module] | None = None, inputs: Any = None
    ) -> None:
        """See `microtome.scale.ray.deploy`."""
        self._stages = stages if isinstance(stages, Stages) else None
        self._folder = "" if isinstance(stages, Stages) else str(stages)
        self._model = model
        self._stage_cache: dict[int, Stage] = {}
        self.example: Inputs | None = None
        if self._stages is not None:
            if model is not None or inputs is not None:
                raise BadQuery("expected model= and inputs= only for a folder, got stages, which have both")
            self.at: tuple[str, ...] = self._stages.at
            self.example = self._stages.example
            return
        if not isinstance(stages, str | Path):
            raise BadQuery(f"expected the stages of mt.split, or the folder of Stages.save, got {stages!r:.200}")
        if model is None:
            raise BadQuery(f"expected model=, a class or function that builds the model of {self._folder!r}, got None")
        self.at = tuple(saved_cuts(stages))
        if inputs is not None:
            self.example = Inputs.of(inputs, check_model(self[0].model))

    def __len__(self) -> int:
        return len(self.at) + 1

    def __getitem__(self, index: int) -> Stage:
        """The stage in this process."""
        if self._stages is not None:
            return self._stages[index]
        assert self._model is not None
        if index not in self._stage_cache:
            self._stage_cache[index] = load_stage(self._model, self._folder, index)
        return self._stage_cache[index]

    def ref(self, index: int) -> StageRef:
        """Name a stage as requests do, by the cuts where it begins and ends."""
        return StageRef(self.at, index)

    def resolve(self, only: Sequence[int | str | Cut] | None) -> range:
        """Return the numbers of the stages that a user names, by number or by the cut where they begin."""
        if only is None:
            return range(len(self))
        if not isinstance(only, list | tuple | range) or not only:
            raise BadQuery(f"expected only= with numbers of stages, or the cuts where they begin, got {only!r}")
        numbers = [self._number(one) for one in only]
        indices = range(min(numbers), max(numbers) + 1)
        if sorted(numbers) != list(indices):
            raise BadQuery(f"expected stages in a row, got {', '.join(map(str, numbers))}")
        return indices

    def _number(self, one: int | str | Cut) -> int:
        refs = [self.ref(index) for index in range(len(self))]
        named = one.at if isinstance(one, Cut) else one
        for index, ref in enumerate(refs):
            if isinstance(named, str):
                is_this = (INPUTS if named == INPUT else named.removesuffix("#0")) == ref.begins_at.removesuffix("#0")
            else:
                is_this = named == index and not isinstance(named, bool)
            if is_this:
                return index
        known = "; ".join(f"{index} {ref}" for index, ref in enumerate(refs))
        raise BadQuery(f"expected one of the stages {known}; got {one!r}")

    def check(self, index: int) -> None:
        """Raise if a stage cannot run in a replica."""
        stage = self[index]
        if stage.state is not None:
            raise Unsupported(
                f"replicas cannot run this model: it carries {stage.state} from run to run, and requests of several "
                "clients would share it. Put the model in eval mode, or have it take and return its state"
            )
        missing = [
            name
            for name in stage.parameters_needed()
            if (tensor := tensor_at(stage.model, name)) is None or tensor.is_meta
        ]
        if missing:
            where = describe_stage(stage.begins_at or INPUTS, stage.ends_at)
            raise Unsupported(
                f"the weights of stage {index} {where} are not in this process, such as {missing[0]!r}: split "
                "without load=, or deploy the folder of Stages.save"
            )

    def sources(self, indices: range) -> list[StageSource]:
        """Return the sources of some stages."""
        if self._stages is None:
            assert self._model is not None
            return [FolderStage(self._model, self._folder, index) for index in indices]
        return [self._pack(index) for index in indices]

    def _pack(self, index: int) -> PackedStage:
        assert self._stages is not None
        stage = self._stages.without_weights()[index]
        move_attributes(stage.model, "cpu")
        weights = {name: _weight(self._stages[index], name) for name in stage.parameters_needed()}
        data = Boundary("", stage.fingerprint, weights, {}).to_bytes()
        return PackedStage(stage, np.frombuffer(data, np.uint8))


def _weight(stage: Stage, name: str) -> torch.Tensor:
    tensor = tensor_at(stage.model, name)
    assert tensor is not None
    return tensor.detach()
