"""Stages for the steps of a sequence: one analysis serves all steps that make the same calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from microtome.engine.argument_names import named_arguments
from microtome.engine.pytree import as_state
from microtome.errors import Unsupported
from microtome.inputs import Inputs
from microtome.split.analysis.call_arguments import state_objects_in
from microtome.split.analysis.structure_spec import SplitSpec
from microtome.split.description import SplitDescription
from microtome.split.stage import Stage
from microtome.split.state.contents import has_tensors, kind_of
from microtome.split.state.snapshot import StateSnapshot


@dataclass(frozen=True, eq=False)
class Variant:
    """Stages for inputs of one structure.

    Attributes:
        first_kind: The `kind_of` the states in the first step of the sequences whose later steps they compute; None:
            they compute the first step.
        continues: Whether they also compute the steps after those that they were made for.
        describe: Describes the split for another process.
    """

    stages: Sequence[Stage]
    first_kind: str | None
    continues: bool
    describe: Callable[[], SplitDescription]

    @property
    def spec(self) -> SplitSpec:
        return self.stages[0].spec

    @property
    def is_first(self) -> bool:
        """Whether they compute the first step of a sequence."""
        return self.first_kind is None

    def accepts(self, inputs: Inputs) -> bool:
        """Whether inputs with all states have the structure and the flags that they were made for."""
        flat, spec = self.stages[0].flatten_inputs(inputs), self.spec
        return flat.spec.text == spec.inputs.text and _flags(flat.plain) == _flags(spec.example.plain)

    @cached_property
    def kind(self) -> str:
        """The `kind_of` the states in the first step of the sequences that they compute."""
        return kind_of(self.spec.states) if self.first_kind is None else self.first_kind


class StageVariants:
    """The stages of a model with the same cuts, for inputs of other structures, flags and kinds of state."""

    def __init__(
        self, variants: Iterable[Variant], make: Callable[[Inputs, str | None], Variant] | None = None
    ) -> None:
        """`make` analyzes the model on inputs, of which it gets the `first_kind`; None: not all weights are here."""
        self._variants = list(variants)
        self._make = make

    def __len__(self) -> int:
        return len(self._variants)

    def describe(self) -> list[SplitDescription]:
        """Describe all variants so far, the first one first."""
        return [variant.describe()._replace(first_kind=variant.first_kind) for variant in self._variants]

    def for_step(
        self, inputs: Inputs, kind: str | None, read: Callable[[Sequence[Any]], Sequence[StateSnapshot]]
    ) -> tuple[Variant, Inputs]:
        """Choose the stages for a step, or make them; return also the inputs with all states.

        Args:
            kind: The `kind_of` the states of the first step; None: this is the first.
            read: Takes snapshots of state objects.

        Raises:
            Unsupported: A run on these inputs does not reach the cuts.
        """
        classes = dict.fromkeys(cls for variant in self._variants for cls in variant.spec.state_classes)
        with as_state(tuple(classes)):
            states = state_objects_in((inputs.args, inputs.kwargs))
            is_first = not any(map(has_tensors, read(states)))
            kind = kind or (kind_of(states) if states else None)
            for variant in self._variants:
                if not (variant.is_first if is_first else variant.continues or not variant.is_first):
                    continue
                completed = variant.spec.complete(inputs, variant.stages[0].model)
                if (kind is None or kind == variant.kind) and variant.accepts(completed):
                    return variant, completed
            if self._make is None:
                names = ", ".join(named_arguments(self._variants[0].stages[0].model, inputs))
                raise Unsupported(
                    f"the stages were not saved for steps that are called with {names}, or these cannot be analyzed "
                    "without all weights, as with a static cache: call stages.generate(…) with the same options before "
                    "stages.save(…), or load the whole model"
                )
            made = self._make(inputs, None if is_first else kind or "")
            self._variants.append(made)
            return made, made.spec.complete(inputs, made.stages[0].model)


def _flags(plain: list[Any]) -> list[Any]:
    """The plain values by which a model chooses what to do, such as `use_cache`; numbers may differ between steps."""
    return [value for value in plain if isinstance(value, bool | str | None)]
