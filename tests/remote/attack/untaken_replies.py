"""Ask with the token and take no reply: the HTTP/2 window stays shut."""

from __future__ import annotations

import time

import torch

import microtome as mt
from microtome import zoo
from microtome.remote import protocol
from tests.remote.attack.harness import Outcome, Tally, Target, attack_server
from tests.remote.attack.http2 import Line, prefixed

#: Connections, calls that are open on each, and requests on a stream.
LINES, CALLS, REQUESTS = 4, 20, 32


def run(seconds: float) -> Outcome:
    return attack_server("untaken_replies", seconds)


@torch.no_grad()
def attack(target: Target) -> Tally:
    """Ask for 8 MiB of nothing again and again, and for results of requests that are much longer than these."""
    model, x = zoo.build("tiny-resnet")
    head, _ = mt.split(model, x, at="layer1")
    boundary = head(torch.randn(16, 3, 32, 32)).to_bytes()
    requests = b"".join(
        prefixed(protocol.Request(id=str(number), boundary=boundary).SerializeToString()) for number in range(REQUESTS)
    )
    echo = prefixed(protocol.EchoRequest(reply_bytes=8 << 20).SerializeToString())
    tally, before = Tally(), 0
    lines = [Line(target.host, window=0) for _ in range(LINES)]
    while not target.is_over():
        for at, line in enumerate(lines):
            if not line.is_open:
                before += line.count_ended()
                line.close()
                lines[at] = line = Line(target.host, window=0)
            if line.count_open() >= CALLS:
                time.sleep(0.002)
                continue
            is_echo = tally.tried % 2
            stream = line.call("Echo" if is_echo else "Stream", target.token)
            tally.tried += 1
            line.send(stream, echo if is_echo else requests, timeout=0.05)
    tally.held = before + sum(line.count_ended() for line in lines)
    for line in lines:
        line.close()
    return tally
