"""The halves of a model give what the model gives, run nothing of each other, and leave everything as it was."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, is_tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_flatten, tree_leaves

import microtome as mt
from microtome import zoo
from microtome.errors import BadBoundary, BadInputs, BadQuery, NoMatch, Unsupported
from tests.marks import slow
from tests.split.test_cuts import Net


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    """Whether two structures of one kind hold the same bits; NaN is NaN."""
    first, second = tree_flatten(one), tree_flatten(other)
    if first[1] != second[1]:
        return False
    for left, right in zip(first[0], second[0], strict=True):
        if isinstance(left, Tensor) != isinstance(right, Tensor):
            return False
        if isinstance(left, Tensor):
            if left.dtype != right.dtype or left.shape != right.shape:
                return False
            if left.numel() and not torch.equal(bits(left), bits(right)):
                return False
        elif left != right:
            return False
    return True


def exact(model: nn.Module, *inputs: Any, at: Any = None, others: tuple[Any, ...] = ()) -> int:
    """Cut at every place, or these, and compare on this input and others; how many cuts there were."""
    given = mt.Inputs(*inputs) if not (len(inputs) == 1 and isinstance(inputs[0], mt.Inputs)) else inputs[0]
    places = [cut.at for cut in mt.cuts(model, given)] if at is None else at
    for place in places:
        head, tail = mt.split(model, given, at=place)
        for each in (given, *others):
            whole = copied(each).run(model)
            fresh = copied(each)
            boundary = head(*fresh.args, **fresh.kwargs)
            assert same(tail(boundary), whole), place
            assert same(tail(mt.Boundary.from_bytes(boundary.to_bytes())), whole), place
    return len(places)


def copied(given: Any) -> mt.Inputs:
    return copy.deepcopy(mt.Inputs.of(given))


# -- what runs where ---------------------------------------------------------------------------------------------------


@contextmanager
def forwards(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """Which forwards begin and end, in order, seen by patching each module's own."""
    events: list[tuple[str, str]] = []

    def patch(path: str, module: nn.Module) -> None:
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            # What runs on tensors without values is a look at the model, and no run.
            is_run = not any(
                t.is_meta or isinstance(t, FakeTensor) for t in tree_leaves((args, kwargs)) if is_tensor(t)
            )
            if is_run:
                events.append(("enter", path))
            output = plain(*args, **kwargs)
            if is_run:
                events.append(("exit", path))
            return output

        module.forward = forward

    for path, module in model.named_modules():
        patch(path, module)
    try:
        yield events
    finally:
        for module in model.modules():
            del module.forward


def parts(events: list[tuple[str, str]], at: int) -> tuple[list[str], list[str]]:
    """The forwards that a head and a tail should begin, if the cut is at the exit with this number."""
    exits = [index for index, (what, _) in enumerate(events) if what == "exit"]
    cut = exits[at]
    head = [path for what, path in events[: cut + 1] if what == "enter"]
    around: list[str] = []
    for what, path in events[: cut + 1]:
        if what == "enter":
            around.append(path)
        else:
            around.pop()
    tail = around + [path for what, path in events[cut + 1 :] if what == "enter"]
    return head, tail


@pytest.mark.parametrize("name", zoo.names())
def test_the_head_runs_nothing_after_the_cut_and_the_tail_nothing_before_it(name: str) -> None:
    model, inputs = zoo.build(name)
    given = mt.Inputs.of(inputs)
    cuts = mt.cuts(model, inputs)
    with forwards(model) as events:
        whole = given.run(model)
        plain = list(events)
        for cut in cuts[::3]:
            head, tail = mt.split(model, inputs, at=cut, verify=False)
            events.clear()
            boundary = head(*given.args, **given.kwargs)
            ran = [path for what, path in events if what == "enter"]
            events.clear()
            assert same(tail(boundary), whole)
            assert (ran, [path for what, path in events if what == "enter"]) == parts(plain, cut.index), cut.at


def test_operators_that_no_module_has_run_on_their_side_alone() -> None:
    seen: list[str] = []

    def body(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        seen.append("python")  # which both sides run, since they run the model's own code
        return net.b(y).exp()

    head, tail = mt.split(Net(body), "2x4", at="a")
    seen.clear()
    boundary = head(torch.ones(2, 4))
    assert seen == []
    tail(boundary)
    assert seen == ["python"]


# -- inputs and outputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-decoder", "tiny-lstm", *slow("tiny-resnet", "tiny-unet", "tiny-vit")])
def test_every_cut_of_a_built_in_model_is_exact(name: str) -> None:
    model, inputs = zoo.build(name)
    assert exact(model, mt.Inputs.of(inputs)) == len(mt.cuts(model, inputs))


def test_positional_and_keyword_inputs() -> None:
    model = Net(lambda net, x, y, *, scale, mask=None: net.b(net.a(x) * y) * scale + (0 if mask is None else mask))
    x, y, mask = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4)
    assert exact(model, mt.Inputs(x, y, scale=2.0, mask=mask), others=(mt.Inputs(y, x, scale=0.5, mask=mask + 1),)) == 2
    assert exact(model, mt.Inputs(x, y=y, scale=2)) == 2
    head, _ = mt.split(model, mt.Inputs(x, y, scale=2.0), at="a")
    with pytest.raises(BadInputs, match=r"arguments of the head: expected \("):
        head(x, y, scale=2.0, mask=mask)
    with pytest.raises(BadInputs, match=r"Split the model on an example of the same structure"):
        head(x, y=y, scale=2.0)


