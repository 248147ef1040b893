"""Training over a network: the head here, the tail on a server, beside the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import microtome as mt
from microtome.errors import BadFile, BadQuery, NoMatch, RemoteError, SessionError, Unsupported
from microtome.remote import protocol
from microtome.remote.connection import Connection
from microtome.remote.message import Message
from microtome.remote.server import Server, serve
from microtome.remote.training.backend import FORWARD
from microtome.remote.training.client import RemoteTraining
from microtome.remote.training.server_run import TrainingRun
from tests.remote.proxy import Proxy, until
from tests.remote.small import small
from tests.remote.training_process import (
    AT,
    POINTS,
    X,
    batch_of,
    build,
    connect,
    make_optimizer,
    run_client_kills,
    run_kills,
    train_step,
    train_undisturbed,
)

pytestmark = pytest.mark.integration


def blocks(dropout: float = 0.0) -> nn.Module:
    """Blocks with batch norm, the second of which is cut inside."""
    torch.manual_seed(3)
    layers = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3))
    return nn.Sequential(*layers, nn.Linear(8, 4)).train()


def serving(model: nn.Module, **options: Any) -> Server:
    return serve(model, X, listen="127.0.0.1:0", **{"optimizer": make_optimizer, **options})


def run_of(server: Server) -> TrainingRun:
    assert server.served.training is not None
    return server.served.training


def train_whole(model: nn.Module, steps: int, parts: int = 2) -> list[float]:
    optimizer = make_optimizer(list(model.parameters()))
    losses = []
    for step in range(steps):
        inputs, target = batch_of(step)
        optimizer.zero_grad()
        total = 0.0
        for part, part_target in zip(inputs.chunk(parts), target.chunk(parts), strict=True):
            loss = cross_entropy(model(part), part_target) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def check_equal(whole: nn.Module, here: nn.Module, there: nn.Module, head: range) -> None:
    """Compare the weights of both sides with those of the whole model, bit for bit."""
    for name, weight in whole.state_dict().items():
        side = here if int(name.partition(".")[0]) in head else there
        assert side.state_dict()[name].equal(weight), name


def test_both_sides_have_the_weights_of_the_whole_model_after_steps_of_several_micro_batches() -> None:
    whole, here, there = blocks(), blocks(), blocks()
    with serving(there) as server, connect(here, server.address, at="1") as remote:
        losses = [train_step(remote) for _ in range(4)]
        assert remote.num_steps == run_of(server).step == 4
        assert "cut at '1', step 4" in repr(remote)
    assert losses == train_whole(whole, 4)
    check_equal(whole, here, there, range(2))


def test_forwards_may_come_before_all_backwards_and_outputs_remain_unused() -> None:
    whole, here, there = blocks(), blocks(), blocks()
    inputs, target = batch_of(0)
    with serving(there) as server, connect(here, server.address, at="1") as remote:
        outputs = [remote(part) for part in inputs.chunk(3)]
        for index in (1, 0):
            cross_entropy(outputs[index], target.chunk(3)[index]).backward()
        remote.step()
    optimizer = make_optimizer(list(whole.parameters()))
    outputs = [whole(part) for part in inputs.chunk(3)]
    for index in (1, 0):
        cross_entropy(outputs[index], target.chunk(3)[index]).backward()
    optimizer.step()
    check_equal(whole, here, there, range(2))


def test_a_language_model_trains_on_lengths_that_vary() -> None:
    from tests.split.language_models import VOCABULARY
    from tests.split.language_models import build as build_language_model

    model, at = build_language_model("llama")
    model.train()
    whole, there = copy.deepcopy(model), copy.deepcopy(model)
    example = {"input_ids": torch.arange(3, 12)[None], "use_cache": False}
    whole_optimizer = make_optimizer(list(whole.parameters()))
    with (
        serve(there, example, listen="127.0.0.1:0", optimizer=make_optimizer) as server,
        mt.connect(model, example, server.address, at, train=True, optimizer=make_optimizer) as remote,
    ):
        for step, length in enumerate((9, 5, 14)):
            ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(step))
            losses = []
            for one in (remote, whole):
                logits = one(input_ids=ids, use_cache=False).logits
                losses.append(cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()))
                losses[-1].backward()
            remote.step()
            whole_optimizer.step()
            whole_optimizer.zero_grad()
            assert losses[0].equal(losses[1])
    trained = {id(weight) for weight in remote.parameters()}
    for (name, weight), expected, other in zip(
        model.named_parameters(), whole.parameters(), there.parameters(), strict=True
    ):
        assert (weight if id(weight) in trained else other).equal(expected), name


@pytest.mark.parametrize("at_server", [False, True], ids=["labels are sent", "labels are at the server"])
def test_the_server_may_own_the_loss_and_the_labels(at_server: bool) -> None:
    whole, here, there = blocks(), blocks(), blocks()
    inputs, target = batch_of(0)
    losses_seen: list[torch.Size] = []

    def loss_of(output: Tensor, labels: Tensor) -> Tensor:
        losses_seen.append(output.shape)
        return cross_entropy(output, target[labels] if at_server else labels)

    with serving(there, loss=loss_of) as server, connect(here, server.address, at="1") as remote:
        with pytest.raises(
            RemoteError, match=r"the server computes the loss, and outputs do not leave it: call loss\(\)"
        ):
            remote(inputs)
        remote.zero_grad()
        loss = remote.loss(inputs, torch.arange(6) if at_server else target)
        loss.backward()
        remote.step()
    optimizer = make_optimizer(list(whole.parameters()))
    expected = cross_entropy(whole(inputs), target)
    expected.backward()
    optimizer.step()
    assert loss.equal(expected)
    assert losses_seen == [(6, 4)]
    check_equal(whole, here, there, range(2))


def test_one_side_may_keep_its_weights_for_a_step() -> None:
    here, there = blocks(), blocks()
    start = copy.deepcopy(here)

    def changed(model: nn.Module) -> bool:
        old = dict(start.named_parameters())
        return any(not one.equal(old[name]) for name, one in model.named_parameters())

    inputs, target = batch_of(0)
    with serving(there) as server, connect(here, server.address, at="1") as remote:
        cross_entropy(remote(inputs), target).backward()
        remote.step(client=False)
        assert (changed(here), changed(there)) == (False, True)
        start.load_state_dict(there.state_dict())
        before = copy.deepcopy(here.state_dict())
        cross_entropy(remote(inputs), target).backward()
        remote.step(server=False)
        assert not changed(there)
        assert any(not one.equal(before[name]) for name, one in here.named_parameters())
        assert remote.num_steps == 2


def test_the_tail_trains_behind_a_head_without_trained_parameters() -> None:
    here, there = blocks(), blocks()
    for parameter in [*here[:2].parameters(), *there[:2].parameters()]:  # type: ignore[index]
        parameter.requires_grad_(False)
    whole = copy.deepcopy(here)
    with serving(there) as server, connect(here, server.address, at="1") as remote:
        assert list(remote.parameters()) == []
        assert remote.optimizer is None
        train_step(remote)
    optimizer = make_optimizer([one for one in whole.parameters() if one.requires_grad])
    inputs, target = batch_of(0)
    for part, part_target in zip(inputs.chunk(2), target.chunk(2), strict=True):
        (cross_entropy(whole(part), part_target) / 2).backward()
    optimizer.step()
    check_equal(whole, here, there, range(2))


def test_an_optimizer_of_the_caller_may_step_the_head() -> None:
    whole, here, there = blocks(), blocks(), blocks()
    with serving(there) as server, connect(here, server.address, at="1", optimizer=None) as remote:
        optimizer = make_optimizer(list(remote.parameters()))
        for step in range(2):
            inputs, target = batch_of(step)
            cross_entropy(remote(inputs), target).backward()
            optimizer.step()
            remote.step()
    train_whole(whole, 2, parts=1)
    check_equal(whole, here, there, range(2))


def test_the_optimizer_may_train_parameters_beside_those_of_the_model(tmp_path: Path) -> None:
    whole, here, there = blocks(), blocks(), blocks()
    scale, scale_here = (nn.Parameter(torch.ones(())) for _ in range(2))
    optimizer = make_optimizer([*whole.parameters(), scale])

    def with_scale(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return make_optimizer([*parameters, scale_here])

    with serving(there, checkpoint=tmp_path / "there") as server:
        with connect(here, server.address, at="1", optimizer=with_scale, checkpoint=tmp_path / "here") as remote:
            for step in range(3):
                inputs, target = batch_of(step)
                optimizer.zero_grad()
                for model, factor in ((remote, scale_here), (whole, scale)):
                    cross_entropy(model(inputs) * factor, target).backward()
                remote.step()
                optimizer.step()
            check_equal(whole, here, there, range(2))
            assert scale_here.equal(scale)
            (remote(inputs).sum() * scale_here).backward()
            remote.zero_grad()
            assert scale_here.grad is None
        until(lambda: run_of(server)._owner is None, 30)
    trained = scale_here.detach().clone()
    scale_here.data.zero_()
    with (
        serving(blocks(), checkpoint=tmp_path / "there") as server,
        connect(blocks(), server.address, at="1", optimizer=with_scale, checkpoint=tmp_path / "here") as remote,
    ):
        assert remote.num_steps == 3
        assert scale_here.equal(trained)


def test_the_server_seeds_and_restores_the_generators_of_its_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        pytest.fail("torch.manual_seed seeds the generators of every device")

    def with_dropout_in_the_tail() -> nn.Module:
        net = blocks()
        net[2][3].p = 0.5  # type: ignore[index]
        return net

    here, there = with_dropout_in_the_tail(), with_dropout_in_the_tail()
    with serving(there) as server, connect(here, server.address, at="1") as remote:
        monkeypatch.setattr(torch, "manual_seed", fail)
        before = torch.get_rng_state()
        outputs = [remote(X) for _ in range(2)]
        assert torch.get_rng_state().equal(before)
        remote.zero_grad()
        assert remote(X).equal(outputs[0])
        assert not outputs[0].equal(outputs[1])


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["after the forward", "between two backwards", "before the step"])
def test_a_step_whose_stream_breaks_is_sent_again_with_the_same_random_numbers(when: str) -> None:
    losses, expected_here, expected_there = train_undisturbed(3)
    here, there = build(), build()
    with serving(there) as server, Proxy(server.address) as proxy, connect(here, proxy.address) as remote:
        assert train_step(remote) == losses[0]
        inputs, target = batch_of(1)
        torch.manual_seed(1)
        parts = list(zip(inputs.chunk(2), target.chunk(2), strict=True))
        for index, (part, part_target) in enumerate(parts):
            output = remote(part)
            if when == "after the forward" or (when == "between two backwards" and index):
                proxy.cut()
            (cross_entropy(output, part_target) / 2).backward()
        if when == "before the step":
            proxy.cut()
        remote.step()
        assert remote.retries > 0
        assert train_step(remote) == losses[2]
    for name, weight in here.state_dict().items():
        own, expected = (here, expected_here) if int(name[0]) <= int(AT) else (there, expected_there)
        assert own.state_dict()[name].equal(expected[name]), name
        del weight


def test_a_server_that_is_killed_continues_from_the_whole_step_of_the_client(tmp_path: Path) -> None:
    result = run_kills(1, tmp_path, ["after a backward"])
    assert result.pop("retries") > 0
    assert result.pop("steps") >= 2
    assert result == {"kills": 1, "losses": True, "head": True, "tail": True}


@pytest.mark.slow
def test_servers_that_are_killed_between_checkpoints_go_back_with_the_client(tmp_path: Path) -> None:
    result = run_kills(3, tmp_path, ["after a forward", "after the optimizer", "before the reply"], every=3, seed=1)
    assert result.pop("steps") % 3 == 0
    del result["retries"]
    assert result == {"kills": 3, "losses": True, "head": True, "tail": True}


@pytest.mark.slow
def test_clients_that_are_killed_in_a_step_continue_from_their_last_whole_one(tmp_path: Path) -> None:
    result = run_client_kills(tmp_path, ["after a backward", "before the optimizer"])
    assert result == {"head": True, "tail": True}


@pytest.mark.slow
def test_servers_that_are_killed_at_every_point_of_a_step_leave_whole_steps(tmp_path: Path) -> None:
    result = run_kills(len(POINTS), tmp_path)
    del result["steps"], result["retries"]
    assert result == {"kills": len(POINTS), "losses": True, "head": True, "tail": True}


@pytest.fixture
def restarting(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server with other weights in its memory, on the port of the last one."""
    servers: list[Server] = []

    def start(address: str = "127.0.0.1:0", **options: Any) -> Server:
        for server in servers:
            server.stop(grace=0.0)
        servers.append(serve(build(), X, listen=address, optimizer=make_optimizer, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop(grace=0.0)


def test_a_server_that_lost_its_weights_is_refused(restarting: Callable[..., Server]) -> None:
    here = build()
    server = restarting()
    with connect(here, server.address) as remote:
        train_step(remote)
        before = copy.deepcopy(here.state_dict())
        restarting(server.address)
        with pytest.raises(RemoteError, match=r"no common checkpoint: the server has step 0 of a new run") as info:
            train_step(remote)
        assert info.value.kind == "LOST"
        remote.zero_grad()
        assert remote.num_steps == 1
    assert all(one.equal(before[name]) for name, one in here.state_dict().items())


@pytest.mark.parametrize("is_made", [True, False], ids=["made", "of the caller"])
def test_both_sides_go_back_to_the_last_checkpoint(
    restarting: Callable[..., Server], tmp_path: Path, is_made: bool
) -> None:
    losses, expected, _ = train_undisturbed(4)
    here = build()
    own = make_optimizer([one for name, one in here.named_parameters() if int(name[0]) <= int(AT)])
    options = {"checkpoint": tmp_path / "there", "checkpoint_every": 2}
    server = restarting(**options)
    optimizer = make_optimizer if is_made else own
    with connect(here, server.address, checkpoint=tmp_path / "here", optimizer=optimizer) as remote:
        assert [train_step(remote) for _ in range(3)] == losses[:3]
        restarting(server.address, **options)
        with pytest.raises(
            RemoteError, match="both sides have gone back from step 3 to 2, where they were sav"
        ) as info:
            train_step(remote)
        assert info.value.kind == "ROLLED_BACK"
        assert remote.num_steps == 2
        with pytest.raises(SessionError, match="a part of step 2 failed"):
            train_step(remote)
        remote.zero_grad()
        assert [train_step(remote) for _ in range(2)] == losses[2:]
    assert all(one.equal(expected[name]) for name, one in here.state_dict().items() if int(name[0]) <= int(AT))


def test_a_client_continues_from_its_checkpoint_and_takes_the_server_back(
    restarting: Callable[..., Server], tmp_path: Path
) -> None:
    losses, _, expected = train_undisturbed(4)
    server = restarting(checkpoint=tmp_path / "there")
    with connect(build(), server.address, checkpoint=tmp_path / "here") as remote:
        for _ in range(3):
            train_step(remote)
    (tmp_path / "here" / "step-00000003.safetensors").unlink()  # as if it had been killed before it was written
    with connect(build(), server.address, checkpoint=tmp_path / "here") as remote:
        assert remote.num_steps == 2
        assert sorted(file.name for file in (tmp_path / "there").iterdir()) == ["step-00000002.safetensors"]
        assert [train_step(remote) for _ in range(2)] == losses[2:]
        there = run_of(server)._splitter.model.state_dict()
    assert all(one.equal(expected[name]) for name, one in there.items() if int(name[0]) > int(AT))


def test_checkpoints_of_another_run_are_refused(restarting: Callable[..., Server], tmp_path: Path) -> None:
    server = restarting(checkpoint=tmp_path / "there")
    with connect(build(), server.address, checkpoint=tmp_path / "here") as remote:
        train_step(remote)
    with pytest.raises(RemoteError, match=r"the server has step 1 of the run \w+, the client has step 0 of the run"):
        connect(build(), server.address)
    with pytest.raises(BadFile, match=r"has checkpoints of stage 0, cut at '2', of a model that began as .*pass anot"):
        connect(build(), server.address, at="0", checkpoint=tmp_path / "here")
    (file,) = (tmp_path / "here").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadFile, match=r"step-00000001.safetensors' is corrupt"):
        connect(build(), server.address, checkpoint=tmp_path / "here")


def test_a_checkpoint_that_cannot_be_written_ends_no_step_twice(
    restarting: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from microtome.remote.training.checkpoints import Checkpoints

    losses, _, expected = train_undisturbed(2)
    save = Checkpoints.save
    server = restarting(checkpoint=tmp_path)
    with connect(build(), server.address) as remote:
        monkeypatch.setattr(Checkpoints, "save", lambda *_: (_ for _ in ()).throw(BadFile("cannot write: disk full")))
        with pytest.raises(RemoteError, match="disk full"):
            train_step(remote)
        with pytest.raises(SessionError, match="the server may have ended the step: call step"):
            remote.zero_grad()
        with pytest.raises(SessionError, match="the server may have ended the step: call step"):
            remote(X)
        monkeypatch.setattr(Checkpoints, "save", save)
        remote.step()
        assert remote.num_steps == 1
        assert train_step(remote) == losses[1]
        there = run_of(server)._splitter.model.state_dict()
    assert all(one.equal(expected[name]) for name, one in there.items() if int(name[0]) > int(AT))


def test_a_client_whose_checkpoint_cannot_be_written_steps_once(
    restarting: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from microtome.remote.training.checkpoints import Checkpoints

    losses, expected, _ = train_undisturbed(2)
    save = Checkpoints.save
    here = build()
    server = restarting()
    with connect(here, server.address, checkpoint=tmp_path) as remote:
        monkeypatch.setattr(Checkpoints, "save", lambda *_: (_ for _ in ()).throw(BadFile("cannot write: disk full")))
        for again in (lambda: train_step(remote), remote.step):
            with pytest.raises(BadFile, match="disk full"):
                again()
        with pytest.raises(SessionError, match="the server may have ended the step: call step"):
            remote.zero_grad()
        monkeypatch.setattr(Checkpoints, "save", save)
        remote.step()
        assert (remote.num_steps, [file.name for file in tmp_path.iterdir()]) == (1, ["step-00000001.safetensors"])
        assert train_step(remote) == losses[1]
    assert all(one.equal(expected[name]) for name, one in here.state_dict().items() if int(name[0]) <= int(AT))


def test_both_sides_cannot_share_a_folder(restarting: Callable[..., Server], tmp_path: Path) -> None:
    server = restarting(checkpoint=tmp_path)
    with (
        connect(build(), server.address, checkpoint=tmp_path) as remote,
        pytest.raises(BadFile, match=r"has checkpoints of stage 1, .*; expected stage 0, .*: pass another folder"),
    ):
        train_step(remote)


def test_weights_are_as_they_were_after_a_checkpoint_that_does_not_fit(
    restarting: Callable[..., Server], tmp_path: Path
) -> None:
    def in_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": [one]} for one in parameters])

    server = restarting()
    with connect(build(), server.address, checkpoint=tmp_path) as remote:
        train_step(remote)
    for optimizer, message in (
        (torch.optim.SGD, "expected the state of SGD in '.*', got that of Adam"),
        (in_groups, r"expected \d groups of parameters of Adam in '.*', got 1"),
    ):
        here = build()
        with pytest.raises(BadFile, match=message):
            connect(here, server.address, optimizer=optimizer, checkpoint=tmp_path)
        assert all(one.equal(here.state_dict()[name]) for name, one in build().state_dict().items())


class _FailingBackward(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if _FailingBackward.fails:
            raise RuntimeError("out of memory")
        return grads


class FailingBackward(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return _FailingBackward.apply(x)


def test_a_step_whose_backward_failed_in_the_head_cannot_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_failing() -> nn.Module:
        layers = list(build().children())
        return nn.Sequential(layers[0], FailingBackward(), *layers[1:]).train()

    here, there = build_failing(), build_failing()
    inputs, target = batch_of(0)
    before = torch.get_rng_state()
    with serving(there) as server, connect(here, server.address, at="3") as remote:
        cross_entropy(remote(inputs), target).backward()
        monkeypatch.setattr(_FailingBackward, "fails", True)
        with pytest.raises(RuntimeError, match="out of memory"):
            cross_entropy(remote(inputs), target).backward()
        monkeypatch.setattr(_FailingBackward, "fails", False)
        with pytest.raises(SessionError, match="expected the backwards of step 0 to end, got 1 that failed in the"):
            remote.step()
        remote.zero_grad()
        torch.set_rng_state(before)
        cross_entropy(remote(inputs), target).backward()
        remote.step()
        assert remote.num_steps == run_of(server).step == 1
    undisturbed_here, undisturbed_there = build_failing(), build_failing()
    with (
        serving(undisturbed_there) as server,
        connect(undisturbed_here, server.address, at="3") as remote,
    ):
        torch.set_rng_state(before)
        cross_entropy(remote(inputs), target).backward()
        remote.step()
    for model, expected in ((here, undisturbed_here), (there, undisturbed_there)):
        assert all(one.equal(expected.state_dict()[name]) for name, one in model.state_dict().items())


def test_leaving_a_step_restores_both_sides() -> None:
    here, there = blocks(), blocks()
    start = copy.deepcopy(here.state_dict())
    with serving(there) as server:
        with suppress(KeyboardInterrupt), connect(here, server.address, at="1") as remote:
            cross_entropy(remote(X), batch_of(0)[1]).backward()
            raise KeyboardInterrupt
        until(lambda: run_of(server)._owner is None, 30)
        for model in (here, there):
            assert all(one.equal(start[name]) for name, one in model.state_dict().items())
            assert all(one.grad is None for one in model.parameters())
        with connect(here, server.address, at="1") as remote:
            losses = [train_step(remote)]
            here[0][0].weight.grad = torch.ones(8, 8)  # type: ignore[index]
        assert here[0][0].weight.grad is not None  # type: ignore[index]
    whole = blocks()
    assert losses == train_whole(whole, 1)
    check_equal(whole, here, there, range(2))


def test_a_run_begins_without_gradients_of_either_side() -> None:
    whole, here, there = blocks(), blocks(), blocks()
    for parameter in (*here.parameters(), *there.parameters()):
        parameter.grad = torch.ones_like(parameter)
    with serving(there) as server, connect(here, server.address, at="1") as remote:
        train_step(remote)
    train_whole(whole, 1)
    check_equal(whole, here, there, range(2))


class Failing(torch.optim.SGD):
    """Fails after it has changed a weight."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].data += 1
        raise RuntimeError("the optimizer failed")


def connect_again(server: Server, **options: Any) -> Any:
    """Connect a new client once the server knows that the last one has gone."""
    until(lambda: run_of(server)._owner is None, 30)
    return connect(build(), server.address, **options)


def test_a_client_that_made_no_step_does_not_keep_others_from_training(tmp_path: Path) -> None:
    losses, _, _ = train_undisturbed(1)
    with serving(build(), checkpoint=tmp_path / "there") as server:
        with connect(build(), server.address) as remote:
            remote(X).sum().backward()
        with connect_again(server) as remote:
            assert [train_step(remote)] == losses
        with pytest.raises(RemoteError, match=r"the server has step 1 of the run .*, the client has step 0 of the run"):
            connect_again(server)


def test_an_optimizer_that_needs_a_closure_is_refused_at_the_start() -> None:
    message = "expected an optimizer that steps without a closure, got LBFGS"
    with serving(build(), optimizer=torch.optim.LBFGS) as server, pytest.raises(RemoteError, match=message):
        connect(build(), server.address)
    with serving(build()) as server, pytest.raises(Unsupported, match=message):
        connect(build(), server.address, optimizer=torch.optim.LBFGS)


def test_an_optimizer_that_fails_midway_ends_the_run() -> None:
    with serving(build(), optimizer=Failing) as server:
        with connect(build(), server.address) as remote:
            with pytest.raises(RemoteError, match="the optimizer failed"):
                train_step(remote)
            with pytest.raises(
                RemoteError, match=r"server has partially updated weights: the optimizer failed during step 0"
            ):
                remote.step()
        with pytest.raises(RemoteError, match=r"the model trains with a cut at '2', got '0'"):
            connect_again(server, at="0")
    with serving(build()) as server, connect(build(), server.address, optimizer=Failing) as remote:
        with pytest.raises(RuntimeError, match="the optimizer failed"):
            train_step(remote)
        with pytest.raises(SessionError, match="the head has partially updated weights: the optimizer failed"):
            remote.step()


# -- limits ------------------------------------------------------------------------------------------------------------


def test_what_backwards_need_is_bounded_and_freed() -> None:
    here, there = build(), build()
    buffers = {name: buffer.clone() for name, buffer in there.named_buffers()}
    with serving(there, train_memory="64KB") as server, connect(here, server.address) as remote:
        run = run_of(server)
        output = remote(X)
        one = run.nbytes
        # 6 rows of 8 floats that crossed and 4 of the output; at least the inputs of 6 layers
        assert one > 6 * 4 * (8 + 4) + 4 * 6 * 8 * 4
        output.sum().backward()
        assert run.nbytes == 0
        for _ in range(64000 // one):
            remote(X)
        with pytest.raises(
            RemoteError, match=r"would be kept for the backward, and the server keeps 62.5 KiB: raise train_memory="
        ) as info:
            remote(X)
        assert info.value.kind == "TOO_LARGE"
        assert run.nbytes == 0
        with pytest.raises(SessionError, match="a part of step 0 failed, so that it cannot be ended: call zero_grad"):
            remote.step()
        assert all(buffer.equal(buffers[name]) for name, buffer in there.named_buffers())
        remote.zero_grad()
        remote(X)
        assert run.nbytes > 0
    until(lambda: run.nbytes == 0, 30)
    assert all(buffer.equal(buffers[name]) for name, buffer in there.named_buffers())


def test_graphs_of_empty_batches_count_as_memory() -> None:
    with serving(build(), train_memory="64KB") as server, connect(build(), server.address) as remote:
        remote(X[:0])
        assert run_of(server).nbytes >= 4 * 1024  # of a linear layer alone: addmm, its transposed weight, two leaves
        with pytest.raises(RemoteError, match="would be kept for the backward"):
            [remote(X[:0]) for _ in range(64)]


def test_what_a_silent_client_left_expires_and_its_step_is_sent_again() -> None:
    losses, _, _ = train_undisturbed(1)
    with serving(build(), session_timeout="0.2s") as server, connect(build(), server.address) as remote:
        inputs, target = batch_of(0)
        torch.manual_seed(0)
        outputs = []
        total = 0.0
        for part, part_target in zip(inputs.chunk(2), target.chunk(2), strict=True):
            outputs.append(remote(part))
            until(lambda: run_of(server).nbytes == 0, 30)
            loss = cross_entropy(outputs[-1], part_target) / 2
            loss.backward()
            total += loss.item()
        remote.step()
        assert remote.retries > 0
    assert [total] == losses


def test_one_client_trains_at_a_time() -> None:
    with serving(build()) as server:
        with connect(build(), server.address):
            with pytest.raises(RemoteError, match="another client trains the model: connect when it is done") as info:
                connect(build(), server.address)
            assert info.value.kind == "BUSY"
        until(lambda: run_of(server)._owner is None, 30)
        with connect(build(), server.address, at="0") as remote:
            train_step(remote)
        until(lambda: run_of(server)._owner is None, 30)
        with pytest.raises(RemoteError, match=r"the model trains with a cut at '0', got '2'"):
            connect(build(), server.address)


def test_a_token_and_the_same_model_are_required() -> None:
    with serving(build(), token="secret") as server:
        with pytest.raises(RemoteError, match="requires a token"):
            connect(build(), server.address)
        other = build()
        other[0].weight.data += 1  # type: ignore[index]
        with pytest.raises(RemoteError, match="the weights of .* differ"):
            connect(other, server.address, token="secret")
        with connect(build(), server.address, token="secret") as remote:
            train_step(remote)


@pytest.mark.parametrize("module", ["", "1.1"], ids=["the model", "a batch norm"])
def test_the_same_modules_are_in_training_mode_on_both_sides(module: str) -> None:
    other = blocks()
    other.get_submodule(module).eval()
    with serving(other) as server:
        with pytest.raises(
            RemoteError, match=r"expected the same modules in training mode on both sides, got 17 here an"
        ):
            connect(blocks(), server.address, at="1")
        with connect(other, server.address, at="1") as remote:
            remote(X)
    moved = blocks()
    for path in ("1.1", "1.2"):
        moved.get_submodule(path).eval()
    swapped = blocks()
    for path in ("1.1", "1.3"):
        swapped.get_submodule(path).eval()
    with serving(moved) as server, pytest.raises(RemoteError, match="got 15 here and others, 15 at 127"):
        connect(swapped, server.address, at="1")


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_training_and_inference_are_not_mixed() -> None:
    model, x = small()
    with (
        serve(model, x, listen="127.0.0.1:0") as server,
        pytest.raises(RemoteError, match="does not train the model: start it with optimizer="),
    ):
        mt.connect(model, x, server.address, "layer1", train=True)
    with (
        serve(model, x, listen="127.0.0.1:0", optimizer=make_optimizer) as server,
        pytest.raises(RemoteError, match="trains the model, and answers no other requests: connect with train=True"),
    ):
        mt.connect(model, x, server.address)
    with serving(build()) as server:
        with pytest.raises(Unsupported, match=r"Put the model in eval mode, .* or train it with train=True"):
            mt.connect(build(), X, server.address)
        connection = Connection(server.address)
        try:
            for fields in ({}, {"train": protocol.TrainAction(kind=FORWARD)}):
                message = Message(protocol.Request(id="1", **fields))
                message.encode(mt.split(build(), X, at="2", verify=False)[0](X))
                connection.submit(message)
                expected = "attach first" if fields else "the server trains the model: connect with train=True"
                with pytest.raises(RemoteError, match=expected):
                    message.reply.result(60)
            for name, error in (("Profile", "profile it elsewhere"), ("Run", "expected a single pass, got a step")):
                request = (
                    protocol.ProfileRequest() if name == "Profile" else protocol.Request(train=protocol.TrainAction())
                )
                with pytest.raises(RemoteError, match=error):
                    connection.call(name, request, 10.0)
        finally:
            connection.close()


def test_tied_weights_are_refused() -> None:
    def tied() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    x = torch.randn(2, 4)
    with (
        serve(tied(), x, listen="127.0.0.1:0", optimizer=make_optimizer) as server,
        pytest.raises(Unsupported, match="'0.weight' is trained on both sides of the cut"),
    ):
        mt.connect(tied(), x, server.address, "1", train=True)


def test_misuse_of_a_run_is_refused() -> None:
    inputs, target = batch_of(0)
    with serving(build()) as server, connect(build(), server.address) as remote:
        with pytest.raises(SessionError, match="expected a backward before the step, got none"):
            remote.step()
        with torch.no_grad(), pytest.raises(Unsupported, match=r"expected gradients to be enabled, got torch.no_grad"):
            remote(inputs)
        with torch.autocast("cpu"), pytest.raises(Unsupported, match="expected no autocast around a request"):
            remote(inputs)
        output = remote(inputs)
        cross_entropy(output, target).backward(retain_graph=True)
        with pytest.raises(SessionError, match="the server has run this backward, and dropped its graph"):
            cross_entropy(output, target).backward()
        late = remote(inputs)
        remote.step()
        with pytest.raises(SessionError, match="the step that this output belongs to has ended: run the forward ag"):
            cross_entropy(late, target).backward()
        with pytest.raises(RemoteError, match="the server has no loss: start it with loss="):
            remote.loss(inputs, target)
        remote.zero_grad()
        with pytest.raises(BadQuery, match="expected labels that are a tensor, or a tuple of tensors"):
            remote.loss(inputs, ["a"])


def test_a_loss_that_is_no_number_is_refused() -> None:
    with (
        serving(build(), loss=lambda output: output) as server,
        connect(build(), server.address) as remote,
        pytest.raises(RemoteError, match="expected a loss that is a number with a gradient, got tensor"),
    ):
        remote.loss(X)


def test_options_of_training_are_checked(tmp_path: Path) -> None:
    with pytest.raises(BadQuery, match="expected no concurrency= and no batch= of a server that trains"):
        serving(build(), batch=8)
    with pytest.raises(BadQuery, match="expected loss as a function of the output and labels, got 5"):
        serving(build(), loss=5)
    with pytest.raises(BadQuery, match="expected checkpoint as the name of a folder, got 5"):
        serving(build(), checkpoint=5)
    with (
        serving(build()) as server,
        pytest.raises(BadQuery, match="expected an optimizer, or a function that makes one .*, got int"),
    ):
        connect(build(), server.address, optimizer=5)
    with pytest.raises(BadQuery, match="expected optimizer= of a server that trains, got loss= or checkpoint= without"):
        serve(build(), X, loss=cross_entropy)
    with pytest.raises(BadQuery, match="expected checkpoint_every of 1 or more steps, got 0"):
        serving(build(), checkpoint_every=0)
    with pytest.raises(BadQuery, match="expected a function that makes an optimizer .* got Adam"):
        serving(build(), optimizer=make_optimizer(list(build().parameters())))
    with pytest.raises(BadQuery, match="expected the whole model of a server that trains"):
        serving(mt.split(build(), X, at="2", verify=False)[1])  # type: ignore[arg-type]
    with pytest.raises(BadQuery, match="expected train=True with optimizer= or checkpoint="):
        mt.connect(build(), X, "127.0.0.1:1", checkpoint=tmp_path)  # type: ignore[call-overload]
    with pytest.raises(BadQuery, match="expected a cut at a layer with train=True, such as at='layer1', got 'auto'"):
        mt.connect(build(), X, "127.0.0.1:1", "auto", train=True)
    with pytest.raises(BadQuery, match="expected a lossless codec with train=True, .* got 'int8'"):
        connect(build(), "127.0.0.1:1", codec="int8")
    with pytest.raises(BadQuery, match="expected one server and no deadline with train=True"):
        mt.connect(build(), X, at="2", servers=["127.0.0.1:1", "127.0.0.1:2"], train=True)  # type: ignore[call-overload]
    with pytest.raises(BadQuery, match="expected the whole model with train=True"):
        mt.connect(mt.split(build(), X, at="2", verify=False)[0], X, "127.0.0.1:1", "2", train=True)  # type: ignore[call-overload]
    with (
        serving(build(), optimizer=lambda _: 3) as server,
        pytest.raises(RemoteError, match="expected an optimizer, or"),
    ):
        connect(build(), server.address)
    with pytest.raises(BadQuery, match="expected optimizer= with checkpoint=, got none: .* goes back with the weights"):
        connect(build(), "127.0.0.1:1", optimizer=None, checkpoint=tmp_path / "here")
    with serving(build()) as server, pytest.raises(NoMatch, match="nothing"):
        connect(build(), server.address, at="nothing")


def test_a_reply_that_varies_when_it_is_sent_again_is_an_error() -> None:
    class Varying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.runs = 0

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(1).copysign(torch.tensor(1.0)) * self.runs

    here, there = (nn.Sequential(nn.Linear(8, 8), Varying(), nn.Linear(8, 4)) for _ in range(2))
    there.load_state_dict(here.state_dict())
    with serving(there) as server, Proxy(server.address) as proxy, connect(here, proxy.address, at="0") as remote:
        output = remote(X)
        proxy.cut()
        there[1].runs = 1  # type: ignore[assignment]
        with pytest.raises(RemoteError, match="computed other values when a part of step 0 was sent again") as info:
            output.sum().backward()
        assert info.value.kind == "VARIES"
        assert isinstance(remote, RemoteTraining)
