"""Compiled stages, compared with the stages and with the compiled model, on one thread."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import microtome as mt
from benchmarks.report import Target
from benchmarks.timing import take_turns
from benchmarks.trace import torchvision_model
from microtome import zoo

#: The least gain of a compiled stage, where compiling the whole model gains as much.
_LEAST_GAIN = 1.3


def _llama() -> tuple[nn.Module, mt.Inputs]:
    zoo.import_torchvision()  # transformers imports it
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).eval(), mt.Inputs(torch.arange(32)[None], use_cache=False)


def _compare(name: str, model: nn.Module, inputs: mt.Inputs, at: str, rounds: int) -> list[Target]:
    head, tail = mt.split(model, inputs, at=at)
    compiled = torch.compile(model)
    first, last = head.compile(dynamic=False), tail.compile(dynamic=False)
    boundary: Any = head(*inputs.args, **inputs.kwargs)
    whole, compiled_whole, stage, compiled_stage, stages = take_turns(
        {
            "whole": lambda: inputs.run(model),
            "compiled whole": lambda: compiled(*inputs.args, **inputs.kwargs),
            "tail": lambda: tail(boundary),
            "compiled tail": lambda: last(boundary),
            "compiled head and tail": lambda: last(first(*inputs.args, **inputs.kwargs)),
        },
        rounds=rounds,
        of=min,
        clock=time.process_time,
    ).values()
    gain = whole / compiled_whole
    note = f"{name}: the model takes {1e3 * whole:.2f} ms, {gain:.2f} times as long as torch.compile of it; the tail "
    note += f"from {at} {1e3 * stage:.2f} ms, {stage / compiled_stage:.2f} times as long as the compiled one"
    if gain < _LEAST_GAIN:
        note += "; there is no target, since compiling the whole model gains less than that"
    most = 1 / _LEAST_GAIN if gain >= _LEAST_GAIN else float("inf")
    return [
        Target(f"{name}: compiled tail / tail", compiled_stage / stage, most, note=note),
        Target(f"{name}: compiled head and tail / torch.compile(model)", stages / compiled_whole, 1.05),
    ]


@torch.no_grad()
def run() -> list[Target]:
    torch.set_num_threads(1)
    image = mt.Inputs(torch.randn(1, 3, 224, 224))
    return [
        *_compare("llama, 8 layers of 64, 32 tokens", *_llama(), at="model.layers.3", rounds=300),
        *_compare("resnet50, batch 1", torchvision_model("resnet50"), image, at="layer2", rounds=20),
    ]
