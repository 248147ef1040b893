"""CUDA devices: events, graphs, kernel activity, the caching allocator and NVIDIA's driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from microtome.devices.activity import Activity, watch
from microtome.devices.base import Backend
from microtome.devices.nvidia import Gpu
from microtome.errors import SensorFailed, Unsupported, describe_error

#: The caching allocator allocates whole blocks of this many bytes.
_BLOCK_BYTES = 512


class Cuda(Backend):
    type = "cuda"
    has_streams = True
    has_activity = True

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def default_generator(self, device: torch.device) -> torch.Generator | None:
        return torch.cuda.default_generators[device.index or 0]

    def timestamp(self, device: torch.device) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True, external=True)

    def capture_graph(self, device: torch.device, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except Exception as error:
            # After a failed capture torch's generators stay in capture mode until a capture succeeds.
            torch.cuda.synchronize(device)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device=device)
            raise Unsupported(f"the model cannot be captured in a CUDA graph: {describe_error(error)}") from error
        return graph

    def watch_activity(self, *, memory: bool = False) -> AbstractContextManager[Activity]:
        return watch(self.type, launch_prefix="cu", memory=memory)

    def allocated_bytes(self, nbytes: int) -> int:
        return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES

    def driver(self, device: torch.device) -> Gpu:
        return Gpu(device.index or 0)

    def uuid(self, device: torch.device) -> str | None:
        return f"GPU-{torch.cuda.get_device_properties(device.index or 0).uuid}"

    def environment(self, devices: Sequence[torch.device]) -> dict[str, str]:
        found = {"gpu": ", ".join(map(self.name, devices)), "cuda": str(torch.version.cuda)}
        try:
            with self.driver(devices[0]) as gpu:
                return found | gpu.state()
        except SensorFailed as error:
            return found | {"gpu_state": f"unknown: {error}"}
