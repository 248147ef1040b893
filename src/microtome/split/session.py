"""Sessions: the steps of one sequence over the stages of a split model, such as the tokens of an answer."""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any, Self

from torch import Tensor, nn

from microtome.engine.argument_names import named_arguments
from microtome.engine.pytree import as_state
from microtome.engine.selectors import unwrap_model
from microtome.engine.session import keep_patched
from microtome.errors import BadInputs, SessionError, Unsupported
from microtome.inputs import Inputs
from microtome.split.analysis.call_arguments import state_objects_in
from microtome.split.state.contents import kind_of
from microtome.split.state.steps import StepSequence
from microtome.split.variants import StageVariants, Variant


class StageSession:
    """One sequence of steps over stages, each of which keeps its own part of the state between them.

    Call it as the model, with the state that the last step returned; without a state, the first step makes a new one.
    A state belongs to one session. An error in a step ends the session, since some stages have written to it.

    Attributes:
        num_steps: The number of steps so far.
    """

    def __init__(self, variants: StageVariants) -> None:
        self._variants = variants
        self._sequence = StepSequence()
        self._kind: str | None = None
        self._is_closed = False
        self.num_steps = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step."""
        if self._is_closed:
            raise SessionError("expected an open session, got one that was closed: begin another with session()")
        variant, inputs = self._variants.for_step(Inputs(*args, **kwargs), self._kind, self._sequence.read)
        with as_state(variant.spec.state_classes):
            if self._kind is None:
                self._kind = kind_of(state_objects_in((inputs.args, inputs.kwargs)))
            output = self.run_step(variant, inputs)
        self.num_steps += 1
        return output

    def run_step(self, variant: Variant, inputs: Inputs) -> Any:
        return self._sequence.run(variant.stages, inputs)

    def close(self) -> None:
        """Drop the state."""
        self._sequence = StepSequence()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def generate(model: nn.Module, session: StageSession, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the `generate` of the model, a model of transformers, with a forward that runs the steps of a session."""
    if not callable(getattr(model, "generate", None)):
        raise Unsupported(
            f"expected a model with a method `generate`, as those of transformers have, got a {type(model).__name__}: "
            "run its steps with session()"
        )
    generator: Any = _with_forward(unwrap_model(model), session)
    if hasattr(generator, "generation_config"):
        _check_tokens(args[0] if args else kwargs.get("inputs", kwargs.get("input_ids")))
        # With a static cache on a GPU, transformers would compile the forward.
        kwargs = {"disable_compile": True, **kwargs}
    with keep_patched():
        output = generator.generate(*args, **kwargs)
    if not session.num_steps:
        raise Unsupported(
            f"the `generate` of a {type(model).__name__} ran no step: expected one new token or more; if it wraps "
            "another model, split that one"
        )
    return output


def _check_tokens(tokens: Any) -> None:
    """Raise if the first argument of the `generate` of transformers is no tensor."""
    if tokens is not None and not isinstance(tokens, Tensor):
        raise BadInputs(
            f"expected a tensor of token ids, got {type(tokens).__name__} {tokens!r:.80}: tokenize a text, and pass "
            "numbers as torch.tensor([[1, 2]])"
        )


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
