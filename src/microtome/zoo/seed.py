"""Weights that depend on a seed alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Draw from this seed inside the block; afterwards the random state is as it was before."""
    # Only the CPU's generator is used, so only it is kept and seeded; torch.manual_seed would reseed every device.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
