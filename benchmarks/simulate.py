"""Discrete-event simulation of a request on its way over machines, checked against chains of real processes.

`python -m benchmarks.simulate [--save]`
"""

from __future__ import annotations

import heapq
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import repeat
from time import process_time, thread_time
from typing import Any, NamedTuple

import psutil
import torch

import microtome as mt
from benchmarks import report
from benchmarks.ray_serve import ray_node
from benchmarks.remote.chain import CUTS, measure_routes
from benchmarks.remote.network import LOOPBACK
from benchmarks.remote.processes import microtome
from benchmarks.report import Target
from benchmarks.timing import lower_quartile
from microtome import zoo

#: Cuts of ResNet-50 whose stages are of unequal and of nearly equal lengths.
PAIRS = {
    "two servers": CUTS,
    "two servers, equal stages": ("layer2", "layer3.2"),
    "two servers, short tail": ("maxpool", "layer4"),
}
#: The cores of the machine that runs the three processes.
_CORES = os.cpu_count() or 1


class Step(NamedTuple):
    """A part of a request.

    Attributes:
        resources: The names of what it occupies, all at once: a process, a core, a link.
        seconds: For how long.
    """

    resources: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation.

    Attributes:
        interval_s: The mean time from result to result while the pipeline is full.
        latency_s: The median time of a request, from its admission to its result.
        utilization: The share of that time for which each resource was busy.
        bottleneck: The resource that limits the rate.
    """

    interval_s: float
    latency_s: float
    utilization: dict[str, float]
    bottleneck: str


def simulate(steps: Sequence[Step], capacities: Mapping[str, int], *, requests: int, window: int) -> Outcome:
    """Run requests through steps; each waits, first come first served, until all resources of its step are free.

    Args:
        capacities: The number of units of each resource.
        window: The most requests at once.

    >>> steps = [Step(("a",), 1.0), Step(("b",), 2.0)]
    >>> simulate(steps, {"a": 1, "b": 1}, requests=50, window=8).interval_s
    2.0
    >>> found = simulate(steps, {"a": 1, "b": 4}, requests=50, window=8)
    >>> found.interval_s, found.bottleneck
    (1.0, 'a')
    """
    return _Simulation(steps, capacities, requests, window).run()


def intervals(steps: Sequence[Step], capacities: Mapping[str, int]) -> dict[str, float]:
    """Return the shortest time from result to result that each resource allows."""
    needed = dict.fromkeys(capacities, 0.0)
    for step in steps:
        for name in step.resources:
            needed[name] += step.seconds
    return {name: seconds / capacities[name] for name, seconds in needed.items()}


class _Simulation:
    def __init__(self, steps: Sequence[Step], capacities: Mapping[str, int], requests: int, window: int) -> None:
        self._steps = steps
        self._capacities = capacities
        self._free = dict(capacities)
        # For each step, the requests that wait for it, with the number of their arrival.
        self._waiting: list[deque[tuple[int, int]]] = [deque() for _ in steps]
        self._arrivals = 0
        self._events: list[tuple[float, int, int]] = []
        self._ran: list[tuple[float, int]] = []  # when each step of each request began
        self._number, self._window = requests, window
        self._began: dict[int, float] = {}
        self._ended: list[float] = []
        self._latencies: list[float] = []

    def run(self) -> Outcome:
        for request in range(min(self._window, self._number)):
            self._admit(request, 0.0)
        self._start_steps(0.0)
        while self._events:
            now, request, step = heapq.heappop(self._events)
            self._end_step(request, step, now)
            self._start_steps(now)
        shortest = intervals(self._steps, self._capacities)
        bottleneck = max(shortest, key=lambda name: shortest[name])
        utilization = self._utilization()
        # Results come in bursts, as many as there are machines: their number in a period depends on where it ends.
        interval = shortest[bottleneck] / utilization[bottleneck]
        return Outcome(interval, sorted(self._latencies)[len(self._latencies) // 2], utilization, bottleneck)

    def _utilization(self) -> dict[str, float]:
        """Return the share for which each resource was busy, from a third of the results to the last admission."""
        first, last = self._ended[len(self._ended) // 3], self._ended[-self._window - 1]
        busy_s = dict.fromkeys(self._capacities, 0.0)
        for start, step in self._ran:
            resources, seconds = self._steps[step]
            within_s = min(start + seconds, last) - max(start, first)
            for name in resources if within_s > 0 else ():
                busy_s[name] += within_s
        return {name: busy / ((last - first) * self._capacities[name]) for name, busy in busy_s.items()}

    def _admit(self, request: int, now: float) -> None:
        self._began[request] = now
        self._wait(request, 0)

    def _wait(self, request: int, step: int) -> None:
        self._waiting[step].append((self._arrivals, request))
        self._arrivals += 1

    def _end_step(self, request: int, step: int, now: float) -> None:
        for name in self._steps[step].resources:
            self._free[name] += 1
        if step + 1 < len(self._steps):
            self._wait(request, step + 1)
            return
        self._ended.append(now)
        self._latencies.append(now - self._began.pop(request))
        following = len(self._ended) + self._window - 1
        if following < self._number:
            self._admit(following, now)

    def _start_steps(self, now: float) -> None:
        """Start steps whose resources are free, in the order of arrival."""
        while True:
            ready = [
                (waiting[0], step)
                for step, waiting in enumerate(self._waiting)
                if waiting and all(self._free[name] for name in self._steps[step].resources)
            ]
            if not ready:
                return
            (_, request), step = min(ready)
            self._waiting[step].popleft()
            resources, seconds = self._steps[step]
            for name in resources:
                self._free[name] -= 1
            self._ran.append((now, step))
            heapq.heappush(self._events, (now + seconds, request, step))


# -- three processes on one machine ------------------------------------------------------------------------------------


def simulate_processes(seconds: Mapping[str, float]) -> Outcome:
    """Simulate a stream over processes that share the cores of this machine.

    A process decodes, computes and encodes one request after the other. What a single request takes beside that is
    spent in threads of gRPC, equally on each hop.

    Args:
        seconds: Of each stage and of its codec, alone, and `"added"` of a single request beside the stages.
    """
    stages = [spent + seconds[f"codec {name[6:]}"] for name, spent in seconds.items() if name.startswith("stage")]
    codecs_s = sum(spent for name, spent in seconds.items() if name.startswith("codec"))
    wire_s = max(seconds["added"] - codecs_s, 0.0) / (len(stages) - 1)
    steps = [Step(("process 0", "core"), stages[0])]
    for index in range(1, len(stages)):
        steps += [Step(("core",), wire_s), Step((f"process {index}", "core"), stages[index])]
    capacities = {f"process {index}": 1 for index in range(len(stages))} | {"core": _CORES}
    return simulate(steps, capacities, requests=400, window=8)


def compare() -> Iterator[Target]:
    """Compare the simulation with streams over three real processes."""
    for name, seconds in measure_routes(PAIRS, rounds=6).items():
        found = simulate_processes(seconds)
        measured_s = seconds["interval"]
        listed = ", ".join(f"{what} {1e3 * spent:.1f}" for what, spent in seconds.items())
        yield Target(
            f"{name}: simulated and measured interval, larger / smaller",
            max(found.interval_s / measured_s, measured_s / found.interval_s),
            1.1,
            note=f"{name}, ms: {listed}; simulated {1e3 * found.interval_s:.1f}, limited by {found.bottleneck}",
        )


# -- engines on many machines ------------------------------------------------------------------------------------------


class Costs(NamedTuple):
    """Seconds for which one request occupies a core, on this machine.

    Attributes:
        client_s: A client of `connect`, beside the head.
        server_s: A server of `connect`, beside the tail.
        ingress_s: An ingress of `scale.ray.deploy`; None: Ray is not installed.
        replica_s: A replica of it, beside the tail.
    """

    client_s: float
    server_s: float
    ingress_s: float | None = None
    replica_s: float | None = None


class Workload(NamedTuple):
    """What the requests of the table are.

    Attributes:
        tail_s: Seconds of the tail on a machine.
        nbytes: Bytes that cross.
    """

    tail_s: float
    nbytes: int


#: A tail of 5 ms on a GPU and of 50 ms on a CPU, after what crosses ResNet-50 at `layer3`.
WORKLOADS = {"5 ms": Workload(0.005, 803_664), "50 ms": Workload(0.05, 803_664)}
#: Bytes per second of a machine's network interface: 10 Gbit/s.
_LINK_BYTES_PER_S = 1.25e9
_REQUESTS = 400
_AT = "layer1"


def measure_costs() -> Costs:
    """Measure the processor time of clients, servers, ingresses and replicas for each request."""
    model, x = zoo.build("tiny-resnet")
    with torch.no_grad():
        head, tail = stages = mt.split(model, x, at=_AT)
        boundary = head(x)
        head_s, tail_s = _cpu_s(lambda: head(x)), _cpu_s(lambda: tail(boundary))
        with microtome(LOOPBACK, "zoo:tiny-resnet", "2x3x32x32") as address:
            client_s, (server_s,) = _cpu_of_requests(model, x, address, [_process_at(address)])
        costs = Costs(client_s - head_s, server_s - tail_s)
        if find_spec("ray") is None:
            return costs
        from microtome.scale.ray import deploy

        with ray_node(), deploy(stages, only=[_AT], listen="127.0.0.1:0") as deployment:
            processes = [_process_of("ingress"), _process_of("stage1")]
            _, (ingress_s, replica_s) = _cpu_of_requests(model, x, deployment.address, processes)
        return costs._replace(ingress_s=ingress_s, replica_s=replica_s - tail_s)


def _cpu_s(function: Callable[[], object]) -> float:
    """The processor time of a call, in this thread."""
    seconds = []
    for _ in range(200):
        began = thread_time()
        function()
        seconds.append(thread_time() - began)
    return lower_quartile(seconds)


def _cpu_of_requests(
    model: Any, x: Any, address: str, processes: Sequence[psutil.Process]
) -> tuple[float, list[float]]:
    """The processor time of a request in this process, and in others."""
    with mt.connect(model, x, address, at=_AT, codec="raw", fallback=None) as remote:
        list(remote.stream(repeat(x, 50)))
        began, others = process_time(), [_total_s(process) for process in processes]
        list(remote.stream(repeat(x, _REQUESTS)))
        here = process_time() - began
        there = [_total_s(process) - before for process, before in zip(processes, others, strict=True)]
    return here / _REQUESTS, [seconds / _REQUESTS for seconds in there]


def _total_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _process_at(address: str) -> psutil.Process:
    """The process that listens at an address."""
    port = int(address.rpartition(":")[2])
    connections = psutil.net_connections("tcp")
    (pid,) = {one.pid for one in connections if one.laddr and one.laddr.port == port and one.status == "LISTEN"}
    return psutil.Process(pid)


def _process_of(deployment: str) -> psutil.Process:
    """The process of the replica of a deployment of Ray Serve."""
    (found,) = (
        one for one in psutil.process_iter() if f"ServeReplica:microtome:{deployment}" in " ".join(one.cmdline())
    )
    return found


def engines(
    costs: Costs, workload: Workload, machines: int, senders: int
) -> Iterator[tuple[str, list[Step], dict[str, int]]]:
    """The steps and the resources of each engine, with tails on so many machines.

    Heads run on the devices of users. A sender is a client of `connect` that sends requests of many of them, or an
    ingress of Ray; each is a process on a machine with a link of its own.
    """
    link_s = workload.nbytes / _LINK_BYTES_PER_S
    chain = [
        Step(("senders",), costs.client_s),
        Step(("links",), link_s),
        Step(("machines",), costs.server_s + workload.tail_s),
    ]
    capacities = {"senders": senders, "links": senders, "machines": machines}
    yield "`connect`", chain, capacities
    if costs.ingress_s is not None and costs.replica_s is not None:
        replica = Step(("machines",), costs.replica_s + workload.tail_s)
        # Every boundary arrives at the ingress, and leaves it.
        yield "`deploy`", [Step(("links",), 2 * link_s), Step(("senders",), costs.ingress_s), replica], capacities


def table(costs: Costs) -> Iterator[str]:
    """The requests per second of each engine by the number of machines, and the first resource that is exhausted."""
    listed = ", ".join(f"{name} {1e3 * spent:.2f}" for name, spent in costs._asdict().items() if spent is not None)
    yield f"Milliseconds of processor time of a request: {listed}."
    yield ""
    yield "| tail | machines | engine | senders | requests/s | machines busy with tails | limited by |"
    yield "|---|---|---|---|---|---|---|"
    for name, workload in WORKLOADS.items():
        for machines in (10, 100, 1000):
            for senders in sorted({1, machines // 10, machines // 2}):
                for engine, steps, capacities in engines(costs, workload, machines, senders):
                    found = simulate(steps, capacities, requests=40 * machines + 200, window=4 * machines)
                    rate = 1 / found.interval_s
                    busy = rate * workload.tail_s / machines
                    row = name, f"{machines:,}", engine, str(senders), f"{rate:,.0f}", f"{busy:.0%}", found.bottleneck
                    yield f"| {' | '.join(row)} |"


def main(words: Sequence[str]) -> int:
    targets: list[Target] = list(compare())
    text = "\n".join([report.markdown(targets), "", *table(measure_costs())])
    print(report.machine(), text, sep="\n\n")
    if "--save" in words:
        print("\nwritten to", report.save("simulate", text, "python -m benchmarks.simulate --save"))
    return int(not all(target.met for target in targets))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
