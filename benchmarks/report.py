"""Performance targets, and the results files."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Target:
    """A figure and its maximum.

    Attributes:
        parts: The values that it was computed from: added microseconds per module call.
        note: Other measurements of the same run.
    """

    name: str
    value: float
    most: float
    parts: dict[str, float] = field(default_factory=dict)
    note: str = ""

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
    return "\n".join(lines)


def machine() -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{datetime.date.today()}, {gpu}{os.cpu_count()} cores, {versions}"


def save(name: str, text: str, made_by: str = "make bench SAVE=1") -> Path:
    file = Path(__file__).parent / "results" / f"{name}.md"
    file.write_text(f"# {name}\n\n{machine()}. Made by `{made_by}`.\n\n{text}\n")
    return file
