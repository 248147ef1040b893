"""Every address of a cut that is printed is taken wherever an address is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import microtome as mt
from microtome import zoo
from microtome.cli import main


def printed(cuts: mt.Cuts) -> list[str]:
    """The addresses in the table of all cuts, as Markdown."""
    rows = cuts.to_markdown().splitlines()
    found = [re.match(r"\| (?:\*\*)?`([^`]+)`", row) for row in rows]
    return [match[1] for match in found if match is not None]


USES: dict[str, Callable[[Any, Any, Any, str], Any]] = {
    "cuts": lambda model, x, cuts, at: cuts[at],
    "find": lambda model, x, cuts, at: cuts.find(at),
    "split": lambda model, x, cuts, at: mt.split(model, x, at=at, verify=False),
    "run_until": lambda model, x, cuts, at: mt.run_until(model, x, at),
    "trace": lambda model, x, cuts, at: mt.trace(model, x)[at],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["tiny-resnet", "tiny-unet"])
def test_a_printed_address_is_taken_everywhere(name: str, use: str) -> None:
    model, x = zoo.build(name)
    cuts = mt.cuts(model, x)
    addresses = printed(cuts)
    assert len(addresses) == len(cuts)
    assert any(address.endswith("#0") for address in addresses)
    with torch.no_grad():
        for address in addresses[::3] if use in ("split", "run_until", "trace") else addresses:
            USES[use](model, x, cuts, address)


@pytest.mark.parametrize("at", ["layer1.0.relu#0", "layer1.0.relu#1", "layer1.0.conv1", "layer1.0.conv1#0"])
def test_the_command_line_splits_at_any_printed_address(at: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["split", "zoo:tiny-resnet", "--at", at, "--to", str(tmp_path / "parts")])
    assert done.exit_code == 0, done.output
    written = at if "relu" in at else at.removesuffix("#0")
    assert f"cut at {written}: bit-equal" in done.output
    assert f"cross at {written}\n" in done.output
    assert f"from the input to {written}" in done.output
