"""The two sides of a training run do not trust each other: what they send is checked, and changes no weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from microtome.errors import MicrotomeError, RemoteError
from microtome.remote import protocol
from microtome.remote.server import serve
from microtome.remote.training.backend import APPLY, ATTACH, BACKWARD, FORWARD, TrainingBackend
from microtome.remote.training.server_run import TrainingOptions
from microtome.split.boundary.boundary import Boundary
from tests.remote.hostile import HostileTrainer
from tests.remote.test_security import Authority
from tests.remote.training_fuzz import fuzz
from tests.remote.training_process import X, batch_of, build, connect, make_optimizer, train_step

pytestmark = pytest.mark.integration


def changed(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Change all tensors of a reply."""

    def lie(reply: Any) -> Any:
        boundary = Boundary.from_bytes(reply.output)
        tensors = {name: change(tensor) for name, tensor in boundary.tensors.items()}
        return protocol.Reply(id=reply.id, output=replace(boundary, tensors=tensors).to_bytes("zstd"))

    return lie


def with_output(output: bytes) -> Callable[[Any], Any]:
    return lambda reply: protocol.Reply(id=reply.id, output=output)


def with_facts(**facts: Any) -> Callable[[Any], Any]:
    def lie(reply: Any) -> Any:
        boundary = Boundary.from_bytes(reply.output)
        return protocol.Reply(id=reply.id, output=replace(boundary, facts={**boundary.facts, **facts}).to_bytes())

    return lie


def renamed(reply: Any) -> Any:
    boundary = Boundary.from_bytes(reply.output)
    tensors = {f"{name}?": tensor for name, tensor in boundary.tensors.items()}
    return protocol.Reply(id=reply.id, output=replace(boundary, tensors=tensors).to_bytes())


def at_step(step: int) -> Callable[[Any], Any]:
    return lambda reply: protocol.Reply(id=reply.id, train=protocol.TrainReply(step=step))


LIES: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "a step that was not offered": (ATTACH, at_step(7)),
    "a step that is none": (ATTACH, at_step(2**64 - 1)),
    "no boundary as an output": (FORWARD, with_output(b"")),
    "an output of another shape": (FORWARD, changed(lambda tensor: tensor[0])),
    "an output of another dtype": (FORWARD, changed(Tensor.double)),
    "an output that unpacks to much": (FORWARD, changed(lambda _: torch.zeros(1 << 26))),
    "a gradient of a tensor that is not there": (FORWARD, with_facts(requires_grad=["none"])),
    "gradients of what is no list": (FORWARD, with_facts(requires_grad=3)),
    "too many bytes": (FORWARD, with_output(bytes(protocol.DEFAULT_REPLY_BYTES))),
    "no boundary as gradients": (BACKWARD, with_output(b"")),
    "a gradient of another shape": (BACKWARD, changed(lambda tensor: tensor[:1])),
    "a gradient of another dtype": (BACKWARD, changed(Tensor.double)),
    "gradients that unpack to much": (BACKWARD, changed(lambda _: torch.zeros(1 << 26))),
    "gradients by other names": (BACKWARD, renamed),
    "another step at its end": (APPLY, at_step(5)),
    "no step at its end": (APPLY, with_output(b"")),
}


@pytest.mark.parametrize("name", LIES)
def test_replies_that_lie_are_errors_and_change_no_weight(name: str) -> None:
    kind, lie = LIES[name]
    backend = TrainingBackend(build(), X, TrainingOptions(make_optimizer))
    hostile, here = HostileTrainer(backend), build()
    before = {path: tensor.clone() for path, tensor in here.named_parameters()}
    hostile.reply = lambda request, reply: (lie(reply) if request.train.kind == kind else reply).SerializeToString()
    with (
        hostile.listening() as address,
        pytest.raises(MicrotomeError) as refused,
        connect(here, address, timeout=5.0) as remote,
    ):
        train_step(remote)
    assert str(refused.value)
    assert all(tensor.equal(before[path]) for path, tensor in here.named_parameters())


def test_mutated_actions_are_refused_and_change_no_weight() -> None:
    """`python -m tests.remote.training_fuzz --actions 20000` sends more."""
    found = fuzz(400, seed=3)
    assert found.outcomes["BAD_REQUEST"] > 10
    assert found.outcomes["NO_SESSION"] > 10
    assert found.outcomes["result"] > 100
    assert not found.unnamed


def test_a_run_over_tls_needs_the_certificate_and_the_token(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    good, mine = ours.sign("good"), ours.sign("mine")
    tls: dict[str, Any] = {"tls_cert": good.cert, "tls_key": good.key, "client_ca": ours.file, "token": "secret"}
    options = {"ca": ours.file, "cert": mine.cert, "key": mine.key, "token": "secret"}
    with serve(build(), X, listen="127.0.0.1:0", optimizer=make_optimizer, **tls) as server:
        for wrong in ({"ca": theirs.file}, {"cert": None, "key": None}, {"token": "other"}, dict.fromkeys(options)):
            with pytest.raises(RemoteError):
                connect(build(), server.address, timeout=1.0, **(options | wrong))
        with connect(build(), server.address, **options) as remote:
            inputs, target = batch_of(0)
            cross_entropy(remote(inputs), target).backward()
            remote.step()
            assert remote.num_steps == 1
