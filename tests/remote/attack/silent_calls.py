"""Open calls and send nothing on them: `Health/Watch`, `Hello` without a message, streams that stay silent."""

from __future__ import annotations

import time
from itertools import cycle

from tests.remote.attack.harness import Outcome, Tally, Target, attack_server
from tests.remote.attack.http2 import Line, prefixed

#: Calls of each kind that are open at once, on so many connections.
CALLS, LINES = 300, 4


def run(seconds: float) -> Outcome:
    return attack_server("silent_calls", seconds)


def attack(target: Target) -> Tally:
    """Open as many calls of each kind as one can, with and without the token, and open those again that end."""
    kinds = cycle(
        (
            ("/grpc.health.v1.Health/Watch", None, prefixed(b"")),
            ("/grpc.health.v1.Health/Check", None, b""),
            ("Hello", None, b""),
            ("Hello", target.token, b""),
            ("Echo", target.token, b""),
            ("Stream", target.token, b""),
        )
    )
    tally = Tally()
    lines = [Line(target.host) for _ in range(LINES)]
    ended = 0
    while not target.is_over():
        for at, line in enumerate(lines):
            if not line.is_open:
                ended += line.count_ended()
                lines[at] = line = Line(target.host)
            if line.count_open() < 6 * CALLS // LINES:
                method, token, data = next(kinds)
                stream = line.call(method, token)
                tally.tried += 1
                if data:
                    line.send(stream, data, end=True, timeout=0.1)
            time.sleep(0.0005)  # else it takes the processor from everybody, which is another attack
    tally.held = ended + sum(line.count_ended() for line in lines)
    for line in lines:
        line.close()
    return tally
