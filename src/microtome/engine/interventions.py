"""Apply the interventions of a session to the calls of a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from microtome.engine.call import Call
from microtome.engine.module_calls import AnyCall
from microtome.engine.probes import Replace, ReplaceInputs, Skip, Stop


@dataclass
class CallInterventions:
    """All that is to be done to the calls of one module."""

    skip: Skip | None = None
    input_replacements: list[ReplaceInputs] = field(default_factory=list)
    replaces: list[Replace] = field(default_factory=list)
    stop: Stop | None = None

    def add(self, intervention: Replace | ReplaceInputs | Skip | Stop) -> None:
        match intervention:
            case Skip():
                self.skip = intervention
            case Replace():
                self.replaces.append(intervention)
            case ReplaceInputs():
                self.input_replacements.append(intervention)
            case Stop():
                self.stop = intervention

    def stops(self, call: Call) -> bool:
        return self.stop is not None and (self.stop.when is None or bool(_do(self.stop.when, call)))

    def replace_inputs(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that come in the place of these."""
        for replacement in self.input_replacements:
            args, kwargs = _do(replacement.by, call, args, kwargs)
        return args, kwargs

    def run(self, call: Call, inner: AnyCall, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the replacement of the output; the arguments were replaced before."""
        skip = self.skip
        if skip is None or (skip.when is not None and not _do(skip.when, call)):
            output = inner(module, *args, **kwargs)
        else:
            output = _do(skip.output, call, args, kwargs)
        for replace in self.replaces:
            output = _do(replace.by, call, output)
        return output


def _do(change: Callable[..., Any], call: Call, *details: Any) -> Any:
    try:
        return change(call, *details)
    except Exception as error:
        error.add_note(f"raised by an intervention at {call.address!r}")
        raise
