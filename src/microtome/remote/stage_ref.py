"""Naming a stage of a chain in a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from microtome.addresses import INPUT, OUTPUT
from microtome.errors import BadQuery
from microtome.remote import protocol
from microtome.remote.payloads import INPUTS


@dataclass(frozen=True)
class StageRef:
    """One of the stages of a model that is cut at some addresses.

    All cuts name it, not only its own two: what crosses a cut is found by running all stages.

    Attributes:
        cuts: The addresses of all cuts, in order.
        index: The number of the stage, from 0.
    """

    cuts: tuple[str, ...]
    index: int

    @classmethod
    def tail(cls, at: str) -> StageRef:
        """The stage from a cut to the output; from `INPUTS`, the whole model.

        >>> StageRef.tail("layer1").ends_at is None
        True
        """
        return cls((), 0) if at == INPUTS else cls((at,), 1)

    @classmethod
    def from_message(cls, message: Any) -> StageRef:
        """Read the field `stage` of a request."""
        cuts = tuple(message.cuts)
        if message.index > len(cuts):
            raise BadQuery(f"expected a stage from 0 to {len(cuts)} of {len(cuts)} cuts, got {message.index}")
        return cls(cuts, message.index)

    def to_message(self) -> Any:
        return protocol.StageRef(cuts=self.cuts, index=self.index)

    @property
    def following(self) -> StageRef:
        """The stage after this one."""
        return StageRef(self.cuts, self.index + 1)

    @property
    def begins_at(self) -> str:
        """The cut where it begins; `INPUTS` for the first stage."""
        return INPUTS if self.index == 0 else self.cuts[self.index - 1]

    @property
    def ends_at(self) -> str | None:
        """The cut where it ends; None: at the output."""
        return None if self.index == len(self.cuts) else self.cuts[self.index]

    def __str__(self) -> str:
        return describe_stage(self.begins_at, self.ends_at)


def describe_stage(begins_at: str, ends_at: str | None) -> str:
    """Name a stage by its cuts.

    >>> describe_stage("", "layer1")
    "from '(input)' to 'layer1'"
    """
    return f"from {begins_at or INPUT!r} to {ends_at or OUTPUT!r}"
