"""A device and what runs of layers take on it: from its profile, at the places where a model can be cut."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from microtome.errors import BadQuery
from microtome.plan.compatibility import check_profile
from microtome.results.cuts import Cuts, Live
from microtome.results.profile import Profile
from microtome.results.rows import Row


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A point where one device may hand over to the next: before the first layer, at a cut, or at the end.

    Attributes:
        at: The address of the cut; None at both ends.
        live: What is handed over.
        head_param_bytes: Those of parameters that are read before.
        tail_param_bytes: Those of parameters that are read after.
    """

    at: str | None
    live: tuple[Live, ...]
    head_param_bytes: int
    tail_param_bytes: int


def places(cuts: Cuts, profiles: Sequence[Profile]) -> list[CutPoint]:
    """The beginning, the cuts at which every profile has a time, and the end."""
    total = profiles[0].total.param_bytes
    timed = [{row.address for row in profile if row.elapsed_s is not None} for profile in profiles]
    between = [
        CutPoint(cut.at, cut.live, cut.head_param_bytes, cut.tail_param_bytes)
        for cut in cuts
        if all(cut.at in addresses for addresses in timed)
    ]
    return [CutPoint(None, cuts.inputs, 0, total), *between, CutPoint(None, cuts.outputs, total, 0)]


def check(cuts: Cuts, profiles: dict[str, Profile]) -> None:
    """Raise where a profile is of something else than the cuts, or lacks what planning needs."""
    for name, profile in profiles.items():
        check_profile(cuts, name, profile)
        if profile.total.elapsed_s is None:
            raise BadQuery(f"the profile of {name!r} {_NO_TIMES[profile.total.time_s is None]}")


_NO_TIMES = {
    True: "has no times: profile the model there with measure='time' (microtome profile --time)",
    False: "is of an older microtome, which did not measure runs of layers: profile the model there again",
}


class DeviceCosts:
    """A device with the profile that was made on it.

    Attributes:
        name: What it is called in limits and results.
        elapsed_s: Seconds from the beginning to each place. The work of a GPU and what the host takes to launch it run
            side by side, so both are held, a row each, and a run of layers takes the longer of its two.
        joules: Those from the beginning to each place; None: not measured.
    """

    def __init__(self, name: str, profile: Profile, places: Sequence[CutPoint]) -> None:
        self.name = name
        self.profile = profile
        self._places = places
        rows = {row.address: row for row in profile}
        self._cuts = [rows[place.at] for place in places[1:-1] if place.at is not None]
        self.elapsed_s = torch.tensor(self._clocks(), dtype=torch.float64)

    def run_s(self) -> Tensor:
        """Seconds from place to place, a row for the first."""
        return (self.elapsed_s[:, None, :] - self.elapsed_s[:, :, None]).amax(0).clamp_(min=0.0)

    def run_j(self) -> Tensor | None:
        """Joules from place to place."""
        if self.joules is None:
            return None
        joules = torch.tensor(self.joules, dtype=torch.float64)
        return (joules[None, :] - joules[:, None]).clamp_(min=0.0)

    def _clocks(self) -> list[list[float]]:
        every = [*self._cuts, self.profile.total]
        host = [0.0, *(row.elapsed_s or 0.0 for row in every)]
        if any(row.elapsed_device_s is None for row in every):
            return [host]
        return [host, [0.0, *(row.elapsed_device_s or 0.0 for row in every)]]

    # -- energy --------------------------------------------------------------------------------------------------------

    @property
    def energy_name(self) -> str | None:
        """The kind of energy that is known: net of idle power where possible, so that waiting costs nothing."""
        total = self.profile.total
        known = [name for name in ("net_energy_j", "energy_j") if getattr(total, name) is not None]
        return known[0] if known else None

    @cached_property
    def joules(self) -> list[float] | None:
        name = self.energy_name
        if name is None:
            return None
        own = [getattr(row.own, name) or 0.0 for row in self.profile]
        ended = [0.0] * len(own)
        for at, rank in enumerate(self._ends):
            ended[rank] = own[at]
        sums = list(accumulate(ended))
        until = [sums[self._ends[self._addresses[row.address]]] + self._open_j(row, own) for row in self._cuts]
        return [0.0, *until, sums[-1]]

    def _open_j(self, cut: Row, own: Sequence[float]) -> float:
        """Energy that the calls around a cut have taken themselves until then, by the share of their time."""
        joules, above = 0.0, cut.parent
        while above is not None:
            at = self._addresses[above]
            row = self.profile.calls[at]
            whole, ends, now = row.time_s or 0.0, row.elapsed_s or 0.0, cut.elapsed_s or 0.0
            joules += own[at] * (min(max((now - (ends - whole)) / whole, 0.0), 1.0) if whole else 0.0)
            above = row.parent
        return joules

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory_bytes(self) -> Tensor:
        """Of a part from place to place: its parameters, and the most of other tensors that live at once in its calls.

        Of a call that is cut in two, what its own code holds beside the calls inside it is not known by its halves, and
        not counted. Buffers and inputs count for every part.
        """
        count = len(self._places)
        most = torch.zeros(count, count, dtype=torch.float64)
        cut_ends = [self._ends[self._addresses[row.address]] for row in self._cuts]
        params = self.profile.total.param_bytes
        for at, row in enumerate(self.profile):
            peak = row.peak_bytes if row.measured_peak_bytes is None else row.measured_peak_bytes
            begins = bisect_left(cut_ends, at - self._above[at])
            ends = bisect_left(cut_ends, self._ends[at]) + 1
            most[begins, ends] = max(float(most[begins, ends]), float(peak - params))
        most = most.cummax(1).values.flip(0).cummax(0).values.flip(0)
        head, tail = (
            torch.tensor([getattr(place, f"{side}_param_bytes") for place in self._places], dtype=torch.float64)
            for side in ("head", "tail")
        )
        held = (head[None, :] + tail[:, None] - self._places[0].tail_param_bytes).clamp_(min=0.0)
        return (held + most).clamp_(min=0.0)

    @cached_property
    def _addresses(self) -> dict[str, int]:
        return {row.address: at for at, row in enumerate(self.profile)}

    @cached_property
    def _above(self) -> list[int]:
        """Of each call, how many contain it."""
        above: list[int] = []
        for row in self.profile:
            above.append(0 if row.parent is None else above[self._addresses[row.parent]] + 1)
        return above

    @cached_property
    def _ends(self) -> list[int]:
        """Of each call, how many end before it."""
        inside = [0] * len(self.profile)
        for at in reversed(range(len(inside))):
            parent = self.profile.calls[at].parent
            if parent is not None:
                inside[self._addresses[parent]] += inside[at] + 1
        return [at + inside[at] - self._above[at] for at in range(len(inside))]
