"""Which module runs, in the forward and in the backward, against what the modules report themselves."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import microtome as mt
from microtome.errors import BadQuery, ProbeError, Unsupported
from tests.models import Chain, Leaf, Told, Witness


def ask(tracker: mt.Tracker) -> tuple[str, ...]:
    return tuple(call.address for call in tracker.stack)


def watched(witness: Witness, model: nn.Module, device: str) -> nn.Module:
    witness.name(model)
    return model.to(device)


def assert_true(witness: Witness, *phases: str) -> None:
    """Every answer equals the truth, and each phase has been seen."""
    for phase in phases:
        assert witness.of(phase), f"no mark of phase {phase}"
    wrong = [(phase, truth, answer) for phase, truth, answer in witness.marks if truth != answer]
    assert not wrong


@pytest.fixture
def witness() -> Witness:
    return Witness()


def test_stack_path_and_module_are_true_in_forward_and_backward(witness: Witness, device: str) -> None:
    model = watched(witness, Chain(witness, Leaf(witness), Chain(witness, Leaf(witness))), device)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        model(torch.ones(2, device=device)).sum().backward()
    assert_true(witness, "forward", "backward")


def test_path_and_module_are_of_the_innermost_call(witness: Witness) -> None:
    model = watched(witness, Chain(witness, Leaf(witness)), "cpu")
    with mt.track(model) as t:
        witness.ask = lambda: (t.path, t.module, t.is_backward)
        model(torch.ones(2)).sum().backward()
        assert (t.path, t.module, t.stack, t.is_backward) == (None, None, (), False)
    leaf = ("parts.0", model.get_submodule("parts.0"))
    assert (("", "parts.0"), (*leaf, False)) in witness.of("forward")
    assert (("", "parts.0"), (*leaf, True)) in witness.of("backward")


def test_outside_its_with_a_tracker_knows_nothing(witness: Witness) -> None:
    model = watched(witness, Leaf(witness), "cpu")
    t = mt.track(model)
    witness.ask = lambda: (t.path, t.module, t.stack, t.is_backward)
    model(torch.ones(1)).sum().backward()
    assert {answer for _, _, answer in witness.marks} == {(None, None, (), False)}


class KeywordBlock(Told):
    def __init__(self, witness: Witness) -> None:
        super().__init__(witness)
        self.leaf = Leaf(witness)

    def body(self, *, x: Tensor) -> Tensor:
        return self.witness.mark(self.leaf(x=x))


class KeywordNet(Told):
    def __init__(self, witness: Witness) -> None:
        super().__init__(witness)
        self.blocks = nn.ModuleDict({"a": KeywordBlock(witness), "b": KeywordBlock(witness)})

    def body(self, *, x: Tensor) -> dict[str, Any]:
        for block in self.blocks.values():
            x = block(x=x)
        return {"logits": self.witness.mark(x), "extra": [None, (x,)]}


def test_keyword_calls_with_an_input_that_needs_no_grad(witness: Witness, device: str) -> None:
    model = watched(witness, KeywordNet(witness), device)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        model(x=torch.ones(2, device=device))["logits"].sum().backward()
    assert_true(witness, "forward", "backward")


class SideBranch(Told):
    """Returns a main output; keeps a module's and a functional side branch that no output depends on."""

    def __init__(self, witness: Witness) -> None:
        super().__init__(witness)
        self.main, self.side = Leaf(witness), Leaf(witness)

    def body(self, x: Tensor) -> Tensor:
        self.by_module = self.side(x)
        self.by_function = self.witness.mark(x * 2)
        return self.main(x)


@pytest.mark.parametrize("branch", ["by_module", "by_function"])
def test_side_branches_that_are_not_part_of_the_output(witness: Witness, device: str, branch: str) -> None:
    model = watched(witness, SideBranch(witness), device)
    x = torch.ones(2, device=device, requires_grad=True)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        model(x)  # the main output is dropped at once
        getattr(model, branch).sum().backward()
    assert_true(witness, "forward", "backward")


