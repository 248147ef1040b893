"""The interface of model sources."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from microtome.errors import NoMatch


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be built.

    Attributes:
        build: Builds the model.
        example: Returns example inputs for the built model, as `Inputs.of` accepts them; None if they are unknown.
        notes: Notes for the user.
        file: The Python file whose line number belongs in error messages.
        has_random_weights: Whether the weights are random although trained ones are published.
        one_pass: Keyword arguments of a run that is not continued by another.
        model_class: The class of the model; None if only building it tells.
    """

    build: Callable[[], Any]
    example: Callable[[nn.Module], Any]
    notes: tuple[str, ...] = ()
    file: str | None = None
    has_random_weights: bool = False
    one_pass: Mapping[str, Any] = field(default_factory=dict)
    model_class: type | None = None


class ModelSource(Protocol):
    """The names that a module of this package defines.

    Attributes:
        PREFIX: The word before the colon in the names of its models.
    """

    PREFIX: str

    def names(self) -> Sequence[str]:
        """List the models of this source."""
        ...

    def find(self, name: str, args: dict[str, Any]) -> ModelSpec:
        """Look up a model, to be built with these arguments."""
        ...


def no_such_model(source: str, name: str, names: Iterable[str], reason: str = "") -> NoMatch:
    """Return the error for a name that a source does not have."""
    names = list(names)
    longer = [other for other in names if other.startswith(name)] if name else []
    near = longer[:3] or difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(f'{source}:{other}' for other in near)}?" if near else ""
    return NoMatch(f"{source} has no model {name!r}.{reason}{hint} microtome models '{source}:*' lists them.")


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed the CPU's random generator inside the block, and restore its state afterwards."""
    # Sources build on the CPU; torch.manual_seed would reseed every device.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
