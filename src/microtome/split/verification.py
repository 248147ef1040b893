"""Run a tail as if its head ran in another process, and refuse the cut if the tail fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from microtome.engine.module_state import without_attributes
from microtome.engine.signals import signal_safe
from microtome.errors import MicrotomeError, Unsupported, describe_error
from microtome.results.cuts import Cut


@contextmanager
def refuse_errors(model: nn.Module, cut: Cut) -> Iterator[None]:
    """Turn an error of the model's own code in a tail into a refusal, since the whole model ran on the same example."""
    try:
        yield
    except MicrotomeError:
        raise
    except Exception as error:
        raise Unsupported(
            f"the {type(model).__name__} cannot be cut at {cut.at!r}: its code raised {describe_error(error)} in the "
            "tail, and not in a run of the whole model. It reads state that crosses in no tensor: cut before it is "
            "set, or after it is read"
        ) from error


@signal_safe
def hide_attributes(model: nn.Module, attributes: dict[str, set[str]]) -> Iterator[None]:
    """Remove the attributes that calls of the head set on their modules, which a tail in another process lacks."""
    modules = [(model.get_submodule(path), names) for path, names in attributes.items()]
    try:
        with without_attributes(modules):
            yield
    except AttributeError as error:
        for module, names in modules:
            if error.obj is module and error.name in names:
                raise Unsupported(
                    f"the tail reads attribute {error.name!r} of a {type(module).__name__}, which a call in the head "
                    "sets: in another process it is missing, or of another run. Return it from the call, or cut before "
                    "the call"
                ) from error
        raise
