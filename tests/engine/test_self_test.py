"""A torch whose private symbols behave differently is refused before anything relies on them."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from microtome.engine import self_test, self_test_ops, torch_internals
from microtome.engine.self_test import BACKWARD, CALLS, FAKE, SHAPES, SelfTest
from microtome.engine.torch_internals import TorchDispatchMode, dispatch_modes, function_modes, next_sequence_number
from microtome.errors import Unsupported
from tests.engine.broken_torch import BREAKS

ROOT = Path(__file__).parents[2]
GROUPS = {"calls": CALLS, "backward": BACKWARD, "shapes": SHAPES, "fake": FAKE}


@pytest.fixture(scope="module")
def broken() -> dict[str, dict[str, list[str]]]:
    """What each broken torch led to: actions with the kind of error and its message."""
    command = [sys.executable, "-m", "tests.engine.broken_torch"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    return dict(json.loads(line) for line in run.stdout.splitlines())


@pytest.mark.integration
@pytest.mark.parametrize("symbol", BREAKS)
def test_a_torch_that_ignores_a_symbol_is_refused_by_name(symbol: str, broken: dict[str, Any]) -> None:
    name = symbol.removeprefix("missing: ")
    assert broken[symbol]
    for action, (kind, message) in broken[symbol].items():
        assert kind == "Unsupported", (action, kind, message)
        assert name in message
        assert message.startswith(f"torch {torch.__version__} is not supported: ")


@pytest.mark.integration
def test_every_public_action_refuses_a_torch_that_hides_calls(broken: dict[str, Any]) -> None:
    assert broken["torch.nn.Module._compiled_call_impl"].keys() >= {"track", "cuts", "profile", "split", "trace"}


def test_every_check_has_a_break() -> None:
    checks = [symbol for group in GROUPS.values() for symbol in group.checks]
    assert not [symbol for symbol in checks if not any(part in BREAKS for part in symbol.split(" or "))]


#: Symbols that have no check, and why.
UNCHECKED = {
    "CALL": "an unrecognised frame only counts as one outside a call, in other threads",
    "FAKE_TENSOR_LOGGER": "under another name a message is logged",
    "HigherOrderOperator": "a class, for isinstance",
    "MODULE_CALL": "the checks of calls and backwards rely on it",
    "OPERATOR_FILES": "a missing file only matches no stack",
    "OpOverloadPacket": "a class, for isinstance",
    "RUN_BACKWARD": "the checks of calls and backwards rely on it",
    "WRAPPED_CALL": "if its code has no such reads, no thread has to be waited for",
    "count_compiled_graphs": "needs dynamo, which is slow to import; for a warning",
    "disable_dynamo": "needs dynamo, which is slow to import",
    "disabled_torch_function": "is Tensor's own, tested by torch",
    "divisions": "goes with `size_functions`",
    "grouped_product_output": "needs decompositions, which are slow to import",
    "interpret_sizes": "captures graphs alone, which are compared with the stage",
    "is_compiled_function": "needs dynamo, which is slow to import; for a note",
    "is_dynamo_imported": "reads sys.modules",
    "is_functorch_wrapped": "needs functorch, which is slow to import",
    "is_profiler_enabled": "needs a profiler, which is slow to start",
    "keep_interpolations": "captures graphs alone, which are compared with the stage",
    "make_fx": "captures graphs alone, which are compared with the stage",
    "mode_flags": "a missing flag is not restored",
    "on_backward_end": "without its callback, steps of training are refused",
    "own_buffers": "is checked as `_buffers`",
    "own_children": "is checked as `_modules`",
    "own_parameters": "is checked as `_parameters`",
    "pad_packed_sequence": "goes with `pack_padded_sequence`",
    "set_mode_flags": "a missing flag is not restored",
    "size_functions": "captures graphs alone, which are compared with the stage",
}


def symbols() -> set[str]:
    """The public names that `torch_internals` defines, or imports under an explicit alias."""
    source = ast.parse(Path(str(torch_internals.__file__)).read_text())
    names: set[str] = set()
    for node in ast.walk(source):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname for alias in node.names if alias.asname)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(
                target.id for target in targets if isinstance(target, ast.Name) and target.id in vars(torch_internals)
            )
    return {name for name in names if not name.startswith("_")} - {"ATTRIBUTES"}


def test_every_private_symbol_is_checked_or_says_why_not() -> None:
    source = "".join(Path(str(file.__file__)).read_text() for file in (self_test, self_test_ops))
    assert {name for name in symbols() if not re.search(rf"\b{name}\b", source)} == set(UNCHECKED)
    checks = " ".join(symbol for group in GROUPS.values() for symbol in group.checks)
    assert not [name for name in torch_internals.ATTRIBUTES if f".{name}" not in checks]


@pytest.mark.parametrize("group", GROUPS)
def test_the_process_is_as_found_whatever_modes_are_active(group: str) -> None:
    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    state, threads = torch.get_rng_state(), threading.active_count()
    number, backward = next_sequence_number(), vars(torch.autograd)["_engine_run_backward"]
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with torch.inference_mode(), autocast, torch.device("meta"), Operators(), Functions():
        before = function_modes(), dispatch_modes()
        SelfTest(GROUPS[group].checks).ensure()
        assert (function_modes(), dispatch_modes()) == before
    assert torch.get_rng_state().equal(state)
    assert (threading.active_count(), next_sequence_number()) == (threads, number)
    assert vars(torch.autograd)["_engine_run_backward"] is backward
    assert vars(nn.Module)["_compiled_call_impl"] is None


def test_a_default_dtype_does_not_matter() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        SelfTest(CALLS.checks).ensure()
    finally:
        torch.set_default_dtype(torch.float32)


def test_checks_run_once_in_a_process_whichever_threads_ask() -> None:
    ran = []

    def check() -> bool:
        ran.append(threading.current_thread().name)
        return True

    test = SelfTest({"torch.symbol": check})
    threads = [threading.Thread(target=test.ensure) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    test.ensure()
    assert ran == ["microtome-self-test"]


def test_a_check_that_opens_a_session_does_not_start_the_checks_again() -> None:
    ran = []

    def check() -> bool:
        ran.append(True)
        test.ensure()
        return True

    test = SelfTest({"torch.symbol": check})
    test.ensure()
    assert ran == [True]


def test_a_failure_is_raised_each_time_and_found_once() -> None:
    ran = []

    def check() -> bool:
        ran.append(True)
        return False

    test = SelfTest({"torch._symbol": check})
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"torch .* is not supported: torch\._symbol does not do what it did"):
            test.ensure()
    assert ran == [True]


def test_what_a_check_raises_is_part_of_the_message() -> None:
    test = SelfTest({"torch._symbol": lambda: bool(1 / 0)})
    with pytest.raises(Unsupported, match=r"torch\._symbol does not do what it did \(ZeroDivisionError: division by"):
        test.ensure()
