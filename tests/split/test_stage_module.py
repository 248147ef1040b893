"""A stage as a module: plain tensors in and out, and the stage's own weights under the model's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import BadInputs, Unsupported
from microtome.split.pipelining.stage_module import StageModule
from tests.split import language_models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        y: Tensor = self.drop(self.norm(self.linear(x))) * scale
        return x + y


class Net(nn.Module):
    """Has weights of its own, an integer that crosses, a weight that nothing reads, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.unread = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.blocks, self.table, self.head = (
            nn.ModuleList(Block() for _ in range(3)),
            nn.Embedding(5, 4),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor, index: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        x = x + self.start
        for block in self.blocks:
            x = block(x, scale)
        return {"y": self.head(x + self.table(index)), "x": x, "n": len(x)}


def split(**options: Any) -> tuple[Net, mt.Inputs, Any]:
    torch.manual_seed(0)
    model = Net()
    example = mt.Inputs(torch.randn(3, 4), torch.tensor([0, 1, 2]), scale=2.0)
    return model, example, mt.split(model, example, at=["blocks.0", "blocks.1"], grad=True, **options)


def run(modules: list[StageModule], *tensors: Tensor) -> Any:
    for module in modules:
        value = module(*tensors)
        tensors = value if isinstance(value, tuple) else (value,)
    return value


def test_modules_compute_outputs_gradients_and_buffers_of_the_model() -> None:
    model, example, stages = split()
    modules = [stage.as_module() for stage in stages]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)
    expected = model(*example.args, scale=2.0)
    (expected["y"].sum() + expected["x"].sum()).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    buffers = [one.clone() for one in model.buffers()]
    model.load_state_dict(state)
    model.zero_grad()
    torch.manual_seed(1)
    y, x = run(modules, *example.args)
    (y.sum() + x.sum()).backward()
    assert y.equal(expected["y"])
    assert x.equal(expected["x"])
    assert all(one.equal(other) for one, other in zip(model.buffers(), buffers, strict=True))
    for name, weight in model.named_parameters():
        expected_grad = gradients[name]
        assert (weight.grad is None) is (expected_grad is None), name
        assert weight.grad is None or expected_grad is None or weight.grad.equal(expected_grad), name


