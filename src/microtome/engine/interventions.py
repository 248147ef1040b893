"""Interventions, which change a run, and how a session applies them to the calls of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from microtome.engine.call import Call, ModuleEntry
from microtome.engine.module_calls import AnyCall
from microtome.engine.module_index import ModuleIndex
from microtome.engine.probes import AnyOp, Where
from microtome.engine.selectors import Selector, select
from microtome.errors import SessionError


@dataclass(frozen=True)
class Replace:
    """Replaces the output of the selected calls by the return value of `by(call, output)`."""

    at: Selector
    by: Callable[[Call, Any], Any]


@dataclass(frozen=True)
class ReplaceInputs:
    """Replaces the arguments of the selected calls by the tuple and dict that `by(call, args, kwargs)` returns."""

    at: Selector
    by: Callable[[Call, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Skip:
    """Skips the forward of the selected modules, which return `output(call, args, kwargs)` instead.

    Attributes:
        when: Called at each selected call, after all probes, to decide whether to skip it; None: always.
    """

    at: Selector
    output: Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]
    when: Callable[[Call], bool] | None = None


@dataclass(frozen=True)
class Stop:
    """Ends the run at the exit of the first selected call, by raising `Stopped` through the model.

    Attributes:
        when: Called at the exit of each selected call, after all probes, to decide whether to stop; None: always.
    """

    at: Selector
    when: Callable[[Call], bool] | None = None


@dataclass(frozen=True)
class ReplaceOp:
    """Replaces operators: `by(where, func, args, kwargs)` returns the output, or NotImplemented to run the operator."""

    by: Callable[[Where, AnyOp, tuple[Any, ...], dict[str, Any]], Any]


Intervention = Replace | ReplaceInputs | Skip | Stop | ReplaceOp


class Stopped(BaseException):
    """A `Stop` was reached. Not an `Exception`, so that a model that catches those does not swallow it.

    Attributes:
        call: The call at whose exit the run stopped.
        output: The output of that call.
    """

    def __init__(self, call: Call, output: Any) -> None:
        super().__init__(f"stopped at the exit of {call.address!r}")
        self.call = call
        self.output = output


@dataclass
class CallInterventions:
    """The interventions on the calls of one module."""

    skip: Skip | None = None
    input_replacements: list[ReplaceInputs] = field(default_factory=list)
    output_replacements: list[Replace] = field(default_factory=list)
    stop: Stop | None = None

    def add(self, intervention: Replace | ReplaceInputs | Skip | Stop) -> None:
        match intervention:
            case Skip():
                self.skip = intervention
            case Replace():
                self.output_replacements.append(intervention)
            case ReplaceInputs():
                self.input_replacements.append(intervention)
            case Stop():
                self.stop = intervention

    def stops(self, call: Call) -> bool:
        return self.stop is not None and (self.stop.when is None or bool(_invoke(self.stop.when, call)))

    def replace_inputs(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for replacement in self.input_replacements:
            args, kwargs = _invoke(replacement.by, call, args, kwargs)
        return args, kwargs

    def run(self, call: Call, inner: AnyCall, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip the call, and replace its output; its arguments have been replaced already."""
        skip = self.skip
        if skip is None or (skip.when is not None and not _invoke(skip.when, call)):
            output = inner(module, *args, **kwargs)
        else:
            output = _invoke(skip.output, call, args, kwargs)
        for replacement in self.output_replacements:
            output = _invoke(replacement.by, call, output)
        return output


def _invoke(callback: Callable[..., Any], call: Call, *args: Any) -> Any:
    try:
        return callback(call, *args)
    except Exception as error:
        error.add_note(f"raised by an intervention at {call.address!r}")
        raise


class InterventionTable:
    """The interventions of a session by module, found again when the modules of the model have changed."""

    def __init__(self, interventions: Iterable[Intervention]) -> None:
        self._interventions = [one for one in interventions if not isinstance(one, ReplaceOp)]
        self._version = -1
        self.by_entry: dict[ModuleEntry, CallInterventions] = {}

    def update(self, model: nn.Module, index: ModuleIndex) -> None:
        """Select the modules of each intervention, unless the index is as it was."""
        if not self._interventions or self._version == index.version:
            return
        self.by_entry.clear()
        for intervention in self._interventions:
            for module in select(model, intervention.at).values():
                entry = index.by_id.get(id(module)) or index.find(module, model)
                if entry is None:
                    raise SessionError(
                        f"an intervention is at a {type(module).__name__} that `at` leaves out: add it there"
                    )
                self.by_entry.setdefault(entry, CallInterventions()).add(intervention)
        self._version = index.version
