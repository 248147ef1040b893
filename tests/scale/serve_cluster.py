"""A Ray cluster on this machine, and the models that its processes run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.scale.cluster import start_cluster

ROOT = Path(__file__).parents[2]
#: Bytes of shared memory of a node: Ray takes a third of the machine's memory by default.
_OBJECT_STORE_BYTES = 100 << 20


@contextmanager
def ray_cluster(**resources: float) -> Iterator[Any]:
    """A cluster with a head node of some resources, which this process joins; nodes can be added and removed.

    Its processes import this package and the tests. Everything that it started has ended afterwards.
    """
    import ray
    from ray import serve

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        node = {"num_cpus": 8, "object_store_memory": _OBJECT_STORE_BYTES, "resources": resources}
        cluster = start_cluster(node)
        try:
            ray.init(cluster.address, log_to_driver=False, logging_level="error")
            yield cluster
        finally:
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()


def add_node(cluster: Any, **resources: float) -> Any:
    return cluster.add_node(num_cpus=8, object_store_memory=_OBJECT_STORE_BYTES, resources=resources)


class Logged(nn.Module):
    """Writes the process and the rows of each of its runs to a file."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = str(log)
        self.layer = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()} {len(x)}\n")
        return self.layer(x)


class Net(nn.Module):
    """Three layers; the last one logs its runs."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.middle = nn.Linear(32, 32)
        self.last = Logged(log)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


class Mixing(nn.Module):
    """Its outputs depend on the other rows of a batch; the last layer logs its runs."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.last = Logged(log)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.last(hidden + hidden.mean(0, keepdim=True))


def make_net(log: Path) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(log).eval(), torch.randn(1, 8)


def logged_rows(log: Path) -> list[int]:
    """The rows of each run since the log was cleared."""
    return [int(line.split()[1]) for line in log.read_text().splitlines()]
