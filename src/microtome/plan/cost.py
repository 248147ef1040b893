"""The costs of placing a model on a chain of devices."""

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
    """The cut point at which a link is crossed, by index, and the codec."""

    point: int
    codec: str


#: The crossing of each link, in order; the remaining links are not used. Between two equal ones a device only forwards.
Placement = tuple[LinkCrossing, ...]


@dataclass
class DeviceChain:
    """Devices in a chain, with a link between each and the next.

    Attributes:
        devices: The devices. The inputs are on the first, and the result is returned to it.
        points: The points where a device can hand over to the next.
        codecs: The codecs at cuts; `input_codecs`: those of the inputs.
        codec_costs: The costs of codecs on each device.
        limits: The most memory in bytes, by device.
        energy_of: The devices whose energy counts, with that of their radios.
    """

    devices: Sequence[DeviceCosts]
    links: Sequence[Link]
    points: Sequence[CutPoint]
    output_bytes: int
    codecs: tuple[str, ...]
    input_codecs: tuple[str, ...]
    codec_costs: Sequence[CodecCosts]
    limits: Mapping[str, int]
    energy_of: Collection[str]

    @property
    def end(self) -> int:
        return len(self.points) - 1

    @cached_property
    def crossings(self) -> list[LinkCrossing]:
        """All ways to cross a link."""
        inputs = [LinkCrossing(0, codec) for codec in self.input_codecs]
        return inputs + [LinkCrossing(point, codec) for codec in self.codecs for point in range(1, self.end)]

    def codec_cost(self, device: int, crossing: LinkCrossing) -> CodecCost:
        return self._codec_costs[device, crossing]

    @cached_property
    def _codec_costs(self) -> dict[tuple[int, LinkCrossing], CodecCost]:
        return {
            (device, crossing): costs.of(self.points[crossing.point].live, crossing.codec)
            for device, costs in enumerate(self.codec_costs)
            for crossing in self.crossings
        }

    @cached_property
    def run_s(self) -> list[Tensor]:
        return [device.run_s() for device in self.devices]

    @cached_property
    def run_j(self) -> list[Tensor | None]:
        return [device.run_j() if device.name in self.energy_of else None for device in self.devices]

    @cached_property
    def memory(self) -> list[Tensor]:
        return [device.memory_bytes() for device in self.devices]

    def sent_bytes(self, crossing: LinkCrossing) -> int:
        """Return the encoded size, which is the same on all devices."""
        return self.codec_cost(0, crossing).nbytes

    def price(self, placement: Placement, *, is_baseline: bool = False) -> Candidate:
        """Return a placement with its costs."""
        steps: list[LatencyTerm] = []
        memory = [0] * len(self.devices)
        joules = 0.0
        for index, device in enumerate(self.devices[: len(placement) + 1]):
            received = placement[index - 1] if index else None
            sent = placement[index] if index < len(placement) else None
            if received is None or received != sent:
                part = received.point if received else 0, sent.point if sent else self.end
                if received is not None:
                    steps.append(LatencyTerm("decode", device.name, self.codec_cost(index, received).decode_s))
                if part[0] < part[1]:
                    steps.append(LatencyTerm("run", device.name, float(self.run_s[index][part])))
                    memory[index] = int(self.memory[index][part])
                    energy = self.run_j[index]
                    joules += 0.0 if energy is None else float(energy[part])
                if sent is not None:
                    steps.append(LatencyTerm("encode", device.name, self.codec_cost(index, sent).encode_s))
            if sent is not None:
                steps.append(LatencyTerm("send", self.devices[index + 1].name, self.send_s(index, sent)))
                joules += self.radio_j(index, self.sent_bytes(sent) + self.output_bytes)
        for index in reversed(range(len(placement))):
            steps.append(LatencyTerm("back", self.devices[index + 1].name, self.back_s(index)))
        return Candidate(
            name=self._name(placement),
            at=tuple(self.points[crossing.point].at for crossing in placement),
            codecs=tuple(crossing.codec for crossing in placement),
            steps=tuple(steps),
            sent_bytes=tuple(self.sent_bytes(crossing) for crossing in placement),
            back_bytes=self.output_bytes if placement else 0,
            memory_bytes=tuple(memory),
            latency_s=sum(step.seconds for step in steps),
            slowest_s=self._slowest_s(placement, steps),
            late_s=2 * self.round_trips * sum(link.jitter_s for link in self.links[: len(placement)]),
            energy_j=joules if self.energy_of else None,
            is_baseline=is_baseline,
            refused=self._refusal(memory),
        )

    @property
    def round_trips(self) -> int:
        """The messages to the next device, and back."""
        return 1

    def send_s(self, link: int, crossing: LinkCrossing) -> float:
        return self.links[link].seconds(self.sent_bytes(crossing))

    def back_s(self, link: int) -> float:
        return self.links[link].seconds(self.output_bytes)

    def radio_j(self, device: int, nbytes: int) -> float:
        per_byte = self.links[device].joules_per_byte
        return nbytes * per_byte if per_byte is not None and self.devices[device].name in self.energy_of else 0.0

    def busy_s(self, device: int, crossing: LinkCrossing) -> float:
        """Return the seconds that a link is busy: it is full duplex, and latency does not occupy it."""
        return max(self.sent_bytes(crossing), self.output_bytes) / self.links[device].bytes_per_s

    def _slowest_s(self, placement: Placement, steps: Sequence[LatencyTerm]) -> float:
        devices: dict[str, float] = {}
        for step in steps:
            if step.what not in ("send", "back"):
                devices[step.where] = devices.get(step.where, 0.0) + step.seconds
        links = [self.busy_s(device, crossing) for device, crossing in enumerate(placement)]
        return max((*devices.values(), *links), default=0.0)

    def _refusal(self, memory: Sequence[int]) -> str | None:
        for device, nbytes in zip(self.devices, memory, strict=True):
            if nbytes > self.limits.get(device.name, nbytes):
                return f"{device.name} would need {size(nbytes)}, above its limit of {size(self.limits[device.name])}"
        return None

    def _name(self, placement: Placement) -> str:
        last = self.devices[len(placement)].name
        if not placement:
            return f"all on {last}"
        if all(crossing.point == 0 for crossing in placement):
            codec = placement[0].codec
            return f"all on {last}, {'raw input' if codec == 'raw' else f'input by {codec}'}"
        # A cut that several links have in common is named once, with the last device that receives it.
        receivers = {crossing: device.name for crossing, device in zip(placement, self.devices[1:], strict=False)}
        is_chain = len(self.devices) > 2
        return ", ".join(
            f"{self.points[point].at or 'input'}{'' if codec == 'raw' else f' by {codec}'}"
            f"{f' to {receiver}' if is_chain else ''}"
            for (point, codec), receiver in receivers.items()
        )
