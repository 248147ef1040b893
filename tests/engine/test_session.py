"""Sessions: attaching, nesting, events, compiled and scripted models, and invalid use."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import microtome as mt
from microtome.errors import NotAModule, ProbeError, SessionError, Unsupported
from microtome.flops.composite import COMPOSITE_FORMULAS
from tests.engine.test_calls import Log, Repeat, X


class Events(mt.Probe):
    """Every event, with the values that came with it."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def enter(self, call: mt.Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen.append(("enter", call.address, args, kwargs))

    def exit(self, call: mt.Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.seen.append(("exit", call.address, args, kwargs, output))

    def fail(self, call: mt.Call, error: BaseException) -> None:
        self.seen.append(("fail", call.address, error))


class Takes(nn.Module):
    def forward(self, a: int, *, b: int = 0, module: int = 0, inner: int = 0) -> int:
        return a + b + module + inner


@pytest.mark.parametrize("process", [False, True])
def test_positional_and_keyword_arguments_and_the_output_reach_probes(process: bool) -> None:
    model, events = Takes(), Events()
    with mt.Session(None if process else model, [events]):
        model(1, b=2, module=3, inner=4)  # names that a careless wrapper would take for itself
    kwargs = {"b": 2, "module": 3, "inner": 4}
    name = "Takes" if process else ""
    assert events.seen == [("enter", name, (1,), kwargs), ("exit", name, (1,), kwargs, 10)]


def test_the_span_of_a_call_encloses_the_modules_own_hooks() -> None:
    model = nn.Sequential(nn.ReLU())
    paths: list[str | None] = []
    with mt.track(model) as t:
        model[0].register_forward_pre_hook(lambda *_: paths.append(t.path))
        model[0].register_forward_hook(lambda *_: paths.append(t.path))
        model(X)
    assert paths == ["0", "0"]


def test_probes_see_what_leaves_the_module_after_its_own_hooks() -> None:
    model, events = nn.Identity(), Events()
    model.register_forward_hook(lambda _m, _a, output: output + 1)
    with mt.Session(model, [events]):
        model(1)
    assert events.seen[-1] == ("exit", "", (1,), {}, 2)


def test_what_a_probe_returns_is_ignored() -> None:
    class Returns(mt.Probe):
        def enter(self, call: mt.Call, args: Any, kwargs: Any) -> Any:
            return (torch.zeros(1, 2),), {}

        def exit(self, call: mt.Call, args: Any, kwargs: Any, output: Any) -> Any:
            return torch.zeros(1, 2)

    model = nn.Sequential(nn.Identity())
    with mt.Session(model, [Returns()]):
        assert model(X) is X


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_forward_that_raises_ends_its_call_and_those_around_it(error: BaseException) -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    model, events = nn.Sequential(nn.Sequential(Raises())), Events()
    with mt.Session(model, [events]) as session:
        with pytest.raises(type(error)) as caught:
            model(X)
        assert session.stack == ()
    assert caught.value is error
    assert [event[:2] for event in events.seen] == [
        *(("enter", ""), ("enter", "0"), ("enter", "0.0")),
        *(("fail", "0.0"), ("fail", "0"), ("fail", "")),
    ]


def test_sessions_nest_on_the_same_model() -> None:
    model = nn.Sequential(nn.ReLU())
    outer, inner = Log(), Log()
    with mt.Session(model, [outer]):
        model(X)
        with mt.Session(model, [inner]):
            model(X)
        model(X)
    assert outer.addresses == ["", "0"] * 3
    assert inner.addresses == ["", "0"]


def test_sessions_may_close_in_any_order() -> None:
    model = nn.Sequential(nn.ReLU())
    logs = Log(), Log()
    sessions = [mt.Session(model, [log], backward=True) for log in logs]
    for session in sessions:
        session.__enter__()
    sessions[0].__exit__(None, None, None)
    model(X)
    sessions[1].__exit__(None, None, None)
    model(X)
    assert [log.addresses for log in logs] == [[], ["", "0"]]
    assert nn.Module.__dict__["_compiled_call_impl"] is None
    assert vars(torch.autograd)["_engine_run_backward"] is torch.autograd.graph._engine_run_backward


def test_a_session_opened_inside_a_forward_observes_what_follows() -> None:
    log = Log()

    class Opens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            with mt.Session(self, [log]):
                return self.inner(x)

    Opens()(X)
    assert log.addresses == ["inner"]


def test_threads_each_have_their_own_stack() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert leave.wait(timeout=60)
            return x

    model = nn.Sequential(Waits())
    with mt.Session(model) as session:
        thread = threading.Thread(target=model, args=(X,))
        thread.start()
        assert inside.wait(timeout=60)
        assert session.stack == ()
        leave.set()
        thread.join()


# -- what torch would hide ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", [False, True])
def test_fast_paths_of_transformers_do_not_hide_their_children(process: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    log = Log()
    with torch.inference_mode(), mt.Session(None if process else model, [log]):
        model(torch.ones(1, 3, 8))
    ran = {call.address.partition("layers.0.")[2] for call in log.calls}
    assert {"self_attn", "linear1", "linear2", "norm1", "norm2", "dropout1"} <= ran
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_fast_path_stays_off_for_those_who_had_it_off() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with mt.Session(nn.Identity()):
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class OpCalls(mt.Probe):
    """Observes operators alone, and collects those of the backward with their calls."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str | None]] = []

    def op(self, where: Any, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        if where.phase == "backward":
            self.found.append((func.overloadpacket.__name__, None if where.call is None else where.call.address))


def test_operators_of_a_backward_have_the_call_that_it_is_of() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    probe = OpCalls()
    with mt.Session(model, [probe]):
        model(torch.ones(3, 4)).sum().backward()
    products = [call for name, call in probe.found if name == "mm"]
    # Of the second layer the gradients of its input and of its weight, of the first only that of its weight.
    assert products == ["2", "2", "0"]
    assert ("threshold_backward", "1") in probe.found
    assert ("expand", None) in probe.found  # of the sum, which is outside the model


def test_a_session_can_leave_backwards_unattributed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    probe = OpCalls()
    with mt.Session(model, [probe], backward=False):
        model(torch.ones(3, 4)).sum().backward()
    assert {call for _, call in probe.found} == {None}


class TestCompiled:
    """Compiled code calls no hooks that it was compiled without; in a session it runs as Python."""

    @pytest.fixture
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def test_a_compiled_model_and_the_model_inside_it_are_observed(self, model: nn.Module) -> None:
        compiled = torch.compile(model, backend="eager")
        expected = compiled(X)
        for target, prefix in ((model, ""), (compiled, "_orig_mod.")):
            log = Log()
            assert isinstance(target, nn.Module)
            with mt.Session(target, [log]):
                assert torch.equal(compiled(X), expected)
            assert log.addresses[-2:] == [f"{prefix}0", f"{prefix}1"]

    def test_a_model_compiled_in_place_is_observed_and_stays_compiled(self, model: nn.Module) -> None:
        model.compile(backend="eager")
        compiled = vars(model)["_compiled_call_impl"]
        for target in (model, None):
            log = Log()
            with mt.Session(target, [log]):
                model(X)
            assert len(log.calls) == 3
        assert vars(model)["_compiled_call_impl"] is compiled

    def test_a_model_compiled_inside_the_session_is_observed_and_can_be_uncompiled(self, model: nn.Module) -> None:
        log = Log()
        with mt.Session(model, [log]):
            model.compile(backend="eager")
            model(X)
            del model._compiled_call_impl
        assert log.addresses == ["", "0", "1"]
        assert "_compiled_call_impl" not in vars(model)

    def test_compiling_goes_on_after_the_session(self, model: nn.Module) -> None:
        compiled = torch.compile(model, backend="eager")
        with mt.Session(model):
            compiled(X)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled(X)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

    @pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
    def test_a_session_opened_inside_compiled_code_says_what_to_do(self, model: nn.Module) -> None:
        def opens(x: Tensor) -> Any:
            with mt.Session(model):
                return model(x)

        with pytest.raises(Unsupported, match="Open the session outside the compiled function"):
            torch.compile(opens, backend="eager")(X)
        assert nn.Module.__dict__["_compiled_call_impl"] is None

    @pytest.mark.integration
    def test_code_compiled_inside_the_session_before_dynamo_was_there_does_not_go_by_in_silence(self) -> None:
        script = """
            import torch, microtome as mt
            model = torch.nn.Linear(2, 2)
            with mt.Session(model):
                torch.compile(lambda x: model(x) + 1, backend="eager")(torch.ones(1, 2))
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
        )
        assert "calls of modules inside it were not observed. Call torch.compile before" in done.stderr


@pytest.mark.filterwarnings("ignore:.torch.jit")
class TestScripted:
    def test_a_script_module_is_refused(self) -> None:
        scripted = torch.jit.script(nn.ReLU())
        with pytest.raises(Unsupported, match=r"the model is a RecursiveScriptModule.*Pass the original nn.Module"):
            mt.Session(scripted)
        with pytest.raises(Unsupported, match="the module at '0' is a RecursiveScriptModule"):
            mt.Session(nn.Sequential(scripted))

    def test_a_script_module_that_runs_in_a_session_without_a_model_is_refused(self) -> None:
        scripted = torch.jit.script(nn.ReLU())
        with mt.Session(), pytest.raises(Unsupported, match="TorchScript runs outside Python"):
            scripted(X)

    def test_scripting_tracing_and_exporting_work_inside_a_session(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        expected = model(X)
        with mt.Session(model):
            made = [torch.jit.script(model), torch.jit.trace(model, X), torch.fx.symbolic_trace(model)]
            made.append(torch.export.export(model, (X,)).module())
        for other in made:
            assert torch.equal(other(X), expected)


def test_a_users_function_mode_does_not_observe_the_session() -> None:
    class Counts(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(2, 2))

    def count(*, watch: bool) -> list[str]:
        tracker = mt.track(model, on_enter=lambda call, phase: None) if watch else nullcontext()
        with tracker, Counts() as mode:
            model(X).sum().backward()
        return mode.seen

    assert count(watch=True) == count(watch=False)


def test_transforms_of_torch_func_work_inside_a_session() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, values, (x,))
        return out.sum()

    def jacobians() -> Any:
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.ones(3, 1, 2))

    expected = jacobians()
    log = Log()
    with mt.Session(model, [log], backward=True):
        found = jacobians()
    assert log.addresses == ["", "0", "1"]
    for name in expected:
        assert torch.equal(expected[name], found[name])


