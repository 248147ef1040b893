"""Sessions over stages: state objects, of which each stage keeps its own part."""

from __future__ import annotations

import gc
import weakref
from enum import Enum
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.engine.pytree import as_state
from microtome.errors import BadBoundary, BadInputs, BadQuery, SessionError, Unsupported
from microtome.split.execution.placeholder import Placeholder, PlaceholderRead
from microtome.split.state.contents import fill_placeholders
from microtome.split.state.snapshot import StateSnapshot, digest_of


class Memory:
    """What the layers have seen, a tensor for each, and the number of steps."""

    def __init__(self, layers: int) -> None:
        self.steps = 0
        self.kept: list[Any] = [None] * layers
        self.dtype: torch.dtype | None = None
        self.counts = {str(layer): 0 for layer in range(layers)}
        self.lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(layers)]

    def put(self, layer: int, x: Tensor) -> Tensor:
        kept = self.kept[layer]
        self.kept[layer] = full = x if kept is None else torch.cat([kept, x], dim=1)
        self.dtype = x.dtype
        self.counts[str(layer)] += 1
        self.lengths[layer] += x.shape[1]
        return full


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        seen = memory.put(self.index, self.inner(x))
        return x + self.outer(torch.tanh(seen.sum(1, keepdim=True)))


class Model(nn.Module):
    """The numbers of steps and calls, and the length of its memory, enter its output."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index) for index in range(layers))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor, memory: Memory) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x, memory)
            memory.steps += layer is self.layers[1]
        length = memory.kept[0].shape[1] if memory.kept[0] is not None else 0
        return {"out": self.last(x) * memory.steps + length + sum(memory.counts.values()), "memory": memory}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


X = torch.linspace(-1, 1, 24).view(2, 3, 4)
EXAMPLE = mt.Inputs(X, memory=Memory(4))
CUTS = ["layers.0", "layers.1.inner", "layers.2.inner", "layers.3", ["layers.0", "layers.2.inner"]]


def run(step: Any, inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
    """The outputs of the steps, and the state after the last."""
    outputs, output = [], step(inputs[0], memory=Memory(4))
    outputs.append(output["out"])
    for x in inputs[1:]:
        output = step(x, memory=output["memory"])
        outputs.append(output["out"])
    return outputs, output["memory"]


STEPS = [X, X[:, :1] + 1, X[:, :2] - 1, X[:, :1]]


@pytest.mark.parametrize("at", CUTS)
@torch.no_grad()
def test_each_step_equals_that_of_the_model(model: Model, at: Any) -> None:
    stages = mt.split(model, EXAMPLE, at=at)
    assert stages.verified == "bit-equal"
    expected, whole = run(model, STEPS)
    with stages.session() as session:
        outputs, memory = run(session, STEPS)
    assert all(map(torch.equal, outputs, expected))
    assert digest_of([memory]) == digest_of([whole])  # the caller's object has all shapes and numbers
    assert memory.steps == 4
    assert list(memory.counts.values()) == [4, 4, 4, 4]
    assert [int(length) for length in memory.lengths] == [7, 7, 7, 7]


@pytest.mark.parametrize("path", ["layers.0", "layers.3.outer"])
@torch.no_grad()
def test_a_module_that_changes_its_mode_between_steps_is_refused(model: Model, path: str) -> None:
    session = mt.split(model, EXAMPLE, at="layers.1").session()
    output = session(X, memory=Memory(4))
    model.get_submodule(path).train()
    with pytest.raises(Unsupported, match=f"expected '{path}' in eval mode, as when it was split, got training mode"):
        session(X, memory=output["memory"])


@torch.no_grad()
def test_each_stage_keeps_what_its_own_calls_wrote_and_nothing_else(model: Model) -> None:
    session = mt.split(model, EXAMPLE, at=["layers.0", "layers.2"]).session()
    _, memory = run(session, STEPS)
    _, whole = run(model, STEPS)
    held = [[type(tensor) is Tensor for tensor in own.kept] for (own,) in session._sequence.states]
    assert held == [[True, False, False, False], [False, True, True, False], [False, False, False, True]]
    for (own,) in session._sequence.states:
        for tensor, expected in zip(own.kept, whole.kept, strict=True):
            assert isinstance(tensor, Placeholder) or tensor.equal(expected)
    assert session._sequence.states[0][0] is memory
    with pytest.raises(PlaceholderRead, match=r"the state at \.kept\[1\], written by another stage"):
        memory.kept[1].sum().item()


@torch.no_grad()
def test_no_tensor_of_the_state_crosses(model: Model) -> None:
    head, _ = mt.split(model, EXAMPLE, at="layers.1")
    memory = model(X.repeat(1, 50, 1), Memory(4))["memory"]
    assert head(X, memory=memory).nbytes == head(X, memory=Memory(4)).nbytes == X.nbytes


@torch.no_grad()
def test_one_pass_needs_no_session(model: Model) -> None:
    head, tail = mt.split(model, EXAMPLE, at="layers.1")
    for x in (X, X[:1, :2]):
        output = tail(mt.Boundary.from_bytes(head(x, memory=Memory(4)).to_bytes()))
        expected = model(x, Memory(4))
        assert output["out"].equal(expected["out"])
        assert isinstance(output["memory"].kept[0], Placeholder)
        assert output["memory"].kept[3].equal(expected["memory"].kept[3])


@torch.no_grad()
def test_sessions_are_independent_of_each_other(model: Model) -> None:
    stages = mt.split(model, EXAMPLE, at="layers.1")
    sessions = [stages.session() for _ in range(3)]
    inputs = [[x * (1 + number) for x in STEPS] for number in range(3)]
    outputs: list[Any] = [session(steps[0], memory=Memory(4)) for session, steps in zip(sessions, inputs, strict=True)]
    for step in range(1, 4):
        outputs = [
            session(steps[step], memory=output["memory"])
            for session, steps, output in zip(sessions, inputs, outputs, strict=True)
        ]
    for output, steps in zip(outputs, inputs, strict=True):
        assert output["out"].equal(run(model, steps)[0][-1])


# -- edits between steps -----------------------------------------------------------------------------------------------

EDITS = {
    "reorder": lambda tensor: tensor.index_select(0, torch.tensor([1, 0])),
    "crop": lambda tensor: tensor[:, :-1],
    "repeat": lambda tensor: tensor.repeat_interleave(2, dim=0),
    "in place": lambda tensor: tensor.zero_(),
    "twice": lambda tensor: tensor[:, 1:].clone().flip(0),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("at", ["layers.1", ["layers.0", "layers.2.inner"]])
@torch.no_grad()
def test_edits_between_steps_are_made_in_every_stage(model: Model, name: str, at: Any) -> None:
    session = mt.split(model, EXAMPLE, at=at).session()
    results = []
    for step in (session, model):
        memory = step(X, memory=Memory(4))["memory"]
        memory.kept = [EDITS[name](tensor) for tensor in memory.kept]
        memory.steps = 7
        x = X.repeat_interleave(2, dim=0) if name == "repeat" else X
        output = step(x, memory=memory)
        results.append((output["out"], step(x, memory=output["memory"])["out"]))
    assert all(map(torch.equal, *results))


def _write_to_a_view(memory: Memory) -> None:
    memory.kept[3][:, 0] = 0


def _write_through_data(memory: Memory) -> None:
    memory.kept[3].data.zero_()


def _add_another_part(memory: Memory) -> None:
    memory.kept[3].add_(memory.kept[2])


def _combine(memory: Memory) -> None:
    memory.kept[3] = memory.kept[3] + memory.kept[2]


def _draw(memory: Memory) -> None:
    memory.kept[3].normal_()


def _replace(memory: Memory) -> None:
    memory.kept[3] = torch.ones(2, 3, 4)


@pytest.mark.parametrize("edit", [_write_to_a_view, _write_through_data, _add_another_part, _combine, _draw, _replace])
@torch.no_grad()
def test_an_edit_that_other_stages_cannot_repeat_is_refused(model: Model, edit: Any) -> None:
    session = mt.split(model, EXAMPLE, at="layers.1").session()
    memory = session(X, memory=Memory(4))["memory"]
    edit(memory)
    with pytest.raises(Unsupported, match=r"the state at \.kept\[3\] was (edited|replaced) between two steps"):
        session(X, memory=memory)
    with pytest.raises(SessionError, match="a.*session whose steps all succeeded, got one that was closed, failed"):
        session(X, memory=memory)


@torch.no_grad()
def test_placeholders_of_another_step_or_session_are_refused(model: Model) -> None:
    stages = mt.split(model, EXAMPLE, at="layers.1")
    for take_from_other in (False, True):
        session = stages.session()
        memory = session(X, memory=Memory(4))["memory"]
        saved = stages.session()(X, memory=Memory(4))["memory"].kept[3] if take_from_other else memory.kept[3]
        memory = session(X, memory=memory)["memory"]
        memory.kept[3] = saved
        with pytest.raises(Unsupported, match=r"\.kept\[3\] was edited between two steps"):
            session(X, memory=memory)


@torch.no_grad()
def test_arguments_of_an_edit_are_those_when_it_was_made(model: Model) -> None:
    results = []
    for step in (mt.split(model, EXAMPLE, at="layers.1").session(), model):
        memory, order = step(X, memory=Memory(4))["memory"], torch.tensor([1, 0])
        memory.kept = [tensor.index_select(0, order) for tensor in memory.kept]
        order.zero_()
        results.append(step(X, memory=memory)["out"])
    assert results[0].equal(results[1])


# -- refusals ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_tail_that_is_not_told_of_the_head_s_state_is_caught(model: Model) -> None:
    head, tail = mt.split(model, EXAMPLE, at="layers.1")
    boundary = head(X, memory=Memory(4))
    for call in boundary.facts["calls"]:
        assert call.pop("states")
        call["states"] = [[]]
    with pytest.raises(BadBoundary, match="expected the state that the head has at the cut, got another one"):
        tail(boundary)


@torch.no_grad()
def test_a_second_step_on_a_tail_without_the_first_is_caught(model: Model) -> None:
    stages = mt.split(model, EXAMPLE, at="layers.1")
    head, tail = stages
    memory = stages.session()(X, memory=Memory(4))["memory"]
    boundary = head(X, memory=memory)
    with pytest.raises(BadBoundary, match=r"has at the cut, got another one: .*stages\.session\(\)"):
        tail(boundary)


@torch.no_grad()
def test_a_state_belongs_to_one_session_at_one_cut(model: Model) -> None:
    session = mt.split(model, EXAMPLE, at="layers.1").session()
    memory = session(X, memory=Memory(4))["memory"]
    for other in (mt.split(model, EXAMPLE, at="layers.1").session(), mt.split(model, EXAMPLE, at="layers.2").session()):
        with pytest.raises(SessionError, match="expected a new Memory, got one of another sequence"):
            other(X, memory=memory)
    with pytest.raises(SessionError, match="expected the state that the last step returned, got another one"):
        session(X, memory=Memory(4))


class Flagged(Model):
    """By flags of the call, changes parts of its memory that the example does not change."""

    def forward(self, x: Tensor, memory: Memory, head: bool = False, tail: int = 0) -> dict[str, Any]:
        first: Any = self.layers[0]
        first.also = head
        output = super().forward(x, memory)
        if tail == 1:
            memory.kept[0].mul_(0.5)
        elif tail == 2:
            memory.kept[0] = x.mean() + memory.kept[0]
        return output


class Also(Layer):
    """A layer that may also write to the part of the last one."""

    also = False

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        if self.also:
            memory.kept[3] = torch.ones(2, 3, 4)
        return super().forward(x, memory)


@torch.no_grad()
def test_changes_of_state_that_the_example_does_not_make_are_refused() -> None:
    torch.manual_seed(0)
    model = Flagged().eval()
    model.layers[0] = Also(0)
    inputs = {"x": X, "memory": Memory(4), "head": False, "tail": 0}
    stages = mt.split(model, inputs, at="layers.1")
    for tail in (1, 2):
        with pytest.raises(Unsupported, match=r"a stage changes the state at \.kept\[0\], whose values another stage"):
            stages.session()(**inputs | {"memory": Memory(4), "tail": tail})
    head, _ = stages
    with pytest.raises(Unsupported, match=r"the state at \.kept\[3\] is changed before the cut"):
        head(**inputs | {"memory": Memory(4), "head": True})


class Copies(Layer):
    """A layer that may replace a number in the state by another tensor, as one that moves it to another device does."""

    adds: int | None = None

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        if self.adds is not None:
            memory.number = memory.number + self.adds  # type: ignore[attr-defined]
        return super().forward(x, memory)


@torch.no_grad()
def test_a_number_of_the_state_may_be_replaced_by_an_equal_one_before_the_cut() -> None:
    torch.manual_seed(0)
    model: Any = Model().eval()
    model.layers[0] = copies = Copies(0)

    def memory() -> Memory:
        memory: Any = Memory(4)
        memory.number = torch.tensor(7)
        return memory

    stages = mt.split(model, {"x": X, "memory": memory()}, at="layers.1")
    copies.adds = 0
    own = memory()
    output = stages.session()(x=X, memory=own)
    assert output["out"].equal(model(X, memory())["out"])
    copies.adds = 1
    with pytest.raises(Unsupported, match=r"the state at \.number is changed before the cut"):
        stages.session()(x=X, memory=memory())


class Mode(Enum):
    A = 1


@pytest.mark.parametrize("value", [Mode.A, {1, 2}, [Mode.A], (torch.ones(1),), Lock()])
def test_a_part_that_cannot_be_described_is_named(value: Any) -> None:
    memory = Memory(1)
    memory.other = value  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match=r"the state holds a \w+ at \.other.*, which cannot be described"):
        StateSnapshot.of(memory)


@torch.no_grad()
def test_tensors_of_a_state_that_share_memory_are_refused(model: Model) -> None:
    memory = Memory(4)
    whole = torch.zeros(2, 4, 4)
    memory.kept = [whole[:, :2], whole[:, 1:], None, None]
    with pytest.raises(Unsupported, match=r"the state holds tensors that share memory, such as \.kept\[0\]"):
        mt.split(model, EXAMPLE, at="layers.1").session()(X, memory=memory)


@torch.no_grad()
def test_a_tail_does_not_take_the_values_of_the_example_for_its_own(model: Model) -> None:
    memory = model(X, Memory(4))["memory"]
    head, tail = mt.split(model, {"x": X, "memory": memory}, at="layers.1")
    other = model(X + 1, Memory(4))["memory"]
    with pytest.raises(Unsupported, match=r"expected the stage's own state.*stages\.session\(\)"):
        tail(head(x=X, memory=other))


@torch.no_grad()
def test_nothing_is_kept_of_a_session_that_ended(model: Model) -> None:
    memory = Memory(4)
    session = mt.split(model, EXAMPLE, at="layers.1").session()
    session(X, memory=memory)
    references = [weakref.ref(memory), weakref.ref(session._sequence.states[1][0]), weakref.ref(session)]
    del memory, session
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


@torch.no_grad()
def test_a_split_does_not_change_what_other_functions_take_a_class_for(model: Model) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Memory:
            memory = Memory(1)
            memory.kept[0] = self.inner(x)
            return memory

    other = Returns()
    before = [len(call.outputs) for call in mt.trace(other, X).calls]
    mt.split(model, EXAMPLE, at="layers.1").session()(X, memory=Memory(4))
    assert [len(call.outputs) for call in mt.trace(other, X).calls] == before


@torch.no_grad()
def test_a_model_without_generate_says_what_to_do(model: Model) -> None:
    with pytest.raises(Unsupported, match=r"expected a model with a method `generate`.*run its steps with session\(\)"):
        mt.split(model, EXAMPLE, at="layers.1").generate(X)


@torch.no_grad()
def test_the_model_and_the_caller_s_state_are_as_found_after_a_split(model: Model) -> None:
    memory = Memory(4)
    before = digest_of([memory])
    mt.split(model, {"x": X, "memory": memory}, at="layers.1")
    mt.cuts(model, {"x": X, "memory": memory})
    assert digest_of([memory]) == before


# -- state that the user names -----------------------------------------------------------------------------------------


class Lazy(nn.Module):
    """Writes to its memory from the second step on only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LazyLayer(index) for index in range(3))

    def forward(self, x: Tensor, memory: Memory) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x, memory)
        return {"out": x, "memory": memory}


