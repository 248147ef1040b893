"""Record the outputs of modules over many runs, in bounded memory or on disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from os import PathLike
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from microtome.addresses import Addresses
from microtome.capture.async_copy import AsyncCopier, check_copyable, is_new_memory
from microtome.capture.attention.attention import ATTENTION, AttentionProbe, no_attention_error
from microtome.capture.attention.fused_weights import Heads, Rows, WeightRange
from microtome.capture.open_runs import OpenRuns
from microtome.capture.options import Reduce, check_options, describe_selector, find_reduction, make_manifest
from microtome.capture.store import DiskStore, MemoryStore, Series, Stats, TensorStore
from microtome.capture.store.base import Keep
from microtome.capture.targets import Targets, model_never_ran
from microtome.engine import Call, Probe, Selector, Session, Stopped, tensors_in
from microtome.engine.composite_ops import is_meta_or_fake
from microtome.engine.pytree import named_tensors
from microtome.engine.selectors import CallSelection, check_model
from microtome.engine.signals import SignalSafe
from microtome.errors import BadQuery, SessionError, Unsupported
from microtome.results.base import render
from microtome.units import parse_size, plural


class RecordTotals(NamedTuple):
    """The amount recorded so far.

    Attributes:
        runs: Runs of the model that ended.
        records: The tensors that they recorded.
        nbytes: Their bytes, including dropped ones.
        seconds: Time since the block began.
    """

    runs: int
    records: int
    nbytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds else 0.0


class ActivationRecorder(SignalSafe[Any], Mapping[str, Series]):
    """Records the outputs of selected modules during a `with` block; a mapping from addresses to series afterwards.

    Args:
        at: The modules: a path, a glob, a module type, … or several; `"path#1"` for one call of a module.
        attention: Record attention weights after the softmax instead of outputs.
        layers: With `attention`, the modules whose attention is recorded; None: all.
        heads: With `attention`, the heads.
        rows: With `attention`, the queries: indices, `"cls"` or `"last"`.
        reduce: Applied to each output: `"mean"` over positions, `"max"`, `"cls"`, `"last"`, or a function.
        to: A folder to write to; None: record in memory.
        limit: The maximum bytes to keep, or a string such as `"4GB"`. In memory the oldest are dropped first, and each
            tensor counts 1 KiB more than its values; on disk the rest is counted and not kept.
        last: In memory, keep this many of each name.
        append: Continue the recording in the folder.
        keep: `"stats"` keeps running statistics only.
        histogram: `(bins, low, high)`, to count values too.
        progress: Called with the `RecordTotals` after each run.

    >>> import torch
    >>> import microtome as mt
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with mt.record(net, "1", reduce="mean") as rec:
    ...     for _ in range(4):
    ...         _ = net(torch.ones(5, 2))
    >>> rec["1"].cat().shape, rec.stats("1").count
    (torch.Size([20, 3]), 60)
    """

    def __init__(
        self,
        model: nn.Module,
        at: Selector | None = None,
        *,
        attention: bool = False,
        layers: Selector | None = None,
        heads: Heads = None,
        rows: Rows = None,
        reduce: Reduce | None = None,
        to: str | PathLike[str] | None = None,
        limit: int | str | None = None,
        last: int | None = None,
        append: bool = False,
        keep: Keep = "all",
        histogram: tuple[int, float, float] | None = None,
        progress: Callable[[RecordTotals], None] | None = None,
    ) -> None:
        self._model = check_model(model)
        check_options(
            selects_modules=at is not None,
            attention=attention,
            selects_attention=any(option is not None for option in (layers, heads, rows)),
            to=to,
            append=append,
            last=last,
            histogram=histogram,
            progress=progress,
        )
        self._targets = None if at is None else Targets(model, at)
        if self._targets is not None:
            if self._targets.owners:
                raise BadQuery("expected modules to record, got operators: mt.extract captures these")
            self._probe: Probe = _OutputProbe(self, self._targets)
            selectors = list(map(describe_selector, self._targets.selectors))
        else:
            calls, weights = None if layers is None else CallSelection(model, layers), WeightRange(heads, rows)
            self._probe = AttentionProbe(self.add, at=calls, weights=weights)
            selectors = [f"attention of {describe_selector(layers)}, {weights}"]
        self._reduce = None if reduce is None else find_reduction(reduce)
        self._is_own_reduction = isinstance(reduce, str)
        self._progress = progress
        limit_bytes = None if limit is None else parse_size(limit)
        limits: dict[str, Any] = {"limit_bytes": limit_bytes, "keep": keep, "histogram": histogram}
        self._store: TensorStore = MemoryStore(last=last, **limits)
        # The folder is created when the block begins, so that an unused recorder leaves none.
        manifest = make_manifest(model, selectors, reduce)
        self._other_names: dict[str, str] = manifest["other_names"]
        self._cached_addresses = Addresses((), self._other_names)
        self._open_store = None if to is None else partial(DiskStore, to, manifest, append=append, **limits)
        self._copier = AsyncCopier(self._store)
        self._folder = to
        self._open_runs = OpenRuns(itertools.count())
        self._session: Session | None = None
        self._is_done = False
        self._runs = self._records = self._nbytes = self._dropped_before = 0
        self._added: dict[int, list[int]] = {}  # the bytes of each tensor of the open runs
        self._seconds = 0.0
        self._began: float | None = None
        self._failed = False

    # -- recording -----------------------------------------------------------------------------------------------------

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    def _set_up(self) -> Self:
        if self._began is not None:
            raise SessionError("a recorder is used in one `with` block: create another, with append=True for a folder")
        composite = () if self._targets is not None else ATTENTION
        fast_paths = self._targets is not None and self._targets.fast_paths
        session = Session(self._model, [self._probe, _RunProbe(self)], composite=composite, fast_paths=fast_paths)
        if self._open_store is not None:
            self._store = self._open_store()
            self._copier = AsyncCopier(self._store)
            self._open_runs = OpenRuns(itertools.count(self._store.next_run))
            self._dropped_before = self._store.dropped
        try:
            self._session = session.__enter__()
        except BaseException:
            self._store.close()
            self._store.discard_empty()
            raise
        self._began = perf_counter()
        return self

    def _tear_down(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        assert self._began is not None
        session, self._session = self._session, None
        probe, self._probe = self._probe, Probe()  # break the reference cycle, which holds the recorded tensors
        try:
            session.__exit__(kind, error, trace)
        finally:
            try:
                self._copier.drain()
            finally:
                self._is_done = True
                self._seconds = perf_counter() - self._began
                self._store.close()
                self._store.discard_empty()
        if error is None and (self._runs or not self._failed):
            self._check_recorded(probe)

    def _check_recorded(self, probe: Probe) -> None:
        """Raise if a selected module never ran."""
        if not self._runs:
            raise model_never_ran(self._model, "nothing was recorded")
        if isinstance(probe, _OutputProbe):
            probe.check()
        elif isinstance(probe, AttentionProbe) and not self._records:
            raise no_attention_error(self._model, probe)

    def add(self, name: str, value: Any) -> bool:
        """Record the tensors in a value; return whether there are any."""
        added = False
        for place, tensor in named_tensors(value):
            if is_meta_or_fake(tensor):  # a run on tensors without values, which finds where to stop
                continue
            added = True
            check_copyable(name, tensor)
            result = tensor.detach()
            if self._reduce is not None:
                with torch.no_grad():
                    result = self._reduce(result)
                if not isinstance(result, Tensor):
                    raise BadQuery(f"expected reduce to return a tensor, got a {type(result).__name__} at {name!r}")
            run = self._open_runs.current
            fresh = self._is_own_reduction and is_new_memory(result, tensor)
            self._copier.add(name + place, result, fresh=fresh, run=run)
            if run is None:
                self._count([result.nbytes])
            else:
                self._added.setdefault(run, []).append(result.nbytes)
        return added

    def _count(self, sizes: list[int]) -> None:
        self._records += len(sizes)
        self._nbytes += sum(sizes)

    def _begin_run(self) -> None:
        self._copier.call_after_pending(partial(self._store.begin_run, self._open_runs.begin()))

    def _end_run(self, *, complete: bool = True) -> None:
        """End a run of the model; what it recorded is discarded if it is not complete."""
        run = self._open_runs.end()
        if run is None:
            return
        sizes = self._added.pop(run, [])
        if complete:
            self._count(sizes)
        self._copier.call_after_pending(partial(self._store.end_run, run, complete=complete))

    def _count_run(self) -> None:
        self._runs += 1
        if self._progress is not None:
            self._progress(self.totals)

    @property
    def totals(self) -> RecordTotals:
        """The amount recorded so far."""
        seconds = self._seconds or (0.0 if self._began is None else perf_counter() - self._began)
        return RecordTotals(self._runs, self._records, self._nbytes, seconds)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def _addresses(self) -> Addresses:
        """The addresses recorded so far."""
        self._copier.drain()
        names = self._store.names
        if len(names) != len(self._cached_addresses):
            self._cached_addresses = Addresses(names, self._other_names)
        return self._cached_addresses

    def __getitem__(self, name: str) -> Series:
        self._check_began()
        return self._store.series(self._addresses.resolve(name) or name)  # the store raises if it has no such name

    def _check_began(self) -> None:
        if self._began is None:
            raise SessionError(
                "nothing was recorded: the recorder was not entered: use `with mt.record(…) as rec:`, and call the "
                "model inside the block"
            )

    def get(self, name: str, default: Any = None) -> Any:
        """Return the series of that name, or the default."""
        return self[name] if name in self else default  # noqa: SIM401  this is `get`

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._addresses.matches(name))

    def stats(self, name: str) -> Stats:
        """Return count, mean, variance, minimum and maximum of all values of that name."""
        self._check_began()
        return self._store.stats(self._addresses.resolve(name) or name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._addresses.names)

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def dropped(self) -> int:
        """The number of records of the block that the limit kept out or removed."""
        return self._store.dropped - self._dropped_before

    def _repr_html_(self) -> str:
        html: str = render("notebook.recorder", self)
        return html

    def __repr__(self) -> str:
        where = "memory" if self._folder is None else str(self._folder)
        if self._began is None:
            return f"<ActivationRecorder of {type(self._model).__name__}, not entered: use it in a `with` block>"
        counts = f"{plural(self._records, 'record')} in {plural(self._runs, 'run')}"
        return f"<ActivationRecorder of {counts}, in {where}>"


#: `with mt.record(…) as rec`.
record = ActivationRecorder


class _OutputProbe(Probe):
    """Adds the outputs of selected calls to a recorder."""

    def __init__(self, recorder: ActivationRecorder, targets: Targets) -> None:
        self._recorder = recorder
        self._targets = targets
        self._last_calls: dict[str, int] = {}  # the index of the last call of each module that ran, by path
        self._recorded_paths: set[str] = set()

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call.phase == "forward":
            self._last_calls[call.path] = max(call.index, self._last_calls.get(call.path, 0))
            if call in self._targets.calls and self._add(call, output):
                self._recorded_paths.add(call.path)

    def check(self) -> None:
        """Raise if a selected module never ran."""
        self._targets.check(self._recorded_paths, self._last_calls, {})

    def _add(self, call: Call, output: Any) -> bool:
        try:
            return self._recorder.add(self._targets.address(call), output)
        except BadQuery:
            if self._recorder._is_done:  # another thread has closed the recorder
                return False
            raise
        except Unsupported as error:
            error.add_note(f"in the output of {call.address!r}")
            raise


class _RunProbe(Probe):
    """Begins and ends the runs of a recorder."""

    def __init__(self, recorder: ActivationRecorder) -> None:
        self._recorder = recorder

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.parent is None:
            self._recorder._begin_run()

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call.parent is None:
            self._recorder._end_run()
            if call.phase == "forward" and not any(map(is_meta_or_fake, tensors_in(output))):
                self._recorder._count_run()

    def fail(self, call: Call, error: BaseException) -> None:
        if call.parent is None:
            self._recorder._end_run(complete=isinstance(error, Stopped))  # else no whole run of the model
            self._recorder._failed = True
