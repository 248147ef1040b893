"""Random numbers: each is drawn once, by the side that the cut gives it to, and what the tail needs of them is sent."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import microtome as mt
from microtome.errors import BadBoundary, NoMatch, Unsupported
from microtome.split.comparison import differences
from microtome.split.splitter import Splitter
from tests.marks import slow


class Noise(nn.Module):
    """Adds noise that it draws itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Inner(nn.Module):
    """Draws between its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.e, self.noise = nn.Linear(4, 4), nn.Linear(4, 4), Noise()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        x = self.noise(self.d(x * mask))
        return self.e(x + torch.rand_like(x)) * mask


class Net(nn.Module):
    """Runs a function on itself."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.noise, self.inner, self.drop = Noise(), Inner(), nn.Dropout()

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def before(net: Any, x: Tensor) -> Tensor:
    return net.b(net.a(x + torch.rand(x.shape[0], 4, device=x.device)))


def around(net: Any, x: Tensor) -> Tensor:
    noise = torch.randn(x.shape, device=x.device)
    return net.c(net.b(net.a(x) * noise)) + noise


def after(net: Any, x: Tensor) -> Tensor:
    return net.b(net.a(x)) + torch.rand_like(x)


def everywhere(net: Any, x: Tensor) -> Tensor:
    x = net.noise(net.a(x)) + torch.rand_like(x)
    x = net.inner(net.b(x)) + torch.rand(4, device=x.device)
    return torch.normal(net.c(x), 1.0)


def in_place(net: Any, x: Tensor) -> Tensor:
    noise = torch.empty_like(x).exponential_().log_()
    x = net.a(x - noise)
    x[:, :2].uniform_()
    x = net.b(x)
    return net.c(x) * noise + net.noise(x)


def of_an_output(net: Any, x: Tensor) -> Tensor:
    x = net.a(x)
    y = net.b(x.clone().bernoulli_(0.5))
    return net.c(y) + x


def dropout(net: Any, x: Tensor) -> Tensor:
    x = net.drop(net.a(F.dropout(x, 0.5)))
    return net.c(net.b(F.dropout(x, 0.2, training=net.training)) + x)


def unread(net: Any, x: Tensor) -> Tensor:
    torch.rand([])  # as layer drop draws, in eval mode too
    x = net.b(net.a(x))
    torch.rand(2)
    return net.noise(net.c(x))


