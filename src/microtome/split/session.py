"""Sessions: the steps of one sequence over the stages of a split model, such as the tokens of an answer."""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from microtome.engine.argument_names import named_arguments
from microtome.errors import Unsupported
from microtome.inputs import Inputs
from microtome.split.analysis.call_arguments import state_objects_in
from microtome.split.state.contents import kind_of
from microtome.split.state.steps import StepSequence

if TYPE_CHECKING:
    from microtome.split.stages import Stages


class StageSession:
    """One sequence of steps over stages, each of which keeps its own part of the state between them.

    Call it as the model, with the state that the last step returned; without a state, the first step makes a new one.
    A state belongs to one session. An error in a step ends the session, since some stages have written to it.
    """

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._sequence = StepSequence()
        self._kind: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step."""
        inputs = self._stages[0].spec.complete(Inputs(*args, **kwargs))
        if self._kind is None:
            self._kind = kind_of(state_objects_in((inputs.args, inputs.kwargs)))
        return self._sequence.run(self._stages.for_inputs(inputs, self._kind), inputs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sequence = StepSequence()


def generate(stages: Stages, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the `generate` of the model, a model of transformers, with a forward that runs the stages."""
    model = stages[0].model
    if not callable(getattr(model, "generate", None)):
        raise Unsupported(
            f"expected a model with a method `generate`, as those of transformers have, got a {type(model).__name__}: "
            "run its steps with stages.session()"
        )
    generator: Any = _with_forward(model, StageSession(stages))
    return generator.generate(*args, **kwargs)


def _with_forward(model: nn.Module, session: StageSession) -> nn.Module:
    """A shallow copy of the model that runs the session; `generate` reads the signature of its forward."""
    shallow = copy.copy(model)

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        named = named_arguments(model, Inputs(*args, **kwargs))
        return session(**{name: value for name, value in named.items() if value is not None})

    object.__setattr__(shallow, "forward", MethodType(forward, shallow))
    return shallow
