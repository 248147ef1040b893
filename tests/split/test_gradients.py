"""Gradients cross a cut: parameters and inputs get those that they have in the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import microtome as mt
from microtome.errors import BadBoundary, BadQuery, Unsupported
from microtome.split.gradient_comparison import GradientComparison, GradientMismatch, compare_gradients


class Residual(nn.Module):
    """Has code between calls that both sides run, batch norm, dropout and an operator in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.drop = nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.3)
        self.a, self.norm, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.scale, self.head = nn.Parameter(torch.ones(4, 1, 1)), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.stem(x)).relu_() * self.scale
        x = (x + self.b(self.drop(self.norm(self.a(x)).relu()))).relu_()
        y: Tensor = self.head(x.mean((2, 3)))
        return y


def residual() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Residual(), torch.randn(4, 3, 8, 8, requires_grad=True)


def chain() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3))
    return nn.Sequential(*layers), torch.randn(5, 6)


def gradients_of(model: nn.Module, x: Tensor, compute: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The gradients of the mean square of what is computed, from one random state."""
    torch.manual_seed(7)
    model.zero_grad()
    x.grad = None
    compute(x).pow(2).mean().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return found if x.grad is None else {**found, "x": x.grad.clone()}


def is_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        (found[name] - expected[name]).abs().max() <= 1e-6 * expected[name].abs().max() for name in expected
    )


@pytest.mark.parametrize("at", [cut.at for cut in mt.cuts(*residual())])
def test_every_cut_of_a_model_in_training_mode_gives_its_gradients_buffers_and_random_numbers(at: str) -> None:
    model, x = residual()
    whole = copy.deepcopy(model)
    expected, state = gradients_of(whole, x, whole), torch.get_rng_state()
    stages = mt.split(model, x, at=at, grad=True)
    assert is_near(gradients_of(model, x, stages), expected)
    assert torch.get_rng_state().equal(state)
    assert all(one.equal(other) for one, other in zip(model.buffers(), whole.buffers(), strict=True))


def test_at_the_boundary_of_a_block_gradients_are_bit_equal_over_steps_of_an_optimizer() -> None:
    model, x = chain()
    whole = copy.deepcopy(model)
    stages = mt.split(model, x, at=["0", "1"], grad=True)
    assert stages.gradients is not None
    assert (str(stages.gradients), stages.gradients.tied) == ("bit-equal", {})
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, whole)]
    runs: tuple[Callable[[Tensor], Tensor], ...] = stages, whole
    for step in range(5):
        losses = []
        for optimizer, run in zip(optimizers, runs, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = run(x[: 3 + step % 2]).pow(2).mean()  # of other batch sizes than the example
            loss.backward()
            optimizer.step()
            losses.append(loss)
        assert losses[0].equal(losses[1])
    for name, tensor in whole.state_dict().items():
        assert model.state_dict()[name].equal(tensor), name


@pytest.mark.parametrize("at", [["0"], ["0", "1"], ["0.1", "1.2", "2.0"]])
def test_gradients_go_back_through_bytes_from_stage_to_stage(at: list[str]) -> None:
    model, x = chain()
    expected = gradients_of(model, x, model)
    stages = mt.split(model, x, at=at, grad=True)
    torch.manual_seed(7)
    model.zero_grad()
    sent, received, value = [], [], stages[0](x)
    for stage in stages[1:]:
        sent.append(value)
        received.append(mt.Boundary.from_bytes(value.to_bytes()))
        value = stage(received[-1])
    value.pow(2).mean().backward()
    for before, after in zip(reversed(sent), reversed(received), strict=True):
        before.backward(mt.Boundary.from_bytes(after.gradients().to_bytes()))
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def test_without_grad_tensors_that_cross_are_detached() -> None:
    model, x = chain()
    head, tail = mt.split(model, x, at="0")
    boundary = head(x)
    assert not any(tensor.requires_grad for tensor in boundary.tensors.values())
    tail(boundary).sum().backward()
    assert next(model.parameters()).grad is None


def test_under_no_grad_nothing_that_crosses_requires_a_gradient() -> None:
    model, x = chain()
    head, tail = mt.split(model, x, at="0", grad=True)
    with torch.no_grad():
        boundary = mt.Boundary.from_bytes(head(x).to_bytes())
        assert not tail(boundary).requires_grad
    assert not boundary.tensors["0"].requires_grad


def test_frozen_weights_get_no_gradient_and_send_none_back() -> None:
    model, x = chain()
    model.get_submodule("0").requires_grad_(False)
    head, tail = mt.split(model, x, at="0", grad=True)
    sent = head(x)
    received = mt.Boundary.from_bytes(sent.to_bytes())
    tail(received).sum().backward()
    gradients = received.gradients()
    assert not gradients.tensors
    sent.backward(gradients)
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == [
        name for name, weight in model.named_parameters() if name.startswith("0.")
    ]


def test_splitting_leaves_gradients_hooks_buffers_and_random_numbers_as_they_were() -> None:
    model, x = chain()
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
        weight.register_post_accumulate_grad_hook(lambda _: pytest.fail("a gradient was accumulated"))
    before, random = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()
    mt.split(model, x, at="1", grad=True)
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in before.items())
    assert torch.get_rng_state().equal(random)
    assert all(weight.grad is not None and weight.grad.equal(torch.ones_like(weight)) for weight in model.parameters())


# -- aliases -----------------------------------------------------------------------------------------------------------


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


class Reverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Reverse.apply(x)
        return y


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class TwoPaths(nn.Module):
    """A value crosses twice, in the same memory, and with other gradients."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), second, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        other = self.second(x)
        y: Tensor = self.last(x * 2 + other.sin())
        return y


@pytest.mark.parametrize("second", [Reverse, Detach, nn.Identity])
def test_views_of_one_memory_keep_their_own_gradients(second: Callable[[], nn.Module]) -> None:
    model, x = TwoPaths(second()), torch.randn(3, 4, requires_grad=True)
    expected = gradients_of(model, x, model)
    stages = mt.split(model, x, at="second", grad=True)
    assert is_near(gradients_of(model, x, stages), expected)


class Parts(nn.Module):
    """Splits a value into views, as attention does with queries, keys and values."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.qkv, self.split, self.last, self.writes = nn.Linear(4, 12), Chunk(), nn.Linear(4, 4), writes

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(x))
        if self.writes:
            q.mul_(2)
        y: Tensor = self.last(q * k + v)
        return y


class Chunk(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x[..., start : start + 4] for start in (0, 4, 8))


def test_views_that_cross_are_sent_one_by_one() -> None:
    model, x = Parts(writes=False), torch.randn(3, 4)
    expected = gradients_of(model, x, model)
    head, tail = stages = mt.split(model, x, at="split", grad=True)
    assert [tuple(tensor.shape) for tensor in head(x).tensors.values()] == [(3, 4)] * 3
    assert is_near(gradients_of(model, x, stages), expected)
    assert tail(head(x)).equal(model(x))


def test_views_that_are_written_to_after_the_cut_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"'qkv' shares memory .* modified in place after it: no gradient can"):
        mt.split(Parts(writes=True), torch.randn(3, 4), at="split", grad=True)


# -- what is refused ---------------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Draws in its own code, which both sides of a cut inside it run."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(4, 4), nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        x = self.draw(self.a(x))
        return x + self.b(x)


def drop_sample(x: Tensor) -> Tensor:
    return x * x.new_empty(len(x), 1).bernoulli_(0.5)


def add_noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x) * torch.rand([])


def relax(x: Tensor) -> Tensor:
    return torch.bernoulli(x.sigmoid()) + x


@pytest.mark.parametrize("draw", [nn.functional.dropout, drop_sample, add_noise])
def test_random_numbers_without_a_gradient_cross_the_cut(draw: Callable[[Tensor], Tensor]) -> None:
    model, x = Drawing(draw), torch.randn(3, 4)
    stages = mt.split(model, x, at="b", grad=True)
    torch.manual_seed(0)
    expected = gradients_of(model, x, model)
    torch.manual_seed(0)
    assert is_near(gradients_of(model, x, stages), expected)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_random_numbers_through_which_a_gradient_flows_are_refused(mode: Callable[[], Any]) -> None:
    message = "draws random numbers in code that both sides of the cut at 'b' run, and their gradient cannot cross"
    with mode(), pytest.raises(Unsupported, match=message):
        mt.split(Drawing(relax), torch.randn(3, 4), at="b", grad=True, verify=False)
    outer = nn.Sequential(Drawing(relax), nn.Linear(4, 4))
    stages = mt.split(outer, torch.randn(3, 4), at="0", grad=True)
    assert str(stages.gradients) == "bit-equal"


def test_a_model_that_draws_whether_to_drop_layers_is_split_between_them() -> None:
    class LayerDrop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if not self.training or torch.rand([]) >= 0.0:
                    x = layer(x).tanh()
            return x

    model, x = LayerDrop(), torch.randn(3, 4)
    stages = mt.split(model, x, at=["layers.0", "layers.1"], grad=True)
    assert str(stages.gradients) == "bit-equal"
    modules = [stage.as_module() for stage in stages]
    value: Any = (x,)
    for module in modules:
        value = module(*value) if isinstance(value, tuple) else module(value)
    assert value.equal(model(x))


class _Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Counted.calls += 1
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * _Counted.calls


class Counted(nn.Module):
    """Its backward depends on the number of forwards so far."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(_Counted.apply(self.a(x)))
        return y


def test_gradients_that_differ_are_refused() -> None:
    message = (
        r"the Counted cannot be trained across the cut at a: expected the gradient of a.\w+, of numbers up to .*, got "
        "one that differs by"
    )
    with pytest.raises(Unsupported, match=message):
        mt.split(Counted(), torch.randn(3, 4), at="a", grad=True)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def test_activation_checkpoints_inside_a_stage_give_the_same_gradients() -> None:
    model, x = Checkpointed(use_reentrant=False), torch.randn(3, 4, requires_grad=True)
    expected = gradients_of(model, x, model)
    stages = mt.split(model, x, at=["blocks.0", "blocks.1"], grad=True)
    found = gradients_of(model, x, stages)
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("at", ["blocks.1.0", "blocks.1.1"])
def test_cuts_inside_activation_checkpoints_are_refused(at: str) -> None:
    model, x = Checkpointed(use_reentrant=False), torch.randn(3, 4, requires_grad=True)
    reason = (
        f"across the cut at {at}: it is inside an activation checkpoint, .* Cut at the end of the checkpointed block"
    )
    with pytest.raises(Unsupported, match=reason):
        mt.split(model, x, at=at, grad=True)


def test_reentrant_checkpoints_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"backward of the whole model raised .* need use_reentrant=False"):
        mt.split(Checkpointed(use_reentrant=True), torch.randn(3, 4, requires_grad=True), at="blocks.1", grad=True)


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    with pytest.raises(Unsupported, match="expected an output that requires a gradient, got none"):
        mt.split(model, torch.randn(3, 4), at="0", grad=True)


