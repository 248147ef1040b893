"""Recording over time: what modules give in many runs, kept in bounded memory or on disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from os import PathLike
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from microtome.addresses import Addresses
from microtome.capture.async_copy import AsyncCopier
from microtome.capture.attention.attention import ATTENTION, AttentionProbe, nothing_seen
from microtome.capture.attention.fused_weights import Heads, Rows, WeightRange
from microtome.capture.manifest import manifest_of, text_of
from microtome.capture.options import check_kinds, check_wish
from microtome.capture.reduction import Reduce, reduction
from microtome.capture.run_numbers import RunNumbers
from microtome.capture.store import DiskStore, MemoryStore, Recording, Series, Stats, open_folder
from microtome.capture.targets import Targets, never_ran
from microtome.engine import Call, Probe, Selector, Session, tensors_in
from microtome.engine.call_selection import CallSelection
from microtome.engine.composite_ops import is_stand_in
from microtome.engine.pytree import places_in
from microtome.engine.selectors import check_model
from microtome.engine.signals import Uninterrupted
from microtome.engine.torch_internals import storage_id
from microtome.errors import BadQuery, SessionError, Unsupported
from microtome.results.rendering import render
from microtome.units import parse_size

Keep = Literal["all", "stats"]


class RecordTotals(NamedTuple):
    """How much has been recorded.

    Attributes:
        runs: How many times the model ran.
        records: How many tensors were recorded.
        nbytes: Their bytes, those of dropped ones included.
        seconds: Since the block began.
    """

    runs: int
    records: int
    nbytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds else 0.0


class Recorder(Uninterrupted[Any], Mapping[str, Series]):
    """Records what selected modules return while the `with` block runs; afterwards it holds that, by address.

    Args:
        at: Which modules: a path, a glob, a module type, … or several; `"path#1"` for one call of a module.
        attention: Record attention weights after the softmax, in place of outputs.
        layers: With `attention`, which modules' attention; None: all.
        heads: With `attention`, which heads.
        rows: With `attention`, which queries: indices, `"cls"` or `"last"`.
        reduce: What is kept of each output: `"mean"` over positions, `"max"`, `"cls"`, `"last"`, or a function of it.
        to: A folder to write to; None: keep it in memory.
        limit: The most bytes to keep, or a text such as `"4GB"`. In memory the oldest go first; on disk the rest is
            counted and not kept.
        last: In memory, keep the last so many of each.
        append: Go on with what the folder holds.
        keep: `"stats"` keeps running statistics alone.
        histogram: `(bins, low, high)`, to count values too.
        progress: Told the `RecordTotals` after each run.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with Recorder(net, "1", reduce="mean") as rec:
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
        part = layers is not None or heads is not None or rows is not None
        check_wish(modules=at is not None, attention=attention, part=part, to=to, append=append, last=last)
        check_kinds(last=last, histogram=histogram, progress=progress)
        self._targets = None if at is None else Targets(model, at)
        if self._targets is not None and self._targets.owners:
            raise BadQuery("operators inside calls are for mt.extract: record modules")
        self._reduce = None if reduce is None else reduction(reduce)
        self._own_reduction = isinstance(reduce, str)
        self._progress = progress
        limits: dict[str, Any] = {"limit_bytes": None if limit is None else parse_size(limit)}
        if self._targets is not None:
            self._probe: Probe = _Outputs(self)
            selectors = [text_of(one) for one in self._targets.selectors]
        else:
            calls, chosen = None if layers is None else CallSelection(model, layers), WeightRange(heads, rows)
            self._probe = AttentionProbe(self.add, at=calls, heads=chosen.heads, rows=chosen.rows)
            selectors = [f"attention of {text_of(layers)}, {chosen}"]
        limits |= {"keep": keep, "histogram": histogram}
        self._store: MemoryStore | DiskStore = MemoryStore(last=last, **limits)
        # A folder is opened when the block begins, so that a recorder that is not used leaves none.
        manifest = manifest_of(model, selectors, reduce)
        self._others: dict[str, str] = manifest["other_names"]
        self._known = Addresses((), self._others)
        self._open = None if to is None else partial(DiskStore, to, manifest, append=append, **limits)
        self._copier = AsyncCopier(self._store.add)
        self._folder = to
        self._numbers = RunNumbers(itertools.count())
        self._session: Session | None = None
        self._read: Recording | None = None
        self._is_done = False
        self._runs = self._records = self._nbytes = 0
        self._seconds = 0.0
        self._began: float | None = None
        self._ran: dict[str, int] = {}
        self._gave: dict[str, None] = {}
        self._failed = False

    # -- while it records ----------------------------------------------------------------------------------------------

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    def _set_up(self) -> Self:
        if self._began is not None:
            raise SessionError("a recorder records in one `with` block: make a new one, with append=True for a folder")
        whole = () if self._targets is not None else ATTENTION
        fast_paths = self._targets is not None and self._targets.fast_paths
        session = Session(self._model, [self._probe, _Runs(self)], whole=whole, fast_paths=fast_paths)
        if self._open is not None:
            self._store = self._open()
            self._copier = AsyncCopier(self._store.add)
            self._numbers = RunNumbers(itertools.count(self._store.next_run))
        try:
            self._session = session.__enter__()
        except BaseException:
            self._store.close()
            raise
        self._began = perf_counter()
        return self

    def _tear_down(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        assert self._began is not None
        session, self._session = self._session, None
        probe, self._probe = self._probe, Probe()  # the others hold this, and it what was recorded
        try:
            session.__exit__(kind, error, trace)
        finally:
            try:
                self._copier.drain()
            finally:
                self._is_done = True
                self._seconds = perf_counter() - self._began
                self._store.close()
        if error is None and (self._runs or not self._failed):
            self._check(probe)

    def _check(self, probe: Probe) -> None:
        """Raise where something that was selected never ran."""
        if not self._runs:
            raise never_ran(self._model, "nothing was recorded")
        if self._targets is not None:
            self._targets.check(self._gave, self._ran, {})
        elif not self._records:
            assert isinstance(probe, AttentionProbe)
            raise nothing_seen(self._model, probe)

    def add(self, name: str, value: Any) -> bool:
        """Record the tensors of a value, and say whether there are any."""
        added = False
        for place, tensor in places_in(value):
            if is_stand_in(tensor):  # a run without values, by somebody who looks ahead
                continue
            added = True
            if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                raise Unsupported(
                    f"{name!r} ran while a CUDA graph was being captured, which has no values yet and which copies to "
                    "the machine's memory would break: record the model outside of the capture, as Python runs it"
                )
            if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
                raise Unsupported(f"{name!r} gives a tensor that is sparse, nested or quantised: extract it instead")
            kept = tensor.detach()
            if self._reduce is not None:
                with torch.no_grad():
                    kept = self._reduce(kept)
                if not isinstance(kept, Tensor):
                    raise BadQuery(f"reduce gives a tensor, and gave a {type(kept).__name__} at {name!r}")
            self._records += 1
            self._nbytes += kept.nbytes
            fresh = self._own_reduction and _is_fresh(kept, tensor)
            self._copier.add(name + place, kept, fresh=fresh, run=self._numbers.current)
        return added

    def begin_run(self) -> None:
        """Note that a run of the model begins."""
        self._numbers.begin()
        if isinstance(self._store, DiskStore):
            self._copier.after_these(self._store.begin_run)

    def end_run(self) -> None:
        """Note that a run of the model has ended, by an exception or not."""
        self._numbers.end()
        if isinstance(self._store, DiskStore):
            self._copier.after_these(self._store.end_run)

    def ran(self) -> None:
        """The model ran once."""
        self._runs += 1
        if self._progress is not None:
            self._progress(self.totals)

    @property
    def totals(self) -> RecordTotals:
        """How much has been recorded so far."""
        now = self._seconds or (0.0 if self._began is None else perf_counter() - self._began)
        return RecordTotals(self._runs, self._records, self._nbytes, now)

    # -- what was recorded ---------------------------------------------------------------------------------------------

    @property
    def _there(self) -> Addresses:
        """What there is so far."""
        self._copier.drain()
        names = self._store.names
        if len(names) != len(self._known):
            self._known = Addresses(names, self._others)
        return self._known

    def __getitem__(self, name: str) -> Series:
        address = self._there.one(name) or name  # which the stores say that they do not have
        if isinstance(self._store, MemoryStore):
            return self._store.series(address)
        if self._read is None or not self._is_done:
            if not self._is_done:
                self._store.flush()
            self._read = open_folder(self._store.folder)
        return self._read[name]

    def get(self, name: str, default: Any = None) -> Any:
        """What is there under that name, or the default."""
        return self[name] if name in self else default  # noqa: SIM401  this is `get`

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._there.find(name))

    def stats(self, name: str) -> Stats:
        """Count, mean, variance, least and most of all values of that name."""
        return self._store.stats(self._there.one(name) or name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._there.spelled)

    def __len__(self) -> int:
        return len(self._there)

    @property
    def dropped(self) -> int:
        """How many records were not kept, or no longer are, because of the limit."""
        return self._store.dropped

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        html: str = render("notebook.recorder", self)
        return html

    def __repr__(self) -> str:
        where = "memory" if self._folder is None else str(self._folder)
        return f"<Recorder of {self._records} records in {self._runs} runs, in {where}>"


