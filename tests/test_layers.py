"""The layers of the package: each folder imports only from the lines above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import microtome
from microtome.engine.self_test import BACKWARD, CALLS, FAKE, SHAPES
from microtome.engine.torch_internals import ATTRIBUTES, TorchDispatchMode

#: Top to bottom. Folders on one line do not import each other.
LINES = [
    ["errors"],
    ["units"],
    ["addresses", "endpoints"],
    ["files"],
    ["user_code", "results"],
    ["inputs"],
    ["example_inputs"],
    ["flops", "devices"],
    ["engine"],
    ["trace"],
    ["profile", "capture", "track", "split"],
    ["load", "plan"],
    ["remote"],
    ["report"],
    ["zoo"],
    ["scale"],
    ["compat"],
    ["cli"],
    ["__main__"],
]
LINE = {name: number for number, line in enumerate(LINES) for name in line}
ROOT = Path(microtome.__file__).parent


def part_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def nodes_in(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


def imported_modules(file: Path) -> set[str]:
    """The modules of microtome that a file imports, anywhere in it: in functions, and by their names in strings too."""
    found = set()
    for node in nodes_in(file):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = (
                [node.module or ""]
                if node.module != "microtome"
                else [f"microtome.{alias.name}" for alias in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and MODULE.fullmatch(str(node.value)):
            names = [str(node.value).rstrip(".")]  # of a table, of `import_module`, or the beginning of an f-string
        else:
            continue
        found |= {name.removeprefix("microtome.") for name in names if name.startswith("microtome.")}
    return found


MODULE = re.compile(r"microtome(\.\w+)+\.?")


FILES = [file for file in sorted(ROOT.rglob("*.py")) if file != ROOT / "__init__.py"]


def test_every_part_has_its_line() -> None:
    assert {part_of(file) for file in FILES} <= LINE.keys()


#: What flops and devices know of torch, as the engine does.
SHARED = "engine.torch_internals"


def test_a_part_imports_only_from_the_lines_above_it() -> None:
    assert FILES
    upwards: dict[str, set[str]] = {}
    for file in FILES:
        part = part_of(file)
        for other in imported_modules(file) - {"__version__", SHARED}:
            above = other.partition(".")[0]
            if above != part and LINE[above] >= LINE[part]:
                upwards.setdefault(file.relative_to(ROOT).as_posix(), set()).add(other)
    assert not upwards


@pytest.mark.parametrize(
    "line",
    [
        "from microtome.report import table",
        "from microtome import report",
        "import microtome.report.table",
        "def draw():\n    from microtome.report import table",
        "import_module('microtome.report.table')",
        "import_module(f'microtome.report.{kind}')",
        "TABLE = {'profile': ('microtome.report.profile', 'text')}",
    ],
)
def test_the_layers_see_each_kind_of_import(line: str, tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(line)
    assert {name.partition(".")[0] for name in imported_modules(file)} == {"report"}


def attributes_in(file: Path) -> Iterator[tuple[str, str]]:
    """The attributes that a file reads or writes: of what, and which; those of `self` and `cls` are its own."""
    for node in nodes_in(file):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def private_attributes() -> set[str]:
    """The private attributes of torch's objects: modules, tensors, storages, operators, autograd nodes and modes."""
    x = torch.ones(1, requires_grad=True)
    objects = [nn.Module(), nn.LSTM(1, 1), nn.Module, x, x.untyped_storage(), (x * 1).grad_fn, torch.Generator()]
    objects += [torch.ops.aten.add.Tensor, torch.ops.aten.add, TorchDispatchMode, TorchFunctionMode]
    return {name for one in objects for name in dir(one) if is_private(name)}


def private_symbols_in(file: Path) -> set[str]:
    """The private symbols of torch that a file imports, names by their path, or reads of torch's objects."""
    found = set()
    of_objects = private_attributes()
    for node in nodes_in(file):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            path = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found |= {name for name in path if is_private(name)}
        elif isinstance(node, ast.Import):
            names = [name for alias in node.names if alias.name.startswith("torch.") for name in alias.name.split(".")]
            found |= {name for name in names if is_private(name)}
        elif isinstance(node, ast.Constant) and is_private_name(node.value):
            found.add(str(node.value))
    for of, name in attributes_in(file):
        if not is_private(name) or of in ("self", "cls", "super()"):
            continue
        if OPERATORS.match(of):  # the name of an operator
            continue
        if of.partition(".")[0] in ("torch", "nn", "overrides") or name in of_objects:
            found.add(name)
    return found


def is_private_name(value: object) -> bool:
    """Whether a string is a path, as for `import_module` and `sys.modules`, or a name, as for `getattr`."""
    return isinstance(value, str) and (
        value in HOOK_DICTS or re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", value) is not None
    )