class OwnCallImpl(nn.Module):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs) + 100

    def forward(self, x: int) -> int:
        return x


def test_a_module_with_a_call_of_its_own_keeps_it() -> None:
    model = OwnCallImpl()
    with mt.Session(model):
        assert model(1) == 101


class OddAttributes(nn.Module):
    def __getattr__(self, name: str) -> Any:
        return {"known": 1}[name]

    def forward(self, x: int) -> int:
        return x + self.known


class Unhashable(nn.Module):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("modules are compared by identity")

    def forward(self, x: int) -> int:
        return x


@pytest.mark.parametrize("kind", [OddAttributes, Unhashable])
def test_odd_modules_of_the_model_or_beside_it(kind: type[nn.Module]) -> None:
    other = kind()
    expected = other(1)
    for model, path in ((nn.ReLU(), None), (other, ""), (None, type(other).__name__)):
        log = Log()
        with mt.Session(model, [log], backward=True):
            assert other(1) == expected
        assert log.addresses == ([] if path is None else [path])
    assert list(mt.select(nn.Sequential(other), other)) == ["0"]


def test_what_a_user_had_put_in_the_place_of_torchs_backward_is_used_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    plain = torch.autograd.graph._engine_run_backward

    def users(*args: Any, **kwargs: Any) -> Any:
        seen.append("users")
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", users)
    with mt.Session(model := nn.Linear(2, 2), backward=True):
        model(X).sum().backward()
    assert seen == ["users"]
    assert vars(torch.autograd)["_engine_run_backward"] is users


