"""One replica of a stage: it decodes boundaries, and computes those together that can be batched."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import ray
from ray import serve

from microtome.engine.fingerprint import named_weights
from microtome.errors import BadWeights
from microtome.remote.batching import ExampleBoundaries
from microtome.remote.error_kinds import to_message
from microtome.remote.inference_backend import EncodedOutput
from microtome.remote.served_model import ServedModel
from microtome.remote.stage_ref import StageRef
from microtome.split.boundary.boundary import Boundary


class ReplicaOptions(NamedTuple):
    """Arguments of a replica other than its stage.

    Attributes:
        ref: The name of the stage.
        fingerprint: The fingerprint of the model that the stage must be of.
        device: The device that computes.
        limit: The most memory that decoding a request may take.
        batch: The most requests in a batch; 1: no batching.
        batch_window_s: Seconds that a single request waits for others.
        examples: The example boundaries of the batcher, encoded; None: requests are computed one by one.
    """

    ref: StageRef
    fingerprint: str
    device: str
    limit: int
    batch: int = 1
    batch_window_s: float = 0.0
    examples: tuple[bytes, bytes, bytes] | None = None


class ReplicaStatus(NamedTuple):
    """The state of a replica, and its batches so far.

    Attributes:
        node: The identifier of its node in the cluster.
        weights: The names of the weights that it has; the others are on meta.
        batches: How many batches of each number of requests it has computed.
    """

    node: str
    pid: int
    weights: tuple[str, ...]
    batches: dict[int, int]


class StageReplica:
    """A stage in a process of the cluster. The methods are called through the handle of its deployment."""

    def __init__(self, source: Any, options: ReplicaOptions) -> None:
        """Load the stage.

        Args:
            source: The `StageSource` of the stage, or a reference to it in the object store.

        Raises:
            BadWeights: It is a stage of another model.
        """
        stage = (ray.get(source) if isinstance(source, ray.ObjectRef) else source).load(options.device)
        if stage.fingerprint != options.fingerprint:
            raise BadWeights(
                f"expected the stage {options.ref} of the model with the fingerprint {options.fingerprint}, got one of "
                f"{stage.fingerprint}: copy the same folder of Stages.save to every node"
            )
        examples = None
        if options.examples is not None:
            decoded = (Boundary.from_bytes(data).to(options.device) for data in options.examples)
            examples = ExampleBoundaries(*decoded)
        self._served = ServedModel(stage, examples=examples)
        self._options = options
        self._batches: Counter[int] = Counter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="microtome-stage")
        self._collect.set_max_batch_size(options.batch)
        self._collect.set_batch_wait_timeout_s(options.batch_window_s if options.batch > 1 else 0.0)

    async def compute(self, requests: list[EncodedOutput]) -> list[EncodedOutput]:
        """Run the stage on the outputs of the stage before it, or on requests; errors among them stay as they are."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compute_all, requests)

    async def compute_one(self, request: EncodedOutput) -> EncodedOutput:
        """Run the stage on one request, in a batch with others that arrive within the batch window."""
        output: EncodedOutput = await self._collect(request)
        return output

    @serve.batch  # type: ignore[untyped-decorator]
    async def _collect(self, requests: list[EncodedOutput]) -> list[EncodedOutput]:
        return await self.compute(requests)

    async def status(self) -> ReplicaStatus:
        model = self._served.model
        weights = tuple(name for name, tensor in named_weights(model) if not tensor.is_meta)
        return ReplicaStatus(ray.get_runtime_context().get_node_id(), os.getpid(), weights, dict(self._batches))

    async def check_health(self) -> None:
        """Raise if the device is unusable: Ray Serve then replaces the replica."""
        failure = await asyncio.to_thread(self._served.device_failure)
        if failure is not None:
            raise RuntimeError(f"the device failed: {failure}")

    # -- in the thread that computes -----------------------------------------------------------------------------------

    def _compute_all(self, requests: list[EncodedOutput]) -> list[EncodedOutput]:
        outputs = list(requests)
        groups: dict[Any, dict[int, Boundary]] = {}
        for index, request in enumerate(requests):
            if request.data is None:
                continue
            try:
                boundary = self._served.decode(request.data, self._options.limit)
                self._served.check_stage(self._options.ref, boundary)
                key = self._served.batch_key(boundary, self._options.ref) if len(requests) > 1 else None
            except BaseException as error:  # noqa: BLE001  the client is told, and others are served
                outputs[index] = _failed(error)
            else:
                groups.setdefault(index if key is None else key, {})[index] = boundary
        for group in groups.values():
            self._compute_group(group, outputs)
        return outputs

    def _compute_group(self, group: dict[int, Boundary], outputs: list[EncodedOutput]) -> None:
        """Compute requests of one batch key together; if that fails, each alone."""
        try:
            computed = self._served.compute([*group.values()], self._options.ref)
        except BaseException as error:  # noqa: BLE001  whatever the model raises, the client is told
            for index, boundary in group.items():
                if len(group) == 1:
                    outputs[index] = _failed(error)
                else:
                    self._compute_group({index: boundary}, outputs)
            return
        self._batches[len(group)] += 1
        for (index, boundary), output in zip(group.items(), computed, strict=True):
            outputs[index] = self._encode(output, boundary.at, len(group))

    def _encode(self, output: Any, at: str, batch: int) -> EncodedOutput:
        try:
            data = self._served.encode(output, at, "raw")
        except BaseException as error:  # noqa: BLE001  the output cannot be sent
            return _failed(error)
        return EncodedOutput(np.frombuffer(data, np.uint8), batch=batch)


def _failed(error: BaseException) -> EncodedOutput:
    kind, message = to_message(error)
    return EncodedOutput(kind=kind, message=message.message)
