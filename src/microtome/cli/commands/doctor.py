"""`microtome doctor`: check which clocks and sensors of this machine work."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from microtome.cli.interrupts import import_torch
from microtome.cli.options.outputs import Outputs, output_options
from microtome.cli.options.repetition import Command
from microtome.cli.progress import show_progress
from microtome.units import seconds

if TYPE_CHECKING:
    from microtome.devices.machine import Checkup
    from microtome.devices.meters import Missing

#: The least width of a line, for a narrower terminal.
_LEAST = 40


@click.command(cls=Command)
@output_options("json")
def doctor(*, outputs: Outputs) -> None:
    """Show what can be measured on this machine, how precisely, and how to enable the rest.

    Every clock and sensor is read: how long a reading takes, and how often its value changes.
    """
    import_torch()
    with show_progress("checking clocks and sensors"):
        from microtome.devices.base import available_accelerators
        from microtome.devices.machine import checkup, describe_device_time, environment

        works, missing = checkup()
        devices = available_accelerators()
        device_time = describe_device_time(devices[0]) if devices else "no accelerator"
        machine = environment(devices) | {"device_time": device_time}
    data = {"environment": machine, "works": list(map(asdict, works)), "missing": list(map(asdict, missing))}
    outputs.write(
        {"json": lambda: json.dumps(data, indent=1) + "\n"}, lambda: "\n".join(_lines(machine, works, missing))
    )


def _lines(machine: dict[str, str], works: list[Checkup], missing: list[Missing]) -> Iterator[str]:
    yield from (_wrap(name, value) for name, value in machine.items())
    yield ""
    for item in works:
        changes = "did not change" if item.period_s is None else f"changes every {seconds(item.period_s)}"
        yield _wrap("works", f"{item.name}: {item.what}; a reading takes {seconds(item.read_s)}; {changes}")
    for gone in missing:
        yield _wrap("missing", f"{gone.name}: {gone.reason}")
        yield _wrap("", gone.fix)


def _wrap(label: str, text: str) -> str:
    """Return a label and a text beside it, within the width of the terminal."""
    from microtome.report.table import text_width

    width = max(text_width() or sys.maxsize, _LEAST)
    return textwrap.fill(text, width, initial_indent=f"{label:>16}  ", subsequent_indent=" " * 18)
