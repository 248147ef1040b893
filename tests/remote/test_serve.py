"""A server and clients of one process: what comes back is what the model returns."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor, nn

import microtome as mt
from microtome import __version__, zoo
from microtome.engine.torch_internals import MODULE_CALL
from microtome.errors import BadFile, BadInputs, BadQuery, NoMatch, RemoteError
from microtome.remote import protocol
from microtome.remote.client import Remote
from microtome.remote.request import RemoteRequest
from microtome.remote.server import Server
from tests.marks import slow
from tests.split.test_aliases import Both, runs
from tests.split.test_stages import same


@dataclass
class Scores:
    values: Tensor
    parts: dict[str, Tensor]
    name: str


class Branches(nn.Module):
    """Takes a dict beside a tensor, and returns tensors, numbers and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Any:
        hidden = torch.relu(self.first(x) * scale["by"])
        return Scores(self.second(hidden), {"hidden": hidden}, "scores"), (hidden.sum(1), 3, None)


def branches() -> tuple[nn.Module, mt.Inputs]:
    torch.manual_seed(0)
    return Branches().eval(), mt.Inputs(torch.randn(3, 6), scale={"by": torch.randn(3, 5)})


@pytest.fixture(scope="module")
def resnet() -> tuple[nn.Module, Tensor]:
    return built()


def built() -> tuple[nn.Module, Tensor]:
    model, x = zoo.build("tiny-resnet")
    assert isinstance(x, Tensor)
    return model, x


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*zoo.build("tiny-resnet"), concurrency=2) as started:
        yield started


def serving(model: Any, inputs: Any = None, **options: Any) -> Server:
    return mt.serve(model, inputs, listen="127.0.0.1:0", **options)


def connected(model: Any, inputs: Any, server: Server, at: Any, **options: Any) -> Remote:
    """Without a fallback: what comes back comes from the server."""
    return mt.connect(model, inputs, server.address, at=at, **{"fallback": None, "codec": "raw", **options})


def exactly(server: Server, step: int = 1) -> list[str]:
    """Every place from which it is served; a module that runs twice is cut at one of its calls."""
    return list(server.served.cuts[::step])


def called(remote: Remote, given: Any) -> Any:
    given = copy.deepcopy(mt.Inputs.of(given))
    return remote(*given.args, **given.kwargs)


def images(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(1 + index % 3, 3, 32, 32, generator=generator) for index in range(count)]


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [0, 1])
@torch.no_grad()
def test_requests_may_differ_from_the_example_in_which_arguments_are_one_tensor(example: int) -> None:
    torch.manual_seed(0)
    model, given = Both().eval(), runs((2, 4))
    with serving(model, given[example]) as server:
        for at in exactly(server):
            with connected(model, given[example], server, at) as remote:
                assert all(same(remote(*pair), model(*pair)) for pair in given), at


@pytest.mark.parametrize("name", ["tiny-decoder", "tiny-lstm", *slow("tiny-resnet", "tiny-vit", "tiny-unet")])
@torch.no_grad()
def test_every_cut_gives_what_the_model_gives(name: str) -> None:
    model, inputs = zoo.build(name)
    expected = mt.Inputs.of(inputs).run(model)
    step = {"tiny-resnet": 1, "tiny-lstm": 1, "tiny-vit": 5}.get(name, 6)
    with serving(model, inputs) as server:
        for at in exactly(server, step):
            with connected(model, inputs, server, at) as remote:
                assert same(called(remote, inputs), expected), at
                assert (remote.requests[-1].where, remote.requests[-1].attempts) == ("cloud", 1)


@torch.no_grad()
def test_structures_go_there_and_come_back() -> None:
    model, given = branches()
    others = [mt.Inputs(torch.randn(rows, 6), scale={"by": torch.randn(rows, 5)}) for rows in (1, 7)]
    with serving(model, given) as server:
        for at in exactly(server):
            with connected(model, given, server, at) as remote:
                for each in (given, *others):
                    got, whole = called(remote, each), each.run(model)
                    assert isinstance(got[0], Scores), at
                    assert same((vars(got[0]), got[1]), (vars(whole[0]), whole[1])), at


