"""The best placements of a model on a chain of devices, by dynamic programming.

The cost of the devices after a link depends on those before it only by how the link is crossed. So the best placements
up to each crossing of a link follow from those of the previous link: `d * n**2` steps for `n` crossings and `d`
devices, instead of about `n**d` placements.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from microtome.plan.cost import DeviceChain, LinkCrossing, Placement
from microtome.results.plan import Candidate, Objective

#: The most elements of a table that are in memory at once.
_MAX_ELEMENTS = 1 << 22


def candidates(chain: DeviceChain, objective: Objective) -> tuple[Candidate, ...]:
    """Return every placement on two devices, or the best ones for each number of more devices; the best first."""
    count = len(chain.links)
    baselines = [(), *((LinkCrossing(0, codec),) * count for codec in chain.input_codecs)]
    priced = {placement: chain.price(placement, is_baseline=True) for placement in baselines}
    others = [(crossing,) for crossing in chain.crossings] if count == 1 else best_placements(chain, objective)
    for placement in others:
        if placement not in priced:
            priced[placement] = chain.price(placement)
    return tuple(
        sorted(priced.values(), key=lambda candidate: (candidate.refused is not None, candidate.rank(objective)))
    )


def best_placements(chain: DeviceChain, objective: Objective) -> Iterator[Placement]:
    """Yield the best placement that ends on each device, if the limits allow one."""
    if objective != "throughput":
        yield from _Search(chain, objective).run()
        return
    for placement in _Search(chain, objective).run():
        # Of those whose slowest step is no slower, the one with the least latency.
        max_step_s = chain.price(placement).slowest_s * (1 + 1e-12)
        yield next(other for other in _Search(chain, "latency", max_step_s).run() if len(other) == len(placement))


class _Table(NamedTuple):
    """The best placements up to each crossing of a link, and up to the end of the model (the last element).

    Attributes:
        cost: The objective.
        tie: The latency, minimized among equal costs.
        previous: The crossing of the previous link; None on the first device.
    """

    cost: Tensor
    tie: Tensor
    previous: Tensor | None


class _Search:
    """One search.

    Args:
        max_step_s: The most seconds of a step of the pipeline.
    """

    def __init__(self, chain: DeviceChain, objective: Objective, max_step_s: float = inf) -> None:
        self._chain = chain
        self._objective = objective
        self._max_step_s = max_step_s
        self._begins = torch.tensor([crossing.point for crossing in chain.crossings])
        self._ends = torch.cat([self._begins, torch.tensor([chain.end])])
        count = len(chain.crossings)
        self._is_forwarded = torch.eye(count, count + 1, dtype=torch.bool)  # the device between two equal crossings

    def run(self) -> Iterator[Placement]:
        tables = [self._first_device()]
        for device in range(len(self._chain.devices)):
            if device:
                tables.append(self._next_device(device, tables[-1]))
            if float(tables[-1].cost[-1]) < inf:
                yield self._backtrack(tables)

    def _backtrack(self, tables: list[_Table]) -> Placement:
        """Return the placement that ends on the last of these devices."""
        index, crossings = -1, []
        for table in reversed(tables):
            if table.previous is not None:
                index = int(table.previous[index])
                crossings.append(self._chain.crossings[index])
        return tuple(reversed(crossings))

    # -- costs ---------------------------------------------------------------------------------------------------------

    def _first_device(self) -> _Table:
        begins = torch.zeros(1, dtype=torch.int64)
        seconds = self._chain.run_s[0][0, self._ends] + self._encode_s(0)
        is_allowed = self._is_allowed(0, begins, seconds[None])[0]
        cost = self._joules(0, begins)[0] if self._objective == "energy" else seconds
        return _Table(cost.masked_fill(~is_allowed, inf), seconds.masked_fill(~is_allowed, inf), None)

    def _next_device(self, device: int, table: _Table) -> _Table:
        """Extend the table by one device, in slices of the crossings after it."""
        cost, tie = self._cross_link(device - 1, table)
        step = max(_MAX_ELEMENTS // max(len(self._begins), 1), 1)
        starts = range(0, len(self._ends), step)
        slices = [self._extend(device, cost, tie, slice(start, start + step)) for start in starts]
        return _Table(*(torch.cat(parts) for parts in zip(*slices, strict=True)))

    def _extend(self, device: int, cost: Tensor, tie: Tensor, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Minimize over the crossings before a device (rows), for some of the crossings after it (columns)."""
        chain = self._chain
        is_forwarded = self._is_forwarded[:, columns]
        ends = self._ends[columns]
        decode_s = self._codec_cost(device, "decode_s")
        seconds = chain.run_s[device][self._begins][:, ends].add_(self._encode_s(device)[columns])
        seconds.add_(decode_s[:, None])
        is_blocked = self._begins[:, None] >= ends[None]
        if chain.limits or self._max_step_s < inf:
            is_blocked |= ~self._is_allowed(device, self._begins, seconds, columns)
        is_blocked &= ~is_forwarded
        seconds.masked_fill_(is_forwarded, 0.0)
        new_tie = (tie[:, None] + seconds).masked_fill_(is_blocked, inf)
        if self._objective == "latency":  # the cost itself
            best, previous = new_tie.min(0)
            return best, best, previous
        if self._objective == "throughput":
            new_cost = torch.maximum(cost[:, None], seconds)
        else:
            new_cost = self._joules(device, self._begins, columns).masked_fill(is_forwarded, 0.0).add_(cost[:, None])
        new_cost.masked_fill_(is_blocked, inf)
        previous = new_tie.masked_fill_(new_cost > new_cost.amin(0), inf).argmin(0)
        index = torch.arange(new_cost.shape[1])
        return new_cost[previous, index], new_tie[previous, index], previous

    def _cross_link(self, link: int, table: _Table) -> tuple[Tensor, Tensor]:
        """Add the costs of a link to cost and tie of a table, the way back of the result included."""
        chain = self._chain
        sent_bytes = [chain.sent_bytes(crossing) for crossing in chain.crossings]
        back_s = chain.back_s(link)
        seconds = _floats([chain.send_s(link, crossing) + back_s for crossing in chain.crossings])
        busy_s = _floats([chain.busy_s(link, crossing) for crossing in chain.crossings])
        cost, tie = table.cost[:-1], table.tie[:-1] + seconds
        if self._objective == "throughput":
            cost = torch.maximum(cost, busy_s)
        elif self._objective == "energy":
            cost = cost + _floats([chain.radio_j(link, nbytes + chain.output_bytes) for nbytes in sent_bytes])
        else:
            cost = cost + seconds
        is_slow = busy_s > self._max_step_s
        return cost.masked_fill(is_slow, inf), tie.masked_fill(is_slow, inf)

    def _codec_cost(self, device: int, field: str) -> Tensor:
        return _floats([getattr(self._chain.codec_cost(device, crossing), field) for crossing in self._chain.crossings])

    def _encode_s(self, device: int) -> Tensor:
        """Return the seconds of encoding at each crossing, and 0 at the end of the model."""
        return torch.cat([self._codec_cost(device, "encode_s"), _floats([0.0])])

    def _joules(self, device: int, begins: Tensor, columns: slice = slice(None)) -> Tensor:
        table = self._chain.run_j[device]
        ends = self._ends[columns]
        return torch.zeros(len(begins), len(ends), dtype=torch.float64) if table is None else table[begins][:, ends]

    def _is_allowed(self, device: int, begins: Tensor, seconds: Tensor, columns: slice = slice(None)) -> Tensor:
        """Mark the parts that fit on the device and are fast enough."""
        chain = self._chain
        ends = self._ends[columns]
        limit = chain.limits.get(chain.devices[device].name, inf)
        fits = (chain.memory[device][begins][:, ends] <= limit) | (begins[:, None] >= ends[None])
        return fits & (seconds <= self._max_step_s)


def _floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
