"""The examples of data sets and profiles on Ray run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import microtome
from tests.scale.cluster import TIMED_OUT

pytest.importorskip("ray", reason="Ray is not installed: pip install 'microtome[ray]'")

pytestmark = [pytest.mark.integration, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"


@pytest.mark.parametrize(
    ("name", "prints"),
    [
        ("record_dataset.py", ["8 batches, 98304 bytes", "torch.Size([256, 32]) [0, 1, 2, 3]", "mean ", "(4, 32)"]),
        (
            "profile_zoo.py",
            ["4 models, 1 failed", "zoo:tiny-vti failed: NoMatch:", "layer1.0.conv1"],
        ),
    ],
)
def test_an_example_runs(name: str, prints: list[str], tmp_path: Path) -> None:
    paths = {"PYTHONPATH": str(Path(microtome.__file__).parents[1]), "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(EXAMPLES / name)]
    for _ in range(3):
        ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | paths, timeout=300)
        if TIMED_OUT not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stderr
    for text in prints:
        assert text in ran.stdout
