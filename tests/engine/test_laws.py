"""Law 1, as found, and correctness of the stack of calls, as properties."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.engine import tensors_in
from microtome.errors import ProbeError
from tests.marks import examples
from tests.models import Leaf, Program, Step, Witness

slow = settings(max_examples=examples(60))


# -- law 1: as found ---------------------------------------------------------------------------------------------------

HOOKS = [name for name in vars(nn.Linear(1, 1)) if "hooks" in name]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that a session could have changed, in the model and in the process."""
    modules = dict(model.named_modules())
    hook_module = vars(nn.modules.module)
    return {
        "state": {name: (value.device, value.dtype, value.clone()) for name, value in model.state_dict().items()},
        "identity": {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())},
        "attributes": {path: {k: id(v) for k, v in vars(m).items()} for path, m in modules.items()},
        "hooks": {path: [dict(getattr(m, name) or {}) for name in HOOKS] for path, m in modules.items()},
        "training": {path: m.training for path, m in modules.items()},
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)),
        "global hooks": [dict(v) for k, v in hook_module.items() if k.startswith("_global") and isinstance(v, dict)],
        "torch": [
            dict(vars(space)) for space in (torch, torch.autograd, torch.autograd.graph, nn.functional, nn.Module)
        ],
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "modes": (torch.is_grad_enabled(), torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
    }


def assert_same(before: Any, after: Any, where: str = "") -> None:
    assert type(before) is type(after), where
    if isinstance(before, Tensor):
        assert torch.equal(before, after), where
    elif isinstance(before, np.ndarray):
        assert np.array_equal(before, after), where
    elif isinstance(before, dict):
        assert before.keys() == after.keys(), where
        for key in before:
            assert_same(before[key], after[key], f"{where}/{key}")
    elif isinstance(before, list | tuple):
        assert len(before) == len(after), where
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            assert_same(one, other, f"{where}/{index}")
    else:
        assert before is after or before == after, where


class Injected(Exception):
    pass


class InjectedInterrupt(BaseException):
    pass


