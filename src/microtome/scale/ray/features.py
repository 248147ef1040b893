"""Extract the outputs of modules as columns of a data set."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from microtome.capture.extract import extractor
from microtome.capture.options import Reduce, find_reduction
from microtome.capture.targets import Targets
from microtome.engine import Selector
from microtome.engine.pytree import named_tensors
from microtome.errors import BadQuery, Unsupported
from microtome.scale.ray.arguments import check_counts, check_dataset
from microtome.scale.ray.columns import Batch, Columns, InputColumns, keep_columns
from microtome.scale.ray.packages import import_ray
from microtome.scale.ray.resources import check_room, task_demand
from microtome.scale.ray.worker import WorkerModel, resolve_on_meta


def extract(
    dataset: Any,
    model: nn.Module | str,
    at: Selector,
    *,
    inputs: InputColumns | None = None,
    id: str | None = None,  # noqa: A002  the term of the field
    batch_size: int = 32,
    reduce: Reduce | None = None,
    workers: int | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
) -> Any:
    """Return a Ray data set with the outputs of modules as columns, named by their addresses.

    It is a lazy `map_batches` stage. Each row keeps its id. Ray forms the batches from blocks of the data set: `record`
    has the same batches, and so the same bits, whatever the blocks.

    Args:
        dataset: A `ray.data.Dataset`.
        model: A module, or the name of a model such as `torchvision:resnet50`. It runs in eval mode.
        at: The modules or operators, as for `mt.extract`.
        inputs: The columns of the model's inputs, as for `record`.
        id: The column of ids to keep; None: keep all columns that are not inputs.
        batch_size: The maximum number of rows of a batch.
        reduce: Applied to each output: `"mean"` over positions, `"max"`, `"cls"`, `"last"`, or a function.
        workers: The number of workers; None: Ray chooses it.
        num_cpus: The CPUs of a worker.
        num_gpus: The GPUs of a worker.
    """
    ray = import_ray()
    check_dataset(ray, dataset)
    check_counts(batch_size=batch_size, **({} if workers is None else {"workers": workers}))
    columns = Columns.find(dataset, inputs, id)
    Targets(resolve_on_meta(model), at)
    reduction = None if reduce is None else find_reduction(reduce)
    check_room(ray, [task_demand("workers", num_cpus, num_gpus)])
    spec = WorkerModel(model, max(1, int(num_cpus)), on_gpu=num_gpus > 0)
    kept = keep_columns(dataset.columns(), columns)
    strategy = ray.data.ActorPoolStrategy
    return dataset.map_batches(
        FeatureColumns,
        fn_constructor_args=[[ray.put(spec)], at, columns, kept, reduction],
        batch_size=batch_size,
        batch_format="numpy",
        compute=strategy(min_size=1) if workers is None else strategy(size=workers),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
    )


class FeatureColumns:
    """Turns a batch of rows into one with columns of features, in a worker.

    Args:
        spec_refs: The reference of the `WorkerModel`, in a list, so that Ray passes it as it is.
        kept: The columns to keep.
    """

    def __init__(self, spec_refs: list[Any], at: Selector, columns: Columns, kept: list[str], reduce: Any) -> None:
        import ray

        self._spec: WorkerModel = ray.get(spec_refs[0])
        self._extract = extractor(self._spec.load(), at)
        self._columns = columns
        self._kept = kept
        self._reduce = reduce

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        inputs = self._columns.inputs_of(batch, self._spec.device)
        feats = self._extract(inputs)
        result: Batch = {name: batch[name] for name in self._kept}
        rows = len(next(iter(batch.values())))
        for address in feats.addresses:
            for place, tensor in named_tensors(feats[address]):
                name = address + place
                if name in result:
                    raise BadQuery(f"the data set has a column {name!r} already: keep only the ids, with id=...")
                result[name] = self._to_column(name, tensor, rows)
        return result

    def _to_column(self, name: str, tensor: Tensor, rows: int) -> np.ndarray[Any, Any]:
        value = tensor if self._reduce is None else self._reduce(tensor)
        if value.ndim == 0 or value.shape[0] != rows:
            raise Unsupported(
                f"expected an output with a value for each of {rows} rows at {name!r}, got the shape "
                f"{tuple(value.shape)}: pass a function as `reduce`"
            )
        try:
            array: np.ndarray[Any, Any] = value.cpu().numpy()
        except TypeError as error:
            raise Unsupported(
                f"arrays have no dtype {value.dtype}, which {name!r} has: convert it with `reduce`"
            ) from error
        return array
