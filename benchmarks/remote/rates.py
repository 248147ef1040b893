"""How fast what crosses gets through: beside a plain socket on a limited link, beside bare gRPC on one without limit."""

from __future__ import annotations

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
WINDOW = 8
INPUTS = "1x25000"


def measure(server: str, bare: str, plain: str, megabytes: float, bits_per_s: float | None, rounds: int) -> list[float]:
    """Bytes of a payload, and seconds of one in microtome, bare gRPC and a plain socket, in turns."""
    found = build(FUNNEL, INPUTS)
    rate = 5e8 if bits_per_s is None else bits_per_s / 8
    count = max(4, round(0.7 * rate / (megabytes * MB)))
    inputs = [torch.randn(1, int(megabytes * MB) // 4) for _ in range(4)]
    items = [inputs[at % 4] for at in range(count)]
    beside, socket = Bare(bare), Plain(plain)
    with mt.connect(found.model, found.inputs, server, at="0", codec="raw") as remote, torch.no_grad():
        remote(inputs[0])
        nbytes = remote.requests[-1].sent_bytes
        payload = bytes(nbytes)

        def stream() -> None:
            assert sum(1 for _ in remote.stream(items, window=WINDOW)) == count

        def streamed() -> None:
            assert beside.send([payload] * count, WINDOW) == count

        def sent() -> None:
            for _ in range(count - 1):
                socket.exchange(payload, 0)
            socket.exchange(payload, 1)

        took = take_turns({"microtome": stream, "gRPC": streamed, "socket": sent}, rounds)
    return [nbytes, *(seconds / count for seconds in took.values())]


def limited(network: Network) -> list[Target]:
    targets = []
    with microtome(network.cloud, FUNNEL, INPUTS) as server, peers(network.cloud) as (bare, plain):
        for bits_per_s in (1e8, 1e9):
            network.limit(bits_per_s)
            for megabytes in SIZES_MB:
                given = {"server": server, "bare": bare, "plain": plain, "megabytes": megabytes}
                nbytes, ours, grpc, socket = job(
                    network.edge, "benchmarks.remote.rates:measure", **given, bits_per_s=bits_per_s, rounds=5
                )
                rates = {"microtome": nbytes / ours, "bare gRPC": nbytes / grpc, "a plain socket": nbytes / socket}
                listed = ", ".join(f"{name} {8 * rate / 1e6:.1f}" for name, rate in rates.items())
                link = f"{bits_per_s / 1e6:g} Mbit/s, {megabytes:g} MB"
                least = nbytes / (bits_per_s / 8)
                targets += [
                    Target(f"{link}: link's rate / payload rate", ours / least, 1 / 0.9),
                    Target(
                        f"{link}: a plain socket's rate / payload rate",
                        ours / socket,
                        1 / 0.9,
                        note=f"{link}: {listed} Mbit/s of payload",
                    ),
                ]
    return targets


def unlimited() -> list[Target]:
    targets = []
    with microtome(LOOPBACK, FUNNEL, INPUTS) as server, peers(LOOPBACK) as (bare, plain):
        for megabytes in SIZES_MB:
            given = {"server": server, "bare": bare, "plain": plain, "megabytes": megabytes}
            nbytes, ours, grpc, socket = job(
                LOOPBACK, "benchmarks.remote.rates:measure", **given, bits_per_s=None, rounds=7
            )
            rates = {"microtome": nbytes / ours, "bare gRPC": nbytes / grpc, "a plain socket": nbytes / socket}
            listed = ", ".join(f"{name} {rate / MB:.0f}" for name, rate in rates.items())
            targets.append(
                Target(
                    f"loopback, {megabytes:g} MB: bare gRPC's rate / payload rate",
                    ours / grpc,
                    1 / 0.9,
                    note=f"loopback, {megabytes:g} MB: {listed} MB/s",
                )
            )
    return targets
