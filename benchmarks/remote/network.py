"""Two hosts on one machine: network namespaces joined by a veth pair of limited bandwidth. Needs root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Reserved for network benchmarks (RFC 2544).
_EDGE, _CLOUD = "198.18.0.1", "198.18.0.2"
#: Seconds that a packet may wait in the queue before it is dropped, as in a router.
_QUEUE_S = 0.1
#: The burst of the token bucket: more than a packet; at high rates, the data between two of its ticks.
_BURST_BYTES, _BURST_S = 16_384, 0.0005

#: Both hosts share the cores: waiting threads of one must not slow the other down.
_QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore"}

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Host:
    """A host that runs processes.

    Attributes:
        namespace: Its network namespace; None: that of this process.
    """

    address: str
    namespace: str | None = None

    def start(self, *command: str, threads: int = 1, stdout: int | None = subprocess.PIPE) -> subprocess.Popen[str]:
        """Start a process on this host with a number of compute threads."""
        inside = () if self.namespace is None else ("ip", "netns", "exec", self.namespace)
        environment = {**os.environ, **_QUIET, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        return subprocess.Popen((*inside, *command), cwd=ROOT, env=environment, text=True, stdout=stdout, stderr=None)

    def python(self, module: str, *words: str, threads: int = 1) -> subprocess.Popen[str]:
        return self.start(sys.executable, "-m", module, *words, threads=threads)


LOOPBACK = Host("127.0.0.1")


@dataclass(frozen=True)
class Network:
    """An edge and a cloud, and the link between them."""

    edge: Host
    cloud: Host

    def limit(self, bits_per_s: float) -> None:
        """Limit the bandwidth in each direction."""
        burst = max(_BURST_BYTES, int(bits_per_s / 8 * _BURST_S))
        limit = burst + max(_BURST_BYTES, int(bits_per_s / 8 * _QUEUE_S))
        for host in (self.edge, self.cloud):
            _inside(host, "tc", "qdisc", "replace", "dev", "wire", "root", "tbf", *_rule(bits_per_s, burst, limit))


@contextmanager
def two_hosts() -> Iterator[Network]:
    """Create two hosts, and remove them with all their processes afterwards."""
    edge, cloud = (Host(address, f"mt{os.getpid()}-{at}") for at, address in enumerate((_EDGE, _CLOUD)))
    made: list[Host] = []
    try:
        for host in (edge, cloud):
            _run("ip", "netns", "add", str(host.namespace))
            made.append(host)
        names = str(edge.namespace), str(cloud.namespace)
        _run("ip", "link", "add", "wire", "netns", names[0], "type", "veth", "peer", "wire", "netns", names[1])
        for host in (edge, cloud):
            _inside(host, "ip", "address", "add", f"{host.address}/30", "dev", "wire")
            for device in ("lo", "wire"):
                _inside(host, "ip", "link", "set", device, "up")
        yield Network(edge, cloud)
    finally:
        for host in made:
            left = subprocess.run(("ip", "netns", "pids", str(host.namespace)), capture_output=True, text=True)
            for process in left.stdout.split():
                _kill(int(process))
            subprocess.run(("ip", "netns", "delete", str(host.namespace)), check=False)


def _rule(bits_per_s: float, burst: int, limit: int) -> tuple[str, ...]:
    return "rate", f"{bits_per_s:.0f}bit", "burst", f"{burst}b", "limit", f"{limit}b"


def _inside(host: Host, *command: str) -> None:
    _run("ip", "netns", "exec", str(host.namespace), *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _kill(process: int) -> None:
    try:
        os.kill(process, 9)
    except ProcessLookupError:
        return