def test_inputs_in_lists_dicts_and_tuples() -> None:
    model = Net(lambda net, batch: net.b(net.a(batch["x"][0])) + batch["x"][1] * batch["by"])
    given = {"x": (torch.randn(2, 4), torch.randn(2, 4)), "by": 3, "name": "none"}
    assert exact(model, mt.Inputs(given)) == 2


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    count: int
    name: str | None = None


def test_dataclasses_and_nested_outputs() -> None:
    model = Net(lambda net, x: Output(net.b(y := net.a(x)), (x, y, net.c(y)), 3))
    for at in ("a", "b", "c"):
        head, tail = mt.split(model, "2x4", at=at)
        x = torch.randn(2, 4)
        got, whole = tail(head(x)), model(x)
        assert type(got) is Output
        assert same([got.logits, got.hidden, got.count, got.name], [whole.logits, whole.hidden, whole.count, None])


def test_outputs_of_calls_may_be_any_structure() -> None:
    class Gives(nn.Module):
        def forward(self, x: Tensor) -> dict[Any, Any]:
            return {"y": [x + 1, (x + 2, None)], "n": x.shape[0], "text": "a", 3: x.mean(), "size": x.shape}

    def body(net: Net, x: Tensor) -> Any:
        given = net.gives(net.a(x))
        return net.b(given["y"][1][0]) * given["size"].numel(), given

    assert exact(Net(body, gives=Gives()), torch.randn(2, 4), others=(torch.randn(5, 4),)) == 3


def test_outputs_of_transformers() -> None:
    zoo.import_torchvision()
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertModel(BertConfig(**sizes, intermediate_size=16)).eval()
    given = {"input_ids": torch.randint(0, 50, (2, 7)), "output_hidden_states": True}
    x = torch.randint(0, 50, (3, 5))
    for cut in mt.cuts(model, given)[::5]:
        head, tail = mt.split(model, given, at=cut)
        got, whole = tail(head(input_ids=x, output_hidden_states=True)), model(x, output_hidden_states=True)
        assert type(got) is type(whole)
        assert same(dict(got), dict(whole)), cut.at


def test_an_output_that_is_an_input_is_that_input() -> None:
    assert exact(Net(lambda net, x: (net.b(net.a(x)), x)), torch.randn(2, 4)) == 2


@pytest.mark.slow
def test_other_batch_sizes_lengths_and_sides() -> None:
    model, _ = zoo.build("tiny-resnet")
    others = (torch.randn(1, 3, 16, 24), torch.randn(7, 3, 40, 32))
    assert exact(model, torch.randn(2, 3, 32, 32), others=others)
    decoder, _ = zoo.build("tiny-decoder")
    tokens = [mt.Inputs(input_ids=torch.randint(0, 64, shape)) for shape in ((2, 9), (1, 1), (5, 32))]
    assert exact(decoder, tokens[0], others=tuple(tokens[1:]))


def test_an_empty_batch() -> None:
    model = Net(lambda net, x: net.b(net.a(x).relu()) + x)
    assert exact(model, torch.randn(2, 4), others=(torch.randn(0, 4),)) == 2


def test_numbers_that_are_not_numbers_stay_so() -> None:
    model = Net(lambda net, x: net.b(net.a(x)) + x)
    x = torch.tensor([[float("nan"), float("inf"), -0.0, 1.0]])
    assert exact(model, torch.randn(1, 4), others=(x,)) == 2


# -- what models do ----------------------------------------------------------------------------------------------------


def test_a_module_that_runs_several_times() -> None:
    model = Net(lambda net, x: net.a(net.b(net.a(net.a(x)))) + x)
    assert [cut.at for cut in mt.cuts(model, "2x4")] == ["a#0", "a#1", "b", "a#2"]
    assert exact(model, torch.randn(2, 4), others=(torch.randn(3, 4),)) == 4
    with pytest.raises(NoMatch, match=r"'a' ran 3 times: say which of 'a#0', 'a#1', 'a#2'"):
        mt.split(model, "2x4", at="a")


def test_a_module_that_is_shared_by_two_others() -> None:
    # As in CoaT: leaving out the first block leaves out the first call of what the second has too.
    shared = nn.Linear(4, 4)

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), shared, nn.ReLU())

    model = nn.Sequential(block(), block(), block())
    assert exact(model, torch.randn(2, 4), others=(torch.randn(5, 4),)) == 12


