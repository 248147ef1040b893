"""Plans of training in a pipeline: the time of schedules, the best stages, their memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

import microtome as mt
from microtome import zoo
from microtome.errors import BadQuery, Unsupported
from microtome.plan import training_search
from microtome.plan.device_costs import DeviceCosts, cut_points
from microtome.plan.schedules import (
    Action,
    TimedAction,
    Transfer,
    gpipe,
    in_flight,
    one_forward_one_backward,
    run_schedule,
)
from microtome.plan.training import Pipeline
from microtome.results.plan import Candidate, Schedule, TrainingStep
from tests.marks import examples
from tests.plan import synthetic

schedules = st.sampled_from(["gpipe", "1f1b"])
amounts = st.floats(0.01, 10)
NO_LINK = Transfer(0.0, 0.0, 0.0)
ORDERS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def step_s(slots: list[list[TimedAction]]) -> float:
    return max(slot.end_s for stage in slots for slot in stage)


def training(candidate: Candidate) -> TrainingStep:
    assert candidate.training is not None
    return candidate.training


# -- schedules ---------------------------------------------------------------------------------------------------------


@given(schedules, st.integers(1, 5), st.integers(1, 9), amounts, amounts)
@settings(deadline=None, max_examples=examples(60))
def test_equal_stages_without_links_have_the_bubble_of_the_closed_form(
    schedule: str, stages: int, micro_batches: int, forward_s: float, backward_s: float
) -> None:
    transfers = [NO_LINK] * (stages - 1)
    slots = run_schedule(schedule, micro_batches, [forward_s] * stages, [backward_s] * stages, transfers)
    # Every device works for m (f + b); the last begins (p - 1) f later than the first, which ends (p - 1) b later.
    work_s = forward_s + backward_s
    assert step_s(slots) == pytest.approx((micro_batches + stages - 1) * work_s)
    bubble = 1 - micro_batches * work_s / step_s(slots)
    assert bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))


transfers = st.builds(Transfer, st.floats(0, 5), st.floats(0, 5), st.floats(0, 5))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[float], list[Transfer]]:
    count = draw(st.integers(1, 5))
    several = st.lists(amounts, min_size=count, max_size=count)
    return draw(several), draw(several), draw(st.lists(transfers, min_size=count - 1, max_size=count - 1))


@given(pipelines(), st.integers(1, 8))
@settings(deadline=None, max_examples=examples(60))
def test_a_step_of_gpipe_is_that_of_two_flow_shops(
    pipeline: tuple[list[float], list[float], list[Transfer]], micro_batches: int
) -> None:
    forward_s, backward_s, transfers = pipeline
    # Equal jobs pass machines in turn: the first through all of them, the others at the pace of the slowest.
    delay_s = sum(transfer.delay_s for transfer in transfers)
    there = [*forward_s, *(transfer.forward_s for transfer in transfers)]
    back = [*backward_s, *(transfer.backward_s for transfer in transfers)]
    expected = sum((sum(times) + delay_s + (micro_batches - 1) * max(times)) for times in (there, back))
    slots = run_schedule("gpipe", micro_batches, forward_s, backward_s, transfers)
    assert step_s(slots) == pytest.approx(expected)


@given(schedules, pipelines(), st.integers(1, 6))
@settings(deadline=None, max_examples=examples(60))
def test_actions_end_at_the_longest_path_of_what_they_wait_for(
    schedule: str, pipeline: tuple[list[float], list[float], list[Transfer]], micro_batches: int
) -> None:
    forward_s, backward_s, transfers = pipeline
    count = len(forward_s)
    orders = [ORDERS[schedule](stage, count, micro_batches) for stage in range(count)]

    @cache
    def end(stage: int, action: Action) -> float:
        index = orders[stage].index(action)
        before = end(stage, orders[stage][index - 1]) if index else 0.0
        return max(before, arrival(stage, action)) + (backward_s if action.is_backward else forward_s)[stage]

    def arrival(stage: int, action: Action) -> float:
        source = stage + 1 if action.is_backward else stage - 1
        if source == count:
            return end(stage, Action(False, action.micro_batch))
        if source < 0:
            return 0.0
        return sent(source, stage, action) + transfers[min(source, stage)].delay_s

    @cache
    def sent(source: int, target: int, action: Action) -> float:
        """When the link has taken the message; messages of one direction are in the order of micro-batches."""
        transfer = transfers[min(source, target)]
        free = sent(source, target, Action(action.is_backward, action.micro_batch - 1)) if action.micro_batch else 0.0
        return max(free, end(source, action)) + (transfer.backward_s if action.is_backward else transfer.forward_s)

    slots = run_schedule(schedule, micro_batches, forward_s, backward_s, transfers)
    assert [[slot.action for slot in stage] for stage in slots] == orders
    for stage in range(count):
        for slot in slots[stage]:
            assert slot.end_s == pytest.approx(end(stage, slot.action))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (3, 2), (3, 8), (4, 4)])
def test_the_order_of_actions_is_that_of_torch(schedule: str, stages: int, micro_batches: int) -> None:
    cls: Any = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}[schedule]
    theirs = cls.__new__(cls)  # its constructor needs a process group
    theirs._num_stages, theirs._n_microbatches = stages, micro_batches
    for stage, actions in theirs._get_pipeline_order().items():
        kinds = {torch_schedules.FORWARD: False, torch_schedules.FULL_BACKWARD: True}
        # The indices that torch lists there are not those that it runs, from 0 on.
        expected = [kinds[one.computation_type] for one in actions if one is not None and one.computation_type in kinds]
        ours = ORDERS[schedule](stage, stages, micro_batches)
        assert [action.is_backward for action in ours] == expected
        for is_backward in (False, True):
            listed = [action.micro_batch for action in ours if action.is_backward == is_backward]
            assert listed == list(range(micro_batches))


@given(schedules, st.integers(1, 6), st.integers(1, 9))
@settings(deadline=None, max_examples=examples(40))
def test_micro_batches_in_flight_are_those_whose_backward_did_not_run(
    schedule: str, stages: int, micro_batches: int
) -> None:
    for stage in range(stages):
        waiting, most = 0, 0
        for action in ORDERS[schedule](stage, stages, micro_batches):
            waiting += -1 if action.is_backward else 1
            most = max(most, waiting)
        assert in_flight(schedule, stage, stages, micro_batches) == most


# -- plans -------------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """A chain of layers, several devices, links and limits."""
    devices, count = draw(st.integers(2, 4)), draw(st.integers(2, 6))
    several = st.lists(amounts, min_size=count, max_size=count)
    nbytes = st.lists(st.integers(1, 1000), min_size=count, max_size=count)
    profiles = {
        f"d{at}": synthetic.profile(draw(several), backward=draw(several), saved=draw(nbytes)) for at in range(devices)
    }
    links = [mt.Link(draw(st.floats(100, 1e6)), draw(st.floats(0, 2))) for _ in range(devices - 1)]
    return {
        "cuts": synthetic.cuts([4 * size for size in draw(nbytes)]),
        "devices": profiles,
        "links": links,
        "limits": draw(st.dictionaries(st.sampled_from(sorted(profiles)), st.integers(400, 40_000))),
        "micro_batches": draw(st.integers(1, 8)),
        "schedule": draw(schedules),
    }


def everything(problem: dict[str, Any]) -> list[Candidate]:
    """Every way to divide the model over the first devices, one by one."""
    profiles, cuts = problem["devices"], problem["cuts"]
    points = cut_points(cuts, list(profiles.values()))
    pipeline = Pipeline(
        devices=[DeviceCosts(name, profile, points) for name, profile in profiles.items()],
        links=problem["links"],
        points=points,
        schedule=problem["schedule"],
        micro_batches=problem["micro_batches"],
        optimizer_state=2.0,
        limits=problem["limits"],
    )
    found = [pipeline.price_whole(device) for device in range(len(profiles))]
    for stages in range(2, len(profiles) + 1):
        found += [pipeline.price(ends) for ends in combinations(range(1, pipeline.end), stages - 1)]
    return [candidate for candidate in found if candidate.refused is None]


@given(problems())
@settings(deadline=None, max_examples=examples(100))
def test_the_winner_is_the_best_of_all_placements(problem: dict[str, Any]) -> None:
    able = everything(problem)
    if not able:
        with pytest.raises(BadQuery, match="no placement of the model is within the limits"):
            mt.plan(**problem, objective="training")
        return
    plan = mt.plan(**problem, objective="training")
    assert not any("search ended early" in note for note in plan.notes)
    best = min(training(candidate).step_s for candidate in able)
    assert training(plan.winner).step_s == pytest.approx(best, rel=1e-3)
    assert plan.winner.refused is None
    for stages in range(1, len(problem["devices"]) + 1):  # so is each that is listed
        of_all = [training(one).step_s for one in able if len(training(one).stages) == stages]
        listed = [training(one).step_s for one in plan if one.refused is None and len(training(one).stages) == stages]
        assert bool(of_all) == bool(listed)
        assert min(listed, default=0.0) == pytest.approx(min(of_all, default=0.0), rel=1e-3)


@given(problems())
@settings(deadline=None, max_examples=examples(40))
def test_terms_sum_up_to_one_micro_batch_and_no_step_is_shorter_than_its_work(problem: dict[str, Any]) -> None:
    for candidate in everything(problem):
        assert sum(term.seconds for term in candidate.steps) == pytest.approx(candidate.latency_s)
        step = training(candidate)
        assert step.step_s >= max(candidate.latency_s, problem["micro_batches"] * candidate.slowest_s) * (1 - 1e-9)
        assert 0 <= step.bubble < 1
        if problem["micro_batches"] == 1:
            assert step.step_s == pytest.approx(candidate.latency_s)


LAYERS = synthetic.profile([1.0] * 6, backward=[2.0] * 6, saved=[500] * 6)
CUTS = synthetic.cuts([400] * 6)
FAST = mt.Link("1000Gbps")


def planned(devices: int = 3, **options: Any) -> mt.Plan:
    chain = {f"gpu{at}": LAYERS for at in range(devices)}
    defaults: dict[str, Any] = {"objective": "training", "micro_batches": 4}
    return mt.plan(CUTS, devices=chain, links=[FAST] * (devices - 1), **{**defaults, **options})


def test_equal_layers_are_divided_into_equal_stages() -> None:
    plan = planned()
    assert plan.at == ("l1", "l3")
    assert (plan.micro_batches, plan.schedule) == (4, "1f1b")
    # Stages of 2 + 4 s: (4 + 3 - 1) * 6 s, of which 2 / 6 are idle.
    step = training(plan.winner)
    assert step.step_s == pytest.approx(36.0, rel=1e-6)
    assert step.bubble == pytest.approx(1 / 3, rel=1e-6)
    assert training(plan["all on gpu0"]).step_s == pytest.approx(72.0)
    assert training(plan["all on gpu0"]).bubble == pytest.approx(0.0)


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", (4, 4, 4)), ("1f1b", (3, 2, 1))])
def test_memory_is_that_of_weights_gradients_optimizer_and_activations(
    schedule: Schedule, held: tuple[int, ...]
) -> None:
    plan = planned(schedule=schedule, optimizer_state=1.5)
    stages = training(plan.winner).stages
    # Two layers: 200 bytes of weights and of gradients, 300 of the optimizer; 1000 saved, and what crosses both ends.
    crossing = [1000 + 400, 400 + 400, 400 + 40]
    assert [stage.in_flight for stage in stages] == list(held)
    assert [stage.activation_bytes for stage in stages] == [1000 + nbytes for nbytes in crossing]
    expected = [700 + count * (1000 + nbytes) for count, nbytes in zip(held, crossing, strict=True)]
    assert [stage.memory_bytes for stage in stages] == expected
    assert list(plan.winner.memory_bytes) == expected


def test_limits_move_the_cuts() -> None:
    # 1F1B holds three micro-batches of the first stage: one layer needs 400 + 3 * (500 + 1400) bytes, two 1900 more.
    plan = planned(limits={"gpu0": 6100})
    assert plan.winner.at[0] == "l0"
    assert plan.winner.memory_bytes[0] == 6100
    assert "gpu0 would need" in str(plan["all on gpu0"].refused)
    with pytest.raises(BadQuery, match="no placement of the model is within the limits"):
        planned(limits={f"gpu{at}": 100 for at in range(3)})


def test_frozen_parameters_have_neither_gradients_nor_optimizer_state() -> None:
    frozen = synthetic.profile([1.0] * 4, backward=[1.0] * 4, saved=[0] * 4, frozen=[True, True, True, False])
    plan = mt.plan(
        synthetic.cuts([40] * 4), edge=frozen, cloud=frozen, link=FAST, objective="training", micro_batches=2
    )
    head, tail = training(plan["l1"]).stages
    assert (head.param_bytes, head.gradient_bytes, head.optimizer_bytes) == (200, 0, 0)
    assert (tail.param_bytes, tail.gradient_bytes, tail.optimizer_bytes) == (200, 100, 200)


class Tied(torch.nn.Module):
    """A first and a last layer of one weight, of 8 x 8 floats, around norms of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for norm in self.norms:
            x = norm(x)
        y: torch.Tensor = self.last(x)
        return y


