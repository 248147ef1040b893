"""What the command line imports before it runs a model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from microtome import zoo
from microtome.capture.options import Reduction
from microtome.cli import _COMMANDS
from microtome.cli.options import choices
from microtome.flops.conventions import CONVENTIONS
from microtome.plan.plan import OBJECTIVES
from microtome.profile.accelerator import METHODS
from microtome.results.plan import Schedule
from microtome.zoo.sources import SOURCES

#: Runs command lines, one after the other, and prints those after which a package is imported that need not be.
SCRIPT = """
import shlex, sys
from click.testing import CliRunner
from microtome.cli import main

for line in sys.stdin.read().splitlines():
    result = CliRunner().invoke(main, shlex.split(line))
    heavy = {"torch", "rich", "numpy", "grpc", "psutil"} & set(sys.modules)
    if heavy or result.exit_code not in (0, 2) or "Traceback" in result.output:
        print(line, *heavy, result.output)
"""

LINES = [
    "--version",
    "--help",
    *(f"{command} --help" for command in _COMMANDS),
    "trak",
    "--nope",
    "profile",
    "profile zoo:tiny-vit --nope",
    "profile zoo:tiny-vit --repeat 0",
    "profile zoo:tiny-vit --convention thop",
    "profile zoo:tiny-vit --depth 1 --by op",
    "profile zoo:tiny-vit --columns tme",
    "profile zoo:tiny-vit --perfetto trace.json",
    "profile zoo:tiny-vit --json none/at/all.json",
    "cuts zoo:tiny-vit --all --depth 1",
    "graph zoo:tiny-vit",
    "split zoo:tiny-vit --to parts",
    "plan zoo:tiny-vit --edge a.json",
    "run zoo:tiny-vit",
    "generate zoo:tiny-writer",
    "generate zoo:tiny-writer --prompt a --top-k 2",
    "diff a.json",
]


@pytest.mark.integration
def test_help_and_usage_errors_do_not_import_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input="\n".join(LINES), capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == ""


@pytest.mark.integration
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_does_not_import_torch(shell: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    # Fish passes the word itself, other shells its index.
    environment = os.environ | {
        "_MICROTOME_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "microtome profile zoo:tiny-v",
        "COMP_CWORD": "zoo:tiny-v" if shell == "fish" else "2",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "microtome"], env=environment, capture_output=True, text=True, check=False
    )
    assert "tiny-vit" in done.stdout
    assert done.stderr == ""


def test_the_choices_of_options_are_those_of_the_library() -> None:
    assert tuple(CONVENTIONS) == choices.CONVENTIONS
    assert tuple(METHODS) == choices.DEVICE_TIMES
    assert OBJECTIVES == choices.OBJECTIVES
    assert get_args(Schedule) == choices.SCHEDULES
    assert get_args(Reduction) == choices.REDUCTIONS
    assert tuple(SOURCES) == choices.SOURCES
    assert zoo.names() == choices.BUILT_IN


def test_every_file_of_a_command_is_in_the_table() -> None:
    files = Path(sys.modules["microtome.cli"].__file__ or "").parent.glob("commands/*.py")
    assert sorted(file.stem for file in files if file.stem != "__init__") == sorted(_COMMANDS)
