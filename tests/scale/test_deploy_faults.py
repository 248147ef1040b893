"""Nodes, replicas and servers of a cluster that die."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import microtome as mt
from microtome.errors import RemoteError
from tests.scale.serve_cluster import Net, add_node, make_net

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'microtome[ray]'")
pytestmark = [pytest.mark.integration, pytest.mark.slow]

CLIENTS, REQUESTS = 4, 400


class Load:
    """Clients that send requests, and compare each output with that of the model."""

    def __init__(self, net: Net, x: Tensor, address: str) -> None:
        self._models = [(copy.deepcopy(net), x.clone(), address) for _ in range(CLIENTS)]
        self._lock = threading.Condition()
        self.right = self.wrong = 0

    def wait_for(self, count: int) -> None:
        """Wait until so many requests are answered."""
        with self._lock:
            assert self._lock.wait_for(lambda: self.right + self.wrong >= count, timeout=120)

    def run(self, index: int) -> None:
        net, x, address = self._models[index]
        generator = torch.Generator().manual_seed(index)
        inputs = [torch.randn(1, 8, generator=generator) for _ in range(REQUESTS)]
        with torch.no_grad(), mt.connect(net, x, address, at="first", fallback=None, codec="raw") as remote:
            for given, output in zip(inputs, remote.stream(inputs, window=8), strict=True):
                is_right = output.equal(net(given))
                with self._lock:
                    self.right += is_right
                    self.wrong += not is_right
                    self._lock.notify_all()


def test_no_request_is_lost_or_wrong_if_one_node_of_two_dies_under_load(cluster: Any, tmp_path: Path) -> None:
    from microtome.scale.ray import deploy

    log = tmp_path / "log"
    net, x = make_net(log)
    mt.split(net, x, at="first").save(tmp_path / "parts")
    nodes = [add_node(cluster, slot=1) for _ in range(2)]
    with deploy(
        tmp_path / "parts",
        model=lambda: Net(log),
        only=["first"],
        replicas=2,
        resources={"slot": 1},
        ingress_resources={"edge": 1},
        listen="127.0.0.1:0",
        retry="3s",
    ) as deployment:
        load = Load(net, x, deployment.address)
        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(load.run, index) for index in range(CLIENTS)]
            load.wait_for(CLIENTS * REQUESTS // 8)
            assert len(_processes(log)) == 3  # this one and two replicas
            cluster.remove_node(nodes[0], allow_graceful=False)
            for client in running:
                client.result()
        assert (load.right, load.wrong) == (CLIENTS * REQUESTS, 0)
        _check_nobody_left(cluster, nodes[1], net, x, deployment)


def _processes(log: Path) -> set[str]:
    """The processes that ran the last layer."""
    return {line.split()[0] for line in log.read_text().splitlines()}


def _check_nobody_left(cluster: Any, node: Any, net: Net, x: Tensor, deployment: Any) -> None:
    """Kill the last node with a replica: a client computes the output itself, or has the reason."""
    with (
        torch.no_grad(),
        mt.connect(net, x, deployment.address, at="first") as remote,
        mt.connect(copy.deepcopy(net), x, deployment.address, at="first", fallback=None) as strict,
    ):
        assert remote(x).equal(net(x))
        assert remote.requests[-1].where == "cloud"
        cluster.remove_node(node, allow_graceful=False)
        while remote.requests[-1].where == "cloud":  # its processes end soon after the node
            assert remote(x).equal(net(x))
        assert "no replica answered within 3 s" in str(remote.requests[-1].reason)
        with pytest.raises(RemoteError, match="no replica answered within 3 s") as caught:
            strict(x)
        assert caught.value.kind == "UNREACHABLE"


@torch.no_grad()
def test_a_client_goes_on_with_another_ingress_if_one_dies(cluster: Any, tmp_path: Path) -> None:
    from microtome.scale.ray import deploy

    net, x = make_net(tmp_path / "log")
    stages = mt.split(net, x, at=["first", "middle"])
    with deploy(
        stages, only=["first"], autoscaling=(1, 2), ingresses=2, listen="127.0.0.1:0", name="two"
    ) as deployment:
        boundary = deployment.handle(stages[0](x))
        assert boundary.at == "middle"
        addresses = deployment.addresses
        assert len(addresses) == 2
        with mt.connect(net, x, servers=[addresses], at=["first", "middle"], fallback=None, codec="raw") as remote:
            assert remote(x).equal(net(x))
            _listener(addresses[0]).kill()
            for _ in range(8):  # in turns, to the one that died, too
                other = torch.randn(1, 8)
                assert remote(other).equal(net(other))


def _listener(address: str) -> psutil.Process:
    """The process that listens on an address of this machine."""
    port = int(address.rpartition(":")[2])
    listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    return psutil.Process(next(one.pid for one in listening if one.laddr and one.laddr.port == port))
