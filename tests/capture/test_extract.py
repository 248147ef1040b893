"""`mt.extract`: the outputs of modules and operators in one run."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadQuery, BadSelector, NoMatch, Unsupported


def by_hooks(model: nn.Module, inputs: Any, path: str) -> list[Any]:
    """What plain hooks see, copied at once."""
    seen: list[Any] = []
    handle = model.get_submodule(path).register_forward_hook(lambda _, __, output: seen.append(output.clone()))
    try:
        with torch.no_grad():
            mt.Inputs.of(inputs).run(model)
    finally:
        handle.remove()
    return seen


@pytest.fixture(name="resnet")
def make_resnet() -> tuple[nn.Module, Any]:
    model, inputs = zoo.build("tiny-resnet")
    return model.eval(), inputs


def test_every_module_gives_what_hooks_see(resnet: tuple[nn.Module, Any]) -> None:
    model, x = resnet
    feats = mt.extract(model, x, "**")
    for path in feats:
        expected = by_hooks(model, x, path)
        assert len(feats.calls(path)) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(feats.calls(path), expected, strict=True))
        assert torch.equal(feats[path], expected[-1])


def test_the_selector_may_be_passed_by_keyword(resnet: tuple[nn.Module, Any]) -> None:
    assert list(mt.extract(*resnet, at="layer1")) == ["layer1"]


def test_torchvision_models_that_work_in_place_give_what_hooks_see() -> None:
    model: Any = zoo.import_torchvision().models.resnet18().eval()
    x = torch.rand(1, 3, 64, 64)
    feats = mt.extract(model, x, ["layer1.0.bn1", "layer1.0.bn2", "conv1", "layer2.*"], stop=False)
    for path in feats:
        assert torch.equal(feats[path], by_hooks(model, x, path)[-1]), path
    with torch.no_grad():
        assert torch.equal(feats.output, model(x))


def test_the_run_ends_after_the_last_call_that_is_needed_whatever_the_order_of_the_list() -> None:
    ran: list[str] = []

    class Tells(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            if not x.is_meta:
                ran.append(self.name)
            return x + 1

    model = nn.Sequential(*(Tells(str(at)) for at in range(6)))
    feats = mt.extract(model, "2x2", ["3", "1"])
    assert ran == ["0", "1", "2", "3"]
    assert feats.stopped
    assert list(feats) == ["1", "3"]
    with pytest.raises(BadQuery, match="the run was stopped before the model returned: extract with stop=False"):
        _ = feats.output


def test_a_module_that_runs_again_later_is_waited_for() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return self.c(self.a(self.b(self.a(x))))

    feats = mt.extract(Again(), "1x2", "a")
    assert feats.addresses == ("a#0", "a#1")
    assert torch.equal(feats["a"], feats["a#1"])
    assert torch.equal(feats["a#0"], feats.calls("a")[0])
    assert feats.stopped


def test_a_model_that_branches_on_values_runs_to_its_end() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            y = self.b(self.a(x))
            return self.a(y) if x.sum() > 0 else y

    model = Branches()
    assert len(mt.extract(model, -torch.ones(1, 2), "a").calls("a")) == 1
    feats = mt.extract(model, torch.ones(1, 2), "a")
    assert len(feats.calls("a")) == 2
    assert not feats.stopped


def test_another_shape_or_another_attribute_is_learned_anew() -> None:
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.times = nn.Linear(2, 2), 1

        def forward(self, x: Tensor) -> Any:
            for _ in range(self.times * x.shape[0]):
                x = self.layer(x)
            return x

    model = Loops()
    assert len(mt.extract(model, "1x2", "layer").calls("layer")) == 1
    assert len(mt.extract(model, "3x2", "layer").calls("layer")) == 3
    model.times = 2
    assert len(mt.extract(model, "1x2", "layer").calls("layer")) == 2


def test_what_was_learned_does_not_keep_a_model_alive() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    mt.extract(model, "1x2", "0")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@dataclass
class Pair:
    first: Tensor
    second: Tensor | None


class Structured(nn.Module):
    def forward(self, x: Tensor, *, more: Tensor | None = None) -> Any:
        return {"pair": Pair(x * 2, None), "list": [x, (x + 1, None)], "text": "kept"}


def test_any_structure_is_kept() -> None:
    model = nn.Sequential(Structured())
    kept = mt.extract(model, torch.ones(1), "0")["0"]
    assert torch.equal(kept["pair"].first, torch.full((1,), 2.0))
    assert kept["pair"].second is None
    assert torch.equal(kept["list"][1][0], torch.full((1,), 2.0))
    assert kept["text"] == "kept"


def test_the_outputs_of_transformers_are_kept() -> None:
    zoo.import_torchvision()
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=20, n_positions=8)).eval()
    ids = torch.arange(4)[None]
    feats = mt.extract(model, {"input_ids": ids}, ["h.*", "h.1.mlp"], stop=False)
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
    assert torch.equal(feats["h.0"] if isinstance(feats["h.0"], Tensor) else feats["h.0"][0], expected.hidden_states[1])
    assert torch.equal(feats.output.last_hidden_state, expected.last_hidden_state)


def test_arguments_are_captured_keyword_ones_too() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Structured()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x + 1, more=x)

    given = mt.extract(Calls(), torch.zeros(2), "inner", inputs=True).inputs("inner")
    assert torch.equal(given.args[0], torch.ones(2))
    assert torch.equal(given.kwargs["more"], torch.zeros(2))


def test_arguments_that_the_module_mutates_are_captured_as_passed() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(5)

    model = nn.Sequential(nn.Identity(), InPlace())
    feats = mt.extract(model, torch.zeros(2), ["0", "1"], inputs=True)
    assert torch.equal(feats.inputs("1").args[0], torch.zeros(2))
    assert torch.equal(feats["0"], torch.zeros(2))
    assert torch.equal(feats["1"], torch.full((2,), 5.0))


def test_gradients_are_those_that_autograd_gives() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    x = torch.rand(2, 3)
    feats = mt.extract(model, x, ["0", "1"], grad=True)
    assert feats.grad("0") is None
    feats.output.sum().backward()
    hidden = model[0](x)
    relu = hidden.relu()
    expected = torch.autograd.grad(model[2](relu).sum(), [hidden, relu])
    assert torch.allclose(feats.grad("0"), expected[0])
    assert torch.allclose(feats.grad("1"), expected[1])


def test_what_is_not_detached_is_in_the_graph() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    feats = mt.extract(model, torch.rand(2, 3), "0", detach=False)
    feats["0"].sum().backward()
    assert model[0].weight.grad is not None
    assert not mt.extract(model, torch.rand(2, 3), "0")["0"].requires_grad


def test_nothing_is_copied_that_need_not_be() -> None:
    pointers: list[int] = []

    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            pointers.append(y.data_ptr())
            return y

    model = nn.Sequential(Notes(), nn.ReLU())
    assert mt.extract(model, torch.rand(2), "0")["0"].data_ptr() == pointers[-1]
    assert mt.extract(model, torch.rand(2), "0", clone=True)["0"].data_ptr() != pointers[-1]


def test_a_view_of_something_larger_does_not_pin_it() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 0]

    kept = mt.extract(nn.Sequential(First()), torch.rand(4, 1000, 2), "0")["0"]
    assert kept.untyped_storage().nbytes() == kept.nbytes


def test_what_the_model_writes_to_in_its_next_run_is_copied() -> None:
    class Cache(nn.Module):
        cache: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.cache += 1
            return self.cache

    model = nn.Sequential(Cache())
    kept = mt.extract(model, "1", "0")["0"]
    mt.Inputs.of("1").run(model)
    assert torch.equal(kept, torch.ones(3))


def test_a_transform_runs_as_it_is_captured() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    feats = mt.extract(model, torch.rand(2, 3), "0", transform=lambda out: out.mean().item())
    assert isinstance(feats["0"], float)


def test_operators_inside_a_call_are_captured() -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weights = torch.softmax(x @ x.mT, -1)
            return torch.softmax(weights @ x, -1)

    x = torch.rand(1, 3, 2)
    feats = mt.extract(nn.Sequential(Attends()), x, "0/softmax")
    assert feats.addresses == ("0/softmax#0", "0/softmax#1")
    assert torch.allclose(feats["0/softmax#0"], torch.softmax(x @ x.mT, -1))
    assert list(mt.extract(nn.Sequential(Attends()), x, "*/bmm#1")) == ["0/bmm"]
    with pytest.raises(NoMatch, match=r"no operator matches '0/sofmax'; operators that ran: .*softmax#0"):
        mt.extract(nn.Sequential(Attends()), x, "0/sofmax")
    with pytest.raises(BadSelector, match="expected an operator after the slash"):
        mt.extract(nn.Sequential(Attends()), x, "0/")


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.ReLU())
        self.blocks = nn.ModuleList([nn.ReLU()])
        self.unused = nn.ReLU()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(*[self.blocks[0](self.block.forward(x))] * 3)[0]


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("block", r"modules inside it ran, so its \.forward\(\) was called directly"),
        ("blocks", r"a ModuleList is not called itself; select its children, such as 'blocks\.\*'"),
        ("unused", "this input did not lead to it"),
        ("attention.out_proj", "MultiheadAttention uses its weights and does not call it"),
    ],
)
def test_a_module_that_never_ran_is_an_error_with_the_likely_cause(path: str, cause: str) -> None:
    with pytest.raises(NoMatch, match=f"'{path}' never ran: {cause}"):
        mt.extract(Direct(), "1x2x4", path)


def test_modules_of_a_pattern_that_never_ran_are_in_never_ran() -> None:
    feats = mt.extract(Direct(), "1x2x4", nn.ReLU)
    assert list(feats) == ["block.0", "blocks.0"]
    assert feats.never_ran == ("unused",)
    with pytest.raises(NoMatch, match="'unused' was selected and never ran"):
        feats["unused"]


def test_a_model_that_raises_is_as_found() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("broken")

    model = nn.Sequential(nn.Linear(2, 2), Raises())
    with pytest.raises(ValueError, match="broken"):
        mt.extract(model, "1x2", "0", stop=False)
    assert not model[0]._forward_hooks
    assert nn.Module._compiled_call_impl is None


def absent_device() -> str:
    """Return a device that torch can name, and this machine does not have."""
    return f"cuda:{90 + torch.cuda.device_count()}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clone": "maybe"}, "expected clone to be True, False or 'auto', got 'maybe'"),
        ({"grad": True, "transform": print}, "gradients are collected for outputs of modules"),
        ({"transform": "mean"}, "expected transform to be a function of the output, got 'mean'"),
        ({"device": "nowhere"}, "expected a device of this machine, got 'nowhere': RuntimeError"),
        ({"device": absent_device()}, "expected a device of this machine, got 'cuda:9[0-9]': "),
        ({"inputs": torch.ones(2)}, "expected inputs=True or False"),
    ],
)
def test_invalid_options_of_extract_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        mt.extract(nn.Sequential(nn.ReLU()), "1x2", "0", **options)


def test_inputs_and_gradients_that_were_not_captured_raise() -> None:
    feats = mt.extract(nn.Sequential(nn.ReLU()), "1x2", "0")
    with pytest.raises(BadQuery, match="extract with inputs=True"):
        feats.inputs("0")
    with pytest.raises(BadQuery, match="extract with grad=True"):
        feats.grad("0")
    with pytest.raises(NoMatch, match="no module at path '1'"):
        feats["1"]


def test_a_module_that_was_not_captured_is_distinguished_from_none() -> None:
    model, x = zoo.build("tiny-resnet")
    feats = mt.extract(model, x, "layer1", inputs=True, grad=True)
    for get in (feats.__getitem__, feats.calls, feats.inputs, feats.grad):
        with pytest.raises(NoMatch, match="'layer2' was not captured; captured: 'layer1': add it to the selectors"):
            get("layer2")
    with pytest.raises(NoMatch, match="no module at path 'layr1'. Did you mean 'layer1'"):
        feats["layr1"]
    with pytest.raises(NoMatch, match="no module at path 'layer1#1'"):
        feats["layer1#1"]


def test_a_model_with_fast_paths_gives_what_it_gives_alone_and_its_insides_too() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.rand(2, 3, 8)
    with torch.no_grad():
        feats = mt.extract(nn.Sequential(model), x, "0", stop=False)
        assert torch.equal(feats["0"], model(x))
        inside = mt.extract(nn.Sequential(model), x, "0.layers.1.linear1")
    assert inside["0.layers.1.linear1"].shape == (2, 3, 16)


def test_operators_of_every_call_can_be_read() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = Adds()

        def forward(self, x: Tensor) -> Any:
            return self.c(self.c(x))

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).relu()

    feats = mt.extract(Calls(), torch.zeros(1), "c/relu")
    assert feats.addresses == ("c#0/relu#0", "c#1/relu#0")
    assert [float(feats[address]) for address in feats.addresses] == [1, 2]
    assert [float(feats[name]) for name in ("c/relu", "c/relu#0", "c#1/relu", "c#1/relu#0")] == [2, 1, 2, 2]
    assert {name: float(value) for name, value in feats.items()} == {"c/relu": 2}
    with pytest.raises(NoMatch, match="no operator matches 'c/nope'"):
        mt.extract(Calls(), torch.zeros(1), ["c/relu", "c/nope"])


def test_a_transform_of_outputs_leaves_arguments_and_the_run_alone() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            view = y[:]
            self.a(y)
            y.add_(5)
            return view

    with torch.no_grad():
        feats = mt.extract(Writes(), torch.zeros(2), "a", inputs=True, transform=lambda out: out.sum(), stop=False)
    assert torch.equal(feats.output, torch.full((2,), 5.0))
    assert torch.equal(feats.inputs("a").args[0], torch.zeros(2))


def test_asking_whether_something_is_there_does_not_raise() -> None:
    feats = mt.extract(nn.Sequential(nn.ReLU()), "1x2", "0")
    assert "0" in feats
    assert "nope" not in feats
    assert feats.get("nope") is None


def test_a_model_of_transformers_is_stopped_too() -> None:
    zoo.import_torchvision()
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=20, n_positions=8, use_cache=False)).eval()
    assert mt.extract(model, torch.arange(4)[None], "h.0").stopped


def test_what_was_captured_goes_with_the_features() -> None:
    gc.disable()
    try:
        feats = mt.extract(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "1x2", "0")
        gone = weakref.ref(feats["0"])
        del feats
        assert gone() is None
    finally:
        gc.enable()


def test_changed_lists_in_attributes_invalidate_the_cached_order() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.order = nn.Linear(2, 2), nn.Linear(2, 2), ["a", "b"]

        def forward(self, x: Tensor) -> Any:
            for name in self.order:
                x = getattr(self, name)(x)
            return x

    model = Sequence()
    assert mt.extract(model, "1x2", "a").addresses == ("a",)
    model.order = ["a", "b", "a"]
    assert mt.extract(model, "1x2", "a").addresses == ("a#0", "a#1")


def test_a_model_that_goes_by_chance_is_not_stopped() -> None:
    class Chance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return self.a(self.a(x)) if random.random() < 0.5 else self.a(x)

    assert not mt.extract(Chance(), "1x2", "a").stopped


def test_gradients_have_the_structure_of_what_was_captured() -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return Pair(self.layer(x), None)

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Gives()

        def forward(self, x: Tensor) -> Any:
            return self.a(x).first.sum()

    feats = mt.extract(Sums(), torch.rand(1, 2), "a", grad=True)
    feats.output.backward()
    assert isinstance(feats.grad("a"), Pair)
    assert torch.equal(feats.grad("a").first, torch.ones(1, 2))


def test_hooks_for_gradients_go_with_the_features() -> None:
    x = torch.rand(1, 2, requires_grad=True)
    for _ in range(3):
        feats = mt.extract(nn.Sequential(nn.Identity()), x, "0", grad=True)
        feats.output.sum().backward()
        del feats
    assert not x._backward_hooks


def test_what_the_user_or_the_model_has_too_is_copied() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = torch.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.held.copy_(x)

    model, x = nn.Sequential(nn.Identity(), Cache()), torch.ones(2)
    feats = mt.extract(model, x, ["0", "1", ""], stop=False)
    model(x + 100)
    feats.output.zero_()
    x.zero_()
    assert [float(feats[name].sum()) for name in ("0", "1", "")] == [2, 2, 2]


def test_what_we_compute_is_no_operator_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with torch.no_grad():  # else autograd detaches what it saves, which is an operator too
        feats = mt.extract(model, "1x2", ["1", "1/*"], clone=True, transform=lambda out: out.sin())
    assert feats.addresses == ("1/relu#0", "1")


def test_a_model_on_fast_paths_is_stopped_too() -> None:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)]
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        assert mt.extract(model, "1x2x8", "0").stopped


def test_names_of_modules_with_slashes_and_number_signs() -> None:
    model = nn.Sequential()
    for name in ("a/relu", "b#x", "c[0]", "d"):
        model.add_module(name, nn.ReLU())
    x = torch.tensor([-1.0, 2.0])
    feats = mt.extract(model, x, ["a/relu", "b#x", "c[0]", "a/relu/relu", "d/relu"], inputs=True)
    assert sorted(feats) == ["a/relu", "a/relu/relu", "b#x", "c[0]", "d/relu"]
    assert all(torch.equal(feats[name], x.relu()) for name in feats)
    assert torch.equal(feats.inputs("a/relu").args[0], x)
    assert list(mt.extract(model, x, "*")) == ["a/relu", "b#x", "c[0]", "d"]
    with torch.no_grad(), mt.record(model, "*") as rec, mt.edit(model, {"b#x": mt.scale(2.0), "a/relu": mt.zero()}):
        model(x)
    assert list(rec) == ["a/relu", "b#x", "c[0]", "d"]
    assert not rec["b#x"][0].any()


def test_a_name_that_reads_as_a_call_is_refused() -> None:
    model = nn.Sequential()
    model.add_module("a", nn.ReLU())
    model.add_module("a#1", nn.ReLU())
    with pytest.raises(Unsupported, match="the name of the module 'a#1' reads as the call 1 of 'a'"):
        mt.extract(model, "1", "*")
    with pytest.raises(Unsupported, match="'a#1' reads as"):
        mt.record(model, nn.ReLU)
    with pytest.raises(Unsupported, match="'a#1' reads as"):
        mt.edit(model, {"a#1": mt.zero()})
    assert list(mt.extract(model, "1", "a")) == ["a"]


def test_a_shared_module_is_read_by_all_its_names() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.add_module("again", model[0])
    feats = mt.extract(model, "1x2", "again", inputs=True)
    assert list(feats) == ["0"]
    assert torch.equal(feats["again#1"], feats["0#1"])
    assert torch.equal(feats["again"], feats["0"])
    assert len(feats.calls("again")) == 2
    assert feats.inputs("again#0").args[0].shape == (1, 2)


def test_a_key_that_is_not_a_string_raises() -> None:
    feats = mt.extract(nn.Sequential(nn.ReLU()), "1x2", "0")
    key: Any = 5
    with pytest.raises(BadQuery, match="expected a name such as .* got 5"):
        feats[key]
    assert key not in feats


def test_gradients_in_inference_mode_are_refused() -> None:
    with torch.inference_mode(), pytest.raises(BadQuery, match="gradients do not exist in inference mode"):
        mt.extract(nn.Sequential(nn.ReLU()), "1x2", "0", grad=True)


def test_a_call_that_never_ran_of_a_module_that_did_raises() -> None:
    with pytest.raises(NoMatch, match="'0#1' never ran: '0' ran once"):
        mt.extract(nn.Sequential(nn.ReLU()), "1x2", "0#1")
