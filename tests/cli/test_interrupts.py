"""Ctrl-C in commands, which are processes of their own here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

NET = """
import pathlib, time, torch

class Net(torch.nn.Module):
    example_inputs = "2x3"

    def forward(self, x):
        pathlib.Path("entered").touch()
        time.sleep(60)
        return x
"""

#: As torch's initialization, which discards exceptions.
TORCH = """
import pathlib, time

pathlib.Path("entered").touch()
for _ in range(2):
    try:
        time.sleep(60)
    except BaseException:
        pass
"""


def start(folder: Path, *words: str, path: str = "") -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([path, *sys.path])}
    command = [sys.executable, "-m", "microtome", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def interrupt(process: subprocess.Popen[str], folder: Path) -> tuple[int, str, str]:
    """Send SIGINT when the process is at work; return its exit code and what it printed."""
    try:
        until = time.monotonic() + 60
        while not (folder / "entered").exists() and time.monotonic() < until and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors
    finally:
        process.kill()
        process.wait()


@pytest.mark.integration
@pytest.mark.parametrize(
    "words",
    [
        "profile net.py:Net",
        "profile net.py:Net --time",
        "top net.py:Net",
        "track net.py:Net",
        "cuts net.py:Net",
        "graph net.py:Net --svg graph.svg",
        "split net.py:Net --at '' --to parts",
        "record net.py:Net '' --data x.npy --to acts",
        "serve net.py:Net --listen 127.0.0.1:0",
        "run net.py:Net --server 127.0.0.1:1",
    ],
)
def test_ctrl_c_in_a_model_prints_one_line(words: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    np.save(tmp_path / "x.npy", np.zeros((4, 3), dtype=np.float32))
    process = start(tmp_path, *(word.strip("'") for word in words.split()))
    note = "Note: no run of the model ended: nothing was recorded\n" if words.startswith("record") else ""
    assert interrupt(process, tmp_path) == (130, "", f"{note}Interrupted\n")


@pytest.mark.integration
def test_ctrl_c_while_a_server_does_not_reply(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = start(tmp_path, "ping", f"127.0.0.1:{silent.getsockname()[1]}", "--timeout", "60")
        with silent.accept()[0] as client:
            client.recv(1)
            (tmp_path / "entered").touch()
            assert interrupt(process, tmp_path) == (130, "", "Interrupted\n")


@pytest.mark.integration
def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "torch.py").write_text(TORCH)
    process = start(tmp_path, "profile", "zoo:tiny-vit", path=str(tmp_path / "fake"))
    assert interrupt(process, tmp_path) == (130, "", "Interrupted\n")


@pytest.mark.integration
def test_ctrl_c_while_the_command_line_is_imported(tmp_path: Path) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "click.py").write_text("import pathlib, time\npathlib.Path('entered').touch()\ntime.sleep(60)")
    process = start(tmp_path, "--help", path=str(tmp_path / "fake"))
    assert interrupt(process, tmp_path) == (130, "", "Interrupted\n")
