"""Where a model can be cut, what crosses there, and where it cannot be cut and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import microtome as mt
from microtome import zoo
from microtome.addresses import number_calls
from microtome.errors import BadQuery, NoMatch, NotAModule, Unsupported
from microtome.results.cuts import Cut


class Net(nn.Module):
    """Runs a function on itself: a model in one line. Its layers `a`, `b`, `c` are 4 to 4, without a bias."""

    a: Any
    b: Any
    c: Any
    steps: Any

    def __getattr__(self, name: str) -> Any:  # whatever module or number it was given
        return super().__getattr__(name)

    def __init__(self, body: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.body = body
        for name in "abc":
            self.add_module(name, modules.pop(name, None) or nn.Linear(4, 4, bias=False))
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def names(cut: Cut) -> list[str]:
    return [live.name for live in cut.live]


def crossing(body: Callable[..., Any], *inputs: Tensor, **modules: nn.Module) -> dict[str, list[str]]:
    """What crosses at each cut, by address."""
    cuts = mt.cuts(Net(body, **modules).eval(), inputs or torch.ones(2, 4))
    assert not cuts.refused
    return {cut.at: names(cut) for cut in cuts}


def refusals(model: nn.Module, inputs: Any) -> dict[str, str]:
    return {cut.at: str(cut.refused) for cut in mt.cuts(model, inputs).refused}


# -- which there are ---------------------------------------------------------------------------------------------------


def in_the_order_of_ending(model: nn.Module, inputs: Any) -> list[str]:
    """Addresses by plain hooks: the n-th call of a module, as calls end."""
    begun: Counter[str] = Counter()
    open_calls: list[str] = []
    ended: list[str] = []
    handles = []
    for path, module in model.named_modules():
        if path:

            def enter(*_: Any, path: str = path) -> None:
                open_calls.append(f"{path}#{begun[path]}" if begun[path] else path)
                begun[path] += 1

            def leave(*_: Any) -> None:
                ended.append(open_calls.pop())

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    mt.Inputs.of(inputs).run(model)
    for handle in handles:
        handle.remove()
    return ended


@pytest.mark.parametrize("name", zoo.names())
def test_cuts_are_in_the_order_in_which_calls_end(name: str) -> None:
    model, inputs = zoo.build(name)
    cuts = mt.cuts(model, inputs)
    assert [cut.at for cut in cuts] == number_calls(in_the_order_of_ending(model, inputs))
    assert [cut.index for cut in cuts] == list(range(len(cuts)))
    assert not cuts.refused


def test_a_chain_by_hand() -> None:
    # Two rows. 4 -> 6: 2*4*6 = 48 MACs, 4*6 + 6 = 30 parameters, 2*6 floats cross = 48 bytes.
    # 6 -> 2: 2*6*2 = 24 MACs, 6*2 + 2 = 14 parameters, 2*2 floats = 16 bytes.
    cuts = mt.cuts(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), "2x4")
    rows = [(c.at, c.nbytes, c.head_macs, c.tail_macs, c.head_params, c.tail_params, c.dominates) for c in cuts]
    assert rows == [
        ("0", 48, 48, 24, 30, 14, True),
        ("1", 48, 48, 24, 30, 14, False),
        ("2", 16, 72, 0, 44, 0, True),
    ]
    assert [(c.head_param_bytes, c.tail_param_bytes) for c in cuts] == [(120, 56), (120, 56), (176, 0)]
    assert cuts[0].live[0]._asdict() == {
        "name": "0",
        "source": "0",
        "shape": (2, 6),
        "dtype": "float32",
        "nbytes": 48,
    }
    assert (cuts.input_bytes, cuts.output_bytes) == (32, 16)
    assert [(c.type, c.depth) for c in cuts] == [("Linear", 1), ("ReLU", 1), ("Linear", 1)]


# -- what crosses ------------------------------------------------------------------------------------------------------


def test_a_skipped_input_crosses_beside_what_was_computed() -> None:
    found = crossing(lambda net, x: net.b(net.a(x)) + x)
    assert found == {"a": ["args[0]", "a"], "b": ["args[0]", "b"]}


class Picks(nn.Module):
    """Has an argument with the name of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(100, 2)
        self.out = nn.Linear(2, 2)

    def forward(self, image: Tensor) -> Tensor:
        return self.out(self.image(image)) + image[:, :2]


