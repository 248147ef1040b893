"""Generation over a server on a CUDA device, with the shape of Llama 7B: `python -m benchmarks.generate_gpu`.

The server is a process of its own on the same device, with the same weights.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

import microtome as mt
from benchmarks.generate import seconds_per_token
from benchmarks.report import machine
from microtome import zoo

AT = "model.layers.15"
_ROUNDS = 5  # the first ones are up to three times slower, in the whole model, too: the processors of the host warm up
PHASES = ("head_s", "encode_s", "wire_s", "server_decode_s", "tail_s", "server_encode_s", "decode_s")


def build() -> Any:
    zoo.import_torchvision()  # which transformers imports
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig()).eval()
    torch.set_default_dtype(torch.float32)
    return model


def serve(ids: torch.Tensor) -> None:
    with mt.serve(build(), {"input_ids": ids}, listen="127.0.0.1:0", state_memory="8GB") as server:
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()
        server.wait()


@torch.no_grad()
def run(ids: torch.Tensor, address: str) -> None:
    model = build()
    stages = mt.split(model, {"input_ids": ids}, at=AT)
    whole, split = (
        min(seconds_per_token(make(), ids) for _ in range(_ROUNDS)) for make in (lambda: model, stages.session)
    )
    over_server, last = float("inf"), None
    with mt.connect(model, {"input_ids": ids}, address, at=AT, codec="raw", fallback=None, timeout=60) as remote:
        for _ in range(_ROUNDS):
            with remote.session() as session:
                seconds = seconds_per_token(session, ids)
                over_server, last = min((over_server, last), (seconds, remote.requests[-1]), key=lambda pair: pair[0])
        tokens = [one.generate(ids, max_new_tokens=30, do_sample=False) for one in (model, remote)]
    assert last is not None
    times = {name.removesuffix("_s"): f"{1e3 * getattr(last, name):.1f}" for name in PHASES}
    print(f"{machine()}, {torch.cuda.get_device_name()}")
    print(f"ms a token: whole {1e3 * whole:.1f}, two stages {1e3 * split:.1f}, over a server {1e3 * over_server:.1f}")
    print(f"of the server's, ms: {times}; {last.sent_bytes} bytes sent, {last.received_bytes} received")
    print(f"tokens equal: {tokens[0].equal(tokens[1])}")


if __name__ == "__main__":
    prompt = torch.arange(1, 129, device="cuda")[None]
    if sys.argv[1:] == ["serve"]:
        serve(prompt)
    else:
        command = [sys.executable, "-m", "benchmarks.generate_gpu", "serve"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                run(prompt, process.stdout.readline().strip())
            finally:
                process.kill()
