"""The best way to place a model on a chain of devices, by dynamic programming.

How a model is placed up to a device matters to what comes after only by where and how the link after it is crossed. So
the best ways to get to each crossing of one link are made from those of the link before: for `n` crossings and `d`
devices `d * n**2` steps, where there are about `n**d` ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from microtome.plan.cost import DeviceChain, Placement
from microtome.results.plan import Objective

#: How many numbers of a table are in memory at once.
_AT_ONCE = 1 << 22


class _BestPlacements(NamedTuple):
    """The best ways to each crossing of a link.

    Attributes:
        cost: What is to be the least.
        second: What is to be the least of the same cost.
        before: The crossing of the link before.
    """

    cost: Tensor
    second: Tensor
    before: Tensor | None


def best(chain: DeviceChain, objective: Objective) -> Iterator[Placement]:
    """The best placement that ends on each device, where limits allow one."""
    if objective != "throughput":
        yield from _Placement(chain, objective).placements()
        return
    for placement in _Placement(chain, objective).placements():
        # Of those whose slowest step is no slower, the one with the least latency.
        slowest = chain.price(placement).slowest_s
        yield next(
            p for p in _Placement(chain, "latency", slowest * (1 + 1e-12)).placements() if len(p) == len(placement)
        )


class _Placement:
    """One way through the devices.

    Args:
        slowest: Steps of a pipeline that are slower are not taken.
    """

    def __init__(self, chain: DeviceChain, objective: Objective, slowest: float = inf) -> None:
        self._chain = chain
        self._objective = objective
        self._slowest = slowest
        self._places = torch.tensor([crossing.place for crossing in chain.crossings])
        count = len(chain.crossings)
        self._ends = torch.cat([self._places, torch.tensor([chain.end])])  # the last stands for the end of the model
        self._same = torch.zeros(count, count + 1, dtype=torch.bool)
        self._same[torch.arange(count), torch.arange(count)] = True

    def placements(self) -> Iterator[Placement]:
        chain = self._chain
        ways = [self._first()]
        for device in range(len(chain.sides)):
            if device:
                ways.append(self._next(device, ways[-1]))
            if float(ways[-1].cost[-1]) < inf:
                yield self._followed(ways)

    def _followed(self, ways: list[_BestPlacements]) -> Placement:
        """From the end of the model back to its beginning."""
        at, found = -1, []
        for way in reversed(ways):
            if way.before is not None:
                at = int(way.before[at])
                found.append(self._chain.crossings[at])
        return tuple(reversed(found))

    # -- costs ---------------------------------------------------------------------------------------------------------

    def _code(self, device: int, name: str) -> Tensor:
        chain = self._chain
        return torch.tensor(
            [getattr(chain.code(device, crossing), name) for crossing in chain.crossings], dtype=torch.float64
        )

    def _first(self) -> _BestPlacements:
        """Costs of the first device until each crossing, and until the end."""
        encode = torch.cat([self._code(0, "encode_s"), torch.zeros(1, dtype=torch.float64)])
        seconds = self._chain.run_s[0][0, self._ends] + encode
        allowed = self._allowed(0, torch.zeros(1, dtype=torch.int64), seconds[None])[0]
        joules = self._joules(0, torch.zeros(1, dtype=torch.int64))[0]
        cost = joules if self._objective == "energy" else seconds
        return _BestPlacements(cost.masked_fill(~allowed, inf), seconds.masked_fill(~allowed, inf), None)

    def _next(self, device: int, ways: _BestPlacements) -> _BestPlacements:
        """Costs after the previous link, in slices of the crossings after the device."""
        sent, sent_second = self._sent(device - 1, ways)
        parts = []
        step = max(_AT_ONCE // max(len(self._places), 1), 1)
        for start in range(0, len(self._ends), step):
            parts.append(self._slice(device, sent, sent_second, slice(start, start + step)))
        return _BestPlacements(*(torch.cat(several) for several in zip(*parts, strict=True)))

    def _slice(self, device: int, sent: Tensor, sent_second: Tensor, to: slice) -> tuple[Tensor, Tensor, Tensor]:
        chain = self._chain
        same = self._same[:, to]
        ends = self._ends[to]
        encode = torch.cat([self._code(device, "encode_s"), torch.zeros(1, dtype=torch.float64)])[to]
        seconds = chain.run_s[device][self._places][:, ends].add_(encode).add_(self._code(device, "decode_s")[:, None])
        blocked = self._places[:, None] >= ends[None]
        if chain.limits or self._slowest < inf:
            blocked |= ~self._allowed(device, self._places, seconds, to)
        blocked &= ~same
        seconds.masked_fill_(same, 0.0)
        second = (sent_second[:, None] + seconds).masked_fill_(blocked, inf)
        if self._objective == "latency":  # which is both
            best, before = second.min(0)
            return best, best, before
        if self._objective == "throughput":
            cost = torch.maximum(sent[:, None], seconds)
        else:
            cost = self._joules(device, self._places, to).masked_fill(same, 0.0).add_(sent[:, None])
        cost.masked_fill_(blocked, inf)
        before = second.masked_fill_(cost > cost.amin(0), inf).argmin(0)
        columns = torch.arange(cost.shape[1])
        return cost[before, columns], second[before, columns], before

    def _sent(self, link: int, ways: _BestPlacements) -> tuple[Tensor, Tensor]:
        """The ways to each crossing, with what the link takes, the result's way back included."""
        chain = self._chain
        far = chain.links[link]
        back = far.seconds(chain.output_bytes)
        seconds = torch.tensor(
            [far.seconds(chain.sent_bytes(crossing)) + back for crossing in chain.crossings], dtype=torch.float64
        )
        busy = torch.tensor([chain.busy_s(link, crossing) for crossing in chain.crossings], dtype=torch.float64)
        cost, second = ways.cost[:-1], ways.second[:-1] + seconds
        if self._objective == "throughput":
            cost = torch.maximum(cost, busy)
        elif self._objective == "energy":
            cost = cost + torch.tensor(
                [chain.radio_j(link, chain.sent_bytes(crossing) + chain.output_bytes) for crossing in chain.crossings],
                dtype=torch.float64,
            )
        else:
            cost = cost + seconds
        slow = busy > self._slowest
        return cost.masked_fill(slow, inf), second.masked_fill(slow, inf)

    def _joules(self, device: int, begins: Tensor, to: slice = slice(None)) -> Tensor:
        table = self._chain.run_j[device]
        ends = self._ends[to]
        return torch.zeros(len(begins), len(ends), dtype=torch.float64) if table is None else table[begins][:, ends]

    def _allowed(self, device: int, begins: Tensor, seconds: Tensor, to: slice = slice(None)) -> Tensor:
        """Mark the crossings whose part fits on the device and is not too slow."""
        chain = self._chain
        ends = self._ends[to]
        limit = chain.limits.get(chain.sides[device].name, inf)
        fits = (chain.memory[device][begins][:, ends] <= limit) | (begins[:, None] >= ends[None])
        return fits & (seconds <= self._slowest)
