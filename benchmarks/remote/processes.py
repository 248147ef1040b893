"""The processes of a benchmark: servers that run during it, and jobs that return a result."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.remote.network import Host


@contextmanager
def microtome(host: Host, model: str, inputs: str, *options: str, threads: int = 1) -> Iterator[str]:
    """Run `microtome serve` on a host, and yield its address."""
    words = "serve", model, "--input", inputs, "--listen", f"{host.address}:0", *options
    program = str(Path(sys.executable).with_name("microtome"))
    with _until_done(host.start(program, *words, threads=threads)) as said:
        yield said.partition(" is served at ")[2].partition(",")[0]


@contextmanager
def peers(host: Host) -> Iterator[tuple[str, str]]:
    """Run the baselines on a host, and yield the addresses of the gRPC server and of the plain socket."""
    with _until_done(host.python("benchmarks.remote.peers", host.address)) as said:
        grpc_at, socket_at = said.split()
        yield grpc_at, socket_at


@contextmanager
def delayed(host: Host, target: str, delay_s: float) -> Iterator[str]:
    """Run a proxy on a host that delays each direction, and yield its address."""
    with _until_done(host.python("benchmarks.remote.delay", host.address, target, str(delay_s))) as said:
        yield said.strip()


@contextmanager
def _until_done(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the first line of a process, and stop the process at the end."""
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise RuntimeError(f"{process.args!r} ended with {process.wait()}")
        yield said
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode not in (0, -signal.SIGTERM):
            print(f"{process.args!r} ended with {process.returncode}", file=sys.stderr)


def job(host: Host, function: str, given: dict[str, Any], timeout_s: float = 600) -> Any:
    """Run a function, `module:name`, in a process with one compute thread on a host, and return its result."""
    process = host.python("benchmarks.remote.processes", function, json.dumps(given))
    try:
        said, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"{function} failed")
    return json.loads(said.splitlines()[-1])


if __name__ == "__main__":
    place, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(importlib.import_module(place), name)(**json.loads(sys.argv[2]))))
