"""The tests themselves: nothing in them depends on how fast the machine is, and each command for them is documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import settings

from tests.conftest import SWEEPS, TESTS
from tests.marks import examples

ROOT = TESTS.parent
FILES = sorted(TESTS.rglob("*.py"))


def deadlines(source: str) -> list[str]:
    """The deadlines that calls of `settings` in a file give, but for None."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if ast.unparse(call.func).endswith(("settings", "register_profile"))]
    given = [word.value for call in named for word in call.keywords if word.arg == "deadline"]
    return [ast.unparse(value) for value in given if ast.unparse(value) != "None"]


def test_a_deadline_of_a_property_is_found() -> None:
    assert deadlines("@settings(deadline=200, max_examples=3)\ndef test(): ...") == ["200"]
    assert deadlines("@hypothesis.settings(deadline=None)\ndef test(): connect(deadline=3)") == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(TESTS).as_posix())
def test_no_property_has_a_deadline(file: Path) -> None:
    assert deadlines(file.read_text()) == []


@pytest.mark.parametrize("profile", ["microtome", "quick"])
def test_no_profile_has_a_deadline(profile: str) -> None:
    assert settings.get_profile(profile).deadline is None
    assert settings().deadline is None


def test_a_property_has_at_least_one_example() -> None:
    assert examples(1) == 1
    assert 1 <= examples(100) <= 100


def test_files_that_are_marked_as_a_whole_are_there() -> None:
    assert [name for name in SWEEPS.split() if not (TESTS / name).is_file()] == []


def test_commands_for_tests_are_documented() -> None:
    targets = re.findall(r"^(test[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"test", "test-all", "test-fast", "test-torch", "test-gpu", "test-ray", "test-executorch"} == set(targets)
    documented = re.findall(r"^make (test[\w-]*)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert set(documented) == set(targets)


def test_ci_runs_all_tests() -> None:
    assert "test-all" in (ROOT / ".ci" / "run").read_text().split()


def test_folders_of_the_edit_loop_are_there() -> None:
    found = re.search(r"^UNITS := \$\(addprefix tests/,(.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    assert [name for name in found[1].split() if not (TESTS / name).exists()] == []