@dataclass
class Bomb(mt.Probe):
    """Raises at the n-th event of one kind."""

    event: str
    at: int
    raises: Callable[[], BaseException]

    def _count(self, event: str) -> None:
        if event == self.event:
            self.at -= 1
            if self.at == -1:
                raise self.raises()

    def enter(self, call: mt.Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._count("enter")

    def exit(self, call: mt.Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._count("exit")

    def enter_backward(self, call: mt.Call) -> None:
        self._count("enter_backward")

    def exit_backward(self, call: mt.Call) -> None:
        self._count("exit_backward")


def run(model: nn.Module, inputs: zoo.Inputs, *, backward: bool) -> None:
    output = mt.Inputs.of(inputs).run(model)
    if backward:
        loss = torch.stack([tensor.sum() for tensor in tensors_in(output)]).sum()
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def fails(model: nn.Module, inputs: zoo.Inputs, session: mt.Session, *, backward: bool) -> bool:
    try:
        with session:
            run(model, inputs, backward=backward)
    except (ProbeError, Injected, InjectedInterrupt):
        return True
    return False


@slow
@given(
    name=st.sampled_from(zoo.names()),
    kind=st.sampled_from(["enter", "exit", "enter_backward", "exit_backward"]),
    interrupt=st.booleans(),
    training=st.sets(st.integers(0, 40)),
)
def test_model_and_process_are_as_found_when_a_probe_raises_at_any_call(
    name: str, kind: str, interrupt: bool, training: set[int]
) -> None:
    model, inputs = zoo.build(name)
    for index, module in enumerate(model.modules()):
        # Batch norm in training would change its buffers by itself.
        module.training = index in training and not isinstance(module, nn.BatchNorm2d)
    model.register_forward_hook(lambda *_: None)
    before = snapshot(model)
    at = 0
    while fails(
        model, inputs, mt.Session(model, [Bomb(kind, at, InjectedInterrupt if interrupt else Injected)]), backward=True
    ):
        assert_same(before, snapshot(model))
        at += 1
    assert at > 3  # and now the run that nothing interrupts
    assert_same(before, snapshot(model))


@slow
@given(name=st.sampled_from(zoo.names()), error=st.sampled_from([Injected, InjectedInterrupt]), process=st.booleans())
def test_model_and_process_are_as_found_when_any_forward_raises(
    name: str, error: type[BaseException], process: bool
) -> None:
    model, inputs = zoo.build(name)
    ran: list[str] = []
    model_calls = mt.Session(model, [Names(ran)])
    with model_calls:
        run(model, inputs, backward=False)
    for path in dict.fromkeys(ran):
        module = model.get_submodule(path)
        handle = module.register_forward_pre_hook(lambda *_: raise_(error))
        before = snapshot(model)
        assert fails(model, inputs, mt.Session(None if process else model, backward=True), backward=True)
        assert_same(before, snapshot(model))
        handle.remove()


class Names(mt.Probe):
    def __init__(self, into: list[str]) -> None:
        self.into = into

    def enter(self, call: mt.Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.into.append(call.path)


def raise_(error: type[BaseException]) -> None:
    raise error


@pytest.mark.parametrize("name", zoo.names())
def test_a_watched_training_step_is_the_plain_one_bit_for_bit(name: str) -> None:
    def step(watch: bool) -> tuple[dict[str, Tensor], list[Tensor | None], Tensor]:
        model, inputs = zoo.build(name)
        model.train()
        torch.manual_seed(1)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda _m, _a, output: torch.dropout(output, 0.5, train=True))
        with mt.track(model, on_enter=lambda call, phase: None) if watch else nullcontext():
            output = mt.Inputs.of(inputs).run(model)
            torch.stack([tensor.pow(2).sum() for tensor in tensors_in(output)]).sum().backward()
        return model.state_dict(), [p.grad for p in model.parameters()], torch.get_rng_state()

    assert_same(step(watch=False), step(watch=True))


# -- the stack is the true nesting -------------------------------------------------------------------------------------

steps = st.lists(
    st.builds(
        Step,
        child=st.integers(0, 3),
        keyword=st.booleans(),
        no_grad=st.sampled_from([False] * 7 + [True]),
        in_place=st.booleans(),
        aside=st.sampled_from([False, False, True]),
    ),
    min_size=1,
    max_size=5,
)
#: A tree, bottom up: each program takes children from what was built before it, so any module may have many parents.
Plan = list[tuple[list[int], list[Step]]]
plans = st.lists(st.tuples(st.lists(st.integers(0, 20), max_size=3), steps), min_size=1, max_size=5)


def grow(witness: Witness, plan: Plan) -> Program:
    built: list[nn.Module] = [Leaf(witness), Leaf(witness)]
    for children, program in plan:
        built.append(Program(witness, [built[index % len(built)] for index in children], program))
    root = built[-1]
    assert isinstance(root, Program)
    witness.name(root)
    return root


Order = Literal["once", "twice", "create_graph"]


@settings(deadline=None, max_examples=400)
@given(plan=plans, order=st.sampled_from(["once", "twice", "create_graph"]))
def test_the_stack_is_the_true_nesting_on_random_trees(plan: Plan, order: Order) -> None:
    witness = Witness()
    model = grow(witness, plan)
    x = torch.ones(2, requires_grad=True)
    with mt.track(model) as t:
        witness.ask = lambda: tuple(call.address for call in t.stack)
        losses = [(model(x) * x).sum(), *model.losses()]
        if order == "twice":
            torch.stack(losses).sum().backward(retain_graph=True)
            losses += [(model(x) * x).sum()]
        if order == "create_graph":
            (grad,) = torch.autograd.grad(torch.stack(losses).pow(2).sum(), x, create_graph=True)
            losses += [grad.pow(2).sum()]
        torch.stack(losses).sum().backward()
        assert t.stack == ()
    wrong = [mark for mark in witness.marks if mark[1] != mark[2]]
    assert not wrong
    event("with a backward" if witness.of("backward") else "without a backward")


@settings(deadline=None, max_examples=200)
@given(plan=plans)
def test_every_enter_has_its_exit_and_backward_callbacks_nest_on_random_trees(plan: Plan) -> None:
    witness = Witness()
    model = grow(witness, plan)
    open_calls: list[tuple[mt.Call, str]] = []

    def on_enter(call: mt.Call, phase: str) -> None:
        open_calls.append((call, phase))

    def on_exit(call: mt.Call, phase: str) -> None:
        assert open_calls.pop() == (call, phase)

    with mt.track(model, on_enter=on_enter, on_exit=on_exit) as t:
        # What callbacks were told is at any moment what the tracker answers.
        witness.ask = lambda: t.stack == tuple(call for call, _ in open_calls)
        x = torch.ones(2, requires_grad=True)
        torch.stack([(model(x) * x).sum(), *model.losses()]).sum().backward()
    assert not open_calls
    assert all(answer for _, _, answer in witness.marks)
