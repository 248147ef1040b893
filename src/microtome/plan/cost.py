"""Costs of placing a model on a chain of devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from microtome.plan.device_costs import CutPoint, DeviceCosts
from microtome.results.codec_costs import CodecCost, CodecCosts
from microtome.results.link import Link
from microtome.results.plan import Candidate, LatencyTerm
from microtome.units import size


class LinkCrossing(NamedTuple):
    """A cut at which a link is crossed, and the codec used there.

    Attributes:
        place: The index of the place: 0 before anything ran.
    """

    place: int
    codec: str


#: Where each link is crossed, in order; those after the last are not used. Twice the same: the device between hands on.
Placement = tuple[LinkCrossing, ...]


@dataclass
class DeviceChain:
    """Devices one after the other, with a link between each and the next.

    Attributes:
        sides: The devices. Inputs begin on the first, and there the result is wanted.
        codecs: Those that may be used at cuts.
        input_codecs: Those that the inputs may be sent with.
        costs: What codecs cost on each device.
        limits: The most memory, in bytes, by the names of devices.
        energy_of: The names of the devices whose joules count, with those of their radios.
    """

    sides: Sequence[DeviceCosts]
    links: Sequence[Link]
    places: Sequence[CutPoint]
    output_bytes: int
    codecs: tuple[str, ...]
    input_codecs: tuple[str, ...]
    costs: Sequence[CodecCosts]
    limits: Mapping[str, int]
    energy_of: Collection[str]

    @property
    def end(self) -> int:
        return len(self.places) - 1

    @cached_property
    def crossings(self) -> list[LinkCrossing]:
        """All that a link can be crossed with."""
        first = [LinkCrossing(0, codec) for codec in self.input_codecs]
        return first + [LinkCrossing(place, codec) for codec in self.codecs for place in range(1, self.end)]

    def code(self, device: int, crossing: LinkCrossing) -> CodecCost:
        """Return the costs of encoding and decoding there."""
        return self._code[device, crossing]

    @cached_property
    def _code(self) -> dict[tuple[int, LinkCrossing], CodecCost]:
        return {
            (device, crossing): costs.of(self.places[crossing.place].live, crossing.codec)
            for device, costs in enumerate(self.costs)
            for crossing in self.crossings
        }

    @cached_property
    def run_s(self) -> list[Tensor]:
        return [side.run_s() for side in self.sides]

    @cached_property
    def run_j(self) -> list[Tensor | None]:
        return [side.run_j() if side.name in self.energy_of else None for side in self.sides]

    @cached_property
    def memory(self) -> list[Tensor]:
        return [side.memory_bytes() for side in self.sides]

    def sent_bytes(self, crossing: LinkCrossing) -> int:
        """As the first device encodes it: how many they are is the same on all."""
        return self.code(0, crossing).nbytes

    def price(self, placement: Placement, *, is_baseline: bool = False) -> Candidate:
        """The candidate with all its terms."""
        steps: list[LatencyTerm] = []
        memory = [0] * len(self.sides)
        joules = 0.0
        for device in range(len(placement) + 1):
            side = self.sides[device]
            got = placement[device - 1] if device else None
            given = placement[device] if device < len(placement) else None
            begins, ends = got.place if got else 0, given.place if given else self.end
            if got is None or got != given:
                if got is not None:
                    steps.append(LatencyTerm("decode", side.name, self.code(device, got).decode_s))
                if begins < ends:
                    part = begins, ends
                    steps.append(LatencyTerm("run", side.name, float(self.run_s[device][part])))
                    memory[device] = int(self.memory[device][part])
                    energy = self.run_j[device]
                    joules += 0.0 if energy is None else float(energy[part])
                if given is not None:
                    steps.append(LatencyTerm("encode", side.name, self.code(device, given).encode_s))
            if given is not None:
                sent = self.sent_bytes(given)
                steps.append(LatencyTerm("send", self.sides[device + 1].name, self.links[device].seconds(sent)))
                joules += self.radio_j(device, sent + self.output_bytes)
        for device in reversed(range(len(placement))):
            steps.append(
                LatencyTerm("back", self.sides[device + 1].name, self.links[device].seconds(self.output_bytes))
            )
        return Candidate(
            name=self._name(placement),
            at=tuple(self.places[crossing.place].at for crossing in placement),
            codecs=tuple(crossing.codec for crossing in placement),
            steps=tuple(steps),
            sent_bytes=tuple(self.sent_bytes(crossing) for crossing in placement),
            back_bytes=self.output_bytes if placement else 0,
            memory_bytes=tuple(memory),
            latency_s=sum(step.seconds for step in steps),
            slowest_s=self._slowest(placement, steps),
            late_s=2 * sum(link.jitter_s for link in self.links[: len(placement)]),
            energy_j=joules if self.energy_of else None,
            is_baseline=is_baseline,
            refused=self._refusal(memory),
        )

    def radio_j(self, device: int, nbytes: int) -> float:
        per_byte = self.links[device].joules_per_byte
        return nbytes * per_byte if per_byte is not None and self.sides[device].name in self.energy_of else 0.0

    def busy_s(self, device: int, crossing: LinkCrossing) -> float:
        """Seconds that a link is busy: it goes both ways at once, and latency does not keep it busy."""
        return max(self.sent_bytes(crossing), self.output_bytes) / self.links[device].bytes_per_s

    def _slowest(self, placement: Placement, steps: Sequence[LatencyTerm]) -> float:
        devices: dict[str, float] = {}
        for step in steps:
            if step.what not in ("send", "back"):
                devices[step.where] = devices.get(step.where, 0.0) + step.seconds
        links = [self.busy_s(device, crossing) for device, crossing in enumerate(placement)]
        return max((*devices.values(), *links), default=0.0)

    def _refusal(self, memory: Sequence[int]) -> str | None:
        for side, nbytes in zip(self.sides, memory, strict=True):
            if nbytes > self.limits.get(side.name, nbytes):
                return f"{side.name} would need {size(nbytes)}, above its limit of {size(self.limits[side.name])}"
        return None

    def _name(self, placement: Placement) -> str:
        last = self.sides[len(placement)].name
        if all(crossing.place == 0 for crossing in placement):
            codec = placement[0].codec if placement else ""
            return f"all on {last}" + (f", {_INPUT.get(codec, f'input by {codec}')}" if placement else "")
        cuts = [crossing for at, crossing in enumerate(placement) if crossing not in placement[:at]]
        return ", ".join(
            f"{self.places[place].at or 'input'}{'' if codec == 'raw' else f' by {codec}'}" for place, codec in cuts
        )


_INPUT = {"raw": "raw input"}
