"""Send messages and requests in parts that never end, with and without the token."""

from __future__ import annotations

import time
from itertools import cycle

from microtome.remote import protocol
from tests.remote.attack.harness import MAX_MESSAGE, Outcome, Tally, Target, attack_server
from tests.remote.attack.http2 import Line, prefixed

#: Connections, and calls that are open on each.
LINES, CALLS = 8, 30


def run(seconds: float) -> Outcome:
    return attack_server("unfinished", seconds)


def attack(target: Target) -> Tally:
    """Keep as many calls open as one can, each with all of a message but its end, or with some parts of a request."""
    whole = prefixed(bytes((4 << 20) - 1), announced=4 << 20)
    part = bytes(1 << 20)
    first = protocol.with_payload(protocol.Request(id="1", size=MAX_MESSAGE), part)
    parts = prefixed(first) + prefixed(protocol.with_payload(protocol.Request(id="1"), part)) * 20
    kinds = cycle([("Run", None, whole), ("Run", target.token, whole), ("Stream", target.token, whole)])
    uploads = cycle([("Stream", target.token, parts), ("Hello", None, whole)])
    tally, before = Tally(), 0
    lines = [Line(target.host) for _ in range(LINES)]
    while not target.is_over():
        for at, line in enumerate(lines):
            if not line.is_open:
                before += line.count_ended()
                line.close()
                lines[at] = line = Line(target.host)
            if line.count_open() >= CALLS:
                time.sleep(0.002)
                continue
            method, token, data = next(uploads if at % 2 else kinds)
            stream = line.call(method, token)
            tally.tried += 1
            line.send(stream, data, timeout=0.05)
    tally.held = before + sum(line.count_ended() for line in lines)
    for line in lines:
        line.close()
    return tally
