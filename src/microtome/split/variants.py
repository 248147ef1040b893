"""Stages for the steps of a sequence: one analysis serves all steps that make the same calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from microtome.engine.argument_names import named_arguments
from microtome.engine.pytree import as_state, map_tensors
from microtome.errors import NoMatch, Unsupported
from microtome.inputs import Inputs
from microtome.split.analysis.call_arguments import state_objects_in
from microtome.split.analysis.structure_spec import flatten
from microtome.split.splitter import Splitter
from microtome.split.state.contents import fill_placeholders, has_tensors, kind_of

if TYPE_CHECKING:
    from microtome.split.stages import Stages


class StageVariants:
    """The stages of a model with the same cuts, for inputs of other structures, flags and kinds of state."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._first = [stages]
        self._later: list[Stages] = []  # of steps that make other calls than the first, as in models like T5

    def __len__(self) -> int:
        return len(self._first) + len(self._later)

    def for_step(self, inputs: Inputs, kind: str | None) -> tuple[Stages, Inputs]:
        """Choose the stages for a step, or make them; return also the inputs with all states.

        Args:
            kind: The `kind_of` the states of the first step; None: this is the first.

        Raises:
            Unsupported: A run on these inputs does not reach the cuts.
        """
        with as_state(self._stages[0].spec.state_classes):
            states = state_objects_in((inputs.args, inputs.kwargs))
            is_first = not any(map(has_tensors, states))
            kind = kind or (kind_of(states) if states else None)
            candidates = self._first if is_first else [one for one in self._first if one.continues] + self._later
            for stages in candidates:
                spec = stages[0].spec
                completed = spec.complete(inputs, stages[0].model)
                structure, _, plain = flatten((completed.args, completed.kwargs), arrays=[])
                is_kind = kind is None or kind == kind_of(spec.states) or stages in self._later
                if is_kind and (structure.text, _flags(plain)) == (spec.inputs.text, _flags(spec.example.plain)):
                    return stages, completed
            made = self._make(inputs)
            (self._first if is_first else self._later).append(made)
            return made, made[0].spec.complete(inputs, made[0].model)

    def _make(self, inputs: Inputs) -> Stages:
        args, kwargs = map_tensors(lambda tensor: tensor, (inputs.args, inputs.kwargs), fill_placeholders)
        model, at = self._stages[0].model, self._stages.at
        try:
            return Splitter(model, Inputs(*args, **kwargs), self._stages.fingerprint).at(at)
        except NoMatch as error:
            names = ", ".join(named_arguments(model, inputs))
            raise Unsupported(
                f"the model cannot be cut at {', '.join(at)} when it is called with {names}: {error}. If the cut is in "
                "an encoder, `generate` runs it apart from these steps: cut in the decoder"
            ) from error


def _flags(plain: list[Any]) -> list[Any]:
    """The plain values by which a model chooses what to do, such as `use_cache`; numbers may differ between steps."""
    return [value for value in plain if isinstance(value, bool | str | None)]
