"""Train a vision transformer over the processes of a pipeline, with the 1F1B schedule of torch:

    torchrun --standalone --nproc-per-node 3 examples/training/pipeline.py

Each process holds the weights, gradients and optimizer state of its own stage. The last one prints the losses.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import microtome as mt
from microtome import zoo

MICRO_BATCHES, ROWS = 4, 8


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pictures of noise, brighter in one of two halves, and which."""
    target = torch.randint(0, 2, (MICRO_BATCHES * ROWS,), generator=generator)
    pictures = torch.randn(len(target), 3, 32, 32, generator=generator)
    pictures[target == 0, :, :16] += 0.5
    pictures[target == 1, :, 16:] += 0.5
    return pictures, target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")

    torch.manual_seed(0)  # every process builds the same model, and keeps a stage of it
    model, _ = zoo.build("tiny-vit")
    model.train()
    cuts = [f"blocks.{index}" for index in range(world - 1)]
    stages = mt.split(model, f"{ROWS}x3x32x32", at=cuts, grad=True, load=rank)
    module = stages[rank].as_module()
    del model
    stage = PipelineStage(module, rank, world, device, **module.shapes())
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        pictures, target = make_batch(generator)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(pictures)
        elif rank == world - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        mt.sum_tied_gradients(module)  # no-op: no weight has two stages here
        optimizer.step()
        if losses:
            print(f"step {step}: loss {torch.stack(losses).mean():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
