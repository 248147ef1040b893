"""Addresses that commands print are accepted by their options, those of repeated calls and of shared modules too."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import microtome as mt
from microtome.cli import main

NET = """
import torch
from torch import nn

class Net(nn.Module):
    example_inputs = "2x4"

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(self.first, nn.ReLU())
        self.pool = nn.Tanh()
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.pool(self.block(self.pool(self.first(x)))))
"""
#: As calls end; `block.0` is another path of `first`.
ADDRESSES = ["first#0", "pool#0", "first#1", "block.1", "block", "pool#1", "last"]


@pytest.fixture(name="net")
def write_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    np.save(tmp_path / "x.npy", np.ones((2, 4), dtype=np.float32))
    return "net.py:Net"


def run(*words: Any) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


def good(*words: Any) -> Result:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result


def test_every_address_of_a_table_is_accepted(net: str) -> None:
    listed = [row["at"] for row in csv.DictReader(io.StringIO(good("cuts", net, "--csv", "-").stdout))]
    assert listed == ADDRESSES
    table = good("cuts", net, "--all").stdout
    assert re.findall(r"^[* ] ([\w.#]+) +│", table, re.MULTILINE) == ADDRESSES
    profiled = {row["address"] for row in csv.DictReader(io.StringIO(good("profile", net, "--csv", "-").stdout))}
    assert profiled == {"", *ADDRESSES}
    for number, at in enumerate(ADDRESSES):
        assert good("split", net, "--at", at, "--to", f"parts{number}").stdout.startswith(f"{net} cut at {at}: bit-eq")
        assert (Path(f"parts{number}") / "stage1.safetensors").is_file()
        good("graph", net, "--at", at, "--svg", "g.svg")
        good("record", net, at, "--data", "x.npy", "--to", f"acts{number}")
        assert list(mt.load(f"acts{number}")) == [at]


@pytest.mark.parametrize(("at", "address"), [("block.0#0", "first#0"), ("block.0#1", "first#1"), ("last#0", "last")])
def test_another_path_of_a_shared_module_is_accepted(net: str, at: str, address: str) -> None:
    assert good("split", net, "--at", at, "--to", "parts").stdout.startswith(f"{net} cut at {address}: bit-equal")
    good("graph", net, "--at", at, "--svg", "g.svg")
    assert f"cut at {address}: " in Path("g.svg").read_text()
    good("record", net, at, "--data", "x.npy", "--to", "acts")


def test_an_error_suggests_addresses_that_are_accepted(net: str) -> None:
    for ambiguous in ("first", "block.0", "pool"):
        result = run("split", net, "--at", ambiguous, "--to", "parts")
        assert result.exit_code == 2
        assert not Path("parts").exists()
        for number, at in enumerate(re.findall(r"'([\w.]+#\d)'", result.stderr)):
            good("split", net, "--at", at, "--to", f"{ambiguous}{number}")


def test_stages_of_a_repeated_module_of_torchvision_are_written(tmp_path: Path) -> None:
    for at in ("layer1.0.relu#0", "layer1.0.relu#1"):
        words = ["split", "torchvision:resnet18", "--input", "1x3x32x32", "--at", at, "--to", tmp_path / at]
        assert f"cut at {at}: bit-equal" in good(*words).stdout


def test_requests_and_sweeps_are_cut_at_another_path(net: str) -> None:
    model = mt.zoo.resolve(net)
    with mt.serve(model.model, model.inputs, listen="127.0.0.1:0") as server:
        words = ["--server", server.address, "--repeat", "2"]
        assert "first#1" in good("run", net, *words, "--at", "block.0#1", "--codec", "raw").stdout
        assert "first#1" in good("sweep", net, *words, "--cuts", "block.0#1, pool#0").stdout