class InPlaceAndViews(Told):
    def __init__(self, witness: Witness) -> None:
        super().__init__(witness)
        self.leaf = Leaf(witness)

    def body(self, x: Tensor) -> Tensor:
        x = self.witness.mark(x * 3)
        x[0].mul_(2)  # in place through a view: the base gets another grad_fn
        x = self.leaf(x.view(-1, 1)).squeeze(1)
        x.relu_()
        first, rest = x.split([1, len(x) - 1])
        return self.witness.mark(torch.cat([rest, first]))


def test_in_place_ops_and_views(witness: Witness, device: str) -> None:
    model = watched(witness, Chain(witness, InPlaceAndViews(witness), InPlaceAndViews(witness)), device)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        model(torch.ones(3, device=device, requires_grad=True)).sum().backward()
    assert_true(witness, "forward", "backward")


def test_a_view_that_gets_its_grad_fn_late_belongs_to_the_call_that_ran_then() -> None:
    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            base = x * 2
            view = base.view(-1)
            base.mul_(3)  # the view gets its grad_fn anew when it is next asked for: here, as the root ends
            return view

    model = nn.Sequential(View())
    paths: list[str | None] = []
    with mt.track(model) as t:
        out = model(torch.ones(2, requires_grad=True))
        out.grad_fn.register_prehook(lambda _: paths.append(t.path))
        out.sum().backward()
    assert paths == [""]


def test_what_was_made_outside_the_model_and_in_another_thread_is_not_the_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    asked: list[str | None] = []
    with mt.track(model) as t:
        # Autograd numbers its nodes per thread: this one's number is among those of the run below.
        x = torch.ones(2, requires_grad=True) * 1
        while torch._C._autograd._get_sequence_nr() < 1_000:
            x = torch.ones(2, requires_grad=True) * 1
        x.register_hook(lambda _: asked.append(t.path))
        thread = threading.Thread(target=lambda: model(x).sum().backward())
        thread.start()
        thread.join()
    assert asked == [None]


def test_a_module_that_runs_several_times_and_one_shared_by_two_parents(witness: Witness, device: str) -> None:
    leaf = Leaf(witness)
    inner = Chain(witness, leaf, leaf)
    model = watched(witness, Chain(witness, inner, leaf, inner), device)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        model(torch.ones(2, device=device)).sum().backward()
    assert_true(witness, "forward", "backward")
    assert ("", "parts.0#1", "parts.0.parts.0#4") in [truth for truth, _ in witness.of("backward")]


def test_accumulation_of_a_gradient_belongs_to_the_first_call_of_the_parameters_module(
    witness: Witness, device: str
) -> None:
    model = watched(witness, Chain(witness, Leaf(witness), Leaf(witness)), device)
    first, second = model.get_submodule("parts.0"), model.get_submodule("parts.1")
    assert isinstance(first, Leaf)
    second.weight = first.weight  # tied
    paths: list[str | None] = []
    with mt.track(model) as t:
        first.weight.register_post_accumulate_grad_hook(lambda _: paths.append(t.path))
        for _ in range(2):
            model(torch.ones(2, device=device)).sum().backward()
    assert paths == ["parts.0", "parts.0"]


def test_accumulation_for_a_module_that_never_runs_belongs_to_the_nearest_above_it() -> None:
    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lent = nn.ModuleDict({"fc": nn.Linear(2, 2)})

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.get_parameter("lent.fc.weight"))

    model = nn.Sequential(Borrows())
    weight = model.get_parameter("0.lent.fc.weight")
    paths: list[str | None] = []
    for target in (model, None):
        with mt.track(target) as t:
            handle = weight.register_post_accumulate_grad_hook(lambda _: paths.append(t.path))
            model(torch.ones(1, 2)).sum().backward()
        handle.remove()
    assert paths == ["0", "Sequential.0"]