class LazyLayer(Layer):
    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        return super().forward(x, memory) if x.shape[1] == 1 else self.outer(x)


@torch.no_grad()
def test_a_state_that_the_example_does_not_change_can_be_named() -> None:
    torch.manual_seed(0)
    model = Lazy().eval()
    steps = [X[:, :2], X[:, :1], X[:, 1:2], X[:, :1]]
    stages = mt.split(model, mt.Inputs(steps[1], memory=Memory(3)), at="layers.1", state="memory")
    assert stages.describe().state == ("memory",)
    outputs, _ = run_named(stages.session(), steps[1:])
    expected, _ = run_named(model, steps[1:])
    assert all(map(torch.equal, outputs, expected))


def run_named(step: Any, inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
    memory, outputs = Memory(3), []
    for x in inputs:
        output = step(x, memory=memory)
        memory = output["memory"]
        outputs.append(output["out"])
    return outputs, memory


def test_a_name_of_a_state_must_be_that_of_an_argument(model: Model) -> None:
    with pytest.raises(BadQuery, match=r"expected the state 'cache' among the arguments of the example, got x, memory"):
        mt.split(model, EXAMPLE, at="layers.1", state="cache")
    with pytest.raises(BadQuery, match=r"expected an object that holds state as 'x', got a Tensor"):
        mt.split(model, EXAMPLE, at="layers.1", state="x")


@torch.no_grad()
def test_tensors_of_earlier_steps_are_freed(model: Model) -> None:
    stages = mt.split(model, {"x": torch.ones(1, 1, 4), "memory": Memory(4)}, at="layers.1")
    with stages.session() as session:
        memory = session(x=torch.ones(1, 1, 4), memory=Memory(4))["memory"]
        earlier = [weakref.ref(states[0].kept[at]) for states, at in zip(session._sequence.states, (0, 3), strict=True)]
        session(x=torch.ones(1, 1, 4), memory=memory)
        assert [ref() for ref in earlier] == [None, None]


@torch.no_grad()
def test_a_closed_session_runs_no_step(model: Model) -> None:
    stages = mt.split(model, {"x": torch.ones(1, 1, 4), "memory": Memory(4)}, at="layers.1")
    with stages.session() as session:
        session(x=torch.ones(1, 1, 4), memory=Memory(4))
    with pytest.raises(SessionError, match=r"expected an open session, got one that was closed: begin another"):
        session(x=torch.ones(1, 1, 4), memory=Memory(4))


class _Swap(nn.Module):
    """Swaps two parts of its state from the second step on, one an empty list, the other None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.swap = _SwapParts()

    def forward(self, x: Tensor, memory: Any) -> dict[str, Any]:
        y = self.swap(self.first(x), memory)
        return {"out": self.last(y) * (2 if memory.one is None else 3), "memory": memory}


class _SwapParts(nn.Module):
    def forward(self, x: Tensor, memory: Any) -> Tensor:
        memory.steps += 1
        memory.kept[0] = x
        if memory.steps > 2:
            memory.one, memory.two = memory.two, memory.one
        return x * 1.0


@torch.no_grad()
def test_parts_that_change_places_are_not_taken_for_each_other() -> None:
    def make() -> Memory:
        memory = Memory(1)
        vars(memory).update(one=[], two=None)
        return memory

    model, x, memory = _Swap().eval(), torch.ones(1, 4), make()
    session = mt.split(model, {"x": x, "memory": make()}, at="swap", state="memory").session()
    for _ in range(2):
        memory = session(x=x, memory=memory)["memory"]
    with pytest.raises(
        (BadBoundary, Unsupported), match="expected the state that the head has|differs from the example"
    ):
        session(x=x, memory=memory)


@torch.no_grad()
def test_one_object_for_two_states_is_not_taken_for_two() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(0), Layer(1)

        def forward(self, x: Tensor, one: Memory, two: Memory) -> dict[str, Any]:
            return {"out": self.second(self.first(x, one), two), "one": one, "two": two}

    model, x = Net().eval(), torch.ones(1, 1, 4)
    stages = mt.split(model, {"x": x, "one": Memory(2), "two": Memory(2)}, at="first", state=["one", "two"])
    stages.session()(x=x, one=Memory(2), two=Memory(2))
    both = Memory(2)
    with pytest.raises(BadInputs, match="arguments of the head"):
        stages.session()(x=x, one=both, two=both)


@torch.no_grad()
def test_placeholders_in_containers_of_a_module_are_removed_after_a_step() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.seen: dict[str, Any] = {"mean": 0.0}

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            self.seen["mean"] = y.mean(0)
            return self.last(y)

    model, x = Net().eval(), torch.ones(2, 4)
    expected = model(x)
    head, tail = mt.split(model, x, at="last")
    boundary = head(x)
    model.seen["mean"] = 0.0  # as in a process that never ran the head
    assert tail(boundary).equal(expected)
    assert model.seen == {"mean": 0.0}


@torch.no_grad()
def test_states_passed_by_keyword_in_another_order_than_that_of_their_names() -> None:
    class Inner(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.linear, self.index = nn.Linear(4, 4), index

        def forward(self, x: Tensor, *, two: Memory, one: Memory) -> Tensor:
            seen = one.put(self.index, self.linear(x))
            two.steps += 10
            return x + seen.sum(1, keepdim=True) * two.steps

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Inner(index) for index in range(3))

        def forward(self, x: Tensor, b: Memory, a: Memory) -> dict[str, Any]:
            x = self.layers[1](self.layers[0](x, two=b, one=a), two=a, one=b)
            return {"out": self.layers[2](x, two=b, one=a), "a": a, "b": b}

    torch.manual_seed(0)
    model, x = Net().eval(), torch.ones(1, 1, 4)
    stages = mt.split(model, {"x": x, "b": Memory(3), "a": Memory(3)}, at="layers.1", state=["b", "a"])
    session, (one, other) = stages.session(), (Memory(3), Memory(3))
    b, a = Memory(3), Memory(3)
    for step in range(5):
        assert session(x=x + step, b=b, a=a)["out"].equal(model(x=x + step, b=one, a=other)["out"])


def test_a_state_that_is_filled_to_analyze_a_model_keeps_the_devices_of_its_parts() -> None:
    memory = Memory(2)
    memory.device, memory.lengths[0] = torch.device("meta"), torch.ones(1, dtype=torch.int64)  # type: ignore[attr-defined]
    memory.kept[1] = torch.zeros(2, 3, device="meta")
    with as_state((Memory,)):
        filled = fill_placeholders(memory)
    assert (filled.device, filled.kept[1].device.type) == (torch.device("meta"), "meta")
    assert filled.lengths[0].equal(torch.ones(1, dtype=torch.int64))
    assert filled.lengths[0] is not memory.lengths[0]
