"""A session: observing and changing the calls of a model, or of every module in the process, in a `with` block."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import ExitStack
from traceback import walk_tb
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from microtome.engine import self_test
from microtome.engine.autograd_owners import AutogradOwners
from microtome.engine.backward import observe_backward
from microtome.engine.call import Call, ModuleEntry, Run
from microtome.engine.composite_ops import Function
from microtome.engine.dispatch import OpDispatcher, ProbeMethods, notify
from microtome.engine.interventions import (
    Intervention,
    InterventionTable,
    Replace,
    ReplaceInputs,
    ReplaceOp,
    Skip,
    Stop,
    Stopped,
)
from microtome.engine.module_calls import AnyCall, chain
from microtome.engine.module_index import ModelIndex, ModuleIndex, ProcessIndex
from microtome.engine.probes import Probe
from microtome.engine.selectors import Selector, check_model, named_modules, select
from microtome.engine.signals import Modes, SignalSafe, deliver_signals, pending_signals, signal_safe
from microtome.engine.thread_stacks import is_in_module_call
from microtome.engine.threads import Thread, Threads
from microtome.engine.torch_internals import CALL, current_graph_task, next_sequence_number
from microtome.errors import MicrotomeError, SessionError, Unsupported

#: The beginnings of notes that name the call in which an exception was raised.
_FAILED_CALL = "in the call ", "in the model itself ", "raised by an intervention at "


@signal_safe
def keep_patched() -> Iterator[None]:
    """Keep `nn.Module` patched between the sessions of the block.

    Each change of the class empties CPython's caches of the attributes of all its subclasses, which costs more than the
    rest of opening and closing a session.
    """
    chain.hold()
    try:
        yield
    finally:
        chain.release()


class Session(SignalSafe[Any]):
    """Attaches probes and interventions to a model, or to every module in the process, in a `with` block.

    Nothing is added to the model. Sessions nest, also on one model; each thread has its own stack of calls; whatever is
    raised inside, model and process are afterwards as they were.

    Args:
        model: The model to observe. None: every module that runs in the process, named by the class of its root.
        probes: Observers of the run.
        interventions: Changes of the run; they need a model.
        at: Selector of the modules to observe; the others run as without a session, and except for the root, whose
            call is the run, they are in no stack of calls. None: all.
        backward: Attribute backwards to calls. By default, if a probe observes operators or the backward. False: a
            forward costs less, `Where.call` is None in a backward, and the backward of calls is not observed.
        composite: Functions of torch that are reported as one operator instead of the operators inside.
        fast_paths: Allow TransformerEncoderLayer and MultiheadAttention to run as one fused operator, as they do
            without a session, and so without the calls inside them.
        other_threads: Calls in other threads than the one that opens the session: `"observe"` and change them like its
            own; `"ignore"` them, so that they run unchanged; or `"refuse"` them. The last two do not apply to threads
            that work for a call of the session, see `Threads.is_worker_call`.

    >>> from torch import nn, ones
    >>> class Show(Probe):
    ...     def enter(self, call, args, kwargs):
    ...         print("enter", repr(call.address), type(call.module).__name__)
    >>> with Session(nn.Sequential(nn.ReLU()), [Show()]) as session:
    ...     _ = session.model(ones(1))
    enter '' Sequential
    enter '0' ReLU
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        probes: Iterable[Probe] = (),
        interventions: Iterable[Intervention] = (),
        *,
        at: Selector | None = None,
        backward: bool | None = None,
        composite: Collection[Function] = (),
        fast_paths: bool = False,
        other_threads: Literal["observe", "ignore", "refuse"] = "observe",
    ) -> None:
        self.fast_paths = fast_paths
        self._other_threads = other_threads
        #: Whether a session that refuses calls of other threads admits those inside calls that began before.
        self.admits_running_calls = False
        self.model = None if model is None else check_model(model)
        probes = _check_types(probes, "probes", Probe)
        interventions = _check_types(interventions, "interventions", Replace, ReplaceInputs, Skip, Stop, ReplaceOp)
        self.changes_runs = bool(interventions)
        self.replaces_inputs = any(isinstance(one, ReplaceInputs) for one in interventions)
        if self.model is None and self.changes_runs:
            raise SessionError("interventions need a model: pass the one to change")
        if self.model is None and at is not None:
            raise SessionError("`at` selects modules of a model: pass one")
        self._index: ModuleIndex = ProcessIndex() if self.model is None else ModelIndex(self.model, at)
        skip_root = at is not None and self.model is not None and "" not in select(self.model, at)
        self._probes = ProbeMethods.collect(probes, skip_root=skip_root)
        self._interventions = InterventionTable(interventions)
        self._replace_op = [one.by for one in interventions if isinstance(one, ReplaceOp)]
        # A composite operator is reported as one in its backward too, which a forward may run.
        is_observed = self._probes.observe_backward or self._probes.observe_ops
        self._backward = bool(composite) or (is_observed if backward is None else backward)
        self._composite = frozenset(composite)
        self._threads = self._make_threads()
        self._ops: OpDispatcher | None = None
        self._open: ExitStack | None = None

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    def _make_threads(self) -> Threads:
        return Threads(everywhere=self._other_threads == "observe")

    def _set_up(self) -> Self:
        if self._open is not None:
            raise SessionError("this session is already open: create one for each `with` block inside another")
        self_test.CALLS.ensure()
        chain.force_eager()
        if not self._threads.is_unused:
            self._threads = self._make_threads()
        self._owners = AutogradOwners(self._threads, self._index) if self._backward else None
        self._update_interventions()
        if self._probes.op or self._probes.op_begins or self._replace_op:
            self._ops = OpDispatcher(self._threads, self._owners, self._probes, self._replace_op, self._composite)
        with ExitStack() as stack:
            handle = register_module_module_registration_hook(self._index.on_registration)
            stack.callback(handle.remove)
            chain.add(self)
            stack.callback(chain.remove, self)
            stack.push(Modes().restore_after)
            if self._ops is not None:
                self._ops.open(stack)
                stack.push(Modes().restore_after)
            self._open = stack.pop_all()
        return self

    def _tear_down(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is None:
            raise SessionError("this session is not open: enter it with `with`")
        stack, self._open, self._ops = self._open, None, None
        stack.__exit__(kind, error, trace)

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def __repr__(self) -> str:
        observed = "the process" if self.model is None else type(self.model).__name__
        return f"<{type(self).__name__} of {observed}, {'open' if self.is_open else 'closed'}>"

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Call | None:
        """The innermost call whose forward or, in a backward, whose backward runs now in this thread."""
        if self._open is None:
            return None
        task, thread = current_graph_task(), self._threads.current()
        if thread.notified_call is not None:
            return thread.notified_call
        if thread.run is not None and thread.run.task == task:
            return thread.run.open[-1]
        return self._owners.current() if self._owners is not None and task != -1 else None

    @property
    def stack(self) -> tuple[Call, ...]:
        """The calls that run now in this thread, outermost first."""
        call = self.current
        return () if call is None else call.stack

    @property
    def is_backward(self) -> bool:
        """Whether this thread runs a backward, or a recomputation or a callback in one."""
        return self._open is not None and (
            current_graph_task() != -1 or self._threads.current().notified_call is not None
        )

    def module_of(self, path: str) -> nn.Module:
        """The module at a path or address; a shared module has several paths."""
        return self._index.module_of(path)

    def paths_of(self, module: nn.Module) -> tuple[str, ...]:
        """All paths of a module, in the order of `named_modules()`; its calls carry the first."""
        return self._index.paths_of(module)

    # -- called by the chain of open sessions --------------------------------------------------------------------------

    @property
    def ignored(self) -> Container[int]:
        """The ids of modules that are not observed."""
        return self._index.ignored

    def wrap_call(self, inner: AnyCall | None) -> AnyCall:
        """Wrap the next inner session, or None for the module itself, in this session's handling of a module call.

        All the cost per call is here, so it is one flat function. In a session that replaces inputs, `wrap_output`
        applies the other interventions.
        """
        entries, ignored, local = self._index.by_id, self._index.ignored, self._threads.local
        owners, interventions = self._owners, self._interventions.by_entry
        has_owners = owners is not None
        enter, exit_, replaces_inputs = self._probes.enter, self._probes.exit, self.replaces_inputs
        call_inner, all_threads = inner or _run_module, self._other_threads == "observe"

        def call_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if pending_signals:
                deliver_signals()
            key = id(module)
            entry = entries.get(key) or (None if key in ignored else self._find_entry(module))
            if entry is None:
                return call_inner(module, *args, **kwargs)
            try:
                thread = local.state
            except AttributeError:
                if not all_threads:
                    return self._call_from_other_thread(inner, entry, module, args, kwargs)
                thread = self._threads.current()
            run = thread.run
            task = current_graph_task()
            if run is None or run.task != task or not run.open:
                began = self._begin_run(thread, module, entry, task, (args, kwargs))
                if began is None:
                    return call_inner(module, *args, **kwargs)
                run, entry = began
            counts, stack = run.counts, run.open
            index = counts.get(entry, 0)
            counts[entry] = index + 1
            # Sequence numbers of autograd nodes identify their call; without owners, they are not needed.
            start = next_sequence_number() if has_owners else 0
            call = Call(entry, index, stack[-1] if stack else run.base, run.phase, start)
            try:
                stack.append(call)
                if has_owners:
                    run.calls.append(call)
                try:
                    intervention = interventions.get(entry) if interventions else None
                    if intervention is not None and intervention.input_replacements:
                        args, kwargs = intervention.replace_inputs(call, args, kwargs)
                    if enter and self._open is not None:
                        notify(enter, "enter", call, args, kwargs)
                    if intervention is not None:
                        if replaces_inputs:
                            thread.pending_intervention = module, call, intervention
                            output = call_inner(module, *args, **kwargs)
                        else:
                            output = intervention.run(call, call_inner, module, args, kwargs)
                    elif inner is None:
                        output = module._call_impl(*args, **kwargs)  # `_run_module`, without its frame
                    else:
                        output = inner(module, *args, **kwargs)
                except BaseException as error:
                    self._notify_failure(call, error)
                    raise
                if exit_ and self._open is not None:
                    notify(exit_, "exit", call, args, kwargs, output)
            finally:
                if stack and stack[-1] is call:  # else a signal came before it was appended
                    stack.pop()
                if has_owners:
                    call._end = end = next_sequence_number()
                    if end == run.start and run.calls:
                        del run.calls[-1]  # no node so far: a loop without grad must not accumulate calls
                if not stack:
                    thread.end(run)
            if owners is not None and end > call._start and (thread.tags or not stack):
                (owners.tag_nodes if thread.tags else owners.tag_outputs)(run, output)
                call._end = next_sequence_number()  # reading the grad_fn of a view may have created a node
            if intervention is not None and intervention.stop is not None and intervention.stops(call):
                raise Stopped(call, output)
            return output

        return call_module

    def _call_from_other_thread(
        self,
        inner: AnyCall | None,
        entry: ModuleEntry,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Observe, ignore or refuse a call in a thread that did not open the session."""
        if self._threads.is_worker_call(entry):
            with self._threads.join():
                return self.wrap_call(inner)(module, *args, **kwargs)
        is_admitted = self.admits_running_calls and is_in_module_call(sys._getframe())
        if self._other_threads == "refuse" and self._open is not None and not is_admitted:
            raise Unsupported(
                f"{entry.path or 'the model'} ({type(module).__name__}) is called in thread "
                f"{threading.current_thread().name!r} while another thread runs the model on substitutes for its "
                "weights, as mt.trace, mt.profile and mt.split do: call it when that has ended"
            )
        with self._threads.exclude_thread():
            return (inner or _run_module)(module, *args, **kwargs)

    def wrap_output(self, inner: AnyCall | None) -> AnyCall:
        """Wrap the innermost part of a session that replaces inputs: it skips calls and replaces outputs.

        `wrap_call` is its outermost part, so that all other sessions run after the arguments are replaced and before
        they receive the output, and observe both.
        """
        threads, call_inner = self._threads, inner or _run_module

        def intervene(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            thread = threads.current()
            pending = thread.pending_intervention
            if pending is None or pending[0] is not module:
                return call_inner(module, *args, **kwargs)
            thread.pending_intervention = None
            _, call, intervention = pending
            return intervention.run(call, call_inner, module, args, kwargs)

        return intervene

    def wrap_backward(self, inner: AnyCall) -> AnyCall:
        """Wrap the function that runs autograd's engine."""
        if self._other_threads != "observe":
            inner = self._threads.watch_backward(inner)
        if self._owners is not None:
            inner = observe_backward(inner, self._owners, self._threads, self._probes, lambda: self.is_open)
        return inner if self._ops is None else self._ops.wrap_backward(inner)

    def _find_entry(self, module: nn.Module) -> ModuleEntry | None:
        chain.force_eager()  # the first call of a model that was compiled while the session was open
        run = self._threads.current().run
        entry = self._index.find(module, None if run is None else run.open[-1].module)
        self._update_interventions()
        return entry

    def _begin_run(
        self, thread: Thread, module: nn.Module, entry: ModuleEntry, task: int, inputs: Any
    ) -> tuple[Run, ModuleEntry] | None:
        """Begin a run at an outermost call: in a backward, a recomputation below the parent of the original call."""
        chain.force_eager()
        current = self._index.begin(module, entry)
        self._update_interventions()
        if current is None:  # it left the model
            return None
        base, index = None, 0
        if self._owners is not None:
            self._owners.mark_foreign_inputs(thread, inputs)
            if task != -1:
                base, index = self._owners.recomputed_call(current)
        thread.run = run = Run(thread.key, thread.run, task, base, next_sequence_number())
        run.counts[current] = index
        return run, current

    def _update_interventions(self) -> None:
        if self.model is not None:
            self._interventions.update(self.model, self._index)

    def _failed_path(self, error: BaseException) -> tuple[str, nn.Module] | None:
        """The innermost module whose call raised, and its path; None if the session observes it."""
        frames = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code is CALL)
        module = next((frame.f_locals["self"] for frame in reversed(list(frames))), None)
        if module is None or id(module) not in self._index.ignored or self.model is None:
            return None
        return next(((path, module) for path, other in named_modules(self.model) if other is module), None)

    def _notify_failure(self, call: Call, error: BaseException) -> None:
        self._threads.current().pending_intervention = None
        if self._open is None:
            return
        if isinstance(error, Exception) and not isinstance(error, MicrotomeError):  # not where a `Stop` ends a run
            _name_failed_call(call, error, self._failed_path(error) if self._index.ignored else None)
        try:
            notify(self._probes.fail, "fail", call, error)
        except MicrotomeError as second:  # the error of the model takes precedence
            error.add_note(str(second))


def _name_failed_call(call: Call, error: Exception, inner: tuple[str, nn.Module] | None) -> None:
    """Add a note with the innermost call, which fails first, to an exception of the model.

    Args:
        inner: A module that failed inside the call, unobserved, and its path.
    """
    if any(note.startswith(_FAILED_CALL) for note in getattr(error, "__notes__", ())):
        return
    address, module = (call.address, call.module) if inner is None else inner
    where = f"the call {address!r}" if address else "the model itself"
    error.add_note(f"in {where} ({type(module).__name__})")
    if isinstance(error, RecursionError):
        error.add_note(
            f"modules are nested {len(call.stack)} deep there, and Python's limit of nested calls is "
            f"{sys.getrecursionlimit()} in a session: raise it with sys.setrecursionlimit before, if the model needs it"
        )


def _run_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _check_types(value: Any, name: str, *types: type) -> tuple[Any, ...]:
    items = tuple(value) if isinstance(value, Iterable) else (value,)
    for item in items:
        if not isinstance(item, types):
            expected = " or ".join(one.__name__ for one in types)
            raise SessionError(f"expected {name} to be a list of {expected}, got {type(item).__name__}")
    return items
