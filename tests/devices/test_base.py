"""Law: only `devices` names a backend; a device without a backend of its own is measured as far as torch allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import microtome
import microtome as mt
from microtome.devices import base
from microtome.devices.activity import Activity, Allocation, Launch
from microtome.devices.base import (
    Accelerator,
    Backend,
    accelerators_of,
    available_accelerators,
    backend_of,
    default_generators,
)
from microtome.devices.cuda import Cuda
from microtome.errors import SensorFailed, Unsupported
from microtome.profile import accelerator, passes
from microtome.report.formats import text

ROOT = Path(microtome.__file__).parent

#: Files outside `devices` that contain the word, and why.
EXCEPTIONS = {
    "cli/options/model.py": "help of --device",
    "cli/usage_errors.py": "a hint for the options --cuda and --gpu of other tools",
    "compat/tracr/settings.py": "an example in an error about tracr's configuration",
    "engine/meta_tensors.py": "the names of `torch.Tensor`'s flags of devices, such as `is_cuda`",
    "remote/training/server_run.py": "`fork_rng` takes no type of device for the CPU alone",
    "scale/ray/options.py": "what Ray reserves as num_gpus is a CUDA device",
    "scale/ray/profiles.py": "what Ray reserves as num_gpus is a CUDA device",
    "scale/ray/worker.py": "what Ray reserves as num_gpus is a CUDA device",
    "split/analysis/signature.py": "device strings in a serialized signature",
}


def test_only_devices_names_a_backend() -> None:
    files = {
        str(file.relative_to(ROOT))
        for file in ROOT.rglob("*.py")
        if file.relative_to(ROOT).parts[0] != "devices" and re.search(r'cuda|"mps"|"xpu"', file.read_text())
    }
    assert files <= EXCEPTIONS.keys()


def test_each_device_type_has_a_backend() -> None:
    assert type(backend_of("cpu")) is type(backend_of(torch.device("meta"))) is Backend
    assert isinstance(backend_of(torch.device("cuda", 1)), Cuda)
    assert backend_of("cuda:0") is backend_of(torch.device("cuda"))
    other = backend_of("xpu")
    assert isinstance(other, Accelerator)
    assert (other.type, other.has_streams, other.has_activity, other.has_timestamps) == ("xpu", False, False, False)


def test_the_cpu_is_no_accelerator() -> None:
    assert accelerators_of([torch.ones(1), torch.ones(1, device="meta")]) == []
    assert default_generators([torch.device("cpu"), torch.device("cpu")]) == [torch.default_generator]


def test_a_generator_that_torch_does_not_expose_is_left_out() -> None:
    if available_accelerators():
        pytest.skip("torch exposes the generators of a device that is there")
    assert default_generators([torch.device("xpu", 0), torch.device("mps", 0)]) == [torch.default_generator]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda backend: backend.watch_activity(), "kernel durations are not supported on xpu devices"),
        (lambda backend: backend.event(), "events are not supported on xpu devices"),
        (lambda backend: backend.capture_graph("xpu", int), "graphs are not supported on xpu devices"),
    ],
)
def test_an_unsupported_feature_is_an_error(use: Any, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        use(backend_of("xpu"))


def test_a_driver_that_is_not_supported_is_an_error() -> None:
    with pytest.raises(SensorFailed, match="the driver of xpu devices is not supported"):
        backend_of("xpu").driver(torch.device("xpu"))


class HostBackend(Accelerator):
    """A backend of a device that runs on the host, since there is no other to test with."""

    def __init__(self) -> None:
        super().__init__("xpu")
        self.synchronizations = 0

    def synchronize(self, device: torch.device) -> None:
        self.synchronizations += 1


class KernelBackend(HostBackend):
    """Also reports a kernel of a millisecond, and an allocation of 64 bytes, after each mark."""

    has_activity = True

    @contextmanager
    def watch_activity(self, *, memory: bool = False) -> Iterator[Activity]:
        activity = Activity()
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(accelerator, "mark", activity.labels.append)
            yield activity
        for index in range(len(activity.labels)):
            activity.launches.append(Launch(index, "kernel", 1e-3))
            activity.allocations.append(Allocation(index, 64))


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Backend], None]]:
    """Registers the backend of XPU devices, and makes all models run on one."""

    def register(backend: Backend) -> None:
        monkeypatch.setitem(base.BACKENDS, "xpu", lambda: backend)
        monkeypatch.setattr(passes, "accelerators_of", lambda _: [torch.device("xpu", 0)])
        base._backend.cache_clear()

    yield register
    base._backend.cache_clear()


def test_a_device_without_a_backend_has_host_times_and_live_tensors(register: Callable[[Backend], None]) -> None:
    backend = HostBackend()
    register(backend)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8)
    p = mt.profile(model, x, measure=["time", "memory"], repeat=3)
    assert p["0"].time_s is not None
    assert p["0"].device_s is None
    assert p["0"].measured_peak_bytes == p["0"].peak_bytes
    assert p.unavailable["device time"] == "not measured on xpu devices"
    assert "no device time: not measured on xpu devices" in text(p)
    assert backend.synchronizations > 6


def test_a_registered_backend_measures_device_times_and_memory(register: Callable[[Backend], None]) -> None:
    register(KernelBackend())
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8)
    p = mt.profile(model, x, measure=["time", "memory"], repeat=3)
    # Marks: the pass begins, the root is entered, each layer is entered and left, the root is left. Those that enter a
    # layer belong to it, the other five to the root.
    assert (p["0"].device_s, p["1"].device_s) == (pytest.approx(1e-3), pytest.approx(1e-3))
    assert p.total.own.device_s == pytest.approx(5e-3)
    assert p.total.device_s == pytest.approx(7e-3)
    # By the end of the first layer three marks have allocated 64 bytes each, by that of the second five.
    assert p["1"].measured_peak_bytes - p["0"].measured_peak_bytes == 2 * 64
    assert p.unavailable == {}
