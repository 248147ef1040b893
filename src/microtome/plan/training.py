"""The costs of training a model in a pipeline of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from microtome.plan.device_costs import CutPoint, DeviceCosts
from microtome.plan.schedules import Transfer, in_flight, run_schedule
from microtome.results.link import Link
from microtome.results.plan import Candidate, LatencyTerm, TrainingStage, TrainingStep
from microtome.units import size


@dataclass
class Pipeline:
    """Devices that train a model together, each a stage of it, with a link between each and the next.

    Attributes:
        points: The points where one stage can end and the next begin.
        output_bytes: The bytes of the outputs of the model.
        optimizer_state: The bytes that the optimizer keeps for each byte of a trainable parameter.
        limits: The most memory in bytes, by device.
    """

    devices: Sequence[DeviceCosts]
    links: Sequence[Link]
    points: Sequence[CutPoint]
    schedule: str
    micro_batches: int
    optimizer_state: float
    limits: Mapping[str, int]

    @property
    def end(self) -> int:
        return len(self.points) - 1

    # -- costs of parts ------------------------------------------------------------------------------------------------

    @cached_property
    def forward_s(self) -> list[Tensor]:
        return [device.run_s() for device in self.devices]

    @cached_property
    def backward_s(self) -> list[Tensor]:
        return [device.backward_s() for device in self.devices]

    @cached_property
    def sent_bytes(self) -> Tensor:
        """The bytes of the activations at each point."""
        return _floats([sum(value.nbytes for value in point.live) for point in self.points])

    @cached_property
    def returned_bytes(self) -> Tensor:
        """The bytes of the gradients at each point: of all floating-point values but inputs of the model."""
        return _floats(
            [sum(v.nbytes for v in point.live if v.source is not None and _is_float(v.dtype)) for point in self.points]
        )

    @cached_property
    def param_bytes(self) -> list[Tensor]:
        return [device.param_bytes() for device in self.devices]

    @cached_property
    def gradient_bytes(self) -> list[Tensor]:
        return [device.trainable_bytes() for device in self.devices]

    @cached_property
    def optimizer_bytes(self) -> list[Tensor]:
        return [(nbytes * self.optimizer_state).floor() for nbytes in self.gradient_bytes]

    @cached_property
    def activation_bytes(self) -> list[Tensor]:
        """The bytes that each part holds for a micro-batch until its backward, by device."""
        crossing = self.sent_bytes[:, None] + self.sent_bytes[None, :]
        return [device.saved_bytes() + crossing for device in self.devices]

    def memory_bytes(self, stage: int, stages: int) -> Tensor:
        """Return the memory of each part as a stage of so many, on the device of that stage."""
        held = in_flight(self.schedule, stage, stages, self.micro_batches)
        lasting = self.param_bytes[stage] + self.gradient_bytes[stage] + self.optimizer_bytes[stage]
        return lasting + held * self.activation_bytes[stage]

    def transfer(self, link: int, point: int) -> Transfer:
        there, delay = self.links[link], self.links[link].rtt_s / 2
        sent, returned = (float(nbytes[point]) / there.bytes_per_s for nbytes in (self.sent_bytes, self.returned_bytes))
        return Transfer(sent, returned, delay)

    # -- prices --------------------------------------------------------------------------------------------------------

    def price(self, points: Sequence[int]) -> Candidate:
        """Return the placement with a stage on each of the first devices, cut at these points."""
        bounds = list(zip((0, *points), (*points, self.end), strict=True))
        return self._price(0, bounds, [self.transfer(link, point) for link, point in enumerate(points)], points)

    def price_whole(self, device: int) -> Candidate:
        """Return the whole model on one device, to which the inputs are sent."""
        return self._price(device, [(0, self.end)], [], [0] * device)

    def _price(
        self, first: int, bounds: Sequence[tuple[int, int]], transfers: Sequence[Transfer], points: Sequence[int]
    ) -> Candidate:
        stages = [self._stage(first + index, index, len(bounds), part) for index, part in enumerate(bounds)]
        forward_s, backward_s = [one.forward_s for one in stages], [one.backward_s for one in stages]
        slots = run_schedule(
            self.schedule, self.micro_batches, forward_s, backward_s, transfers, self._arrivals_s(first)
        )
        step_s = max(one[-1].end_s for one in slots)
        work_s = [forward + backward for forward, backward in zip(forward_s, backward_s, strict=True)]
        busy_s = self.micro_batches * sum(work_s)
        memory = [0] * len(self.devices)
        for index, stage in enumerate(stages):
            memory[first + index] = stage.memory_bytes
        steps = tuple(self._terms(first, stages, points))
        occupied_s = [max(transfer.forward_s, transfer.backward_s) for transfer in transfers]
        occupied_s += [float(self.sent_bytes[0]) / self.links[link].bytes_per_s for link in range(first)]
        return Candidate(
            name=self._name(first, points),
            at=tuple(self.points[point].at for point in points),
            codecs=("raw",) * len(points),
            steps=steps,
            sent_bytes=tuple(int(self.sent_bytes[point]) for point in points),
            back_bytes=0,
            memory_bytes=tuple(memory),
            latency_s=sum(step.seconds for step in steps),
            slowest_s=max((*work_s, *occupied_s)),
            late_s=sum((1 if first else 2) * link.jitter_s for link in self.links[: len(points)]),
            energy_j=None,
            is_baseline=len(stages) == 1,
            refused=self._refusal(memory),
            training=TrainingStep(
                step_s=step_s,
                bubble=max(1 - busy_s / (len(stages) * step_s), 0.0) if step_s else 0.0,
                stages=tuple(stages),
                returned_bytes=() if first else tuple(int(self.returned_bytes[point]) for point in points),
            ),
        )

    def _stage(self, device: int, index: int, count: int, part: tuple[int, int]) -> TrainingStage:
        return TrainingStage(
            device=self.devices[device].name,
            forward_s=float(self.forward_s[device][part]),
            backward_s=float(self.backward_s[device][part]),
            param_bytes=int(self.param_bytes[device][part]),
            gradient_bytes=int(self.gradient_bytes[device][part]),
            optimizer_bytes=int(self.optimizer_bytes[device][part]),
            activation_bytes=int(self.activation_bytes[device][part]),
            in_flight=in_flight(self.schedule, index, count, self.micro_batches),
        )

    def _arrivals_s(self, device: int) -> list[float]:
        """Return when the inputs of each micro-batch are on a device."""
        occupied_s = [float(self.sent_bytes[0]) / link.bytes_per_s for link in self.links[:device]]
        first_s = sum(occupied_s) + sum(link.rtt_s / 2 for link in self.links[:device])
        return [first_s + index * max(occupied_s, default=0.0) for index in range(self.micro_batches)]

    def _terms(self, first: int, stages: Sequence[TrainingStage], points: Sequence[int]) -> Iterator[LatencyTerm]:
        """Yield the terms of one micro-batch alone."""
        names = [device.name for device in self.devices]
        transfers = [self.transfer(link, point) for link, point in enumerate(points)]
        for link, transfer in enumerate(transfers[:first]):
            yield LatencyTerm("send", names[link + 1], transfer.forward_s + transfer.delay_s)
        for index, stage in enumerate(stages):
            if index:
                transfer = transfers[index - 1]
                yield LatencyTerm("send", stage.device, transfer.forward_s + transfer.delay_s)
            yield LatencyTerm("run", stage.device, stage.forward_s)
        for index, stage in reversed(list(enumerate(stages))):
            yield LatencyTerm("backward", stage.device, stage.backward_s)
            if index:
                transfer = transfers[index - 1]
                yield LatencyTerm("back", stage.device, transfer.backward_s + transfer.delay_s)

    def _refusal(self, memory: Sequence[int]) -> str | None:
        for device, nbytes in zip(self.devices, memory, strict=True):
            if nbytes > self.limits.get(device.name, nbytes):
                return f"{device.name} would need {size(nbytes)}, above its limit of {size(self.limits[device.name])}"
        return None

    def _name(self, first: int, points: Sequence[int]) -> str:
        if not points:
            return f"all on {self.devices[0].name}"
        if first:
            return f"all on {self.devices[first].name}, raw input"
        is_chain = len(self.devices) > 2
        return ", ".join(
            f"{self.points[point].at}{f' to {device.name}' if is_chain else ''}"
            for point, device in zip(points, self.devices[1:], strict=False)
        )


def _is_float(dtype: str) -> bool:
    return bool(getattr(torch, dtype).is_floating_point)


def _floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
