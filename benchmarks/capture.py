"""Extracting and recording, compared with a plain forward and with plain copies and writes of the same tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from statistics import median
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import microtome as mt
from benchmarks.report import Target
from benchmarks.timing import take_turns
from benchmarks.trace import torchvision_model
from microtome import zoo
from microtome.compat import vit_pytorch
from microtome.engine import Session

MIB = 2**20


def seconds(*runs: Callable[[], object], rounds: int = 9, after: Callable[[], object] = lambda: None) -> list[float]:
    """Run functions in turns and return the median time of each."""
    contestants = {str(index): run for index, run in enumerate(runs)}
    return list(take_turns(contestants, rounds, median, after).values())


@torch.no_grad()
def extracting() -> list[Target]:
    """Extract the third block of twelve, in models of identical blocks."""
    vit = torchvision_model("vit_b_16")  # before transformers, whose import of torchvision might fail
    from transformers import GPT2Config, GPT2Model

    cases: dict[str, tuple[nn.Module, Any, str]] = {
        "vit_b_16": (vit, torch.randn(4, 3, 224, 224), "encoder.layers.encoder_layer_2"),
        "gpt2": (GPT2Model(GPT2Config(use_cache=False)).eval(), torch.zeros(4, 128, dtype=torch.int64), "h.2"),
    }
    targets = []
    for name, (model, x, path) in cases.items():
        plain, looked = seconds(partial(model, x), partial(mt.extract, model, x, path))
        note = f"{name}, batch 4: {1e3 * plain:.0f} ms plain, {1e3 * looked:.0f} ms for block 3 of 12"
        targets.append(Target(f"extract block 3 of 12 of {name} / plain forward", looked / plain, 0.35, note=note))
    return targets


class _Reached(BaseException):
    """Ends a forward in a hook."""


def hooked(model: nn.Module, x: Any, path: str) -> Tensor:
    """Return the output of a module by a forward hook that stops the run: the least that PyTorch code has to do."""
    outputs: list[Tensor] = []

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).detach())
        raise _Reached

    handle = model.get_submodule(path).register_forward_hook(hook)
    with suppress(_Reached):
        model(x)
    handle.remove()
    return outputs[0]


@torch.no_grad()
def extracting_in_a_loop() -> list[Target]:
    """Extract one layer again and again: the added time hardly depends on the model, a small one is the worst case."""
    resnet = torchvision_model("resnet50")
    from transformers import GPT2Config, GPT2Model

    gpt2 = GPT2Model(GPT2Config(use_cache=False)).eval()
    mlp = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20))).eval()
    cases: dict[str, tuple[nn.Module, Any, str, int]] = {
        "resnet50, batch 1": (resnet, torch.randn(1, 3, 224, 224), "layer2", 15),
        "gpt2, batch 1 of 64 tokens": (gpt2, torch.zeros(1, 64, dtype=torch.int64), "h.6", 15),
        "an MLP of 40 modules": (mlp, torch.randn(8, 64), "10", 200),
    }
    targets = []
    for name, (model, x, path, rounds) in cases.items():
        extractor = mt.extractor(model, path)
        extractor(x)
        alone = partial(in_session, Session(model, at=path, backward=False, fast_paths=True), partial(model, x))
        contestants = {"plain": partial(model, x), "session": alone, "hook": partial(hooked, model, x, path)}
        plain, session, hook, ours = take_turns({**contestants, "ours": partial(extractor, x)}, rounds, min).values()
        note = f"{name}: a hook {1e6 * hook:.0f} us, an extractor {1e6 * (ours - hook):.0f} us more"
        floor = f"a session without probes adds {1e6 * (session - plain):.0f} us to a whole run of {name}"
        name = f"mt.extractor at {path}, {name} / a hook that stops"
        targets.append(Target(name, ours / hook, 1.05, note=note, floor=floor))
    return targets


def in_session(session: Session, run: Callable[[], object]) -> None:
    """Run a model in a session that observes nothing: the least that anything on the engine costs."""
    with session:
        run()


@torch.no_grad()
def recording() -> list[Target]:
    model, x = torchvision_model("vit_b_16"), torch.randn(4, 3, 224, 224)
    outputs = list(mt.extract(model, x, "encoder.layers.*", clone=True).values())

    def record() -> None:
        with mt.record(model, "encoder.layers.*"):
            model(x)

    def copies() -> list[Tensor]:
        return [output.clone() for output in outputs]

    plain, recorded, copied = seconds(lambda: model(x), record, copies)
    times = f"{1e3 * plain:.0f} ms plain, {1e3 * copied:.1f} ms to copy 12 outputs, {1e3 * recorded:.0f} ms recorded"
    note = f"vit_b_16, batch 4: {times}"
    return [Target("record all blocks / (plain forward + copies)", recorded / (plain + copied), 1.05, note=note)]


@torch.no_grad()
def attention() -> list[Target]:
    if not find_spec("vit_pytorch"):
        return []
    theirs_is: Any = import_module("vit_pytorch")
    old_kind: Any = import_module("vit_pytorch.recorder").Recorder

    def small() -> nn.Module:
        options: dict[str, Any] = {"image_size": 224, "patch_size": 16, "num_classes": 1000, "dim": 384, "depth": 12}
        model: nn.Module = theirs_is.ViT(**options, heads=6, mlp_dim=1536).eval()
        return model

    x, vit = torch.randn(4, 3, 224, 224), small()
    old, ours, bare = old_kind(small().eval()), vit_pytorch.Recorder(vit), small()
    plain, theirs, mine = seconds(lambda: bare(x), lambda: old(x), lambda: ours(x))
    note = f"ViT-S/16, batch 4: {1e3 * plain:.0f} ms plain, theirs {theirs / plain:.3f}, ours {mine / plain:.3f} of it"
    return [Target("Recorder on ViT-S/16 / vit-pytorch's", mine / theirs, 1.0, note=note)]


def drop_ins() -> list[Target]:
    """Compare the drop-ins with vit-pytorch's own on a model so small that the time of a call is all overhead."""
    if not find_spec("vit_pytorch"):
        return []
    zoo.import_torchvision()  # vit-pytorch imports it
    targets = []
    for name, training in (("Extractor", False), ("Recorder", False), ("Recorder", True)):
        theirs = getattr(import_module(f"vit_pytorch.{name.lower()}"), name)(tiny_vit()).train(training)
        ours = getattr(vit_pytorch, name)(tiny_vit()).train(training)
        bare, x = tiny_vit().train(training), torch.randn(1, 3, 32, 32)
        with torch.no_grad():
            session = Session(bare, at="transformer", backward=False, fast_paths=True)
            contestants = {"bare": partial(bare, x), "theirs": partial(theirs, x), "ours": partial(ours, x)}
            contestants["a session"] = partial(in_session, session, partial(bare, x))
            times = take_turns(contestants, 100, min)
        mode = "training" if training else "eval"
        parts = ", ".join(f"{who} {1e6 * value:.0f} us" for who, value in times.items())
        note = f"{name}, {mode}: {parts}"
        least = 1e6 * (times["a session"] - times["bare"])
        floor = (
            f"a session without probes adds {least:.0f} us to a run of {1e6 * times['bare']:.0f} us ({name}, {mode})"
        )
        label = f"{name} on a ViT of 46 modules, {mode} / vit-pytorch's"
        targets.append(Target(label, times["ours"] / times["theirs"], 1.1, note=note, floor=floor))
    return targets


