"""What a run that ends early gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from microtome.errors import BadBoundary, BadInputs
from microtome.split.boundary import Boundary


class HookExitException(Exception):
    """Ends a run at once: where a hook or a layer of yours raises it, `forward` returns `EarlyOutput(result)`."""

    def __init__(self, result: Any) -> None:
        super().__init__("the run was ended by a hook")
        self.result = result


@dataclass(frozen=True, eq=False)
class EarlyOutput:
    """What an edge gives a cloud; called, the banked outputs: those of the layer where it stopped and of `save_layers`.

    Attributes:
        inner_dict: The banked outputs, by the number of the layer.
        boundary: What the layers after it need, which may be more than its output; None: it is not known, and no cloud
            can go on from here.
        layer: The number of the layer where the run stopped.
    """

    inner_dict: Any
    boundary: Boundary | None = None
    layer: int | None = None

    def __call__(self) -> Any:
        return self.inner_dict

    @property
    def shape(self) -> torch.Size | None:
        """The shape, if one tensor is held rather than a dict."""
        return getattr(self.inner_dict, "shape", None)

    def to_bytes(self, codec: str = "raw") -> bytes:
        """What a cloud needs, as bytes; see `Boundary.to_bytes`."""
        boundary = self.known_boundary()
        return replace(boundary, facts={**boundary.facts, "layer": self.layer}).to_bytes(codec)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, limit: int | str = "4GB") -> Self:
        """What `to_bytes` made bytes of. Of the banked outputs, it holds that of the last layer if the cloud needs it.

        Args:
            limit: The most memory that reading may take; see `Boundary.from_bytes`.
        """
        boundary = Boundary.from_bytes(data, limit=limit)
        layer = boundary.facts.get("layer")
        if type(layer) is not int:
            raise BadBoundary("the bytes are a boundary, but not of an EarlyOutput: they do not say which layer it is")
        own = boundary.tensors.get(boundary.at)
        return cls({} if own is None else {layer: own}, boundary, layer)

    def known_boundary(self) -> Boundary:
        if self.boundary is None:
            raise BadInputs(
                "this EarlyOutput holds outputs of layers alone, which may not be all that the layers after them need: "
                "take the one that the edge returned, or EarlyOutput.from_bytes of its bytes"
            )
        return self.boundary
