"""A stage as a module that takes and returns plain tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Self, TypedDict

import torch
from torch import Tensor, nn

from microtome.engine.meta_run import copy_inputs
from microtome.engine.module_state import share_registered
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.torch_internals import is_view
from microtome.errors import BadInputs, Unsupported
from microtome.inputs import Inputs
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.gradients import restride
from microtome.split.graph.derived_facts import named_inputs
from microtome.split.pipelining.fact_difference import describe_difference
from microtome.split.pipelining.layouts import StageLayout, find_layout
from microtome.split.pipelining.own_weights import Holders, copy_with_own_weights, tied_weights
from microtome.split.stage import Stage

#: The shape and dtype of each tensor that a stage takes.
_Key = tuple[tuple[torch.Size, torch.dtype], ...]


class StageShapes(TypedDict):
    """Arguments of `PipelineStage`: tensors on meta, like those that a stage takes and returns."""

    input_args: tuple[Tensor, ...]
    output_args: tuple[Tensor, ...]


class StageModule(nn.Module):
    """A stage as a module for `torch.distributed.pipelining.PipelineStage`; made by `Stage.as_module`.

    It takes and returns tensors by position. Its modules, parameters and buffers are the stage's own, under their names
    in the model. Modules of other stages are there without weights, and never run.

    Attributes:
        input_names: The names of the tensors that it takes: of the model's arguments, or of what crosses.
        output_names: The names of those that it returns.
        tied: The parameters that several stages train, with the indices of these, over all stages.
    """

    def __init__(self, stage: Stage, holders: Holders, tied: dict[str, tuple[int, ...]], example: Any) -> None:
        super().__init__()
        model = copy_with_own_weights(stage, holders)
        share_registered(self, model)  # what replaces a weight here, such as FSDP, replaces it in the model that runs
        self.training = model.training
        self.tied = tied
        self._source = stage
        self._stage = stage.on(model)
        self._trains = {name: weight.requires_grad for name, weight in self.named_parameters()}
        self._examples: dict[_Key, Inputs] = {}
        self._layouts: dict[tuple[_Key, bool], StageLayout] = {}
        layout = self._prepare(example)
        self.input_names, self.output_names = tuple(layout.inputs), tuple(layout.outputs)

    @property
    def source_model(self) -> nn.Module:
        """The model that was split."""
        return self._source.model

    def shapes(self, example: Any = None) -> StageShapes:
        """The `input_args` and `output_args` of `PipelineStage` for micro-batches of the shapes of an example.

        Without them torch would find out shapes by running the module on tensors without values, which changes batch
        norms and random states.

        Args:
            example: Inputs of the model; None: those that the module was made with. Only shapes matter.

        Raises:
            Unsupported: What crosses depends on more than shapes.
        """
        layout = self._layouts[next(iter(self._layouts))] if example is None else self._prepare(example)
        return {"input_args": _make_contiguous(layout.inputs), "output_args": _make_contiguous(layout.outputs)}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of this module or of the whole model; the weights of other stages are left out."""
        own = self.state_dict()
        foreign = self._source.model.state_dict().keys() - own.keys()
        kept = OrderedDict((name, value) for name, value in state_dict.items() if name not in foreign)
        # Without it, batch norms of other stages expect their own.
        kept._metadata = getattr(state_dict, "_metadata", own._metadata)  # type: ignore[attr-defined]
        return super().load_state_dict(kept, *args, **kwargs)

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the stage."""
        if torch.compiler.is_compiling():  # which cannot capture it
            return torch.compiler.disable(self._run)(*tensors)
        return self._run(*tensors)

    def _run(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        key = _key(tensors)
        layout = self._layouts.get((key, torch.is_grad_enabled())) or self._find(key)
        if layout.begins is None:
            by_example = dict(zip(map(id, layout.inputs.values()), tensors, strict=True))
            example = self._examples[key]
            args, kwargs = map_tensors(lambda tensor: by_example[id(tensor)], (example.args, example.kwargs))
            output = self._stage.run(args, kwargs)
        else:
            restrided = map(_restride_like, tensors, layout.inputs.values())
            received = dict(zip(layout.inputs, restrided, strict=True))
            begins = self._stage.begins_at
            assert begins is not None
            boundary = Boundary(begins, self._stage.fingerprint, received, layout.begins)
            output = self._stage.run((boundary,), {})
        if isinstance(output, Boundary):
            return self._sendable(output, layout)
        returned = list({id(tensor): tensor for tensor in tensors_in(output)}.values())
        return returned[0] if len(returned) == 1 else tuple(returned)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self._stage.model.training = mode
        return self

    def _sendable(self, boundary: Boundary, layout: StageLayout) -> tuple[Tensor, ...]:
        """The tensors that cross, contiguous and with memory of their own, as torch sends and detaches them."""
        if boundary.record != layout.ends or boundary.tensors.keys() != layout.outputs.keys():
            raise self._other_facts(boundary, layout)
        return tuple(_copy_if_shared(tensor) for tensor in boundary.tensors.values())

    def _other_facts(self, boundary: Boundary, layout: StageLayout) -> Unsupported:
        """The error for a boundary with other facts than the next stage expects, and its likely cause."""
        ends = self._stage.ends
        assert ends is not None
        assert layout.ends is not None
        difference = describe_difference(layout.ends, boundary.record, [call.address for call in ends.skipped])
        now_trains = {name: weight.requires_grad for name, weight in self.named_parameters()}
        changed = [name for name, trains in self._trains.items() if now_trains.get(name, trains) != trains]
        if changed:
            was, now = ("trained", "frozen") if self._trains[changed[0]] else ("frozen", "trained")
            reason = f"{changed[0]!r} was {was} when the model was split, and is {now} now: split it again"
        else:
            reason = (
                "it depends on values of the inputs, such as a mask that the model leaves out where nothing is padded, "
                "and a pipeline carries tensors alone. Pass inputs for which it does not, such as a mask of 4 "
                "dimensions, or cut before the code that reads them"
            )
        return Unsupported(f"what crosses at {boundary.at!r} differs from the example: {difference}; {reason}")

    def _prepare(self, example: Any) -> StageLayout:
        """Find the layout for micro-batches of these shapes."""
        inputs = copy_inputs(Inputs.of(example, self._source.model), self._source.model)
        with torch.enable_grad():
            layout = find_layout(self._source, inputs)
            key = _key(layout.inputs.values())
            known = self._layouts.setdefault((key, True), layout)
            if (known.begins, known.ends) != (layout.begins, layout.ends):
                raise Unsupported(
                    f"inputs of two shapes give stage {self._source.index} tensors of the same shapes, and other facts "
                    "beside them: make a module for each"
                )
        self._examples.setdefault(key, inputs)
        return self._layouts[key, True]

    def _find(self, key: _Key) -> StageLayout:
        """The layout for tensors of shapes that are known in another mode of gradients."""
        if key not in self._examples:
            known = " or ".join(_describe(one) for one in self._examples)
            raise BadInputs(
                f"stage {self._source.index} takes tensors {', '.join(self.input_names)} of {known}, got "
                f"{_describe(key)}: pass an example of these shapes to `shapes` of the module in every process"
            )
        layout = find_layout(self._source, self._examples[key])
        if layout.begins is None:  # by the identity of the example's tensors
            layout = layout._replace(inputs=named_inputs(self._source.model, self._examples[key]))
        self._layouts[key, torch.is_grad_enabled()] = layout
        return layout


def make_module(stage: Stage, example: Any, tied: str | None) -> StageModule:
    """See `Stage.as_module`."""
    if not stage.grad or stage.holders is None:
        raise Unsupported(f"stage {stage.index} was not split for training: mt.split(…, grad=True)")
    if tied not in (None, "sum"):
        raise BadInputs(f"expected tied=None or 'sum', got {tied!r:.80}")
    shared = tied_weights(stage.model, stage.holders)
    if shared and tied is None:
        name, stages = next(iter(shared.items()))
        raise Unsupported(
            f"{name!r} is trained in stages {' and '.join(map(str, stages))}, and each would have a part of its "
            'gradient: pass tied="sum", and call mt.sum_tied_gradients in every process before the optimizer steps'
        )
    return StageModule(stage, stage.holders, shared, stage.example if example is None else example)


def _key(tensors: Any) -> _Key:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def _describe(key: _Key) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in key) or "nothing"


def _restride_like(tensor: Tensor, meta: Tensor) -> Tensor:
    """Give a received tensor the strides that it has in the model."""
    if not tensor.requires_grad and tensor.stride() == meta.stride():
        return tensor
    return restride(tensor, meta.stride())


def _copy_if_shared(tensor: Tensor) -> Tensor:
    is_shared = is_view(tensor) or (tensor.requires_grad and tensor.is_leaf)
    return tensor.clone(memory_format=torch.contiguous_format) if is_shared else tensor.contiguous()


def _make_contiguous(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    empty = (torch.empty(one.shape, dtype=one.dtype, device="meta") for one in tensors.values())
    return tuple(one.requires_grad_(meta.requires_grad) for one, meta in zip(empty, tensors.values(), strict=True))
