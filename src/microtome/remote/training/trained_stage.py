"""A stage that trains by whole steps: its weights, buffers and optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from microtome.errors import BadFile, BadQuery, Unsupported
from microtome.remote.training.checkpoints import Checkpoints, SavedRun
from microtome.split.pipelining.own_weights import tied_weights
from microtome.split.stage import Stage
from microtome.split.weights import tensor_at

#: An optimizer, or what makes one from the parameters of a side.
OptimizerOrFactory = Optimizer | Callable[[list[nn.Parameter]], Optimizer]


class TrainedStage:
    """A stage whose weights change by whole steps.

    Attributes:
        step: The number of whole steps that the weights have had; None: a step failed midway, or none is known yet.
        parameters: Those that are trained here.
        optimizer: None: the caller has one.
    """

    def __init__(self, stage: Stage, optimizer: OptimizerOrFactory | None, checkpoints: Checkpoints | None) -> None:
        assert stage.holders is not None
        if tied := tied_weights(stage.model, stage.holders):
            raise Unsupported(
                f"{next(iter(tied))!r} is trained on both sides of the cut, and the optimizers of the two sides would "
                "make two weights of it: untie it, or train with torch.distributed.pipelining and "
                'as_module(tied="sum")'
            )
        self.stage = stage
        self.step: int | None = 0
        self._failed_step: int | None = None
        self.run = ""
        held = [name for name, stages in stage.holders.items() if stage.index in stages]
        weights = {name: tensor_at(stage.model, name) for name in held}
        self._weights: dict[str, Tensor] = {name: weight for name, weight in weights.items() if weight is not None}
        own = self._weights.values()
        self.parameters = [one for one in own if isinstance(one, nn.Parameter) and one.requires_grad]
        self._buffers = [one for one in own if not isinstance(one, nn.Parameter)]
        self._buffers_before: list[Tensor] | None = None
        self._checkpoints = checkpoints
        self.optimizer = self._make_optimizer(optimizer)
        self._weights |= self._extra_parameters()
        if checkpoints is not None and self.optimizer is None and self.parameters:
            raise BadQuery(
                "expected optimizer= with checkpoint=, got none: a checkpoint has the state of the optimizer, which "
                "goes back with the weights. Pass it, or a function that makes it, and step it with remote.step()"
            )

    @property
    def saved_steps(self) -> list[int]:
        """The numbers of whole steps of the checkpoints."""
        return [] if self._checkpoints is None else self._checkpoints.steps()

    @property
    def has_checkpoints(self) -> bool:
        return self._checkpoints is not None

    def read_run(self) -> str | None:
        """The id of the run that the checkpoints belong to; None: there are none.

        Raises:
            BadFile: They are of another model or cut.
        """
        saved = None if self._checkpoints is None else self._checkpoints.read_run()
        if saved is not None and saved != self._saved_run(saved.run):
            assert self._checkpoints is not None
            raise BadFile(
                f"{str(self._checkpoints.folder)!r} has checkpoints of stage {saved.side}, cut at {saved.at!r}, of a "
                f"model that began as {saved.fingerprint}; expected stage {self.stage.index}, {self._at!r} and "
                f"{self.stage.fingerprint}: pass another folder, or build the model as at the beginning of that run"
            )
        return None if saved is None else saved.run

    @property
    def is_in_step(self) -> bool:
        """Whether the present step has had a forward."""
        return self._buffers_before is not None

    def describe_failure(self) -> str:
        """Describe why the weights are those of no step."""
        if self._failed_step is None:
            return "weights of an unknown step: a checkpoint was not read"
        return f"partially updated weights: the optimizer failed during step {self._failed_step}"

    def begin_step(self) -> None:
        """Keep the buffers, which forwards change."""
        self._buffers_before = [buffer.clone() for buffer in self._buffers]

    def discard(self) -> None:
        """Drop the gradients, and restore the buffers: as before the step."""
        self._drop_gradients()
        if self._buffers_before is not None:
            with torch.no_grad():
                for buffer, before in zip(self._buffers, self._buffers_before, strict=True):
                    buffer.copy_(before)
        self._buffers_before = None

    def apply(self, *, skip: bool = False) -> None:
        """End the step: step the optimizer unless `skip`, and drop the gradients."""
        assert self.step is not None
        step, self.step = self.step, None  # until all weights are those of the next step
        self._failed_step = step
        if self.optimizer is not None and not skip:
            self.optimizer.step()
        self._drop_gradients()
        self._buffers_before = None
        self.step = step + 1

    def save(self) -> None:
        """Write a checkpoint unless there is one of this step.

        Raises:
            BadFile: It cannot be written, or the one that is there is that of another side or model.
        """
        if self._checkpoints is None or self.step is None:
            return
        if self.step in self._checkpoints.steps():
            self.read_run()
        else:
            self._checkpoints.save(self.step, self._saved_run(self.run), self._weights, self.optimizer)

    def go_to(self, step: int) -> None:
        """Go back or on to a step; other than the present one, it must have a checkpoint."""
        if step != self.step:
            assert self._checkpoints is not None
            self.step = self._failed_step = None
            self._checkpoints.load(step, self._saved_run(self.run), self._weights, self.optimizer)
            self.step = step
        if self._checkpoints is not None:
            self._checkpoints.delete_after(step)

    @property
    def _at(self) -> str:
        at = self.stage.ends_at or self.stage.begins_at
        assert at is not None
        return at

    def _saved_run(self, run: str) -> SavedRun:
        return SavedRun(run, self.stage.fingerprint, self._at, self.stage.index)

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def _extra_parameters(self) -> dict[str, Tensor]:
        """The parameters of the optimizer that the model does not have, such as a temperature of the loss."""
        if self.optimizer is None:
            return {}
        trained = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        of_model = {id(weight) for weight in self.stage.model.parameters()}
        return {f"optimizer {index}": one for index, one in enumerate(trained) if id(one) not in of_model}

    def _make_optimizer(self, optimizer: OptimizerOrFactory | None) -> Optimizer | None:
        made: Any = optimizer
        if callable(optimizer) and not isinstance(optimizer, Optimizer):
            made = optimizer(self.parameters) if self.parameters else None
        if made is not None and not isinstance(made, Optimizer):
            raise BadQuery(
                "expected an optimizer, or a function that makes one from a list of parameters, got "
                f"{type(made).__name__}: such as lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
            )
        if made is not None and _needs_closure(made):
            raise Unsupported(
                f"expected an optimizer that steps without a closure, got {type(made).__name__}: it runs forwards and "
                "backwards in its step, which belong to both sides. Pass another one, such as torch.optim.Adam"
            )
        return made


def _needs_closure(optimizer: Optimizer) -> bool:
    arguments = inspect.signature(optimizer.step).parameters.values()
    named = (one for one in arguments if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))
    return any(one.default is one.empty for one in named)


def common_step(here: Iterable[int], there: Iterable[int]) -> int | None:
    """The last step that both sides have; None: there is none."""
    return max({*here} & {*there}, default=None)
