"""Record the outputs of modules over a data set, on the workers of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from microtome.capture.options import Reduce
from microtome.capture.record import RecordTotals
from microtome.capture.store.base import Keep
from microtome.capture.store.parts import PartsFolder, part_name
from microtome.capture.store.recording import Recording
from microtome.engine import Selector
from microtome.errors import BadInputs, BadQuery, BadWeights, MicrotomeError, describe_value
from microtome.files.reading import File
from microtome.load import load
from microtome.scale.ray.arguments import check_counts, check_dataset
from microtome.scale.ray.blocks import DatasetPart, divide, row_slices
from microtome.scale.ray.columns import Columns, InputColumns
from microtome.scale.ray.packages import import_ray
from microtome.scale.ray.resources import check_room, count_places, task_demand
from microtome.scale.ray.worker import PartTotals, RecordSpec, WorkerModel, check_model_spec, record_part

#: How often Ray runs a part again whose worker was killed.
MAX_RETRIES = 5


def record(
    dataset: Any,
    model: nn.Module | str,
    at: Selector,
    *,
    to: File,
    inputs: InputColumns | None = None,
    id: str | None = None,  # noqa: A002  the term of the field
    batch_size: int = 32,
    batches_per_part: int = 16,
    reduce: Reduce | None = None,
    keep: Keep = "all",
    histogram: tuple[int, float, float] | None = None,
    workers: int | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
    progress: Callable[[RecordTotals], None] | None = None,
) -> Recording:
    """Record the outputs of modules over all rows of a Ray data set; return the recording, in the order of the rows.

    The recording has the same bits as that of one process which runs the model in eval mode without gradients on the
    same batches: rows `0` to `batch_size - 1` of the data set, and so on, the last batch may be smaller. Blocks of the
    data set, the number of workers and retries make no difference. The process must use the same number of threads
    (`torch.set_num_threads`; a worker has `num_cpus` rounded down, at least 1), the same kind of device and the same
    versions, since the order of sums within an operator depends on these.

    A worker that is killed loses the part it was recording, which another records again; complete parts are kept. If
    the recording fails, its parts are removed.

    Args:
        dataset: A `ray.data.Dataset`. It is executed as a stream, in order.
        model: A module, which the workers get once, or the name of a model such as `torchvision:resnet50`, which each
            worker builds. It runs in eval mode.
        at: The modules, as for `mt.record`.
        to: The folder to write to, new or empty, on a file system that all nodes share. `mt.load` reads it.
        inputs: The column of the model's input; several, for positional arguments; `{"argument": "column"}` for keyword
            arguments; or a function of a batch, a dict of arrays, that returns the inputs. By default the only column
            beside `id`.
        id: The column of ids, which `Recording.ids` returns; None: the id of a row is its position in the data set.
        batch_size: The number of rows of a batch.
        batches_per_part: The number of batches of a part, which is repeated after a failure. Raise it on GPUs, where
            each part runs in a new process.
        reduce: As for `mt.record`.
        keep: As for `mt.record`.
        histogram: As for `mt.record`.
        workers: The maximum number of parts recorded at once; None: as many as the cluster has CPUs or GPUs for.
        num_cpus: The CPUs of a worker.
        num_gpus: The GPUs of a worker; the model and its inputs are moved to it.
        progress: Called with the `RecordTotals` after each part.

    Raises:
        NoMatch: The data set lacks a column, or the model a module. The model has not run then, and nothing is written.
            Ray has computed the first block if it did not know the columns otherwise.
    """
    ray = import_ray()
    check_dataset(ray, dataset)
    counts = {} if workers is None else {"workers": workers}
    check_counts(batch_size=batch_size, batches_per_part=batches_per_part, **counts)
    if not isinstance(to, str | os.PathLike):
        raise BadQuery(f"expected the path of a folder as `to`, got {describe_value(to)}")
    columns = Columns.find(dataset, inputs, id)
    options: dict[str, Any] = {"reduce": reduce, "keep": keep, "histogram": histogram}
    check_model_spec(model, at, options | {"progress": progress})
    demand = task_demand("tasks that record parts", num_cpus, num_gpus)
    check_room(ray, [demand])
    parts = PartsFolder(Path(to))
    try:
        on_worker = WorkerModel(model, max(1, int(num_cpus)), on_gpu=num_gpus > 0)
        spec = RecordSpec(on_worker, at, columns, batch_size, os.path.abspath(to), options)
        task = ray.remote(record_part).options(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=MAX_RETRIES)
        run = _PartsRun(ray, task, spec, workers or count_places(ray, demand), progress)
        names = run.record(divide(row_slices(dataset), batch_size * batches_per_part))
        parts.publish(names)
    except BaseException:
        parts.discard()
        raise
    finally:
        parts.close()
    recording: Recording = load(to)
    return recording


class _PartsRun:
    """Records parts in tasks, of which at most `workers` run at once."""

    def __init__(
        self, ray: Any, task: Any, spec: RecordSpec, workers: int, progress: Callable[[RecordTotals], None] | None
    ) -> None:
        self._ray = ray
        self._task = task
        self._spec_ref = ray.put(spec)
        self._workers = workers
        self._progress = progress
        self._key = os.urandom(4).hex()
        self._pending: dict[Any, DatasetPart] = {}
        self._totals = RecordTotals(0, 0, 0, 0.0)
        self._weights: set[str] = set()
        self._began = perf_counter()

    def record(self, parts: Iterator[DatasetPart]) -> list[str]:
        """Record all parts; return their names, in order."""
        count = 0
        try:
            for part in parts:
                while len(self._pending) >= self._workers:
                    self._collect()
                self._submit(part)
                count += 1
            while self._pending:
                self._collect()
        except BaseException:
            self._cancel()
            raise
        if not count:
            raise BadInputs("expected a data set with rows, got an empty one")
        return [part_name(self._key, number) for number in range(count)]

    def _submit(self, part: DatasetPart) -> None:
        ranges = [(rows.start, rows.stop) for rows in part.slices]
        blocks = [rows.block for rows in part.slices]
        name = part_name(self._key, part.number)
        self._pending[self._task.remote(name, part.first, ranges, [self._spec_ref], *blocks)] = part

    def _collect(self) -> None:
        """Wait for a part."""
        (done,), _ = self._ray.wait(list(self._pending), num_returns=1)
        part = self._pending.pop(done)
        with translate_task_errors(f"in rows {part.first} to {part.first + len(part) - 1} of the data set"):
            self._count(self._ray.get(done))

    def _count(self, totals: PartTotals) -> None:
        self._weights.add(totals.weights)
        if len(self._weights) > 1:
            raise BadWeights(
                f"workers built the model with different weights: {' and '.join(sorted(self._weights))}; use the same "
                "version of torch on all nodes, or pass the model instead of its name"
            )
        runs, records, nbytes, _ = self._totals
        amounts = (runs + totals.runs, records + totals.records, nbytes + totals.nbytes)
        self._totals = RecordTotals(*amounts, perf_counter() - self._began)
        if self._progress is not None:
            self._progress(self._totals)

    def _cancel(self) -> None:
        """End the tasks, and wait until none writes any more."""
        for task in self._pending:
            self._ray.cancel(task)
        if self._pending:
            self._ray.wait(list(self._pending), num_returns=len(self._pending))


@contextmanager
def translate_task_errors(where: str) -> Iterator[None]:
    """Raise the error of a task as it was raised there, with a note that says where."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        cause.add_note(where)
        if isinstance(cause, MicrotomeError) or cause is error:
            raise cause from None
        raise cause from error
    except RayError as error:
        error.add_note(where)
        raise
