"""Chains: stages on several servers, and on this device at both ends."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.engine.pytree import tensors_in
from microtome.errors import BadQuery, NoMatch, RemoteError, Unsupported
from microtome.remote import protocol
from microtome.remote.client import Remote
from microtome.remote.connection import Connection
from microtome.remote.message import Message
from microtome.remote.remote_session import RemoteSession
from microtome.remote.server import Server
from microtome.zoo.writer import KVCache
from tests.remote.process import ServerProcess
from tests.remote.proxy import Proxy, Weather, until
from tests.remote.slow import Gate, Slow, asking
from tests.remote.small import small
from tests.remote.test_security import Authority

CUTS = ["stem", "layer1"]
SLOW = "tests.remote.slow:Slow", "--input", "1x8"


def serving(model: Any, inputs: Any = None, **options: Any) -> Server:
    return mt.serve(model, inputs, listen="127.0.0.1:0", **options)


def connected(model: Any, x: Any, *servers: Any, **options: Any) -> Remote:
    return mt.connect(model, x, servers=servers, **{"fallback": None, "codec": "raw", "at": CUTS, **options})


@contextmanager
def servers_of(model: nn.Module, x: Tensor, number: int, **options: Any) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(model, x, **options)) for _ in range(number)]


@pytest.fixture(scope="module")
def resnet() -> tuple[nn.Module, Tensor]:
    return small()


@pytest.fixture(scope="module")
def pair(resnet: tuple[nn.Module, Tensor]) -> Iterator[list[Server]]:
    with servers_of(*resnet, 2) as servers:
        yield servers


# -- outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*zoo.names()} - {"tiny-writer"}))
@torch.no_grad()
def test_a_chain_of_three_equals_the_model_bit_for_bit(name: str) -> None:
    model, example = zoo.build(name)
    inputs = mt.Inputs.of(example)
    expected = inputs.run(model)
    cuts = [cut.at for cut in mt.cuts(model, example) if cut.refused is None]
    pairs = list(itertools.combinations(cuts, 2))
    with serving(model, example) as first, serving(model, example) as second:
        for at in random.Random(name).sample(pairs, min(len(pairs), 4)):
            for servers in ((first.address, second.address), (first.address,)):  # the second: the last stage is here
                with connected(model, example, *servers, at=at) as remote:
                    output = remote(*inputs.args, **inputs.kwargs)
                    assert all(map(torch.equal, tensors_in(output), tensors_in(expected))), (at, servers)


@torch.no_grad()
def test_each_stage_runs_where_it_belongs(resnet: tuple[nn.Module, Tensor], pair: list[Server]) -> None:
    model, x = resnet
    with connected(model, x, pair[0].address, pair[1].address) as remote:
        assert remote(x).equal(model(x))
        record = remote.requests[-1]
        assert [hop.server for hop in record.hops] == [server.address for server in pair]
        assert record.tail_s == pytest.approx(sum(hop.run_s for hop in record.hops))
        assert (record.at, record.where) == ("stem", "cloud")
        assert remote.route.cuts == ("stem", "layer1")
    with connected(model, x, pair[0].address, at=["(input)", "layer1"]) as remote:
        assert remote(x).equal(model(x))
        assert remote.requests[-1].last_s > 0
    counted = [server.metrics.registry.get_sample_value("microtome_requests_total", {"cut": ""}) for server in pair]
    assert counted[0] is not None
    assert counted[1] is None


@torch.no_grad()
def test_a_stream_over_a_chain_keeps_the_order_and_other_batch_sizes(
    resnet: tuple[nn.Module, Tensor], pair: list[Server]
) -> None:
    model, x = resnet
    images = [torch.randn(1 + number % 3, 3, 32, 32) for number in range(24)]
    with connected(model, x, *(server.address for server in pair)) as remote:
        for image, output in zip(images, remote.stream(images), strict=True):
            assert output.equal(model(image))


@torch.no_grad()
def test_a_lossy_codec_holds_for_every_hop(resnet: tuple[nn.Module, Tensor], pair: list[Server]) -> None:
    model, x = resnet
    raw, half = (connected(model, x, *(server.address for server in pair), codec=codec) for codec in ("raw", "fp16"))
    with raw, half:
        torch.testing.assert_close(half(x), raw(x), rtol=0.02, atol=0.02)
        assert half.requests[-1].sent_bytes < 0.6 * raw.requests[-1].sent_bytes


# -- neither inputs nor outputs leave ----------------------------------------------------------------------------------


class _Wiretap:
    """A proxy that keeps all bytes that pass it."""

    def __init__(self, address: str) -> None:
        self.data = bytearray()
        self._lock = threading.Lock()
        self.proxy = Proxy(address, lambda _: (Weather(corrupt=self._keep), Weather(corrupt=self._keep)))

    def _keep(self, _: int, data: bytes) -> bytes:
        with self._lock:
            self.data += data
        return data


def _parts(tensor: Tensor) -> list[bytes]:
    """Pieces of the bytes of a tensor, shorter than a frame of HTTP/2."""
    data = tensor.detach().contiguous().numpy().tobytes()
    return [data[start : start + 16] for start in range(0, len(data), 16)]


@torch.no_grad()
def test_neither_the_input_nor_the_output_is_on_the_wire_if_both_ends_run_here(
    resnet: tuple[nn.Module, Tensor], pair: list[Server]
) -> None:
    model, _ = resnet
    x = torch.randn(1, 3, 32, 32)
    output = model(x)
    boundary = mt.split(model, x, at="stem")[0](x).tensors["stem"]

    def crossed(at: Any) -> dict[str, int]:
        tap = _Wiretap(pair[0].address)
        with tap.proxy, connected(model, torch.zeros_like(x), tap.proxy.address, at=at) as remote:
            tap.data.clear()
            assert remote(x).equal(output)
        found = {"input": x, "output": output, "boundary": boundary}
        return {name: sum(part in tap.data for part in _parts(one)) for name, one in found.items()}

    u_shaped = crossed(CUTS)
    assert (u_shaped["input"], u_shaped["output"]) == (0, 0)
    assert u_shaped["boundary"] > 0.9 * len(_parts(boundary))  # the test reads what crosses
    assert crossed("stem")["output"] == len(_parts(output))  # and finds an output where there is one
    assert crossed("(input)")["input"] > 0.9 * len(_parts(x))


# -- stages of a folder ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_loaded_stages_are_served_and_the_client_has_the_first_and_the_last(tmp_path: Path) -> None:
    model, x = small()
    mt.split(model, x, at=CUTS).save(tmp_path)
    first, middle, last = (mt.load_stage(lambda: small()[0], tmp_path, index) for index in range(3))
    image = torch.randn(3, 3, 32, 32)
    with serving(middle) as a, serving(last) as b, serving(first) as c:
        with connected(first, None, a.address, b.address) as remote:
            assert remote(image).equal(model(image))
        with connected([first, last], None, a.address) as remote:
            assert remote(image).equal(model(image))
        with connected([first, last], None, a.address, at="auto") as remote:
            assert remote(image).equal(model(image))
        with connected(model, x, c.address, a.address, b.address, at=["(input)", *CUTS]) as remote:
            assert remote(image).equal(model(image))
        refused = f"{a.address} serves the stage from 'stem' to 'layer1', not the one from 'stem' to '\\(output\\)'"
        with pytest.raises(RemoteError, match=refused):
            connected(first, None, a.address, at="stem")
        with pytest.raises(RemoteError, match="at 'stem'; it serves 'layer1'. Pass the servers in the order of their"):
            connected(model, x, b.address, a.address)
        with pytest.raises(BadQuery, match="only the stage up to 'stem' and from 'layer1' on is here"):
            connected([first, last], None, a.address, at=["stem", "layer2"])
    with pytest.raises(BadQuery, match="or the first and the last one, got"):
        connected([first, middle], None, "127.0.0.1:1")


# -- servers that send to each other -----------------------------------------------------------------------------------


@torch.no_grad()
def test_a_server_forwards_what_crosses_to_the_next_one(resnet: tuple[nn.Module, Tensor], pair: list[Server]) -> None:
    model, x = resnet
    with serving(model, x, forward=pair[0].address) as first:
        addresses = first.address, pair[0].address
        with connected(model, x, *addresses) as direct, connected(model, x, *addresses[::-1]) as relayed:
            assert direct(x).equal(model(x))
            assert relayed(x).equal(model(x))
            assert [hop.server for hop in direct.requests[-1].hops] == list(addresses)
            assert direct.requests[-1].received_bytes < 1000 < relayed.requests[-1].received_bytes
            for image, output in zip(images := [torch.randn(2, 3, 32, 32)] * 8, direct.stream(images), strict=True):
                assert output.equal(model(image))


@torch.no_grad()
def test_three_servers_forward_in_turn(resnet: tuple[nn.Module, Tensor], pair: list[Server]) -> None:
    model, x = resnet
    with (
        serving(model, x, forward=[pair[0].address, pair[1].address]) as second,
        serving(model, x, forward=second.address) as first,
        connected(
            model, x, first.address, second.address, [one.address for one in pair], at=["stem", "layer1", "layer2"]
        ) as remote,
    ):
        answered = set()
        for _ in range(12):
            assert remote(x).equal(model(x))
            hops = [hop.server for hop in remote.requests[-1].hops]
            assert hops[:2] == [first.address, second.address]
            answered.add(hops[2])
        assert remote.requests[-1].received_bytes < 1000
        assert answered == {one.address for one in pair}  # in turn


@torch.no_grad()
def test_the_client_sends_boundaries_itself_if_a_server_cannot_reach_the_next(
    resnet: tuple[nn.Module, Tensor], pair: list[Server]
) -> None:
    model, x = resnet
    with serving(model, x, token="b") as guarded, serving(model, x, forward=pair[0].address, token="b") as first:
        with connected(model, x, first.address, pair[0].address, token="b") as remote:
            assert remote(x).equal(model(x))
        for token, crosses_here in (("wrong", True), (None, True), ("b", False)):  # the client's own is not passed on
            with (
                serving(model, x, forward=guarded.address, forward_token=token, token="b") as server,
                connected(model, x, server.address, guarded.address, token="b") as remote,
            ):
                assert remote(x).equal(model(x))
                assert (remote.requests[-1].received_bytes > 1000) is crosses_here


@torch.no_grad()
def test_a_chain_is_encrypted_between_all_of_its_processes(resnet: tuple[nn.Module, Tensor], tmp_path: Path) -> None:
    model, x = resnet
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    signed = ours.sign("cloud")
    tls = {"tls_cert": signed.cert, "tls_key": signed.key, "token": "b"}
    with serving(model, x, **tls) as last:
        for authority, crosses_here in ((ours, False), (other, True)):
            options = {"forward": last.address, "forward_token": "b", "forward_ca": authority.file}
            with (
                serving(model, x, **tls, **options) as first,
                connected(model, x, first.address, last.address, token="b", ca=ours.file) as remote,
            ):
                assert remote(x).equal(model(x))
                assert (remote.requests[-1].received_bytes > 1000) is crosses_here
        with pytest.raises(RemoteError, match="unknown certificate authority|certificate"):
            connected(model, x, last.address, last.address, token="b", ca=other.file, timeout=5)


def _ask(server: Server, boundary: Any, **fields: Any) -> Any:
    connection = Connection(server.address)
    try:
        message = Message(protocol.Request(id="1", **fields))
        message.encode(boundary)
        message.retry_until = 0.0
        connection.submit(message)
        return message.reply.result(60)
    finally:
        connection.close()


@torch.no_grad()
def test_a_client_cannot_make_a_server_connect_to_others(resnet: tuple[nn.Module, Tensor], pair: list[Server]) -> None:
    model, x = resnet
    boundary = mt.split(model, x, at=CUTS)[0](x)
    stage = protocol.StageRef(cuts=CUTS, index=1)
    with serving(model, x, forward=pair[1].address) as server:
        for address in ("127.0.0.1:22", pair[0].address, ""):
            with pytest.raises(RemoteError, match="does not forward to .*: allow it with --forward") as raised:
                _ask(server, boundary, stage=stage, forward=[protocol.Hop(servers=[address])])
            assert raised.value.kind == "NO_CUT"
        last = protocol.StageRef(cuts=CUTS[:1], index=1)
        with pytest.raises(RemoteError, match="expected a stage before the last one, got servers to forward"):
            _ask(server, boundary, stage=last, forward=[protocol.Hop(servers=[pair[1].address])])


@pytest.mark.parametrize(
    ("cuts", "index", "message"),
    [
        (["stem"], 2, "expected a stage from 0 to 1 of 1 cuts, got 2"),
        (["stem", "layer1"], 2, "expected a boundary of the cut at 'layer1', got one of 'stem'"),
        (["stem", "stem"], 1, "'stem' is named twice"),
        (["stem", "layer9"], 1, "is not served: .*layer9"),
        (["stem", "conv"], 1, "is not served"),
        (["layer1", "stem"], 2, "expected cuts in the order of a run"),
        (["stem", *["layer1"] * 64], 1, "expected at most 64 cuts, got 65"),
    ],
)
@torch.no_grad()
def test_a_stage_that_is_not_there_is_refused(
    resnet: tuple[nn.Module, Tensor], pair: list[Server], cuts: list[str], index: int, message: str
) -> None:
    model, x = resnet
    boundary = mt.split(model, x, at="stem")[0](x)
    with pytest.raises(RemoteError, match=message):
        _ask(pair[0], boundary, stage=protocol.StageRef(cuts=cuts, index=index))


# -- servers that fail -------------------------------------------------------------------------------------------------


def test_only_the_stages_that_are_left_run_here_if_a_server_dies() -> None:
    model = Slow().eval()
    with ServerProcess(*SLOW) as first, ServerProcess(*SLOW) as second, Gate() as gate:
        servers = first.address, second.address
        options = {"at": ["head", "wait"], "fallback": "local"}
        with connected(model, asking(), *servers, **options) as remote, ThreadPoolExecutor(1) as threads:
            x = asking(gate)
            second.hang()
            answer = threads.submit(remote, x)
            gate.open()  # which the first server waits for
            until(lambda: bool(remote._chain.pools[1].connections[0]._pending))
            second.kill()
            assert answer.result(60).equal(model(x))
            record = remote.requests[-1]
            assert record.where == "edge"
            assert second.address in (record.reason or "")
            assert [hop.server for hop in record.hops] == [first.address]  # its stage did not run here
            x = asking()
            assert remote(x).equal(model(x))
            assert remote.requests[-1].hops == ()  # the chain is known to be broken
        with pytest.raises(RemoteError, match=f"{second.address} cannot be reached"):
            connected(model, asking(), *servers, timeout=1, **options)


@torch.no_grad()
def test_a_fallback_leaves_time_before_the_deadline_for_all_stages_of_servers(
    resnet: tuple[nn.Module, Tensor], pair: list[Server]
) -> None:
    servers = [server.address for server in pair]
    with connected(*resnet, *servers, fallback="local", deadline=60) as remote:
        assert remote._fallback_s("stem") > 0


def test_a_deadline_holds_over_the_chain() -> None:
    model = Slow().eval()
    with serving(model, asking()) as first, serving(model, asking()) as second, Gate() as gate:
        servers = first.address, second.address
        with connected(model, asking(), *servers, at=["head", "wait"], deadline=0.5) as remote:
            with pytest.raises(RemoteError, match=r"did not answer in 0.5 s") as raised:
                remote(asking(gate))
            assert raised.value.kind == "DEADLINE"
            gate.open()
            until(remote._chain.is_idle)


@torch.no_grad()
def test_servers_of_one_stage_are_used_in_turn_and_one_that_dies_is_left_out_until_it_is_back(
    resnet: tuple[nn.Module, Tensor], pair: list[Server]
) -> None:
    model, x = resnet

    def answering(remote: Remote, requests: int = 8) -> set[str]:
        answered = set()
        for _ in range(requests):
            assert remote(x).equal(model(x))
            answered.add(remote.requests[-1].hops[0].server)
        return answered

    dying = serving(model, x)
    port = dying.address
    with connected(model, x, [port, pair[0].address], pair[1].address) as remote:
        assert answering(remote) == {port, pair[0].address}
        dying.stop(0)
        assert answering(remote) == {pair[0].address}
        with mt.serve(model, x, listen=port):
            pool = remote._chain.pools[0]
            until(lambda: all(connection.down_reason is None for connection in pool.connections))
            assert answering(remote) == {port, pair[0].address}


@pytest.mark.integration
@torch.no_grad()
def test_a_killed_server_of_two_loses_no_request_of_four_clients() -> None:
    model, x = small()
    images = [torch.randn(1 + number % 2, 3, 32, 32) for number in range(12)]
    expected = [model(image) for image in images]
    with ServerProcess() as a, ServerProcess() as b, ServerProcess() as last:
        is_over = threading.Event()

        def ask(seed: int) -> int:
            order = random.Random(seed)
            answered = 0
            with torch.no_grad(), connected(model, x, [a.address, b.address], last.address) as remote:
                while not is_over.is_set():
                    chosen = [order.randrange(len(images)) for _ in range(10)]
                    for index, output in zip(chosen, remote.stream([images[one] for one in chosen]), strict=True):
                        assert output.equal(expected[index])
                        answered += 1
            return answered

        with ThreadPoolExecutor(4) as threads:
            clients = [threads.submit(ask, seed) for seed in range(4)]
            try:
                for victim in (a, b):
                    threading.Event().wait(1.0)
                    victim.kill()
                    threading.Event().wait(1.0)
                    victim.start()
            finally:
                is_over.set()
            assert all(client.result(120) > 20 for client in clients)


# -- sessions over several servers -------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_session_stays_with_its_server_and_goes_on_at_another_one_if_that_dies() -> None:
    writer, example = zoo.build("tiny-writer")
    model: Any = writer
    prompt = torch.tensor([model.encode("Each stage ")])
    expected = model.generate(prompt, max_new_tokens=12)
    with (
        serving(model, example) as first,
        serving(model, example) as second,
        connected(model, example, [first.address, second.address], at="layers.1") as remote,
    ):
        for _ in range(3):
            assert remote.generate(prompt, max_new_tokens=12).equal(expected)
        with remote.session() as session:
            assert isinstance(session, RemoteSession)
            ids, cache = prompt, KVCache()
            for step in range(6):
                output = session(input_ids=ids, cache=cache)
                ids, cache = output["logits"][:, -1:].argmax(-1), output["cache"]
                assert ids.item() == expected[0, prompt.shape[1] + step].item()
                if step == 2:
                    address = session._steps._connection.address
                    next(one for one in (first, second) if one.address == address).stop(0)
            assert (session.replays, session.where) == (1, "cloud")


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_mistakes_are_explained_before_anything_is_computed(
    resnet: tuple[nn.Module, Tensor], pair: list[Server]
) -> None:
    model, x = resnet
    a, b = (server.address for server in pair)
    with pytest.raises(BadQuery, match="expected 2 servers for 2 cuts, or 1 if this device runs the last .*, got 3"):
        connected(model, x, a, b, a)
    with pytest.raises(BadQuery, match="expected 1 server for 1 cut, got 2"):
        connected(model, x, a, b, at="stem")
    with pytest.raises(BadQuery, match=r"expected 2 cuts for 2 servers, got at='auto', .*: name every cut, at=\[…\]"):
        connected(model, x, a, b, at="auto")
    for servers in ([a], [a, b]):
        with pytest.raises(BadQuery, match=r"'auto' chooses one cut, and cannot be among others: name every cut, at="):
            connected(model, x, *servers, at=["auto", "layer2"])
    for several in ([a, b], (a, b)):
        with pytest.raises(BadQuery, match=r"expected one address as server=, got .*: pass several as servers=\[…\]"):
            mt.connect(model, x, server=several, at=CUTS)  # type: ignore[call-overload]
    with pytest.raises(NoMatch, match="layer9"):
        connected(model, x, a, b, at=["stem", "layer9"])
    with pytest.raises(BadQuery, match="expected server= for one server, or servers= for several, got both"):
        mt.connect(model, x, a, servers=[a, b], at=CUTS)
    for wrong in ([], a, {a: b}, [a, []]):
        with pytest.raises(BadQuery, match=r"expected a list of the servers of each stage"):
            mt.connect(model, x, servers=wrong, at=CUTS)  # type: ignore[arg-type]
    with pytest.raises(BadQuery, match="the address of a server such as host:7070, got 7070: did you mean 127.0.0.1"):
        connected(model, x, a, 7070)
    with pytest.raises(BadQuery, match=r"expected one address, got 'a:1,b:1': pass several servers of a stage as"):
        connected(model, x, "a:1,b:1", b)
    with pytest.raises(BadQuery, match="the address of a server such as host:7070, got 'nowhere'"):
        connected(model, x, a, "nowhere")
    with pytest.raises(BadQuery, match="forward: expected the address of a server such as host:7070, got 'b'"):
        serving(model, x, forward="b")
    other, _ = small()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with serving(other, x) as strange, pytest.raises(RemoteError, match=f"at {strange.address} differ") as raised:
        connected(model, x, [a, strange.address], b)
    assert raised.value.kind == "WRONG_MODEL"


def test_a_session_over_a_chain_of_servers_is_refused() -> None:
    model, example = zoo.build("tiny-writer")
    with (
        serving(model, example) as a,
        serving(model, example) as b,
        connected(model, example, a.address, b.address, at=["layers.0", "layers.1"]) as remote,
        pytest.raises(Unsupported, match="expected one cut for a session, got 2: connect to one server"),
    ):
        remote.session()


# -- plans -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_plan_of_a_chain_is_connected_as_it_is(resnet: tuple[nn.Module, Tensor], pair: list[Server]) -> None:
    model, x = resnet
    cuts = mt.cuts(model, x)
    profile = mt.profile(model, x, measure="time")
    devices = {"phone": profile, "gateway": profile, "cloud": profile}
    link = mt.Link("100Gbps", rtt="0.1ms")
    plan = mt.plan(cuts, devices=devices, links=[link, link], objective="throughput", codec="raw")
    with connected(model, x, *(server.address for server in pair), at=plan) as remote:
        assert remote(x).equal(model(x))
        addresses = [at or "" for at in dict.fromkeys(plan.winner.at)]
        assert [remote.at, *remote.route.later] == addresses
    with pytest.raises(BadQuery, match="expected a server for each device of the plan after the first, gateway, cloud"):
        connected(model, x, *(server.address for server in pair), pair[0].address, at=plan)
