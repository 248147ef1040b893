"""Dispatching the events of a session to the methods of its probes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from microtome.engine.autograd_owners import AutogradOwners
from microtome.engine.call import Call
from microtome.engine.composite_ops import CompositeOp, Function, empty_output, is_meta_or_fake, run_on_meta
from microtome.engine.function_mode import FunctionMode, hide_modes
from microtome.engine.module_calls import AnyCall
from microtome.engine.op_mode import OpMode
from microtome.engine.probes import Probe, Where
from microtome.engine.pytree import tensors_in
from microtome.engine.threads import Threads
from microtome.engine.torch_internals import current_graph_task, next_sequence_number
from microtome.errors import MicrotomeError, ProbeError

_Methods = list[Callable[..., None]]
_CALL_EVENTS = ("enter", "exit", "fail", "enter_backward", "exit_backward")


class ProbeMethods(NamedTuple):
    """The methods that the probes of a session override, by event."""

    enter: _Methods
    exit: _Methods
    fail: _Methods
    op_begins: _Methods
    op: _Methods
    read: _Methods
    backward_moves: _Methods
    enter_backward: _Methods
    exit_backward: _Methods

    @classmethod
    def collect(cls, probes: Iterable[Probe], *, skip_root: bool) -> Self:
        """Collect the methods of probes, without those inherited from `Probe`.

        Args:
            skip_root: Do not call them for the root, which a session always tracks since its call is the run.
        """
        methods: dict[str, _Methods] = {}
        for name in cls._fields:
            overriding = [probe for probe in probes if getattr(type(probe), name) is not getattr(Probe, name)]
            methods[name] = [getattr(probe, name) for probe in overriding]
            if skip_root and name in _CALL_EVENTS:
                methods[name] = list(map(_except_root, methods[name]))
        return cls(**methods)

    @property
    def observe_ops(self) -> bool:
        return bool(self.op or self.op_begins)

    @property
    def observe_backward(self) -> bool:
        return bool(self.enter_backward or self.exit_backward or self.backward_moves)

    def notify_move(self, call: Call | None) -> None:
        """Notify `backward_moves`."""
        if call is not None:
            notify(self.backward_moves, "the backward", call)
            return
        for method in self.backward_moves:
            method(None)


def _except_root(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def call_method(call: Call, *args: Any) -> None:
        if call.path:
            method(call, *args)

    return call_method


def notify(methods: Iterable[Callable[..., None]], event: str, call: Call, *args: Any) -> None:
    """Call the method of every probe; then raise the first error, if any."""
    first: MicrotomeError | None = None
    for method in methods:
        try:
            method(call, *args)
        except MicrotomeError as error:  # its message is complete
            first = first or error
        except RecursionError:  # the model's own calls may be what is too deep
            raise
        except Exception as error:  # noqa: BLE001  whatever a probe raises, the user must learn at which call
            name = getattr(method, "__qualname__", repr(method))
            message = f"{name} raised {type(error).__name__} at {event} of {call.address!r}: {error}"
            wrapped = ProbeError(message, call.address)
            wrapped.__cause__ = error
            first = first or wrapped
    if first is not None:
        raise first


class OpDispatcher:
    """Dispatches operators to the probes of a session, with the context in which they run.

    Args:
        replacements: Called before each operator; each may return an output in its place.
        composite: Functions of torch that are reported as one operator.
    """

    def __init__(
        self,
        threads: Threads,
        owners: AutogradOwners | None,
        methods: ProbeMethods,
        replacements: Sequence[Callable[..., Any]],
        composite: Collection[Function],
    ) -> None:
        self._threads = threads
        self._owners = owners
        self._methods = methods
        self._replacements = replacements
        self._composite = composite
        self._functions: FunctionMode | None = None
        self._last = Where(None, "forward")

    def open(self, stack: ExitStack) -> None:
        """Activate the modes until the exit stack closes."""
        ops = stack.enter_context(OpMode(self._where, self._methods.op_begins, self._methods.op, self._replacements))
        if self._composite:
            stack.callback(setattr, self, "_functions", None)
            stack.enter_context(hide_modes())
            functions = FunctionMode(self._composite, partial(self._run_composite, ops), self._notify_read)
            self._functions = stack.enter_context(functions)

    def wrap_backward(self, run_backward: AnyCall) -> AnyCall:
        """Observe functions in a backward too: functions of torch that run one disable our mode inside them."""
        if not self._composite:
            return run_backward

        def run_observed(*args: Any, **kwargs: Any) -> Any:
            with self._functions or nullcontext():
                return run_backward(*args, **kwargs)

        return run_observed

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
        outer = self._threads.opener.run
        if outer is not None and outer.task == -1:  # a backward that a forward runs is part of it
            return Where(outer.open[-1], outer.phase, function, autocast, part_of=composite)
        owner = None if self._owners is None else self._owners.current()
        if torch.is_grad_enabled():  # autograd turns it off: a node recomputes a forward, as checkpoints do
            return Where(owner, "recompute", function, autocast)
        return Where(owner, "backward", part_of=composite)

    def _notify_read(self, tensor: Tensor) -> None:
        for method in self._methods.read:
            method(self._where(), tensor)

    def _run_composite(self, ops: OpMode, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function and report it as one operator, unless it ran none."""
        if ops.silent:
            return func(*args, **kwargs)
        where = self._where()
        for method in self._methods.op_begins:
            method(where, func, args, kwargs)
        composite = CompositeOp(func, next_sequence_number())
        ops.silent, ops.has_run = True, False
        on_meta = any(map(is_meta_or_fake, tensors_in((args, kwargs))))
        stop: BaseException | None = None
        try:
            output = run_on_meta(func, args, kwargs) if on_meta else func(*args, **kwargs)
        except BaseException as error:  # that by which a checkpoint stops is private
            if where.phase != "recompute" or not ops.has_run:
                raise
            # A checkpoint stops once it has what it needs, here as the function saves it: the function has run.
            stop, output = error, empty_output(func, args, kwargs)
        finally:
            ops.silent = False
        composite.end = next_sequence_number()
        if composite.end > composite.start:
            self._threads.current().composites.append(composite)
        for method in self._methods.op if ops.has_run else ():
            method(where._replace(composite=composite), func, args, kwargs, output)
        if stop is not None:
            try:
                raise stop
            finally:
                stop = None  # else its traceback would keep this frame, and the tensors of the frames around it, alive
        return output
