"""Stages as programs of ExecuTorch: `make test-executorch`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.cli import main
from microtome.split.graph.exported_stage import load_exported
from tests.remote.chains import CUTS, connected, serving
from tests.remote.small import small

pytest.importorskip("executorch.runtime", reason="needs microtome[executorch]")

pytestmark = [
    pytest.mark.integration,
    # of the exporter and of what it imports
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", name="resnet")
def build_resnet() -> tuple[nn.Module, Tensor]:
    return small()


Resnet = tuple[nn.Module, Tensor]


def check_close(got: Tensor, expected: Tensor) -> None:
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_program_of_executorch_runs_again_and_again(resnet: Resnet, tmp_path: Path) -> None:
    model, x = resnet
    head, tail = mt.split(model, x, at="layer1.0.conv1")
    exported = head.export(tmp_path / "head.pte")
    assert set(exported.metadata["static"].values()) == {"dynamic=False"}
    loaded = load_exported(tmp_path / "head.pte")
    assert loaded.metadata == exported.metadata
    assert loaded.metadata["inputs"] == {"x": {"shape": list(map(str, x.shape)), "dtype": "float32"}}
    code = "import sys, torch, microtome as mt; run = mt.load_exported(sys.argv[1])\n"
    code += "for _ in range(5): run(torch.ones(2, 3, 32, 32))"  # another process has freed the program by then
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "head.pte")], check=True)
    images = [torch.randn_like(x) for _ in range(5)]
    boundaries: list[Any] = [loaded(image) for image in images]  # each has tensors of its own
    for image, boundary in zip(images, boundaries, strict=True):
        check_close(tail(boundary), model(image))
    with pytest.raises(mt.MicrotomeError, match=r"head.pte takes x\[2, 3, 32, 32\]: expected a size of 2, got 3"):
        loaded(torch.randn(3, 3, 32, 32))


def test_a_chain_holds_programs_of_executorch(resnet: Resnet, tmp_path: Path) -> None:
    model, x = resnet
    stages = mt.split(model, x, at=CUTS)
    middle, last = (load_exported(stages[index].export(tmp_path / f"{index}.pte").file) for index in (1, 2))
    with (
        serving(middle) as first,
        serving(last) as second,
        connected(model, x, first.address, second.address, at=CUTS) as remote,
    ):
        for image in (x, torch.randn_like(x), torch.randn_like(x)):
            check_close(remote(image), model(image))


def test_the_command_writes_programs_of_executorch(tmp_path: Path) -> None:
    words = ["split", "zoo:tiny-resnet", "--at", "layer1", "--to", str(tmp_path / "parts"), "--export", "pte"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    stages = [load_exported(tmp_path / "parts" / f"stage{index}.pte") for index in range(2)]
    assert [(one.begins_at, one.ends_at) for one in stages] == [(None, "layer1"), ("layer1", None)]


@pytest.mark.parametrize(("name", "at"), [("tiny-vit", "blocks.1"), ("tiny-decoder", "layers.1")])
def test_stages_with_attention_are_programs_of_executorch(name: str, at: str, tmp_path: Path) -> None:
    model, inputs = zoo.build(name)
    for stage in mt.split(model, inputs, at=at):
        exported = stage.export(tmp_path / f"stage{stage.index}.pte")
        assert (exported.verified or "").startswith("the outputs differ by")
