"""Open thousands of connections that stay idle, to a server with 1,024 file descriptors and to its metrics."""

from __future__ import annotations

import resource
import socket
import time

from tests.remote.attack.harness import Outcome, Tally, Target, attack_server, free_port
from tests.remote.attack.http2 import PREFACE, SETTINGS, frame

CONNECTIONS, DESCRIPTORS = 2000, 1024
#: What a connection says before it falls silent: nothing, some of the preface, HTTP/2, half a request for metrics.
_SAID = (b"", PREFACE[:10], PREFACE + frame(SETTINGS, 0, 0))


def run(seconds: float) -> Outcome:
    metrics = free_port()
    return attack_server(
        "idle_connections", seconds, "--metrics", f":{metrics}", descriptors=DESCRIPTORS, extra=(metrics,)
    )


def attack(target: Target) -> Tally:
    """Keep that many connections, of which the server may close those that it likes, and one in ten to its metrics."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = min(CONNECTIONS, hard - 100)
    tally, lines = Tally(), list[socket.socket]()
    while not target.is_over():
        if len(lines) >= most:
            lines = _still_open(lines, tally)
            time.sleep(0.01)
            continue
        is_metrics = tally.tried % 10 == 0
        host = (target.host[0], target.extra[0]) if is_metrics else target.host
        tally.tried += 1
        try:
            line = socket.create_connection(host, timeout=0.2)
            line.sendall(b"GET /metrics" if is_metrics else _SAID[tally.tried % len(_SAID)])
        except OSError:
            tally.held += 1
            continue
        lines.append(line)
    for line in lines:
        line.close()
    return tally


def _still_open(lines: list[socket.socket], tally: Tally) -> list[socket.socket]:
    left = []
    for line in lines:
        line.setblocking(False)
        try:
            while data := line.recv(65536):
                pass
        except BlockingIOError:
            data = b"open"
        except OSError:
            data = b""
        if data:
            left.append(line)
        else:
            tally.held += 1
            line.close()
    return left