def test_an_output_that_may_not_be_used_any_more_and_one_that_holds_itself() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            y = x * 2
            stale, _ = y.unbind(0)
            y.mul_(2)  # from here on, torch raises when `stale` is asked for its grad_fn
            output: dict[str, Any] = {"y": y, "stale": stale}
            output["self"] = output
            return output

    model = Odd()
    with mt.Session(model, backward=True):
        model(torch.ones(2, 2, requires_grad=True))["y"].sum().backward()


def test_deleting_a_compiled_call_that_is_not_there_fails_as_ever() -> None:
    model = nn.ReLU()
    with mt.Session(model), pytest.raises(AttributeError):
        del model._compiled_call_impl


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        ("resnet", "expected a torch.nn.Module, got str 'resnet'"),
        (nn.ReLU, "got the class ReLU; create it first"),
        (torch.relu, "got builtin_function_or_method"),
        ("x" * 100, "got str 'xxx.*…"),
    ],
)
def test_something_that_is_not_a_module(thing: Any, message: str) -> None:
    with pytest.raises(NotAModule, match=message):
        mt.track(thing)


def test_entering_a_session_twice() -> None:
    session = mt.Session(nn.Identity())
    with session, pytest.raises(SessionError, match="already open: create one"):
        session.__enter__()
    with session:  # one after the other is fine
        pass
    with pytest.raises(SessionError, match="not open"):
        session.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"probes": mt.Probe()}, None),
        ({"probes": iter([mt.Probe()])}, None),
        ({"probes": [print]}, "expected probes to be a list of Probe, got builtin_function_or_method"),
        ({"interventions": [mt.Probe()]}, "a list of Replace or ReplaceInputs or Skip or Stop or ReplaceOp, got Probe"),
    ],
)
def test_what_may_be_attached(given: dict[str, Any], message: str | None) -> None:
    if message is None:
        mt.Session(nn.ReLU(), **given)
        return
    with pytest.raises(SessionError, match=message):
        mt.Session(nn.ReLU(), **given)


