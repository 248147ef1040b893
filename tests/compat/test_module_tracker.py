"""The drop-in for torch's ModuleTracker: the same where torch's is right, right where it is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import module_tracker as torchs
from torch.utils.flop_counter import FlopCounterMode

from microtome import Inputs, zoo
from microtome.compat.module_tracker import ModuleTracker


class Ask(torch.autograd.Function):
    """Asks a question in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ask: Any) -> Tensor:
        ctx.ask = ask
        ask()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.ask()
        return grad, None


class Asks(nn.Module):
    ask: Any = None

    def forward(self, x: Tensor) -> Any:
        return Ask.apply(x * 2, self.ask)


def test_names_are_torchs_where_torch_is_right() -> None:
    model = nn.Sequential(Asks(), nn.Sequential(Asks(), nn.Linear(2, 2)), Asks())
    answers: list[tuple[Any, Any]] = []
    with torchs.ModuleTracker() as theirs, ModuleTracker() as ours:
        for module in model.modules():
            if isinstance(module, Asks):
                module.ask = lambda: answers.append(((set(theirs.parents), theirs.is_bw), (ours.parents, ours.is_bw)))
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        assert ours.parents == {"Global"}
        assert not ours.is_bw
    assert len(answers) == 6
    assert all(theirs == ours for theirs, ours in answers)
    assert ({"Global", "Sequential", "Sequential.1", "Sequential.1.0"}, True) in [ours for _, ours in answers]


def test_it_can_be_used_again_and_knows_nothing_outside() -> None:
    tracker = ModuleTracker()
    for _ in range(2):
        with tracker:
            nn.ReLU()(torch.ones(1))
    assert tracker.parents == {"Global"}
    assert not tracker.is_bw


def test_two_models_of_one_class_have_one_name_as_in_torch() -> None:
    seen: list[set[str]] = []
    first, second = Asks(), Asks()
    with ModuleTracker() as t:
        for model in (first, second):
            model.ask = lambda: seen.append(t.parents)
            model(torch.ones(1))
    assert seen == [{"Global", "Asks"}] * 2


def flops(model: nn.Module, tracker: Any, **kwargs: Tensor) -> dict[str, int]:
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = tracker
    with counter:
        model(**kwargs).sum().backward()
    return {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)

    def forward(self, *, x: Tensor) -> Tensor:
        return self.fc(input=x)


class KeywordNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeywordBlock() for _ in range(3))

    def forward(self, *, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x)
        return x


def test_flop_counter_mode_gives_the_true_flops_of_a_keyword_argument_model() -> None:
    # Each of three blocks multiplies (2, 4) by (4, 4): 2 * 2*4*4 = 64 FLOPs in the forward, and as many for the
    # gradient of the weight. The gradient of the input costs 64 more, but the first block's input needs none: 128, 192,
    # 192, together 512.
    found = flops(KeywordNet(), ModuleTracker(), x=torch.ones(2, 4))
    assert found == {
        "Global": 512,
        "KeywordNet": 512,
        **{f"KeywordNet.blocks.{i}{leaf}": n for i, n in enumerate([128, 192, 192]) for leaf in ("", ".fc")},
    }


def test_torchs_own_tracker_is_wrong_on_that_model() -> None:
    # If torch mends it, this test says so, and the docs must follow.
    assert flops(KeywordNet(), torchs.ModuleTracker(), x=torch.ones(2, 4)) != flops(
        KeywordNet(), ModuleTracker(), x=torch.ones(2, 4)
    )


@pytest.mark.parametrize("name", zoo.names())
def test_flops_of_the_leaves_make_the_whole(name: str) -> None:
    model, inputs = zoo.build(name)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = ModuleTracker()
    with counter:
        output = Inputs.of(inputs).run(model)
        (output["logits"] if isinstance(output, dict) else output).sum().backward()
    counts = counter.get_flop_counts()
    root = type(model).__name__

    def own(path: str, module: nn.Module) -> int:
        """A leaf's FLOPs, and those of fused attention, which a parent runs itself between its children."""
        ops = counts.get(f"{root}.{path}" if path else root, {})
        leaf = not any(module.children())
        return sum(
            flops for op, flops in ops.items() if leaf or ("scaled_dot_product" in str(op) and hasattr(module, "qkv"))
        )

    total = sum(counts["Global"].values())
    assert total == sum(counts[root].values()) > 0
    assert sum(own(path, module) for path, module in model.named_modules()) == total
