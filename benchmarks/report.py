"""Performance targets, the results files, and the table of all targets in `benchmarks/README.md`."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
SUMMARY = Path(__file__).parent / "README.md"
TARGET_ROW = re.compile(r"^\| ([^|]+) \| (\S+) \| (\S+) \| (yes|NO) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """A figure and its maximum.

    Attributes:
        parts: The values that it was computed from: added microseconds per module call.
        note: Other measurements of the same run.
        floor: Why the target may be missed, and the least that was measured.
    """

    name: str
    value: float
    most: float
    parts: dict[str, float] = field(default_factory=dict)
    note: str = ""
    floor: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.most


def markdown(targets: Sequence[Target]) -> str:
    lines = ["| target | measured | at most | met |", "|---|---|---|---|"]
    lines += [f"| {t.name} | {t.value:.3g} | {t.most:.3g} | {'yes' if t.met else 'NO'} |" for t in targets]
    for target in targets:
        if target.parts:
            parts = ", ".join(f"{name} {value:.2f}" for name, value in target.parts.items() if name != "plain")
            line = f"Added per module call, microseconds ({target.name.partition(',')[0]}): {parts}."
            lines += [] if line in lines else ["", line]
    for target in targets:
        lines += ["", f"{target.note}."] if target.note else []
    lines += [line for target in targets if not target.met and target.floor for line in ("", f"Missed: {target.floor}")]
    return "\n".join(lines)


def machine() -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{datetime.date.today()}, {gpu}{os.cpu_count()} cores, {versions}"


def save(name: str, text: str, made_by: str = "make bench SAVE=1") -> Path:
    file = RESULTS / f"{name}.md"
    file.write_text(f"# {name}\n\n{machine()}. Made by `{made_by}`.\n\n{text}\n")
    SUMMARY.write_text(summary())
    return file


def summary() -> str:
    """A page with the targets of all results files, those that are missed first."""
    missed: list[str] = []
    met: list[str] = []
    for file in sorted(RESULTS.glob("*.md")):
        text = file.read_text()
        date = re.search(r"\d{4}-\d\d-\d\d.*?(?=\. Made by|:?\n)", text)
        place = f"[{file.stem}](results/{file.name})"
        for target, measured, most, is_met in TARGET_ROW.findall(text):
            if most != "inf":
                rows = met if is_met == "yes" else missed
                rows.append(f"| {place} | {target} | {measured} | {most} | {date[0] if date else ''} |")
    columns = ["| results | target | measured | at most | measured on |", "|---|---|---|---|---|"]
    lines = [
        "# Benchmarks",
        "",
        "`make bench SAVE=1`, `make bench-gpu SAVE=1` and `make bench-remote SAVE=1` write [results](results) and this",
        f"page. {len(met)} of {len(met) + len(missed)} targets are met. Results say why others are missed, where it is",
        "known.",
    ]
    for heading, rows in (("Missed", missed), ("Met", met)):
        lines += ["", f"## {heading}", "", *columns, *rows]
    return "\n".join(lines) + "\n"