def test_every_probe_is_notified_even_if_one_raises() -> None:
    class Raises(mt.Probe):
        def exit(self, call: mt.Call, args: Any, kwargs: Any, output: Any) -> None:
            raise ValueError("on purpose")

    model, events = nn.Sequential(nn.ReLU()), Events()
    with mt.Session(model, [Raises(), events]), pytest.raises(ProbeError, match="at exit of '0': on purpose"):
        model(X)
    assert [event[:2] for event in events.seen] == [("enter", ""), ("enter", "0"), ("exit", "0"), ("fail", "")]


class RaisesAt(mt.Probe):
    def __init__(self, path: str) -> None:
        self.path = path

    def enter(self, call: mt.Call, args: Any, kwargs: Any) -> None:
        if call.address == self.path:
            raise ValueError("on purpose")


def test_a_probe_that_raises_is_reported_with_the_address_of_the_call() -> None:
    model = Repeat()
    with mt.Session(model, [RaisesAt("inner#1")]) as session:
        with pytest.raises(
            ProbeError, match=r"RaisesAt.enter raised ValueError at enter of 'inner#1': on purpose"
        ) as caught:
            model(X)
        assert caught.value.address == "inner#1"
        assert isinstance(caught.value.__cause__, ValueError)
        assert session.stack == ()
    model(X)


def test_a_probe_that_raises_while_the_model_raises_does_not_hide_the_models_error() -> None:
    class Second(mt.Probe):
        def fail(self, call: mt.Call, error: BaseException) -> None:
            raise ValueError("second")

    class Raises(nn.Module):
        def forward(self) -> None:
            raise KeyError("first")

    with mt.Session(model := Raises(), [Second()]), pytest.raises(KeyError, match="first") as caught:
        model()
    assert caught.value.__notes__[0] == "in the model itself (Raises)"
    assert "Second.fail raised ValueError at fail of ''" in caught.value.__notes__[1]


@pytest.mark.parametrize("sessions", [1, 2])
def test_an_error_of_the_model_names_the_innermost_call_once(sessions: int) -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(9, 9)))
    with ExitStack() as stack:
        for _ in range(sessions):
            stack.enter_context(mt.Session(model))
        with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
            model(X)
    assert caught.value.__notes__ == ["in the call '0.1' (Linear)"]


# -- parts of a model --------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


def test_a_probe_for_one_type_of_layer_observes_those_and_nothing_else() -> None:
    events, model = Log(), net()
    with mt.Session(model, [events], at=nn.Linear):
        model(X)
    assert events.addresses == ["0", "1.1"]
    assert [call.parent and call.parent.address for call in events.calls] == ["", ""]


def test_a_module_that_is_added_later_is_observed_if_the_selector_names_it() -> None:
    events, model = Log(), net()
    with mt.Session(model, [events], at=nn.Linear):
        model(X)
        events.calls.clear()
        model.append(nn.Linear(2, 2))
        model.append(nn.ReLU())
        model(X)
    assert events.addresses == ["0", "1.1", "2"]