def tiny_vit() -> nn.Module:
    options = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 64, "depth": 2, "heads": 2, "mlp_dim": 128}
    vit: nn.Module = import_module("vit_pytorch").ViT(**options)
    return vit


def writing() -> list[Target]:
    tensors = [torch.randn(32, 197, 384) for _ in range(32)]  # 9.2 MiB each
    whole = sum(tensor.nbytes for tensor in tensors)

    class Gives(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(Gives())
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "acts"

        def plain() -> None:
            place.mkdir()
            for at in range(0, len(tensors), 7):
                named = {str(number): tensor for number, tensor in enumerate(tensors[at : at + 7])}
                save_file(named, place / f"{at}.safetensors")

        def record() -> None:
            with mt.record(model, "0", to=place):
                for tensor in tensors:
                    model(tensor)

        # Removed each time, so that both write to memory that the page cache has at hand: allocating more can take
        # several times as long as everything that is measured here.
        theirs, ours = seconds(plain, record, rounds=15, after=lambda: rmtree(place))
    rates = f"{whole / theirs / MIB:.0f} MiB/s plain, {whole / ours / MIB:.0f} MiB/s recorded"
    note = f"{whole / MIB:.0f} MiB in shards of 64 MiB: {rates}"
    floor = "a recording hashes each tensor, and writes an index beside the shards"
    return [Target("time to record to disk / plain safetensors", ours / theirs, 1.25, note=note, floor=floor)]


def bounded() -> list[Target]:
    model, x = nn.Sequential(nn.Linear(64, 2048)), torch.randn(32, 64)  # 256 KiB a step
    process = psutil.Process()
    before, most = process.memory_info().rss, 0
    with torch.no_grad(), mt.record(model, "0", limit="256MB") as rec:
        for step in range(10_000):
            model(x)
            if step % 100 == 0:
                most = max(most, process.memory_info().rss - before)
    batch = 32 * 2048 * 4
    kept = rec["0"].nbytes
    note = f"10,000 steps of {batch / MIB:.2f} MiB: {kept / 1e6:.0f} MB kept, the process grew by {most / 1e6:.0f} MB"
    return [Target("growth of the process / (256 MB + a batch), 10,000 steps", most / (256e6 + batch), 1.1, note=note)]


def run() -> list[Target]:
    return [
        *bounded(),
        *extracting(),
        *extracting_in_a_loop(),
        *recording(),
        *attention(),
        *drop_ins(),
        *writing(),
    ]  # first, before others leave memory to reuse
