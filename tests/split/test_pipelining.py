"""Stages in `torch.distributed.pipelining`, in processes of their own, beside the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import microtome as mt
from microtome.errors import BadQuery
from microtome.split.pipelining.stage_module import StageModule
from tests.split.pipelines import (
    CPU,
    INSIDE,
    MICRO_BATCHES,
    Result,
    Task,
    gradients_of,
    loss_of,
    make_task,
    relative_difference,
    run_micro_batches,
    run_processes,
    train,
    without_dropout,
)

pytestmark = pytest.mark.integration

#: How far sums in another order may be apart in one step, relative to the largest number of a gradient.
TOLERANCE = 1e-6
TIED = ("gpt2", "gemma3", "t5")


def chain(blocks: int, dropout: float) -> Task:
    """Blocks with batch norm and dropout, cut between all of them."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout)) for _ in range(blocks))

    def batch(length: int) -> tuple[tuple[Tensor, ...], Tensor]:
        return (torch.randn(length, 6),), torch.randint(0, 6, (length,))

    return Task(nn.Sequential(*layers), [str(index) for index in range(blocks - 1)], batch, mt.Inputs)


def check(results: list[Result], model: nn.Module) -> None:
    """Compare the results of all processes with the whole model, bit for bit."""
    for result in results:
        assert all(result.equal), result.worst
        assert result.losses == 0
    assert sorted({name for result in results for name in result.names}) == sorted(model.state_dict())


def test_gradients_of_1f1b_are_bit_equal_in_two_processes_with_batches_of_several_sizes(tmp_path: Path) -> None:
    task = chain(2, 0.2)
    check(run_processes(tmp_path, 2, train, task, "Schedule1F1B", (16, 16, 24, 16)), task.model)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_several_stages_in_each_process_give_bit_equal_gradients(tmp_path: Path, schedule: str) -> None:
    task = chain(4, 0.0)  # two stages of a process share its random state
    check(run_processes(tmp_path, 2, train, task, schedule, (16, 16)), task.model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "resnet50", "vit"])
def test_gradients_of_1f1b_are_bit_equal_in_three_processes(tmp_path: Path, name: str) -> None:
    task = make_task(name)
    check(run_processes(tmp_path, 3, train, task), task.model)


@pytest.mark.slow
@pytest.mark.parametrize("name", TIED)
def test_gradients_of_tied_weights_are_added_over_three_processes(tmp_path: Path, name: str) -> None:
    check_synced(run_processes(tmp_path, 3, train, make_task(name), "Schedule1F1B", (9, 9, 9), 0.01, "SGD", True))


def check_synced(results: list[Result]) -> None:
    """Compare results of steps that each begin with the weights of the whole model."""
    for result in results:
        assert all(result.equal), result.worst
        assert result.tied < TOLERANCE
        assert result.losses == 0
    assert any(result.tied for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE)
def test_gradients_of_cuts_inside_blocks_are_equal_within_rounding(tmp_path: Path, name: str) -> None:
    task, rate = make_task(name, inside=True), 0.01 if name in TIED else 0.1
    for result in run_processes(tmp_path, 3, train, task, "Schedule1F1B", (9, 9, 9), rate, "SGD", True):
        assert result.worst < TOLERANCE
        assert result.tied < TOLERANCE
        assert result.losses < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_inside"), [*((name, False) for name in TIED), *((name, True) for name in INSIDE)])
def test_rounding_stays_small_over_steps_that_begin_with_weights_of_their_own(
    tmp_path: Path, name: str, is_inside: bool
) -> None:
    rate = 0.01 if name in TIED else 0.1
    task = make_task(name, inside=is_inside)
    # Rounding in a weight after a step goes into all gradients of the next one.
    for result in run_processes(tmp_path, 3, train, task, "Schedule1F1B", (9, 9, 9), rate):
        assert max(result.worst, result.tied, result.losses) < 3 * TOLERANCE


def in_four_stages(name: str) -> Task:
    task = without_dropout(make_task(name))
    blocks = task.cuts[0].rpartition(".")[0]
    return task._replace(cuts=[f"{blocks}.{index}" for index in range(3)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "is_bit_equal"),
    [
        ("ScheduleInterleaved1F1B", True),
        ("ScheduleZBVZeroBubble", True),
        ("ScheduleDualPipeV", True),
        ("ScheduleLoopedBFS", False),  # its backwards begin with the last micro-batch
    ],
)
def test_schedules_of_two_stages_in_each_process_train_tied_weights(
    tmp_path: Path, schedule: str, is_bit_equal: bool
) -> None:
    results = run_processes(tmp_path, 2, train, in_four_stages("gpt2"), schedule, (9, 9), 0.1, "SGD", True)
    assert any(result.tied for result in results)
    for result in results:
        assert all(result.equal) is is_bit_equal
        assert max(result.worst, result.tied) < TOLERANCE
        assert result.losses == 0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleGPipe"])