def test_a_keyword_argument_does_not_have_the_name_of_an_output() -> None:
    model, x = Picks(), torch.ones(1, 100)
    cuts = mt.cuts(model, {"image": x})
    assert [(live.name, live.shape) for live in cuts["image"].live] == [
        ("kwargs['image']", (1, 100)),
        ("image", (1, 2)),
    ]
    head, tail = mt.split(model, {"image": x}, at="image")
    assert torch.equal(tail(mt.Boundary.from_bytes(head(image=x).to_bytes())), model(x))
    timed = mt.profile(model, {"image": x}, measure="time", repeat=3)
    plan = mt.plan(cuts, edge=timed, cloud=timed, link="1Mbps")  # which compares the shapes of outputs by name
    assert plan["image"].sent_bytes == (400 + 8,)


def test_a_value_crosses_until_it_was_read_last() -> None:
    found = crossing(lambda net, x: net.c(net.b(y := net.a(x)) + y))
    assert found == {"a": ["a"], "b": ["a", "b"], "c": ["c"]}


def test_branches_cross_as_they_are_made() -> None:
    found = crossing(lambda net, x: torch.cat([net.a(x), net.b(x), net.c(x)]))
    assert found == {"a": ["args[0]", "a"], "b": ["args[0]", "a", "b"], "c": ["a", "b", "c"]}


def test_what_nobody_reads_does_not_cross() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        net.a(x)
        return net.b(x)

    assert crossing(body) == {"a": ["args[0]"], "b": ["b"]}


def test_what_is_made_without_modules_is_made_again_from_what_crosses() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        scaled = x * 2  # which the tail does too
        return net.b(net.a(scaled)) + scaled

    assert crossing(body) == {"a": ["args[0]", "a"], "b": ["args[0]", "b"]}


def test_a_value_of_which_the_shape_alone_is_read_does_not_cross() -> None:
    found = crossing(lambda net, x: net.b(net.a(x)) + torch.zeros_like(x) + x.shape[0])
    assert found == {"a": ["a"], "b": ["b"]}


def test_a_value_that_is_passed_through_crosses_once() -> None:
    found = crossing(lambda net, x: net.b(net.same(y := net.a(x))) + y, same=nn.Identity())
    assert found == {"a": ["a"], "same": ["a"], "b": ["a", "b"]}


def test_of_several_outputs_those_cross_that_are_read() -> None:
    lstm = nn.LSTM(4, 4, batch_first=True)
    last = crossing(lambda net, x: net.b(net.lstm(x)[1][0]), torch.ones(2, 3, 4), lstm=lstm)
    assert last == {"lstm": ["lstm[1]"], "b": ["b"]}
    every = crossing(lambda net, x: net.lstm(x), torch.ones(2, 3, 4), lstm=lstm)
    assert every == {"lstm": ["lstm[0]", "lstm[1]", "lstm[2]"]}


def test_outputs_that_were_made_early_cross_all_the_way() -> None:
    found = crossing(lambda net, x: {"early": (y := net.a(x)), "late": net.b(y)})
    assert found == {"a": ["a"], "b": ["a", "b"]}


def test_an_input_that_is_needed_late_crosses_and_one_that_is_not_does_not() -> None:
    found = crossing(lambda net, x, mask: net.b(net.a(x)) * mask, torch.ones(2, 4), torch.ones(2, 4))
    assert found == {"a": ["args[1]", "a"], "b": ["args[1]", "b"]}


def test_keyword_inputs_are_named_as_they_are() -> None:
    model = Net(lambda net, *, x, mask: net.b(net.a(x)) * mask)
    cuts = mt.cuts(model, {"x": torch.ones(2, 4), "mask": torch.ones(2, 4)})
    assert names(cuts["a"]) == ["mask", "a"]


