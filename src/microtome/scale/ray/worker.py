"""Tasks of Ray: load the model once per process, and record a part of the data set."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from microtome.capture.record import ActivationRecorder
from microtome.capture.store.parts import write_part
from microtome.capture.store.recording import open_folder
from microtome.capture.store.rows import RowRange
from microtome.engine.fingerprint import weights_fingerprint
from microtome.engine.selectors import check_model
from microtome.errors import NeedsValues
from microtome.scale.ray.blocks import read_rows, split_batches
from microtome.scale.ray.columns import Batch, Columns
from microtome.zoo.resolver import resolve


@dataclass(frozen=True)
class WorkerModel:
    """A model to load in a worker.

    Attributes:
        model: The model, or its name, such as `torchvision:resnet50`.
        threads: The number of threads of an operator, on which the last digits of sums may depend.
        on_gpu: Whether to move the model and its inputs to the GPU of the task.
    """

    model: nn.Module | str
    threads: int = 1
    on_gpu: bool = False

    def load(self) -> nn.Module:
        """Return the model in eval mode."""
        torch.set_num_threads(self.threads)
        model = resolve(self.model).model if isinstance(self.model, str) else self.model
        return (model if self.device is None else model.to(self.device)).eval()

    @property
    def device(self) -> str | None:
        """The device of inputs; None: as they are."""
        return "cuda" if self.on_gpu else None


@dataclass(frozen=True)
class RecordSpec:
    """Options of the recording of a part.

    Attributes:
        options: Options of `mt.record`.
        folder: The folder of the parts.
    """

    model: WorkerModel
    at: Any
    columns: Columns
    batch_size: int
    folder: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PartTotals:
    """The amount that a part has, and the fingerprint of the weights."""

    runs: int
    records: int
    nbytes: int
    weights: str


class _WorkerState:
    """The model of a recording in this process, and the fingerprint of its weights."""

    def __init__(self, spec: RecordSpec) -> None:
        self.spec = spec
        self.model = spec.model.load()
        self.weights = weights_fingerprint(self.model)


#: The state of the last recording in this process, by the id of its specification: tasks reuse processes.
_states: dict[str, _WorkerState] = {}


def _load_state(spec_ref: Any) -> _WorkerState:
    import ray

    key = spec_ref.hex()
    if key not in _states:
        _states.clear()
        _states[key] = _WorkerState(ray.get(spec_ref))
    return _states[key]


def record_part(name: str, first: int, ranges: list[tuple[int, int]], spec_refs: list[Any], *blocks: Any) -> PartTotals:
    """Record the rows of a part, unless another task has completed it.

    Args:
        first: The position of the first row in the data set.
        ranges: The rows of each block.
        spec_refs: The reference of the `RecordSpec`, in a list, so that Ray passes it as it is.
    """
    state = _load_state(spec_refs[0])
    rows = read_rows(blocks, ranges, state.spec.columns.needed)

    def write(folder: Path) -> None:
        sizes = _record_batches(state, rows, folder)
        RowRange(first, sizes, state.weights, state.spec.columns.ids_of(rows)).write(folder)

    folder = write_part(Path(state.spec.folder), name, write)
    with open_folder(folder) as recording:
        assert recording.rows is not None, "written by this function"
        return PartTotals(len(recording.rows.sizes), recording.count, recording.nbytes, recording.rows.weights)


def _record_batches(state: _WorkerState, rows: Batch, folder: Path) -> tuple[int, ...]:
    """Run the model on each batch; return the numbers of their rows."""
    spec, sizes = state.spec, []
    torch.set_num_threads(spec.model.threads)
    with ActivationRecorder(state.model, spec.at, to=folder, **spec.options), torch.no_grad():
        for batch in split_batches(rows, spec.batch_size):
            spec.columns.inputs_of(batch, spec.model.device).run(state.model)
            sizes.append(len(next(iter(batch.values()))))
    return tuple(sizes)


def check_model_spec(model: nn.Module | str, at: Any, options: dict[str, Any]) -> None:
    """Raise if the model, the selectors or the options of a recording are invalid, without computing anything."""
    ActivationRecorder(resolve_on_meta(model), at, **options)


def resolve_on_meta(model: nn.Module | str) -> nn.Module:
    """Return a model, or one of that name without values of its weights if it can be built so."""
    if not isinstance(model, str):
        return check_model(model)
    try:
        return resolve(model, meta=True).model
    except NeedsValues:
        return resolve(model).model
