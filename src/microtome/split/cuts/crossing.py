"""Data of one cut: the calls around it, the locations of the values that cross, and how they cross."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from microtome.results.trace import TracedCall


class ValueLocation(NamedTuple):
    """The location of a value in a run of the head.

    Attributes:
        call: The call that returned it or, if `is_argument`, that wrote to it; None: an input of the model, or a draw.
        position: The index among the distinct tensors that the call, operator or model returned or took.
        draw: The random operator in code that both sides run which returned it; None: there is none.
    """

    call: int | None
    position: int
    is_argument: bool = False
    draw: int | None = None

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the model."""
        return self.call is None and self.draw is None


@dataclass(frozen=True)
class Level:
    """A call that encloses the cut, and those of its children that return before the cut.

    Attributes:
        call: The enclosing call, which both sides run.
        skipped: The children that the tail skips.
        onward: The child after them, which encloses the cut; None: the last of the skipped ones is the cut.
    """

    call: TracedCall
    skipped: tuple[TracedCall, ...]
    onward: TracedCall | None


@dataclass
class Crossing:
    """The values that cross one cut.

    Attributes:
        levels: The enclosing calls, from the model inwards.
        values: The values that cross, as indices in the trace, by location.
        copied: Those that the head writes to later: they are copied when they are located.
        written: Those that the tail writes to: it works on copies.
        joined: The memories that cross as a whole, since several values of them do.
        views: The outputs that the tail makes again as views of an argument, whose position is given: that argument
            is written to later.
        refused: Why there is no exact cut here; None: there is one.
    """

    cut: TracedCall
    levels: tuple[Level, ...]
    values: dict[ValueLocation, int] = field(default_factory=dict)
    copied: set[ValueLocation] = field(default_factory=set)
    written: set[ValueLocation] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    views: dict[ValueLocation, int] = field(default_factory=dict)
    refused: str | None = None