def test_runs_of_one_module_are_told_apart() -> None:
    found = crossing(lambda net, x: net.a(net.a(y := net.a(x))) + y)
    assert found == {"a#0": ["a#0"], "a#1": ["a#0", "a#1"], "a#2": ["a#0", "a#2"]}


def test_what_is_changed_in_place_crosses_as_it_is_at_the_cut() -> None:
    found = crossing(lambda net, x: net.b(net.relu(net.a(x))), relu=nn.ReLU(inplace=True))
    assert {at: len(live) for at, live in found.items()} == {"a": 1, "relu": 1, "b": 1}


def test_parts_of_one_memory_cross_together_where_that_is_less() -> None:
    class Three(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return torch.cat([x, x + 1, x + 2], 1).chunk(3, 1)

    def body(net: Net, x: Tensor) -> Tensor:
        one, two, three = net.three(x)
        return net.a(one) + net.b(two) + net.c(three)

    cuts = mt.cuts(Net(body, three=Three()), "2x4")
    # Three parts of 2x4 floats, 96 bytes, as one memory; then what is left of them.
    assert [cut.nbytes for cut in cuts] == [96, 96, 96, 96]
    assert len(cuts["three"].live) == 1


def test_bytes_are_those_of_the_dtype() -> None:
    model = Net(lambda net, x: net.b(net.a(x)) + x).to(torch.bfloat16)
    cuts = mt.cuts(model, torch.ones(3, 4, dtype=torch.bfloat16))
    assert cuts["a"].nbytes == 2 * 3 * 4 * 2
    assert {live.dtype for live in cuts["a"].live} == {"bfloat16"}


@pytest.mark.parametrize("name", zoo.names())
def test_bytes_are_those_that_the_head_gives(name: str) -> None:
    model, inputs = zoo.build(name)
    given = mt.Inputs.of(inputs)
    for cut in mt.cuts(model, inputs)[::4]:
        boundary = mt.split(model, inputs, at=cut, verify=False)[0](*given.args, **given.kwargs)
        assert boundary.nbytes == cut.nbytes
        assert sorted(boundary.tensors) == sorted(names(cut))


# -- work and weights on either side -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.names())
def test_both_sides_make_the_whole(name: str) -> None:
    model, inputs = zoo.build(name)
    total = mt.profile(model, inputs).total
    before = 0
    for cut in mt.cuts(model, inputs):
        assert cut.head_macs is not None
        assert cut.tail_macs is not None
        assert cut.head_macs + cut.tail_macs == total.macs
        assert cut.head_macs >= before
        before = cut.head_macs
        assert cut.head_params + cut.tail_params >= total.params
        if name not in ("tiny-decoder", "tiny-writer"):  # whose first and last layer have the same weights
            assert cut.head_params + cut.tail_params - total.params in (0, *_read_by_the_model_itself(model))


def _read_by_the_model_itself(model: nn.Module) -> list[int]:
    """Parameters that no layer has: both sides run the code that reads them."""
    return [sum(p.numel() for p in model.parameters(recurse=False))]


def test_weights_that_both_sides_read_count_on_both() -> None:
    tied = Net(lambda net, x: net.b(net.a(x)))
    tied.b.weight = tied.a.weight
    cut = mt.cuts(tied, "2x4")["a"]
    assert (cut.head_params, cut.tail_params) == (16, 16)
    again = mt.cuts(Net(lambda net, x: net.a(net.a(x))), "2x4")["a#0"]
    assert (again.head_params, again.tail_params) == (16, 16)


def test_weights_that_nobody_reads_count_nowhere() -> None:
    cut = mt.cuts(Net(lambda net, x: net.a(x) + 1), "2x4")["a"]  # b and c do not run
    assert (cut.head_params, cut.tail_params) == (16, 0)


@pytest.mark.parametrize("name", zoo.names())
def test_a_cut_dominates_if_none_before_it_has_as_few_bytes(name: str) -> None:
    cuts = mt.cuts(*zoo.build(name))
    for at, cut in enumerate(cuts):
        assert cut.dominates == all(earlier.nbytes > cut.nbytes for earlier in cuts[:at])
    assert cuts[0].dominates


def test_a_refused_place_does_not_dominate() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.fc(x)

    cuts = mt.cuts(
        Net(lambda net, x: net.b(net.a(x).mean(0) + net.hidden(x) + net.hidden.last), hidden=Hidden()), "2x4"
    )
    assert {cut.at for cut in cuts.refused} == {"hidden"}
    assert not cuts.find("hidden").dominates


# -- asking ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resnet() -> mt.Cuts:
    return mt.cuts(*zoo.build("tiny-resnet"))


def test_a_cut_is_found_by_its_address_and_by_its_position(resnet: mt.Cuts) -> None:
    assert resnet["layer1.0.conv1"].at == "layer1.0.conv1"
    assert resnet[0].at == "stem.0"
    assert resnet[-1].at == "fc"
    assert [cut.at for cut in resnet[:2]] == ["stem.0", "stem.1"]
    assert resnet["layer1.0.relu#1"].index > resnet["layer1.0.relu#0"].index
    assert resnet["layer1.0.relu#0"].at == "layer1.0.relu#0"
    assert len(resnet) == len(list(resnet))


def test_a_place_that_is_not_there_is_an_error_that_names_the_nearest(resnet: mt.Cuts) -> None:
    with pytest.raises(NoMatch, match=r"layer1\.0\.conv3.*layer1\.0\.conv[12]"):
        resnet["layer1.0.conv3"]
    with pytest.raises(
        NoMatch, match=r"'layer1.0.relu' ran 2 times: say which of 'layer1.0.relu#0', 'layer1.0.relu#1'"
    ):
        resnet["layer1.0.relu"]
    with pytest.raises(NoMatch, match=r"layer1\.0\.relu#2"):
        resnet["layer1.0.relu#2"]
    with pytest.raises(IndexError):
        resnet[999]


def shared_norm() -> nn.Module:
    """A batch norm in training mode on both sides of a layer."""
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(norm, nn.Linear(4, 4), norm)


def test_a_refused_place_says_why() -> None:
    cuts = mt.cuts(shared_norm(), "2x4")
    assert len(cuts) == 1  # after all
    with pytest.raises(NoMatch, match=r"the Sequential cannot be cut at '1': .* changes the buffer.*eval mode"):
        cuts["1"]
    assert cuts.find("1").refused is not None


def test_the_best_is_the_least_and_of_equals_the_first(resnet: mt.Cuts) -> None:
    for by, key in [("bytes", "nbytes"), *((name, name) for name in ("head_macs", "tail_macs", "head_params"))]:
        best = resnet.best(by=by)  # type: ignore[arg-type]
        least = min(getattr(cut, key) for cut in resnet)
        assert best is next(cut for cut in resnet if getattr(cut, key) == least)
    with pytest.raises(BadQuery, match=r"expected to compare cuts by bytes, head_macs.*, got 'time'"):
        resnet.best(by="time")  # type: ignore[arg-type]
    with pytest.raises(BadQuery, match=r"the Linear has no cut whose bytes are known"):
        mt.cuts(nn.Linear(4, 4), "2x4").best()


def test_cuts_come_back_from_json(resnet: mt.Cuts, tmp_path: Path) -> None:
    file = tmp_path / "cuts.json"
    resnet.to_json(file)
    assert mt.load(file) == resnet
    some = mt.cuts(shared_norm(), "2x4")
    some.to_json(file)
    assert mt.load(file) == some
    assert mt.load(file).refused[0].refused == some.refused[0].refused


def test_a_table_has_the_cuts(resnet: mt.Cuts) -> None:
    assert "layer2" in resnet.table()
    assert resnet.table() == str(resnet)


def test_only_models_have_cuts() -> None:
    with pytest.raises(NotAModule):
        mt.cuts(torch.ones(1), "1x4")  # type: ignore[arg-type]
    assert list(mt.cuts(nn.Linear(4, 4), "1x4")) == []  # nothing inside


# -- what is refused ---------------------------------------------------------------------------------------------------


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class DropsAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if self.training else 0.0)


