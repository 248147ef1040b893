"""A client holds no more for a server that lies than the example explains, and takes and prints nothing strange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.cli import main
from microtome.errors import BadBoundary, BadFile, MicrotomeError, RemoteError, sanitize_text
from microtome.inputs import Inputs
from microtome.remote import payloads, protocol
from microtome.remote.client import Remote
from microtome.remote.connection import Connection
from microtome.remote.payloads import ExpectedReply
from microtome.remote.protocol import DEFAULT_REPLY_BYTES
from microtome.remote.security import Security
from microtome.remote.served_model import ServedModel
from microtome.split.boundary.boundary import Boundary
from microtome.split.splitter import Splitter
from tests.remote.hostile import Answer, Hostile

ESCAPES = "\x1b]0;pwned\x07\x1b[31m\u202egnorw\x9b2J"


class Chooses(nn.Module):
    """Returns as many rows as its inputs have positive ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return y[x[:, 0] > 0]


class Squeezes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stem(x)
        return y.squeeze()


class Squares(nn.Module):
    """Its output grows with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stem(x)
        return y @ y.mT


class Widens(nn.Module):
    """Its output is of the dtype of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stem(x)
        return y + 1


@pytest.fixture(scope="module")
def resnet() -> tuple[nn.Module, Tensor, ServedModel]:
    model, x = zoo.build("tiny-resnet")
    assert isinstance(x, Tensor)
    model.eval()
    return model, x, ServedModel(model, x)


@contextmanager
def facing(hostile: Hostile, model: nn.Module, x: Any, at: str = "layer1", **options: Any) -> Iterator[Remote]:
    options = {"fallback": None, "codec": "raw"} | options
    with hostile.listening() as address, torch.no_grad(), mt.connect(model, x, address, at=at, **options) as remote:
        yield remote


def lying(change: Callable[[Boundary], Boundary], codec: str = "raw") -> Answer:
    """Change the output of every reply."""

    def answer(request: Any, reply: Any) -> bytes:
        data = change(Boundary.from_bytes(reply.output)).to_bytes(codec)
        lie: bytes = protocol.Reply(id=request.id, output=data).SerializeToString()
        return lie

    return answer


def output(change: Callable[[Tensor], Tensor]) -> Callable[[Boundary], Boundary]:
    return lambda boundary: replace(boundary, tensors={"0": change(boundary.tensors["0"])})


# -- size --------------------------------------------------------------------------------------------------------------


def test_a_reply_that_the_example_does_not_explain_is_not_received(
    resnet: tuple[nn.Module, Tensor, ServedModel],
) -> None:
    model, x, served = resnet
    hostile = Hostile(served)
    with facing(hostile, model, x) as remote:
        hostile.reply = lambda request, reply: protocol.Reply(
            id=request.id, output=bytes(DEFAULT_REPLY_BYTES)
        ).SerializeToString()
        with pytest.raises(
            RemoteError, match=r"answers with more than the 32.0 MiB expected from the example.* max_reply="
        ) as no:
            remote(x)
        assert no.value.kind == "TOO_LARGE"
        hostile.reply = lambda request, reply: reply.SerializeToString()
        assert remote(x).equal(model(x))


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_reply_is_not_unpacked(
    resnet: tuple[nn.Module, Tensor, ServedModel], compression: grpc.Compression
) -> None:
    model, x, served = resnet
    refused = pytest.raises(RemoteError, match="compresses messages, whose size is then unbounded")
    with Hostile(served, compression).listening() as address, torch.no_grad(), refused:
        mt.connect(model, x, address, at="layer1", codec="raw", fallback=None)


def test_a_small_reply_that_unpacks_to_much_is_refused(resnet: tuple[nn.Module, Tensor, ServedModel]) -> None:
    model, x, served = resnet
    hostile = Hostile(served)
    with facing(hostile, model, x) as remote:
        hostile.reply = lying(output(lambda _: torch.zeros(1 << 26)), "zstd")  # 256 MiB in a few KiB
        with pytest.raises(
            BadBoundary, match=r"decoding the boundary may take 256 MiB of memory, and the limit is 64.0 MiB.*max_reply"
        ):
            remote(x)