def test_accumulation_for_a_parameter_that_was_put_in_while_tracking() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    paths: list[str | None] = []
    with mt.track(model) as t:
        for _ in range(2):
            model[1].weight = nn.Parameter(torch.ones(2, 2))
            model[1].weight.register_post_accumulate_grad_hook(lambda _: paths.append(t.path))
            model(torch.ones(1, 2)).sum().backward()
    assert paths == ["1", "1"]


@pytest.mark.slow
def test_a_graph_deeper_than_the_stack_can_be_tracked() -> None:
    # torch crashes as it frees a graph of this depth if Python has looked at its nodes.
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(1, 1)

        def forward(self, x: Tensor, steps: int) -> Tensor:
            for _ in range(steps):
                x = self.cell(x)
            return x

    model = Loop()
    with mt.track(model):
        model(torch.ones(1, 1), 60_000).sum().backward()
    with mt.track(model, on_enter=lambda call, phase: None):
        out = model(torch.ones(1, 1), 11_000).sum()
        with pytest.raises(
            Unsupported, match="at most 10,000 autograd nodes in depth, got a deeper one.*track without callbacks"
        ):
            out.backward()
        model(torch.ones(1, 1), 9_000).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_tells_recomputation_from_the_first_forward(
    witness: Witness, device: str, reentrant: bool
) -> None:
    class Checkpointed(Told):
        def __init__(self) -> None:
            super().__init__(witness)
            self.block = Chain(witness, Leaf(witness), Leaf(witness))
            self.last = Leaf(witness)

        def body(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.block, self.last(x), use_reentrant=reentrant))

    model = watched(witness, Checkpointed(), device)
    events: list[tuple[str, str]] = []
    with (
        mt.track(model, on_enter=lambda call, phase: events.append((phase, call.address))) as t,
        set_checkpoint_early_stop(False),
    ):
        witness.ask = lambda: (t.is_backward, ask(t), [call.phase for call in t.stack])
        model(torch.ones(2, device=device, requires_grad=True)).sum().backward()

    block = [("", "block"), ("", "block", "block.parts.0"), ("", "block", "block.parts.1")]
    recomputed = [(truth, answer) for truth, answer in witness.of("forward") if answer[0]]
    # The witness sees a recomputation as an outermost run; the tracker knows that it lies in the model's.
    assert [("", *truth) for truth, _ in recomputed] == [answer[1] for _, answer in recomputed]
    assert {truth for truth, _ in recomputed} == {stack[1:] for stack in block}
    assert all(set(answer[2][1:]) == {"recompute"} and answer[2][0] == "forward" for _, answer in recomputed)
    for truth, (is_backward, stack, _) in witness.of("backward"):
        assert is_backward
        assert stack == truth or stack == ("", *truth)  # of what a recomputation made, the witness knows no more
    assert [e for e in events if e[0] == "recompute"] == [("recompute", stack[-1]) for stack in block]
    for address in ("block", "block.parts.0", "block.parts.1", "last", "last#1"):
        assert events.count(("forward", address)) == events.count(("backward", address)) == 1


def test_a_recomputation_that_stops_early_leaves_no_stale_call(witness: Witness, device: str) -> None:
    block = Chain(witness, Leaf(witness), Chain(witness, Leaf(witness)))
    model = watched(witness, Chain(witness, block, Leaf(witness)), device)
    told: list[tuple[str, str, str]] = []
    with mt.track(
        model,
        on_enter=lambda call, phase: told.append(("enter", phase, call.address)),
        on_exit=lambda call, phase: told.append(("exit", phase, call.address)),
    ):
        # What stops it is an exception that torch throws through the modules.
        checkpoint(model, torch.ones(2, device=device, requires_grad=True), use_reentrant=False).sum().backward()
    assert_nested(told)
    assert ("enter", "recompute", "") in told


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_of_the_second_run_of_a_module_keeps_its_index(witness: Witness, reentrant: bool) -> None:
    class Twice(Told):
        def __init__(self) -> None:
            super().__init__(witness)
            self.block = Leaf(witness)

        def body(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, checkpoint(self.block, x, use_reentrant=reentrant), use_reentrant=reentrant)

    model = watched(witness, Twice(), "cpu")
    events: list[tuple[str, str]] = []
    with mt.track(model, on_enter=lambda call, phase: events.append((phase, call.address))):
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert [address for phase, address in events if phase == "recompute"] == ["block#1", "block"]


