"""`microtome doctor`: what this machine can measure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TextIO

import click

from microtome.cli.options.model import working
from microtome.devices.base import available_accelerators
from microtome.devices.doctor import checkup, describe_device_time
from microtome.devices.environment import environment
from microtome.units import seconds


@click.command()
@click.option("--json", "json_file", type=click.File("w"), help="Write it as JSON to this file; - for the terminal.")
def doctor(json_file: TextIO | None) -> None:
    """Say what can be measured here and how well, what cannot, and what would help.

    Clocks and sensors are tried: how long a reading takes, and how often each moves.
    """
    with working("trying clocks and sensors"):
        works, missing = checkup()
        devices = available_accelerators()
        device_time = describe_device_time(devices[0]) if devices else "no accelerator"
        found = environment(devices) | {"device_time": device_time}
    if json_file is not None:
        data = {
            "environment": found,
            "works": [asdict(item) for item in works],
            "missing": [asdict(m) for m in missing],
        }
        json.dump(data, json_file, indent=1)
        json_file.write("\n")
        if json_file.name == "<stdout>":
            return
    for name, value in found.items():
        click.echo(f"{name:>16}  {value}")
    click.echo()
    for item in works:
        moves = "it did not move" if item.period_s is None else f"moves every {seconds(item.period_s)}"
        click.echo(f"           works  {item.name}: {item.what}; a reading takes {seconds(item.read_s)}; {moves}")
    for gone in missing:
        click.echo(f"         missing  {gone.name}: {gone.reason}\n                  {gone.fix}")
