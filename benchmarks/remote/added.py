"""Latency that a request adds to its head, its tail and a plain exchange of its bytes over a socket."""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter
from typing import Any

import microtome as mt
from benchmarks.remote.models import build
from benchmarks.remote.network import Network
from benchmarks.remote.peers import Bare, Plain
from benchmarks.remote.processes import delayed, job, microtome, peers
from benchmarks.report import Target
from benchmarks.timing import lower_quartile

MODEL, INPUTS = "torchvision:resnet50", "1x3x224x224"
CUTS = ("layer3", "avgpool")
RTT_S = 0.01


def measure(server: str, bare: str, plain: str, rounds: int) -> dict[str, Any]:
    """Return, for each cut, the bytes, and the milliseconds of requests, their phases and the bare exchanges."""
    found, grpc, socket = build(MODEL, INPUTS), Bare(bare), Plain(plain)
    (x,) = found.inputs.args
    result = {}
    for at in CUTS:
        seen: dict[str, list[float]] = {}
        with mt.connect(found.model, found.inputs, server, at=at, codec="raw") as remote:
            for _ in range(3):
                remote(x)
            for _ in range(rounds):
                start = perf_counter()
                remote(x)
                spent = {"total": perf_counter() - start}
                sent = remote.requests[-1]
                payload = bytes(sent.sent_bytes)
                start = perf_counter()
                socket.exchange(payload, sent.received_bytes)
                spent |= {"plain": perf_counter() - start, "head": sent.head_s, "tail": sent.tail_s}
                found.inputs.run(found.model)  # before it as before a request: caches are cold
                start = perf_counter()
                grpc.exchange(payload)
                spent["gRPC"] = perf_counter() - start
                spent["rest"] = spent["total"] - sent.head_s - sent.tail_s
                for name in ("encode_s", "wire_s", "server_decode_s", "queue_s", "server_encode_s", "decode_s"):
                    spent[name.removesuffix("_s")] = getattr(sent, name)
                for name, seconds in spent.items():
                    seen.setdefault(name, []).append(seconds)
        took = {name: 1e3 * lower_quartile(times) for name, times in seen.items()}
        result[at] = {"bytes": len(payload), **took}
    grpc.close()
    return result


def run(network: Network) -> list[Target]:
    targets = []
    with microtome(network.cloud, MODEL, INPUTS) as server, peers(network.cloud) as others:
        for mbits in (100, 1000):
            network.limit(mbits * 1e6)
            for rtt_s in (0.0, RTT_S):
                with ExitStack() as stack:
                    ways = [server, *others]
                    if rtt_s:
                        ways = [stack.enter_context(delayed(network.cloud, way, rtt_s / 2)) for way in ways]
                    given = {"server": ways[0], "bare": ways[1], "plain": ways[2], "rounds": 25}
                    got = job(network.edge, "benchmarks.remote.added:measure", given)
                targets += [_target(f"{mbits} Mbit/s, {1e3 * rtt_s:g} ms", at, got[at]) for at in CUTS]
    return targets


def _target(link: str, at: str, got: dict[str, float]) -> Target:
    parts = ", ".join(f"{name} {spent:.2f}" for name, spent in got.items() if name not in ("bytes", "rest"))
    name = f"{link}, resnet50 at {at}: added latency, ms"
    floor = (
        f"{link}, {at}: bare gRPC adds {got['gRPC'] - got['plain']:.2f} ms. The rest is serialization with checksums "
        "on both sides and passing requests between threads, with caches that the head has emptied."
    )
    note = f"{link}, {at}, {got['bytes']} bytes, milliseconds: {parts}"
    return Target(name, got["rest"] - got["plain"], 2.2, note=note, floor=floor)
