"""The costs of a model on one device, between any two points where it can be cut, from its profile."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from microtome.results.cuts import Cuts, Live, SharedWeight
from microtome.results.profile import Profile
from microtome.results.rows import Row

#: Measured seconds of stages, by the addresses of the cuts where they begin and end.
StageTimes = Mapping[tuple[str | None, str | None], float]


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A point where one device can hand over to the next: before the first layer, at a cut, or at the end.

    Attributes:
        at: The address of the cut; None at both ends.
        index: That of the cut; less at the beginning, greater at the end.
        live: The values that cross.
        head_param_bytes: Bytes of the parameters that are read before; `tail_param_bytes`: after.
    """

    at: str | None
    index: int
    live: tuple[Live, ...]
    head_param_bytes: int
    tail_param_bytes: int


def cut_points(cuts: Cuts, profiles: Sequence[Profile]) -> list[CutPoint]:
    """Return the beginning, the cuts at which every profile has a time, and the end."""
    total = profiles[0].total.param_bytes
    timed = [{row.address for row in profile if row.elapsed_s is not None} for profile in profiles]
    between = [
        CutPoint(cut.at, cut.index, cut.live, cut.head_param_bytes, cut.tail_param_bytes)
        for cut in cuts
        if all(cut.at in addresses for addresses in timed)
    ]
    begin = CutPoint(None, -1, cuts.inputs, 0, total)
    return [begin, *between, CutPoint(None, sys.maxsize, cuts.outputs, total, 0)]


