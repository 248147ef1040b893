"""Running a tail as if its head ran elsewhere, and turning what fails then into refusals."""

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
    """Turn an error of the model's own code in a tail into a refusal: the whole model ran on the same example."""
    try:
        yield
    except MicrotomeError:
        raise
    except Exception as error:
        raise Unsupported(
            f"the {type(model).__name__} cannot be cut at {cut.at!r}: its code raised {describe_error(error)} in the "
            "tail, not in a run of the whole model. It needs what crosses in no tensor: cut before that is made, "
            "or after its use"
        ) from error


@signal_safe
def hide_attributes(model: nn.Module, kept: dict[str, set[str]]) -> Iterator[None]:
    """Have modules lack what they keep of their runs in the head: where the head runs elsewhere, the tail has none."""
    modules = [(model.get_submodule(path), names) for path, names in kept.items()]
    try:
        with without_attributes(modules):
            yield
    except AttributeError as error:
        for module, names in modules:
            if error.obj is module and error.name in names:
                raise Unsupported(
                    f"the tail reads {error.name!r} of a {type(module).__name__}, which a call in the head sets: it "
                    "would not be there, or be that of another run. Have the call return it, or cut before the call"
                ) from error
        raise
