"""A profile: the costs of every call of a run, and queries on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from microtome.addresses import find_address, glob, is_glob, no_path
from microtome.errors import BadQuery
from microtome.files.reading import File
from microtome.results.base import Result, write
from microtome.results.memory import Timeline
from microtome.results.methods import EnergyUse, MemoryUse, Sampling, Timing
from microtome.results.metrics import METRICS, why_unknown
from microtome.results.rendering import render
from microtome.results.rows import AMOUNTS, Group, Row, add

if TYPE_CHECKING:
    from microtome.results.diff import Diff


@dataclass(frozen=True, slots=True)
class UnknownOp:
    """An operator without a formula.

    Attributes:
        runs: The number of its runs.
        calls: The addresses of the calls that ran it.
    """

    name: str
    runs: int
    calls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """The part of a run that is counted.

    Attributes:
        ops: The number of operators that ran.
        unknown: The operators without a formula, which add nothing to the counts.
        never_ran: The paths of modules that did not run, without the modules inside them.
    """

    ops: int
    unknown: tuple[UnknownOp, ...]
    never_ran: tuple[str, ...]

    @property
    def fraction(self) -> float:
        """The part of the operators that are counted or known to cost nothing. It says nothing of their work."""
        return self.counted / self.ops if self.ops else 1.0

    @property
    def counted(self) -> int:
        """The number of operators that are counted or known to cost nothing."""
        return self.ops - sum(op.runs for op in self.unknown)

    @property
    def work(self) -> float | None:
        """The part of the work that is counted: all of it or, where an operator has no formula, None: not known."""
        return None if self.unknown else 1.0


@dataclass(frozen=True)
class Profile(Result):
    """The costs of every call of a run. Rows are calls of the forward, in the order they began.

    Attributes:
        model: The type of the model.
        inputs: The inputs of the model, as text.
        convention: The convention of MACs, FLOPs and MAdds.
        how: The kind of tensors of the run, and why.
        environment: The machine and the software of the measurements; empty if there are none.
        timing: The method of the times; None: not measured.
        energy: The method of the energies; None: not measured.
        memory: The method of the measured memory; None: not measured.
        sampling: The method of the load; None: not sampled.
        unavailable: The reason why a requested measurement was not made, by its name.
        timeline: The bytes that are alive while each operator runs; None in files of an older microtome.
        gradients: Whether torch saved tensors for a backward; None in files of an older microtome.
    """

    kind: ClassVar[str] = "profile"
    schema: ClassVar[int] = 2

    model: str
    inputs: str
    convention: str
    how: str
    coverage: Coverage
    calls: tuple[Row, ...]
    environment: dict[str, str] = field(default_factory=dict)
    timing: Timing | None = None
    energy: EnergyUse | None = None
    memory: MemoryUse | None = None
    sampling: Sampling | None = None
    unavailable: dict[str, str] = field(default_factory=dict)
    timeline: Timeline | None = None
    gradients: bool | None = None

    @property
    def total(self) -> Row:
        """The whole model."""
        return self.calls[0]

    @property
    def peak_bytes(self) -> int:
        """The most that lives at once, as computed, in the forward or in the backward if that was counted."""
        return max(self.total.peak_bytes, *(self.timeline.live_bytes if self.timeline else ()), 0)

    def __getitem__(self, address: str) -> Any:
        """The row at an address; of a glob, a tuple of the rows whose path it matches."""
        if not isinstance(address, str) or not is_glob(address) or address in self._by_address:
            return self._by_address[find_address(address, self._by_address)]
        pattern = glob(address)
        found = tuple(row for row in self.calls if pattern.fullmatch(row.path))
        if not found:
            raise no_path(address, self._by_address)
        return found

    def __iter__(self) -> Iterator[Row]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def children(self, row: Row) -> tuple[Row, ...]:
        """The calls right inside a call."""
        return self._children.get(row.address, ())

    @property
    def tree(self) -> dict[str, Any]:
        """The rows as a tree: `row`, and `children`, each a tree of its own."""
        return self._tree(self.total)

    def _tree(self, row: Row) -> dict[str, Any]:
        return {"row": row, "children": [self._tree(child) for child in self.children(row)]}

    def rows(self, *, depth: int | None = None, granularity: int | None = None) -> tuple[Row, ...]:
        """Rows that add up to the total; without arguments, all rows.

        Args:
            depth: A row for each call that deep, and for those above that have no calls inside.
            granularity: A row for each highest call of at most this height: 1 gives the calls without calls inside.

        What calls above those run themselves, between the calls inside them, has rows of its own, whose type ends in
        `(own)`.
        """
        if depth is not None and granularity is not None:
            raise BadQuery("rows are chosen by depth or by granularity, not by both")
        if depth is None and granularity is None:
            return self.calls
        name, level = ("depth", depth) if depth is not None else ("granularity", granularity)
        if not isinstance(level, int) or level < (0 if name == "depth" else 1):
            raise BadQuery(f"{name} is a number from {0 if name == 'depth' else 1} on, got {level!r}")
        return tuple(self._cover(self.total, depth, granularity))

    def _cover(self, row: Row, depth: int | None, granularity: int | None) -> Iterator[Row]:
        deep = depth is not None and row.depth >= depth
        low = granularity is not None and row.height <= granularity
        if deep or low or row.height == 1:
            yield row
            return
        if any(getattr(row.own, name) for name in AMOUNTS):
            whole = [name for name, metric in METRICS.items() if metric.adds_up != "sum" and metric.requires]
            own = {name: None for name in ("load", *whole) if hasattr(row, name)} | {"spreads": {}} | asdict(row.own)
            yield replace(row, type=f"{row.type} (own)", **own)  # what was measured is of the whole
        for child in self.children(row):
            yield from self._cover(child, depth, granularity)

    def by_type(self) -> dict[str, Group]:
        """The costs of modules by their type, without the calls inside them, the most FLOPs first."""
        types: dict[str, list[Row]] = {}
        for row in self.calls:
            types.setdefault(row.type, []).append(row)
        return _groups({name: ([row.own for row in rows], len(rows)) for name, rows in types.items()})

    def by_module(self) -> dict[str, Group]:
        """The costs of each module over all its runs, with all calls inside them, by its path."""
        paths: dict[str, list[Row]] = {}
        for row in self.calls:
            paths.setdefault(row.path, []).append(row)
        outermost = {path: [row for row in rows if not self._is_inside(row, path)] for path, rows in paths.items()}
        return {path: Group(name=path, runs=len(paths[path]), **add(rows)) for path, rows in outermost.items()}

    def _is_inside(self, row: Row, path: str) -> bool:
        """Whether a call is inside another run of the module at this path, which may call itself."""
        above = row.parent
        while above is not None:
            if self._by_address[above].path == path:
                return True
            above = self._by_address[above].parent
        return False

    def by_op(self) -> dict[str, Group]:
        """The costs of the operators of the forward, by their names, the most FLOPs first."""
        names: dict[str, list[Group]] = {}
        for row in self.calls:
            for op in row.ops:
                names.setdefault(op.name, []).append(op)
        return _groups({name: (list(ops), sum(op.runs for op in ops)) for name, ops in names.items()})

    def top(self, n: int = 10, *, by: str = "flops") -> tuple[Row, ...]:
        """The calls that themselves cost the most, without the calls inside them; those of unknown cost left out.

        Raises:
            BadQuery: No call has a number of that quantity.
        """
        known = {name: metric for name, metric in METRICS.items() if metric.adds_up == "sum"}
        if by not in known:
            raise BadQuery(f"there is no quantity {by!r} to order by: write one of {', '.join(known)}")
        if n < 1:
            raise BadQuery(f"expected n of 1 or more, got {n}")
        costs = [(row, cost) for row in self.calls if (cost := known[by].own(row)) is not None]
        if not costs:
            raise BadQuery(f"no call has a number of {by!r} to order by: {why_unknown(self, known[by])}")
        return tuple(row for row, _ in sorted(costs, key=lambda pair: -pair[1])[:n])

    def layer_metrics(self, depth: int | None = None) -> list[dict[str, Any]]:
        """The metrics of each layer under the names that tracr gave them; None where not measured.

        Args:
            depth: A layer is a call that deep, or one above without calls inside; None: any without calls inside.
        """
        from microtome.results.profile_records import layer_metrics

        if depth is not None and depth < 0:
            raise BadQuery(f"depth is a number from 0 on, got {depth!r}")
        return layer_metrics(self, depth)

    def diff(self, after: Profile) -> Diff:
        """Compare this profile with a later one: see `microtome.results.diff.Diff`."""
        from microtome.results.diff import diff

        return diff(self, after)

    def to_perfetto(self, file: File | None = None) -> str:
        """Export Chrome trace JSON, which https://ui.perfetto.dev opens; written to the file if one is named.

        The calls as slices in each other, and curves of memory and power. Needs times: `measure=["time"]`.
        """
        return write(render("perfetto.perfetto", self), file)

    def to_speedscope(self, file: File | None = None) -> str:
        """Export JSON that https://www.speedscope.app opens; written to the file if one is named. Needs times."""
        return write(render("speedscope.speedscope", self), file)

    def to_pandas(self) -> Any:
        """The rows as a DataFrame. Needs pandas."""
        import pandas as pd  # an extra

        from microtome.results.profile_records import flat

        return pd.DataFrame([flat(row) for row in self.calls])

    def to_html(self, file: File | None = None, *, cuts: Any = None, compare: Any = None) -> str:
        """Export one self-contained HTML page; written to the file if one is named.

        Args:
            cuts: What `microtome.cuts` says of the model, or the file that holds it: with times, the page then weighs
                where to cut.
            compare: Another profile, or the file that holds one, to be shown beside.
        """
        return write(render("page.html", self, cuts, compare), file)

    def as_dict(self) -> dict[str, Any]:
        data = super().as_dict()
        data["coverage"] |= {"fraction": self.coverage.fraction, "work": self.coverage.work}
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        from microtome.results.profile_records import checked_calls

        return super().from_dict(data | {"calls": checked_calls(data["calls"])})

    def check(self) -> None:
        if self.timeline is not None:
            self.timeline.check(len(self.calls))

    def __repr__(self) -> str:
        return f"<Profile of {self.model}, {len(self.calls)} calls, {self.convention} convention>"

    @cached_property
    def _by_address(self) -> dict[str, Row]:
        return {row.address: row for row in self.calls}

    @cached_property
    def _children(self) -> dict[str, tuple[Row, ...]]:
        children: dict[str, list[Row]] = {}
        for row in self.calls:
            if row.parent is not None:
                children.setdefault(row.parent, []).append(row)
        return {address: tuple(rows) for address, rows in children.items()}


def _groups(members: dict[str, tuple[list[Any], int]]) -> dict[str, Group]:
    groups = {name: Group(name=name, runs=runs, **add(amounts)) for name, (amounts, runs) in members.items()}
    return dict(sorted(groups.items(), key=lambda item: -(item[1].flops or 0)))
