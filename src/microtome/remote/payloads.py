"""The two things that cross as tensors beside a boundary: the inputs of a whole model, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from microtome.errors import BadBoundary, Unsupported
from microtome.inputs import Inputs
from microtome.split.arrays import to_array, to_tensor
from microtome.split.boundary import Boundary
from microtome.split.structure_spec import Plain, StructureSpec, check_structure, flatten
from microtome.split.tensor_bytes import moved

if TYPE_CHECKING:
    from microtome.remote.replies import Expected

#: The address that stands for the model's inputs: all of it runs where they are sent to.
INPUTS = ""


def of_inputs(given: Inputs, template: StructureSpec, fingerprint: str) -> Boundary:
    """Pack the inputs of a model; the template is that of the example."""
    arrays: list[Any] = []
    got, tensors, plain = flatten((given.args, given.kwargs), arrays=arrays)
    check_structure("what the model is given, positional and by name,", template, got)
    return _packed(INPUTS, fingerprint, [*tensors, *map(to_tensor, arrays)], plain)


def to_inputs(boundary: Boundary, template: StructureSpec, device: torch.device | None) -> Inputs:
    """Unpack the inputs that the other side packed."""
    args, kwargs = _unpacked(boundary, template, device, "the inputs")
    return Inputs(*args, **kwargs)


def of_output(output: Any, template: StructureSpec, at: str, fingerprint: str) -> Boundary:
    """Pack the output of a model.

    Raises:
        Unsupported: If there is something in it that cannot be sent.
    """
    got, tensors, plain = flatten(output)
    if got.unsupported is not None:
        raise Unsupported(
            f"the model returns a {got.unsupported}, which cannot be sent: tensors, numbers and texts can"
        )
    check_structure("what the model returns", template, got)
    return _packed(at, fingerprint, tensors, plain)


def to_output(boundary: Boundary, template: StructureSpec, device: torch.device | None, expected: Expected) -> Any:
    """Unpack the output that the other side packed.

    Raises:
        BadBoundary: If it is none that the model could have returned.
    """
    return _unpacked(boundary, template, device, "the output", expected.check)


def _packed(at: str, fingerprint: str, tensors: list[Tensor], plain: list[Plain]) -> Boundary:
    names: dict[int, str] = {}
    order = [names.setdefault(id(tensor), str(index)) for index, tensor in enumerate(tensors)]
    named = {name: tensors[int(name)].detach() for name in names.values()}
    return Boundary(at, fingerprint, named, {"plain": plain, "tensors": order})


def _unpacked(
    boundary: Boundary,
    template: StructureSpec,
    device: torch.device | None,
    what: str,
    check: Callable[[Boundary, list[str]], None] | None = None,
) -> Any:
    plain, order = boundary.facts.get("plain"), boundary.facts.get("tensors")
    expected = template.num_tensors + template.num_arrays
    fits = isinstance(order, list) and len(order) == expected and set(boundary.tensors) == {*map(str, order)}
    fits = fits and isinstance(plain, list) and len(plain) == template.num_plain
    fits = fits and all(isinstance(value, bool | int | float | str | None) for value in plain or ())
    if not fits:
        count = len(order) if isinstance(order, list) else len(boundary.tensors)
        raise BadBoundary(
            f"{what} that came have {count} tensors, and {expected} with {template.num_plain} other values were "
            "expected: have both sides the same model"
        )
    assert isinstance(plain, list)
    assert isinstance(order, list)
    if check is not None:
        check(boundary, list(map(str, order)))
    there = {name: tensor if device is None else moved(tensor, device) for name, tensor in boundary.tensors.items()}
    tensors, arrays = order[: template.num_tensors], order[template.num_tensors :]
    made = [to_array(boundary.tensors[str(name)]) for name in arrays]
    return template.unflatten([there[str(name)] for name in tensors], plain, arrays=made)
