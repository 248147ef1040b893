"""Chains of servers, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

import microtome as mt
from microtome.remote.client import Remote
from microtome.remote.server import Server

CUTS = ["stem", "layer1"]


def serving(model: Any, inputs: Any = None, **options: Any) -> Server:
    return mt.serve(model, inputs, listen="127.0.0.1:0", **options)


def connected(model: Any, x: Any, *servers: Any, **options: Any) -> Remote:
    return mt.connect(model, x, servers=servers, **{"fallback": None, "codec": "raw", "at": CUTS, **options})


@contextmanager
def servers_of(model: nn.Module, x: Tensor, number: int, **options: Any) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(model, x, **options)) for _ in range(number)]
