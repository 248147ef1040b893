"""The result of a run that ends early."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from microtome.engine.pytree import map_tensors, named_tensors, tensors_in
from microtome.errors import BadBoundary, BadInputs
from microtome.split.boundary import Boundary


class HookExitException(Exception):
    """Ends a run at once: where a hook or a layer of yours raises it, `forward` returns `EarlyOutput(result)`."""

    def __init__(self, result: Any) -> None:
        super().__init__("the run was ended by a hook")
        self.result = result


@dataclass(eq=False)
class EarlyOutput:
    """The output of an edge for a cloud; called, the banked outputs of the last layer and of `save_layers`.

    Two are equal if their banked outputs are, tensor by tensor.

    Attributes:
        inner_dict: The banked outputs, by the number of the layer.
        boundary: What the layers after it need, which may be more than its output; None: it is not known, and no cloud
            can go on from here.
        layer: The number of the layer where the run stopped.
    """

    inner_dict: Any = None
    boundary: Boundary | None = None
    layer: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner_dict

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EarlyOutput):
            return NotImplemented
        ours, theirs = (map_tensors(_description, one.inner_dict) for one in (self, other))
        if ours != theirs:
            return False
        pairs = zip(named_tensors(self.inner_dict), named_tensors(other.inner_dict), strict=True)
        return all(one.equal(another) for (_, one), (_, another) in pairs)

    @property
    def shape(self) -> torch.Size | None:
        """The shape, if one tensor is held rather than a dict."""
        return getattr(self.inner_dict, "shape", None)

    def to_bytes(self, codec: str = "raw") -> bytes:
        """Serialize for a cloud; see `Boundary.to_bytes`."""
        boundary = self.known_boundary()
        return replace(boundary, facts={**boundary.facts, "layer": self.layer}).to_bytes(codec)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, limit: int | str = "4GB") -> Self:
        """Read the bytes of `to_bytes`. Of the banked outputs, it holds that of the last layer if the cloud needs it.

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

    def boundary_as_banked(self, layers: Sequence[str]) -> Boundary:
        """The boundary with the banked outputs that were changed since, as tracr's clouds take those."""
        boundary = self.known_boundary()
        changed = {
            name: tensor
            for name, tensor in _named(self.inner_dict, layers)
            if (held := boundary.tensors.get(name)) is not None
            and held is not tensor
            and _alike(held, tensor)
            and not held.equal(tensor.to(held.device))
        }
        return replace(boundary, tensors=boundary.tensors | changed) if changed else boundary


def share_tensors(outputs: dict[int, Any], boundary: Boundary, layers: Sequence[str]) -> dict[int, Any]:
    """The banked outputs with the boundary's own tensors among them where the two are equal: they are stored once."""
    shared = {
        id(tensor): held
        for name, tensor in _named(outputs, layers)
        if (held := boundary.tensors.get(name)) is not None and _alike(held, tensor) and _equal(held, tensor)
    }
    found: dict[int, Any] = map_tensors(lambda tensor: shared.get(id(tensor), tensor), outputs)
    return found


def _named(outputs: Any, layers: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in banked outputs, under the names that a boundary gives them."""
    for layer, output in outputs.items() if isinstance(outputs, Mapping) else ():
        if isinstance(layer, int) and 0 <= layer < len(layers):
            tensors = list(tensors_in(output))
            for at, tensor in enumerate(tensors):
                yield layers[layer] if len(tensors) == 1 else f"{layers[layer]}[{at}]", tensor


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _equal(one: Tensor, other: Tensor) -> bool:
    is_same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return is_same or (one.device == other.device and one.equal(other))


def _description(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device
