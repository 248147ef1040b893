"""Mutated actions of a training run: `python -m tests.remote.training_fuzz --actions 5000`.

Whatever a client sends, the server answers with a result or an error and lives on, holds nothing when the client is
gone, and has the weights of whole steps. The mutated steps skip the optimizer, so that its weights stay as they were.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from typing import Any

import grpc
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import microtome as mt
from microtome.remote import protocol
from microtome.remote.server import Server, serve
from microtome.remote.training.backend import APPLY, ATTACH, BACKWARD, FORWARD, encode_labels
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.gradients import FACTS
from tests.remote.fuzz import deeply, mutated
from tests.remote.proxy import until

AT = "1"
X, LABELS, RUN = torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([0, 1, 2, 3]), "f" * 32
#: What may be wrong with an action.
CHANGES = (
    "boundary",
    "bytes",
    "labels",
    "labels_bytes",
    "has_loss",
    "step",
    "number",
    "forward",
    "kind",
    "at",
    "steps",
)
NUMBERS = (0, 1, 2, 2**31, 2**32 - 1)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))).train()


class TrainingFuzzer:
    """Sends steps of a run, of which one field is changed.

    Attributes:
        outcomes: How many actions were answered with a result, or an error of each kind.
        unnamed: The messages of errors of no kind.
    """

    def __init__(self, server: Server, seed: int) -> None:
        self._dice = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.unnamed: Counter[str] = Counter()
        self._server = server
        boundary = mt.split(build(), X, at=AT, grad=True)[0](X)
        self._sent = boundary.to_bytes()
        self._gradient = Boundary(AT, boundary.fingerprint, {"0": torch.ones(())}, dict(FACTS)).to_bytes()
        self._labels = encode_labels((LABELS,))

    def run(self, count: int) -> None:
        with grpc.insecure_channel(self._server.address) as channel:
            stream = channel.stream_stream(
                protocol.METHODS["Stream"].path, response_deserializer=protocol.Reply.FromString
            )
            while count > 0:
                requests = self._make_step()
                count -= len(requests)
                try:
                    for reply in stream(iter(requests), timeout=120):
                        self._count(reply)
                except grpc.RpcError as error:  # a message that is none ends its stream
                    self.outcomes[error.code().name] += 1

    def _count(self, reply: Any) -> None:
        kind = protocol.KINDS[reply.error.kind] if reply.HasField("error") else "result"
        self.outcomes[kind] += 1
        if kind == "UNKNOWN":
            self.unnamed[reply.error.message[:200]] += 1

    def _make_step(self) -> list[bytes]:
        """An attachment, a forward with its backward and the end of the step, of which one has a change."""
        step = self._server.served.training.step or 0  # type: ignore[union-attr]
        labelled = self._sent + self._labels
        actions: list[tuple[dict[str, Any], bytes]] = [
            ({"kind": ATTACH, "run": RUN, "at": AT, "steps": [step]}, b""),
            ({"kind": FORWARD, "has_loss": True, "labels_bytes": len(self._labels)}, labelled),
            ({"kind": BACKWARD, "number": 1, "forward": 0}, self._gradient),
            ({"kind": APPLY, "number": 2, "skips": True}, b""),
        ]
        changed, change = self._dice.randrange(4), self._dice.choice(CHANGES)
        return [
            self._encode({"step": step} | fields, payload, change if index == changed else "")
            for index, (fields, payload) in enumerate(actions)
        ]

    def _encode(self, fields: dict[str, Any], payload: bytes, change: str) -> bytes:
        dice = self._dice
        if change == "boundary" and payload:
            whole = self._sent if payload.startswith(self._sent) else payload
            payload = deeply(whole, dice) + payload[len(whole) :]
        elif change == "bytes":
            payload = mutated(payload, dice)
        elif change == "labels" and "labels_bytes" in fields:
            labels = deeply(self._labels, dice)
            payload, fields["labels_bytes"] = self._sent + labels, len(labels)
        elif change in ("step", "labels_bytes"):
            fields[change] = dice.choice((*NUMBERS, 2**63, 2**64 - 1))
        elif change in ("number", "forward"):
            fields[change] = dice.choice(NUMBERS)
        elif change == "kind":
            fields["kind"] = dice.choice((ATTACH, FORWARD, BACKWARD, 7))
        elif change == "has_loss":
            fields["has_loss"] = not fields.get("has_loss", False)
        elif change == "at":
            fields["at"] = dice.choice(("", "0", "2", "nothing", "x" * 5000))
        elif change == "steps":
            fields["steps"] = [dice.choice((*NUMBERS, 2**64 - 1)) for _ in range(dice.choice((0, 1, 1000)))]
        request = protocol.Request(id=str(dice.random()), train=protocol.TrainAction(**fields))
        return protocol.with_payload(request, payload)


def fuzz(count: int, seed: int = 0) -> TrainingFuzzer:
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with serve(
        model,
        X,
        listen="127.0.0.1:0",
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        loss=cross_entropy,
        train_memory=1 << 20,
        max_message="1MB",
    ) as server:
        fuzzer = TrainingFuzzer(server, seed)
        fuzzer.run(count)
        run = server.served.training
        assert run is not None
        until(lambda: run._owner is None, 30)
        assert run.nbytes == 0
        assert server.failure is None
        assert run.step
        assert run.at == AT
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    return fuzzer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--actions", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = fuzz(options.actions, options.seed)
    sys.stdout.write(f"{dict(found.outcomes)}\n{found.unnamed.most_common(20)}\n")
    sys.exit(1 if found.unnamed else 0)
