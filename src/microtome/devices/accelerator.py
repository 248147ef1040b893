"""Devices that only `torch.accelerator` knows, such as XPU and MPS: host time and live tensors are measured."""

from __future__ import annotations

import torch

from microtome.devices.base import Backend


class Accelerator(Backend):
    """A device without a backend of its own: it can be waited for; its own times are not measured."""

    has_timestamps = False

    def __init__(self, device_type: str) -> None:
        self.type = device_type

    def synchronize(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def default_generator(self, device: torch.device) -> torch.Generator | None:
        generators = getattr(torch.get_device_module(device), "default_generators", ())
        index = device.index or 0
        return generators[index] if index < len(generators) else None
