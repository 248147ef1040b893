"""Stages for the steps of a sequence: one analysis serves all steps that make the same calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from microtome.engine.argument_names import named_arguments
from microtome.engine.pytree import as_state
from microtome.errors import Unsupported
from microtome.inputs import Inputs
from microtome.split.analysis.call_arguments import state_objects_in
from microtome.split.analysis.structure_spec import SplitSpec, flatten
from microtome.split.description import SplitDescription
from microtome.split.stage import Stage
from microtome.split.state.contents import has_tensors, kind_of


@dataclass(frozen=True, eq=False)
class Variant:
    """Stages for inputs of one structure.

    Attributes:
        is_first: Whether they compute the first step of a sequence.
        continues: Whether they also compute its next steps.
        describe: Describes the split for another process.
    """

    stages: Sequence[Stage]
    is_first: bool
    continues: bool
    describe: Callable[[], SplitDescription]

    @property
    def spec(self) -> SplitSpec:
        return self.stages[0].spec


class StageVariants:
    """The stages of a model with the same cuts, for inputs of other structures, flags and kinds of state."""

    def __init__(self, variants: Iterable[Variant], make: Callable[[Inputs, bool], Variant] | None = None) -> None:
        """`make` analyzes the model on inputs of a first step, or of a later one; None: not all weights are here."""
        self._variants = list(variants)
        self._make = make

    def __len__(self) -> int:
        return len(self._variants)

    def describe(self) -> list[SplitDescription]:
        """Describe all variants so far, the first one first."""
        return [variant.describe()._replace(is_first=variant.is_first) for variant in self._variants]

    def for_step(self, inputs: Inputs, kind: str | None) -> tuple[Variant, Inputs]:
        """Choose the stages for a step, or make them; return also the inputs with all states.

        Args:
            kind: The `kind_of` the states of the first step; None: this is the first.

        Raises:
            Unsupported: A run on these inputs does not reach the cuts.
        """
        classes = dict.fromkeys(cls for variant in self._variants for cls in variant.spec.state_classes)
        with as_state(tuple(classes)):
            states = state_objects_in((inputs.args, inputs.kwargs))
            is_first = not any(map(has_tensors, states))
            kind = kind or (kind_of(states) if states else None)
            for variant in self._variants:
                if not (variant.is_first if is_first else variant.continues or not variant.is_first):
                    continue
                spec, model = variant.spec, variant.stages[0].model
                completed = spec.complete(inputs, model)
                structure, _, plain = flatten((completed.args, completed.kwargs), arrays=[])
                is_kind = kind is None or kind == kind_of(spec.states) or not variant.is_first
                if is_kind and (structure.text, _flags(plain)) == (spec.inputs.text, _flags(spec.example.plain)):
                    return variant, completed
            if self._make is None:
                names = ", ".join(named_arguments(self._variants[0].stages[0].model, inputs))
                raise Unsupported(
                    f"the stages were not saved for steps that are called with {names}: call stages.generate(…) with "
                    "the same options before stages.save(…), so that they are"
                )
            made = self._make(inputs, is_first)
            self._variants.append(made)
            return made, made.spec.complete(inputs, made.stages[0].model)


def _flags(plain: list[Any]) -> list[Any]:
    """The plain values by which a model chooses what to do, such as `use_cache`; numbers may differ between steps."""
    return [value for value in plain if isinstance(value, bool | str | None)]