@pytest.mark.parametrize("at", ["", "stem", "layer2.0", "fc"])
@torch.no_grad()
def test_other_batches_than_the_example(resnet: tuple[nn.Module, Tensor], server: Server, at: str) -> None:
    model, x = resnet
    with connected(model, x, server, at) as remote:
        for rows in (1, 2, 5):
            other = torch.randn(rows, 3, 32, 32)
            assert remote(other).equal(model(other))


def test_all_of_the_model_runs_there_when_the_inputs_are_sent(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    model, x = resnet
    with connected(model, x, server, "") as remote:
        remote(x)
        assert remote.requests[-1].sent_bytes > x.nbytes
        with pytest.raises(BadInputs, match="the structure of the inputs"):
            remote(x, x)
        assert remote(x).equal(model(x))


@torch.no_grad()
def test_a_plan_says_where_to_cut_and_what_to_send(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    model, x = resnet
    cuts, here = mt.cuts(model, x), mt.profile(model, x, measure="time", repeat=3)

    def named(name: str) -> mt.Plan:
        choose = lambda candidates: next(one for one in candidates if one.name == name)  # noqa: E731
        return mt.plan(cuts, edge=here, cloud=here, link=mt.Link("1Gbps"), strategy=choose)

    for plan, at in ((named("all on cloud, raw input"), "(input)"), (named("layer1"), "layer1")):
        with connected(model, x, server, plan) as remote:
            assert remote(x).equal(model(x))
            assert repr(remote).endswith(f", cut at {at!r}>")
    message = "the plan runs the whole model on edge, without a server: call the model, or connect with at='"
    with pytest.raises(BadQuery, match=message) as caught:
        connected(model, x, server, edge := named("all on edge"))
    best = next(one.at[0] for one in edge if any(one.at))
    assert f"at={best!r}, the best of its cuts" in str(caught.value)


@torch.no_grad()
def test_clients_at_different_cuts_at_once(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    given = images(12)
    expected = [resnet[0](each) for each in given]

    def ask(at: str) -> list[bool]:
        with connected(models[at], given[0], server, at) as remote:
            return [remote(each).equal(whole) for each, whole in zip(given, expected, strict=True)]

    places = ["", "stem", "layer1.0.relu#0", "layer1.1", "layer2.0.shortcut", "layer2", "pool", "fc"]
    models = {at: built()[0] for at in places}  # a client looks at its model as it connects: each has one
    with ThreadPoolExecutor(len(places)) as threads:
        assert list(threads.map(ask, places)) == [[True] * len(given)] * len(places)


@torch.no_grad()
def test_one_client_asked_by_many_threads(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    model, x = resnet
    given = images(24)
    with connected(model, x, server, "layer1") as remote, ThreadPoolExecutor(6) as threads:
        got = list(threads.map(remote, given))
    assert all(one.equal(model(each)) for one, each in zip(got, given, strict=True))
    assert len(remote.requests) == 24


@pytest.mark.parametrize("codec", ["raw", "zstd", "lz4"])
@torch.no_grad()
def test_lossless_codecs_change_nothing(resnet: tuple[nn.Module, Tensor], server: Server, codec: str) -> None:
    model, x = resnet
    with connected(model, x, server, "layer1", codec=codec) as remote:
        assert remote(x).equal(model(x))
        assert remote.requests[-1].codec == codec


@pytest.mark.parametrize(("codec", "at_most"), [("fp16", 0.51), ("int8", 0.26), ("fp16+zstd", 0.51)])
@torch.no_grad()
def test_lossy_codecs_send_less_and_stay_near(
    resnet: tuple[nn.Module, Tensor], server: Server, codec: str, at_most: float
) -> None:
    model, x = resnet
    with connected(model, x, server, "layer1") as remote:
        remote(x)
        plain = remote.requests[-1].sent_bytes
    with connected(model, x, server, "layer1", codec=codec) as remote:
        got = remote(x)
        assert remote.requests[-1].sent_bytes < at_most * plain + 1024
    assert not got.equal(model(x))
    assert torch.allclose(got, model(x), rtol=0.1, atol=0.1 * float(model(x).abs().max()))


def test_the_model_is_left_as_it_was() -> None:
    model, x = zoo.build("tiny-resnet")
    model.get_submodule("fc").requires_grad_(False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    wants = [value.requires_grad for value in model.parameters()]
    before, random = set(threading.enumerate()), torch.get_rng_state()
    with serving(model, x) as server, connected(model, x, server, "layer1") as remote:
        remote(x)
        assert torch.is_grad_enabled()
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    assert [value.requires_grad for value in model.parameters()] == wants
    assert not any(vars(module)[hooks] for module in model.modules() for hooks in vars(module) if "_hooks" in hooks)
    assert torch.get_rng_state().equal(random)
    for thread in set(threading.enumerate()) - before:
        thread.join(120)
    assert set(threading.enumerate()) <= before


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 8, 50])
@torch.no_grad()
def test_a_stream_gives_results_in_the_order_of_the_items(
    resnet: tuple[nn.Module, Tensor], server: Server, window: int
) -> None:
    model, x = resnet
    given = images(20)
    with connected(model, x, server, "layer1.0") as remote:
        got = list(remote.stream(iter(given), window=window))
        assert list(remote.stream([])) == []
    assert len(got) == len(given)
    assert all(one.equal(model(each)) for one, each in zip(got, given, strict=True))


def test_a_stream_takes_no_more_items_than_its_window(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    model, x = resnet
    taken: list[int] = []

    def items() -> Iterator[Tensor]:
        for index in range(30):
            taken.append(index)
            yield x

    with connected(model, x, server, "layer1") as remote:
        for index, _ in enumerate(remote.stream(items(), window=4)):
            # Those that were given out, four on their way, and the one whose place this result has left.
            assert len(taken) <= index + 1 + 4
    assert len(taken) == 30


def _breaks(at: int, error: Exception) -> Callable[[Tensor], Iterator[Tensor]]:
    def items(x: Tensor) -> Iterator[Tensor]:
        for index in range(10):
            if index == at:
                raise error
            yield x

    return items


@pytest.mark.parametrize("window", [1, 4, 20])
def test_what_came_before_an_error_of_the_items_is_given_and_then_the_error(
    resnet: tuple[nn.Module, Tensor], server: Server, window: int
) -> None:
    model, x = resnet
    got: list[Tensor] = []
    with connected(model, x, server, "layer1") as remote:
        with pytest.raises(ZeroDivisionError, match="the data"):
            got.extend(remote.stream(_breaks(5, ZeroDivisionError("the data"))(x), window=window))
        assert len(got) == 5
        assert [thread.name for thread in threading.enumerate() if "microtome-head" in thread.name] == []
        assert remote(x).equal(model(x))


@pytest.mark.parametrize("window", [1, 4, 20])
def test_an_item_that_does_not_fit_is_an_error_at_its_place(
    resnet: tuple[nn.Module, Tensor], server: Server, window: int
) -> None:
    model, x = resnet
    given: list[Any] = [x, x, x, torch.randn(2, 5, 32, 32), x, x]
    got: list[Tensor] = []
    with connected(model, x, server, "layer1") as remote:
        with pytest.raises(RuntimeError, match="channels"):
            got.extend(remote.stream(given, window=window))
        assert [one.equal(model(x)) for one in got] == [True] * 3
        assert remote(x).equal(model(x))
        assert remote._chain.pools[0].connections[0]._pending == {}


def test_the_class_of_modules_stays_patched_while_a_stream_is_open() -> None:
    model, x = zoo.build("tiny-resnet")
    with serving(model, x) as server, connected(model, x, server, "layer1") as remote:
        remote(x)
        slot = vars(nn.Module)[MODULE_CALL]
        assert slot is not None
        assert all(vars(nn.Module)[MODULE_CALL] is slot for _ in remote.stream([x] * 3))
    stop = monotonic() + 30
    while vars(nn.Module)[MODULE_CALL] is not None and monotonic() < stop:
        sleep(0.01)  # streams of other tests on the server of this module may be ending
    assert vars(nn.Module)[MODULE_CALL] is None


def test_a_stream_that_is_left_early_leaves_nothing_behind(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    model, x = resnet
    with connected(model, x, server, "layer1") as remote:
        going = remote.stream((x for _ in range(10_000)), window=8)
        assert next(going).equal(model(x))
        going.close()  # type: ignore[attr-defined]
        assert [one.name for one in threading.enumerate() if one.name.startswith(("microtome-h", "microtome-e"))] == []
        assert remote._chain.pools[0].connections[0]._pending == {}
        assert remote(x).equal(model(x))


@pytest.mark.parametrize("window", [0, -1, 1.5, None])
def test_a_window_is_a_number_of_requests(resnet: tuple[nn.Module, Tensor], server: Server, window: Any) -> None:
    with connected(*resnet, server, "layer1") as remote, pytest.raises(BadQuery, match="window"):
        remote.stream([], window=window)


# -- the wire, as another language speaks it ---------------------------------------------------------------------------


def unary(channel: grpc.Channel, name: str, request: Any) -> Any:
    method = protocol.METHODS[name]
    call = channel.unary_unary(f"/{protocol.SERVICE}/{name}", response_deserializer=method.parse_reply)
    return call(request.SerializeToString(), timeout=120)


@torch.no_grad()
def test_one_whole_request_goes_through_a_plain_unary_call(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    model, x = resnet
    head, _ = mt.split(model, x, at="layer1")
    request = protocol.Request(id="mine", boundary=head(x).to_bytes())
    with grpc.insecure_channel(server.address) as channel:
        reply = unary(channel, "Run", request)
    assert (reply.id, reply.HasField("error"), reply.timing.batch) == ("mine", False, 1)
    assert reply.timing.run_s > 0
    (output,) = mt.Boundary.from_bytes(reply.output).tensors.values()
    assert output.equal(model(x))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda good: b"", "BAD_REQUEST", "bytes"),
        (lambda good: good.to_bytes()[:-1], "BAD_REQUEST", "truncated boundary"),
        (lambda good: mt.Boundary("layer1", "other", good.tensors, good.facts).to_bytes(), "WRONG_MODEL", "other"),
        (lambda good: mt.Boundary("layer1", "\ud800", good.tensors, good.facts).to_bytes(), "WRONG_MODEL", "\ufffd"),
        (
            lambda good: mt.Boundary("layer9", good.fingerprint, {}, {}).to_bytes(),
            "NO_CUT",
            "'layer9' is not served",
        ),
        (lambda good: mt.Boundary("\ud800", good.fingerprint, {}, {}).to_bytes(), "NO_CUT", "is not served"),
        (lambda good: mt.Boundary("", good.fingerprint, {}, {}).to_bytes(), "BAD_REQUEST", "the inputs"),
        (
            lambda good: mt.Boundary("layer1", good.fingerprint, {}, {}).to_bytes(),
            "BAD_REQUEST",
            "schema 1, got None",
        ),
    ],
)
@torch.no_grad()
def test_what_is_no_boundary_of_the_model_is_refused_with_a_reason(
    resnet: tuple[nn.Module, Tensor], server: Server, change: Callable[[Any], bytes], kind: str, words: str
) -> None:
    head, _ = mt.split(*resnet, at="layer1")
    request = protocol.Request(id="1", boundary=change(head(resnet[1])))
    with grpc.insecure_channel(server.address) as channel:
        reply = unary(channel, "Run", request)
    assert (reply.id, protocol.KINDS[reply.error.kind], reply.output) == ("1", kind, b"")
    assert words in reply.error.message


def test_an_unknown_codec_is_refused(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    head, _ = mt.split(*resnet, at="layer1")
    with grpc.insecure_channel(server.address) as channel:
        reply = unary(channel, "Run", protocol.Request(id="1", codec="pickle", boundary=head(resnet[1]).to_bytes()))
    assert (protocol.KINDS[reply.error.kind], "no codec 'pickle'" in reply.error.message) == ("BAD_REQUEST", True)


def test_the_server_says_what_it_serves(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        told = unary(channel, "Hello", protocol.HelloRequest(protocol=1))
    assert (told.protocol, told.model, told.device) == (protocol.PROTOCOL, "ResNet", "cpu")
    assert (told.microtome, told.torch) == (__version__, torch.__version__)
    assert list(told.cuts) == ["", *(cut.at for cut in mt.cuts(*resnet))]
    assert (told.max_message, told.batch) == (256_000_000, 1)


def test_bytes_that_are_no_message_close_the_call_with_a_reason(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for name in ("Hello", "Run", "Echo"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{protocol.SERVICE}/{name}")(b"\xff\xff\xff", timeout=120)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "got other bytes" in caught.value.details()
        with pytest.raises(grpc.RpcError, match="expected a Request, got other bytes"):
            list(channel.stream_stream(f"/{protocol.SERVICE}/Stream")(iter([b"\xff\xff"]), timeout=120))


def test_little_is_sent_back_for_little(server: Server) -> None:
    with grpc.insecure_channel(server.address, [("grpc.max_receive_message_length", -1)]) as channel:
        assert len(unary(channel, "Echo", protocol.EchoRequest(reply_bytes=8 << 20)).payload) == 8 << 20
        with pytest.raises(grpc.RpcError, match="bytes to echo"):
            unary(channel, "Echo", protocol.EchoRequest(reply_bytes=200_000_000))


def test_health_is_told_and_watchers_do_not_hold_a_server_up(resnet: tuple[nn.Module, Tensor]) -> None:
    with serving(*resnet) as server, grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", protocol.SERVICE):
            reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=120)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        seen = health.Watch(health_pb2.HealthCheckRequest(service=""))
        assert next(seen).status == health_pb2.HealthCheckResponse.SERVING
        stopping = threading.Thread(target=server.stop, args=(60.0,))
        stopping.start()
        assert next(seen).status == health_pb2.HealthCheckResponse.NOT_SERVING
        stopping.join(120)
        assert not stopping.is_alive()
        seen.cancel()


# -- the handshake -----------------------------------------------------------------------------------------------------


@contextmanager
def telling(**told: Any) -> Iterator[str]:
    """The address of a server that says this of itself, and does nothing else."""
    reply = protocol.HelloReply(**told).SerializeToString()
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: reply)
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(protocol.SERVICE, {"Hello": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_another_structure_is_refused_with_both_named(server: Server) -> None:
    model, x = zoo.build("tiny-vit")
    both = "the structure of ViT with 45.3 k parameters here and of ResNet with 11.1 k parameters at .* differ"
    with pytest.raises(RemoteError, match=both) as caught:
        connected(model, x, server, "norm")
    assert caught.value.kind == "WRONG_MODEL"


def test_example_inputs_that_make_other_calls_are_named_as_the_reason() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.image = nn.Linear(4, 4), nn.Linear(2, 4)

        def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
            return self.text(x) if image is None else self.text(x) + self.image(image)

    model, x = Optional().eval(), torch.ones(1, 4)
    same = "The weights are equal: pass the same example inputs .--input. and run the same code on both sides"
    refused = pytest.raises(RemoteError, match=same)
    with mt.serve(model, (x, torch.ones(1, 2)), listen="127.0.0.1:0") as server, refused:
        mt.connect(model, x, server.address, at="text")


def test_outputs_are_those_of_the_model_without_gradients() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2)).eval(), "2x5x8"
    given = torch.rand(2, 5, 8)
    with mt.serve(model, x, listen="127.0.0.1:0") as server, mt.connect(model, x, server.address, at="0") as remote:
        output = remote(given)
    with torch.no_grad():
        assert output.equal(model(given))  # by a fused kernel, which torch does not use with gradients
    assert not output.requires_grad


def test_a_server_that_does_not_tell_its_parameters_is_named_without_them(resnet: tuple[nn.Module, Tensor]) -> None:
    refused = pytest.raises(RemoteError, match="the structure of ResNet here and of ResNet at 127.0.0.1:.* differ")
    with telling(protocol=1, model="ResNet", fingerprint="a-b") as address, refused:
        mt.connect(*resnet, address, at="layer1")


def test_other_weights_are_refused_with_both_named(server: Server) -> None:
    model, x = zoo.build("tiny-resnet")
    with torch.no_grad():
        model.get_parameter("fc.bias").add_(1)
    with pytest.raises(RemoteError, match="the weights of ResNet here and of ResNet at .* differ") as caught:
        connected(model, x, server, "fc")
    assert server.served.fingerprint in str(caught.value)


def test_another_torch_is_refused_unless_allowed(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    told = {"protocol": 1, "fingerprint": server.served.fingerprint, "model": "ResNet", "cuts": ["layer1"]}
    with telling(**told, torch="1.2.3") as address:
        with pytest.raises(
            RemoteError, match=rf"torch is {torch.__version__.split('+')[0]}.* here and 1.2.3"
        ) as caught:
            mt.connect(*resnet, address, at="layer1", codec="raw")
        assert caught.value.kind == "REFUSED"
        with pytest.raises(RemoteError, match="accepts 0 B"):  # it is asked for something, and cannot do it
            mt.connect(*resnet, address, at="layer1", codec="raw", any_torch=True)
    with (
        telling(**told, torch=torch.__version__.split("+")[0] + "+cu999") as address,
        pytest.raises(RemoteError, match="accepts 0 B"),
    ):
        mt.connect(*resnet, address, at="layer1", codec="raw")


def test_another_protocol_is_refused(resnet: tuple[nn.Module, Tensor]) -> None:
    with (
        telling(protocol=2, microtome="9.9") as address,
        pytest.raises(RemoteError, match=r"speaks version 2 of the protocol \(microtome 9.9\), and this is version 1"),
    ):
        mt.connect(*resnet, address, at="layer1")


def test_something_that_is_no_microtome_server_is_refused(resnet: tuple[nn.Module, Tensor]) -> None:
    with ThreadPoolExecutor(1) as threads:
        other = grpc.server(threads)
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        with pytest.raises(RemoteError, match="does not speak this protocol") as caught:
            mt.connect(*resnet, f"127.0.0.1:{port}", at="layer1")
        assert caught.value.kind == "REFUSED"
        other.stop(None).wait()


def test_a_cut_that_is_not_there_is_refused(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    with pytest.raises(NoMatch, match="layer9"):
        connected(*resnet, server, "layer9")


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("nowhere", "'nowhere': add the port, such as nowhere:7070"),
        (7070, r"7070: did you mean 127.0.0.1:7070\?$"),
        (None, "None$"),
    ],
)
def test_an_address_has_a_port(resnet: tuple[nn.Module, Tensor], address: Any, hint: str) -> None:
    with pytest.raises(BadQuery, match=f"the address of a server such as host:7070, got {hint}"):
        mt.connect(*resnet, address, at="layer1")


def test_nobody_there_is_said_after_the_timeout(resnet: tuple[nn.Module, Tensor]) -> None:
    with pytest.raises(
        RemoteError, match=r"^127.0.0.1:1 cannot be reached: connection refused: nothing list"
    ) as caught:
        mt.connect(*resnet, "127.0.0.1:1", at="layer1", timeout=0.5)
    assert caught.value.kind == "UNREACHABLE"


def test_a_closed_client_says_so(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    remote = connected(*resnet, server, "layer1")
    remote.close()
    remote.close()
    with pytest.raises(RemoteError, match="was closed"):
        remote(resnet[1])


def test_a_closed_client_does_not_answer_in_place_of_a_server_that_is_gone(resnet: tuple[nn.Module, Tensor]) -> None:
    with mt.serve(*resnet, listen="127.0.0.1:0") as server:
        remote = mt.connect(*resnet, server.address, at="layer1")
    remote(resnet[1])
    assert remote.requests[-1].where == "edge"
    remote.close()
    with pytest.raises(RemoteError, match="was closed"):
        remote(resnet[1])
    with pytest.raises(RemoteError, match="was closed"):
        remote.session()


# -- stages ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_each_side_has_the_weights_of_its_stage_alone(resnet: tuple[nn.Module, Tensor], tmp_path: Path) -> None:
    model, x = resnet
    mt.split(model, x, at="layer1").save(tmp_path)

    def build() -> nn.Module:
        return zoo.build("tiny-resnet")[0]

    first, last = mt.load_stage(build, tmp_path, 0), mt.load_stage(build, tmp_path, 1)
    assert any(value.is_meta for value in first.model.parameters())
    assert any(value.is_meta for value in last.model.parameters())
    with serving(last) as server:
        assert server.served.cuts == ("layer1",)
        with connected(first, None, server, "layer1") as remote:
            assert remote.server.device == "cpu"
            for rows in (1, 2, 5):
                other = torch.randn(rows, 3, 32, 32)
                assert remote(other).equal(model(other))
            with pytest.raises(RemoteError, match="it cannot be profiled: the server has one stage of the model"):
                remote._chain.pools[0].connections[0].call("Profile", protocol.ProfileRequest(), 10)
        with connected(model, x, server, "layer1") as remote:
            assert remote(x).equal(model(x))
        with pytest.raises(RemoteError, match="does not serve the cut at 'layer2'; it serves 'layer1'"):
            connected(model, x, server, "layer2")
        with pytest.raises(BadQuery, match="the model cannot be cut at 'layer2'"):
            connected(first, None, server, "layer2")
    with serving(model, x) as server, pytest.raises(BadQuery, match="expected the first stage"):
        connected(last, None, server, "layer1")


# -- what a server is asked for ----------------------------------------------------------------------------------------


class Failing(nn.Module):
    """Fails as its inputs ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        error = (None, ValueError, KeyboardInterrupt, SystemExit, MemoryError)[int(x[0, 0])]
        hidden = self.second(self.first(x))
        if error is not None:
            raise error("as asked")
        return hidden


def test_what_a_model_raises_is_told_and_others_are_served() -> None:
    model = Failing().eval()
    x = torch.zeros(1, 2)
    with serving(model, x) as server, connected(model, x, server, "") as remote:
        for number, kind in ((1, "MODEL_FAILED"), (2, "MODEL_FAILED"), (3, "MODEL_FAILED"), (4, "OUT_OF_MEMORY")):
            with pytest.raises(RemoteError, match="as asked") as caught:
                remote(torch.full((1, 2), float(number)))
            assert caught.value.kind == kind
            assert remote(x).equal(model(x))


class Unspeakable(Exception):
    """Cannot even be shown."""

    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_that_cannot_be_shown_is_told_by_its_name_and_others_are_served(
    resnet: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = resnet

    def fails(*_: Any) -> Any:
        raise Unspeakable

    with serving(model, x) as server, connected(model, x, server, "") as remote:
        with monkeypatch.context() as patched:
            patched.setattr(server.served, "compute", fails)
            with pytest.raises(RemoteError, match="could not answer: Unspeakable"):
                remote(x)
        with torch.no_grad():
            assert remote(x).equal(model(x))


class Writing(nn.Module):
    """Mutates its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return self.last(self.first(x).relu_())


@pytest.mark.parametrize("at", ["", "first", "auto"])
def test_the_example_is_left_as_it_was_by_a_model_that_writes_into_it(at: str) -> None:
    model, x = Writing().eval(), torch.randn(2, 4)
    before = x.clone()
    items = [torch.randn(2, 4) for _ in range(6)]
    with (
        mt.serve(model, x, listen="127.0.0.1:0", batch=4, batch_window="50ms") as server,
        mt.connect(model, x, server.address, at=at, deadline=30.0) as remote,
    ):
        results = list(remote.stream(items))
    assert x.equal(before)
    with torch.no_grad():
        for given, result in zip(items, results, strict=True):
            torch.testing.assert_close(result, model(given))


def test_inputs_come_before_the_address(resnet: tuple[nn.Module, Tensor]) -> None:
    model, x = resnet
    for server in (x, None):
        with pytest.raises(
            BadQuery, match=r"expected inputs before the address, as in mt\.connect\(model, x, 'host:7070'"
        ):
            mt.connect(model, "host:7070", server)  # type: ignore[arg-type]


@pytest.mark.parametrize("listen", ["localhost", "7070", ""])
def test_a_server_listens_on_an_address_with_a_port(resnet: tuple[nn.Module, Tensor], listen: str) -> None:
    with pytest.raises(BadQuery, match="expected an address to listen on such as 127.0.0.1:7070"):
        mt.serve(*resnet, listen=listen)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"forward": 5}, BadQuery, "expected forward= as the address of a server or a list of them, got 5"),
        ({"tls_cert": 5, "tls_key": 6}, BadFile, "tls_cert=: expected the name of a file, got 5"),
        ({"forward": "127.0.0.1:1", "forward_ca": 5}, BadFile, "forward_ca=: expected the name of a file, got 5"),
    ],
)
def test_options_of_a_server_of_a_wrong_type_are_refused(
    resnet: tuple[nn.Module, Tensor], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mt.serve(*resnet, listen="127.0.0.1:0", **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"codec": 5}, BadQuery, "expected the name of a codec, such as 'raw' or 'zstd', got 5"),
        ({"codec": ["raw"]}, BadQuery, "expected the name of a codec, such as 'raw' or 'zstd', got a list"),
        ({"timeout": "soon"}, BadQuery, "expected a timeout of more than 0 seconds, such as 0.5 or '500ms', got"),
        ({"timeout": -1}, BadQuery, "expected a timeout of more than 0 seconds, such as 0.5 or '500ms', got -1"),
        ({"ca": 5}, BadFile, "ca=: expected the name of a file, got 5"),
        ({"cert": 5, "key": 6}, BadFile, "cert=: expected the name of a file, got 5"),
    ],
)
def test_options_of_a_client_of_a_wrong_type_are_refused(
    resnet: tuple[nn.Module, Tensor], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mt.connect(*resnet, "127.0.0.1:1", at="layer1", **options)


def test_a_port_that_is_taken_is_said(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    with pytest.raises(BadQuery, match=f"cannot listen on '{server.address}'"):
        mt.serve(*resnet, listen=server.address)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_message": "3GB"}, "expected max_message of at most 2.00 GiB"),
        ({"max_message": "much"}, "expected a number of bytes"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    resnet: tuple[nn.Module, Tensor], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadQuery, match=words):
        serving(*resnet, **options)


def test_a_server_is_described_by_its_model_and_address(server: Server) -> None:
    assert repr(server) == f"<Server of ResNet at {server.address}>"


def test_a_server_may_be_stopped_twice_and_waited_for(resnet: tuple[nn.Module, Tensor]) -> None:
    server = serving(*resnet)
    assert not server.wait(0)
    server.stop()
    server.stop()
    assert server.wait(0)


def test_a_server_that_cannot_listen_leaves_no_threads(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    before = set(threading.enumerate())
    with pytest.raises(BadQuery, match="cannot listen on"):
        mt.serve(*resnet, listen=server.address)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("microtome")]


# -- memory ------------------------------------------------------------------------------------------------------------


def becomes_true(condition: Callable[[], bool], timeout: float = 60.0) -> bool:
    deadline = monotonic() + timeout
    while not condition() and monotonic() < deadline:
        sleep(0.01)
        gc.collect()
    return condition()


def test_an_idle_connection_keeps_no_input_alive(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    model, x = resnet
    with connected(model, x, server, "layer1") as remote:
        image = torch.randn(1, 3, 32, 32)
        freed = weakref.ref(image)
        remote(image)
        del image
        assert becomes_true(lambda: freed() is None, 10)


def test_a_suspended_stream_keeps_no_answered_request_alive(resnet: tuple[nn.Module, Tensor], server: Server) -> None:
    model, x = resnet
    ended = threading.Event()

    def items() -> Iterator[Tensor]:
        yield x
        ended.wait()

    with connected(model, x, server, "layer1") as remote:
        outputs = remote.stream(items())
        next(outputs)
        try:
            assert becomes_true(lambda: not any(isinstance(one, RemoteRequest) for one in gc.get_objects()), 10)
        finally:
            ended.set()
            list(outputs)
