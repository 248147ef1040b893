"""Send little that becomes much: messages in gzip, with and without the token."""

from __future__ import annotations

import gzip
import time
from itertools import cycle

from tests.remote.attack.harness import MAX_MESSAGE, Outcome, Tally, Target, attack_server
from tests.remote.attack.http2 import Line, prefixed

#: Calls that are open at once.
CALLS = 100


def run(seconds: float) -> Outcome:
    return attack_server("compressed", seconds)


def attack(target: Target) -> Tally:
    """Call methods with zeros in gzip: some 30 kB that are as many MB."""
    data = prefixed(gzip.compress(bytes(MAX_MESSAGE - 1000), 6), compressed=True)
    kinds = cycle([(method, token) for method in ("Run", "Hello", "Stream") for token in (None, target.token)])
    tally, line = Tally(), Line(target.host)
    before = 0
    while not target.is_over():
        if not line.is_open:
            before += line.count_ended()
            line.close()
            line = Line(target.host)
        if line.count_open() >= CALLS:
            time.sleep(0.005)
            continue
        method, token = next(kinds)
        stream = line.call(method, token, (("grpc-encoding", "gzip"),))
        tally.tried += 1
        line.send(stream, data, end=True, timeout=0.2)
    tally.held = before + line.count_ended()
    line.close()
    return tally