def returned(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    drawn = torch.rand(2)
    return net.b(net.a(x)), drawn


def masked(net: Any, x: Tensor) -> Tensor:
    """Masks as an MAE does, and looks at the masked ones alone in the end."""
    order = torch.rand(x.shape, device=x.device).argsort(-1)
    hidden, shown = order[:, :2], order[:, 2:]
    x = net.a(x.scatter(1, hidden, 0.0))
    x = net.c(net.inner(net.b(x)).scatter(1, shown, 1.0))
    return x.gather(1, hidden)


def autoencoder(net: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, log_variance = net.a(x), net.b(x)
    z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(log_variance)
    return net.c(z), mean, log_variance


def quantized(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = net.a(x)
    code = F.gumbel_softmax(logits, hard=True)
    return net.c(net.b(code @ net.c.weight)), torch.multinomial(logits.softmax(-1), 2)


def branching(net: Any, x: Tensor) -> Tensor:
    x = net.a(x)
    always = torch.rand(()) < 2
    x = net.b(x) if always else x
    return net.c(x) + always


BODIES = [
    before, around, after, everywhere, in_place, of_an_output, dropout, unread, returned, masked, autoencoder,
    quantized, branching,
]  # fmt: skip


def run(seed: int, model: Callable[[Tensor], Any], x: Tensor) -> tuple[Any, Tensor]:
    """What a model gives from a seed, and the random state that it leaves."""
    torch.manual_seed(seed)
    output = model(x)
    return output, torch.get_rng_state()


def through_bytes(stages: mt.Stages) -> Callable[[Tensor], Any]:
    def both(x: Tensor) -> Any:
        value: Any = stages[0](x)
        for stage in stages[1:]:
            value = stage(mt.Boundary.from_bytes(value.to_bytes()))
        return value

    return both


def check(model: nn.Module, stages: mt.Stages) -> None:
    assert stages.verified == "bit-equal"
    for split in (through_bytes(stages), stages):
        for seed, x in enumerate((torch.ones(3, 4), torch.linspace(-1, 1, 20).view(5, 4))):
            expected, got = run(seed, model, x), run(seed, split, x)
            assert not list(differences(got[0], expected[0]))
            assert got[1].equal(expected[1])  # all is drawn, and once


@pytest.mark.parametrize("is_training", [*slow(False), True])
@pytest.mark.parametrize("body", BODIES)
def test_every_cut_of_a_model_that_draws_is_the_model_from_the_same_seed(body: Any, is_training: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(body).train(is_training), torch.ones(3, 4)
    cuts = mt.cuts(model, x)
    assert len(cuts) >= 2
    assert not cuts.refused
    for cut in cuts:
        state = torch.get_rng_state()
        stages = mt.split(model, x, at=cut)
        assert torch.get_rng_state().equal(state)
        check(model, stages)


def test_every_pair_of_cuts_is_the_model_from_the_same_seed() -> None:
    torch.manual_seed(0)
    model, x = Net(everywhere).train(), torch.ones(3, 4)
    cuts = list(mt.cuts(model, x))
    for at, first in enumerate(cuts):
        for second in cuts[at + 1 :: 2]:
            check(model, mt.split(model, x, at=[first, second]))


def test_what_is_drawn_before_the_cut_and_read_after_it_crosses_and_nothing_else() -> None:
    live = {cut.at: [value.name for value in cut.live] for cut in mt.cuts(Net(around).eval(), "3x4")}
    assert live == {"a": ["(randn#0)", "a"], "b": ["(randn#0)", "b"], "c": ["(randn#0)", "c"]}
    live = {cut.at: [value.name for value in cut.live] for cut in mt.cuts(Net(before).eval(), "3x4")}
    assert live == {"a": ["a"], "b": ["b"]}


def test_a_generator_of_the_models_own_is_drawn_from_in_order_and_left_as_found() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.generator = nn.Linear(4, 4), torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(4, generator=self.generator)
            return self.a(x + noise) + noise * torch.rand(4, generator=self.generator)

    model, x = Own(), torch.ones(2, 4)
    model.generator.manual_seed(5)
    state = model.generator.get_state()
    stages = mt.split(model, x, at="a")
    assert stages.verified == "bit-equal"
    assert model.generator.get_state().equal(state)
    expected = model(x)
    model.generator.set_state(state)
    assert stages(x).equal(expected)


@contextmanager
def background_thread() -> Iterator[None]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield
    done.set()
    thread.join()


def test_random_states_of_python_and_torch_are_as_found_when_the_verification_fails() -> None:
    class Holds(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) * random.random() + torch.rand(4) * random.random()

    marks: list[int] = []

    class Mark(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            marks.append(1)  # which no module holds, and the tail does not do
            return x

    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            marks.clear()
            return self.b(self.noise(x)) * (len(marks) + 1) * random.random() + torch.rand(4)

    fails, holds = Fails(before), Holds(before)
    fails.add_module("noise", Mark())
    state, python = torch.get_rng_state(), random.getstate()
    with background_thread():  # as progress bars and notebooks have one
        with pytest.raises(Unsupported, match="cannot be cut at b: the stages give"):
            mt.split(fails, torch.ones(1, 4), at="b")
        assert mt.split(holds, torch.ones(1, 4), at="a").verified == "bit-equal"
    assert torch.get_rng_state().equal(state)
    assert random.getstate() == python


@pytest.mark.parametrize("draws", [F.scaled_dot_product_attention, F.rrelu], ids=["attention", "rrelu"])
def test_a_draw_between_calls_that_cannot_be_sent_refuses_the_cuts_after_it_alone(draws: Any) -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        x = net.a(x)
        x = draws(x, x, x, dropout_p=0.5) if draws is F.scaled_dot_product_attention else draws(x, training=True)
        return net.c(net.b(x))

    cuts = mt.cuts(Net(body).train(), "3x4")
    assert [cut.at for cut in cuts] == ["a"]
    assert [cut.at for cut in cuts.refused] == ["b", "c"]
    for cut in cuts.refused:
        assert "draws random numbers in the forward of 'the model' itself" in str(cut.refused)
        assert "call model.eval()" in str(cut.refused)
    cuts = mt.cuts(Net(body).eval(), "3x4")
    assert "eval" not in str(cuts.refused[0].refused)
    assert mt.split(Net(body), "3x4", at="a").verified == "bit-equal"


def test_changed_buffers_ask_for_eval_mode_in_training_mode_alone() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.calls = nn.Buffer(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return self.a(x)

    assert "put the model in eval mode" in str(mt.cuts(Counts().train(), "1x4").refused[0].refused)
    reason = str(mt.cuts(Counts().eval(), "1x4").refused[0].refused)
    assert "changes the buffer 'calls'" in reason
    assert "eval mode" not in reason


def test_another_draw_before_the_cut_than_on_the_example_is_an_error() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        noise = torch.rand(4) if x.shape[0] == 3 else torch.randn(4) if x.shape[0] == 4 else 0
        return net.b(net.a(x)) + noise

    head = mt.split(Net(body), torch.ones(3, 4), at="a")[0]
    with pytest.raises(Unsupported, match=r"expected rand.default in 'the model' before the cut at 'a', got randn"):
        head(torch.ones(4, 4))
    with pytest.raises(Unsupported, match="expected 1 draws of random numbers before the cut at 'a', got 0"):
        head(torch.ones(5, 4))


def test_a_boundary_without_what_was_drawn_is_refused() -> None:
    head, tail = mt.split(Net(around), torch.ones(3, 4), at="a")
    boundary = head(torch.ones(3, 4))
    for drawn in ([], [{"outputs": [], "operator": "randn.default"}], boundary.facts["draws"] * 2):
        boundary.facts["draws"] = drawn
        with pytest.raises(BadBoundary, match=r"expected the outputs of randn.default before the cut at 'a', got"):
            tail(boundary)
    for drawn in (None, [3], [{"outputs": []}]):
        boundary.facts["draws"] = drawn
        with pytest.raises(BadBoundary, match=r"invalid boundary facts: .*expected"):
            tail(boundary)


def test_saved_stages_know_which_draws_their_code_reads(tmp_path: Path) -> None:
    class Branching(Net):
        def __init__(self) -> None:
            super().__init__(branching)

    torch.manual_seed(0)
    model, x = Branching().eval(), torch.ones(3, 4)
    stages = mt.split(model, x, at="b")
    stages.save(tmp_path)
    head, tail = (mt.load_stage(Branching, tmp_path, at) for at in (0, 1))
    expected, got = run(3, model, x), run(3, lambda x: tail(head(x)), x)
    assert got[0].equal(expected[0])


def test_splitting_a_model_that_draws_nothing_leaves_the_draws_of_other_threads_alone() -> None:
    go_on, drawn = threading.Event(), threading.Event()

    class Waits(nn.Module):
        """Has the other thread draw while the model runs."""

        def forward(self, x: Tensor) -> Tensor:
            go_on.set()
            assert drawn.wait(60)
            return x

    def draw() -> None:
        assert go_on.wait(60)
        torch.rand(3)
        drawn.set()

    model = nn.Sequential(nn.Linear(4, 4), Waits())
    torch.manual_seed(0)
    torch.rand(3)
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    other = threading.Thread(target=draw)
    keep = threading.Event()
    idle = threading.Thread(target=keep.wait)  # so that there are other threads to the end
    idle.start()
    drawn.set()  # nobody waits in the trace
    splitter = Splitter(model, torch.ones(1, 4))
    go_on.clear()
    drawn.clear()
    other.start()
    try:
        assert splitter.at("0").verified == "bit-equal"
    finally:
        keep.set()
        other.join()
        idle.join()
    assert torch.get_rng_state().equal(expected)


class Encoder(nn.Module):
    """Drops layers in training mode."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if not self.training or self.draw() < 0.5:
                x = layer(x)
        return x


DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "numpy": lambda: np.random.random(),
    "tensor": lambda: torch.rand(()),
    "item": lambda: torch.rand(1).item(),
}


@pytest.mark.parametrize("draw", ["item", *slow("random", "numpy", "tensor")])
def test_cuts_among_layers_dropped_by_chance_are_refused_and_all_that_are_listed_can_be_split(
    draw: str,
) -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Encoder(DRAWS[draw]), nn.Linear(4, 4)), torch.ones(2, 4)
    for _ in range(3):
        cuts = mt.cuts(model, x)
        assert [cut.at for cut in cuts] == ["0", "1.first", "1", "2"]
        for cut in cuts.refused:
            assert cut.refused is not None
            assert re.match("by the random numbers that '1' draws, it makes other calls in other runs", cut.refused)
        for cut in cuts:
            stages = mt.split(model, x, at=cut.at)
            assert stages.verified == "bit-equal"
        random.random(), torch.rand(()), np.random.random()
    assert len(mt.cuts(model.eval(), x)) == 8


class Draws(nn.Module):
    """Reads a value, for which no run on meta tensors will do, and draws a number that decides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = 1.0 if x.sum() > 1e9 else 2.0
        draw = torch.rand(())
        return self.last(x * scale) if draw >= 0 else x


def test_an_attempt_on_meta_tensors_is_no_run_with_other_calls() -> None:
    model, x = Draws(), torch.ones(2, 4)
    cuts = mt.cuts(model, x)
    assert not cuts.refused
    assert all(mt.split(model, x, at=cut).verified == "bit-equal" for cut in cuts)


class OwnGenerator(Encoder):
    """Drops layers by a generator of its own."""

    def __init__(self) -> None:
        super().__init__(lambda: torch.rand(1, generator=self.generator).item())
        self.generator = torch.Generator().manual_seed(0)


def test_cuts_among_layers_dropped_by_a_generator_of_the_model_are_refused() -> None:
    encoder, x = OwnGenerator(), torch.ones(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), encoder, nn.Linear(4, 4))
    before = encoder.generator.get_state()
    cuts = mt.cuts(model, x)
    assert [cut.at for cut in cuts] == ["0", "1.first", "1", "2"]
    assert all("'1' draws, it makes other calls in other runs" in (cut.refused or "") for cut in cuts.refused)
    assert encoder.generator.get_state().equal(before)


def test_calls_that_a_random_answer_of_a_module_chooses_are_refused() -> None:
    class Policy(nn.Module):
        def forward(self) -> bool:
            return random.random() < 0.5

    random.seed(0)
    model = Net(lambda net, x: net.c(net.b(net.a(x)) if net.policy() else net.a(x)))
    model.policy = Policy()
    assert not mt.cuts(model, torch.ones(3, 4)).offered


def test_what_python_code_draws_before_a_cut_in_a_call_around_it_is_refused() -> None:
    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            scale = random.random()
            y: Tensor = self.c(self.b(x * scale)) * scale
            return y

    model, x = Scaled(before), torch.ones(3, 4)
    with background_thread():
        cuts = mt.cuts(model, x)
    assert [cut.at for cut in cuts] == ["a"]  # the draws after it are the tail's own
    with pytest.raises(NoMatch, match="the model draws from Python's random before the cut, and both sides would"):
        mt.split(model, x, at="b")
    assert mt.split(model, x, at="a").verified == "bit-equal"


def test_what_python_code_draws_inside_a_call_that_the_head_runs_whole_is_its_own() -> None:
    class Jitter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * random.random()

    model = Net(lambda net, x: net.c(net.b(net.jitter(net.a(x)))))
    model.jitter = Jitter()
    cuts = mt.cuts(model, torch.ones(3, 4))
    assert [cut.at for cut in cuts] == ["a", "jitter", "b", "c"]
    for cut in cuts:
        assert mt.split(model, torch.ones(3, 4), at=cut).verified == "bit-equal"
