"""The calls of a profile as a tree for people: identical blocks as one row, and the operators between modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from microtome.report.call_columns import OWN
from microtome.results.metrics import METRICS
from microtome.results.profile import Profile
from microtome.results.rows import AMOUNTS, Row, merge_rows

#: The least number of identical siblings that become one row.
_BLOCKS = 3
#: The least share of the model with which operators between modules have a row, in any of the metrics that add up.
OWN_SHARE = 0.01
#: The most operators that such a row names.
_OPERATORS = 3
#: The name of such a row of a call whose own time is that of Python code alone.
NO_OPERATORS = "(no operators)"


class TreeRow(NamedTuple):
    """A row of the tree.

    Attributes:
        name: The name relative to the call that contains it.
        blocks: The number of identical calls that it sums up.
        is_own: Whether it has the operators that a call runs between the calls inside it.
    """

    row: Row
    name: str
    depth: int
    blocks: int = 1
    is_own: bool = False


def tree_rows(profile: Profile, *, expand: bool = False, calls_only: bool = False) -> list[TreeRow]:
    """Return the rows of the tree, each before those inside it.

    Args:
        expand: Return each of several identical blocks.
        calls_only: Return no rows for operators between modules.
    """
    every = _CallTree(profile, expand=expand).rows([profile.total], "(root)", 0)
    return [row for row in every if not row.is_own or (not calls_only and is_visible(profile, row.row))]


def is_visible(profile: Profile, own: Row) -> bool:
    """Whether operators between modules are `OWN_SHARE` of the model in any metric that adds up and tables show."""
    return any(part >= OWN_SHARE for part in own_shares(profile, [own]).values())


def own_shares(profile: Profile, own: Sequence[Row]) -> dict[str, float]:
    """Return the shares that operators between modules have of the model, by the label of the metric, where known."""
    shares = {}
    for metric in (one for one in METRICS.values() if one.adds_up == "sum" and one.shown == "table"):
        whole = metric.of(profile.total)
        known = [value for row in own if (value := metric.of(row)) is not None]
        if whole and known:
            shares[metric.label] = sum(known) / whole
    return shares


def hidden_shares(profile: Profile, depth: int, *, expand: bool = False) -> dict[str, float]:
    """Return the shares of the operators between modules that have no row in a tree of this depth."""
    every = _CallTree(profile, expand=expand).rows([profile.total], "(root)", 0)
    own = [row.row for row in every if row.is_own and row.depth <= depth]
    return own_shares(profile, [row for row in own if not is_visible(profile, row)])


class _CallTree:
    def __init__(self, profile: Profile, *, expand: bool) -> None:
        self._profile = profile
        self._signatures: dict[str, int] = {}
        if not expand:
            self._sign(profile.total, {})

    def rows(self, calls: Sequence[Row], name: str, depth: int) -> Iterator[TreeRow]:
        """Yield the row of identical calls, that of the operators between the calls inside, and the rows of these."""
        first = calls[0]
        yield TreeRow(first if len(calls) == 1 else merge_rows(calls), name, depth, len(calls))
        children = [self._profile.children(call) for call in calls]
        own = [row for call in calls if (row := self._own_row(call)) is not None] if children[0] else []
        if own:
            yield TreeRow(own[0] if len(own) == 1 else merge_rows(own), operators_of(first), depth + 1, is_own=True)
        for block in self._blocks(children[0]):
            inner = [siblings[index] for siblings in children for index in block]
            name = _name(children[0], block)
            yield from self.rows(inner, name if len(calls) == 1 else name.partition("#")[0], depth + 1)

    def _own_row(self, call: Row) -> Row | None:
        """Return the row of a call's own operators; what was measured with calls inside it is not theirs alone."""
        own = self._profile.own_row(call)
        inside = self._profile.children(call)
        measured = [name for name in AMOUNTS if METRICS[name].is_measured]
        shared = [name for name in measured if any(getattr(child, name) is None for child in inside)]
        unknown: dict[str, Any] = dict.fromkeys(shared)
        return None if own is None else replace(own, type=OWN, **unknown)  # its module is in the row above

    def _blocks(self, siblings: Sequence[Row]) -> Iterator[list[int]]:
        """Yield the indices of siblings that share a row."""
        keys = [self._signatures.get(row.address, -index - 1) for index, row in enumerate(siblings)]
        for _, group in groupby(range(len(siblings)), lambda index: keys[index]):
            indices = list(group)
            names = [_numbered(siblings[index]) for index in indices]
            if len(indices) >= _BLOCKS and all(number and stem == names[0][0] for stem, number in names):
                yield indices
            else:
                yield from ([index] for index in indices)

    def _sign(self, row: Row, known: dict[Any, int]) -> int:
        """Number the structure and the costs of a call: identical blocks get the same number."""
        children = self._profile.children(row)
        inside = tuple((name_in_tree(child).partition("#")[0], self._sign(child, known)) for child in children)
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in (*row.inputs, *row.outputs))
        costs = (row.params + row.shared_params, row.macs, row.flops)
        self._signatures[row.address] = known.setdefault((row.type, shapes, costs, inside), len(known))
        return self._signatures[row.address]


def _name(siblings: Sequence[Row], block: Sequence[int]) -> str:
    """Return the name of a call or of identical ones: a glob, if one matches exactly these."""
    name = name_in_tree(siblings[block[0]])
    if len(block) == 1:
        return name
    stem, low = _numbered(siblings[block[0]])
    high, count = _numbered(siblings[block[-1]])[1], f" ×{len(block)}"  # noqa: RUF001
    if stem.endswith("#"):
        return f"{name}…{high}{count}"
    if len(block) == sum(_numbered(row)[0] == stem for row in siblings):
        return f"{stem}*{count}"
    return f"{stem}[{low}-{high}]{count}" if len(high) == 1 else f"{stem}{low}…{high}{count}"


def _numbered(row: Row) -> tuple[str, str]:
    """Split a name into a stem and the number at its end: an index in a list, or that of a call; "" without one."""
    name = name_in_tree(row)
    stem = name.rstrip("0123456789")
    return stem, name[len(stem) :]


def operators_of(row: Row) -> str:
    """Return the names of the operators between the modules of a call, the most expensive first; views cost nothing."""
    ops = sorted(
        (op for op in row.ops if op.flops or op.moved_bytes), key=lambda op: (-(op.flops or 0), -op.moved_bytes)
    )
    names = list(dict.fromkeys(op.name.removeprefix("aten.").partition(".")[0].lstrip("_") for op in ops))
    return f"({', '.join(names[:_OPERATORS])}{', …' if len(names) > _OPERATORS else ''})" if names else NO_OPERATORS


def name_in_tree(row: Row) -> str:
    """Return the name of a call relative to the call that contains it."""
    if row.parent is None:
        return "(root)"
    above = row.parent.partition("#")[0]
    return row.address.removeprefix(f"{above}.") if above else row.address