def test_autograd_grad_of_inputs_and_of_an_inner_output(witness: Witness, device: str) -> None:
    model = watched(witness, Chain(witness, Leaf(witness), Leaf(witness)), device)
    x = torch.ones(2, device=device, requires_grad=True)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        torch.autograd.grad(model(x).sum(), x)
    assert_true(witness, "forward", "backward")


def test_double_backward_belongs_to_the_call_whose_backward_it_derives(witness: Witness, device: str) -> None:
    model = watched(witness, Chain(witness, Leaf(witness), Chain(witness, Leaf(witness))), device)
    x = torch.ones(2, device=device, requires_grad=True)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        (grad,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        (grad,) = torch.autograd.grad(grad.pow(2).sum(), x, create_graph=True)
        grad.pow(2).sum().backward()
    assert_true(witness, "forward", "backward", "double")


class Force(Told):
    """A potential whose forward returns its own gradient, as models of molecules do."""

    def __init__(self, witness: Witness) -> None:
        super().__init__(witness)
        self.energy = Chain(witness, Leaf(witness), Leaf(witness))

    def body(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.energy(x).pow(3).sum(), x, create_graph=True)
        return force


def test_a_backward_inside_a_forward(witness: Witness, device: str) -> None:
    model = watched(witness, Force(witness), device)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        model(torch.ones(2, device=device, requires_grad=True)).pow(2).sum().backward()
        assert t.stack == ()
    assert_true(witness, "forward", "backward", "double")


def test_no_grad_inside(witness: Witness, device: str) -> None:
    class Frozen(Told):
        def __init__(self) -> None:
            super().__init__(witness)
            self.frozen, self.free = Leaf(witness), Leaf(witness)

        def body(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.frozen(x)
            return self.free(x)

    model = watched(witness, Frozen(), device)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        model(torch.ones(2, device=device)).sum().backward()
    assert_true(witness, "forward", "backward")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_a_forward_leaves_no_stale_call(witness: Witness, error: type[BaseException]) -> None:
    class Raises(Told):
        armed = True

        def body(self, x: Tensor) -> Tensor:
            if self.armed:
                raise error("on purpose")
            return self.witness.mark(x)

    class Catches(Chain):
        def body(self, x: Tensor) -> Tensor:
            try:
                x = super().body(x)
            except BaseException:  # noqa: BLE001
                x = self.witness.mark(x)
            return self.witness.mark(x)

    raises = Raises(witness)
    model = watched(witness, Chain(witness, Catches(witness, Chain(witness, raises)), raises), "cpu")
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        with pytest.raises(error, match="on purpose"):
            model(torch.ones(2, requires_grad=True))
        assert t.stack == ()
        raises.armed = False
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert_true(witness, "forward", "backward")


def test_an_exception_in_a_backward_leaves_no_stale_call(witness: Witness, device: str) -> None:
    model = watched(witness, Chain(witness, Leaf(witness), Leaf(witness)), device)
    told: list[tuple[str, str, str]] = []
    with mt.track(
        model,
        on_enter=lambda call, phase: told.append(("enter", phase, call.address)),
        on_exit=lambda call, phase: told.append(("exit", phase, call.address)),
    ) as t:

        def fail(grad: Tensor) -> Tensor:
            raise ValueError(f"on purpose in {t.path}")

        x = torch.ones(2, device=device, requires_grad=True)
        handle = x.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose in None"):
            model(x).sum().backward()
        assert (t.stack, t.is_backward) == ((), False)
        handle.remove()
        witness.marks.clear()
        witness.ask = lambda: ask(t)
        model(x).sum().backward()
    assert_true(witness, "forward", "backward")
    assert_nested(told)


def assert_nested(told: list[tuple[str, str, str]]) -> None:
    """Every exit matches the last open enter, and nothing stays open."""
    stack: list[tuple[str, str]] = []
    for kind, phase, address in told:
        if kind == "enter":
            stack.append((phase, address))
        else:
            assert stack.pop() == (phase, address)
    assert not stack


def test_callbacks_are_nested_and_the_backward_mirrors_the_forward(witness: Witness, device: str) -> None:
    model = watched(witness, Chain(witness, Leaf(witness), Chain(witness, Leaf(witness), Leaf(witness))), device)
    told: list[tuple[str, str, str]] = []
    with mt.track(
        model,
        on_enter=lambda call, phase: told.append(("enter", phase, call.address)),
        on_exit=lambda call, phase: told.append(("exit", phase, call.address)),
    ):
        model(torch.ones(2, device=device, requires_grad=True)).sum().backward()
    assert_nested(told)
    forward = [address for kind, phase, address in told if (kind, phase) == ("exit", "forward")]
    backward = [address for kind, phase, address in told if (kind, phase) == ("enter", "backward")]
    assert backward == forward[::-1]


def test_inside_a_callback_the_tracker_returns_the_call_of_the_event(witness: Witness, device: str) -> None:
    model = watched(witness, Chain(witness, Leaf(witness), Leaf(witness)), device)
    told: list[tuple[str, str | None]] = []
    with mt.track(
        model,
        on_enter=lambda call, phase: told.append((call.address, t.path)),
        on_exit=lambda call, phase: told.append((call.address, t.path)),
    ) as t:
        model(torch.ones(2, device=device)).sum().backward()
    assert len(told) == 12
    assert all(address == path for address, path in told)


def test_a_callback_that_raises_does_not_hide_what_the_backward_raised(witness: Witness) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError("first")

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Fails.apply(x)

    def leave(call: mt.Call, phase: str) -> None:
        if phase == "backward":
            raise ValueError("second")

    with mt.track(model := Model(), on_exit=leave), pytest.raises(KeyError, match="first") as caught:
        model(torch.ones(1, requires_grad=True)).sum().backward()
    assert "on_exit raised ValueError in the backward of ''" in caught.value.__notes__[0]


def test_closing_the_session_in_a_backward_leaves_open_calls_and_dispatches_no_more(
    witness: Witness,
) -> None:
    model = watched(witness, Chain(witness, Leaf(witness), Leaf(witness)), "cpu")
    told: list[tuple[str, str, str]] = []
    tracker = mt.track(
        model,
        on_enter=lambda call, phase: told.append(("enter", phase, call.address)),
        on_exit=lambda call, phase: told.append(("exit", phase, call.address)),
    )
    tracker.__enter__()
    out = model(torch.ones(2))
    told.clear()
    model.get_parameter("parts.1.weight").register_hook(lambda _: tracker.__exit__(None, None, None))
    out.sum().backward()
    assert_nested(told)
    assert ("enter", "backward", "parts.0") not in told


def test_a_call_is_left_in_the_backward_before_another_model_is_entered(witness: Witness) -> None:
    first, second = Leaf(witness), Leaf(witness)
    left_when: list[Any] = []
    with mt.track(second, on_exit=lambda call, phase: left_when.append((phase, asked.path))), mt.track(first) as asked:
        second(first(torch.ones(2)) + 1).sum().backward()
    assert left_when == [("forward", None), ("backward", None)]  # at the node between them, not when `first` had begun


def test_backward_after_the_with_has_ended_is_untracked_and_not_broken(witness: Witness, device: str) -> None:
    model = watched(witness, Chain(witness, Leaf(witness)), device)
    told: list[str] = []
    with mt.track(model, on_enter=lambda call, phase: told.append(phase)) as t:
        loss = model(torch.ones(2, device=device)).sum()
    witness.marks.clear()
    witness.ask = lambda: (t.path, t.is_backward)
    loss.backward()
    assert {answer for _, answer in witness.of("backward")} == {(None, False)}
    assert set(told) == {"forward"}
    assert model.get_parameter("parts.0.weight").grad is not None


def test_a_loss_outside_the_model_belongs_to_no_module(witness: Witness, device: str) -> None:
    model = watched(witness, Leaf(witness), device)
    with mt.track(model) as t:
        out = model(torch.ones(2, device=device))
        answers: list[Any] = []
        outside = out * 2
        outside.register_hook(lambda _: answers.append((t.path, t.is_backward)))
        outside.sum().backward()
    assert answers == [(None, True)]


def test_two_threads_each_with_a_model_see_only_their_own(device: str) -> None:
    witnesses = [Witness(), Witness()]
    models = [watched(w, Chain(w, *(Leaf(w) for _ in range(3))), device) for w in witnesses]
    barrier = threading.Barrier(2, timeout=60)

    with mt.track(models[0]) as t0, mt.track(models[1]) as t1, mt.track() as everything:
        witnesses[0].ask, witnesses[1].ask = (lambda: ask(t0)), (lambda: ask(t1))
        outsiders: list[Any] = []

        def work(which: int) -> None:
            for _ in range(20):
                barrier.wait()
                out = models[which](torch.ones(2, device=device))
                outsiders.append((t1, t0)[which].stack)
                out.sum().backward()
                assert everything.stack == ()

        threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for witness in witnesses:
        assert len(witness.of("backward")) == 20 * 6  # the first of 7 marks has an input that needs no grad
        assert_true(witness, "forward", "backward")
    assert set(outsiders) == {()}


def test_one_model_in_two_threads_at_once(witness: Witness, device: str) -> None:
    model = watched(witness, Chain(witness, Leaf(witness), Leaf(witness)), device)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)

        def work() -> None:
            for _ in range(20):
                torch.autograd.grad(model(torch.ones(2, device=device)).sum(), list(model.parameters()))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert_true(witness, "forward", "backward")


def test_a_forward_in_one_thread_and_its_backward_in_another(witness: Witness, device: str) -> None:
    model = watched(witness, Chain(witness, Leaf(witness), Leaf(witness)), device)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        loss = model(torch.ones(2, device=device)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert_true(witness, "forward", "backward")


def test_side_branches_and_deep_graphs_in_another_thread(witness: Witness) -> None:
    class Deep(SideBranch):
        def body(self, x: Tensor) -> Tensor:
            for _ in range(60_000):  # torch would crash as it frees the graph, had every node been tagged
                x = x * 1
            return super().body(x)

    model = watched(witness, Chain(witness, Deep(witness)), "cpu")
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)

        def work() -> None:
            out = model(torch.ones(2, requires_grad=True))
            deep: Any = model.get_submodule("parts.0")
            torch.stack([out.sum(), deep.by_module.sum(), deep.by_function.sum()]).sum().backward()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert_true(witness, "forward", "backward")


def test_a_graph_of_another_thread_is_recognised_below_a_loss_of_many_paths(witness: Witness) -> None:
    model = watched(witness, Leaf(witness), "cpu")
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        loss = model(torch.ones(2))
        for _ in range(6):
            loss = loss * loss + loss
        thread = threading.Thread(target=loss.sum().backward)
        thread.start()
        thread.join()
    assert_true(witness, "backward")


def test_many_recomputations_do_not_push_out_the_run_they_belong_to(witness: Witness, device: str) -> None:
    class Holder:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Net(Told):
        def __init__(self) -> None:
            super().__init__(witness)
            self.first = Leaf(witness)
            self.blocks = nn.ModuleList(Leaf(witness) for _ in range(20))

        def body(self, x: Tensor) -> Holder:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return Holder(x)

    model = watched(witness, Net(), device)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        model(torch.ones(2, device=device, requires_grad=True)).value.sum().backward()
    assert (("", "first"), ("", "first")) in witness.of("backward")


def test_a_tensor_kept_from_an_earlier_run_and_returned_later_keeps_its_owner(witness: Witness, device: str) -> None:
    class Keeps(Told):
        kept: Tensor | None = None

        def __init__(self) -> None:
            super().__init__(witness)
            self.leaf = Leaf(witness)

        def body(self, x: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = self.leaf(x)
                return x * 2
            return self.kept

    model = watched(witness, Keeps(), device)
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        x = torch.ones(2, device=device, requires_grad=True)
        model(x)
        model(x).sum().backward()
    assert_true(witness, "forward", "backward")


def test_recomputation_of_a_shared_module_hangs_where_its_original_hung(witness: Witness) -> None:
    shared = Leaf(witness)

    class Block(Told):
        def __init__(self) -> None:
            super().__init__(witness)
            self.shared = shared

        def body(self, x: Tensor) -> Tensor:
            return checkpoint(self.shared, x, use_reentrant=True)

    model = watched(witness, Chain(witness, Block(), Block()), "cpu")
    stacks: dict[str, list[tuple[str, ...]]] = {"forward": [], "recompute": [], "backward": []}
    with mt.track(model, on_enter=lambda call, phase: stacks[phase].append(tuple(c.address for c in call.stack))):
        model(torch.ones(2, requires_grad=True)).sum().backward()
    forward = [stack for stack in stacks["forward"] if "shared" in stack[-1]]
    assert forward == [("", "parts.0", "parts.0.shared"), ("", "parts.1", "parts.0.shared#1")]
    assert stacks["recompute"] == forward[::-1]
    assert [stack for stack in stacks["backward"] if "shared" in stack[-1]] == forward[::-1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
def test_replicas_of_data_parallel_on_a_gpu(witness: Witness) -> None:
    model = nn.DataParallel(watched(witness, Chain(witness, Leaf(witness), Leaf(witness)), "cuda"), device_ids=[0, 0])
    with mt.track(model) as t:
        witness.ask = lambda: ask(t)
        model(torch.ones(4, device="cuda")).sum().backward()
    # The witness names the wrapped model alone, whose path in the DataParallel is `module`.
    expected = [tuple(f"module.{path}" if path else "module" for path in truth) for _, truth, _ in witness.marks]
    assert expected == [answer for _, _, answer in witness.marks]
    assert len(witness.of("forward")) == 2 * 5


def test_without_a_model_every_module_of_the_process_is_tracked() -> None:
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.ReLU())
    told: list[str] = []
    with mt.track(on_enter=lambda call, phase: told.append(f"{phase} {call.path}")) as t:
        second(first(torch.ones(1, 2))).sum().backward()
        assert t.module_of("Sequential.0") is first[0]
        assert t.paths_of(second[0]) == ("Sequential@2.0",)
    assert told == [
        *("forward Sequential", "forward Sequential.0", "forward Sequential@2", "forward Sequential@2.0"),
        *("backward Sequential@2", "backward Sequential@2.0", "backward Sequential", "backward Sequential.0"),
    ]


def test_a_module_keeps_all_its_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(shared))
    with mt.track(model) as t:
        assert t.module_of("1.0") is t.module_of("0") is shared
        assert t.paths_of(shared) == ("0", "1.0")
        assert t.paths_of(model) == ("",)
        assert t.module_of("") is model


def test_a_path_that_does_not_exist_names_the_nearest() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(1, 1), "decoder": nn.Linear(1, 1)})
    with mt.track(model) as t, pytest.raises(LookupError, match=r"no module at path 'encodr'. Did you mean 'encoder'"):
        t.module_of("encodr")


