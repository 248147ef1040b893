"""`microtome serve` as a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Any

import pytest
from click.testing import CliRunner, Result

import microtome as mt
from microtome import zoo
from microtome.cli import main

MODEL = "zoo:tiny-resnet"


@contextmanager
def serving(*words: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that has begun, and its address."""
    command = [sys.executable, "-c", "from microtome.cli import main; main()", "serve", *map(str, words)]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"is served at (\S+), (?:\d+ cut|stage \d|an exported stage, from)", line)
        assert found is not None, f"{line!r}: {process.communicate(timeout=120)}"
        yield process, found[1]
    finally:
        process.kill()
        process.communicate(timeout=120)


def call(*words: Any) -> Result:
    return CliRunner().invoke(main, [*map(str, words)])


def test_a_server_is_asked_used_and_ended() -> None:
    with serving(MODEL) as (process, address):
        assert f"{address} serves ResNet on cpu" in call("ping", address).output
        result = call("run", MODEL, "--server", address, "--at", "layer1", "--repeat", 3)
        assert result.exit_code == 0, result.output
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert output == "ended\n"


def test_metrics_and_logs_tell_of_requests() -> None:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(MODEL, "--metrics", f":{port}", "--log-level", "info") as (process, address):
        assert call("run", MODEL, "--server", address, "--at", "layer1", "--repeat", 3, "--warmup", 0).exit_code == 0
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as reply:
            metrics = reply.read().decode()
        process.send_signal(signal.SIGTERM)
        _, logs = process.communicate(timeout=120)
    answered = [line for line in map(json.loads, logs.splitlines()) if line["event"] == "answered"]
    assert {line["at"] for line in answered} == {"layer1"}
    assert len({line["request"] for line in answered}) == len(answered) >= 3
    assert f'microtome_requests_total{{cut="layer1"}} {len(answered)}.0' in metrics


def test_a_stage_is_served_to_a_client_of_the_other(tmp_path: Path) -> None:
    mt.split(*zoo.build("tiny-resnet"), at="layer1").save(tmp_path / "parts")
    with serving(MODEL, "--stages", tmp_path / "parts") as (_, address):
        result = call("run", MODEL, "--server", address, "--stages", tmp_path / "parts", "--repeat", 3)
        assert result.exit_code == 0, result.output
        assert "cut at layer1" in result.output
        other = call("run", MODEL, "--server", address, "--at", "layer2", "--repeat", 3)
        assert other.exit_code == 2
        assert "does not serve the cut at 'layer2'; it serves 'layer1'" in other.output


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the exporter
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_exported_stage_is_served(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs microtome[onnx]")
    pytest.importorskip("onnxscript", reason="needs microtome[onnx]")
    tail = mt.split(*zoo.build("tiny-resnet"), at="layer1")[1].export(tmp_path / "tail.onnx")
    with serving(tail.file) as (_, address):
        result = call("run", MODEL, "--server", address, "--at", "layer1", "--repeat", 3)
        assert result.exit_code == 0, result.output
    for words, message in (
        (["--input", "1x3x8x8"], "tail.onnx is an exported stage: expected no --input"),
        (["--device", "cpu"], "tail.onnx is an exported stage: expected no --device"),
        (["--stage", "1"], "--stage is the number of a stage in a folder"),
    ):
        refused = call("serve", tail.file, *words)
        assert (refused.exit_code, message in refused.output) == (2, True), refused.output
    missing = call("serve", tmp_path / "none.onnx")
    assert (missing.exit_code, "cannot read" in missing.output) == (2, True), missing.output
    assert "load it with torch.export.load if you trust its source" in call("serve", "tail.pt2").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "127.0.0.1:moon"], "such as host:7070, got '127.0.0.1:moon'"),
        (["--max-message", "much"], "got 'much'"),
        (["--concurrency", "0"], "0 is not in the range x>=1"),
        (["--grace", "-1"], "expected a time of 0 or more, such as 100ms or 2, in seconds, got '-1'"),
        (["--tls-cert", "/no/such.pem"], "TLS needs both --tls-cert and --tls-key"),
        (["--tls-cert", "/no/c.pem", "--tls-key", "/no/k.pem"], "--tls-cert: cannot read '/no/c.pem'"),
        (["--tls-cert", __file__, "--tls-key", __file__], "--tls-cert: expected a certificate in PEM format in '"),
        (["--client-ca", "/no/such.pem"], "client certificates need TLS"),
        (["--token-file", "/no/such"], "cannot read '/no/such'"),
        (["--weights", "a", "--stages", "b"], "choose one of --weights and --stages"),
        (["--device", "meta"], "--device meta: expected a device that computes values"),
        (["--log-level", "loud"], "'loud' is not one of"),
    ],
)
def test_what_is_wrong_is_said_in_short(words: list[str], message: str) -> None:
    result = call("serve", MODEL, *words)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
