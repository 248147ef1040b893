"""Servers as processes of their own."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from typing import Self

import psutil

_COMMAND = [sys.executable, "-c", "from microtome.cli import main; main()", "serve"]


class ServerProcess:
    """`microtome serve`, started and ready.

    Attributes:
        address: Where it listens.

    With `descriptors`, it can open that many files, and cannot raise that limit.
    """

    def __init__(
        self, model: str = "zoo:tiny-resnet", *options: str, listen: str = "127.0.0.1:0", descriptors: int | None = None
    ) -> None:
        self._model, self._options, self._descriptors = model, options, descriptors
        self.address = listen
        self._stderr_file = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed with the last process
        self.start()

    def start(self) -> None:
        """Start it, on the port that it had if it had one."""
        limit = [] if self._descriptors is None else ["prlimit", f"--nofile={self._descriptors}"]
        self._process = subprocess.Popen(
            [*limit, *_COMMAND, self._model, "--listen", self.address, *self._options],
            stdout=subprocess.PIPE,
            stderr=self._stderr_file,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"is served at (\S+),", line)
        if found is None:
            self.kill()
            raise AssertionError(f"the server did not start: {line} {self.stderr}")
        self.address = found[1]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr(self) -> str:
        """What it wrote to stderr."""
        self._stderr_file.seek(0)
        return self._stderr_file.read()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def rss(self) -> int:
        return psutil.Process(self.pid).memory_info().rss

    def limit_memory(self, more: int | None) -> None:
        """Let it have that much address space more than it has; None: as much as it wants."""
        most = resource.RLIM_INFINITY
        if more is not None:
            most = psutil.Process(self.pid).memory_info().vms + more
        resource.prlimit(self.pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        psutil.Process(self.pid).status()

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a machine does that loses power."""
        self._process.kill()
        self._end()

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def end(self, timeout: float = 120.0) -> int:
        """Wait until it has ended; its exit code."""
        self._process.wait(timeout)
        return self._end()

    def _end(self) -> int:
        code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_alive:
            self.go_on()
            self.kill()
        self._stderr_file.close()
