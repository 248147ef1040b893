"""Law: an action restores the random states that its run drew from, and leaves alone what another thread drew."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.engine.random_states import numpy_state, preserve_random_states
from tests.engine.quiet import Noisy, Quiet

ACTIONS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "trace": mt.trace,
    "fake": partial(mt.trace, fake=True),
    "real": partial(mt.trace, fake=False),
    "backward": partial(mt.profile, backward=True),
    "profile": mt.profile,
    "time": partial(mt.profile, measure=("time", "memory"), repeat=3, warmup=0),
    "cuts": mt.cuts,
    "extract": lambda model, x: mt.extract(model, x, "first"),
}


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that lives as long as the test, as one that trains a model does."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield pool
        Quiet.meanwhile.clear()


@pytest.mark.parametrize("action", ACTIONS)
def test_numbers_that_another_thread_draws_meanwhile_do_not_repeat(action: str, thread: ThreadPoolExecutor) -> None:
    model = Quiet().eval()
    seed()
    wanted = [draw() for _ in range(200)]
    drawn: list[Any] = []
    Quiet.meanwhile.append(lambda: drawn.append(thread.submit(draw).result()))
    seed()
    ACTIONS[action](model, torch.ones(2, 4))
    drawn.append(thread.submit(draw).result())
    assert 1 < len(drawn) < 200
    assert drawn == wanted[: len(drawn)]


@pytest.mark.parametrize("other_threads", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
def test_states_that_the_run_itself_drew_from_are_restored(action: str, other_threads: bool) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            draw()  # on the CPU, whatever stands in for the weights
            return y

    model = Draws()
    with ThreadPoolExecutor(1) as pool:
        if other_threads:
            pool.submit(int).result()
        seed()
        if action == "extract":  # which runs the model once, as the user would
            draw()
        wanted = draw()
        seed()
        with suppress(mt.MicrotomeError):  # `item` cannot be run on fake tensors
            ACTIONS[action](model, torch.ones(2, 4))
        assert draw() == wanted


@pytest.mark.parametrize("action", ["trace", "fake", "real", "time"])
def test_dropout_leaves_the_state_as_it_was(action: str, thread: ThreadPoolExecutor) -> None:
    model = Noisy().train()
    seed()
    wanted = draw()
    seed()
    ACTIONS[action](model, torch.ones(2, 4))
    assert draw() == wanted


def test_a_seed_that_the_forward_sets_is_taken_back(thread: ThreadPoolExecutor) -> None:
    class Seeds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(7)
            return x + 1

    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    mt.trace(Seeds(), torch.ones(1))
    assert torch.rand(1) == wanted
    assert torch.initial_seed() == 3


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_every_part_of_the_state_of_numpy_is_compared_and_restored(
    kind: type[np.random.BitGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # gRPC keeps a thread after tests of servers
    numpy_random: Any = np.random  # its types lack these functions
    before = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(kind(0))
    try:
        for _ in range(9):  # Philox draws four numbers at once, PCG64 keeps half of one
            state = numpy_state()
            with preserve_random_states((), ()):
                number = np.random.randint(0, 9, dtype=np.uint32)
                assert numpy_state() != state
            assert numpy_state() == state
            assert np.random.randint(0, 9, dtype=np.uint32) == number
    finally:
        numpy_random.set_bit_generator(before)
