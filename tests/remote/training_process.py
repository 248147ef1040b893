"""Servers that train, as processes that are killed in the middle of a step.

`python -m tests.remote.training_process kills 20` kills a server 20 times, and compares both sides with a run in which
nothing happens.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import RemoteError
from microtome.files.tensors import read_tensors
from microtome.remote.server import serve
from microtome.remote.training.backend import TrainingBackend
from microtome.remote.training.checkpoints import Checkpoints
from microtome.remote.training.client import RemoteTraining
from microtome.remote.training.server_run import TrainingRun
from microtome.remote.training.trained_stage import TrainedStage

#: Where a server can be killed: before these functions run, or after them.
POINTS: dict[str, tuple[type, str, bool]] = {
    "before a forward": (TrainingRun, "forward", False),
    "after a forward": (TrainingRun, "forward", True),
    "before a backward": (TrainingRun, "backward", False),
    "after a backward": (TrainingRun, "backward", True),
    "before the optimizer": (TrainedStage, "apply", False),
    "after the optimizer": (TrainedStage, "apply", True),
    "after the checkpoint": (Checkpoints, "save", True),
    "before the reply": (TrainingBackend, "run_action", True),
}
#: The same for a client.
CLIENT_POINTS: dict[str, tuple[type, str, bool]] = {
    "after a backward": (RemoteTraining, "run_backward", True),
    "before the optimizer": (TrainedStage, "apply", False),
    "after the optimizer": (TrainedStage, "apply", True),
}
X = torch.randn(6, 8)


def build() -> nn.Module:
    """A net with batch norms and dropout on both sides of the cut at "2"."""
    generator = torch.random.get_rng_state()
    torch.manual_seed(3)
    blocks = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))]
    net = nn.Sequential(*blocks, nn.Linear(8, 4)).train()
    torch.random.set_rng_state(generator)
    return net


AT = "2"


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def train_step(remote: Any) -> float:
    """Train one step, in two micro-batches."""
    inputs, target = batch_of(remote.num_steps)
    torch.manual_seed(remote.num_steps)  # for the dropout of the head
    total = 0.0
    for part, part_target in zip(inputs.chunk(2), target.chunk(2), strict=True):
        loss = nn.functional.cross_entropy(remote(part), part_target) / 2
        loss.backward()
        total += loss.item()
    remote.step()
    return total


def connect(model: nn.Module, address: str, at: str = AT, **options: Any) -> Any:
    torch.manual_seed(0)  # the draws of the server come from it
    defaults: dict[str, Any] = {"optimizer": make_optimizer, "codec": "raw", "timeout": 60.0}
    return mt.connect(model, X, address, at, train=True, **(defaults | options))


def train_undisturbed(steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The losses, and the weights of both sides."""
    here, there = build(), build()
    with (
        serve(there, X, listen="127.0.0.1:0", optimizer=make_optimizer) as server,
        connect(here, server.address) as one,
    ):
        losses = [train_step(one) for _ in range(steps)]
    return losses, here.state_dict(), there.state_dict()


class TrainingServer:
    """A process that trains until killed, and starts again when it is killed at a point."""

    def __init__(self, folder: Path | str, every: int = 1, point: tuple[str, ...] = ()) -> None:
        self.address = "127.0.0.1:0"
        self._folder, self._every = str(folder), every
        self.start(*point)

    def start(self, *point: str) -> None:
        """Start it on the port that it had; `point`: it kills itself there, at the n-th time, as in `POINTS`."""
        command = [sys.executable, "-m", "tests.remote.training_process", "serve"]
        command += [self.address, self._folder, str(self._every), *point]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the server did not start"

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        """Wait until it has ended."""
        code = self.process.wait(120)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def run_server(address: str, folder: str, every: str, point: str = "", number: str = "0") -> None:
    if point:
        _kill_at(*POINTS[point], int(number))
    checkpoint = folder or None
    options: dict[str, Any] = {"checkpoint": checkpoint, "checkpoint_every": int(every)}
    with serve(build(), X, listen=address, optimizer=make_optimizer, **options) as server:
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()
        server.wait()


def _kill_at(owner: type, name: str, is_after: bool, number: int) -> None:
    original: Callable[..., Any] = getattr(owner, name)
    left = number

    def replacement(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, replacement)


