"""A local Ray cluster, for tests."""

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


#: What Ray says if a process of a node takes longer to start than the 30 seconds that it waits, on a busy machine.
TIMED_OUT = "timed out during startup"


@contextmanager
def local_cluster(nodes: int, num_cpus: int = 2) -> Iterator[Any]:
    """Start a cluster of nodes with so many logical CPUs each, connect to it, and shut it down."""
    import ray

    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_AUTH_MODE", "OMP_NUM_THREADS")}
    os.environ |= {"PYTHONPATH": os.pathsep.join(_PATHS), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    cluster = None
    try:
        cluster = start_cluster({"num_cpus": num_cpus, "object_store_memory": _OBJECT_BYTES}, nodes)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        yield cluster
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_cluster(options: dict[str, Any], nodes: int = 1, attempts: int = 3) -> Any:
    """Start a cluster of nodes with these options; again if the machine is too busy for the time that Ray waits."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for number in range(nodes):  # the first is the head
            cluster.add_node(**options, **({} if number else {"include_dashboard": False}))
    except Exception as error:
        cluster.shutdown()
        if attempts == 1 or TIMED_OUT not in str(error):
            raise
        return start_cluster(options, nodes, attempts - 1)
    return cluster
