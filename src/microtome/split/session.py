"""Sessions: the steps of one sequence over the stages of a split model, such as the tokens of an answer."""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from microtome.engine.argument_names import named_arguments
from microtome.engine.pytree import as_state
from microtome.engine.selectors import unwrap_model
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

    Attributes:
        num_steps: The number of steps so far.
    """

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._sequence = StepSequence()
        self._kind: str | None = None
        self.num_steps = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step."""
        stages, inputs = self._stages.variants.for_step(Inputs(*args, **kwargs), self._kind)
        with as_state(stages[0].spec.state_classes):
            if self._kind is None:
                self._kind = kind_of(state_objects_in((inputs.args, inputs.kwargs)))
            output = self._sequence.run(stages, inputs)
        self.num_steps += 1
        return output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sequence = StepSequence()
        self._kind = None


def generate(stages: Stages, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the `generate` of the model, a model of transformers, with a forward that runs the stages."""
    model = stages[0].model
    if not callable(getattr(model, "generate", None)):
        raise Unsupported(
            f"expected a model with a method `generate`, as those of transformers have, got a {type(model).__name__}: "
            "run its steps with stages.session()"
        )
    session = StageSession(stages)
    generator: Any = _with_forward(unwrap_model(model), session)
    # With a static cache on a GPU, it would compile the forward, which runs sessions.
    output = generator.generate(*args, **{"disable_compile": True, **kwargs})
    if not session.num_steps:
        raise Unsupported(f"the `generate` of a {type(model).__name__} does not call it: split the model that it wraps")
    return output


def _with_forward(model: nn.Module, session: StageSession) -> nn.Module:
    """A shallow copy of the model that runs the session; `generate` reads the signature of its forward."""
    shallow = copy.copy(model)
    for name, value in vars(model).items():
        if name.endswith("_hooks"):  # the model itself runs them, as a part of the stages
            object.__setattr__(shallow, name, type(value)())

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        named = named_arguments(model, Inputs(*args, **kwargs))
        return session(**{name: value for name, value in named.items() if value is not None})

    object.__setattr__(shallow, "forward", MethodType(forward, shallow))
    return shallow
