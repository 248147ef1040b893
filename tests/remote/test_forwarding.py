"""Servers that forward boundaries: the requests of all clients share a connection to the next server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import BadFile, BadQuery, RemoteError
from microtome.remote import admission, chain, forwarding, protocol, served_model, service
from microtome.remote.connection import Connection
from microtome.remote.handshake import handshake
from microtome.remote.message import Message
from microtome.remote.served_model import ServedModel
from microtome.remote.server import Server
from microtome.remote.stage_ref import StageRef
from microtome.split.boundary.boundary import Boundary
from microtome.split.stages import Stages
from tests.remote.chains import connected
from tests.remote.proxy import until
from tests.remote.small import small

CUTS = ["stem", "layer1"]


@pytest.fixture(scope="module")
def resnet() -> tuple[nn.Module, Tensor]:
    return small()


@pytest.fixture(scope="module")
def stages(resnet: tuple[nn.Module, Tensor]) -> Stages:
    return mt.split(*resnet, at=CUTS)


@pytest.fixture(scope="module")
def last(resnet: tuple[nn.Module, Tensor]) -> Iterator[Server]:
    with serving(*resnet) as server:
        yield server


def serving(model: nn.Module, x: Tensor, **options: Any) -> Server:
    return mt.serve(model, x, **{"listen": "127.0.0.1:0", **options})


def make_request(boundary: Boundary, *servers: str, name: str = "1") -> Message:
    """A request to run the second stage, and to forward what crosses its end."""
    stage = protocol.StageRef(cuts=CUTS, index=1)
    message = Message(protocol.Request(id=name, stage=stage, forward=[protocol.Hop(servers=servers)]))
    message.encode(boundary)
    message.retry_until = 0.0
    return message


def ask(server: Server, *messages: Message) -> list[Any]:
    """The replies to messages of as many clients at once."""
    with ExitStack() as stack:
        for message in messages:
            stack.enter_context(closing(Connection(server.address))).submit(message)
        return [message.reply.result(60) for message in messages]


@torch.no_grad()
def test_clients_that_number_their_requests_alike_get_their_own_answers(
    resnet: tuple[nn.Module, Tensor], stages: Stages, last: Server
) -> None:
    model, x = resnet
    images = [torch.randn_like(x) for _ in range(6)]
    with serving(model, x, forward=last.address) as first:
        replies = ask(first, *(make_request(stages[0](image), last.address) for image in images))
    for image, reply in zip(images, replies, strict=True):
        assert reply.id == "1"
        (output,) = Boundary.from_bytes(reply.output).tensors.values()
        assert output.equal(model(image))


@torch.no_grad()
def test_a_next_server_that_is_down_is_asked_again_only_when_it_is_back(
    resnet: tuple[nn.Module, Tensor], stages: Stages, down: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = resnet
    waited_for = list[str]()

    def count(connection: Connection, model: Any, timeout: float, *, any_torch: bool) -> Any:
        if threading.current_thread().name.startswith("microtome-forward"):  # which sends the requests of all clients
            waited_for.append(connection.address)
        return handshake(connection, model, timeout, any_torch=any_torch)

    monkeypatch.setattr(forwarding, "handshake", count)
    with serving(model, x, forward=down) as first:
        boundary = stages[0](x)
        for _ in range(3):
            with pytest.raises(RemoteError, match=f"{down} cannot be reached") as raised:
                ask(first, make_request(boundary, down, down))
            assert raised.value.kind == "UNREACHABLE"
        assert waited_for == [down]
        with serving(model, x, listen=down):
            assert first._service is not None
            connection = first._service._forwarder._connections[down]
            until(lambda: connection.down_reason is None)
            (reply,) = ask(first, make_request(boundary, down))
            assert [one.server for one in reply.forwarded] == [down]
        assert waited_for == [down]


@torch.no_grad()
def test_a_next_server_of_another_model_is_left_out(
    resnet: tuple[nn.Module, Tensor], stages: Stages, last: Server
) -> None:
    model, x = resnet
    other, _ = small()
    next(other.parameters()).add_(1)
    with serving(other, x) as strange, serving(model, x, forward=[strange.address, last.address]) as first:
        for _ in range(4):
            (reply,) = ask(first, make_request(stages[0](x), strange.address, last.address))
            assert [one.server for one in reply.forwarded] == [last.address]
        with pytest.raises(RemoteError, match=f"the weights of ResNet here and of ResNet at {strange.address} differ"):
            ask(first, make_request(stages[0](x), strange.address))


def sample(server: Server, name: str, **labels: str) -> float:
    return server.metrics.registry.get_sample_value(f"microtome_{name}", labels) or 0.0


@torch.no_grad()
def test_a_next_server_that_refuses_costs_neither_computation_nor_traffic(resnet: tuple[nn.Module, Tensor]) -> None:
    model, x = resnet
    with (
        serving(model, x, token="b") as last,
        serving(model, x, token="b", forward=last.address, forward_token="wrong") as first,
        connected(model, x, first.address, last.address, token="b") as remote,
    ):
        # The example is computed twice, since nothing was known of the next server.
        begun, received = sample(first, "batch_count"), sample(first, "bytes_total", direction="received")
        for _ in range(10):
            assert remote(x).equal(model(x))
        assert sample(first, "batch_count") - begun == 10
        once = remote.requests[0].sent_bytes / 2  # the boundaries of the two cuts have nearly as many bytes
        assert sample(first, "bytes_total", direction="received") - received < 11 * once


@torch.no_grad()
def test_a_server_that_knows_that_the_next_one_is_down_does_not_compute_for_it(
    resnet: tuple[nn.Module, Tensor], stages: Stages, last: Server, down: str
) -> None:
    model, x = resnet
    with serving(model, x, forward=down) as first:
        for _ in range(3):
            with pytest.raises(RemoteError, match="cannot be reached"):
                ask(first, make_request(stages[0](x), down))
        with pytest.raises(RemoteError, match="does not forward to"):
            ask(first, make_request(stages[0](x), last.address))
        assert sample(first, "batch_count") == 1  # that of the first request, which found out


@torch.no_grad()
def test_a_client_asks_a_server_to_forward_again_after_a_while(
    resnet: tuple[nn.Module, Tensor], last: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = resnet
    with (
        serving(model, x, forward=last.address) as first,
        connected(model, x, first.address, last.address) as remote,
    ):
        remote._chain.pause_forwarding(0)
        remote(x)
        assert remote.requests[-1].received_bytes > 1000  # what crosses the second cut
        later = monotonic() + chain._FORWARD_AGAIN_S
        monkeypatch.setattr(chain, "monotonic", lambda: later)
        remote(x)
        assert remote.requests[-1].received_bytes < 1000


@torch.no_grad()
def test_any_error_of_forwarding_is_an_answer(
    resnet: tuple[nn.Module, Tensor], stages: Stages, last: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoMemory(Message):
        def encode(self, boundary: Boundary, codec: str | None = None) -> None:
            raise MemoryError("no memory")

    monkeypatch.setattr(forwarding, "Message", NoMemory)
    with serving(*resnet, forward=last.address) as first:
        with pytest.raises(RemoteError, match="could not answer: MemoryError: no memory") as raised:
            ask(first, make_request(stages[0](resnet[1]), last.address))
        assert raised.value.kind == "UNREACHABLE"
        with mt.connect(*resnet, servers=[first.address, last.address], at=CUTS, fallback=None) as remote:
            assert remote(resnet[1]).equal(resnet[0](resnet[1]))  # the client sends it itself


@torch.no_grad()
def test_the_client_sends_boundaries_itself_if_a_restarted_server_does_not_forward_any_more(
    resnet: tuple[nn.Module, Tensor], last: Server
) -> None:
    model, x = resnet
    first = serving(model, x, forward=last.address)
    options: dict[str, Any] = {"at": CUTS, "codec": "raw", "fallback": None}
    with mt.connect(model, x, servers=[first.address, last.address], **options) as remote:
        assert remote(x).equal(model(x))
        assert remote.requests[-1].received_bytes < 1000
        first.stop(0)
        with serving(model, x, listen=first.address):
            assert remote(x).equal(model(x))
            assert remote.requests[-1].received_bytes > 1000


def test_the_token_and_the_authority_of_the_next_servers_are_checked_at_the_start(
    resnet: tuple[nn.Module, Tensor], tmp_path: Path
) -> None:
    with pytest.raises(BadFile, match="forward_ca=: cannot read"):
        serving(*resnet, forward="127.0.0.1:1", forward_ca=str(tmp_path / "missing.pem"))
    (tmp_path / "ca.pem").write_text("text")
    with pytest.raises(BadFile, match="forward_ca=: expected a certificate in PEM format in"):
        serving(*resnet, forward="127.0.0.1:1", forward_ca=str(tmp_path / "ca.pem"))
    for option in ("token", "ca", "cert", "key"):
        with pytest.raises(BadQuery, match=f"expected forward= with forward_{option}=, got no server to forward to"):
            serving(resnet[0], resnet[1], **{f"forward_{option}": "b"})
    with pytest.raises(BadQuery, match="expected both forward_cert= and forward_key=, got one without the other"):
        serving(*resnet, forward="127.0.0.1:1", forward_cert="b.pem")
    with pytest.raises(BadFile, match="forward_cert=: cannot read"):
        serving(*resnet, forward="127.0.0.1:1", forward_cert=str(tmp_path / "missing.pem"), forward_key="b.key")
    for wrong in (5, None, {"127.0.0.1:1": 2}):
        with pytest.raises(BadQuery, match="expected forward= as the address of a server or a list of them, got"):
            serving(*resnet, forward=wrong)
    with pytest.raises(BadQuery, match="expected a token of one line of ASCII"):
        serving(*resnet, forward="127.0.0.1:1", forward_token="a\nb")
    with pytest.warns(RuntimeWarning, match="the token is sent to 10.0.0.6:7070 without TLS"):
        serving(*resnet, forward="10.0.0.6:7070", forward_token="b").stop()


@torch.no_grad()
def test_a_server_keeps_a_bounded_number_of_chains_and_of_their_batchers(
    resnet: tuple[nn.Module, Tensor], stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "_MAX_CHAINS", 2)
    model, x = resnet
    served = ServedModel(model, x)
    boundary = stages[1](stages[0](x))
    for at in ("stem.0", "stem.1", "stem.2", "stem"):
        served.batch_key(boundary, StageRef((at, "layer1"), 2))
    assert [ref.cuts[0] for ref in served._batchers] == ["stem.2", "stem"]
    assert len(served._stages) == 2


@pytest.fixture
def ring(resnet: tuple[nn.Module, Tensor]) -> Iterator[Callable[..., tuple[str, str]]]:
    """Start two servers that forward to each other."""
    with ExitStack() as stack:

        def start(**options: Any) -> tuple[str, str]:
            with serving(*resnet) as placeholder:
                address = placeholder.address
            first = stack.enter_context(serving(*resnet, forward=address, **options))
            second = stack.enter_context(serving(*resnet, listen=address, forward=first.address, **options))
            return first.address, second.address

        yield start


@torch.no_grad()
def test_servers_that_forward_to_each_other_do_not_wait_for_each_other_for_ever(
    resnet: tuple[nn.Module, Tensor], ring: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_FORWARD_WAIT_S", 0.02)
    model, x = resnet
    a, b = ring(max_message="200KB")  # 64 KiB cross each of the cuts: one at once is on its way
    options: dict[str, Any] = {"at": ["stem", "layer1", "layer2"], "codec": "raw", "fallback": None, "deadline": 120}
    with mt.connect(model, x, servers=[a, b, a], **options) as remote:
        expected = model(x)
        assert all(output.equal(expected) for output in remote.stream([x] * 40, window=16))
        assert any(request.received_bytes > 10_000 for request in remote.requests)  # sent through the client
        assert any(request.received_bytes < 10_000 for request in remote.requests)  # forwarded


@torch.no_grad()
def test_many_small_requests_that_are_forwarded_leave_room_for_the_stages_after_them(
    resnet: tuple[nn.Module, Tensor], ring: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_WINDOW", 2)
    model, x = resnet
    a, b = ring()
    cuts = ["stem.2", "stem", "layer1", "layer2"]
    options: dict[str, Any] = {"at": cuts, "codec": "raw", "fallback": None, "deadline": 120}
    with ExitStack() as stack:
        clients = [stack.enter_context(mt.connect(model, x, servers=[a, b, a, b], **options)) for _ in range(4)]
        expected = model(x)
        with ThreadPoolExecutor(4) as threads:
            for outputs in threads.map(lambda remote: list(remote.stream([x] * 10, window=4)), clients):
                assert all(output.equal(expected) for output in outputs)
        assert all(request.received_bytes < 10_000 for remote in clients for request in remote.requests)