def test_a_module_of_another_model_has_no_path() -> None:
    with mt.track(nn.Linear(1, 1)) as t, pytest.raises(LookupError, match="the ReLU is not part of the model"):
        t.paths_of(nn.ReLU())


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_callback_that_raises_is_reported_with_the_address_and_the_model_is_as_found(phase: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def on_enter(call: mt.Call, now: str) -> None:
        if (call.path, now) == ("1", phase):
            raise RuntimeError("on purpose")

    with mt.track(model, on_enter=on_enter) as t:
        with pytest.raises(
            ProbeError, match=f"on_enter raised RuntimeError in the {phase} of '1': on purpose"
        ) as caught:
            model(torch.ones(1, 2)).sum().backward()
        assert caught.value.address == "1"
        assert t.stack == ()
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("name", ["on_enter", "on_exit"])
def test_a_callback_must_be_a_function(name: str) -> None:
    with pytest.raises(BadQuery, match=f"expected {name} to be a function of the call and its phase, got 5"):
        mt.track(nn.ReLU(), **{name: 5})  # type: ignore[arg-type]


def test_a_tracker_says_what_it_tracks() -> None:
    tracker = mt.track(nn.ReLU())
    assert (repr(tracker), repr(mt.track())) == ("<Tracker of ReLU, closed>", "<Tracker of the process, closed>")
    with tracker:
        assert repr(tracker) == "<Tracker of ReLU, open>"


def test_a_model_that_keeps_its_own_output_can_still_be_collected() -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x * 2
            return self.kept

    model = Keeps()
    ref = weakref.ref(model)
    with mt.track(model):
        model(torch.ones(1, requires_grad=True))
    del model
    gc.collect()
    assert ref() is None


@pytest.mark.slow
def test_memory_stays_flat_over_10_000_steps() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    x = torch.ones(1, 2)

    def count_after(steps: int) -> int:
        for _ in range(steps):
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
        gc.collect()
        return len(gc.get_objects())

    with mt.track(model):
        before = count_after(100)
        assert count_after(9_900) - before < 50


def test_a_long_loop_in_one_outermost_call_does_not_grow_without_grad() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(1, 1)
            self.counts: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            for step in range(3_000):
                x = self.cell(x)
                if step in (1_000, 2_999):
                    gc.collect()
                    self.counts.append(len(gc.get_objects()))
            return x

    model = Loop()
    with mt.track(model), torch.no_grad():
        model(torch.ones(1, 1))
    assert model.counts[1] - model.counts[0] < 50


@pytest.mark.parametrize("outer", [False, True])
def test_every_callback_of_a_backward_is_called_inside_it(outer: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    told: list[tuple[str, str, bool, str | None]] = []

    def tell(call: Any, phase: str) -> None:
        told.append((call.address, phase, t.is_backward, t.path))

    with mt.track(net, on_enter=tell, on_exit=tell) as t:
        loss = net(torch.ones(1, 2)).sum()
        if outer:
            torch.autograd.grad(loss, list(net.parameters()))
        else:
            loss.backward()
        assert not t.is_backward
    assert {is_backward for _, phase, is_backward, _ in told if phase == "forward"} == {False}
    backward = [(address, is_backward, path) for address, phase, is_backward, path in told if phase == "backward"]
    assert len(backward) == 10
    assert all(is_backward and path == address for address, is_backward, path in backward)


@pytest.mark.parametrize("loss", [nn.functional.mse_loss, nn.MSELoss()])
def test_a_gradient_of_a_weight_belongs_to_its_module_below_a_loss_and_other_models(loss: Any) -> None:
    first, second = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 2))
    seen: dict[str, Any] = {}
    tracker = mt.track()
    for name, model in (("first", first), ("second", second)):
        weight = next(model.parameters())
        weight.register_hook(lambda _, name=name: seen.update({name: tracker.path}))
    with tracker:
        for _ in range(2):  # the second time, the runs of before may still be alive
            seen.clear()
            loss(second(first(torch.ones(3, 4))), torch.ones(3, 2)).backward()
            assert sorted(seen) == ["first", "second"]
            assert all(path is not None and path.endswith("0") for path in seen.values()), seen
            assert len(set(seen.values())) == 2