class AddsInPlace(nn.Module):
    def forward(self, x: Tensor) -> None:
        x += 1


class Sorts(nn.Module):
    """Writes into its argument and returns it in another shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).view(-1)


IN_PLACE: dict[str, Callable[..., Any]] = {
    "relu after a layer": lambda net, x: net.b(net.relu(net.a(x))),
    "after the cut, of what crossed": lambda net, x: net.b(y := net.a(x)) + y.mul_(2),
    "before the cut, of an input": lambda net, x: net.b(net.a(x.add_(1))) + x,
    "of an input, after the cut": lambda net, x: net.b(net.a(x)) + x.add_(1),
    "by a module, of its argument": lambda net, x: (net.adds(y := net.a(x)), net.b(y) + y)[1],
    "between two readers": lambda net, x: net.b(y := net.a(x)) + net.c(y.mul_(3)) + y,
    "of a view": lambda net, x: (y := net.a(x), y[:, 0].zero_(), net.b(y) + y)[2],
    "through a view that was made before the cut": lambda net, x: (
        y := net.a(x),
        v := y.view(-1),
        z := net.b(y),
        v.add_(1),
        net.c(z + y),
    )[4],
    "by index": lambda net, x: (y := net.a(x), y.__setitem__((0, 0), 7.0), net.b(y) + y)[2],
    "and returned in another shape": lambda net, x: net.b(net.sorts(net.a(x)).view(-1, 4)),
    "out of a buffer": lambda net, x: (z := torch.zeros(len(x), 4), z.copy_(net.a(x)), net.b(z) + z)[2],
}


@pytest.mark.parametrize("body", IN_PLACE.values(), ids=IN_PLACE)
def test_changes_in_place(body: Callable[..., Any]) -> None:
    modules = {"relu": nn.ReLU(inplace=True), "adds": AddsInPlace(), "sorts": Sorts()}
    model = Net(body, **modules).eval()
    with torch.no_grad():
        cuts = mt.cuts(model, "2x4")
        assert len(cuts) >= 1
        assert exact(model, torch.randn(2, 4), others=(torch.randn(5, 4),)) == len(cuts)


VIEWS: dict[str, Callable[..., Any]] = {
    "chunks of one layer": lambda net, x: torch.stack([net.b(part) for part in net.a(x).chunk(2)]),
    "transposed": lambda net, x: net.b(net.a(x).t().contiguous().t()),
    "not contiguous across the cut": lambda net, x: net.b(net.turn(net.a(x)).t()),
    "expanded": lambda net, x: net.b(net.a(x)).sum(0, keepdim=True).expand(len(x), 4) + net.c(x),
    "windows": lambda net, x: net.b(net.a(x).unfold(0, 2, 1).mean(-1)),
    "input and output of a layer": lambda net, x: net.b((y := net.a(x))[:, :4]) + y.view_as(y),
}


class Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t()


@pytest.mark.parametrize("body", VIEWS.values(), ids=VIEWS)
def test_views(body: Callable[..., Any]) -> None:
    model = Net(body, turn=Turn())
    assert exact(model, torch.randn(4, 4), others=(torch.randn(6, 4),)) >= 2


class Table(nn.Module):
    """Returns of its own weights, as embeddings of positions do."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 4))
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight[: len(x)], self.shift


@pytest.mark.parametrize("verify", [True, False])
def test_weights_that_a_call_returns_cross_where_it_is_left_out(verify: bool) -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        weight, shift = net.table(x)
        return net.b(net.a(x)) + weight * shift

    model = Net(body, table=Table())
    # The two rows of the table that are read, 32 bytes, and the shift, 16; beside the input or what was made of it.
    assert [(cut.at, cut.nbytes) for cut in mt.cuts(model, "2x4")] == [("table", 80), ("a", 80), ("b", 80)]
    for at in ("table", "a", "b"):
        head, tail = mt.split(model, "2x4", at=at, verify=verify)
        for x in (torch.randn(2, 4), torch.randn(5, 4)):
            assert same(tail(mt.Boundary.from_bytes(head(x).to_bytes())), model(x))