def after(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Dropout(), "2x4"),
        (nn.Dropout1d(), "2x3x4"),
        (nn.AlphaDropout(), "2x4"),
        (nn.RReLU(), "2x4"),
        (DropsAttention(), "2x3x4"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_random_numbers_that_a_call_draws_are_those_of_its_side(module: nn.Module, shape: str) -> None:
    model = after(module)
    for is_training in (True, False):
        assert refusals(model.train(is_training), shape) == {}
        assert all(mt.split(model, shape, at=at).verified == "bit-equal" for at in "012")


class States(nn.Module):
    """The outputs of an LSTM without its states."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def test_dropout_inside_an_lstm_is_that_of_its_side() -> None:
    model = after(States(num_layers=2, dropout=0.5)).train()
    assert refusals(model, "2x3x4") == {}
    assert all(mt.split(model, "2x3x4", at=at).verified == "bit-equal" for at in ("0", "1.lstm", "1", "2"))


def test_dropout_inside_multi_head_attention_is_that_of_its_side() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x, need_weights=False)[0]

    model = after(Attends()).train()
    assert refusals(model, "2x3x4") == {}
    assert all(mt.split(model, "2x3x4", at=at).verified == "bit-equal" for at in ("0", "1.attn", "1", "2"))


def test_a_buffer_that_a_run_changes_is_refused_where_both_sides_use_it() -> None:
    class Averages(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            return x - self.mean

    model = Net(lambda net, x: net.a(net.one(net.b(net.one(x)))), one=Averages())
    found = refusals(model, "2x4")
    assert list(found) == ["one#0", "b"]
    assert "in 'one#0' changes the buffer 'one.mean' as it runs, and the other side of the cut reads" in found["b"]
    assert not model.one.mean.any()  # and it is as it was


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_a_count_in_a_module_that_runs_on_both_sides_is_refused() -> None:
    model = Net(lambda net, x: net.count(net.a(net.count(x))), count=Counts())
    found = refusals(model, "2x4")
    assert "'count#0' runs in the head and sets calls of its module, which runs again in the tail" in found["count#0"]
    assert "a" in found
    assert "count#1" not in found  # all of them run in the head


def test_a_count_in_the_model_itself_is_refused_if_it_is_read() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        net.steps = net.steps + 1
        return net.b(net.a(x))

    model = Net(body)
    model.steps = 0
    assert refusals(model, "2x4") == {}
    model = Net(lambda net, x: body(net, x) * net.steps)
    model.steps = 0
    assert "'steps' of the model is state that a run leaves to the next one" in refusals(model, "2x4")["a"]


class Appends(nn.Module):
    """Puts something into a list that it is given."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor, seen: Any) -> Any:
        y = x + 1
        seen.append({"argument": x, "output": y, "other": x * 3, "list": [x]}[self.what])
        return y


def reads_back(net: Net, x: Tensor) -> Tensor:
    seen: list[Any] = []
    y = net.b(net.appends(net.a(x), seen))
    return y + (seen[0] if isinstance(seen[0], Tensor) else seen[0][0])


def test_a_list_that_a_call_changes_is_refused_where_the_tail_cannot_have_what_is_in_it() -> None:
    for what in ("argument", "output"):
        assert refusals(Net(reads_back, appends=Appends(what)), "2x4") == {}
    found = refusals(Net(reads_back, appends=Appends("other")), "2x4")
    assert list(found) == ["appends", "b"]
    assert "the tail reads a value (2x4) that is made inside 'appends', which does not return it" in found["appends"]
    found = refusals(Net(reads_back, appends=Appends("list")), "2x4")
    assert list(found) == ["appends", "b"]
    assert "'appends' runs in the head, and it mutates a list or dict among its arguments" in found["appends"]


def test_a_list_that_outlives_the_run_is_refused_where_a_call_in_the_head_changes_it() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        return net.b(net.appends(net.a(x), net.seen))

    model = Net(body, appends=Appends("argument"))
    model.seen = []  # type: ignore[assignment]
    assert "it mutates a list or dict among its arguments" in refusals(model, "2x4")["appends"]


def test_a_list_that_a_call_changes_and_returns_is_refused() -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor, seen: list[Tensor]) -> list[Tensor]:
            seen.append(x)
            return seen

    def body(net: Net, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        again = net.returns(net.a(x), seen)
        again.append(x)
        return net.b(seen[1])

    assert "it mutates a list or dict" in refusals(Net(body, returns=Returns()), "2x4")["returns"]


class Cache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.keys.append(self.fc(x))
        return x + sum(cache.keys)


def test_a_cache_that_a_call_fills_is_refused_where_the_tail_would_not_have_it() -> None:
    def body(net: Net, x: Tensor) -> tuple[Tensor, Cache]:
        cache = Cache()
        return net.two(net.one(net.a(x), cache), cache), cache

    found = refusals(Net(body, one=Keeps(), two=Keeps()), "2x4")
    assert "the tail reads a value (2x4) that is made inside 'one', which does not return it" in found["one"]
    assert "a" not in found  # both fill it in the tail
    assert "one.fc" not in found


def test_an_object_as_input_is_refused_if_it_holds_what_cannot_be_sent() -> None:
    model = Net(lambda net, x, cache: net.b(net.a(x)) + (0 if cache.keys else 1))
    cache = Cache()
    assert "a" not in refusals(model, (torch.ones(2, 4), cache))
    cache.open = open  # type: ignore[attr-defined]
    assert (
        "the model is given a Cache (.open is a builtin_function_or_method), which cannot be sent"
        in refusals(model, (torch.ones(2, 4), cache))["a"]
    )


def test_an_object_that_a_call_returns_is_refused_if_it_holds_what_cannot_be_sent() -> None:
    class Wraps(nn.Module):
        def forward(self, x: Tensor) -> Any:
            made = Cache()
            made.keys, made.open = [x], open  # type: ignore[attr-defined]
            return made

    found = refusals(Net(lambda net, x: net.b(net.wraps(net.a(x)).keys[0]), wraps=Wraps()), "2x4")
    assert list(found) == ["wraps", "b"]
    assert "it returns a Cache (.open is a builtin_function_or_method), which is no tensor, number" in found["wraps"]


def test_a_value_that_does_not_come_out_of_a_call_is_refused_where_the_tail_reads_it() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.fc(x) * 2
            return self.last.relu()

    found = refusals(Net(lambda net, x: net.b(net.a(net.inner(x)) + net.inner.last), inner=Inner()), "2x4")
    assert list(found) == ["inner", "a"]  # inside it, and once it was read, there is a cut
    assert "the tail reads a value (2x4) that is made inside 'inner', which does not return it" in found["a"]


def test_an_encoder_layer_is_one_piece_in_eval_mode() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = after(layer)
    found = refusals(model.eval(), "2x3x4")
    assert found
    assert all(at.startswith("1.") for at in found)
    assert all(
        "it lies inside '1', a TransformerEncoderLayer, which torch runs as one fused" in w for w in found.values()
    )
    assert [cut.at for cut in mt.cuts(model, "2x3x4")] == ["0", "1", "2"]
    assert refusals(model.train(), "2x3x4") == {}


def test_a_key_value_cache_of_transformers_is_state_unless_the_model_cannot_take_it() -> None:
    zoo.import_torchvision()
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    model, ids = LlamaModel(config).eval(), torch.arange(6)[None]
    assert refusals(model, {"input_ids": ids, "use_cache": True}) == {}
    assert refusals(model, {"input_ids": ids, "use_cache": False}) == {}
    # Without names in its output, nothing says as which argument the model would take it.
    found = refusals(model, {"input_ids": ids, "use_cache": True, "return_dict": False})
    assert {"layers.0", "layers.1"} <= found.keys()
    assert "embed_tokens" not in found


def test_a_script_module_cannot_be_looked_into() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match=r"torch.jit"):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(Unsupported):
        mt.cuts(scripted, "1x4")