#: `with mt.record(…) as rec`.
record = Recorder


class _Outputs(Probe):
    def __init__(self, recorder: Recorder) -> None:
        assert recorder._targets is not None
        self._targets = recorder._targets
        self._recorder = recorder

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call.phase == "forward":
            self._recorder._ran[call.path] = max(call.index, self._recorder._ran.get(call.path, 0))
            if call in self._targets.calls and self._add(call, output):
                self._recorder._gave[call.path] = None

    def _add(self, call: Call, output: Any) -> bool:
        try:
            return self._recorder.add(self._targets.address(call), output)
        except BadQuery:
            if self._recorder._is_done:  # closed in another thread meanwhile
                return False
            raise
        except Unsupported as error:
            error.add_note(f"in what {call.address!r} gave")
            raise


class _Runs(Probe):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.parent is None:
            self._recorder.begin_run()

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call.parent is None:
            self._recorder.end_run()
            if call.phase == "forward" and not any(map(is_stand_in, tensors_in(output))):
                self._recorder.ran()

    def fail(self, call: Call, error: BaseException) -> None:
        if call.parent is None:
            self._recorder.end_run()
            self._recorder._failed = True


def _is_fresh(kept: Tensor, tensor: Tensor) -> bool:
    """Whether what we computed lies in memory of its own, which holds nothing else."""
    if kept.layout is not torch.strided or tensor.layout is not torch.strided:
        return False
    memory = kept.untyped_storage()
    return storage_id(kept) != storage_id(tensor) and memory.nbytes() == kept.nbytes