def test_outputs_that_grow_with_the_inputs_are_received() -> None:
    model = Squares().eval()
    x = torch.linspace(-1, 1, 8).view(1, 2, 4)
    long = torch.linspace(-1, 1, 12_000).view(1, 3000, 4)  # 48 kB give 36 MB: more than every channel takes
    with (
        mt.serve(model, x, listen="127.0.0.1:0", max_message="1GB") as server,
        torch.no_grad(),
        mt.connect(model, x, server.address, at="stem", codec="raw", fallback=None) as remote,
    ):
        small = [remote(x) for _ in range(2)]
        assert remote(long).equal(model(long))
        assert all(one.equal(model(x)) for one in (*small, remote(x)))
        assert [sent.attempts for sent in remote.requests] == [1] * 4
        many = [long, x, long, x]
        assert all(got.equal(model(one)) for got, one in zip(remote.stream(many, 4), many, strict=True))


def test_outputs_whose_size_depends_on_values_need_an_option() -> None:
    class Spreads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            count: Tensor = self.stem(x).sum()
            return torch.zeros(int(count.item()), 1000)

    model, x = Spreads().eval(), torch.ones(2)
    many = torch.full((2,), 5000.0)  # 40 MB
    with mt.serve(model, x, listen="127.0.0.1:0") as server, torch.no_grad():
        with (
            mt.connect(model, x, server.address, at="", codec="raw", fallback=None) as remote,
            pytest.raises(RemoteError, match="raise max_reply="),
        ):
            remote(many)
        with mt.connect(model, x, server.address, at="", codec="raw", fallback=None, max_reply="64MB") as remote:
            assert remote(many).shape == (10_000, 1000)


def test_what_a_reply_may_take_follows_the_inputs_and_not_the_server() -> None:
    example = Splitter(
        Squares().eval(), torch.ones(1, 256, 256, 4).mean(-1, keepdim=True).expand(1, 256, 256, 4)[0]
    ).spec.example

    def most(*shape: int) -> int:
        return ExpectedReply(example, Inputs(torch.ones(1).expand(shape))).reply_bytes

    one = 256 * 256 * 256 * 4  # the output of the example: 64 MiB
    assert most(256, 256, 4) == 2 * one
    assert most(512, 256, 4) == 4 * one  # twice the batch
    assert most(256, 512, 4) == 8 * one  # twice the length, of which the output has the square
    assert most(1, 1, 4) == 2 * one


def test_a_request_that_unpacks_to_more_than_the_server_takes_is_not_sent() -> None:
    model, x = Squares().eval(), torch.zeros(1, 2, 4)
    many = torch.zeros(1, 10_000, 4)  # 160 kB in a few bytes
    with (
        mt.serve(model, x, listen="127.0.0.1:0", max_message="100KB") as server,
        torch.no_grad(),
        mt.connect(model, x, server.address, at="", codec="zstd", fallback=None) as remote,
    ):
        with pytest.raises(RemoteError, match=r"156 KiB cross at '\(input\)', and .* accepts 97.7 KiB") as refused:
            remote(many)
        assert refused.value.kind == "TOO_LARGE"
        assert remote(x).equal(model(x))


# -- dtype and shape ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y.double(), r"expected dtype torch.float32 for tensor 0.* got torch.float64 of shape"),
        (lambda y: y.unsqueeze(0), r"expected 2 dimensions for tensor 0.* got torch.float32 of shape \(1, 2, 10\)"),
        (lambda y: y[:, :3], r"expected shape \(2, 10\) for tensor 0.* got torch.float32 of shape \(2, 3\)"),
        (lambda y: y.repeat(5, 1), r"expected shape \(2, 10\) for tensor 0.* got torch.float32 of shape \(10, 10\)"),
    ],
)
def test_an_output_of_another_dtype_or_shape_is_refused(
    resnet: tuple[nn.Module, Tensor, ServedModel], change: Callable[[Tensor], Tensor], message: str
) -> None:
    model, x, served = resnet
    hostile = Hostile(served)
    with facing(hostile, model, x) as remote:
        hostile.reply = lying(output(change))
        with pytest.raises(BadBoundary, match=f"the reply is not an output of this model: {message}"):
            remote(x)


