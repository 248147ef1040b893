"""Transfer rates, compared with a plain socket on a limited link, and with bare gRPC on loopback.

The model computes nothing.
"""

from __future__ import annotations

from itertools import repeat

import torch

import microtome as mt
from benchmarks.remote.models import FUNNEL, build
from benchmarks.remote.network import LOOPBACK, Network
from benchmarks.remote.peers import Bare, Plain
from benchmarks.remote.processes import job, microtome, peers
from benchmarks.report import Target
from benchmarks.timing import take_turns

MB = 1_000_000
SIZES_MB = (0.1, 1, 10)
#: The most that a payload may take on loopback, where the cost of a request counts, over bare gRPC.
MOST_ON_LOOPBACK = {0.1: 2.0, 1: 1.3, 10: 1 / 0.9}
WINDOW = 8
INPUTS = "1x25"
#: Approximate seconds of a turn, and bytes per second without a limit.
TURN_S, FAST = 0.4, 5e8


def measure(ways: list[str], megabytes: float, bytes_per_s: float, rounds: int) -> list[float]:
    """Return the bytes of a payload, and its seconds with microtome, bare gRPC, a plain socket, and in one thread.

    The last are those of the head, the serialization and the tail without a server.
    """
    found = build(FUNNEL, INPUTS)
    count = max(4, round(TURN_S * bytes_per_s / (megabytes * MB)))
    x = torch.zeros(1, int(megabytes * MB) // 4000)
    server, bare, plain = ways
    beside, socket = Bare(bare), Plain(plain)
    with mt.connect(found.model, found.inputs, server, at="0", codec="raw") as remote:
        remote(x)
        nbytes = remote.requests[-1].sent_bytes
        payload = bytes(nbytes)

        def stream() -> None:
            assert sum(1 for _ in remote.stream(repeat(x, count), window=WINDOW)) == count

        def streamed() -> None:
            assert beside.send([payload] * count, WINDOW) == count

        def sent() -> None:
            for _ in range(count - 1):
                socket.exchange(payload, 0)
            socket.exchange(payload, 1)

        head, tail = mt.split(found.model, found.inputs, at="0")

        @torch.no_grad()
        def stay() -> None:
            for _ in range(count):
                tail(mt.Boundary.from_bytes(head(x).to_bytes()))

        took = take_turns({"microtome": stream, "gRPC": streamed, "socket": sent, "one thread": stay}, rounds)
    return [nbytes, *(seconds / count for seconds in took.values())]


def limited(network: Network) -> list[Target]:
    targets = []
    with microtome(network.cloud, FUNNEL, INPUTS) as server, peers(network.cloud) as others:
        for mbits in (100, 1000):
            network.limit(mbits * 1e6)
            for megabytes in SIZES_MB:
                link_s = mbits * 1e6 / 8
                given = {"ways": [server, *others], "megabytes": megabytes, "bytes_per_s": link_s, "rounds": 4}
                nbytes, ours, *theirs, _ = job(network.edge, "benchmarks.remote.rates:measure", given)
                what = f"{mbits} Mbit/s, {megabytes:g} MB"
                names = "microtome", "bare gRPC", "a plain socket"
                spent = dict(zip(names, (ours, *theirs), strict=True))
                listed = ", ".join(f"{name} {8e-6 * nbytes / seconds:.1f}" for name, seconds in spent.items())
                note = f"{what}: {listed} Mbit/s of payload"
                targets += [
                    Target(f"{what}: link's rate / payload rate", ours / (nbytes / link_s), 1 / 0.9, note=note),
                    Target(f"{what}: a plain socket's rate / payload rate", ours / theirs[-1], 1 / 0.9),
                ]
    return targets


def unlimited(network: Network) -> list[Target]:
    targets = []
    with microtome(LOOPBACK, FUNNEL, INPUTS) as server, peers(LOOPBACK) as others:
        for megabytes in SIZES_MB:
            given = {"ways": [server, *others], "megabytes": megabytes, "bytes_per_s": FAST, "rounds": 9}
            nbytes, ours, grpc, socket, alone = job(LOOPBACK, "benchmarks.remote.rates:measure", given)
            spent = {"microtome": ours, "bare gRPC": grpc, "a plain socket": socket}
            listed = ", ".join(f"{name} {nbytes / MB / seconds:.0f}" for name, seconds in spent.items())
            note = f"loopback, {megabytes:g} MB: {listed} MB/s"
            name = f"loopback, {megabytes:g} MB: bare gRPC's rate / payload rate"
            floor = (
                f"loopback, {megabytes:g} MB: of {1e3 * ours:.2f} ms for a request, bare gRPC takes {1e3 * grpc:.2f} "
                f"ms; the head, serialization and the tail, which are Python code here, {1e3 * alone:.2f} ms in one "
                "thread."
            )
            targets.append(Target(name, ours / grpc, MOST_ON_LOOPBACK[megabytes], note=note, floor=floor))
    return targets