def test_names_weights_and_buffers_are_those_of_the_model_once() -> None:
    model, _, stages = split()
    first, second, third = (stage.as_module() for stage in stages)
    assert (first.input_names, first.output_names) == (("x", "index"), ("index", "blocks.0"))
    assert (third.input_names, third.output_names) == (("index", "blocks.1"), ("[y]", "[x]"))
    names = [name for module in (first, second, third) for name in module.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    assert {"start", "unread"} <= first.state_dict().keys()
    assert sorted(second.state_dict()) == sorted(name for name in model.state_dict() if name.startswith("blocks.1"))
    for module in (first, second, third):
        for name, weight in module.named_parameters():
            assert weight is model.get_parameter(name)


def test_a_state_dict_of_the_model_fits_the_modules() -> None:
    model, _, stages = split()
    other = Net()
    for module in (stage.as_module() for stage in stages):
        own = {name: tensor for name, tensor in other.state_dict().items() if name in module.state_dict()}
        module.load_state_dict(own)
        module.load_state_dict(other.state_dict())
        with pytest.raises(RuntimeError, match="Unexpected key"):
            module.load_state_dict({**own, "other": torch.ones(1)})
    assert all(tensor.equal(other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_setting_a_weight_of_a_module_sets_it_in_the_code_that_runs() -> None:
    _, example, stages = split()
    first = stages[0].as_module()
    first.start = nn.Parameter(torch.full((4,), 5.0))
    first.eval()
    first.train()
    torch.manual_seed(0)
    crossed = first(*example.args)[1]
    torch.manual_seed(0)
    assert not crossed.equal(stages[0](*example.args, scale=2.0).tensors["blocks.0"])


def test_shapes_are_the_arguments_of_a_pipeline_stage_and_change_nothing() -> None:
    model, _, stages = split()
    state, random = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()
    module = stages[1].as_module()
    shapes = module.shapes(mt.Inputs(torch.ones(5, 4), torch.zeros(5, dtype=torch.long), scale=2.0))
    described = {name: [(tuple(one.shape), one.dtype, one.requires_grad) for one in ts] for name, ts in shapes.items()}
    crossing = [((5,), torch.int64, False), ((5, 4), torch.float32, True)]
    assert described == {"input_args": crossing, "output_args": crossing}
    assert [one.shape[0] for one in module.shapes()["input_args"]] == [3, 3]
    assert torch.get_rng_state().equal(random)
    assert all(model.state_dict()[name].equal(one) for name, one in state.items())


def test_modules_need_only_their_own_weights() -> None:
    model, example, stages = split()
    torch.manual_seed(1)
    expected = stages(*example.args, scale=2.0)["y"]
    modules = [stages.keeping(index)[index].as_module() for index in range(3)]
    torch.manual_seed(1)
    assert run(modules, *example.args)[0].equal(expected)
    assert not any(weight.is_meta for module in modules for weight in module.parameters())
    assert sum(weight.numel() for module in modules for weight in module.parameters()) == sum(
        weight.numel() for weight in model.parameters()
    )


def test_without_gradients_nothing_requires_one() -> None:
    _, example, stages = split()
    modules = [stage.as_module() for stage in stages]
    with torch.no_grad():
        y, x = run(modules, *example.args)
    assert not y.requires_grad
    assert not x.requires_grad


def test_a_compiled_module_runs_as_python() -> None:
    _, example, stages = split()
    first = stages[0].as_module()
    compiled = torch.compile(first, backend="eager")

    def train(module: Any) -> list[Tensor]:
        torch.manual_seed(0)
        first.zero_grad()
        index, crossed = module(*example.args)
        crossed.pow(2).sum().backward()
        return [index, crossed.detach(), *(one.grad for one in first.parameters() if one.grad is not None)]

    pairs = list(zip(train(compiled), train(first), strict=True))
    assert all(one.equal(other) for one, other in pairs)
    assert len(pairs) == 2 + len(list(first.parameters())) - 1  # nothing reads one of them


def test_autocast_applies_to_modules_and_to_their_shapes() -> None:
    model, example, stages = split()
    with torch.autocast("cpu", torch.bfloat16):
        modules = [stage.as_module() for stage in stages]
        torch.manual_seed(1)
        expected = model(*example.args, scale=2.0)["y"]
        torch.manual_seed(1)
        y = run(modules, *example.args)[0]
    assert y.dtype == torch.bfloat16
    assert y.equal(expected)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_stage_that_was_not_split_for_training_has_no_module() -> None:
    stages = mt.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "2x4", at="0")
    with pytest.raises(Unsupported, match=r"stage 0 was not split for training: mt.split\(…, grad=True\)"):
        stages[0].as_module()


def test_tensors_of_unknown_shapes_are_refused() -> None:
    _, _, stages = split()
    with pytest.raises(BadInputs, match=r"takes tensors x, index of float32\[3, 4\], int64\[3\], got float32\[4, 4\]"):
        stages[0].as_module()(torch.randn(4, 4), torch.tensor([0, 1, 2, 3]))


def test_a_weight_of_two_stages_needs_its_gradients_added() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    stages = mt.split(model, "2x4", at="1", grad=True)
    assert stages.gradients is not None
    assert stages.gradients.tied == {"0.weight": [0, 1]}
    with pytest.raises(Unsupported, match=r"'0.weight' is trained in stages 0 and 1, .* pass tied=\"sum\""):
        stages[0].as_module()
    with pytest.raises(BadInputs, match="expected tied=None or 'sum', got 'mean'"):
        stages[0].as_module(tied="mean")  # type: ignore[arg-type]
    assert stages[0].as_module(tied="sum").tied == {"0.weight": (0, 1)}


def tied_net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[4].weight = model[0].weight
    return model


def test_the_first_stage_of_a_tied_weight_trains_the_weight_of_the_model_whatever_was_made_before() -> None:
    model, x = tied_net(), torch.randn(3, 4)

    def modules(*indices: int) -> list[StageModule]:
        stages = mt.split(model, x, at="2", grad=True)
        return [stages[index].as_module(tied="sum") for index in indices]

    (tail,) = modules(1)
    assert tail.get_parameter("0.weight") is not model.get_parameter("0.weight")
    tail.get_parameter("0.weight").data.zero_()
    for head, later in (modules(0, 1), modules(1, 0)[::-1]):
        assert head.get_parameter("0.weight") is model.get_parameter("0.weight")
        assert later.get_parameter("0.weight").equal(model.get_parameter("0.weight"))
    stages = mt.split(model, x, at="2", grad=True)
    one, other = stages[1].as_module(tied="sum"), stages[1].as_module(tied="sum")
    assert one.get_parameter("0.weight") is other.get_parameter("0.weight")


def test_the_only_stage_whose_weights_are_here_trains_the_tied_weight_of_the_model() -> None:
    model, x = tied_net(), torch.randn(3, 4)
    tail = mt.split(model, x, at="2", grad=True, load="tail")[1].as_module(tied="sum")
    assert tail.get_parameter("0.weight") is model.get_parameter("0.weight")


class Counting(nn.Module):
    """Returns a number that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Split(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, number = self.a(x)
        z: Tensor = self.b(y) * number
        return z


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.linear(x), int((x > 0).sum())


def test_what_crosses_may_not_depend_on_values() -> None:
    stages = mt.split(Counting(), torch.ones(2, 4), at="a", grad=True)
    head = stages[0].as_module()
    head(torch.ones(2, 4))
    message = (
        r"what crosses at 'a' differs from the example: expected an output of 'a' with the values \[8\], got \[0\]; it "
        "depends on values of the inputs"
    )
    with pytest.raises(Unsupported, match=message):
        head(-torch.ones(2, 4))


class Masked(nn.Module):
    """Leaves out a mask that masks nothing, as transformers does unless it has 4 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = AddMask(), AddMask()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        used = None if mask.dim() < 4 and bool(mask.all()) else mask.expand(1, 1, *mask.shape[-2:])
        y: Tensor = self.b(self.a(x, used), used)
        return y


class AddMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.linear(x)
        return x if mask is None else x.masked_fill(~mask[0, 0], 0.0)


@pytest.mark.parametrize("is_padded", [True, False])
def test_a_mask_that_is_left_out_at_times_is_an_error_unless_it_has_four_dimensions(is_padded: bool) -> None:
    model, x, full = Masked(), torch.randn(2, 4), torch.ones(2, 4, dtype=torch.bool)
    padded = full.clone()
    padded[0, 0] = False
    example, other = (padded, full) if is_padded else (full, padded)
    head = mt.split(model, (x, example), at="a", grad=True)[0].as_module()
    head(x, example)
    mask, none = "bool[1, 1, 2, 4]", "float32[2, 4], None"
    expected, got = (mask, none) if is_padded else (none, mask)
    with pytest.raises(Unsupported) as info:
        head(x, other)
    remedy = "Pass inputs for which it does not, such as a mask of 4 dimensions"
    for part in ("expected arguments of 'a' (", expected, "got (", got, remedy):
        assert part in str(info.value)
    modules = [stage.as_module() for stage in mt.split(model, (x, example[None, None]), at="a", grad=True)]
    for used in (example, other):
        assert run(modules, x, used[None, None]).equal(model(x, used))


@pytest.mark.integration
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_language_model_trains_on_batches_with_and_without_padding(attention: str) -> None:
    model, at = language_models.build("llama")
    model.train().set_attn_implementation(attention)
    ids = torch.randint(3, language_models.VOCABULARY, (2, 9))
    full = torch.ones(2, 9, dtype=torch.long)
    padded = full.clone()
    padded[0, :2] = 0

    def inputs_with(mask: Tensor) -> mt.Inputs:
        if attention == "sdpa":  # which would leave it out
            mask = torch.ones(9, 9, dtype=torch.bool).tril() & mask[:, None, None].bool()
        return mt.Inputs(input_ids=ids, attention_mask=mask, use_cache=False)

    stages = mt.split(model, inputs_with(full), at=at, grad=True)
    modules = [stage.as_module(tied="sum") for stage in stages]
    for mask in (padded, full):
        inputs = inputs_with(mask)
        output = run(modules, ids, inputs.kwargs["attention_mask"])
        expected = inputs.run(model).logits
        assert output.equal(expected)
        model.zero_grad()
        output.square().sum().backward()
        found = {name: weight.grad for name, weight in model.named_parameters()}
        model.zero_grad()
        expected.square().sum().backward()
        for name, weight in model.named_parameters():
            assert weight.grad is not None
            assert weight.grad.equal(found[name]), name


@pytest.mark.parametrize("was_frozen", [True, False])
def test_a_weight_that_is_frozen_after_the_split_is_named(was_frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[0].weight.requires_grad_(not was_frozen)
    head = mt.split(model, torch.randn(2, 4), at="0", grad=True)[0].as_module()
    head(torch.randn(2, 4))
    head.get_parameter("0.weight").requires_grad_(was_frozen)
    was, now = ("frozen", "trained") if was_frozen else ("trained", "frozen")
    message = f"expected gradients of .*; '0.weight' was {was} when the model was split, and is {now} now: split it"
    with pytest.raises(Unsupported, match=message):
        head(torch.randn(2, 4))


def test_a_model_that_reads_values_needs_its_weights_for_the_shapes() -> None:
    stages = mt.split(Counting(), torch.ones(2, 4), at="a", grad=True)
    with pytest.raises(
        Unsupported, match=r"cannot find out what crosses the cuts of stage 1 for x of shape \(2, 4\): "
    ):
        stages.keeping(1)[1].as_module()


class Branching(nn.Module):
    """Needs the output of a weight of its own after the cut only if an input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.a, self.b = nn.Parameter(torch.ones(4)), nn.Linear(4, 4), nn.Linear(4, 4)
        self.uses_scale = False

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        y: Tensor = self.b(self.a(scaled))
        return y + self.scale if self.uses_scale else y


def test_a_gradient_that_a_weight_does_not_have_on_the_example_is_an_error() -> None:
    stages = mt.split(Branching(), torch.ones(2, 4), at="a", grad=True)
    head, tail = stages[0].as_module(), stages[1].as_module()
    assert "scale" in head.state_dict()
    assert "scale" not in tail.state_dict()
    tail(*head(torch.ones(2, 4))).sum().backward()
    tail._stage.model.__dict__["uses_scale"] = True
    with pytest.raises(Unsupported, match="'scale' gets a gradient in stage 1, and not on the example"):
        tail(*head(torch.ones(2, 4))).sum().backward()