def test_more_tensors_than_the_model_returns_are_refused(resnet: tuple[nn.Module, Tensor, ServedModel]) -> None:
    model, x, served = resnet
    hostile = Hostile(served)
    with facing(hostile, model, x) as remote:
        hostile.reply = lying(lambda boundary: replace(boundary, tensors={**boundary.tensors, "1": torch.ones(1)}))
        with pytest.raises(BadBoundary, match="expected 1 tensors and 0 other values in the output, got 1 tensors"):
            remote(x)


@pytest.mark.parametrize(
    ("make", "example", "others"),
    [
        (Chooses, torch.ones(2, 4), [-torch.ones(2, 4), torch.tensor([[1.0] * 4, [-1.0] * 4]), torch.ones(7, 4)]),
        (Squeezes, torch.ones(1, 4), [torch.ones(2, 4), torch.ones(3, 4)]),
        (Squares, torch.ones(1, 2, 4), [torch.ones(5, 2, 4), torch.ones(1, 9, 4)]),
        (
            Widens,
            torch.ones(2),
            [torch.ones(3, dtype=torch.float64), torch.ones(2, dtype=torch.int64), torch.ones(1, 2)],
        ),
    ],
)
def test_what_a_model_returns_for_other_inputs_is_taken(
    make: Callable[[], nn.Module], example: Tensor, others: list[Tensor]
) -> None:
    model = make().eval()
    with mt.serve(model, example, listen="127.0.0.1:0") as server, torch.no_grad():
        for at in ("", "stem"):
            with mt.connect(model, example, server.address, at=at, fallback=None) as remote:
                assert all(remote(x).equal(model(x)) for x in (example, *others))


def test_times_that_cannot_be_are_not_believed(resnet: tuple[nn.Module, Tensor, ServedModel]) -> None:
    model, x, served = resnet
    hostile = Hostile(served)
    wrong = protocol.Timing(decode_s=-1.0, queue_s=float("nan"), run_s=1e9, encode_s=float("inf"))
    hostile.reply = lambda request, reply: protocol.Reply(
        id=reply.id, output=reply.output, timing=wrong
    ).SerializeToString()
    with facing(hostile, model, x) as remote:
        assert remote(x).equal(model(x))
        sent = remote.requests[-1]
        assert (sent.server_decode_s, sent.queue_s, sent.tail_s, sent.server_encode_s) == (0.0,) * 4
        assert 0 < sent.wire_s <= sent.total_s


# -- text --------------------------------------------------------------------------------------------------------------


def test_no_text_of_a_server_reaches_a_terminal_as_an_escape(resnet: tuple[nn.Module, Tensor, ServedModel]) -> None:
    _, _, served = resnet
    hostile = Hostile(served)
    names = ("microtome", "torch", "model", "fingerprint", "device")
    hostile.hello = dict.fromkeys(names, ESCAPES) | {"codecs": [ESCAPES], "cuts": [ESCAPES, "a\nb"]}
    with hostile.listening() as address:
        result = CliRunner().invoke(main, ["ping", address])
    assert result.exit_code == 0, result.output
    assert "gnorw" in result.output
    assert sanitize_text(result.output, keep="\n") == result.output


def test_no_error_of_a_server_is_printed_as_an_escape(resnet: tuple[nn.Module, Tensor, ServedModel]) -> None:
    model, x, served = resnet
    hostile = Hostile(served)
    long = ESCAPES + 10**6 * "x"

    def fail(request: Any, reply: Any) -> bytes:
        data: bytes = protocol.Reply(id=reply.id, error=protocol.Error(kind=1, message=long)).SerializeToString()
        return data

    with facing(hostile, model, x) as remote:
        hostile.reply = fail
        with pytest.raises(RemoteError, match="gnorw") as told:
            remote(x)
        assert str(told.value).isprintable()
        assert len(str(told.value)) < 3000
        assert remote.requests[-1].reason == str(told.value)
    for hello in ({"fingerprint": ESCAPES}, {"torch": ESCAPES}, {"protocol": 9, "microtome": ESCAPES}):
        hostile.hello = hello
        with hostile.listening() as address, pytest.raises(RemoteError, match="gnorw") as refused:
            mt.connect(model, x, address, at="layer1")
        assert str(refused.value).isprintable()