def test_a_tied_weight_counts_in_the_stages_that_read_it() -> None:
    model, x = Tied(), torch.randn(3, 8)
    cuts = mt.cuts(model, x)
    profile = mt.profile(model, x, measure="time", backward=True, repeat=3)
    points = cut_points(cuts, [profile])
    table = DeviceCosts("gpu", profile, points, shared_weights=cuts.shared_weights).param_bytes()
    tied, norm = 4 * 64, 4 * 8  # bytes
    assert [point.at for point in points] == [None, "first", "norms.0", "norms.1", "norms.2", "last", None]
    for begin, end in combinations(range(7), 2):
        reads_tied = begin == 0 or begin < 5 <= end
        norms = max(min(end, 4) - max(begin, 1), 0)
        assert table[begin, end] == reads_tied * tied + norms * norm, (begin, end)
    stages = mt.split(model, x, at=["first", "norms.2"], grad=True)
    held = [sum(weight.nbytes for weight in stage.as_module(tied="sum").parameters()) for stage in stages]
    assert held == [table[0, 1], table[1, 4], table[4, 6]] == [tied, 3 * norm, tied]


class Sampled(torch.nn.Module):
    """Draws from probabilities of its own, through which a gradient flows, and writes to one of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(8, 8) for _ in range(3))
        self.split, self.last = Halves(), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.bernoulli(self.first(x).sigmoid())
        left, right = self.split(self.third(x + self.second(x)))
        left.mul_(2)
        y: torch.Tensor = self.last(left * right)
        return y


class Halves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:, :4], x[:, 4:]


def test_cuts_that_gradients_cannot_cross_are_left_out() -> None:
    model, x = torch.nn.Sequential(Sampled(), torch.nn.Linear(4, 4)).train(), torch.randn(3, 8)
    cuts = mt.cuts(model, x)
    profile = mt.profile(model, x, measure="time", backward=True, repeat=3)
    plan = mt.plan(cuts, edge=profile, cloud=profile, link=FAST, objective="training", micro_batches=2)
    offered = [candidate.at[0] for candidate in plan if candidate.at]
    assert offered
    for cut in cuts:
        if cut.at in offered:
            mt.split(model, x, at=cut.at, grad=True)
        else:
            assert cut.grad_refused is not None
            with pytest.raises(Unsupported, match="gradient can"):
                mt.split(model, x, at=cut.at, grad=True)
    assert {cut.at for cut in cuts if cut.grad_refused} == {"0.second", "0.split"}
    (note,) = (note for note in plan.notes if "left out" in note)
    assert note.startswith("2 of 7 cuts are left out: gradients cannot cross them, as at 0.second: bernoulli.")


def test_a_model_with_a_cache_is_not_divided() -> None:
    cuts = replace(CUTS, offered=tuple(replace(cut, head_state_bytes=8) for cut in CUTS))
    plan = mt.plan(cuts, edge=LAYERS, cloud=LAYERS, link=FAST, objective="training", micro_batches=2)
    assert [candidate.name for candidate in plan] == ["all on edge", "all on cloud, raw input"]
    assert any(note.startswith("6 of 6 cuts are left out: gradients cannot cross them") for note in plan.notes)


def test_slow_links_and_slow_devices_are_taken_into_account() -> None:
    slow = mt.plan(CUTS, edge=LAYERS, cloud=LAYERS, link="8bps", objective="training", micro_batches=4)
    assert slow.winner.name == "all on edge"
    balanced = mt.plan(
        CUTS, edge=LAYERS, cloud=LAYERS, link=FAST, objective="training", micro_batches=64, slower={"edge": 2}
    )
    assert balanced.winner.at == ("l1",)  # two layers on the device of half the speed, four on the other
    assert "edge: measured times multiplied by 2" in balanced.notes


def test_a_plan_is_read_back_and_shown(tmp_path: Any) -> None:
    plan = planned(limits={"gpu1": "1MB"})
    assert mt.load(plan.to_json(tmp_path / "plan.json")) == plan
    text = " ".join(str(plan).split())
    assert "training on 4 micro-batches of Inputs(x), 1f1b: l1 to gpu1, l3 to gpu2 (best step; " in text
    assert "bubble: devices with a stage are idle for 33 % of a step of 36 s" in text
    assert (
        "gpu1: 4.30 KiB = 200 B of weights + 200 B of gradients + 400 B of optimizer + 2 x 1.76 KiB of activations"
        in text
    )
    assert "step relative to the winner: all on gpu0 2×" in text  # noqa: RUF001
    assert "gpu0_backward_s" in plan.to_csv()
    assert "backward" in plan.to_perfetto()
    assert "idle" in plan._repr_html_()


def test_a_strategy_chooses_among_the_stages() -> None:
    plan = planned(strategy=lambda candidates: next(one for one in candidates if len(one.at) == 1))
    assert len(plan.winner.at) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": None}, "a plan of training needs micro-batches, such as micro_batches=8, got None"),
        ({"micro_batches": 0}, "a plan of training needs micro-batches, such as micro_batches=8, got 0"),
        ({"schedule": "zero-bubble"}, "expected schedule 'gpipe' or '1f1b', got 'zero-bubble'"),
        ({"optimizer_state": -1}, "expected optimizer_state of 0 or more, such as 2 for Adam, got -1"),
        ({"tokens": (8, 8)}, "expected no tokens in a plan of training"),
        ({"codec": "zstd"}, "expected no codec in a plan of training"),
        ({"objective": "latency"}, "micro_batches= is of training: expected objective='training', got 'latency'"),
        (
            {"objective": "latency", "micro_batches": None, "schedule": "gpipe"},
            "schedule= is of training: expected objective='training', got 'latency'",
        ),
        (
            {"objective": "energy", "micro_batches": None, "optimizer_state": 0},
            "optimizer_state= is of training: expected objective='training', got 'energy'",
        ),
        ({"objective": "speed"}, "expected objective 'latency', 'energy', 'throughput' or 'training', got 'speed'"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        planned(**options)


def test_profiles_need_a_backward_and_plans_of_training_have_no_bandwidths() -> None:
    forward = synthetic.profile([1.0] * 6)
    with pytest.raises(
        BadQuery, match=r"the profile of 'edge' has no backward: .* measure=\[\"time\"\], backward=True"
    ):
        mt.plan(CUTS, edge=forward, cloud=forward, link=FAST, objective="training", micro_batches=2)
    with pytest.raises(BadQuery, match="expected a plan of single passes to compare bandwidths, got one of training"):
        planned(2).over_bandwidths()


def test_a_search_that_ends_early_says_how_much_better_another_placement_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_search, "_MAX_STEPS", 0)
    slow = synthetic.profile([1.0, 5.0, 1.0, 9.0, 2.0, 4.0], backward=[9.0, 1.0, 7.0, 1.0, 8.0, 1.0], saved=[1] * 6)
    plan = mt.plan(CUTS, devices=[slow] * 4, links=[FAST] * 3, objective="training", micro_batches=3)
    assert any("the search ended early; the best step may be up to" in note for note in plan.notes)


def test_a_real_model_is_planned_from_its_profile() -> None:
    model, x = zoo.build("tiny-resnet")
    profile = mt.profile(model, x, measure="time", backward=True, repeat=3)
    plan = mt.plan(
        mt.cuts(model, x),
        edge=profile,
        cloud=profile,
        link=FAST,
        objective="training",
        micro_batches=8,
        schedule="gpipe",
    )
    whole = training(plan["all on edge"])
    total = profile.total
    assert total.time_s is not None
    assert total.backward_s is not None
    assert whole.step_s == pytest.approx(8 * (total.elapsed_s + total.backward_s), rel=1e-6)  # type: ignore[operator]
    assert whole.stages[0].param_bytes == sum(p.nbytes for p in model.parameters())
    head, tail = training(plan["layer1"]).stages
    at = [n for n, _ in model.named_parameters() if n.startswith(("stem", "layer1"))]
    assert head.gradient_bytes == sum(model.get_parameter(name).nbytes for name in at)
    assert head.gradient_bytes + tail.gradient_bytes == whole.stages[0].gradient_bytes
    # Saved tensors are those of autograd, which torch hands to hooks.
    saved: dict[int, int] = {}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    assert isinstance(x, torch.Tensor)
    skipped = {p.data_ptr() for p in (*model.parameters(), *model.buffers(), x)}
    nbytes = sum(size for pointer, size in saved.items() if pointer not in skipped)
    assert whole.stages[0].activation_bytes >= nbytes
    del output
