"""Short forms of what `make soak` runs."""

from __future__ import annotations

import random

import pytest
import torch

import microtome as mt
from microtome.errors import BadBoundary
from tests.remote.fuzz import deeply, fuzz, repaired
from tests.remote.soak import soak


@pytest.mark.slow
def test_a_few_hundred_requests_over_breaking_lines_are_all_answered_rightly() -> None:
    found = soak(400, 4, pause_s=0.05)
    assert (found.right, found.wrong, found.lost) == (400, 0, 0)
    assert found.disconnects > 5


@pytest.mark.slow
def test_two_thousand_mutated_messages_do_no_harm() -> None:
    found = fuzz(2000)
    assert found.wrong == 0
    assert {"port", "http/2", "message", "deep", "boundary", "field"} == set(found.sent)
    # Errors have reasons, and some mutations are of no consequence.
    assert found.outcomes["bad_request"] > 500
    assert found.outcomes["result"] > 50
    assert found.outcomes["refused"] > 20
    assert found.growth < 0.2  # it is hardly warm


@pytest.mark.parametrize("codec", ["raw", "zstd", "int8"])
def test_repaired_boundaries_are_boundaries(codec: str) -> None:
    """Otherwise mutations would end at the checksums, and test nothing behind them."""
    tensors = {"a": torch.randn(3, 70), "b": torch.arange(5), "c": torch.randn(2, 300_000)}
    data = mt.Boundary("layer1", "f", tensors, {"n": 1}).to_bytes(codec)
    length = int.from_bytes(data[12:16], "little")
    assert repaired(data[32 : 32 + length].rstrip(), data[32 + length : -16]) == data
    read = [_read(deeply(data, random.Random(seed))) for seed in range(300)]
    assert sum(one is None for one in read) > 10
    assert not any("checksum mismatch in the header" in one for one in read if one is not None)


def _read(data: bytes) -> str | None:
    """What is wrong with a boundary; None: nothing is."""
    try:
        mt.Boundary.from_bytes(data)
    except BadBoundary as error:
        return str(error)
    return None
