"""What an observer of the network can read: neither inputs nor outputs if this device runs both ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from tests.remote.chains import CUTS, connected, serving
from tests.remote.proxy import Proxy, Weather
from tests.remote.small import small


class Wiretap:
    """A proxy that keeps all bytes that pass it."""

    def __init__(self, address: str) -> None:
        self.data = bytearray()
        self._lock = threading.Lock()
        self.proxy = Proxy(address, lambda _: (Weather(corrupt=self._keep), Weather(corrupt=self._keep)))

    def _keep(self, _: int, data: bytes) -> bytes:
        with self._lock:
            self.data += data
        return data

    def count(self, tensor: Tensor) -> float:
        """The share of a tensor's bytes that has passed, in pieces shorter than a frame of HTTP/2."""
        data = tensor.detach().contiguous().numpy().tobytes()
        pieces = [data[start : start + 16] for start in range(0, len(data), 16)]
        return sum(piece in self.data for piece in pieces) / len(pieces)


class Observed:
    """A model, and what it computes on an example, with which clients connect, and on an input."""

    def __init__(self, model: nn.Module, cuts: list[str]) -> None:
        self.model = model
        self.example, self.x = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32)
        self.output = model(self.x)
        stages = mt.split(model, self.example, at=cuts)
        self.boundaries = [boundary := stages[0](self.x)]
        for stage in stages[1 : len(cuts)]:
            self.boundaries.append(boundary := stage(boundary))

    @property
    def ends(self) -> dict[str, Tensor]:
        """What must not leave: inputs and outputs."""
        return {
            "example": self.example,
            "input": self.x,
            "output of the example": self.model(self.example),
            "output": self.output,
        }

    def shares(self, tap: Wiretap) -> dict[str, float]:
        return {name: tap.count(tensor) for name, tensor in self.ends.items()}

    def run(self, *servers: Any, at: Any) -> None:
        with connected(self.model, self.example, *servers, at=at) as remote:
            assert remote(self.x).equal(self.output)


def crossing(observed: Observed, index: int) -> Tensor:
    (tensor,) = observed.boundaries[index].tensors.values()
    return tensor


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return small()[0]


@torch.no_grad()
def test_neither_inputs_nor_outputs_are_on_the_wire_if_both_ends_run_here(model: nn.Module) -> None:
    observed = Observed(model, CUTS)
    with serving(model, observed.example) as server:
        u_shaped, one_cut, whole = (Wiretap(server.address) for _ in range(3))
        for tap, at in ((u_shaped, CUTS), (one_cut, "stem"), (whole, "(input)")):
            with tap.proxy:
                observed.run(tap.proxy.address, at=at)
    assert set(observed.shares(u_shaped).values()) == {0.0}
    for index in range(2):
        assert u_shaped.count(crossing(observed, index)) > 0.9  # the test reads what crosses
    found = observed.shares(one_cut)
    assert (found["example"], found["input"]) == (0.0, 0.0)
    assert (found["output of the example"], found["output"]) == (1.0, 1.0)  # and finds an output where there is one
    found = observed.shares(whole)
    assert min(found["example"], found["input"]) > 0.9


@pytest.mark.parametrize("is_forwarded", [False, True])
@torch.no_grad()
def test_neither_inputs_nor_outputs_are_on_the_wire_of_two_servers_in_the_middle(
    model: nn.Module, is_forwarded: bool
) -> None:
    cuts = [*CUTS, "layer2"]
    observed = Observed(model, cuts)
    with serving(model, observed.example) as second:
        after = Wiretap(second.address)
        forward = after.proxy.address if is_forwarded else ()
        with after.proxy, serving(model, observed.example, forward=forward) as first:
            before = Wiretap(first.address)
            with before.proxy:
                observed.run(before.proxy.address, after.proxy.address, at=cuts)
    for tap in (before, after):
        assert set(observed.shares(tap).values()) == {0.0}
    assert before.count(crossing(observed, 0)) > 0.9
    assert after.count(crossing(observed, 1)) > 0.9
    assert (before.count(crossing(observed, 1)) < 0.1) is is_forwarded
    assert (before.count(crossing(observed, 2)) > 0.9) is is_forwarded
