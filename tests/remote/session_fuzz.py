"""Mutated steps of sessions: `python -m tests.remote.session_fuzz --steps 5000`.

Whatever a client sends as a step, the server answers with an output or an error and lives on; a session of another
client goes on as if nothing had been sent.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from typing import Any

import grpc
import torch

import microtome as mt
from microtome.engine.pytree import as_state
from microtome.remote import protocol
from microtome.remote.server import Server, serve
from microtome.remote.step_codec import DeltaCodec, encode_edits, encode_split, encode_states, split_header
from microtome.split.boundary.boundary import Boundary
from tests.remote.fuzz import another_header, deeply, mutated
from tests.split.test_sessions import EXAMPLE, STEPS, Memory, Model

AT = "layers.1"


class StepFuzzer:
    """Sends sessions of two steps, of which one field is changed.

    Attributes:
        outcomes: How many steps were answered with an output, or an error of each kind.
        unexpected: The messages of errors that blame the model.
    """

    def __init__(self, server: Server, model: Model, seed: int) -> None:
        self._server = server
        self._dice = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.unexpected: Counter[str] = Counter()
        self._number = 0
        stages = mt.split(model, EXAMPLE, at=AT)
        self._split = encode_split(stages.describe())
        with as_state(stages[0].spec.state_classes):
            self._states = encode_states([Memory(4)])
        self._boundaries: list[bytes] = []
        session = stages.session()
        run_stage = session._sequence.run_stage

        def keep(stage: Any, boundary: Boundary, state: Any) -> Any:
            self._boundaries.append(boundary.to_bytes())
            return run_stage(stage, boundary, state)

        session._sequence.run_stage = keep  # type: ignore[method-assign]
        output = session(STEPS[0], memory=Memory(4))
        session(STEPS[1], memory=output["memory"])
        self._edits = [b"", encode_edits([[]])]

    def run(self, count: int) -> None:
        with grpc.insecure_channel(self._server.address) as channel:
            stream = channel.stream_stream(protocol.METHODS["Stream"].path, response_deserializer=None)
            while count > 0:
                requests = [request for _ in range(10) for request in self._make_session()]
                count -= len(requests)
                for data in stream(iter(requests), timeout=120):
                    reply = protocol.Reply.FromString(data)
                    kind = protocol.KINDS[reply.error.kind] if reply.HasField("error") else "output"
                    self.outcomes[kind] += 1
                    if kind in ("MODEL_FAILED", "UNKNOWN"):
                        self.unexpected[reply.error.message[:200]] += 1

    def _make_session(self) -> list[bytes]:
        """Two steps, with a field of one of them changed."""
        self._number += 1
        codec = DeltaCodec()
        changed = self._dice.randrange(2), self._dice.choice(("split", "state", "header", "raw", "message", "number"))
        messages = []
        for step in range(2):
            kind = changed[1] if changed[0] == step else ""
            data = deeply(self._boundaries[step], self._dice) if kind == "header" else self._boundaries[step]
            header, rest = split_header(data)
            fields = {"split": self._split if not step else b"", "header": header}
            fields["state"] = self._edits[step] if step else self._states
            if kind in ("split", "state") and fields[kind]:
                fields[kind] = self._change_json(fields[kind])
            encoded = {name: codec.compress(name, value) for name, value in fields.items() if value}
            if kind == "raw":
                name = self._dice.choice(list(encoded))
                encoded[name] = mutated(encoded[name], self._dice)
            number = step if kind != "number" else self._dice.choice((0, 1, 2, 2**31))
            message = protocol.Step(session=str(self._number), number=number, **encoded)
            request = protocol.Request(id=f"{self._number}.{step}", step=message)
            data = protocol.with_payload(request, rest)
            messages.append(data)
        return messages

    def _change_json(self, data: bytes) -> bytes:
        try:
            for _ in range(self._dice.choice((1, 1, 2, 3))):
                value = another_header({"all": json.loads(data)}, self._dice)
                data = json.dumps(value.get("all")).encode()
        except (ValueError, RecursionError):  # it holds itself
            return b"[[[[]]]]"
        return data


@torch.no_grad()
def fuzz(count: int, seed: int = 0) -> StepFuzzer:
    torch.manual_seed(0)
    model = Model().eval()
    with serve(model, EXAMPLE, listen="127.0.0.1:0", sessions=1000) as server:
        with mt.connect(model, EXAMPLE, server.address, at=AT, fallback=None) as remote, remote.session() as session:
            output = session(STEPS[0], memory=Memory(4))
            fuzzer = StepFuzzer(server, model, seed)
            fuzzer.run(count)
            expected = model(STEPS[0], Memory(4))
            output = session(STEPS[1], memory=output["memory"])
            assert output["out"].equal(model(STEPS[1], expected["memory"])["out"])
        assert server.failure is None
    return fuzzer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = fuzz(options.steps, options.seed)
    sys.stdout.write(f"{dict(found.outcomes)}\n{json.dumps(found.unexpected.most_common(20), indent=1)}\n")
