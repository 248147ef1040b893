"""Nodes, replicas and servers of a cluster that die."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import microtome as mt
from microtome.errors import RemoteError
from tests.remote.proxy import until
from tests.remote.slow import Gate, Slow, asking
from tests.scale.serve_cluster import Net, add_node, make_net

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'microtome[ray]'")
pytestmark = [pytest.mark.integration, pytest.mark.slow]

CLIENTS = 4


class Load:
    """Clients that send requests until they are stopped, and compare each output with that of the model."""

    def __init__(self, net: Net, x: Tensor, address: str) -> None:
        self._models = [(copy.deepcopy(net), x.clone(), address) for _ in range(CLIENTS)]
        self._changed = threading.Condition()
        self.stop = threading.Event()
        self.right = self.wrong = 0

    def wait_for_more(self, count: int) -> None:
        """Wait until so many more requests are answered."""
        with self._changed:
            most = self.right + self.wrong + count
            assert self._changed.wait_for(lambda: self.right + self.wrong >= most, timeout=120)

    def run(self, index: int) -> int:
        """Return the number of requests that were sent."""
        net, x, address = self._models[index]
        generator = torch.Generator().manual_seed(index)
        sent: list[Tensor] = []

        def inputs() -> Iterator[Tensor]:
            while not self.stop.is_set():
                sent.append(torch.randn(1, 8, generator=generator))
                yield sent[-1]

        with torch.no_grad(), mt.connect(net, x, address, at="first", fallback=None, codec="raw") as remote:
            for number, output in enumerate(remote.stream(inputs(), window=8)):
                is_right = output.equal(net(sent[number]))
                with self._changed:
                    self.right += is_right
                    self.wrong += not is_right
                    self._changed.notify_all()
        return len(sent)


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
        ingress = ray.serve.get_deployment_handle("ingress", deployment.name)
        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(load.run, index) for index in range(CLIENTS)]
            try:
                load.wait_for_more(200)
                assert len(_processes(log)) == 3  # this one and two replicas
                assert ingress.retries.remote().result() == 0
                cluster.remove_node(nodes[0], allow_graceful=False)
                load.wait_for_more(400)  # it goes on
                assert ingress.retries.remote().result() > 0  # requests were on their way there
            finally:
                load.stop.set()
            sent = sum(client.result() for client in running)
        assert (load.right, load.wrong) == (sent, 0)
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
    with deploy(stages, only=["first"], ingresses=2, listen="127.0.0.1:0", name="two") as deployment:
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
            assert any(addresses[0] in reason for reason in remote.down_reasons)


def test_autoscaling_adds_a_replica_while_requests_wait(cluster: Any) -> None:
    from microtome.scale.ray import deploy

    model = Slow().eval()
    stages = mt.split(model, asking(), at="head")
    options: dict[str, Any] = {"only": ["head"], "autoscaling": (1, 2), "num_cpus": 0, "listen": "127.0.0.1:0"}

    def replicas() -> int:
        states = ray.serve.status().applications["scaled"].deployments["stage1"].replica_states
        return int(states.get("RUNNING", 0))

    with (
        deploy(stages, name="scaled", **options) as deployment,
        Gate() as gate,
        mt.connect(model, asking(), deployment.address, at="head", fallback=None, codec="raw") as remote,
        ThreadPoolExecutor(1) as threads,
    ):
        assert replicas() == 1
        xs = [asking(gate) for _ in range(8)]
        answers = threads.submit(list, remote.stream(xs, window=8))
        until(lambda: replicas() == 2)
        gate.open()
        assert all(output.equal(model(x)) for x, output in zip(xs, answers.result(120), strict=True))


def _listener(address: str) -> psutil.Process:
    """The process that listens on an address of this machine."""
    port = int(address.rpartition(":")[2])
    listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    return psutil.Process(next(one.pid for one in listening if one.laddr and one.laddr.port == port))
