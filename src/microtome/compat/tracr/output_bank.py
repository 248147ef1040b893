"""The outputs of layers that are kept."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from microtome.addresses import strip_first_index
from microtome.engine import Call, Probe
from microtome.engine.pytree import map_tensors
from microtome.errors import Unsupported


class Bank(Probe):
    """Keeps what layers return.

    Attributes:
        wanted: The layers, by address.
        last: The one after which the run stops, so that nobody changes what it returned.
    """

    def __init__(self, wanted: dict[str, int]) -> None:
        self.wanted = wanted
        self._by_call = {strip_first_index(address): layer for address, layer in wanted.items()}
        self.last: tuple[str, int] | None = None
        self.outputs: dict[int, Any] = {}

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.last is not None and call.address == strip_first_index(self.last[0]):
            self.outputs[self.last[1]] = map_tensors(Tensor.detach, output)
        elif (layer := self._by_call.get(call.address)) is not None:
            self.outputs[layer] = map_tensors(lambda tensor: tensor.detach().clone(), output)

    def check(self) -> None:
        for address, at in self.wanted.items():
            if at not in self.outputs:
                raise Unsupported(
                    f"layer {at}, {address!r}, of save_layers was not seen to run: this input did not lead to it, or "
                    "torch ran it with those around it as one fused operator"
                )
