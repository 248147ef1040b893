"""Files of tensors preserve values, for every dtype of the format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import microtome as mt
from microtome.capture.store.shard import OpenShard, ShardSums
from microtome.cli.tensor_files import open_tensors
from microtome.errors import BadFile, Unsupported
from microtome.files.tensors import DTYPE_CODES, memory_of, read_tensors, write_tensors


@st.composite
def lazy(draw: st.DrawFn) -> Tensor:
    """A tensor that torch may conjugate and negate only when it is read."""
    tensor = torch.randn(draw(st.integers(1, 5)), 3, dtype=torch.complex64)
    for step in draw(st.lists(st.sampled_from(["conj", "negate", "transpose"]), max_size=4)):
        if step == "conj":
            tensor = tensor.conj()
        elif step == "negate":
            tensor = torch._neg_view(tensor)
        else:
            tensor = tensor.t()
    return draw(st.sampled_from([tensor, tensor.imag, tensor.real])).contiguous()


@given(lazy())
def test_lazy_conjugations_and_negations_are_in_the_values_that_are_written(
    tmp_path_factory: pytest.TempPathFactory, tensor: Tensor
) -> None:
    file = tmp_path_factory.mktemp("lazy") / "a.safetensors"
    digest = write_tensors(file, {"a": tensor})
    found, read_digest = read_tensors(file)
    assert found["a"].equal(tensor)
    assert read_digest == digest
    assert load_file(file)["a"].equal(tensor)
    assert checksums(file, tensor) == checksums(file, tensor.clone().resolve_conj().resolve_neg())


def checksums(file: Path, tensor: Tensor) -> ShardSums:
    shard = OpenShard(file)
    shard.write({"a": tensor}, lambda: None)
    return shard.finish(sync=False)[1]


def test_the_memory_of_a_lazy_conjugation_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a tensor whose memory holds its values, got a lazy conjugation"):
        memory_of(torch.ones(2, dtype=torch.complex64).conj())


@pytest.mark.parametrize("dtype", dict.fromkeys([*DTYPE_CODES, torch.float8_e8m0fnu]), ids=str)
def test_every_dtype_that_is_written_is_read_back_and_by_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    width = dtype.itemsize
    values = torch.arange(4 * width, dtype=torch.uint8)
    tensor = (values % 2).view(torch.bool) if dtype == torch.bool else values.view(dtype)
    write_tensors(tmp_path / "a.safetensors", {"a": tensor})
    for found in (read_tensors(tmp_path / "a.safetensors")[0]["a"], load_file(tmp_path / "a.safetensors")["a"]):
        assert found.dtype == dtype
        assert found.view(torch.uint8).equal(tensor.view(torch.uint8))


class Scaled(nn.Module):
    """Multiplies by the size of a complex number, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) * self.scale.abs().float()
        return y


def test_weights_of_a_dtype_that_the_format_has_not_are_refused(tmp_path: Path) -> None:
    stages = mt.split(Scaled().eval(), torch.ones(1, 2), at="first")
    with pytest.raises(Unsupported, match="cannot save 'scale': safetensors files have no torch.complex128"):
        stages.save(tmp_path / "stages")


@pytest.mark.parametrize("name", ["complex128", "float4_e2m1fn_x2"])
def test_outputs_of_a_dtype_that_the_format_has_not_are_refused(tmp_path: Path, name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    output = torch.zeros(2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    with (
        pytest.raises(BadFile, match=f"cannot write 'output' to .*: safetensors files cannot store torch.{name}"),
        open_tensors(str(tmp_path / "outputs")) as write,
    ):
        write(output)


def saved(folder: Path) -> None:
    mt.split(wide(), torch.ones(1, 2), at="0").save(folder)


def wide() -> nn.Module:
    """64 MiB of weights in the last stage."""
    return nn.Sequential(nn.Linear(2, 4096), nn.Linear(4096, 4096)).eval()


def test_an_unavailable_device_does_not_make_a_file_corrupt(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(RuntimeError, match="Expected one of cpu, cuda"):
        mt.load_stage(wide, tmp_path, 1, device="nonsense")


SHORT = """
import resource, sys
import psutil
import microtome as mt
from tests.files.test_tensors import wide

before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (4 << 20), before[1]))
try:
    mt.load_stage(wide, sys.argv[1], 1)
except RuntimeError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, before)
mt.load_stage(wide, sys.argv[1], 1)
"""


@pytest.mark.integration
def test_memory_that_is_short_is_no_damage_of_the_file(tmp_path: Path) -> None:
    saved(tmp_path)
    # In another process: memory that this one has freed may be enough.
    command = [sys.executable, "-c", SHORT, str(tmp_path)]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert "can't allocate memory" in run.stdout
