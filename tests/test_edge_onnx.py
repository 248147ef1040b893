"""`examples/edge-onnx`: a head in ONNX Runtime, without torch and microtome, and its tail on a server."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
import torch
from grpc_tools import protoc
from packaging.requirements import Requirement
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.remote import protocol
from microtome.remote.server import Server

pytest.importorskip("onnxruntime", reason="needs microtome[onnx]")
pytest.importorskip("onnxscript", reason="needs microtome[onnx]")

pytestmark = [
    pytest.mark.integration,
    # of the exporter
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EXAMPLE = Path(__file__).parents[1] / "examples" / "edge-onnx"
CUT = "layer1.0.conv1"
#: The largest difference, relative to the largest number of the output.
TOLERANCES = {"raw": 1e-5, "fp16": 2e-3, "int8": 2e-2}


def link_packages(names: list[str], target: Path) -> None:
    """Make packages of this environment, and those that they need, importable from a folder."""
    pending, found = list(names), set()
    while pending:
        requirement = Requirement(pending.pop())
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(requirement.name)
        package = distribution(requirement.name)
        pending += package.requires or []
        for name in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            if not (target / name).exists():
                (target / name).symlink_to(Path(str(package.locate_file(name))))


@pytest.fixture(scope="module", name="python")
def create_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the packages of requirements.txt alone."""
    folder = tmp_path_factory.mktemp("edge")
    venv.create(folder, symlinks=True)
    (target,) = folder.glob("lib/python*/site-packages")
    link_packages((EXAMPLE / "requirements.txt").read_text().split(), target)
    python = folder / "bin" / "python"
    for name in ("torch", "microtome"):
        done = run([python, "-c", f"import {name}"], folder)
        assert f"No module named '{name}'" in done.stderr
    return python


@pytest.fixture(scope="module", name="model")
def build_model() -> tuple[nn.Module, Tensor]:
    model, x = zoo.build("tiny-resnet")
    assert isinstance(x, Tensor)
    return model, x


Model = tuple[nn.Module, Tensor]


@pytest.fixture(scope="module", name="edge")
def export_head(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs of the example, what is generated from split.proto, and the head."""
    folder = tmp_path_factory.mktemp("program")
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copy(Path(protocol.__file__).with_name("split.proto"), folder)
    words = [f"-I{folder}", f"--python_out={folder}", f"--grpc_python_out={folder}", str(folder / "split.proto")]
    assert protoc.main(["protoc", *words]) == 0
    with torch.no_grad():
        mt.split(*model, at=CUT)[0].export(folder / "head.onnx")
    return folder


@pytest.fixture(scope="module", name="server")
def serve_model(model: Model) -> Iterator[Server]:
    with mt.serve(*model, listen="127.0.0.1:0") as server:
        yield server


def run(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def save_image(folder: Path, rows: int = 3) -> Tensor:
    """Write an image of another size than the example."""
    image = torch.randn(rows, 3, 40, 48)
    np.save(folder / "x.npy", image.numpy())
    return image


def check_output(got: np.ndarray, model: nn.Module, image: Tensor, codec: str) -> None:
    with torch.no_grad():
        expected = model(image).numpy()
    assert got.shape == expected.shape
    difference = np.abs(got - expected).max() / np.abs(expected).max()
    assert difference <= TOLERANCES[codec]
    assert codec == "raw" or difference > TOLERANCES["raw"]  # it was encoded


@pytest.mark.parametrize("codec", ["raw", "fp16", "int8"])
def test_a_process_without_torch_computes_what_the_model_does(
    model: Model, python: Path, edge: Path, server: Server, codec: str
) -> None:
    image = save_image(edge)
    words: list[str | Path] = [python, "edge.py", "head.onnx", server.address, "x=x.npy", "--codec", codec]
    done = run([*words, "--to", "y.npz"], edge)
    assert done.returncode == 0, done.stderr
    assert f"bytes cross at {CUT}" in done.stdout
    with np.load(edge / "y.npz") as outputs:
        check_output(outputs["output"], model[0], image, codec)


def test_a_boundary_that_is_longer_than_a_message_is_sent_in_parts(
    model: Model, python: Path, edge: Path, server: Server
) -> None:
    image = save_image(edge, rows=48)
    done = run([python, "edge.py", "head.onnx", server.address, "x=x.npy", "--to", "y.npz"], edge)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0].replace(",", "")) > 4 << 20
    with np.load(edge / "y.npz") as outputs:
        check_output(outputs["output"], model[0], image, "raw")


def test_an_edge_names_what_the_server_cannot_do(model: Model, python: Path, edge: Path, server: Server) -> None:
    save_image(edge)
    other, x = zoo.build("tiny-vit")
    tail = mt.split(*model, at="layer1")[1]
    for served, inputs, message in (
        (other, x, f"expected the fingerprint {server.served.fingerprint}, got "),
        (tail, None, f"does not serve the cut at '{CUT}'"),
    ):
        with mt.serve(served, inputs, listen="127.0.0.1:0") as another:
            done = run([python, "edge.py", "head.onnx", another.address, "x=x.npy"], edge)
        assert done.returncode == 1
        assert another.address in done.stderr
        assert message in done.stderr


def test_an_input_of_another_name_is_an_error(python: Path, edge: Path, server: Server) -> None:
    save_image(edge, rows=1)
    done = run([python, "edge.py", "head.onnx", server.address, "image=x.npy"], edge)
    assert (done.returncode, done.stderr.strip()) == (1, "expected the inputs x, got image: pass x as NAME=FILE")


def test_the_requirements_of_the_example_are_those_of_the_extras() -> None:
    package = distribution("microtome")
    wanted = {str(Requirement(line)) for line in (EXAMPLE / "requirements.txt").read_text().splitlines()}
    declared = {str(Requirement(one.partition(";")[0])) for one in package.requires or []}
    assert wanted <= declared


# -- Node --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="node")
def install_packages(edge: Path) -> str:
    """The program `node`, with the packages of package-lock.json in the folder of the example."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm")
    words = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=0"]
    try:
        done = run([npm, *words], edge)
    except subprocess.TimeoutExpired:
        pytest.skip("npm ci did not end within two minutes")
    if done.returncode:
        pytest.skip(f"npm ci: {done.stderr.strip().splitlines()[-1]:.200}")
    return node


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_node_computes_what_the_model_does(model: Model, node: str, edge: Path, server: Server, codec: str) -> None:
    image = save_image(edge, rows=3 if codec == "int8" else 48)
    words: list[str | Path] = [node, "edge.mjs", "head.onnx", server.address, "x=x.npy", f"--codec={codec}"]
    done = run([*words, "--to=y.npy"], edge)
    assert done.returncode == 0, done.stderr
    check_output(np.load(edge / "y.npy"), model[0], image, codec)


@pytest.mark.slow
def test_mistakes_are_named_with_node(node: str, edge: Path, server: Server) -> None:
    save_image(edge, rows=1)
    shutil.copy(edge / "x.npy", edge / "x=1.npy")
    words: list[str | Path] = [node, "edge.mjs", "head.onnx", server.address]
    assert run([*words, "x=x=1.npy"], edge).returncode == 0
    for mistake, message in (
        (["x=x.npy", "--codec=fp16"], "expected --codec=raw or int8, got fp16: edge.py has fp16"),
        (["image=x.npy"], "expected the inputs x, got image"),
        (["x.npy"], "expected NAME=FILE.npy, got x.npy"),
    ):
        done = run([*words, *mistake], edge)
        assert done.returncode == 1
        assert message in done.stderr
