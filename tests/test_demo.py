"""`make demo`, as it is run: a process that starts another."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from demo.__main__ import CUTS, main, serving

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_demo_shows_everything_and_leaves_a_page_and_a_picture(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "demo", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    assert "zoo:tiny-resnet on x 2x3x32x32" in ran.stdout
    assert "zoo:tiny-vit on x 2x3x32x32" in ran.stdout
    assert ran.stdout.count("bit-equal") == len(CUTS)
    assert "\nEach stage " in ran.stdout
    assert "60 tokens, cut at layers.1: " in ran.stderr
    assert [place in ran.stdout for place in ("layers.1: here", "layers.2: on the server")] == [True, True]
    assert ran.stdout.strip().endswith(f"Open {tmp_path}/report.html in a browser, and {tmp_path}/attention.png.")
    own = [line for line in ran.stdout.splitlines() if str(tmp_path) not in line]  # which may be of any length
    assert max(map(len, own)) <= 80
    assert " --edge " in ran.stdout
    assert "Where to cut" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_fails_where_answers_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("demo.__main__.command", lambda *words: None)
    monkeypatch.setattr("demo.__main__.is_server_exact", lambda: False)
    assert main(tmp_path) == 1


def test_the_server_of_the_demo_is_ended_when_something_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def start(*args: object, **options: object) -> subprocess.Popen[str]:
        started.append(popen(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with suppress(KeyboardInterrupt), serving("zoo:tiny-resnet"):
        assert started[0].poll() is None
        raise KeyboardInterrupt
    assert started[0].poll() is not None
