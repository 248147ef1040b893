"""Several servers of one stage, of which some cannot be reached at the start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import RemoteError
from microtome.remote import client
from microtome.remote.client import Remote
from microtome.remote.server import Server
from tests.remote.process import ServerProcess
from tests.remote.proxy import until
from tests.remote.slow import Gate, Slow, asking
from tests.remote.small import small

CUTS = ["stem", "layer1"]


@pytest.fixture(scope="module")
def resnet() -> tuple[nn.Module, Tensor]:
    return small()


@pytest.fixture(scope="module")
def up(resnet: tuple[nn.Module, Tensor]) -> Iterator[Server]:
    with mt.serve(*resnet, listen="127.0.0.1:0") as server:
        yield server


def other_model() -> tuple[nn.Module, Tensor]:
    model, x = small()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    return model, x


pytestmark = pytest.mark.filterwarnings("ignore:left out until it is back")


def connected(model: nn.Module, x: Tensor, *servers: Any, **options: Any) -> Remote:
    return mt.connect(model, x, servers=servers, **{"fallback": None, "codec": "raw", "at": "layer1", **options})


def answering(remote: Remote, model: nn.Module, x: Tensor, requests: int = 8) -> set[str]:
    """The servers that answer some requests."""
    answered = set()
    for _ in range(requests):
        assert remote(x).equal(model(x))
        answered |= {hop.server for hop in remote.requests[-1].hops}
    return answered


def is_up(remote: Remote, address: str) -> bool:
    (connection,) = (one for pool in remote._chain.pools for one in pool.connections if one.address == address)
    return connection.down_reason is None


@pytest.mark.parametrize("is_first", [False, True])
@torch.no_grad()
def test_a_server_that_is_down_at_the_start_is_left_out_until_it_is_back(
    resnet: tuple[nn.Module, Tensor], up: Server, down: str, caplog: pytest.LogCaptureFixture, *, is_first: bool
) -> None:
    stage = [down, up.address] if is_first else [up.address, down]
    left_out = f"left out until it is back: {down} cannot be reached"
    with pytest.warns(RuntimeWarning, match=left_out):
        remote = connected(*resnet, stage, up.address, at=CUTS)
    with remote:
        assert left_out in caplog.text
        (reason,) = remote.down_reasons
        assert reason.startswith(f"{down} cannot be reached")
        assert answering(remote, *resnet) == {up.address}
        with mt.serve(*resnet, listen=down):
            until(lambda: is_up(remote, down))
            assert answering(remote, *resnet) == {up.address, down}
            assert remote.down_reasons == []


@torch.no_grad()
def test_a_server_that_comes_back_with_another_model_is_never_used_and_named(
    resnet: tuple[nn.Module, Tensor], up: Server, down: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(*resnet, [down, up.address], up.address, at=CUTS) as remote:
        with mt.serve(*other_model(), listen=down) as strange:
            until(lambda: "not used: the weights of" in caplog.text)
            assert f"at {down} differ" in caplog.text
            assert answering(remote, *resnet) == {up.address}
            asked = strange.metrics.registry.get_sample_value("microtome_requests_total", {"cut": "stem"})
            assert asked is None
        with mt.serve(*resnet, listen=down):  # and is used once it has the model
            until(lambda: is_up(remote, down))
            assert answering(remote, *resnet) == {up.address, down}
    assert caplog.text.count("not used") == 1


@torch.no_grad()
def test_a_server_that_dies_is_checked_again_when_it_is_back(
    resnet: tuple[nn.Module, Tensor], up: Server, down: str, caplog: pytest.LogCaptureFixture
) -> None:
    dying = mt.serve(*resnet, listen=down)
    with connected(*resnet, [down, up.address], up.address, at=CUTS) as remote:
        dying.stop(0)
        assert answering(remote, *resnet) == {up.address}
        with mt.serve(*other_model(), listen=down):
            until(lambda: f"at {down} differ" in caplog.text)
            assert answering(remote, *resnet) == {up.address}


@torch.no_grad()
def test_a_server_of_another_stage_is_not_used_when_it_is_back(
    resnet: tuple[nn.Module, Tensor], up: Server, down: str, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mt.split(*resnet, at=CUTS).save(tmp_path)
    last = mt.load_stage(lambda: small()[0], tmp_path, 2)
    with connected(*resnet, [up.address, down], up.address, at=CUTS) as remote, mt.serve(last, listen=down):
        until(lambda: f"{down} does not serve the cut at 'stem'" in caplog.text)
        assert answering(remote, *resnet) == {up.address}


@torch.no_grad()
def test_a_cut_is_chosen_with_a_server_that_is_up(resnet: tuple[nn.Module, Tensor], up: Server, down: str) -> None:
    with connected(*resnet, [down, up.address], at="auto") as remote:
        assert remote(resnet[1]).equal(resnet[0](resnet[1]))
        assert len(remote.servers) == 1
        assert remote.server.model == type(resnet[0]).__name__


@torch.no_grad()
def test_a_server_forwards_past_one_that_is_down(
    resnet: tuple[nn.Module, Tensor], up: Server, down: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first, second = mt.serve(*resnet, listen="127.0.0.1:0"), mt.serve(*resnet, listen=down)
    forward = [down, up.address]
    first.stop(0)
    with mt.serve(*resnet, listen=first.address, forward=forward) as before:
        remote = connected(*resnet, first.address, forward, at=CUTS)
        before.stop(0)
    second.stop(0)
    with mt.serve(*resnet, listen=first.address, forward=forward), remote:  # it has not connected to the second yet
        assert answering(remote, *resnet) == {first.address, up.address}
        assert len(remote.requests[-1].hops) == 2
    assert f"left out until it is back: {down} cannot be reached" in caplog.text
    assert "through the client" not in caplog.text


@pytest.mark.integration
def test_a_request_goes_to_another_server_however_late_the_failure_of_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_RESEND_FOR_S", 0.0)  # as for a server that hangs for longer
    model = Slow().eval()
    slow = "tests.remote.slow:Slow", "--input", "1x8"
    with (
        ServerProcess(*slow) as a,
        ServerProcess(*slow) as b,
        Gate() as gate,
        ThreadPoolExecutor(1) as threads,
        connected(model, asking(), [a.address, b.address], at="head") as remote,
    ):
        x, (pool,) = asking(gate), remote._chain.pools
        answer = threads.submit(remote, x)
        until(lambda: not pool.is_idle())
        (busy,) = (one.address for one in pool.connections if not one.is_idle())
        next(server for server in (a, b) if server.address == busy).kill()
        gate.open()
        assert answer.result(60).equal(model(x))


def test_servers_that_are_all_down_are_an_error(resnet: tuple[nn.Module, Tensor], up: Server, down: str) -> None:
    for servers in ([down], [[down, down]], [up.address, [down, down]]):
        at = CUTS if len(servers) > 1 else "layer1"
        with pytest.raises(RemoteError, match=f"{down} cannot be reached"):
            connected(*resnet, *servers, at=at)


def test_a_server_that_is_up_and_has_another_model_is_an_error(
    resnet: tuple[nn.Module, Tensor], up: Server, down: str
) -> None:
    with mt.serve(*other_model(), listen="127.0.0.1:0") as strange, pytest.raises(RemoteError) as raised:
        connected(*resnet, [down, up.address, strange.address])
    assert raised.value.kind == "WRONG_MODEL"