def test_packed_sequences() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(net.a(x), torch.tensor([3, 2]), batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(net.gru(packed)[0], batch_first=True)
        return net.b(out)

    model = Net(body, gru=nn.GRU(4, 4, batch_first=True))
    assert exact(model, torch.randn(2, 3, 4)) == 3


class Fuses(nn.Module):
    """As in HRNet: works on the very list that it is given, and returns another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, values: list[Tensor]) -> list[Tensor]:
        for at, layer in enumerate(self.layers):
            values[at] = layer(values[at])
        return [values[0] + values[1], values[1]]


class Notes(nn.Module):
    def forward(self, x: Tensor, notes: dict[str, Any]) -> Tensor:
        y = x + 1
        notes.update(x=x, y=y, unread=x * 3, count=notes.get("count", 0) + 1, text="t", none=None)
        return y


class Gathers(nn.Module):
    """As in VoVNet: puts what it computes into a list, and reads it there."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(self.fc(x))
        del seen[0]
        return torch.stack(seen).sum(0)


def test_lists_and_dicts_that_calls_change() -> None:
    def fuse(net: Net, x: Tensor) -> Tensor:
        values = net.two(net.one([net.a(x), x]))
        return net.b(values[0]) + values[1]

    def note(net: Net, x: Tensor) -> tuple[Tensor, Any]:
        notes: dict[str, Any] = {}
        y = net.two(net.one(net.a(x), notes), notes)
        return net.b(y) * notes["count"] + notes["y"], notes["x"] if notes["none"] is None else notes["text"]

    def gather(net: Net, x: Tensor) -> Tensor:
        return net.b(net.one(net.a(x), [x, x + 1])) + x

    for body, kind, count in ((fuse, Fuses, 8), (note, Notes, 4), (gather, Gathers, 4)):
        model = Net(body, one=kind(), two=kind())
        x, other = torch.randn(2, 4), torch.randn(5, 4)
        assert exact(model, x, others=(other,)) == count
        addresses = [cut.at for cut in mt.cuts(model, x)]
        for first, second in pairwise(addresses):
            assert same(mt.split(model, x, at=[first, second])(other), model(other)), (first, second)


def test_a_stage_does_not_change_what_it_is_given() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        z = net.b(y)
        return z + y.mul_(2)

    model = Net(body)
    with torch.no_grad():
        head, tail = mt.split(model, "2x4", at="a")
        x = torch.randn(2, 4)
        boundary = head(x)
        before = {name: tensor.clone() for name, tensor in boundary.tensors.items()}
        first = tail(boundary)
        assert same(tail(boundary), first)  # the boundary can be used twice
        assert same(first, model(x))
        assert same(boundary.tensors, before)
        assert boundary.to_bytes() == boundary.to_bytes()


def test_a_model_that_changes_its_input_changes_it_in_the_head() -> None:
    model = Net(lambda net, x: net.b(net.a(x.mul_(2))))
    with torch.no_grad():
        head, _ = mt.split(model, "2x4", at="a")
        x = torch.ones(2, 4)
        head(x)
    assert torch.equal(x, torch.full((2, 4), 2.0))  # as the model does


def test_a_model_may_take_another_way_after_the_cut_and_not_before_it() -> None:
    model = Net(lambda net, x: net.c(net.b(y) if (y := net.a(x)).sum() > 0 else y))
    with torch.no_grad():
        model.a.weight.copy_(torch.eye(4))
    plus, minus = torch.ones(2, 4), -torch.ones(2, 4)
    head, tail = mt.split(model, plus, at="a")
    assert same(tail(head(minus)), model(minus))
    head, tail = mt.split(model, plus, at="b")
    with pytest.raises(Unsupported, match=r"the run differs from the example|returned before the cut at 'b'"):
        head(minus)
    assert same(tail(head(plus)), model(plus))


def test_a_model_that_reads_values_of_the_head_gets_them() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        scale = 2.0 if float(y.sum()) > 0 else 0.5
        return net.c(net.b(x) * scale)

    assert exact(Net(body), torch.randn(2, 4), others=(torch.randn(3, 4), torch.randn(3, 4))) == 3


# -- modes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-resnet", "tiny-vit", "tiny-lstm", "tiny-decoder"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_autograd(name: str, mode: Callable[[], Any]) -> None:
    model, inputs = zoo.build(name)
    given = mt.Inputs.of(inputs)
    with mode():
        whole = given.run(model)
        for cut in mt.cuts(model, inputs)[::6]:
            stages = mt.split(model, inputs, at=cut)
            assert stages.verified == "bit-equal"
            assert same(stages(*given.args, **given.kwargs), whole)


@pytest.mark.parametrize("body", [IN_PLACE["after the cut, of what crossed"], lambda net, x: net.b(net.a(x)) + x])
def test_a_head_under_inference_mode_and_a_tail_outside_it(body: Callable[..., Any]) -> None:
    model = Net(body)
    x = torch.randn(2, 4)
    head, tail = mt.split(model, "2x4", at="a")
    with torch.inference_mode():
        boundary = head(x)
    with torch.no_grad():
        assert same(tail(boundary), model(x.clone()))
    with torch.inference_mode():
        assert same(tail(boundary), model(x.clone()))


def test_what_crosses_is_cut_from_the_graph() -> None:
    model = Net(lambda net, x: net.b(net.a(x)) + x)
    head, tail = mt.split(model, "2x4", at="a")
    boundary = head(torch.ones(2, 4, requires_grad=True))
    assert not any(tensor.requires_grad for tensor in boundary.tensors.values())
    tail(boundary).sum().backward()  # the tail has a graph of its own
    assert model.b.weight.grad is not None
    assert model.a.weight.grad is None


@pytest.mark.parametrize("name", ["tiny-resnet", "tiny-vit"])
def test_autocast(name: str) -> None:
    model, x = zoo.build(name)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        whole = model(x)
        cuts = mt.cuts(model, x)
        for cut in cuts[::5]:
            head, tail = mt.split(model, x, at=cut)
            boundary = head(x)
            assert same(tail(boundary), whole), cut.at
            assert boundary.nbytes == cut.nbytes
    assert "bfloat16" in {live.dtype for cut in cuts for live in cut.live}


def test_training_mode_where_nothing_is_random() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)).train()
    assert exact(model, torch.randn(2, 4)) == 4
    assert model.training