class DeviceCosts:
    """The costs of a model on one device.

    Attributes:
        name: The name of the device in limits and results.
        elapsed_s: Seconds from the beginning to each point. Kernels of a GPU overlap with the host that launches them:
            there is a row for each, and a part takes the longer of the two.
        joules: Joules from the beginning to each point; None: not measured.
    """

    def __init__(
        self,
        name: str,
        profile: Profile,
        points: Sequence[CutPoint],
        slower: float = 1.0,
        stages: StageTimes = MappingProxyType({}),
        shared_weights: Sequence[SharedWeight] = (),
    ) -> None:
        self.name = name
        self.profile = profile
        self._points = points
        rows = {row.address: row for row in profile}
        self._cuts = [rows[point.at] for point in points[1:-1] if point.at is not None]
        ends = [*self._cuts, profile.total]
        clocks = [[0.0, *(row.elapsed_s or 0.0 for row in ends)]]
        if all(row.elapsed_device_s is not None for row in ends):
            clocks.append([0.0, *(row.elapsed_device_s or 0.0 for row in ends)])
        self.elapsed_s = torch.tensor(clocks, dtype=torch.float64) * slower
        self._slower = slower
        self._stages = stages
        self._shared_weights = shared_weights

    def run_s(self) -> Tensor:
        """Return the seconds from each point (row) to each other."""
        table = (self.elapsed_s[:, None, :] - self.elapsed_s[:, :, None]).amax(0).clamp_(min=0.0)
        index = {point.at: number for number, point in enumerate(self._points)}
        for (begins_at, ends_at), elapsed_s in self._stages.items():
            begin = 0 if begins_at is None else index[begins_at]
            end = len(self._points) - 1 if ends_at is None else index[ends_at]
            table[begin, end] = elapsed_s * self._slower
        return table

    @cached_property
    def backward_elapsed_s(self) -> Tensor:
        """Seconds of the backward of all before each point, with a row for each clock, as `elapsed_s`."""
        total = self.profile.total
        fields = ["backward_s", *(["backward_device_s"] if total.backward_device_s is not None else [])]
        return torch.tensor([self._sums(field) for field in fields], dtype=torch.float64) * self._slower

    def backward_s(self) -> Tensor:
        """Return the seconds of the backward from each point (row) to each other."""
        return (self.backward_elapsed_s[:, None, :] - self.backward_elapsed_s[:, :, None]).amax(0).clamp_(min=0.0)

    def run_j(self) -> Tensor | None:
        """Return the joules from each point (row) to each other."""
        if self.joules is None:
            return None
        joules = torch.tensor(self.joules, dtype=torch.float64)
        return (joules[None, :] - joules[:, None]).clamp_(min=0.0)

    # -- energy --------------------------------------------------------------------------------------------------------

    @property
    def energy_field(self) -> str | None:
        """The measured kind of energy: net of idle power if possible, so that waiting costs nothing."""
        fields = ("net_energy_j", "energy_j")
        return next((field for field in fields if getattr(self.profile.total, field) is not None), None)

    @cached_property
    def joules(self) -> list[float] | None:
        return None if self.energy_field is None else self._sums(self.energy_field)

    def _sums(self, field: str) -> list[float]:
        """Return the own costs of all calls from the beginning to each point, by the field of a row."""
        own = [getattr(row.own, field) or 0.0 for row in self.profile]
        by_end = [0.0] * len(own)
        for index, rank in enumerate(self._end_ranks):
            by_end[rank] = own[index]
        sums = list(accumulate(by_end))
        at_cuts = [
            sums[self._end_ranks[self._indices[row.address]]] + self._of_open_calls(row, own) for row in self._cuts
        ]
        return [0.0, *at_cuts, sums[-1]]

    def _of_open_calls(self, cut: Row, own: Sequence[float]) -> float:
        """Return the costs of the calls that contain a cut, themselves, until the cut: in proportion to their time."""
        cost, address = 0.0, cut.parent
        while address is not None:
            index = self._indices[address]
            row = self.profile.calls[index]
            total_s, end_s, cut_s = row.time_s or 0.0, row.elapsed_s or 0.0, cut.elapsed_s or 0.0
            cost += own[index] * (min(max((cut_s - (end_s - total_s)) / total_s, 0.0), 1.0) if total_s else 0.0)
            address = row.parent
        return cost

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory_bytes(self) -> Tensor:
        """Return the memory of each part: its parameters, and the peak of other tensors in its calls.

        The temporary tensors of a call that is cut in two are not counted: its halves are not known separately. Buffers
        and inputs count for every part.
        """
        count = len(self._points)
        peaks = torch.zeros(count, count, dtype=torch.float64)
        param_bytes = self.profile.total.param_bytes
        for row, part in zip(self.profile, self._parts, strict=True):
            peak = row.peak_bytes if row.measured_peak_bytes is None else row.measured_peak_bytes
            peaks[part] = max(float(peaks[part]), float(peak - param_bytes))
        peaks = peaks.cummax(1).values.flip(0).cummax(0).values.flip(0)  # a part has the peak of every part in it
        return (self.param_bytes() + peaks).clamp_(min=0.0)

    def param_bytes(self) -> Tensor:
        """Return the bytes of the parameters of each part."""
        head = torch.tensor([point.head_param_bytes for point in self._points], dtype=torch.float64)
        tail = torch.tensor([point.tail_param_bytes for point in self._points], dtype=torch.float64)
        read_in = head[None, :] + tail[:, None] - self._points[0].tail_param_bytes
        return (read_in - self._param_bytes_around()).clamp_(min=0.0)

    def _param_bytes_around(self) -> Tensor:
        """Return the bytes of the parameters that are read before and after each part, and not in it."""
        around = torch.zeros(len(self._points), len(self._points), dtype=torch.float64)
        indices = torch.tensor([point.index for point in self._points])
        for nbytes, reads in self._shared_weights:
            for last, following in pairwise(reads):
                around += nbytes * ((last <= indices)[:, None] & (indices < following)[None, :])
        return around

    def trainable_bytes(self) -> Tensor:
        """Return the bytes of the parameters of each part that require a gradient.

        Those of modules whose call is cut in two, and frozen ones that another part also reads, count as trainable.
        """
        count = len(self._points)
        frozen = torch.zeros(count, count, dtype=torch.float64)
        for row, part in zip(self.profile, self._parts, strict=True):
            own = row.own
            if own.params:
                frozen[part] += own.param_bytes * (own.params - own.trainable_params) // own.params
        frozen = frozen.cumsum(1).flip(0).cumsum(0).flip(0)
        return (self.param_bytes() - frozen).clamp_(min=0.0)

    def saved_bytes(self) -> Tensor:
        """Return the bytes that each part keeps for its backward, without the tensors that it receives."""
        sums = torch.tensor(self._sums("saved_bytes"), dtype=torch.float64).round()
        return (sums[None, :] - sums[:, None]).clamp_(min=0.0)

    @cached_property
    def _parts(self) -> list[tuple[int, int]]:
        """The smallest part that contains each call, by its first and last point."""
        cut_ends = [self._end_ranks[self._indices[row.address]] for row in self._cuts]
        return [
            (bisect_left(cut_ends, index - depth), bisect_left(cut_ends, end) + 1)
            for index, (depth, end) in enumerate(zip(self._depths, self._end_ranks, strict=True))
        ]

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {row.address: index for index, row in enumerate(self.profile)}

    @cached_property
    def _depths(self) -> list[int]:
        """The number of calls that contain each call."""
        depths: list[int] = []
        for row in self.profile:
            depths.append(0 if row.parent is None else depths[self._indices[row.parent]] + 1)
        return depths

    @cached_property
    def _end_ranks(self) -> list[int]:
        """The number of calls that end before each call ends."""
        inside = [0] * len(self.profile)
        for index in reversed(range(len(inside))):
            parent = self.profile.calls[index].parent
            if parent is not None:
                inside[self._indices[parent]] += inside[index] + 1
        return [index + inside[index] - self._depths[index] for index in range(len(inside))]