HOOK_DICTS = {name for name in vars(nn.Module()) if name.endswith(("_hooks", "_call_impl"))}
PRIVATE_PATH = re.compile(r"torch(\.\w+)*\._\w+(\.\w+)*")
OPERATORS = re.compile(r"(torch\.ops\.|_?aten\b)")
#: Attributes of our own classes that happen to be called as some of torch's are.
OWN = {
    "capture/module_capture.py": {"_values"},
    "capture/store/index.py": {"_check"},
    "engine/selectors.py": {"_indices"},
    "plan/data.py": {"_check"},
}
INTERNALS = "engine/torch_internals.py"
#: The self-test names in its errors what it checks.
OWN["engine/self_test.py"] = {name for group in (CALLS, BACKWARD, SHAPES, FAKE) for name in group.checks}


def test_private_symbols_of_torch_are_named_in_one_file() -> None:
    wrong = []
    for file in FILES:
        name = file.relative_to(ROOT).as_posix()
        allowed = set(ATTRIBUTES) if part_of(file) == "engine" else set()
        private = private_symbols_in(file) - allowed - OWN.get(name, set())
        wrong += [f"{name}: {symbol}" for symbol in sorted(private) if name != INTERNALS]
    assert not wrong
    assert private_symbols_in(ROOT / INTERNALS)


def test_every_attribute_that_is_named_is_used() -> None:
    engine = [file for file in FILES if part_of(file) == "engine"]
    assert {name for file in engine for _, name in attributes_in(file)} >= set(ATTRIBUTES)


#: What writes into the model or into somebody else's tensors outside the engine, by file: engine/README.md says why.
EXCEPTIONS = {"compat/vit_pytorch.py": {"self.__dict__[...] ="}}


def model_writes_in(file: Path) -> set[str]:
    """Where a file registers a hook, enters a mode of its own, or writes past the `__setattr__` of an object."""
    found = set()
    for node in nodes_in(file):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"register_\w*hook", node.attr):
            found.add(node.attr)
        elif isinstance(node, ast.Name | ast.alias):
            name = node.id if isinstance(node, ast.Name) else node.name
            if name in ("TorchDispatchMode", "TorchFunctionMode") or re.fullmatch(r"register_\w*hook", name):
                found.add(name)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and is_namespace(node.value):
            found.add(f"{ast.unparse(node.value)}[...] =")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_namespace(node.func.value):
            if node.func.attr in ("pop", "update", "clear", "setdefault", "popitem"):
                found.add(f"{ast.unparse(node.func)}()")
        elif isinstance(node, ast.Attribute) and node.attr == "forward" and not isinstance(node.ctx, ast.Load):
            found.add(f"{ast.unparse(node)} =")
    return found


def is_namespace(node: ast.AST) -> bool:
    """Whether this is the namespace of an object, or the dict of a module's own parameters, buffers or children."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__dict__"
    names = ("vars", "own_parameters", "own_buffers", "own_children")
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def test_only_the_engine_touches_the_model() -> None:
    found = {
        file.relative_to(ROOT).as_posix(): writes
        for file in FILES
        if part_of(file) != "engine" and (writes := model_writes_in(file))
    }
    assert found == EXCEPTIONS


@pytest.mark.parametrize(
    ("line", "finds"),
    [
        ("import torch\ntorch._C._current_graph_task_id()", private_symbols_in),
        ("from torch._ops import OpOverload", private_symbols_in),
        ("from torch.utils import _pytree", private_symbols_in),
        ("import torch._dynamo", private_symbols_in),
        ("import_module('torch._dynamo.utils')", private_symbols_in),
        ("module._forward_hooks.clear()", private_symbols_in),
        ("getattr(module, '_forward_hooks')", private_symbols_in),
        ("module._compiled_call_impl = f", private_symbols_in),
        ("tensor._version", private_symbols_in),
        ("module.register_forward_pre_hook(f)", model_writes_in),
        ("tensor.register_hook(f)", model_writes_in),
        ("from torch.nn.modules.module import register_module_forward_hook", model_writes_in),
        ("module.__dict__['x'] = 1", model_writes_in),
        ("del module.__dict__['x']", model_writes_in),
        ("vars(module).update(x=1)", model_writes_in),
        ("own_parameters(module)['x'] = 1", model_writes_in),
        ("module.forward = f", model_writes_in),
        ("class Mode(TorchFunctionMode): ...", model_writes_in),
    ],
)
def test_the_layers_see_each_kind(line: str, finds: Callable[[Path], set[str]], tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(line)
    assert finds(file)
