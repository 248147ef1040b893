"""GMACs of 28 torchvision models by microtome and other tools, and as published: `python -m benchmarks.peers`."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

import microtome as mt
from benchmarks.published import Published, table
from benchmarks.report import save

MODELS = """
    alexnet convnext_tiny densenet121 densenet161 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t
    mnasnet0_5 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_400mf regnet_y_800mf resnet18
    resnet50 resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 squeezenet1_1 swin_t swin_v2_t vgg11_bn vgg16
    vit_b_16 wide_resnet50_2
"""
#: Relative tolerance, and the rounding of the published figures.
WITHIN, ROUNDED = 0.005, 0.0005


def by_microtome(model: nn.Module, x: Tensor) -> float | None:
    return mt.profile(model, x, convention="torchvision").total.flops


def by_flop_counter(model: nn.Module, x: Tensor) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops() / 2


def by_torchinfo(model: nn.Module, x: Tensor) -> float:
    from torchinfo import summary

    return float(summary(model, input_data=x, verbose=0).total_mult_adds)


def by_fvcore(model: nn.Module, x: Tensor) -> float:
    from fvcore.nn import FlopCountAnalysis

    return float(FlopCountAnalysis(model, x).unsupported_ops_warnings(False).uncalled_modules_warnings(False).total())


def by_ptflops(model: nn.Module, x: Tensor, backend: str = "pytorch") -> float:
    """Count with the backend that ptflops uses by default, or with `"aten"`, which it recommends for transformers."""
    from ptflops import get_model_complexity_info

    options: dict[str, Any] = {"as_strings": False, "print_per_layer_stat": False, "verbose": False}
    macs, _ = get_model_complexity_info(model, tuple(x.shape[1:]), backend=backend, **options)
    if macs is None:
        raise RuntimeError("ptflops failed, and printed the reason")
    return float(macs)


def by_thop(model: nn.Module, x: Tensor) -> float:
    import thop

    return float(thop.profile(model, (x,), verbose=False)[0])


def by_calflops(model: nn.Module, x: Tensor) -> float:
    from calflops import calculate_flops

    _, macs, _ = calculate_flops(
        model, tuple(x.shape), print_results=False, print_detailed=False, output_as_string=False
    )
    return float(macs)


def by_torchstat(model: nn.Module, x: Tensor) -> float:
    from torchstat import ModelStat

    leaves = ModelStat(model, tuple(x.shape[1:]), 1)._analyze_model()
    return float(sum(leaf.Flops for leaf in leaves))


TOOLS: dict[str, Callable[[nn.Module, Tensor], float | None]] = {
    "microtome": by_microtome,
    "torch (FlopCounterMode)": by_flop_counter,
    "calflops": by_calflops,
    "torchinfo": by_torchinfo,
    "fvcore": by_fvcore,
    "ptflops": by_ptflops,
    "ptflops (aten)": partial(by_ptflops, backend="aten"),
    "thop": by_thop,
    "torchstat": by_torchstat,
}


def counted(task: tuple[str, Published]) -> float | str | None:
    """Return GMACs, or the name of the exception; run in a separate process, since some tools patch torch."""
    peer, entry = task
    torch.set_num_threads(1)
    model, x, way = entry.build("cpu"), entry.inputs()[0], TOOLS[peer]
    try:
        with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            found = way(model, x)
    except Exception as error:  # noqa: BLE001  whatever a peer raises is its result
        return type(error).__name__
    return None if found is None else found / 1e9


def near(found: float, published: float) -> bool:
    return abs(found - published) <= max(WITHIN * published, ROUNDED)


def main() -> int:
    entries = {entry.name: entry for entry in reversed(table())}
    right = dict.fromkeys(TOOLS, 0)
    lines = ["| | published | " + " | ".join(TOOLS) + " |", "|---|--:|" + "--:|" * len(TOOLS)]
    tasks = [(peer, entries[name]) for name in MODELS.split() for peer in TOOLS]
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        results: list[Any] = pool.map(counted, tasks, chunksize=1)
    for at, name in enumerate(MODELS.split()):
        entry = entries[name]
        cells = []
        for peer, found in zip(TOOLS, results[at * len(TOOLS) :], strict=False):
            is_right = isinstance(found, float) and near(found, entry.giga_macs)
            right[peer] += is_right
            text = f"{found:.3f}" if isinstance(found, float) else str(found)
            cells.append(text if is_right else f"*{text}*")
        lines.append(f"| {name} | {entry.giga_macs:.3f} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    lines.append(f"| **right** | {len(MODELS.split())} | {' | '.join(map(str, right.values()))} |")
    print(lines[-1])
    if "--save" in sys.argv:
        names = [name for name in TOOLS if name != "microtome" and "(" not in name]
        versions = ", ".join(f"{name} {version(name)}" for name in names)
        told = (
            "GMACs, random weights, in eval; in italics: off by more than 0.5 %, or the exception. Some count "
            "elementwise operators too: part of the difference is convention. ptflops runs with its default backend, "
            f"`pytorch`, and with `aten`, which its README recommends for transformers. {versions}."
        )
        print("written to", save("peers", "\n".join([told, "", *lines]), "python -m benchmarks.peers --save"))
    return int(right["microtome"] < len(MODELS.split()))


if __name__ == "__main__":
    sys.exit(main())
