"""A profile: the costs of every call of a run, and queries on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import floor
from typing import TYPE_CHECKING, Any, Literal, Self

from microtome.addresses import find_address, glob, is_glob, path_not_found
from microtome.errors import BadQuery, NotInstalled
from microtome.files.reading import File
from microtome.results.base import Result, render, write
from microtome.results.measurements import EnergyUse, MemoryUse, Sampling, Timeline, Timing
from microtome.results.metrics import METRICS, Metric, find_choice, why_unknown
from microtome.results.rows import AMOUNTS, Group, Ranking, Row, add, flat, group, tracr_record, upgrade_calls
from microtome.units import merge_repeats, plural

if TYPE_CHECKING:
    from microtome.results.diff import Diff


@dataclass(frozen=True, slots=True)
class UnknownOp:
    """An operator without a formula.

    Attributes:
        runs: The number of its runs.
        calls: The addresses of the calls that ran it.
        moved_bytes: The bytes that it reads and writes; None in files of an older microtome.
    """

    name: str
    runs: int
    calls: tuple[str, ...]
    moved_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Coverage:
    """The part of a run that is counted.

    Attributes:
        ops: The number of operators that ran.
        unknown: The operators without a formula, which the counts leave out.
        never_ran: The paths of modules that did not run, without the modules inside them.
        moved_bytes: The bytes that all operators read and write; None in files of an older microtome.
    """

    ops: int
    unknown: tuple[UnknownOp, ...]
    never_ran: tuple[str, ...]
    moved_bytes: int | None = None

    @property
    def fraction(self) -> float:
        """The fraction of the operators that are counted or known to cost nothing, whatever work they do."""
        return self.counted / self.ops if self.ops else 1.0

    @property
    def counted(self) -> int:
        """The number of operators that are counted or known to cost nothing."""
        return self.ops - sum(op.runs for op in self.unknown)

    @property
    def work(self) -> float | None:
        """The fraction of the work that is counted: 1, or None (unknown) where an operator has no formula."""
        return None if self.unknown else 1.0

    @property
    def moved_fraction(self) -> float | None:
        """The fraction of the moved bytes that counted operators move: low if a large operator has no formula."""
        uncounted = [op.moved_bytes for op in self.unknown]
        if self.moved_bytes is None or None in uncounted:
            return None if self.unknown else 1.0
        return 1 - sum(filter(None, uncounted)) / self.moved_bytes if self.moved_bytes else 1.0

    def __str__(self) -> str:
        if not self.unknown:
            return f"100.0% of {plural(self.ops, 'operator')}"
        moved = self.moved_fraction
        # Rounded down, so that an operator without a formula never leaves 100 %.
        share = "" if moved is None else f"which move {floor(1000 * moved) / 1000:.1%} of the bytes, "
        return f"{self.counted:,} of {plural(self.ops, 'operator')}, {share}an unknown share of the work"


@dataclass(frozen=True)
class Profile(Result, kind="profile", schema=2):
    """The costs of every call of a run. Rows are calls of the forward, in the order they began.

    Attributes:
        model: The type of the model.
        name: The name of the model on the command line; None if it was run from Python.
        inputs: The inputs of the model, as text.
        convention: The convention of MACs, FLOPs and MAdds.
        how: The kind of tensors of the run, and why.
        environment: The machine and the software of the measurements; empty if there are none.
        timing: The method of the times; None: not measured.
        energy: The method of the energies; None: not measured.
        memory: The method of the measured memory; None: not measured.
        sampling: The method of the load; None: not sampled.
        unavailable: The reason why a requested measurement was not made, by its name.
        timeline: The bytes that are live while each operator runs; None in files of an older microtome.
        gradients: Whether torch saved tensors for a backward; None in files of an older microtome.
        aliases: Further paths of modules, such as those of shared ones, each with the path in addresses.
    """

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
    aliases: dict[str, str] = field(default_factory=dict)
    name: str | None = None

    @property
    def title(self) -> str:
        """The name of the model, or else its type."""
        return self.name or self.model

    @property
    def heading(self) -> str:
        """The title and the inputs."""
        return f"{self.title} on {merge_repeats(self.inputs)}"

    @property
    def total(self) -> Row:
        """The whole model."""
        return self.calls[0]

    @property
    def peak_bytes(self) -> int:
        """The peak of live bytes, as computed, over the forward and, if it was counted, the backward."""
        return max(self.total.peak_bytes, *(self.timeline.live_bytes if self.timeline else ()), 0)

    def __getitem__(self, address: str) -> Any:
        """Return the row at an address, or, for a glob, a tuple of the rows whose path matches."""
        if not isinstance(address, str) or not is_glob(address) or address in self._by_address:
            return self._by_address[find_address(address, self._by_address, self.aliases)]
        pattern = glob(address)
        aliased = {path for alias, path in self.aliases.items() if pattern.fullmatch(alias)}
        rows = tuple(row for row in self.calls if pattern.fullmatch(row.path) or row.path in aliased)
        if not rows:
            raise path_not_found(address, self._by_address)
        return rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def children(self, row: Row) -> tuple[Row, ...]:
        """Return the direct children of a call."""
        return self._children.get(row.address, ())

    @property
    def tree(self) -> dict[str, Any]:
        """The rows as a tree: `row`, and `children`, each a tree of its own."""

        def subtree(row: Row) -> dict[str, Any]:
            return {"row": row, "children": [subtree(child) for child in self.children(row)]}

        return subtree(self.total)

    def rows(self, *, depth: int | None = None, granularity: int | None = None) -> tuple[Row, ...]:
        """Return rows that sum to the total; without arguments, all rows.

        Args:
            depth: A row for each call at this depth, and for each leaf above it.
            granularity: A row for each highest call of at most this height: 1 gives the leaves.

        What calls above those run themselves, between their children, has rows of its own, whose type ends in `(own)`.
        """
        if depth is not None and granularity is not None:
            raise BadQuery("expected depth or granularity, got both")
        if depth is None and granularity is None:
            return self.calls
        name, level, least = ("depth", depth, 0) if depth is not None else ("granularity", granularity, 1)
        if not isinstance(level, int) or level < least:
            raise BadQuery(f"expected {name} of {least} or more, got {level!r}")
        return tuple(self._cover(self.total, depth, granularity))

    def _cover(self, row: Row, depth: int | None, granularity: int | None) -> Iterator[Row]:
        deep = depth is not None and row.depth >= depth
        low = granularity is not None and row.height <= granularity
        if deep or low or row.height == 1:
            yield row
            return
        if (own := self.own_row(row)) is not None:
            yield own
        for child in self.children(row):
            yield from self._cover(child, depth, granularity)

    def own_row(self, row: Row) -> Row | None:
        """Return the row of a call without the calls inside it, with `(own)` in its type; None if it costs nothing.

        What it receives and returns is that of the whole call, and of its operators it is not known.
        """
        if not any(getattr(row.own, name) for name in AMOUNTS):
            return None
        whole = [name for name, metric in METRICS.items() if metric.adds_up != "sum" and metric.requires]
        own = {name: None for name in ("load", *whole) if hasattr(row, name)} | {"spreads": {}} | asdict(row.own)
        own["peak_bytes"] = self.own_peak(row)
        # Further calls of a child share the parameters of its first call. Tied siblings may share more than the whole.
        inside = {child.path: child.shared_params for child in reversed(self.children(row))}
        shared = max(row.shared_params - sum(inside.values()), 0)
        own |= {"inputs": (), "outputs": (), "output_bytes": None}
        return replace(row, type=f"{row.type} (own)", shared_params=shared, **own)  # what was measured is of the whole

    def own_peak(self, row: Row) -> int | None:
        """Return the peak of live bytes over the operators that a call runs itself; None: it runs none, or unknown."""
        return row.peak_bytes if row.height == 1 else self._own_peaks.get(row.address)

    @cached_property
    def _own_peaks(self) -> dict[str, int]:
        """The peak of live bytes over the operators of the forward that each call runs itself, by its address."""
        peaks: dict[str, int] = {}
        if self.timeline is not None:
            owners = self.timeline.calls[: self.timeline.forward]
            for call, live in zip(owners, self.timeline.live_bytes, strict=False):
                address = self.calls[call].address
                peaks[address] = max(live, peaks.get(address, 0))
        return peaks

    def own_cost(self, metric: Metric, row: Row) -> Any:
        """Return the cost of a call without the calls inside it; None: unknown, or it has one only with them."""
        return self.own_peak(row) if metric.name == "peak_bytes" else metric.own(row)

    def by_type(self) -> dict[str, Group]:
        """Return the costs of modules by their type, without the calls inside them, the most FLOPs first."""
        types = group((row.type, row.own) for row in self.calls)
        return _most_flops_first(Group(name=name, runs=len(own), **add(own)) for name, own in types.items())

    def by_module(self) -> dict[str, Group]:
        """Return the costs of each module over all its calls, with the calls inside them, by its path."""
        paths = group((row.path, row) for row in self.calls)
        outermost = {path: [row for row in rows if not self._is_inside(row, path)] for path, rows in paths.items()}
        return {path: Group(name=path, runs=len(paths[path]), **add(rows)) for path, rows in outermost.items()}

    def _is_inside(self, row: Row, path: str) -> bool:
        """Whether a call is inside another call of the module at this path, since modules may be recursive."""
        above = row.parent
        while above is not None:
            if self._by_address[above].path == path:
                return True
            above = self._by_address[above].parent
        return False

    def by_op(self) -> dict[str, Group]:
        """Return the costs of the operators of the forward, by their names, the most FLOPs first."""
        names = group((op.name, op) for row in self.calls for op in row.ops)
        return _most_flops_first(
            Group(name=name, runs=sum(op.runs for op in ops), **add(ops)) for name, ops in names.items()
        )

    def top(self, n: int = 10, *, by: str = "flops") -> tuple[Row, ...]:
        """Return the calls that cost the most without the calls inside them; unknown costs are left out.

        Args:
            by: A metric, by any name that `show(sort=...)` accepts. Calls that contain calls are left out if they have
                it only with these, such as `"output"`.

        Raises:
            BadQuery: The metric is unknown of every call.
        """
        names = {name: (*metric.titles, *metric.share_titles) for name, metric in METRICS.items()}
        if not isinstance(n, int) or n < 1:
            hint = f": pass a metric as by={n!r}" if isinstance(n, str) else ""
            raise BadQuery(f"expected n of 1 or more, got {n!r}{hint}")
        metric = METRICS[find_choice(by, names, "metric", " to order by")]
        costs = [(row, cost) for row in self.calls if isinstance(cost := self.own_cost(metric, row), int | float)]
        if not costs:
            raise BadQuery(f"no call has a value of {by!r} to order by: {why_unknown(self, metric)}")
        return Ranking(metric, sorted(costs, key=lambda pair: -pair[1])[:n])

    def show(
        self,
        *,
        depth: int | None = None,
        granularity: int | None = None,
        by: Literal["module", "type", "op"] | None = None,
        sort: str | None = None,
        top: int | None = None,
        columns: Iterable[str] = (),
        expand: bool = False,
    ) -> None:
        """Print the table; in a notebook, display it.

        Args:
            depth: Show the tree down to this depth.
            granularity: Show calls of this height, not the tree; 1 for single layers.
            by: Group by module, by type of module, or by operator.
            sort: Order by this column, the largest first.
            top: Show only the first rows.
            columns: Show these columns, such as `["type", "params", "time"]`.
            expand: Show each of several identical blocks, not their sum.
        """
        if sum(choice is not None for choice in (depth, granularity, by)) > 1:
            raise BadQuery("expected one of depth, granularity and by, got several")
        selected: dict[str, Any] = {"depth": depth, "granularity": granularity, "by": by, "expand": expand}
        render("formats.show", self, "row_selection.RowSelection", sort=sort, top=top, columns=columns, **selected)

    def layer_metrics(self, depth: int | None = None) -> list[dict[str, Any]]:
        """Return the metrics of each layer under the names that tracr uses; None where not measured.

        Args:
            depth: Layers are the calls at this depth and the leaves above it; None: all leaves.
        """
        if depth is not None and depth < 0:
            raise BadQuery(f"expected depth of 0 or more, got {depth!r}")
        layers = [
            row for row in self if row.depth == depth or (row.height == 1 and (depth is None or row.depth < depth))
        ]
        return [tracr_record(index, row) for index, row in enumerate(layers)]

    def diff(self, after: Profile | File) -> Diff:
        """Compare this profile with a later one, or with the one in a file."""
        from microtome.results.diff import diff

        return diff(self, after)

    def to_perfetto(self, file: File | None = None) -> str:
        """Export Chrome trace JSON, which https://ui.perfetto.dev opens, to the file or as text.

        Calls are nested slices; memory, load and power are counters. Needs times: `measure=["time"]`.
        """
        return write(render("trace_events.profile.perfetto", self), file)

    def to_speedscope(self, file: File | None = None) -> str:
        """Export JSON that https://www.speedscope.app opens, to the file or as text. Needs times."""
        return write(render("trace_events.profile.speedscope", self), file)

    def to_pandas(self) -> Any:
        """Return the rows as a DataFrame. Needs pandas."""
        try:
            import pandas as pd
        except ImportError as error:
            raise NotInstalled("pandas is not installed: pip install 'microtome[pandas]'") from error
        return pd.DataFrame([flat(row) for row in self.calls])

    def to_html(self, file: File | None = None, *, cuts: Any = None, compare: Any = None) -> str:
        """Export one self-contained HTML page, to the file or as text.

        Args:
            cuts: The result of `microtome.cuts`, or its file: with times, the page then compares cuts.
            compare: Another profile, or its file, to show beside this one.
        """
        return write(render("html.document.html", self, cuts, compare), file)

    def as_dict(self) -> dict[str, Any]:
        data = super().as_dict()
        coverage = self.coverage
        names = ("fraction", "work", "moved_fraction")
        data["coverage"] |= {name: getattr(coverage, name) for name in names}
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return super().from_dict(data | {"calls": upgrade_calls(data["calls"])})

    def check(self) -> None:
        if self.timeline is not None:
            self.timeline.check(len(self.calls))

    def __repr__(self) -> str:
        return f"<Profile of {self.model}, {plural(len(self.calls), 'call')}, {self.convention} convention>"

    @cached_property
    def _by_address(self) -> dict[str, Row]:
        return {row.address: row for row in self.calls}

    @cached_property
    def _children(self) -> dict[str, tuple[Row, ...]]:
        children = group((row.parent, row) for row in self.calls if row.parent is not None)
        return {address: tuple(rows) for address, rows in children.items()}


def _most_flops_first(groups: Iterable[Group]) -> dict[str, Group]:
    return {one.name: one for one in sorted(groups, key=lambda one: -(one.flops or 0))}
