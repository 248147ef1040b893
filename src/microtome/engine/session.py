"""A session: the time during which microtome looks at a model, or at every module of the process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Container, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from microtome.engine import self_test
from microtome.engine.autograd_owners import AutogradOwners, nodes_of
from microtome.engine.backward import Backward, BackwardProbes, watch_moves
from microtome.engine.call import Call, ModuleEntry, Run
from microtome.engine.composite_ops import CompositeOp, Function, is_meta_or_fake, meta_output, run_on_meta
from microtome.engine.function_mode import FunctionMode, hide_modes
from microtome.engine.interventions import (
    CallInterventions,
    Intervention,
    Replace,
    ReplaceInputs,
    ReplaceOp,
    Skip,
    Stop,
    Stopped,
)
from microtome.engine.module_calls import AnyCall, chain
from microtome.engine.module_index import ModelIndex, ModuleIndex, ProcessIndex
from microtome.engine.op_mode import OpMode
from microtome.engine.probes import Probe, Where, notify, notify_backward_step, overridden_methods
from microtome.engine.pytree import tensors_in
from microtome.engine.selectors import Selector, check_model, select
from microtome.engine.signals import Modes, SignalSafe, deliver_signals, pending_signals
from microtome.engine.thread_stacks import is_in_module_call
from microtome.engine.threads import Thread, Threads
from microtome.engine.torch_internals import current_graph_task, next_sequence_number
from microtome.errors import MicrotomeError, SessionError, Unsupported


class Session(SignalSafe[Any]):
    """Attaches probes and interventions to a model, or to every module of the process, for the time of a `with` block.

    Nothing is added to the model. Sessions nest, on the same model too; each thread has its own stack of calls;
    whatever is raised inside, model and process are afterwards as they were.

    Args:
        model: The model to look at. None: every module that runs in the process, named by the class of its root.
        probes: What looks.
        interventions: What changes the run; needs a model.
        at: Which modules of the model to look at, as a selector; the others run as if there were no session, and but
            for the root, whose call is the run, no stack of calls has them. None: all.
        backward: Whether to know whose backward runs. Probes that watch the backward turn it on by themselves.
        composite: Functions of torch that probes are told of as of one operator, in place of those inside.
        fast_paths: Whether TransformerEncoderLayer and MultiheadAttention may run as one fused operator, as they do
            without a session, and so without the calls inside them.
        other_threads: Calls in other threads than the one that opens the session are `"seen"` and changed like its own;
            or they run `"unseen"` and unchanged, or are `"refused"`, unless the thread works for a call of its own: see
            `Threads.joins`.

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
        backward: bool = False,
        composite: Collection[Function] = (),
        fast_paths: bool = False,
        other_threads: Literal["seen", "unseen", "refused"] = "seen",
    ) -> None:
        self.fast_paths = fast_paths
        self._other_threads = other_threads
        #: Whether a session that refuses calls of other threads admits those inside calls that began before.
        self.admits_running_calls = False
        self.model = None if model is None else check_model(model)
        probes = _as_tuple(probes, "probes", Probe)
        self._interventions = _as_tuple(interventions, "interventions", Replace, ReplaceInputs, Skip, Stop, ReplaceOp)
        self._replace_op = [one.by for one in self._interventions if isinstance(one, ReplaceOp)]
        self.changes_runs = bool(self._interventions)
        self.replaces_inputs = any(isinstance(one, ReplaceInputs) for one in self._interventions)
        if self.changes_runs and model is None:
            raise SessionError("interventions need a model: give the one that they are to change")
        if at is not None and self.model is None:
            raise SessionError("`at` chooses what is seen of a model: give one")
        self._index: ModuleIndex = ProcessIndex() if self.model is None else ModelIndex(self.model, at)
        skip_root = at is not None and self.model is not None and "" not in select(self.model, at)
        self._enter = overridden_methods(probes, "enter", skip_root=skip_root)
        self._exit = overridden_methods(probes, "exit", skip_root=skip_root)
        self._fail = overridden_methods(probes, "fail", skip_root=skip_root)
        self._op = overridden_methods(probes, "op")
        self._op_begins = overridden_methods(probes, "op_begins")
        self._read = overridden_methods(probes, "read")
        self._enter_backward = overridden_methods(probes, "enter_backward", skip_root=skip_root)
        self._exit_backward = overridden_methods(probes, "exit_backward", skip_root=skip_root)
        self._backward_moves = overridden_methods(probes, "backward_moves")
        # A function that is shown whole is shown so in its backward too, which a forward may run.
        told = self._enter_backward or self._exit_backward or self._backward_moves
        self._backward = backward or bool(told or composite)
        self._composite = frozenset(composite)
        self._functions: FunctionMode | None = None
        self._last = Where(None, "forward")
        self._open: ExitStack | None = None
        self._changes: dict[ModuleEntry, CallInterventions] = {}
        self._resolved = -1

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    def _set_up(self) -> Self:
        if self._open is not None:
            raise SessionError("this session is already open: use a new one for each `with` that lies inside another")
        self_test.CALLS.ensure()
        chain.force_eager()
        self._threads = Threads(everywhere=self._other_threads == "seen")
        self._opener = self._threads.current()
        self._owners = AutogradOwners(self._threads, self._index) if self._backward else None
        self._resolve_interventions()
        with ExitStack() as stack:
            handle = register_module_module_registration_hook(self._index.on_registration)
            stack.callback(handle.remove)
            chain.add(self)
            stack.callback(chain.remove, self)
            stack.push(Modes().restore_after)
            if self._op or self._op_begins or self._replace_op:
                ops = stack.enter_context(OpMode(self._where, self._op_begins, self._op, self._replace_op))
                if self._composite:
                    stack.enter_context(hide_modes())
                    functions = FunctionMode(self._composite, partial(self._run_composite, ops), self._notify_read)
                    self._functions = stack.enter_context(functions)
            stack.push(Modes().restore_after)
            self._open = stack.pop_all()
        return self

    def _tear_down(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is None:
            raise SessionError("this session is not open: enter it with `with`")
        stack, self._open, self._functions = self._open, None, None
        self._last = Where(None, "forward")
        stack.__exit__(kind, error, trace)

    @property
    def is_open(self) -> bool:
        return self._open is not None

    # -- asking --------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Call | None:
        """The innermost call that runs now in this thread: its forward, or in a backward, its backward."""
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
        """Whether this thread is inside a backward. A recomputation is; so is telling of the calls open at its end."""
        return self._open is not None and (
            current_graph_task() != -1 or self._threads.current().notified_call is not None
        )

    def module_of(self, path: str) -> nn.Module:
        """The module at a path or address. A shared module answers to all its names."""
        return self._index.module_of(path)

    def paths_of(self, module: nn.Module) -> tuple[str, ...]:
        """All names of a module, in the order of `named_modules()`; its calls carry the first."""
        return self._index.paths_of(module)

    # -- what the chain of open sessions runs --------------------------------------------------------------------------

    @property
    def ignored(self) -> Container[int]:
        """The ids of modules that are not looked at."""
        return self._index.ignored

    def wrap_call(self, inner: AnyCall | None) -> AnyCall:
        """The way of a module call through this session, and then through the inner one or to the module itself.

        All the cost per call is here, so it is one flat function. In a session that feeds, the change of the output is
        not made here: see `wrap_output`.
        """
        known, ignored, local = self._index.by_id, self._index.ignored, self._threads.local
        owners, changes = self._owners, self._changes
        owned = owners is not None
        enter, exit_, replaces_inputs = self._enter, self._exit, self.replaces_inputs
        call_inner, all_threads = inner or _run_module, self._other_threads == "seen"

        def call_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if pending_signals:
                deliver_signals()
            key = id(module)
            entry = known.get(key) or (None if key in ignored else self._find_entry(module))
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
            # Numbers of autograd's nodes say whose they are: without owners, nobody asks.
            call = Call(
                entry, index, stack[-1] if stack else run.base, run.phase, next_sequence_number() if owned else 0
            )
            try:
                stack.append(call)
                if owned:
                    run.calls.append(call)
                try:
                    change = changes.get(entry) if changes else None
                    if change is not None:
                        args, kwargs = change.replace_inputs(call, args, kwargs)
                    if enter and self._open is not None:
                        notify(enter, "enter", call, args, kwargs)
                    if change is not None:
                        if replaces_inputs:
                            thread.pending_change = module, call, change
                            output = call_inner(module, *args, **kwargs)
                        else:
                            output = change.run(call, call_inner, module, args, kwargs)
                    elif inner is None:
                        output = module._call_impl(*args, **kwargs)  # `onward`, without its frame
                    else:
                        output = inner(module, *args, **kwargs)
                except BaseException as error:
                    self._notify_failure(call, error)
                    raise
                if exit_ and self._open is not None:
                    notify(exit_, "exit", call, args, kwargs, output)
            finally:
                if stack and stack[-1] is call:  # or a signal came before it was there
                    stack.pop()
                if owned:
                    call._end = end = next_sequence_number()
                    if end == run.start and run.calls:
                        del run.calls[-1]  # no node was made so far; a loop without grad must not grow
                if not stack:
                    thread.end(run)
            if owners is not None and end > call._start and (thread.tags or not stack):
                (owners.tag_nodes if thread.tags else owners.tag_outputs)(run, output)
                call._end = next_sequence_number()  # asking a view for its grad_fn may have made one
            if change is not None and change.stops(call):
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
        """Run a call of another thread than the session's: as one of the session's, or past it."""
        if self._threads.is_worker_call(entry):
            with self._threads.join():
                return self.wrap_call(inner)(module, *args, **kwargs)
        finishes = self.admits_running_calls and is_in_module_call(sys._getframe())
        if self._other_threads == "refused" and self._open is not None and not finishes:
            raise Unsupported(
                f"{entry.path or 'the model'} ({type(module).__name__}) is called in thread "
                f"{threading.current_thread().name!r} while another thread runs the model on stand-ins for its "
                "weights, as mt.trace, mt.profile and mt.split do: call it when that has ended"
            )
        with self._threads.exclude_thread():
            return (inner or _run_module)(module, *args, **kwargs)

    def wrap_output(self, inner: AnyCall | None) -> AnyCall:
        """The innermost part of the way through a session that feeds, where outputs are changed.

        The other part is outermost, so that all other sessions are inside the change of the arguments and outside that
        of the output, and see both.
        """
        threads, call_inner = self._threads, inner or _run_module

        def change_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            thread = threads.current()
            pending_change = thread.pending_change
            if pending_change is None or pending_change[0] is not module:
                return call_inner(module, *args, **kwargs)
            thread.pending_change = None
            _, call, change = pending_change
            return change.run(call, call_inner, module, args, kwargs)

        return change_module

    def wrap_backward(self, inner: AnyCall) -> AnyCall:
        """The way of a backward through this session; node by node only if probes are told or it makes a graph."""
        owners, threads = self._owners, self._threads
        if self._other_threads != "seen":
            inner = threads.watch_backward(inner)
        if owners is None:
            return self._wrap_functions(inner)
        probes = BackwardProbes(
            enter=partial(notify, self._enter_backward, "enter_backward"),
            leave=partial(notify, self._exit_backward, "exit_backward"),
            are_open=lambda: self.is_open,
        )
        told = bool(self._enter_backward or self._exit_backward)
        moves = self._backward_moves

        def run_backward(roots: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            self_test.BACKWARD.ensure()
            create_graph = bool(args[2])  # roots, grad_tensors, retain_graph, create_graph, inputs, ...
            roots = tuple(roots)
            nodes = [node for root in roots for node in (nodes_of(root) if isinstance(root, Tensor) else [root.node])]
            with ExitStack() as stack:
                stack.enter_context(owners.attribute_backward(nodes))
                if told or create_graph:
                    backward = Backward(owners, threads, probes, create_graph=create_graph)
                    stack.enter_context(backward.watch(nodes))
                if moves:
                    stack.enter_context(watch_moves(owners, nodes, partial(notify_backward_step, moves)))
                return inner(roots, *args, **kwargs)

        return self._wrap_functions(run_backward)

    def _wrap_functions(self, run_backward: AnyCall) -> AnyCall:
        """Show functions in a backward too: torch's own functions that run one hide what runs inside from our mode."""
        if not self._composite:
            return run_backward

        def run_shown(*args: Any, **kwargs: Any) -> Any:
            with self._functions or nullcontext():
                return run_backward(*args, **kwargs)

        return run_shown

    def _where(self) -> Where:
        task = current_graph_task()
        try:
            run = self._threads.local.state.run
        except AttributeError:
            run = self._threads.current().run
        functions = self._functions
        function, autocast = (None, False) if functions is None else (functions.function, functions.autocast)
        if run is not None and run.task == task:
            last, call = self._last, run.open[-1]
            if last.call is not call or last.function is not function or last.autocast is not autocast:
                last = self._last = Where(call, run.phase, function, autocast)
            return last
        if task == -1:
            return Where(None, "forward", function)
        composite = None if self._owners is None else self._owners.composite()
        outer = self._opener.run
        if outer is not None and outer.task == -1:  # a backward that a forward runs is part of it
            return Where(outer.open[-1], outer.phase, function, autocast, part_of=composite)
        owner = None if self._owners is None else self._owners.current()
        if torch.is_grad_enabled():  # autograd turns it off: this is code that a node runs again, as checkpoints do
            return Where(owner, "recompute", function, autocast)
        return Where(owner, "backward", part_of=composite)

    def _notify_read(self, tensor: Tensor) -> None:
        for method in self._read:
            method(self._where(), tensor)

    def _run_composite(self, ops: OpMode, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function and tell of it as of one operator; of nothing, if it ran none."""
        if ops.silent:
            return func(*args, **kwargs)
        where = self._where()
        for method in self._op_begins:
            method(where, func, args, kwargs)
        composite = CompositeOp(func, next_sequence_number())
        ops.silent, ops.has_run = True, False
        standing = any(map(is_meta_or_fake, tensors_in((args, kwargs))))
        stopped: BaseException | None = None
        try:
            output = run_on_meta(func, args, kwargs) if standing else func(*args, **kwargs)
        except BaseException as error:  # the one that checkpoints stop with is private
            if where.phase != "recompute" or not ops.has_run:
                raise
            # A checkpoint stops when it has what it needs, here when the function keeps that: it has run by then.
            stopped, output = error, meta_output(func, args, kwargs)
        finally:
            ops.silent = False
        composite.end = next_sequence_number()
        if composite.end > composite.start:
            self._threads.current().composites.append(composite)
        for method in self._op if ops.has_run else ():
            method(where._replace(composite=composite), func, args, kwargs, output)
        if stopped is not None:
            raise stopped
        return output

    def _find_entry(self, module: nn.Module) -> ModuleEntry | None:
        chain.force_eager()  # the first call of a model that was compiled while the session was open
        run = self._threads.current().run
        entry = self._index.find(module, None if run is None else run.open[-1].module)
        self._resolve_interventions()
        return entry

    def _begin_run(
        self, thread: Thread, module: nn.Module, entry: ModuleEntry, task: int, inputs: Any
    ) -> tuple[Run, ModuleEntry] | None:
        """Begin a run at an outermost call. Inside a backward it recomputes, and hangs where its original hung."""
        chain.force_eager()
        found = self._index.begin(module, entry)
        self._resolve_interventions()
        if found is None:  # it left the model
            return None
        base, index = None, 0
        if self._owners is not None:
            self._owners.mark_foreign_inputs(thread, inputs)
            if task != -1:
                base, index = self._owners.recomputed_call(found)
        thread.run = run = Run(thread.key, thread.run, task, base, next_sequence_number())
        run.counts[found] = index
        return run, found

    def _notify_failure(self, call: Call, error: BaseException) -> None:
        self._threads.current().pending_change = None
        if self._open is None:
            return
        try:
            notify(self._fail, "fail", call, error)
        except MicrotomeError as second:  # what the model raised goes first
            error.add_note(str(second))

    def _resolve_interventions(self) -> None:
        """Find what is to be changed; again when the model has become another."""
        if self.model is None or not self._interventions or self._resolved == self._index.version:
            return
        self._changes.clear()
        for intervention in self._interventions:
            if isinstance(intervention, ReplaceOp):
                continue
            for module in select(self.model, intervention.at).values():
                entry = self._index.by_id.get(id(module)) or self._index.find(module, self.model)
                if entry is None:
                    raise SessionError(
                        f"an intervention is at a {type(module).__name__} that `at` leaves out: add it there"
                    )
                self._changes.setdefault(entry, CallInterventions()).add(intervention)
        self._resolved = self._index.version


def _run_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _as_tuple(given: Any, what: str, *kinds: type) -> tuple[Any, ...]:
    items = tuple(given) if isinstance(given, Iterable) else (given,)
    for item in items:
        if not isinstance(item, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise SessionError(f"{what} are a list of {names}, got {type(item).__name__}")
    return items
