"""The examples: notebooks are stored without outputs, and run from top to bottom without a warning; programs run."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.rglob("*.ipynb"))
#: Absolute paths below directories that differ between machines.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|Users|root|tmp|var|mnt|opt)\b|\b[A-Z]:\\")

#: Makes warnings errors in a kernel, but for ipykernel's own: it warns of itself when it shuts down.
STRICT = r"""
import warnings

warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=PendingDeprecationWarning, module=r"ipykernel\.")
"""

every_notebook = pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.relative_to(EXAMPLES).as_posix())


def read(file: Path) -> NotebookNode:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run the cells in a fresh kernel; raise for the first cell with an error, a warning or a message on stderr."""
    notebook = NotebookNode(notebook | {"cells": [new_code_cell(STRICT), *notebook.cells]})
    # A timeout only ends a cell that hangs: it is many times what the slowest one takes.
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", f"{cell.source}\n\n{output.text}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory of a kernel that reads no settings of the user and writes nothing to them."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    working = tmp_path / "working"
    working.mkdir()
    return working


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@every_notebook
def test_a_notebook_is_stored_without_outputs(file: Path) -> None:
    notebook = read(file)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert cell.metadata == {}, cell.source
        assert cell.get("outputs", []) == [], cell.source
        assert cell.get("execution_count") is None, cell.source


@every_notebook
def test_a_notebook_names_no_path_of_a_machine(file: Path) -> None:
    notebook = read(file)
    texts = [str(notebook.metadata), *(cell.source for cell in notebook.cells)]
    assert [found for text in texts for found in MACHINE_PATH.findall(text)] == []


@pytest.mark.parametrize("text", ["/home/me/net.py", "open('/tmp/x')", r"C:\Users\me"])
def test_a_path_of_a_machine_is_found(text: str) -> None:
    assert MACHINE_PATH.search(text)
    assert not MACHINE_PATH.search("[More](../docs/home/page.md), 1/home, profile:\n")


@every_notebook
def test_code_in_a_notebook_is_plain_python(file: Path) -> None:
    for cell in read(file).cells:
        if cell.cell_type == "code":
            ast.parse(cell.source)  # raises for syntax errors and for magics, which linters do not read


@every_notebook
def test_links_in_a_notebook_lead_to_files(file: Path) -> None:
    prose = "\n".join(cell.source for cell in read(file).cells if cell.cell_type == "markdown")
    for link in re.findall(r"\[[^]]*\]\(([^)\s#]+)[^)]*\)", prose):
        assert link.startswith("http") or (file.parent / link).is_file(), link


@pytest.mark.slow
@pytest.mark.integration
@every_notebook
def test_a_notebook_runs_without_errors_and_warnings(file: Path, folder: Path) -> None:
    execute(read(file), folder)
    assert list(folder.iterdir()) == [], "files are left in the working directory"


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("1 / 0", CellExecutionError, "ZeroDivisionError"),
        ("import warnings\nwarnings.warn('old', DeprecationWarning)", CellExecutionError, r"Warning\S*: old"),
        ("import sys\n_ = sys.stderr.write('a message')", AssertionError, "a message"),
    ],
    ids=["error", "warning", "stderr"],
)
def test_errors_and_warnings_in_a_notebook_are_found(
    source: str, error: type[Exception], message: str, folder: Path
) -> None:
    with pytest.raises(error, match=message):
        execute(new_notebook(cells=[new_code_cell(source)]), folder)


def train_pipeline(processes: int) -> list[str]:
    """What the program that trains a pipeline prints in so many processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, str(EXAMPLES / "training" / "pipeline.py"), "--steps=6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.integration
def test_a_pipeline_of_two_and_of_three_processes_has_the_same_losses() -> None:
    lines = train_pipeline(2)
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5
    assert train_pipeline(3) == lines


def run_split_learning(side: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / "training" / "split_learning.py"), side, "--token=secret", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.integration
def test_split_learning_in_two_processes_goes_on_after_both_ended(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"--address=127.0.0.1:{free.getsockname()[1]}"
    lines: list[str] = []
    for labels_at, steps in (("client", 3), ("server", 6)):
        options = address, f"--labels-at={labels_at}"
        server = run_split_learning("server", *options, f"--checkpoint={tmp_path / 'there'}")
        try:
            assert server.stdout is not None
            assert "training at" in server.stdout.readline()
            client = run_split_learning("client", *options, f"--steps={steps}", f"--checkpoint={tmp_path / 'here'}")
            printed, errors = client.communicate(timeout=300)
        finally:
            server.kill()
            server.communicate()
        assert not errors
        lines += printed.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "from step 0", "step 1", "step 2", "step 3", "from step 3", "step 4", "step 5", "step 6",
    ]  # fmt: skip
    losses = [float(line.rpartition(" ")[2]) for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
