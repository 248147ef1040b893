"""Names that a peer, a file or a model chose are shown as text, and change neither terminal, table nor spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

import microtome as mt
from microtome import zoo
from microtome.errors import BadFile, MicrotomeError, RemoteError, describe_error, sanitize_text
from microtome.remote.logs import JsonLines
from microtome.report.formats import csv_text
from microtome.results.base import Result, parse
from microtome.results.codec_costs import CodecCost, CodecCosts
from microtome.results.link import LinkMeasurement
from microtome.results.profiles import ProfiledModel, ProfileFailure, Profiles
from microtome.results.requests import CutMove, RequestLog, RequestRecord
from microtome.results.sweep import CutTiming, Sweep
from tests.report.test_plan_report import planned

#: A formula, an escape that sets the title of a terminal, marks that reverse the direction of writing, Markdown, HTML.
HOSTILE = "=1+1|`<img src=x onerror=e>\x1b]0;pwned\x07\u202e\u2066\x9b31m\n| new | row |"
#: How rich sets colours; nothing else may begin with an escape.
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@cache
def profile() -> mt.Profile:
    return mt.profile(*zoo.build("tiny-resnet"))


def sweep_result() -> Sweep:
    rows = (CutTiming("", "raw", total_s=2.0), CutTiming("a", "raw", total_s=1.0), CutTiming("b", "raw", failed="why"))
    return Sweep(
        "Net", "1x3", "h:1", "cpu", "raw", 3, LinkMeasurement(0.1, 0.1, 1.0, 1.0), rows, "no sensor", "none", {}
    )


def run_result() -> RequestLog:
    sent = (RequestRecord("layer1", "zstd"), RequestRecord("layer1", where="edge", reason="it was late"))
    return RequestLog(
        "Net", "h:1", "cuda", 4, 2.0, 2, sent, (CutMove(1.0, "layer2", "raw", "quicker"),), None, "no sensor"
    )


def profiles_result() -> Profiles:
    failure = ProfiledModel("b", None, ProfileFailure("OSError", "no disk"), "node")
    return Profiles((ProfiledModel("a", profile()), failure))


RESULTS: dict[str, Callable[[], Result]] = {
    "profile": profile,
    "diff": lambda: profile().diff(mt.profile(*zoo.build("tiny-vit"))),
    "cuts": lambda: mt.cuts(*zoo.build("tiny-resnet")),
    "plan": planned,
    "codecs": lambda: CodecCosts("Net", "random values", {"raw": {"a": CodecCost(1, 0.1, 0.1)}}, {"cpu": "x"}),
    "run": run_result,
    "sweep": sweep_result,
    "profiles": profiles_result,
}


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where texts are, with `...` for any place of a list."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from paths_in(item, (*path, key))
    elif isinstance(value, list):
        for item in value:
            yield from paths_in(item, (*path, ...))


def replaced(value: Any, path: tuple[Any, ...]) -> Any:
    """The same with a hostile text there."""
    if not path:
        return HOSTILE if isinstance(value, str) else value
    key, *rest = path
    if isinstance(value, dict) and key in value:
        return {**value, key: replaced(value[key], tuple(rest))}
    if isinstance(value, list) and key is ...:
        return [replaced(item, tuple(rest)) for item in value]
    return value


def hostile(kind: str) -> Iterator[Any]:
    """The result with each of its texts replaced, as far as it still is a result."""
    data = json.loads(RESULTS[kind]().to_json())
    for path in dict.fromkeys(paths_in(data)):
        if path not in (("kind",), ("schema",)):
            try:
                yield parse(json.dumps(replaced(data, path)), "it")
            except BadFile:
                continue


@pytest.mark.parametrize("kind", RESULTS)
def test_no_text_of_a_result_reaches_terminal_table_or_spreadsheet_as_anything_else(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = 0
    for result in hostile(kind):
        try:
            text = str(result)
        except (MicrotomeError, KeyError, ValueError):  # a name that something else refers to
            continue
        found += 1
        assert sanitize_text(text, keep="\n") == text
        with monkeypatch.context() as terminal:
            terminal.setattr(sys.stdout, "isatty", lambda: True)
            terminal.delenv("NO_COLOR", raising=False)
            terminal.setenv("TERM", "xterm-256color")
            coloured = COLOURS.sub("", str(result))
        assert sanitize_text(coloured, keep="\n") == coloured
        check_markdown(result.to_markdown())
        check_csv(result.to_csv())
    assert found > 2


def check_markdown(text: str) -> None:
    assert sanitize_text(text, keep="\n\N{NO-BREAK SPACE}") == text
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    assert "<img" not in outside
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def check_csv(text: str) -> None:
    for row in csv.reader(io.StringIO(text)):
        for cell in row:
            assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) or float(cell) <= 0


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t=", "\r=", "\n="])
def test_a_text_that_would_be_a_formula_begins_with_an_apostrophe(begin: str) -> None:
    (_, row) = csv.reader(io.StringIO(csv_text(["a", "b"], [[f"{begin}cmd", "plain"]]), newline=""))
    assert row == [f"'{begin}cmd", "plain"]


def test_numbers_stay_numbers() -> None:
    assert csv_text(["a"], [[-1], [-1.5e-9], [None], [True]]).split() == ["a", "-1", "-1.5e-09", '""', "True"]


@pytest.mark.parametrize("kind", [MicrotomeError, *MicrotomeError.__subclasses__()])
def test_the_message_of_an_error_can_be_printed(kind: Any) -> None:
    second = ("x",) if kind.__init__ is not MicrotomeError.__init__ else ()
    error = kind(f"quoted: {HOSTILE}\nin two lines", *second)
    assert sanitize_text(str(error), keep="\n") == str(error)
    assert str(error).endswith("\nin two lines")


def test_what_others_raise_is_said_in_printable_text() -> None:
    assert describe_error(ValueError("of 'x':\n    ValueError: 3 heads\nnot this")) == (
        "ValueError: of 'x': ValueError: 3 heads"
    )
    assert describe_error(ValueError("a\x1b[31m")) == "ValueError: a\N{REPLACEMENT CHARACTER}[31m"


def test_a_line_of_the_log_is_one_line_of_printable_text() -> None:
    record = logging.makeLogRecord(
        {"msg": "failed: %s", "args": (f"{HOSTILE}\x7f",), "reason": RemoteError(HOSTILE, "X")}
    )
    line = JsonLines().format(record)
    assert line.isprintable()
    assert json.loads(line)["event"].startswith("failed: =1+1|")
