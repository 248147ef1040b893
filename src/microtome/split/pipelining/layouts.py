"""The tensors that a stage takes and returns for inputs of some shapes, in a fixed order, and the facts beside them.

A pipeline carries tensors alone. The rest of a boundary depends on the shapes of the inputs, if the control flow of the
model does not depend on values, so each process finds it out by tracing the model, on tensors without values where it
allows that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from microtome.engine import Call, Probe
from microtome.engine.pytree import named_tensors
from microtome.errors import Unsupported, describe_error
from microtome.inputs import Inputs
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import BoundaryRecord
from microtome.split.execution.schedule import Schedule
from microtome.split.execution.stage_run import DrawingStageRun
from microtome.split.graph.derived_facts import named_inputs
from microtome.split.stage import Stage
from microtome.split.state.stage_state import StageState
from microtome.trace.trace import record


class StageLayout(NamedTuple):
    """The tensors and facts that cross before and after a stage.

    Attributes:
        inputs: The tensors that it takes, on meta: those of the boundary before it, or of the model's arguments.
        outputs: The tensors that it returns: those of the boundary after it, or of the model's output.
        begins: The facts of the boundary before it; None: it is the first.
        ends: The facts of the boundary after it; None: it is the last.
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    begins: BoundaryRecord | None
    ends: BoundaryRecord | None


def find_layout(stage: Stage, example: Inputs) -> StageLayout:
    """Find what crosses before and after a stage, by a trace of the whole model without values.

    Args:
        example: The arguments of the model; the mode of gradients and `autocast` are those of the caller.

    Raises:
        Unsupported: It depends on values, or the model does not run on these shapes.
    """
    found: list[tuple[_MetaCutRecorder | None, _MetaCutRecorder | None, _MetaOutputRecorder]] = []

    def make_probes(_: Any) -> list[Probe]:
        begins, ends = (None if one is None else _MetaCutRecorder(stage, one) for one in (stage.begins, stage.ends))
        found.append((begins, ends, _MetaOutputRecorder()))
        return [probe for probe in found[-1] if probe is not None]

    try:
        record(stage.model, example, make_probes=make_probes, values=True)
    except Exception as error:  # from the model's code, which may read values, or refuse the shapes
        named = named_inputs(stage.model, example).items()
        shapes = ", ".join(f"{name} of shape {tuple(tensor.shape)}" for name, tensor in named)
        raise Unsupported(
            f"cannot find out what crosses the cuts of stage {stage.index} for {shapes}: {describe_error(error):.300}"
        ) from error
    begins, ends, output = found[-1]
    return StageLayout(
        named_inputs(stage.model, example) if begins is None else begins.tensors,
        output.tensors if ends is None else ends.tensors,
        None if begins is None else begins.crossed.record,
        None if ends is None else ends.crossed.record,
    )


class _MetaCutRecorder(DrawingStageRun):
    """Records what crosses a cut, in a run that goes on after it.

    Attributes:
        crossed: The boundary.
        tensors: Its tensors, on meta: the run may write to them after the cut.
    """

    crossed: Boundary
    tensors: dict[str, Tensor]

    def __init__(self, stage: Stage, ends: Schedule) -> None:
        super().__init__(None, ends, grad=stage.grad)
        self._flatten = stage.flatten_inputs

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.parent is None and call.phase == "forward":
            self.begin(StageState([]))
            self.record_inputs(self._flatten(Inputs(*args, **kwargs)))
        super().enter(call, args, kwargs)

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        was_complete = self.is_complete(call)
        super().exit(call, args, kwargs, output)
        if self.is_complete(call) and not was_complete:
            self.crossed = self.boundary("")
            self.tensors = _copy_all_to_meta(self.crossed.tensors)


class _MetaOutputRecorder(Probe):
    """Records the distinct tensors of the model's output, on meta, by their paths in it."""

    tensors: dict[str, Tensor]

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call.parent is None and call.phase == "forward":
            distinct: dict[int, tuple[str, Tensor]] = {}
            for path, tensor in named_tensors(output):
                distinct.setdefault(id(tensor), (path or "output", tensor))
            self.tensors = _copy_all_to_meta(dict(distinct.values()))


def _copy_all_to_meta(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: _copy_to_meta(tensor) for name, tensor in tensors.items()}


def _copy_to_meta(tensor: Tensor) -> Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return meta.requires_grad_(tensor.requires_grad)
