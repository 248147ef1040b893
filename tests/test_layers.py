"""The layers of the package: each folder imports only from the lines above it."""

from __future__ import annotations

import ast
from pathlib import Path

import microtome

#: Top to bottom. Folders on one line do not import each other.
LINES = [
    ["errors"],
    ["units"],
    ["files"],
    ["importing", "results"],
    ["inputs"],
    ["count", "engine", "measure"],
    ["trace"],
    ["profile", "capture", "track", "split"],
    ["plan"],
    ["remote"],
    ["report"],
    ["zoo"],
    ["compat"],
    ["cli"],
]
LINE = {name: number for number, line in enumerate(LINES) for name in line}
ROOT = Path(microtome.__file__).parent


def part_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_parts(file: Path) -> set[str]:
    """The parts of microtome that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = (
                [node.module or ""]
                if node.module != "microtome"
                else [f"microtome.{alias.name}" for alias in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("microtome.")}
    return found


FILES = [file for file in sorted(ROOT.rglob("*.py")) if file != ROOT / "__init__.py"]


def test_every_part_has_its_line() -> None:
    assert {part_of(file) for file in FILES} <= LINE.keys()


def test_a_part_imports_only_from_the_lines_above_it() -> None:
    assert FILES
    wrong = [
        f"{file.relative_to(ROOT)} imports {other}"
        for file in FILES
        for other in imported_parts(file) - {part_of(file), "__version__"}
        if LINE[other] >= LINE[part_of(file)]
    ]
    assert not wrong


def test_only_the_engine_touches_modules_and_modes() -> None:
    words = (
        "register_forward",
        "register_module_",
        "TorchDispatchMode",
        "TorchFunctionMode",
        "_compiled_call_impl",
        ".forward =",
    )
    wrong = [
        f"{file}: {word}" for file in FILES if part_of(file) != "engine" for word in words if word in file.read_text()
    ]
    assert not wrong
