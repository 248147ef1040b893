"""The tail's side of a session: its state objects, and the steps that a client sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microtome.engine.pytree import as_state, base_class
from microtome.errors import BadBoundary, describe_error
from microtome.remote.error_kinds import TooLarge
from microtome.remote.repeated_inputs import KeptInputs
from microtome.remote.step_codec import encode_changes, parse_edits, parse_states
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import PLACEHOLDER_DTYPES, PlaceholderSpec
from microtome.split.stage import Stage
from microtome.split.state.contents import apply_changes, part_at, to_path
from microtome.split.state.placeholder import StateOp
from microtome.split.state.snapshot import Path, format_path
from microtome.split.state.stage_state import Edits, StageState
from microtome.units import size


class StepResult(NamedTuple):
    """The output of the model in one step, and the changes of the state objects, encoded."""

    output: Any
    changes: bytes


class TailSession:
    """The state of one session in the last stage.

    Attributes:
        state: The state objects of the stage.
    """

    def __init__(self) -> None:
        self.state = StageState([])
        self._inputs = KeptInputs()
        self._has_begun = False

    @property
    def nbytes(self) -> int:
        """The bytes of the state that is kept here, and of inputs that the next step may not send."""
        return self.state.nbytes + self._inputs.nbytes

    def run(self, tail: Stage, state: bytes, boundary: Boundary, max_bytes: int | None = None) -> StepResult:
        """Run a step.

        Args:
            state: The field `state` of the `Step`, decompressed.
            max_bytes: The most bytes of the state; None: any number.
        """
        with as_state(tail.spec.state_classes), torch.no_grad():
            edits: Any = ()
            if self._has_begun:
                edits = parse_edits(state, len(self.state.objects))
                if max_bytes is not None:
                    _check_edits(self.state.objects, edits, max_bytes)
            else:
                self.state = StageState(_make_states(state, tail))
                self._has_begun = True
            self._inputs.restore(boundary)
            self.state.begin_step(tail, edits)
            tail.check_modes()
            output = tail.run((boundary,), {}, state=self.state, release=True)
            return StepResult(output, encode_changes(self.state.end_step(tail)))


def _make_states(data: bytes, tail: Stage) -> list[Any]:
    """New state objects, as the client has them."""

    def make_tensor(spec: PlaceholderSpec, path: Path) -> Tensor:
        if 0 not in spec.shape:
            raise BadBoundary(f"expected a new state, got one with a tensor at {format_path(path)}")
        return torch.empty(spec.shape, dtype=PLACEHOLDER_DTYPES[spec.dtype], device=tail.device)

    states = []
    for cls, parts in parse_states(data, tail.model):
        with as_state((base_class(cls),)):
            states.append(apply_changes(None, parts, tail.device, make_tensor))
    return states


def _check_edits(states: Sequence[Any], edits: Edits, max_bytes: int) -> None:
    """Raise if edits would allocate more than the state may take, intermediate results included."""
    allocated = 0
    for state, edit in ((state, edit) for state, own in zip(states, edits, strict=True) for edit in own):
        part = part_at(state, to_path(edit.change.path))
        if not edit.ops or part is None or not isinstance(part.value, Tensor):
            continue
        allocated += _bytes_of_edit(torch.empty_like(part.value, device="meta"), edit.ops)
        if allocated > max_bytes:
            raise TooLarge(f"expected edits of the state to at most {size(max_bytes)}, got {size(allocated)}")


def _bytes_of_edit(tensor: Tensor, ops: Iterable[StateOp]) -> int:
    """The bytes of all results of operators on a tensor, which is on meta."""
    allocated = 0
    try:
        for func, args, kwargs in ops:
            tensor = func(tensor, *_to_meta(args), **_to_meta(kwargs))
            allocated += tensor.nbytes
    except NotImplementedError:  # a mask selects some of the elements, and cannot repeat them
        pass
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise BadBoundary(f"cannot edit the state as the client did: {describe_error(error)}") from error
    return allocated


def _to_meta(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_to_meta, value))
    return value.to("meta") if isinstance(value, Tensor) and value.dtype is not torch.bool else value
