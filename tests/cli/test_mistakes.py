"""Likely mistakes on the command line: each error names the mistake and what to do."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import microtome as mt
from microtome import zoo
from microtome.cli import main

FILES = {
    "net.py": "import torch\n\nclass Net(torch.nn.Linear):\n    pass\n",
    "raises.py": """
import torch
class Net(torch.nn.Module):
    example_inputs = "1x2"
    def forward(self, x):
        return {}["y"]
""",
    "empty.py": "x = 1\n",
    "text.json": "hello",
    "empty.json": "{}",
}

MISTAKES = [
    # -- commands and options
    ("profil zoo:tiny-vit", r"No such command 'profil'\. Did you mean 'profile'\?"),
    ("visualize zoo:tiny-vit", r"No such command 'visualize'\. Expected one of cuts, diff, .*, top, track\."),
    ("profile", r"Missing argument 'MODEL'"),
    ("profile zoo:tiny-vit --column time", r"No such option:? '?--column'?.*--columns"),
    ("profile zoo:tiny-vit --columns tme", r"no column 'tme': did you mean 'time'\?"),
    ("profile zoo:tiny-vit --sort tme", r"no column 'tme' to sort by: did you mean 'time'\?"),
    ("profile zoo:tiny-vit --repeat -1 --time", r"Invalid value for '--repeat': -1 is not in the range x>=3"),
    ("profile zoo:tiny-vit --repeat 50", r"--repeat needs something to measure: add --time"),
    ("profile zoo:tiny-vit --energy --meter nvlm", r"expected a meter of nvml, .*, got 'nvlm'"),
    ("cuts zoo:tiny-vit --best byte", r"'byte' is not one of 'bytes', 'head_macs'"),
    ("graph zoo:tiny-vit", r"expected an output: --svg F or --dot F"),
    ("split zoo:tiny-vit --at blocks.0", r"Missing option '--to'"),
    ("split zoo:tiny-vit --at auto --to parts", r"--at auto is for microtome run: microtome plan finds the best cut"),
    (
        "generate zoo:tiny-writer --prompt a --at auto",
        r"'auto' needs .* the link: pass the address of a cut that microtome",
    ),
    ("diff p.json p.json --fail-over macs=5", r"expected a percentage of at least 0, such as macs=5%, got 'macs=5'"),
    # -- models
    (
        "profile resnet50",
        r"'resnet50' is not the name of a model: expected .* 'torchvision:resnet50' or 'timm:resnet50'",
    ),
    ("profile torchvison:resnet50", r"such as 'torchvision:resnet50' .*'torchvison' is neither a source nor a module"),
    ("profile torchvision:resnet51", r"torchvision has no model 'resnet51'\. Did you mean torchvision:resnet50"),
    ("profile timm:vit_tiny", r"timm has no model 'vit_tiny'\. Did you mean timm:vit_tiny_"),
    ("profile hf:bert-base-uncased", r"a repository on the Hugging Face Hub, .* downloads nothing: pass hf:bert for"),
    (
        "profile p.json",
        r"'p.json' is a file, expected the name of a model, .*; microtome report and microtome diff read",
    ),
    ("profile missing.py:Net", r"there is no file missing\.py"),
    ("profile net.py", r"'net.py' names a file: add a name in it, such as net\.py:Net"),
    ("profile net.py:Model", r"net\.py has no 'Model'\. Did you mean net\.py:Net\?"),
    ("profile empty.py:Net", r"empty\.py has no 'Net'\. It defines no nn\.Module\."),
    ("profile empty.py:x", r"empty\.py:x: expected an nn\.Module, a class or a factory of one, got int"),
    ("profile net.py:Net", r"missing a required argument: 'in_features'.*pass them as --arg NAME=VALUE"),
    ("profile net.py:Net --arg width", r"expected NAME=VALUE, such as num_classes=10, got 'width'"),
    # -- inputs, weights and devices
    ("profile zoo:tiny-vit --input 1x4x32x32", r"does not run on x 1x4x32x32: .*3 channels.*Pass others with --input"),
    ("profile zoo:tiny-vit --input img=1x3x32x32", r"forward of ViT has no parameter 'img': it has x"),
    (
        "track raises.py:Net",
        r"does not run on x 1x2: KeyError: 'y' \(line 6 of raises\.py\)\. Pass others with --input",
    ),
    ("profile zoo:tiny-lstm --input 1x4", r"Long, Int; .*'1x128:int64' is for token ids"),
    ("profile zoo:tiny-lstm --meta --input 1x4", r"does not run on .*Long, Int; .*'1x128:int64' is for token ids"),
    ("profile zoo:tiny-vit --input 1,3,32,32", r"did you mean '1x3x32x32'\?"),
    ("profile zoo:tiny-vit --weights missing.safetensors", r"there is no file missing\.safetensors"),
    ("profile zoo:tiny-vit --weights p.json", r"expected a \.safetensors, \.pt or \.pth file of weights, got p\.json"),
    ("profile zoo:tiny-vit --device gpu", r"--device gpu: expected a device of this machine, cpu.*, got 'gpu'"),
    # -- addresses
    ("split zoo:tiny-vit --at block.0 --to parts", r"no module at path 'block\.0'\. Did you mean 'blocks\.0'"),
    ("split zoo:tiny-unet --at pool --to parts", r"'pool' ran 2 times: say which of 'pool#0', 'pool#1'"),
    ("graph zoo:tiny-vit --svg g.svg --at nrom", r"no module at path 'nrom'\. Did you mean 'norm'"),
    ("record zoo:tiny-vit block.0 --data x.npy --to acts", r"'block\.0'\. Did you mean 'blocks\.0'"),
    # -- servers
    ("ping 7070:localhost", r"such as host:7070, got '7070:localhost': did you mean localhost:7070\?"),
    ("ping localhost", r"such as host:7070, got 'localhost': add the port, such as localhost:7070"),
    ("serve zoo:tiny-vit --listen 7070", r"got '7070': did you mean 127\.0\.0\.1:7070\?"),
    ("run zoo:tiny-vit --server localhost:70700", r"such as host:7070, got 'localhost:70700'"),
    ("serve zoo:tiny-vit --max-message big", r"expected a number of bytes, such as 4GB or 256MiB, got 'big'"),
    # -- files
    ("profile zoo:tiny-vit --json none/p.json", r"cannot write 'none/p.json': .*: create the folder 'none' first"),
    ("report p.json -o none/page.html", r"cannot write 'none/page.html': .*: create the folder 'none' first"),
    ("profile zoo:tiny-vit --batch 8", r"No such option '--batch'\. The batch is the first size of .* --input 8x3"),
    ("top zoo:tiny-vit --sort macs", r"No such option '--sort'\. It ranks layers by every metric; .* has --sort\.$"),
    ("top zoo:tiny-vit --top 5", r"No such option '--top'\. The number of layers is -n\.$"),
    ("serve zoo:tiny-vit --port 8080", r"No such option '--port'\. .*: --listen 127\.0\.0\.1:8080\.$"),
    ("profile zoo:tiny-vit --port 8080", r"No such option:? '?--port'?\.?$"),
    ("profile zoo:tiny-vit --gpu", r"No such option '--gpu'\. Name the device: --device cuda\.$"),
    ("profile zoo:tiny-vit --dept 2", r"No such option:? '?--dept'?\.? Did you mean '?--depth'?\?"),
    ("profile zoo:tiny-vit 1x3x32x32", r"extra argument \(1x3x32x32\)\. Did you mean --input 1x3x32x32\?$"),
    ("generate zoo:tiny-writer 'Each stage'", r"\(Each stage\)\. Did you mean --prompt 'Each stage'\?$"),
    ("profile zoo:tiny-vit blocks.0", r"Got unexpected extra argument \(blocks\.0\)$"),
    ("profile zoo:tiny-vit --depth 0.5", r"'--depth': expected a whole number of 0 or more, got '0\.5'$"),
    ("top zoo:tiny-vit -n two", r"expected a whole number of 1 or more, got 'two'$"),
    ("profile zoo:tiny-vit --time --budget much", r"'--budget': expected a number, got 'much'$"),
    ("report p.json --html page.html", r"No such option '--html'\. .* write it with -o FILE"),
    ("report p.json -o page.html --htm x", r"No such option:? '?--htm'?"),
    ("split zoo:tiny-vit --at blocks.0 --to p.json", r"Invalid value for '--to': .* 'p.json' is a file"),
    ("diff p.json missing.json", r"cannot read 'missing.json': No such file or directory"),
    ("diff p.json text.json", r"'text.json' is not JSON"),
    ("diff p.json empty.json", r"'empty.json' holds no result of microtome: expected a 'kind' of profile"),
    (
        "diff p.json c.json",
        r"expected a profile in 'c.json' \(see microtome profile --json\), got a file of kind 'cuts'",
    ),
    ("report c.json -o page.html", r"expected a profile in 'c.json' .*, got a file of kind 'cuts'"),
    ("record zoo:tiny-vit norm --data net.py --to acts", r"expected a \.npy file, or a folder of .*, got 'net\.py'"),
    ("record zoo:tiny-vit norm --data missing.npy --to acts", r"cannot read 'missing.npy': No such file or directory"),
    (
        "plan zoo:tiny-vit --edge p.json --cloud p.json --bandwidth 20",
        r"expected a bandwidth, such as 20Mbps .* got '20'",
    ),
    (
        "plan zoo:tiny-vit --edge p.json --cloud p.json --bandwidth 2MB/s",
        r"has no times: profile the model there with --time",
    ),
    ("plan zoo:tiny-unet --edge p.json --cloud p.json --bandwidth 2MB/s", r"of a ViT: profile the model that was cut"),
]


@pytest.fixture(scope="module", name="folder")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    model, x = zoo.build("tiny-vit")
    mt.profile(model, x).to_json(folder / "p.json")
    mt.cuts(model, x).to_json(folder / "c.json")
    np.save(folder / "x.npy", np.zeros((2, 3, 32, 32), dtype=np.float32))
    return folder


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_a_mistake_is_named_with_what_to_do(
    line: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = set(folder.rglob("*"))
    result = CliRunner().invoke(main, shlex.split(line))
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(message, result.stderr, re.DOTALL), result.stderr
    assert "Traceback" not in result.stderr
    assert {file for file in set(folder.rglob("*")) - before if "__pycache__" not in file.parts} == set()


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a build of torch without CUDA")
def test_cuda_without_cuda_names_the_build() -> None:
    result = CliRunner().invoke(main, ["profile", "zoo:tiny-vit", "--device", "cuda"])
    assert result.exit_code == 2
    assert re.search(r"expected a device of this machine, cpu.*, got 'cuda' \(torch .* without CUDA\)", result.stderr)