def test_lengths_may_change_between_steps(tmp_path: Path, schedule: str) -> None:
    task = make_task("llama")
    check(run_processes(tmp_path, 3, train, task, schedule, (9, 6, 12)), task.model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma3", "t5", "vit"])
def test_losses_of_fifty_steps_of_adam_are_those_of_the_whole_model(tmp_path: Path, name: str) -> None:
    results = run_processes(tmp_path, 3, train, make_task(name), "Schedule1F1B", (9,) * 50, 1e-3, "Adam")
    assert max(result.losses for result in results) < 1e-5


@pytest.mark.slow
def test_losses_of_steps_of_adam_are_those_of_a_narrow_resnet50(tmp_path: Path) -> None:
    task = make_task("narrow resnet50")
    (result,) = run_processes(tmp_path, 1, train, task, "ScheduleInterleaved1F1B", (0,) * 10, 1e-3, "Adam")
    assert result.losses < 1e-5


def train_in_parallel(rank: int, _: int, task: Task, kind: str) -> dict[str, float]:
    """Run a step on a mesh of two stages by two parts of the batch; return the differences of gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index, part = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    inputs, target = task.batch(9)
    whole = copy.deepcopy(task.model)
    run_micro_batches(task, whole, inputs, target)
    example = task.wrap(*(one.chunk(MICRO_BATCHES)[0] for one in inputs))
    module = mt.split(task.model, example, at=task.cuts[0], grad=True)[index].as_module(tied="sum")
    shapes, parallel = module.shapes(), _in_parallel(module, task, kind, mesh["dp"])
    stage = pipelining.PipelineStage(parallel, index, 2, CPU, group=mesh["pp"].get_group(), **shapes)
    run: Any = pipelining.Schedule1F1B(stage, MICRO_BATCHES // 2, loss_of)
    own_inputs, own_target = [one.chunk(2)[part] for one in inputs], target.chunk(2)[part]
    run.step(*(own_inputs if index == 0 else ()), **({"target": own_target} if index else {}))
    mt.sum_tied_gradients(module, group=mesh["pp"].get_group())
    expected = {name: grad / MICRO_BATCHES for name, grad in gradients_of(whole).items()}
    found = {
        name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in gradients_of(module).items()
    }
    return {name: relative_difference(grad, expected[name]) for name, grad in found.items()}


def _in_parallel(module: StageModule, task: Task, kind: str, mesh: DeviceMesh) -> nn.Module:
    if kind == "DDP":
        return DistributedDataParallel(module, process_group=mesh.get_group())
    for layer in module.get_submodule(task.cuts[0].rpartition(".")[0]).children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_stages_train_data_parallel_with_tied_weights(tmp_path: Path, kind: str) -> None:
    task = without_dropout(make_task("gpt2"))
    results = run_processes(tmp_path, 4, train_in_parallel, task, kind)
    assert {name for result in results for name in result} == dict(task.model.named_parameters()).keys()
    assert max(max(result.values()) for result in results) < TOLERANCE


def tied_chain() -> Task:
    """Three blocks, of which the first and the last have the same weight."""
    task = chain(3, 0.0)
    task.model[2][0].weight = task.model[0][0].weight  # type: ignore[index]
    return task


def make_stage(rank: int, task: Task, loss: Callable[..., Tensor], *, scale_grads: bool) -> tuple[StageModule, Any]:
    inputs, _ = task.batch(16)
    example = inputs[0].chunk(MICRO_BATCHES)[0]
    module = mt.split(task.model, example, at=task.cuts, grad=True)[rank].as_module(tied="sum")
    stage = pipelining.PipelineStage(module, rank, 3, CPU, **module.shapes())
    return module, pipelining.Schedule1F1B(stage, MICRO_BATCHES, loss, scale_grads=scale_grads)


def run_schedule(rank: int, run: Any, inputs: tuple[Tensor, ...], target: Tensor) -> None:
    run.step(*(inputs if rank == 0 else ()), **({"target": target} if rank == 2 else {}))


def accumulate(rank: int, _: int, task: Task) -> float:
    """Accumulate the gradients of two runs of a schedule; return the largest relative difference."""
    whole, parts = copy.deepcopy(task.model), 2 * MICRO_BATCHES
    module, run = make_stage(rank, task, lambda output, target: loss_of(output, target) / parts, scale_grads=False)
    for _ in range(2):
        inputs, target = task.batch(16)
        run_schedule(rank, run, inputs, target)
        run_micro_batches(task, whole, inputs, target)
    mt.sum_tied_gradients(module)
    expected = gradients_of(whole)
    return max(relative_difference(grad, expected[name] / parts) for name, grad in gradients_of(module).items())


def test_gradients_accumulate_over_runs_of_a_schedule(tmp_path: Path) -> None:
    assert max(run_processes(tmp_path, 3, accumulate, tied_chain())) < TOLERANCE


def scale_gradients(rank: int, _: int, task: Task, is_autocast: bool) -> tuple[list[float], list[float]]:
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast, cache_enabled=False):  # since weights are tied
        return _scale_gradients(rank, task)


def _scale_gradients(rank: int, task: Task) -> tuple[list[float], list[float]]:
    """Train with a scaler that all processes share; return its scales, and the differences of weights, of each step.

    The gradients of the middle stage overflow in the second step.
    """
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=100)
    scaler.scale(torch.zeros(()))  # makes the scale in processes without a loss
    whole, whole_scaler = copy.deepcopy(task.model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    whole_optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    module, run = make_stage(rank, task, lambda *args: scaler.scale(loss_of(*args)), scale_grads=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scales, differences = [], []
    for step in range(3):
        inputs, target = task.batch(16)
        optimizer.zero_grad()
        run_schedule(rank, run, inputs, target)
        mt.sum_tied_gradients(module)
        whole_optimizer.zero_grad()
        for part, part_target in zip(inputs[0].chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True):
            (whole_scaler.scale(loss_of(whole(part), part_target)) / MICRO_BATCHES).backward()
        if step == 1:
            weights = [model.get_parameter("1.0.bias") for model in ((module, whole) if rank == 1 else (whole,))]
            for weight in weights:
                weight.grad = torch.full_like(weight, torch.inf)
        for one, of in ((scaler, optimizer), (whole_scaler, whole_optimizer)):
            one.step(of)
            one.update()
        assert scaler.get_scale() == whole_scaler.get_scale()
        scales.append(scaler.get_scale())
        pairs = [(weight.detach(), whole.get_parameter(name).detach()) for name, weight in module.named_parameters()]
        differences.append(max(float((one - other).abs().max()) for one, other in pairs))
    return scales, differences


@pytest.mark.parametrize(("is_autocast", "tolerance"), [(False, TOLERANCE), (True, 1e-3)], ids=["float32", "autocast"])
def test_an_overflow_in_one_process_skips_the_step_in_all(tmp_path: Path, is_autocast: bool, tolerance: float) -> None:
    for scales, differences in run_processes(tmp_path, 3, scale_gradients, tied_chain(), is_autocast):
        assert scales == [1024.0, 512.0, 512.0]
        assert max(differences) < tolerance


def drift(_: int, __: int, task: Task) -> str:
    modules = [stage.as_module(tied="sum") for stage in mt.split(task.model, "4x6", at=task.cuts, grad=True)]
    with torch.no_grad():
        modules[2].get_parameter("0.0.weight").add_(1)
    with pytest.raises(BadQuery) as error:
        mt.sum_tied_gradients(*modules)
    return str(error.value)


def test_tied_weights_of_one_process_that_are_not_trained_alike_are_an_error(tmp_path: Path) -> None:
    (message,) = run_processes(tmp_path, 1, drift, tied_chain())
    assert "'0.0.weight' differs between the modules of this process" in message


def test_gradients_of_modules_of_two_splits_are_not_added() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    tied = copy.deepcopy(model)
    tied[2].weight = tied[0].weight
    modules = [mt.split(one, "2x4", at="1", grad=True)[0].as_module(tied="sum") for one in (model, tied)]
    with pytest.raises(BadQuery, match='expected the modules of one split, made with tied="sum"'):
        mt.sum_tied_gradients(*modules)
    with pytest.raises(BadQuery, match="expected the modules of one split"):
        mt.sum_tied_gradients()