def test_other_dtypes() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model = Net(lambda net, x: net.b(net.a(x)) + x).to(dtype)
        assert exact(model, torch.randn(2, 4).to(dtype)) == 2


def test_fused_encoder_layers_before_and_after_the_cut() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8)).eval()
    with torch.no_grad():
        assert exact(model, torch.randn(2, 3, 8), others=(torch.randn(4, 5, 8),)) == 3


# -- several stages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.names())
@pytest.mark.parametrize("count", [3, 5])
def test_many_stages(name: str, count: int) -> None:
    model, inputs = zoo.build(name)
    given = mt.Inputs.of(inputs)
    cuts = mt.cuts(model, inputs)
    chosen = list(cuts[:: max(1, len(cuts) // (count - 1))])[: count - 1]
    stages = mt.split(model, inputs, at=chosen)
    assert len(stages) == len(chosen) + 1
    assert stages.at == tuple(cut.at for cut in chosen)
    whole = given.run(model)
    value = stages[0](*given.args, **given.kwargs)
    for stage in stages[1:]:
        assert isinstance(value, mt.Boundary)
        assert value.at == stage.begins_at
        value = stage(mt.Boundary.from_bytes(value.to_bytes()))
    assert same(value, whole)
    assert same(stages(*given.args, **given.kwargs), whole)


def test_what_a_later_stage_needs_goes_through_those_between() -> None:
    model = Net(lambda net, x: net.c(net.b(net.a(x))) + x)
    first, middle, last = mt.split(model, "2x4", at=["a", "b"])
    x = torch.randn(2, 4)
    assert set(first(x).tensors) == {"args[0]", "a"}
    assert set(middle(first(x)).tensors) == {"args[0]", "b"}
    assert same(last(middle(first(x))), model(x))
    assert (first.begins_at, first.ends_at, middle.begins_at, last.ends_at) == (None, "a", "a", None)


def test_a_middle_stage_runs_what_lies_between_alone() -> None:
    model = Net(lambda net, x: net.c(net.b(net.a(x))))
    first, middle, last = mt.split(model, "2x4", at=["b", "a"])  # in any order
    with forwards(model) as events:
        boundary = first(torch.ones(2, 4))
        events.clear()
        boundary = middle(boundary)
        assert events == [("enter", ""), ("enter", "b"), ("exit", "b")]
        events.clear()
        last(boundary)
        assert [path for what, path in events if what == "enter"] == ["", "c"]


# -- what may be asked for ---------------------------------------------------------------------------------------------


def test_places_that_are_no_cuts() -> None:
    model, x = zoo.build("tiny-resnet")
    for at, error, message in [
        ("", BadQuery, r"the exit of the model itself is no cut"),
        ("auto", BadQuery, r"needs to know the devices and the link: pass a plan, at=mt.plan"),
        (["layer1", "layer1"], BadQuery, r"the cut at 'layer1' is named twice"),
        ([], BadQuery, r"expected where to cut"),
        (3, BadQuery, r"expected where to cut"),
        (None, BadQuery, r"expected where to cut"),
        ("layer9", NoMatch, r"layer9"),
    ]:
        with pytest.raises(error, match=message):
            mt.split(model, x, at=at)
    with pytest.raises(BadQuery, match=r"expected load='head', 'tail' or the index of one of 2 stages, got 2"):
        mt.split(model, x, at="layer1", load=2)


def test_stages_refuse_what_is_not_theirs() -> None:
    model, x = zoo.build("tiny-resnet")
    head, tail = mt.split(model, x, at="layer1")
    boundary = head(x)
    for wrong in (x, (boundary, boundary), None):
        with pytest.raises(BadInputs, match=r"stage 1 takes the output of the stage before it: expected one Boundary"):
            tail(*wrong) if isinstance(wrong, tuple) else tail(wrong)
    with pytest.raises(BadInputs, match=r"arguments of the head"):
        head(x, x)
    _, later = mt.split(model, x, at="layer2")
    with pytest.raises(BadBoundary, match=r"expected a boundary of the cut at 'layer2', got one of 'layer1'"):
        later(boundary)


def test_boundaries_of_other_weights_and_other_models_are_refused() -> None:
    model, x = zoo.build("tiny-resnet")
    head, _ = mt.split(model, x, at="layer1")
    boundary = head(x)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_parameter("fc.bias")[0] += 1e-3  # in the tail: what crosses is the same
    buffer = copy.deepcopy(model)
    buffer.get_buffer("layer2.0.bn1.running_mean")[0] += 1e-3
    wider = zoo.resolve("zoo:tiny-resnet", args={"classes": 11}).model
    for other in (changed, buffer, wider):
        _, tail = mt.split(other, x, at="layer1")
        with pytest.raises(BadBoundary, match=r"the boundary is of another model: expected fingerprint"):
            tail(boundary)
    _, tail = mt.split(copy.deepcopy(model), x, at="layer1")
    assert same(tail(boundary), model(x))


def test_a_boundary_that_lacks_something_is_refused() -> None:
    model = Net(lambda net, x: net.b(net.a(x)) + x)
    head, tail = mt.split(model, "2x4", at="a")
    boundary = head(torch.ones(2, 4))
    some = {name: tensor for name, tensor in boundary.tensors.items() if name == "a"}
    with pytest.raises(BadBoundary, match=r"the boundary lacks tensor 'args\[0\]': send it again"):
        tail(mt.Boundary(boundary.at, boundary.fingerprint, some, boundary.facts))
    for facts, message in (
        ({}, "expected boundary facts of schema 1, got None: send the boundary of a stage, and install the same ver"),
        ({**boundary.facts, "schema": 2}, "expected boundary facts of schema 1, got 2"),
        ({"schema": 1, "inputs": boundary.facts["inputs"]}, "expected the field 'calls' of BoundaryRecord"),
        ({**boundary.facts, "calls": [{}]}, "expected the field 'signature' of SkippedCallRecord"),
        ({**boundary.facts, "calls": []}, "expected 1 calls before the cut at 'a', got 0: split both sides on the"),
    ):
        with pytest.raises(BadBoundary, match=message):
            tail(mt.Boundary(boundary.at, boundary.fingerprint, boundary.tensors, facts))


# -- verified ----------------------------------------------------------------------------------------------------------


def test_it_says_what_was_verified() -> None:
    model, x = zoo.build("tiny-resnet")
    assert mt.split(model, x, at="layer1").verified == "bit-equal"
    assert mt.split(model, x, at="layer1", verify=False).verified == "not verified: it was not asked for"
    assert "bit-equal" in repr(mt.split(model, x, at="layer1"))
    empty = copy.deepcopy(model).to("meta")
    assert mt.split(empty, x, at="layer1").verified == "not verified: some of the weights are not here"


def test_a_model_that_differs_from_run_to_run_is_not_called_equal() -> None:
    runs = itertools.count(1)
    model = Net(lambda net, x: net.b(net.a(x)) * next(runs))  # which is no state of the model
    assert "two runs of the whole model differ as much" in mt.split(model, "2x4", at="a").verified


def test_what_a_codec_does_to_the_output_is_tried() -> None:
    model, x = zoo.build("tiny-resnet")
    stages = mt.split(model, x, at="layer1")
    for codec in ("raw", "zstd", "lz4"):
        trial = stages.try_codec(codec)
        assert (trial.codec, trial.largest, trial.relative) == (codec, 0.0, 0.0)
    whole = model(x).detach()
    for codec in ("fp16", "bf16", "int8", "int8_tensor", "int8+zstd"):
        trial = stages.try_codec(codec)
        got = stages[1](mt.Boundary.from_bytes(stages[0](x).to_bytes(codec))).detach()
        assert trial.largest == float((got - whole).abs().max()) > 0
        assert trial.relative == pytest.approx(trial.largest / float(whole.abs().max()))
        assert trial.nbytes < 0.6 * trial.raw_nbytes


# -- half the weights --------------------------------------------------------------------------------------------------


def test_each_side_needs_the_weights_that_it_reads() -> None:
    model, x = zoo.build("tiny-resnet")
    head, tail = mt.split(model, x, at="layer1")
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    needed = set(head.parameters_needed()), set(tail.parameters_needed())
    assert needed[0] & needed[1] == set()
    assert {name for name in names if name.startswith(("stem", "layer1")) and "num_batches" not in name} == needed[0]
    assert {name for name in names if name.startswith(("layer2", "fc")) and "num_batches" not in name} == needed[1]


@pytest.mark.parametrize("name", zoo.names())
def test_a_loaded_half_runs_without_the_other_half(name: str) -> None:
    model, inputs = zoo.build(name)
    given = mt.Inputs.of(inputs)
    whole = given.run(model)
    for cut in mt.cuts(model, inputs)[::7]:
        head, _ = mt.split(model, inputs, at=cut, load="head")
        _, tail = mt.split(model, inputs, at=cut, load="tail")
        assert same(tail(head(*given.args, **given.kwargs)), whole), cut.at
        for stage in (head, tail):
            held = dict([*stage.model.named_parameters(), *stage.model.named_buffers()])
            assert {key for key, tensor in held.items() if not tensor.is_meta} == set(stage.parameters_needed())
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_a_stage_whose_weights_are_not_loaded_says_so() -> None:
    model, x = zoo.build("tiny-resnet")
    head, tail = mt.split(model, x, at="layer1", load="head")
    with pytest.raises(
        Unsupported, match=r"stage 1 cannot run here: \d+ of its weights are not loaded, such as 'layer2"
    ):
        tail(head(x))


def test_weights_that_are_tied_across_the_cut_are_on_both_sides() -> None:
    model = Net(lambda net, x: net.b(net.a(x)))
    model.b.weight = model.a.weight
    x = torch.randn(2, 4)
    head, _ = mt.split(model, x, at="a", load="head")
    _, tail = mt.split(model, x, at="a", load="tail")
    assert same(tail(head(x)), model(x))


# -- run until ---------------------------------------------------------------------------------------------------------


def test_run_until_stops_there_and_keeps_what_was_asked_for() -> None:
    model, x = zoo.build("tiny-resnet")
    seen: dict[str, Tensor] = {}
    for path in ("stem.0", "stem.1", "stem.2"):
        model.get_submodule(path).register_forward_hook(lambda m, a, out, path=path: seen.update({path: out.clone()}))
    model(x)
    expected = dict(seen)
    with forwards(model) as events:
        boundary, saved = mt.run_until(model, x, "layer1.0", save="stem.*")
    assert "layer2" not in {path for _, path in events}
    assert same(saved, expected)
    assert boundary.at == "layer1.0"
    _, tail = mt.split(model, x, at="layer1.0")
    assert same(tail(boundary), model(x))


def test_run_until_tells_of_what_it_cannot_save() -> None:
    model, x = zoo.build("tiny-resnet")
    with pytest.raises(NoMatch, match=r"'fc' does not run before the exit of 'layer1': leave it out of `save`"):
        mt.run_until(model, x, "layer1", save="fc")
    with pytest.raises(BadQuery, match=r"expected the address of one call, got"):
        mt.run_until(model, x, ["layer1"])  # type: ignore[arg-type]


def test_run_until_saves_every_run_of_a_module() -> None:
    model = Net(lambda net, x: net.c(net.a(net.a(x))))
    x = torch.randn(2, 4)
    _, saved = mt.run_until(model, x, "a#1", save="a")
    assert same(saved, {"a#0": model.a(x), "a#1": model.a(model.a(x))})


# -- law 1: as found ---------------------------------------------------------------------------------------------------


def found(model: nn.Module) -> dict[str, Any]:
    """All of a model and of the process that a run could leave changed."""
    hooks = [name for name in nn.Module().__dict__ if "hook" in name]
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "names": [name for name, _ in model.named_modules()],
        "attributes": [(name, list(module.__dict__), module.training) for name, module in model.named_modules()],
        "hooks": [
            (n, h, list(m.__dict__[h].items())) for n, m in model.named_modules() for h in hooks if m.__dict__[h]
        ],
        "devices": [str(tensor.device) for tensor in (*model.parameters(), *model.buffers())],
        "grads": [parameter.grad is None for parameter in model.parameters()],
        "rng": torch.get_rng_state(),
        "module": {name: id(value) for name, value in vars(nn.Module).items() if name != "__abstractmethods__"},
        "functional": {name: id(value) for name, value in vars(F).items()},
        "torch": {name: id(value) for name, value in vars(torch).items() if callable(value)},
        "tensor": {name: id(value) for name, value in vars(Tensor).items()},
        "global hooks": [
            len(value)
            for key, value in vars(torch.nn.modules.module).items()
            if "global" in key and isinstance(value, dict)
        ],
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "stacks": (len(torch.overrides._get_current_function_mode_stack()), threading.active_count()),
    }


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    for key, value in before.items():
        if key in ("state", "rng"):
            assert same(value, after[key]), key
        else:
            assert value == after[key], key


@pytest.mark.parametrize("name", zoo.names())
def test_everything_is_as_it_was(name: str) -> None:
    model, inputs = zoo.build(name)
    first = next(module for path, module in model.named_modules() if path)
    calls: list[int] = []
    first.register_forward_hook(lambda *_: calls.append(1))
    model.requires_grad_(False)
    given = mt.Inputs.of(inputs)
    given.run(model)
    mt.split(model, inputs, at=mt.cuts(model, inputs)[0])  # whatever is imported on first use
    before = found(model)
    cuts = mt.cuts(model, inputs)
    stages = mt.split(model, inputs, at=[cuts[0], cuts[len(cuts) // 2]])
    stages(*given.args, **given.kwargs)
    stages.try_codec("fp16")
    mt.split(model, inputs, at=cuts[1], load="tail")
    mt.run_until(model, inputs, cuts[1].at)
    unchanged(before, found(model))


class Keeps(nn.Module):
    """Keeps what it computes, for whoever looks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.a(x)
        self.seen = [self.last, x]
        return self.b(self.last)


def test_what_a_model_keeps_is_what_the_head_kept() -> None:
    model = nn.Sequential(Keeps(), nn.ReLU())
    kept: Any = model[0]
    x = torch.randn(2, 4)
    for at in ("0.a", "0.b"):
        head, tail = mt.split(model, x, at=at)
        model(x)
        boundary = head(x)
        last, seen = kept.last, kept.seen
        assert same(last, kept.a(x))
        assert same(tail(boundary), model(x))
        kept.last, kept.seen = last, seen
        tail(boundary)
        assert same(kept.last, last)
        assert same(kept.seen, seen)
    del kept.seen
    tail(boundary)  # which cannot know
    assert not hasattr(kept, "seen")


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 1e6).any()):
            raise RuntimeError("it broke")
        return self.fc(x)


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_everything_is_as_it_was_after_an_exception(where: int, mode: Callable[[], Any]) -> None:
    model = Net(lambda net, x: net.b(net.two(net.one(net.a(x)) * 2)), one=Breaks(), two=Breaks()).requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.eye(4) if parameter.dim() == 2 else torch.zeros(4))
    good = torch.ones(2, 4)
    # 1e7 breaks the first of the two; 0.7e6 is twice as much where it comes to the second.
    bad = torch.full((2, 4), 1e7 if where == 0 else 0.7e6)
    head, tail = mt.split(model, good, at="one")
    before = found(model)
    with mode(), pytest.raises(RuntimeError, match=r"it broke"):
        tail(head(bad))
    unchanged(before, found(model))
    assert same(tail(head(good)), model(good))
    with pytest.raises(RuntimeError, match=r"it broke"):
        model(bad)


def test_everything_is_as_it_was_when_splitting_fails() -> None:
    model = Net(lambda net, x: net.b(net.one(net.a(x))), one=Breaks())
    with torch.no_grad():
        model.a.weight.copy_(torch.eye(4))
    before = found(model)
    for call in (mt.cuts, lambda m, x: mt.split(m, x, at="a"), lambda m, x: mt.run_until(m, x, "b")):
        with pytest.raises(RuntimeError):
            call(model, torch.full((2, 4), 1e30))
    unchanged(before, found(model))


def test_an_interrupt_leaves_everything_as_it_was() -> None:
    class Stops(nn.Module):
        armed = False

        def forward(self, x: Tensor) -> Tensor:
            if Stops.armed:
                raise KeyboardInterrupt
            return x

    model = Net(lambda net, x: net.b(net.stops(net.a(x))), stops=Stops())
    head, tail = mt.split(model, "2x4", at="a")
    before = found(model)
    boundary = head(torch.ones(2, 4))
    Stops.armed = True
    with pytest.raises(KeyboardInterrupt):
        tail(boundary)
    unchanged(before, found(model))


# -- threads -----------------------------------------------------------------------------------------------------------


def together(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own, all at once; raise what they raise."""
    errors: list[BaseException] = []
    ready = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            ready.wait()
            work()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("name", ["tiny-resnet", "tiny-vit"])
def test_two_threads_run_different_stages_of_one_model(name: str) -> None:
    model, x = zoo.build(name)
    assert isinstance(x, Tensor)
    cuts = mt.cuts(model, x)
    head, tail = mt.split(model, x, at=cuts[len(cuts) // 2])
    inputs = [torch.randn_like(x) for _ in range(12)]
    with torch.no_grad():
        boundaries = [head(each) for each in inputs]
        wholes = [model(each) for each in inputs]

    def heads() -> None:
        with torch.no_grad():
            for each, boundary in zip(inputs, boundaries, strict=True):
                assert same(head(each).tensors, boundary.tensors)

    def tails() -> None:
        with torch.no_grad():
            for boundary, whole in zip(boundaries, wholes, strict=True):
                assert same(tail(boundary), whole)

    before = found(model)
    together(heads, tails, heads, tails)
    unchanged(before, found(model))


def test_the_model_itself_runs_beside_a_stage() -> None:
    model, x = zoo.build("tiny-resnet")
    head, tail = mt.split(model, x, at="layer1.0")
    with torch.no_grad():
        boundary, whole = head(x), model(x)

    def plain() -> None:
        with torch.no_grad():
            for _ in range(20):
                assert same(model(x), whole)

    def stages() -> None:
        with torch.no_grad():
            for _ in range(10):
                assert same(tail(boundary), whole)
                head(x)

    together(plain, stages)


def test_a_stage_is_chosen_by_its_number() -> None:
    model, x = zoo.build("tiny-resnet")
    with pytest.raises(BadQuery, match="expected the number of a stage from 0 to 1, got 'head'"):
        mt.split(model, x, at="layer1")["head"]  # type: ignore[call-overload]