def run_client(address: str, folder: str, steps: str, point: str = "", number: str = "0") -> None:
    """Train the head until so many steps are done, from its last checkpoint."""
    if point:
        _kill_at(*CLIENT_POINTS[point], int(number))
    with connect(build(), address, checkpoint=folder) as remote:
        while remote.num_steps < int(steps):
            train_step(remote)


def run_client_kills(folder: Path, points: Sequence[str]) -> dict[str, bool]:
    """Kill a client once at each point, and compare both sides with a run in which nothing happens."""
    steps = 2 * len(points)
    with serve(build(), X, listen="127.0.0.1:0", optimizer=make_optimizer, checkpoint=folder / "there") as server:
        for name in (*points, ""):
            command = [sys.executable, "-m", "tests.remote.training_process", "train", server.address]
            command += [str(folder / "here"), str(steps), *((name, "2") if name else ())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ended = subprocess.run(command, env=environment, timeout=120, check=False)
            assert ended.returncode == (-signal.SIGKILL if name else 0)
    _, *expected = train_undisturbed(steps)
    found = [read_weights(folder / side, steps) for side in ("here", "there")]
    return {
        side: all(one.equal(weights[name]) for name, one in own.items())
        for side, own, weights in zip(("head", "tail"), found, expected, strict=True)
    }


def read_weights(folder: Path, step: int) -> dict[str, Tensor]:
    """The weights of a checkpoint."""
    saved, _ = read_tensors(folder / f"step-{step:08}.safetensors")
    return {name.removeprefix("weight:"): one for name, one in saved.items() if name.startswith("weight:")}


def run_kills(
    count: int, folder: Path, points: list[str] | None = None, every: int = 1, seed: int | None = None
) -> dict[str, Any]:
    """Kill the server so often, at each point in turn, and compare with a run in which nothing happens.

    Args:
        every: The number of steps from one checkpoint to the next; the client has checkpoints if it is more than one.
        seed: Of points in a random order, and of the times that they are reached before.

    Returns:
        The numbers of kills, steps and retried actions; whether losses and the weights of both sides are bit-equal.
    """
    dice = random.Random(seed)
    chosen = points or list(POINTS)
    at = [_NUMBERED[chosen[kill % len(chosen)]] for kill in range(count)]
    if seed is not None:  # after the first checkpoint: a step has at most 5 actions
        later = range(5 * every, 7 * every)
        at = [(name, str(int(number) + dice.choice(later))) for name, number in dice.sample(at, count)]
    here, kills, losses = build(), 0, dict[int, float]()
    options: dict[str, Any] = {"checkpoint": folder / "here"} if every > 1 else {}

    def start_again() -> None:
        nonlocal kills
        while kills < count:
            assert server.end() == -signal.SIGKILL
            kills += 1
            server.start(*(at[kills] if kills < count else ()))

    def train_next(remote: Any) -> None:
        step = remote.num_steps
        try:
            losses[step] = train_step(remote)
        except RemoteError as error:
            if error.kind != "ROLLED_BACK":
                raise
            remote.zero_grad()

    with TrainingServer(folder / "there", every, at[0]) as server:
        keeper = threading.Thread(target=start_again, daemon=True)
        keeper.start()
        with connect(here, server.address, **options) as remote:
            while keeper.is_alive():
                train_next(remote)
            train_next(remote)
            while remote.num_steps % every:
                train_next(remote)
            steps, retries = remote.num_steps, remote.retries
    expected_losses, expected_here, expected_there = train_undisturbed(steps)
    tail = read_weights(folder / "there", steps)
    head = {name: one for name, one in here.state_dict().items() if int(name[0]) <= int(AT)}
    assert len(head) + len(tail) == len(here.state_dict())
    return {
        "kills": kills,
        "steps": steps,
        "retries": retries,
        "losses": [losses[step] for step in range(steps)] == expected_losses,
        "head": all(one.equal(expected_here[name]) for name, one in head.items()),
        "tail": all(one.equal(expected_there[name]) for name, one in tail.items()),
    }


#: A point, and at which time that it is reached the server is killed there.
_NUMBERED = {
    name: (name, str({"forward": 4, "backward": 3, "run_action": 6}.get(function, 2)))
    for name, (_, function, _) in POINTS.items()
}


if __name__ == "__main__":
    if sys.argv[1] in ("serve", "train"):
        (run_server if sys.argv[1] == "serve" else run_client)(*sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            found = run_kills(int(sys.argv[2]), Path(temporary))
        sys.stdout.write(f"{found}\n")
        sys.exit(0 if found["losses"] and found["head"] and found["tail"] else 1)
