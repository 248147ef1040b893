"""Every address that a command or a result gives is taken wherever an address is asked for, and means the same call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.cli import main
from microtome.errors import NoMatch

NAMES = ["tiny-resnet", "tiny-unet"]


def printed(cuts: mt.Cuts) -> list[str]:
    """The addresses in the table of all cuts, as Markdown."""
    rows = cuts.to_markdown().splitlines()
    found = [re.match(r"\| (?:\*\*)?`([^`]+)`", row) for row in rows]
    return [match[1] for match in found if match is not None]


class Made:
    """All results of one model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model, self.x = zoo.build(name)
        with torch.no_grad():
            self.cuts = mt.cuts(self.model, self.x)
            self.trace = mt.trace(self.model, self.x)
            self.profile = mt.profile(self.model, self.x, measure="time", repeat=3)
        self.plan = mt.plan(self.cuts, edge=self.profile, cloud=self.profile, link=mt.Link("20Mbps", rtt="5ms"))


@pytest.fixture(scope="module", params=NAMES)
def made(request: pytest.FixtureRequest) -> Made:
    return Made(request.param)


@pytest.fixture(scope="module")
def remote(made: Made) -> Iterator[Callable[[str], str]]:
    """Connects at an address, and says where the model is then cut."""
    pytest.importorskip("grpc")
    with torch.no_grad(), mt.serve(made.model, made.x, listen="127.0.0.1:0") as server:

        def connect(at: str) -> str:
            with mt.connect(made.model, made.x, server.address, at=at) as client:
                return str(client.at)

        yield connect


def recorded(made: Made, at: str) -> str:
    with mt.record(made.model, at) as rec:
        made.model(made.x)
    (address,) = rec
    return address


def edited(made: Made, at: str) -> str:
    seen: list[str] = []

    def note(output: Any) -> Any:
        seen.append(at)
        return output

    with mt.edit(made.model, {at: note}):
        made.model(made.x)
    assert len(seen) == 1  # one call alone
    return seen[0]


USES: dict[str, Callable[[Made, str], str]] = {
    "cuts": lambda made, at: made.cuts[at].at,
    "find": lambda made, at: made.cuts.find(at).at,
    "trace": lambda made, at: made.trace[at].address,
    "profile": lambda made, at: made.profile[at].address,
    "plan": lambda made, at: made.plan[at].at[0] or "",
    "svg": lambda made, at: re.findall(r"cut at ([\w.#]+):", made.trace.to_svg(cut=at))[0],
    "split": lambda made, at: mt.split(made.model, made.x, at=at, verify=False).at[0],
    "split at a cut": lambda made, at: mt.split(made.model, made.x, at=made.cuts[at], verify=False)[0].ends_at or "",
    "run_until": lambda made, at: mt.run_until(made.model, made.x, at).boundary.at,
    "saved": lambda made, at: next(iter(mt.run_until(made.model, made.x, at, save=at).saved)),
    "extract": lambda made, at: ", ".join(mt.extract(made.model, made.x, at).addresses),
    "record": recorded,
    "edit": edited,
}


def exact(address: str) -> str:
    return address if "#" in address else f"{address}#0"


def test_all_results_give_a_call_the_same_address(made: Made) -> None:
    addresses = [call.address for call in made.trace.calls]
    several = {address.removesuffix("#1") for address in addresses if address.endswith("#1")}
    assert several
    assert not several & set(addresses)  # the first of several calls has its index
    assert [row.address for row in made.profile] == addresses
    cuts = [cut.at for cut in made.cuts]
    assert printed(made.cuts) == cuts
    assert {*cuts, *(cut.at for cut in made.cuts.refused), ""} == set(addresses)
    sources = {live.source for cut in made.cuts for live in cut.live} - {None}
    assert sources <= set(addresses)
    assert {at for candidate in made.plan for at in candidate.at if at} <= set(cuts)
    tracked = CliRunner().invoke(main, ["track", f"zoo:{made.name}", "--json", "-"])
    assert [row["address"] for row in json.loads(tracked.output)] == addresses


@pytest.mark.parametrize("use", USES)
def test_an_address_is_taken_everywhere_and_means_the_same_call(made: Made, use: str) -> None:
    addresses = [cut.at for cut in made.cuts]
    slow = use in ("split", "split at a cut", "run_until", "saved", "svg")
    chosen = [at for at in addresses if "#" in at][:3] + addresses[:: 12 if slow else 3]
    with torch.no_grad():
        assert [exact(USES[use](made, at)) for at in chosen] == [exact(at) for at in chosen]


def test_a_client_connects_at_every_address(made: Made, remote: Callable[[str], str]) -> None:
    addresses = [cut.at for cut in made.cuts]
    for at in [at for at in addresses if "#" in at][:2] + addresses[::16]:
        assert remote(at) == at


def test_operators_in_one_call_are_extracted_by_its_address() -> None:
    model, x = zoo.build("tiny-resnet")
    found = mt.extract(model, x, "layer1.0.relu/relu_")
    assert len(found.addresses) == 2
    for address in found.addresses:
        again = mt.extract(model, x, address)
        assert torch.equal(again[address], found[address])
        assert again.addresses == (address,)


def test_a_call_that_never_ran_is_said_to_be_none() -> None:
    net = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(NoMatch, match="'0#1' never ran: '0' ran once"):
        mt.extract(net, "1x2", "0#1")
    with pytest.raises(NoMatch, match="'0#1' never ran: '0' ran once"):
        mt.extract(net, "1x2", "0#1/relu")
    model, x = zoo.build("tiny-resnet")
    with pytest.raises(NoMatch, match="'layer1.0.relu#2' never ran: 'layer1.0.relu' ran 2 times, from 'layer1.0.relu#"):
        mt.extract(model, x, ["stem", "layer1.0.relu#2"])


def test_a_path_is_a_selector_of_all_calls() -> None:
    model, x = zoo.build("tiny-resnet")
    found = mt.extract(model, x, ["layer1.0.relu", "layer1.0.relu#1"])
    assert found.addresses == ("layer1.0.relu#0", "layer1.0.relu#1")


def test_files_of_before_get_the_index_of_the_first_call(made: Made, tmp_path: Path) -> None:
    """Which they left out."""

    def older(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: older(item) for name, item in value.items()}
        if isinstance(value, list):
            return [older(item) for item in value]
        return re.sub(r"#0(?=$|[\[(])", "", value) if isinstance(value, str) else value

    for result in (made.cuts, made.profile):
        file = tmp_path / "result.json"
        result.to_json(file)
        text = json.dumps(older(json.loads(file.read_text())))
        assert "#0" not in text
        file.write_text(text)
        loaded: Any = mt.load(file)
        if isinstance(loaded, mt.Cuts):
            assert loaded == made.cuts
        else:
            pairs = zip(loaded, made.profile, strict=True)
            assert all((one.address, one.parent) == (other.address, other.parent) for one, other in pairs)


@pytest.mark.parametrize("at", ["layer1.0.relu#0", "layer1.0.relu#1", "layer1.0.conv1", "layer1.0.conv1#0"])
def test_the_command_line_splits_at_any_printed_address(at: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["split", "zoo:tiny-resnet", "--at", at, "--to", str(tmp_path / "parts")])
    assert done.exit_code == 0, done.output
    written = at if "relu" in at else at.removesuffix("#0")
    assert f"cut at {written}: bit-equal" in done.output
    assert f"cross at {written}\n" in done.output
    assert f"from the input to {written}" in done.output
