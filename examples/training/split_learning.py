"""Train a vision transformer in two processes over a network: the head on a client, the tail on a server.

    python examples/training/split_learning.py server --checkpoint there/
    python examples/training/split_learning.py client --checkpoint here/

Either process may be killed and started again: training goes on from the last step that both have. With `--labels-at
server`, on both sides, the server owns the labels and computes the loss, and the client sends numbers of rows.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo

AT, ROWS = "blocks.0", 16
DATA_ROWS = 256


def make_data() -> tuple[Tensor, Tensor]:
    """Pictures of noise, brighter in one of two halves, and which."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, 2, (DATA_ROWS,), generator=generator)
    pictures = torch.randn(DATA_ROWS, 3, 32, 32, generator=generator)
    pictures[target == 0, :, :16] += 0.5
    pictures[target == 1, :, 16:] += 0.5
    return pictures, target


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def serve(options: argparse.Namespace, model: nn.Module, example: Tensor) -> None:
    labels = make_data()[1]  # of which only the server may have a copy

    def loss_of(output: Tensor, rows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, labels[rows])

    loss = loss_of if options.labels_at == "server" else None
    with mt.serve(
        model,
        example,
        listen=options.address,
        optimizer=make_optimizer,
        loss=loss,
        checkpoint=options.checkpoint,
        token=options.token,
    ) as server:
        print(f"training at {server.address}", flush=True)
        server.wait()


def train(options: argparse.Namespace, model: nn.Module, example: Tensor) -> None:
    pictures, labels = make_data()
    with mt.connect(
        model,
        example,
        options.address,
        AT,
        train=True,
        optimizer=make_optimizer,
        checkpoint=options.checkpoint,
        token=options.token,
        timeout=60.0,
    ) as remote:
        print(f"from step {remote.num_steps}", flush=True)
        while remote.num_steps < options.steps:
            generator = torch.Generator().manual_seed(remote.num_steps)  # the same rows if a step is repeated
            rows = torch.randint(0, DATA_ROWS, (ROWS,), generator=generator)
            if options.labels_at == "server":
                loss = remote.loss(pictures[rows], rows)
            else:
                loss = nn.functional.cross_entropy(remote(pictures[rows]), labels[rows])
            loss.backward()
            remote.step()
            print(f"step {remote.num_steps}: loss {loss.item():.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=["server", "client"])
    parser.add_argument("--address", default="127.0.0.1:7070")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", help="a folder of this side")
    parser.add_argument("--labels-at", choices=["client", "server"], default="client")
    parser.add_argument("--token", help="a secret of both sides; on other networks, encrypt the connection, too")
    options = parser.parse_args()
    torch.manual_seed(0)  # both sides build the same model
    model, _ = zoo.build("tiny-vit")
    (serve if options.side == "server" else train)(options, model.train(), torch.zeros(ROWS, 3, 32, 32))


if __name__ == "__main__":
    main()
