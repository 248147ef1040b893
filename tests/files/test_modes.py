"""The modes of written files: those of any new file, as the umask says."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import microtome as mt
from microtome import zoo
from microtome.cli import main
from microtome.cli.tensor_files import open_tensors


@pytest.fixture(params=[0o022, 0o027, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_written_files_have_the_mode_of_any_new_file(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, x = zoo.build("tiny-resnet")
    profile = mt.profile(model, x)
    profile.to_json(tmp_path / "p.json")
    profile.to_csv(tmp_path / "p.csv")
    profile.to_html(tmp_path / "p.html")
    mt.trace(model, x).to_svg(tmp_path / "t.svg")
    mt.split(model, x, at="layer1").save(tmp_path / "stages")
    with torch.no_grad(), mt.record(model, "layer1", to=tmp_path / "acts"):
        model(x)
    with torch.no_grad():
        mt.extract(model, x, "layer1").to_png(tmp_path / "f.png", "layer1")
        with open_tensors(str(tmp_path / "outputs")) as write:
            write(model(x))
    assert CliRunner().invoke(main, ["models"]).exit_code == 0
    np.save(tmp_path / "other.npy", np.zeros(1))  # of a library that opens its file as any program does
    modes = {file: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.rglob("*") if file.is_file()}
    assert len(modes) > 10
    assert {file: oct(mode) for file, mode in modes.items() if mode != 0o666 & ~umask} == {}
