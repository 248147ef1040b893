"""A local Ray cluster of two nodes, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import microtome

#: Ray warns of what it deprecates itself, and leaves sockets of processes it has ended to the garbage collector.
cluster_marks = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

#: A worker imports microtome and the tests from where this process does.
_PATHS = [str(Path(microtome.__file__).parents[1]), str(Path(__file__).parents[2])]
_OBJECT_BYTES = 100 * 2**20


@contextmanager
def two_nodes(num_cpus: int = 2) -> Iterator[Any]:
    """Start a cluster of two nodes of so many logical CPUs, connect to it, and shut it down."""
    import ray
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_AUTH_MODE", "OMP_NUM_THREADS")}
    os.environ |= {"PYTHONPATH": os.pathsep.join(_PATHS), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    options = {"num_cpus": num_cpus, "object_store_memory": _OBJECT_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
    try:
        cluster.add_node(**options)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
