"""Overhead of generation over stages: the time of a token compared with the whole model, and the bytes that cross."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch

import microtome as mt
from benchmarks.handwritten_stages import HandwrittenStages
from benchmarks.report import Target
from microtome import zoo

TOKENS = 24
#: Why the targets may be missed.
FLOOR = (
    "each stage runs the code of the model around its layers, and the tail matches each call that it skips with that "
    "of the head: some 100 Python functions, none of which takes 3 % of a step"
)
COLD = (
    "the code between two layers runs from cold caches, since each layer reads all of its weights, and takes up to "
    "four times as long as in the small model"
)


def build(layers: int, hidden: int, *, intermediate: int | None = None, heads: int = 4) -> Any:
    zoo.import_torchvision()  # which transformers imports
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate or 11 * hidden // 4, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=heads, vocab_size=1000)
    return transformers.LlamaForCausalLM(config).eval()


def seconds_per_token(step: Any, ids: torch.Tensor) -> float:
    """The median time of a decoding step."""
    times, output = [], step(input_ids=ids)
    for _ in range(TOKENS):
        began = perf_counter()
        output = step(input_ids=output.logits[:, -1:].argmax(-1), past_key_values=output.past_key_values)
        if output.logits.is_cuda:
            torch.cuda.synchronize()
        times.append(perf_counter() - began)
    return median(times)


def build_slow() -> tuple[Any, int]:
    """A model of eight layers whose tokens take about 50 ms on this machine, and its hidden size."""
    for hidden in (1280, 1536, 1792, 2048, 2304, 2560):
        model = build(8, hidden, heads=16)
        if seconds_per_token(model, torch.arange(1, 17)[None]) > 0.045:
            break
    return model, hidden


def compare(model: Any, rounds: int = 6) -> tuple[float, float, float]:
    """The seconds of a token of the whole model, of two stages written by hand, and of two stages of microtome.

    They run each token in turn. The least of all tokens is returned: other processes of the machine only add to it.
    """
    layers = model.config.num_hidden_layers
    ids = torch.arange(1, 17, device=model.device)[None]
    stages = mt.split(model, {"input_ids": ids}, at=f"model.layers.{layers // 2 - 1}")
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        steps = model, HandwrittenStages(model), stages.session()
        outputs = [step(input_ids=ids) for step in steps]
        for _ in range(TOKENS):
            token = outputs[0].logits[:, -1:].argmax(-1)
            for index, step in enumerate(steps):
                began = perf_counter()
                outputs[index] = step(input_ids=token, past_key_values=outputs[index].past_key_values)
                times[index].append(perf_counter() - began)
        assert all(output.logits.equal(outputs[0].logits) for output in outputs)
    whole, by_hand, split = map(min, times)
    return whole, by_hand, split


def bytes_per_token() -> tuple[float, float]:
    """The bytes sent for one token over those of its tensors, at hidden size 2048 after eight layers; and the seconds.

    The last of some tokens of an answer over a server in this process.
    """
    model = build(9, 2048, intermediate=64, heads=16)
    tensors = 4 * (2048 + 2 * 128)  # the hidden state, and the cosines and sines of rotary embeddings
    ids = torch.arange(1, 17)[None]
    with (
        mt.serve(model, {"input_ids": ids}, listen="127.0.0.1:0") as server,
        mt.connect(model, {"input_ids": ids}, server.address, at="model.layers.7", codec="raw") as remote,
        remote.session() as session,
    ):
        spent = seconds_per_token(session, ids)
        return remote.requests[-1].sent_bytes / tensors, spent


def run() -> list[Target]:
    torch.set_num_threads(1)
    with torch.no_grad():
        whole, by_hand, split = compare(build(16, 64), rounds=20)
        small = (
            f"16 layers of 64: {1e3 * whole:.2f} ms a token, over two stages {1e3 * split:.2f} ms, over two that are "
            f"written by hand {1e3 * by_hand:.2f} ms"
        )
        slow, hidden = build_slow()
        large_whole, large_by_hand, large_split = compare(slow)
        large = (
            f"8 layers of {hidden}: {1e3 * large_whole:.1f} ms a token, over two stages {1e3 * large_split:.1f} ms, "
            f"over two that are written by hand {1e3 * large_by_hand:.1f} ms"
        )
        sent, spent = bytes_per_token()
        return [
            Target(
                "added by two stages, ms a layer and token", 1e3 * (split - whole) / 16, 0.1, note=small, floor=FLOOR
            ),
            Target("two stages / whole model, a token", large_split / large_whole, 1.05, note=large, floor=COLD),
            Target(
                "bytes sent for a token / of its tensors, hidden 2048, 8 layers",
                sent,
                1.3,
                note=f"{1e3 * spent:.1f} ms",
            ),
        ]
