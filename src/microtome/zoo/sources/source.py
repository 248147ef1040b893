"""A model as its source describes it before it is built."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from microtome.errors import NoMatch


@dataclass(frozen=True)
class FoundModel:
    """A model that can be built.

    Attributes:
        make: Builds it, with random weights.
        example: Inputs for the built model, anything that `Inputs.of` takes; None where the source does not tell.
        notes: What the user should know about it.
        file: The Python file whose line an error should name.
    """

    make: Callable[[], Any]
    example: Callable[[nn.Module], Any]
    notes: tuple[str, ...] = ()
    file: str | None = None


class ModelSource(Protocol):
    """A file of this folder."""

    @property
    def PACKAGE(self) -> str: ...  # noqa: N802
    def names(self) -> Sequence[str]: ...
    def find(self, name: str, args: dict[str, Any]) -> FoundModel: ...


def unknown(source: str, name: str, known: Iterable[str], why: str = "") -> NoMatch:
    """The error for a name that a source does not have."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(f'{source}:{other}' for other in near)}?" if near else ""
    return NoMatch(f"{source} has no model {name!r}.{why}{hint} microtome models '{source}:*' lists them.")
