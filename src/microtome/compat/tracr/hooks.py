"""The result of a run that stops early, and the functions of tracr's `hooks` module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from microtome.engine.pytree import map_tensors, named_tensors, tensors_in
from microtome.errors import BadBoundary, BadInputs, Unsupported
from microtome.split.boundary.boundary import Boundary


class HookExitException(Exception):
    """Stops a run: if a hook or a layer of yours raises it, `forward` returns `EarlyOutput(result)`."""

    def __init__(self, result: Any) -> None:
        super().__init__("a hook stopped the run")
        self.result = result


@dataclass(eq=False)
class EarlyOutput:
    """The output of an edge, from which a cloud resumes. Calling it returns the banked outputs.

    Two are equal if their banked outputs are, tensor by tensor.

    Attributes:
        inner_dict: The outputs of the last layer and of `save_layers`, by the number of the layer.
        boundary: The tensors that later layers need, which may be more than the last output; None: unknown, so that no
            cloud can resume.
        layer: The number of the layer after which the run stopped.
    """

    inner_dict: Any = None
    boundary: Boundary | None = None
    layer: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner_dict

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EarlyOutput):
            return NotImplemented
        ours, theirs = (map_tensors(_properties, early.inner_dict) for early in (self, other))
        if ours != theirs:
            return False
        pairs = zip(named_tensors(self.inner_dict), named_tensors(other.inner_dict), strict=True)
        return all(mine.equal(theirs) for (_, mine), (_, theirs) in pairs)

    @property
    def shape(self) -> torch.Size | None:
        """The shape, if `inner_dict` is a tensor."""
        return getattr(self.inner_dict, "shape", None)

    def to_bytes(self, codec: str = "raw") -> bytes:
        """Serialize for a cloud; see `Boundary.to_bytes`."""
        boundary = self.require_boundary()
        return replace(boundary, facts={**boundary.facts, "layer": self.layer}).to_bytes(codec)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, limit: int | str = "4GB") -> Self:
        """Deserialize the bytes of `to_bytes`. The only banked output is that of the last layer, if it crosses.

        Args:
            limit: The maximum memory for decoding; see `Boundary.from_bytes`.
        """
        boundary = Boundary.from_bytes(data, limit=limit)
        layer = boundary.facts.get("layer")
        if type(layer) is not int:
            raise BadBoundary("expected the bytes of an EarlyOutput, got a boundary without the number of its layer")
        output = boundary.tensors.get(boundary.at)
        return cls({} if output is None else {layer: output}, boundary, layer)

    def require_boundary(self) -> Boundary:
        if self.boundary is None:
            raise BadInputs(
                "this EarlyOutput has only outputs of layers, which may not be all that later layers need: use the one "
                "that the edge returned, or EarlyOutput.from_bytes of its bytes"
            )
        return self.boundary

    def updated_boundary(self, layers: Sequence[str]) -> Boundary:
        """Return the boundary with banked outputs that were changed since, which tracr's clouds use too."""
        boundary = self.require_boundary()
        changed = {
            name: tensor
            for name, tensor, crossing in _crossing(self.inner_dict, boundary, layers)
            if crossing is not tensor and not crossing.equal(tensor.to(crossing.device))
        }
        return replace(boundary, tensors=boundary.tensors | changed) if changed else boundary


def share_tensors(outputs: dict[int, Any], boundary: Boundary, layers: Sequence[str]) -> dict[int, Any]:
    """Replace banked outputs that are equal to tensors of the boundary by these, so that they are pickled once."""
    shared = {
        id(tensor): crossing
        for _, tensor, crossing in _crossing(outputs, boundary, layers)
        if _is_same_memory(crossing, tensor) or (crossing.device == tensor.device and crossing.equal(tensor))
    }
    result: dict[int, Any] = map_tensors(lambda tensor: shared.get(id(tensor), tensor), outputs)
    return result


def _crossing(outputs: Any, boundary: Boundary, layers: Sequence[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the tensors of banked outputs that cross the boundary: the name there, the banked one, the crossing one."""
    for layer, output in outputs.items() if isinstance(outputs, Mapping) else ():
        if not isinstance(layer, int) or not 0 <= layer < len(layers):
            continue
        tensors = list(tensors_in(output))
        for index, tensor in enumerate(tensors):
            name = layers[layer] if len(tensors) == 1 else f"{layers[layer]}[{index}]"
            crossing = boundary.tensors.get(name)
            if crossing is not None and (crossing.shape, crossing.dtype) == (tensor.shape, tensor.dtype):
                yield name, tensor, crossing


def _is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    return tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride()


def _properties(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device


# -- what tracr's hooks did --------------------------------------------------------------------------------------------


def create_forward_prehook(
    wrapped_model: Any, layer_index: int, layer_name: str, input_shape: tuple[int, ...], device: str
) -> NoReturn:
    """Raise `Unsupported`: layers have no hooks."""
    raise _unsupported("create_forward_prehook", "register a pre-hook of your own at the path wrapped.layers[i]")


def create_forward_posthook(
    wrapped_model: Any, layer_index: int, layer_name: str, input_shape: tuple[int, ...], device: str
) -> NoReturn:
    """Raise `Unsupported`: layers have no hooks."""
    raise _unsupported(
        "create_forward_posthook",
        "register a hook of your own, which may raise HookExitException(result); wrapped.save_layers banks outputs",
    )


def _unsupported(name: str, instead: str) -> Unsupported:
    return Unsupported(f"{name}: WrappedModel measures and stops layers without hooks. Instead, {instead}")
