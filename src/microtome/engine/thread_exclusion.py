"""Keep other threads from running a model while it holds stand-ins."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import nn

from microtome.engine.session import Session
from microtome.engine.signals import uninterrupted
from microtome.engine.thread_stacks import runs_elsewhere
from microtome.errors import Unsupported

#: How long calls that began before may take to end.
PATIENCE_S = 5.0


@uninterrupted
def exclude_other_threads(model: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
    """Refuse calls of the model in other threads; those that began before the block end before it begins.

    Raises:
        Unsupported: A call that began before does not end.
    """
    with Session(model, fast_paths=True, other_threads="refused") as session:
        deadline = time.monotonic() + PATIENCE_S
        session.lets_finish = True
        while session.lets_finish:
            if not runs_elsewhere(modules):
                session.lets_finish = False
                session.lets_finish = runs_elsewhere(modules)  # one that began in between
            elif time.monotonic() > deadline:
                raise Unsupported(
                    f"expected a model that no other thread runs, got a {type(model).__name__} that is still inside a "
                    f"call in another thread after {PATIENCE_S:g} s: its weights cannot be replaced by stand-ins "
                    "meanwhile; wait for that call to end, or look at a copy of the model"
                )
            else:
                time.sleep(0.001)
        yield
