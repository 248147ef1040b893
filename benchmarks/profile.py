"""The cost of a profile, compared with a plain forward and installed tools; a large model on meta tensors."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from time import process_time
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import microtome as mt
from benchmarks.report import Target
from benchmarks.timing import take_turns
from benchmarks.trace import torchvision_model


def peers(model: nn.Module, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return functions that count the model with each installed tool."""

    def flop_counter() -> None:
        with FlopCounterMode(display=False):
            model(x)

    def profiler() -> None:
        with torch.profiler.profile(with_flops=True) as profile:
            model(x)
        profile.key_averages()

    found: dict[str, Callable[[], object]] = {"FlopCounterMode": flop_counter, "torch.profiler": profiler}
    shape = tuple(x.shape)
    if find_spec("torchinfo"):
        from torchinfo import summary

        found["torchinfo"] = lambda: summary(model, input_data=x, verbose=0)
    if find_spec("thop"):
        from thop import profile as thop

        found["thop"] = lambda: thop(model, inputs=(x,), verbose=False)
    if find_spec("ptflops"):
        from ptflops import get_model_complexity_info

        found["ptflops"] = lambda: get_model_complexity_info(
            model, shape[1:], as_strings=False, print_per_layer_stat=False
        )
    if find_spec("fvcore"):
        from fvcore.nn import FlopCountAnalysis

        found["fvcore"] = lambda: FlopCountAnalysis(model, x).total()
    if find_spec("calflops"):
        from calflops import calculate_flops

        found["calflops"] = lambda: calculate_flops(model=model, input_shape=shape, print_results=False)
    return {name: partial(quietly, run) for name, run in found.items()}


def quietly(run: Callable[[], object]) -> None:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        run()


@torch.no_grad()
def static() -> list[Target]:
    """Compare a profile with a plain forward, batch 1, one thread, warm."""
    torch.set_num_threads(1)
    logging.getLogger("fvcore.nn.jit_analysis").setLevel(logging.ERROR)
    x = torch.randn(1, 3, 224, 224)
    targets = []
    for name, most in (("resnet50", 0.7), ("swin_t", 1.1)):
        model = torchvision_model(name)
        contestants: dict[str, Callable[[], object]] = {"plain": partial(model, x)}
        contestants |= {"microtome": partial(mt.profile, model, x), **peers(model, x)}
        times = take_turns(contestants, rounds=5, of=min)
        plain, ours = times.pop("plain"), times.pop("microtome")
        beside = [f"{peer} {times[peer] / plain:.2f}" for peer in sorted(times, key=times.__getitem__)]
        note = f"{name}, whole call over a plain forward: {', '.join(beside)}"
        targets.append(Target(f"{name}, batch 1: mt.profile / plain forward", ours / plain, most, note=note))
    return targets


class Chain(nn.Module):
    """Operators that FlopCounterMode counts, and nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(500):
            x = torch.mm(x, x)
        return x


@torch.no_grad()
def real() -> list[Target]:
    """Compare the overhead per operator of a trace on real tensors with that of FlopCounterMode."""
    torch.set_num_threads(1)
    image = torch.randn(1, 3, 64, 64)
    cases: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "500 products of matrices": (Chain(), torch.rand(4, 4)),
        "swin_t": (torchvision_model("swin_t"), image),
        "resnet50": (torchvision_model("resnet50"), image),
    }
    return [added(name, model, x, 0.5 if isinstance(model, Chain) else 0.9) for name, (model, x) in cases.items()]


class EmptyMode(TorchDispatchMode):
    """A dispatch mode that only runs operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def added(name: str, model: nn.Module, x: torch.Tensor, most: float) -> Target:
    count = len(mt.trace(model, x, fake=False).ops)

    def counter() -> None:
        with FlopCounterMode(display=False):
            model(x)

    def empty_mode() -> None:
        with EmptyMode():
            model(x)

    contestants: dict[str, Callable[[], object]] = {
        "plain": partial(model, x),
        "counter": counter,
        "empty mode": empty_mode,
        "trace": partial(mt.trace, model, x, fake=False),
    }
    times = take_turns(contestants, rounds=9, of=min, clock=process_time)
    ours, theirs, least = ((times[who] - times["plain"]) / count * 1e6 for who in ("trace", "counter", "empty mode"))
    note = f"{name}: a real trace adds {ours:.0f} us an operator, FlopCounterMode {theirs:.0f}"
    floor = (
        f"{name}: an empty dispatch mode adds {least:.0f} us an operator. A trace also records each value, with who "
        "made it, its memory, aliases and mutations, and the shapes of calls, and restores the model's state"
    )
    name = f"{name}: added by mt.trace(fake=False) / by FlopCounterMode"
    return Target(name, ours / theirs, most, note=note, floor=floor)


def large() -> list[Target]:
    """Profile the shape of Llama-70B, 2048 tokens, on meta tensors, in a separate process."""
    if not find_spec("transformers"):
        return []
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.profile"], capture_output=True, text=True, check=True, env=os.environ
    )
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    seconds = ", ".join(f"{name} {facts[name]:.2f} s" for name in ("plain", "profile", "FlopCounterMode"))
    return [
        Target(
            "Llama-70B on meta: mt.profile / plain forward",
            facts["profile"] / facts["plain"],
            2.5,
            note=f"Llama-70B: {seconds}",
        ),
        Target("Llama-70B on meta: resident GB", facts["gigabytes"], 0.6),
    ]


@torch.no_grad()
def llama() -> dict[str, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        shape = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
        model = LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=28672, max_position_embeddings=4096)).eval()
    inputs = {"input_ids": torch.zeros(1, 2048, dtype=torch.int64, device="meta")}

    def counter() -> None:
        with FlopCounterMode(display=False):
            model(**inputs)

    contestants: dict[str, Callable[[], object]] = {
        "plain": lambda: model(**inputs),
        "profile": lambda: mt.profile(model, inputs),
        "FlopCounterMode": counter,
    }
    times = take_turns(contestants, rounds=3, of=min)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {**times, "gigabytes": resident}


def run() -> list[Target]:
    return [*static(), *real(), *large()]


if __name__ == "__main__":
    from microtome import zoo

    zoo.import_torchvision()  # before transformers imports it
    print(json.dumps(llama()))
