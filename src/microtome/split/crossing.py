"""The nouns of a cut: where values are found, the calls around it, and all that crosses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from microtome.results.trace import TracedCall

#: Values that are needed, by the memory that they lie in; False: only if somebody still holds an older tensor of it.
Needs = dict[int, dict[int, bool]]


class ValueLocation(NamedTuple):
    """The location of a value in a run of the head.

    Attributes:
        call: The call that returned it, or that wrote into it, as an index; None: an input of the model, or drawn.
        at: Which of the tensors that the call returned or, if `is_argument`, that it was given.
        draw: The operator that drew it, in code that both sides run, as an index; None: it was not drawn so.
    """

    call: int | None
    at: int
    is_argument: bool = False
    draw: int | None = None

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the model."""
        return self.call is None and self.draw is None


@dataclass(frozen=True)
class Level:
    """A call that contains the cut, with those right inside it that ended before the cut.

    Attributes:
        call: The call around, which the tail runs again.
        skipped: Calls inside it that the tail leaves out.
        onward: The call after them, which contains the cut; None: the last of the skipped ones is the cut.
    """

    call: TracedCall
    skipped: tuple[TracedCall, ...]
    onward: TracedCall | None


@dataclass
class Crossing:
    """All that is to be known of one cut.

    Attributes:
        levels: From the model itself to the call that holds the cut.
        values: Where the values are found that cross, and which they are.
        copied: Those that the head writes into afterwards: they are copied when they are found.
        written: Those that the tail writes into: it works on copies.
        joined: The memories that cross as a whole, since several values of them do.
        views: What calls return that is a view of an argument which is written into later: the tail makes it again, of
            the argument at the position given.
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