# -- what else it says -------------------------------------------------------------------------------------------------


def test_a_server_that_says_too_much_of_itself_is_refused(resnet: tuple[nn.Module, Tensor, ServedModel]) -> None:
    model, x, served = resnet
    hostile = Hostile(served)
    hostile.hello = {"cuts": ["a"] * (2 << 20)}
    with (
        hostile.listening() as address,
        pytest.raises(RemoteError, match="6.00 MiB, expected at most 4.00 MiB"),
    ):
        mt.connect(model, x, address, at="layer1")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            '{"kind": "profile"}' + " " * (2 << 20),
            RemoteError,
            r"expected a profile of at most .* calls of the model, got 2.00 MiB",
        ),
        ("[" * 1000, BadFile, "is not JSON"),
        ('{"kind": "profile", "schema": 99}', BadFile, "expected version 2 of a profile, got 99"),
        ('{"kind": "run", "schema": 1}', BadFile, "is corrupt"),
    ],
)
def test_a_profile_that_is_none_is_refused(
    resnet: tuple[nn.Module, Tensor, ServedModel], text: str, kind: type[MicrotomeError], message: str
) -> None:
    model, x, served = resnet
    hostile = Hostile(served)
    hostile.profile = lambda: text
    with hostile.listening() as address, pytest.raises(kind, match=message):
        mt.connect(model, x, address, at="auto")


def test_another_result_than_a_profile_is_refused(resnet: tuple[nn.Module, Tensor, ServedModel]) -> None:
    model, x, served = resnet
    hostile = Hostile(served)
    hostile.profile = mt.cuts(model, x).to_json
    with hostile.listening() as address, pytest.raises(BadFile, match="is a Cuts, expected a Profile"):
        mt.connect(model, x, address, at="auto")


def test_bytes_that_are_no_reply_are_refused(resnet: tuple[nn.Module, Tensor, ServedModel]) -> None:
    hostile = Hostile(resnet[2])
    hostile.echo = lambda request: b"\xff" * 9
    refused = pytest.raises(RemoteError, match="answers Echo with bytes that are not its reply")
    with hostile.listening() as address, closing(Connection(address)) as connection, refused:
        connection.call("Echo", protocol.EchoRequest(), timeout=10.0)


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["example.invalid:7070", "192.0.2.1:7070", "dns:example.invalid:7070"])
def test_a_token_without_tls_is_warned_about(address: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"the token is sent to {address} without TLS.*tls=True or ca=") as warned:
        Connection(address, Security(token="secret")).close()
    assert "secret" not in str(warned[0].message)
    Connection(address, Security(token="secret", tls=True)).close()
    Connection(address, Security()).close()


@pytest.mark.parametrize(
    "address", ["127.0.0.1:7070", "localhost:7070", "[::1]:7070", "ipv4:127.0.0.1:7070", "unix:/x"]
)
def test_a_token_on_this_machine_needs_no_tls(address: str) -> None:
    Connection(address, Security(token="secret")).close()


def test_inputs_of_the_same_shapes_are_compared_with_the_example_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def count(specs: Any, example: Any) -> float:
        compared.append(specs)
        return 1.0

    monkeypatch.setattr(payloads, "_growth", count)
    example = Splitter(nn.Linear(7, 3).eval(), torch.ones(2, 7)).spec.example
    for rows in (2, 2, 5, 2, 5):
        ExpectedReply(example, Inputs(torch.ones(rows, 7)))
    assert [spec.shape for (spec,) in compared] == [(2, 7), (5, 7)]
