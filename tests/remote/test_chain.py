"""Chains: stages on several servers, and on this device at both ends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.engine.pytree import tensors_in
from microtome.errors import BadQuery, NoMatch, RemoteError, Unsupported
from microtome.remote import protocol, service
from microtome.remote.connection import Connection
from microtome.remote.message import Message
from microtome.remote.remote_session import RemoteSession
from microtome.remote.server import Server
from microtome.zoo.writer import KVCache
from tests.remote.chains import CUTS, connected, servers_of, serving
from tests.remote.small import small
from tests.remote.test_security import Authority


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
def test_every_server_of_a_chain_computes_batches(resnet: tuple[nn.Module, Tensor]) -> None:
    model, x = resnet
    images = [torch.randn(1, 3, 32, 32) for _ in range(16)]
    options: dict[str, Any] = {"batch": 8, "batch_window": "1s"}
    with serving(model, x, **options) as a, serving(model, x, **options) as b:
        with connected(model, x, a.address, b.address) as remote:
            for image, output in zip(images, remote.stream(images, window=8), strict=True):
                torch.testing.assert_close(output, model(image), rtol=1e-4, atol=1e-5)
        for server in (a, b):
            assert (server.metrics.registry.get_sample_value("microtome_batch_count") or 0) < len(images)


@torch.no_grad()
def test_a_lossy_codec_holds_for_every_hop(resnet: tuple[nn.Module, Tensor], pair: list[Server]) -> None:
    model, x = resnet
    raw, half = (connected(model, x, *(server.address for server in pair), codec=codec) for codec in ("raw", "fp16"))
    with raw, half:
        torch.testing.assert_close(half(x), raw(x), rtol=0.02, atol=0.02)
        assert half.requests[-1].sent_bytes < 0.6 * raw.requests[-1].sent_bytes


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
        with pytest.raises(BadQuery, match="this client has the stage up to 'stem' and from 'layer1' on alone"):
            connected([first, last], None, a.address, at=["stem", "layer2"])
    with pytest.raises(BadQuery, match="or the first and the last one, got"):
        connected([first, middle], None, "127.0.0.1:1")


def test_a_server_of_one_stage_cannot_find_the_best_cut(resnet: tuple[nn.Module, Tensor]) -> None:
    with (
        serving(mt.split(*resnet, at="layer1")[1]) as server,
        pytest.raises(BadQuery, match=f"expected at= for {server.address}, got 'auto': .*; choose one of 'layer1'"),
    ):
        mt.connect(*resnet, server.address)


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


@pytest.mark.parametrize("is_forwarded", [False, True])
@torch.no_grad()
def test_two_servers_run_the_middle_stages_of_four(
    resnet: tuple[nn.Module, Tensor], pair: list[Server], is_forwarded: bool
) -> None:
    model, x = resnet
    cuts = ["stem", "layer1", "layer2"]
    images = [torch.randn(1 + number % 3, 3, 32, 32) for number in range(6)]
    with serving(model, x, forward=pair[1].address if is_forwarded else ()) as first:
        addresses = [first.address, pair[1].address]
        with connected(model, x, *addresses, at=cuts) as remote:
            for image, output in zip(images, remote.stream(images), strict=True):
                assert output.equal(model(image))
            record = remote.requests[-1]
            assert [hop.server for hop in record.hops] == addresses
            assert [hop.at for hop in record.hops] == cuts[:2]
            assert record.last_s > 0  # the last stage ran here
            crossed = mt.split(model, images[-1], at="layer1")[0](images[-1]).nbytes
            assert (record.received_bytes > crossed) is not is_forwarded


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


@torch.no_grad()
def test_every_process_of_a_chain_shows_its_certificate(resnet: tuple[nn.Module, Tensor], tmp_path: Path) -> None:
    model, x = resnet
    authority = Authority(tmp_path, "ours")
    cloud, edge = authority.sign("cloud"), authority.sign("edge")
    tls = {"tls_cert": cloud.cert, "tls_key": cloud.key, "client_ca": authority.file}
    client = {"ca": authority.file, "cert": edge.cert, "key": edge.key}
    shown = {"forward_cert": cloud.cert, "forward_key": cloud.key}
    with serving(model, x, **tls) as last:
        with (
            serving(model, x, **tls, **shown, forward=last.address, forward_ca=authority.file) as first,
            connected(model, x, first.address, last.address, **client) as forwarded,
            connected(model, x, last.address, first.address, **client) as relayed,
        ):
            assert forwarded(x).equal(model(x))
            assert relayed(x).equal(model(x))
            assert forwarded.requests[-1].received_bytes < 1000 < relayed.requests[-1].received_bytes
        with pytest.raises(RemoteError, match="If it requires a client certificate, add cert= and key="):
            connected(model, x, last.address, last.address, ca=authority.file, timeout=1)


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
    for first in ("(input)", ""):
        with pytest.raises(BadQuery, match=r"the cut at '\(input\)' is named twice"):
            connected(model, x, a, b, at=["(input)", first])
    with pytest.raises(BadQuery, match="the cut at 'stem' is named twice"):
        connected(model, x, a, b, at=["stem", "stem"])
    with pytest.raises(BadQuery, match="the order of a run, 'stem', 'layer1', as the servers are, got 'layer1'"):
        connected(model, x, a, b, at=["layer1", "stem"])
    with pytest.raises(BadQuery, match=r"in the order of a run, '\(input\)' first, got 'stem', '\(input\)'"):
        connected(model, x, a, b, at=["stem", "(input)"])
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
    times: list[Any] = ["soon", -1, 0, True, [1]]
    for time in times:
        for name in ("deadline", "timeout"):
            with pytest.raises(
                BadQuery, match=f"expected a {name} of more than 0 seconds, such as 0.5 or '500ms', got"
            ):
                connected(model, x, a, b, **{name: time})
    for codec in (5, ["raw"], None):
        with pytest.raises(BadQuery, match="expected the name of a codec, such as 'raw' or 'zstd', got"):
            connected(model, x, a, b, codec=codec)
    stage = mt.split(model, x, at=CUTS)[0]
    with pytest.raises(BadQuery, match=r"expected 1 server for 1 cut, got 2: name every cut, at=\[…\]"):
        mt.connect(stage, None, servers=[a, b])
    for stages in ([stage], mt.split(model, x, at="stem"), "resnet", None):
        with pytest.raises(BadQuery, match=r"expected a model, or one of its stages such as stages\[1\], got"):
            serving(stages)
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


def plan_with(model: nn.Module, x: Tensor, at: list[str], codecs: list[str]) -> mt.Plan:
    """A plan over three devices whose links are crossed at these cuts with these codecs."""
    profile = mt.profile(model, x, measure="time", repeat=3)
    link = mt.Link("1Gbps")
    devices = dict.fromkeys(["phone", "gateway", "cloud"], profile)
    plan = mt.plan(mt.cuts(model, x), devices=devices, links=[link, link], codec="raw")
    return replace(plan, candidates=(replace(plan.winner, at=tuple(at), codecs=tuple(codecs)),), chosen=0)


def received_bytes(server: Server) -> float:
    return server.metrics.registry.get_sample_value("microtome_bytes_total", {"direction": "received"}) or 0.0


@pytest.mark.parametrize("is_forwarded", [False, True])
@torch.no_grad()
def test_each_cut_of_a_plan_has_its_codec(
    resnet: tuple[nn.Module, Tensor], pair: list[Server], is_forwarded: bool
) -> None:
    model, x = resnet
    plan = plan_with(model, x, CUTS, ["raw", "fp16"])
    with serving(model, x, forward=pair[1].address if is_forwarded else ()) as first:
        servers = first, pair[1]
        with connected(model, x, *(one.address for one in servers), at=plan, codec="auto") as remote:
            assert remote.route.codecs == ("raw", "fp16")
            before = [received_bytes(server) for server in servers]
            torch.testing.assert_close(remote(x), model(x), rtol=0.02, atol=0.02)
            whole, half = (received_bytes(one) - known for one, known in zip(servers, before, strict=True))
            # 16 channels of 32 by 32 cross each of the cuts.
            assert 65_536 < whole < 70_000
            assert 32_768 < half < 36_000
        with connected(model, x, *(one.address for one in servers), at=plan, codec="raw") as remote:
            assert remote.route.codecs == ("raw", "raw")  # a codec that is named replaces those of the plan
            assert remote(x).equal(model(x))


@torch.no_grad()
def test_a_device_that_a_plan_leaves_out_needs_no_server(resnet: tuple[nn.Module, Tensor], pair: list[Server]) -> None:
    model, x = resnet
    plan = plan_with(model, x, ["layer1", "layer1"], ["raw", "raw"])
    with connected(model, x, "127.0.0.1:1", pair[0].address, at=plan) as remote:
        assert remote(x).equal(model(x))
        assert (remote.at, remote.route.later) == ("layer1", ())


@torch.no_grad()
def test_a_server_without_a_codec_of_the_route_is_refused(
    resnet: tuple[nn.Module, Tensor], pair: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CODECS", ("raw", "zstd"))
    with pytest.raises(RemoteError, match=f"{pair[0].address} does not have the codec 'fp16'; it has raw, zstd"):
        connected(*resnet, *(server.address for server in pair), codec="fp16+zstd")


@torch.no_grad()
def test_the_last_requests_are_a_result_with_a_table_and_files(
    resnet: tuple[nn.Module, Tensor], pair: list[Server], tmp_path: Path
) -> None:
    model, x = resnet
    with connected(model, x, *(server.address for server in pair)) as remote:
        before = remote.log()
        list(remote.stream([x] * 6, window=3))
        log = remote.log()
    assert len(log.requests) == len(before.requests) + 6
    assert log.server == " → ".join(server.address for server in pair)
    assert 1 <= log.window <= 4
    assert log.samples is None
    assert log.wall_s >= max(sent.total_s for sent in log.requests)
    assert mt.load(log.to_json(tmp_path / "log.json")).requests[-1].hops == log.requests[-1].hops
    assert len(log.to_csv().splitlines()) == 1 + len(log.requests)
