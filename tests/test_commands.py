"""Every command in the manual is run as it stands there, but for a smaller model, no GPU and another address."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import microtome as mt
from microtome import zoo
from tests.test_docs import DOCS, PAGES, ROOT

NET = """
import torch
from torch import nn

import microtome as mt

mt.register_column("flops_per_s", lambda row: row.flops / row.time_s if row.time_s else None, "FLOP/s")
example_inputs = "1x3x64x64"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 8)
        self.blocks = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3))

    def forward(self, x):
        return self.blocks(x) if x.is_floating_point() else self.words(x % 100)
"""
#: What is written in the manual, and what is run here.
INSTEAD = {
    "torchvision:resnet50": "torchvision:resnet18",
    "resnet50.safetensors": "resnet18.safetensors",
    "32x3x224x224": "2x3x64x64",
    "3x224x224": "3x64x64",
    " --open": "",
    **({} if torch.cuda.is_available() else {"--device cuda": "--device cpu"}),
}
_ONE_AFTER_THE_OTHER = """
import json, sys
from microtome.cli import main
for words in json.loads(sys.argv[1]):
    print("$ microtome", *words, flush=True)
    if (code := main(words, standalone_mode=False)):
        sys.exit(code)
"""


def commands(page: Path) -> Iterator[str]:
    """What is to be typed, each with the lines that it goes on in; not what is printed then."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        if kind:
            continue
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            command = re.sub(r"^(\w*)\$\s+", "", line).partition("  #")[0].strip()
            if re.match(r"microtome |python |openssl |make |pip |[A-Z]+=", command):
                yield command


def smaller(command: str) -> str:
    for written, run in INSTEAD.items():
        command = command.replace(written, run)
    return command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With all the files that the manual names."""
    made = tmp_path_factory.mktemp("manual")
    (made / "net.py").write_text(NET)
    rng = np.random.default_rng(0)
    np.save(made / "x.npy", rng.standard_normal((4, 3, 64, 64), np.float32))
    for name in ("images", "photos"):
        (made / name).mkdir()
        for at in range(3):
            Image.fromarray(rng.integers(0, 256, (224, 224, 3), np.uint8)).save(made / name / f"{at}.png")
    found = zoo.resolve("torchvision:resnet18")
    save_file(dict(found.model.state_dict()), made / "resnet18.safetensors")
    with torch.no_grad():
        profile = mt.profile(found.model, found.inputs, measure=["time"], repeat=3)
    for name in ("main", "branch", "profile", "other"):
        profile.to_json(made / f"{name}.json")
    mt.cuts(found.model, found.inputs).to_json(made / "cuts.json")
    return made


def run(words: list[str], folder: Path) -> str:
    ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


OFFLINE = [page for page in PAGES if page.name != "serve.md" and any(commands(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", OFFLINE, ids=lambda page: page.name)
def test_every_command_of_a_page_does_what_it_says(page: Path, folder: Path) -> None:
    several = [_words(smaller(command)) for command in commands(page)]
    ours = [words[1:] for words in several if words[0] == "microtome"]
    run([sys.executable, "-c", _ONE_AFTER_THE_OTHER, json.dumps(ours)], folder)
    for words in several:
        if words[0] != "microtome":
            assert words[0] == "python"
            run([sys.executable, *words[1:]], folder)


def _words(command: str) -> list[str]:
    return [word.strip("'\"") for word in re.findall(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", command)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl: apt install openssl")
def test_a_server_is_set_up_and_asked_as_the_manual_says(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    written = [smaller(command) for command in commands(DOCS / "how-to" / "serve.md")]
    every = [one.replace("10.0.0.5:7070", address).replace("10.0.0.5", "127.0.0.1") for one in written]
    # Those of a chain need stages in a folder.
    serve, ping, ask = (one for one in every if one.startswith("microtome ") and "--stages" not in one)
    made = "\n".join(command for command in every if not command.startswith("microtome "))
    python = f'python() {{ {sys.executable} "$@"; }}\n'
    run(["bash", "-euc", python + made], folder)
    assert (folder / "microtome" / "remote" / "split_pb2_grpc.py").is_file()
    program = [sys.executable, "-c", "from microtome.cli import main; main()"]
    with subprocess.Popen([*program, *_words(serve)[1:]], cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert f"is served at {address}" in server.stdout.readline()
            assert "ResNet" in run([*program, *_words(ping)[1:]], folder)
            assert "3 requests" in run([*program, *_words(ask)[1:]], folder)
        finally:
            server.terminate()


def test_the_readme_names_the_commands_that_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    for command in commands(ROOT / "README.md"):
        assert command.startswith("pip install") or command.partition(" ")[2].strip() in ci
