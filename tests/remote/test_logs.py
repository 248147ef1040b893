from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from microtome.errors import BadQuery
from microtome.remote.logs import JsonLines
from microtome.remote.prometheus import Metrics


def record(message: str, **beside: object) -> logging.LogRecord:
    made = logging.getLogger("microtome.remote").makeRecord(
        "microtome.remote", logging.WARNING, __file__, 1, message, (), None, extra=beside
    )
    made.created = 0.0
    return made


def test_a_line_is_json_with_what_was_said_beside_it() -> None:
    assert json.loads(JsonLines().format(record("failed", request="7", kind="DEADLINE"))) == {
        "time": "1970-01-01T00:00:00.000+00:00",
        "level": "warning",
        "event": "failed",
        "request": "7",
        "kind": "DEADLINE",
    }


@pytest.mark.parametrize("value", ["two\nlines", "\ud800", "\x1b[31m", Path("/tmp"), {1}, float("nan")])
def test_whatever_is_said_stays_one_line_of_ascii(value: object) -> None:
    line = JsonLines().format(record("refused", reason=value))
    assert line.isascii()
    assert line.isprintable()
    assert "reason" in json.loads(line)


def test_an_error_is_told_with_the_line() -> None:
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError:
        made = record("the server failed")
        made.exc_info = sys.exc_info()
    assert json.loads(JsonLines().format(made))["error"] == "ZeroDivisionError('by zero')"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("9090x", "expected an address for metrics such as :9090"),
        (":99999", "expected an address for metrics such as :9090"),
        ("", "expected an address for metrics such as :9090"),
        ("192.0.2.1:9090", "cannot serve metrics at '192.0.2.1:9090'"),
    ],
)
def test_metrics_are_shown_at_an_address(address: str, words: str) -> None:
    with pytest.raises(BadQuery, match=words):
        Metrics().listen(address)


SCRIPT = """
import os
from concurrent.futures import ThreadPoolExecutor
from microtome.remote import protocol
from microtome.remote.connection import Connection
from microtome.remote.security import Security
import grpc

assert "GRPC_VERBOSITY" not in os.environ
server = grpc.server(ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
try:
    Connection(f"127.0.0.1:{port}", Security(tls=True)).call("Echo", protocol.EchoRequest(), timeout=60)
except ConnectionError as error:
    print(error)
server.stop(0)
"""


@pytest.mark.integration
def test_grpc_logs_nothing_of_a_failed_handshake() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120)
    assert "does not use TLS" in done.stdout
    assert done.stderr == ""