def test_gradients_of_another_boundary_are_refused() -> None:
    model, x = chain()
    head, middle, tail = mt.split(model, x, at=["0", "1"], grad=True)
    sent = head(x)
    received = mt.Boundary.from_bytes(sent.to_bytes())
    second = middle(received)
    tail(mt.Boundary.from_bytes(second.to_bytes())).sum().backward()
    with pytest.raises(BadBoundary, match="expected the gradients of a boundary, from Boundary.gradients"):
        sent.backward(received)
    other = mt.Boundary.from_bytes(second.to_bytes()).gradients()
    with pytest.raises(BadBoundary, match="expected gradients of the boundary at '0' of .* got those at '1' of"):
        sent.backward(other)
    gradients = received.gradients()
    with pytest.raises(BadBoundary, match="got a gradient of 'y', which requires none in this boundary"):
        sent.backward(gradients.with_tensors({"y": torch.ones(1)}))
    with pytest.raises(BadBoundary, match=r"a gradient of '0' with torch.float32 and shape \(5, 6\), got .* \(1,\)"):
        sent.backward(gradients.with_tensors({"0": torch.ones(1)}))
    with pytest.raises(BadQuery, match="'0' of the boundary at '0' belongs to the graph of the stage before"):
        sent.gradients()
    with pytest.raises(BadBoundary, match="expected boundary facts of schema 1, got None"):
        middle(gradients)


