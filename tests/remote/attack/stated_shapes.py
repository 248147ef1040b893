"""State shapes that were not sent: views of stride 0, placeholders, empty tensors, tensors that compress to nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from uuid import uuid4

import torch

import microtome as mt
from microtome import zoo
from microtome.errors import RemoteError
from microtome.remote import protocol
from microtome.remote.connection import Connection
from microtome.remote.message import Message
from microtome.remote.security import Security
from microtome.split.boundary.boundary import Boundary
from tests.remote.attack.harness import MAX_MESSAGE, Outcome, Tally, Target, attack_server

#: Rows that are stated: the example has two.
ROWS = 400_000


def run(seconds: float) -> Outcome:
    return attack_server("stated_shapes", seconds)


def attack(target: Target) -> Tally:
    """Send each lie in turn, at two cuts."""
    torch.set_num_threads(1)
    model, x = zoo.build("tiny-resnet")
    with torch.no_grad():
        honest = [mt.split(model, x, at=at)[0](x) for at in ("layer1", "stem")]
    tally = Tally()
    with closing(Connection(target.address, Security(token=target.token))) as connection:
        for lie, boundary in cycle([(lie, one) for lie in LIES for one in honest]):
            if target.is_over():
                break
            for forged, codec in lie(boundary):
                message = Message(protocol.Request(id=uuid4().hex, codec=codec))
                message.encode(forged)
                tally.tried += 1
                connection.submit(message)
                try:
                    message.reply.result(60.0)
                except RemoteError as error:
                    tally.held += error.kind in ("BAD_REQUEST", "TOO_LARGE")
    return tally


def _views(boundary: Boundary) -> Iterator[tuple[Boundary, str]]:
    """Each tensor that crosses as a view of itself with many rows."""
    for at, call in enumerate(boundary.facts["calls"]):
        for place, item in enumerate(call["outputs"]):
            if item["kind"] == "sent":
                facts = copy.deepcopy(boundary.facts)
                shape = [ROWS, *boundary.tensors[item["name"]].shape[1:]]
                view = {"kind": "storage_view", "shape": shape, "strides": [0] * len(shape), "offset": 0}
                facts["calls"][at]["outputs"][place] = {**view, "name": item["name"]}
                yield replace(boundary, facts=facts), "raw"


def _placeholders(boundary: Boundary, rows: int = ROWS) -> Iterator[tuple[Boundary, str]]:
    """Inputs and outputs that were not sent, with many rows; what the calls were given says the same."""
    facts = copy.deepcopy(boundary.facts)
    for item in (*facts["inputs"]["tensors"], *(item for call in facts["calls"] for item in call["outputs"])):
        if item["kind"] == "placeholder":
            item["shape"][0] = rows
    for call in facts["calls"]:
        for argument in call["signature"]["tensors"]:
            argument[1] = rows
    yield replace(boundary, facts=facts), "raw"


def _empty(boundary: Boundary) -> Iterator[tuple[Boundary, str]]:
    tensors = {name: torch.empty(0, ROWS << 8) for name in boundary.tensors}
    yield replace(boundary, tensors=tensors), "raw"


def _zeros(boundary: Boundary) -> Iterator[tuple[Boundary, str]]:
    """Three times as many rows as a request may have, in a few kilobytes."""
    rows = 3 * MAX_MESSAGE // sum(tensor[:1].nbytes for tensor in boundary.tensors.values())
    tensors = {name: torch.zeros(rows, *tensor.shape[1:]) for name, tensor in boundary.tensors.items()}
    for stated, _ in _placeholders(boundary, rows):
        yield replace(stated, tensors=tensors), "zstd"


LIES: tuple[Callable[[Boundary], Iterator[tuple[Boundary, str]]], ...] = (_views, _placeholders, _empty, _zeros)