def test_a_module_that_runs_twice_has_two_calls_where_only_it_is_observed() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return self.layer(self.layer(x))

    events, model = Log(), Twice()
    with mt.Session(model, [events], at="layer"):
        model(X)
    assert events.addresses == ["layer", "layer#1"]


def test_parts_are_of_a_model_and_hold_what_is_changed() -> None:
    with pytest.raises(SessionError, match="`at` selects modules of a model: pass one"):
        mt.Session(None, [Log()], at=nn.Linear)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(SessionError, match="an intervention is at a ReLU that `at` leaves out"):
        mt.Session(model, [], [mt.Stop("1")], at=nn.Linear).__enter__()
    with mt.Session(model, [], [mt.Stop("0")], at=nn.Linear), pytest.raises(mt.Stopped):
        model(X)


def test_fast_paths_may_stay_on() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    events = Log()
    with torch.no_grad(), mt.Session(layer, [events], fast_paths=True):
        layer(torch.rand(1, 2, 8))
        with mt.Session(layer, []):
            assert not torch.backends.mha.get_fastpath_enabled()
    assert events.addresses == [""]
    assert torch.backends.mha.get_fastpath_enabled()


# -- where the backward is ---------------------------------------------------------------------------------------------


class Moves(mt.Probe):
    def __init__(self) -> None:
        self.calls: list[str | None] = []

    def backward_moves(self, call: mt.Call | None) -> None:
        self.calls.append(None if call is None else call.address)


def test_the_backward_moves_as_its_nodes_run() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.left(x).relu() + self.right(x))

    class Seen(mt.Probe):
        """The innermost call of each node's backward, as another way of the engine tells."""

        def __init__(self) -> None:
            self.calls: list[str] = []

        def enter_backward(self, call: mt.Call) -> None:
            self.calls.append(call.address)

    model, moves, seen = Branches(), Moves(), Seen()
    with mt.Session(model, [moves, seen]):
        model(X).sum().backward()
    # The loss is nobody's; the sum, then the relu, are the model's own.
    assert moves.calls == [None, "last", "", "right", "", "left", None]
    assert [address for address in seen.calls if address] == ["last", "right", "left"]


def test_a_backward_that_raises_leaves_no_hooks() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("no way back")

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Bad.apply(x)

    model, moves = nn.Sequential(nn.Linear(2, 2), Raises(), nn.Linear(2, 2)), Moves()
    with mt.Session(model, [moves]):
        loss = model(X).sum()
        with pytest.raises(ValueError, match="no way back"):
            loss.backward()
    assert moves.calls == [None, "2", "1"]
    again = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward(loss + again)
    assert moves.calls == [None, "2", "1"]


def test_a_session_of_chosen_modules_follows_them_when_those_above_are_moved() -> None:
    chosen = nn.ReLU()
    model = nn.Sequential(nn.Sequential(chosen), nn.Sequential(nn.ReLU()))
    calls: list[str] = []

    class Record(mt.Probe):
        def enter(self, call: mt.Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(call.path)

    session = mt.Session(model, [Record()], at=[chosen])
    modules = model._modules
    for first, second in (("0", "1"), ("1", "0"), ("0", "1")):
        modules["0"], modules["1"] = (modules[first], modules[second])
        with session:
            model(torch.ones(1))
    assert calls == ["0.0", "1.0", "1.0"]


class Attends(nn.Module):
    """Attention that is computed again in the backward, until it has saved what it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def attend(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return nn.functional.scaled_dot_product_attention(y, y, y)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.attend, x * 1.0, use_reentrant=False)


def test_a_checkpoint_that_stops_in_attention_leaves_no_tensor_behind() -> None:
    class Sees(mt.Probe):
        def op(self, *_: Any) -> None:
            pass

    model = Attends()
    alive: list[weakref.ref[Tensor]] = []
    model.linear.register_forward_hook(lambda _, __, output: alive.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        with mt.Session(model, [Sees()], composite=COMPOSITE_FORMULAS):
            model(torch.rand(2, 4, 8, requires_grad=True)).sum().backward()
        assert [ref() for ref in alive] == [None, None]  # the second time, in the backward
    finally:
        gc.enable()