# -- precision ---------------------------------------------------------------------------------------------------------


def test_accumulated_scaled_and_cast_gradients_train_as_in_the_whole_model() -> None:
    model, x = chain()
    state = copy.deepcopy(model.state_dict())

    def train(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The weights and the scale after a step, one whose gradients overflow, and another one."""
        torch.manual_seed(7)
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, torch.inf, 1.0):
            optimizer.zero_grad()
            for part in x.split(3):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = run(part).float().pow(2).mean() * factor
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512
        return [weight.detach().clone() for weight in model.parameters()]

    expected = train(model)
    with torch.autocast("cpu", torch.bfloat16):
        stages = mt.split(model, x, at="1", grad=True)
    assert all(found.equal(one) for found, one in zip(train(stages), expected, strict=True))


def test_rounding_errors_are_told_from_lost_gradients() -> None:
    expected = {"a": torch.tensor([1.0, 3.0]), "bias": torch.tensor([1e-8])}
    near = {"a": torch.tensor([1.0, 3.0 + 2e-6]), "bias": torch.tensor([3e-8])}
    result = compare_gradients(near, expected, ())
    assert isinstance(result, GradientComparison)
    assert str(result) == "equal within 6e-07"  # 2e-6 of 3, rounded to float32
    for lost in ({**expected, "bias": torch.zeros(1)}, {**expected, "a": torch.tensor([1.0, 3.1])}):
        assert isinstance(compare_gradients(lost, expected, ()), GradientMismatch)
    missing, extra = {"a": expected["a"]}, {**expected, "b": torch.ones(1)}
    assert str(compare_gradients(missing, expected, ())) == "expected a gradient of bias, got none"
    message = "expected no gradient of b, as in the whole model, got one"
    assert str(compare_gradients(extra, expected, ())) == message
    wrong = compare_gradients({**expected, "a": torch.tensor([1.0, 3.5])}, expected, ())
    assert str(wrong) == "expected the gradient of a, of numbers up to 3, got one that differs by 0.5"


class HalfLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


class Uses(nn.Module):
    """The sum of the gradients of the uses of `x` has another order if the head has one of them."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.first = kind(16, 16)
        self.uses = nn.ModuleList(kind(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh().bfloat16()
        return torch.stack([use(x) for use in self.uses]).sum(0)


@pytest.mark.parametrize("is_autocast", [True, False], ids=["autocast", "casts of the model"])
def test_gradients_inside_a_block_are_equal_within_the_precision_that_it_computes_with(is_autocast: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(HalfLinear(16, 16), Uses(nn.Linear if is_autocast else HalfLinear)), torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        stages = mt.split(model, x, at="1.uses.1", grad=True)
    assert stages.gradients is not None
    assert 1e-5 < stages.gradients.relative < 8 * torch.finfo(torch.bfloat16).eps
