"""Interventions change a run, and only the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.engine import ReplaceInputs
from microtome.errors import NoMatch, ProbeError, SessionError
from tests.engine.test_calls import Log, Repeat
from tests.engine.test_session import Events


class Add(nn.Module):
    """x -> x + 1, counting its runs."""

    runs = 0

    def forward(self, x: Any) -> Any:
        self.runs += 1
        return x + 1


def three() -> Any:
    return nn.Sequential(Add(), nn.Sequential(Add()), Add())


def test_replace_changes_what_the_caller_gets() -> None:
    model = three()
    with mt.Session(model, interventions=[mt.Replace("1.*", lambda call, output: output * 10)]):
        assert model(0) == 21
    assert model(0) == 3


def test_replaces_of_one_module_apply_in_order() -> None:
    model = Add()
    changes = [mt.Replace("", lambda call, out: out * 10), mt.Replace(Add, lambda call, out: out + 5)]
    with mt.Session(model, interventions=changes):
        assert model(0) == 15


def test_replace_knows_which_call_it_changes() -> None:
    model: Any = Repeat()
    model.inner = Add()
    change = mt.Replace("inner", lambda call, out: out * 10 if call.index == 1 else out)
    with mt.Session(model, interventions=[change]):
        assert model(0) == 21  # ((0 + 1) + 1) * 10 + 1


def test_skip_when_asked() -> None:
    shared = nn.ReLU()
    net = nn.Sequential(shared, shared)
    with mt.Session(net, [], [mt.Skip(shared, lambda *_: torch.tensor(5.0), when=lambda call: call.index == 0)]):
        assert net(torch.tensor(-1.0)) == 5
    with mt.Session(net, [], [mt.Skip(shared, lambda *_: torch.tensor(5.0), when=lambda call: call.index == 1)]):
        assert net(torch.tensor(-1.0)) == 5
    with mt.Session(net, [], [mt.Skip(shared, lambda *_: torch.tensor(5.0), when=lambda _: False)]):
        assert net(torch.tensor(-1.0)) == 0


def test_skip_does_not_run_the_forward_nor_the_modules_hooks() -> None:
    model = three()
    hooked: list[Any] = []
    model[1].register_forward_hook(lambda *_: hooked.append(1))
    log = Log()
    with mt.Session(model, [log], [mt.Skip("1", lambda call, args, kwargs: args[0] * 7)]):
        assert model(1) == 15
    assert model[1][0].runs == 0
    assert hooked == []
    assert log.addresses == ["", "0", "1", "2"]


def test_stop_ends_the_run_at_the_first_selected_exit() -> None:
    model, events = three(), Events()
    with mt.Session(model, [events], [mt.Stop(["1.0", "2"])]) as session:
        with pytest.raises(mt.Stopped, match="stopped at the exit of '1.0'") as caught:
            model(0)
        assert session.stack == ()
    assert (caught.value.call.address, caught.value.output) == ("1.0", 2)
    assert model[2].runs == 0
    assert [event[:2] for event in events.seen[-3:]] == [("exit", "1.0"), ("fail", "1"), ("fail", "")]


def test_a_model_that_catches_every_exception_cannot_swallow_a_stop() -> None:
    class Catches(nn.Sequential):
        def forward(self, x: Any) -> Any:
            try:
                return super().forward(x)
            except Exception:  # noqa: BLE001
                return None

    model = Catches(Add(), Add())
    with mt.Session(model, interventions=[mt.Stop("0")]), pytest.raises(mt.Stopped):
        model(0)


@pytest.mark.parametrize("change_first", [True, False])
def test_probes_see_the_changed_value_whichever_session_was_opened_first(change_first: bool) -> None:
    model, events = Add(), Events()
    change = mt.Session(model, interventions=[mt.Replace("", lambda call, out: out * 10)])
    look = mt.Session(model, [events])
    first, second = (change, look) if change_first else (look, change)
    with first, second:
        assert model(0) == 10
    assert events.seen[-1][-1] == 10


def test_gradients_flow_through_a_replacement() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    paths: list[str | None] = []

    def double(call: mt.Call, output: Tensor) -> Tensor:
        doubled = output * 2
        doubled.register_hook(lambda _: paths.append(session.stack[-1].path))
        return doubled

    with mt.Session(model, interventions=[mt.Replace("0", double)], backward=True) as session:
        model(torch.ones(1, 2)).sum().backward()
    assert paths == ["0"]


def test_interventions_need_a_model_and_something_to_change() -> None:
    with pytest.raises(SessionError, match="interventions need a model"):
        mt.Session(interventions=[mt.Stop("0")])
    with (
        pytest.raises(NoMatch, match="no module matches the path '3'"),
        mt.Session(three(), interventions=[mt.Stop("3")]),
    ):
        pass
    assert nn.Module.__dict__["_compiled_call_impl"] is None


def test_interventions_follow_a_model_that_changes() -> None:
    model = three()
    session = mt.Session(model, interventions=[mt.Replace("2", lambda call, out: out * 10)])
    model.append(Add())
    with session:
        assert model(0) == 31
        model[2] = Add()  # another module at the same path
        assert model(0) == 31
        del model[2], model[2]
        with pytest.raises(NoMatch, match="no module matches the path '2'"):
            model(0)


def test_an_intervention_that_raises_says_where() -> None:
    model = three()
    change = mt.Replace("1.0", lambda call, out: out["x"])
    with mt.Session(model, interventions=[change]), pytest.raises(TypeError) as caught:
        model(0)
    assert caught.value.__notes__ == ["raised by an intervention at '1.0'"]


@pytest.mark.parametrize("change_first", [True, False])
def test_probes_see_the_arguments_that_a_feed_gives_whichever_session_was_opened_first(change_first: bool) -> None:
    model, events = three(), Events()
    changes: list[Any] = [
        ReplaceInputs("1", lambda call, args, kwargs: ((args[0] * 10,), kwargs)),
        mt.Replace("1", lambda call, out: out + 0.5),
    ]
    change, look = mt.Session(model, interventions=changes), mt.Session(model, [events])
    first, second = (change, look) if change_first else (look, change)
    with first, second:
        assert model(0) == 12.5  # (0 + 1) * 10 + 1 + 0.5 + 1
    assert ("enter", "1", (10,), {}) in events.seen
    assert ("exit", "1", (10,), {}, 11.5) in events.seen


def test_feeds_of_several_sessions_apply_from_the_outside_in() -> None:
    model = Add()
    with (
        mt.Session(model, interventions=[ReplaceInputs("", lambda call, args, kwargs: ((args[0] * 10,), kwargs))]),
        mt.Session(model, interventions=[ReplaceInputs("", lambda call, args, kwargs: ((args[0] + 1,), kwargs))]),
    ):
        assert model(0) == 11


def test_a_probe_of_another_session_that_raises_leaves_no_change_behind() -> None:
    class Breaks(mt.Probe):
        def enter(self, call: mt.Call, args: Any, kwargs: Any) -> None:
            raise ValueError("no")

    model = Add()
    feed = ReplaceInputs("", lambda call, args, kwargs: ((args[0] * 10,), kwargs))
    with mt.Session(model, interventions=[feed, mt.Replace("", lambda call, out: out + 5)]) as session:
        with mt.Session(model, [Breaks()]), pytest.raises(ProbeError, match="no"):
            model(1)
        assert session.stack == ()
        assert session._threads.current().pending_intervention is None
        assert model(1) == 16


def test_a_skipped_call_is_given_what_was_fed() -> None:
    model = three()
    changes: list[Any] = [
        ReplaceInputs("1", lambda call, args, kwargs: ((args[0] * 10,), kwargs)),
        mt.Skip("1", lambda call, args, kwargs: args[0] + 7),
    ]
    with mt.Session(model, interventions=changes):
        assert model(0) == 18
