"""Stages in `torch.distributed.pipelining`, in processes of their own, beside the whole model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import microtome as mt
from microtome.errors import BadQuery
from tests.split.pipelines import Result, Task, loss_of, make_task, run_processes, train

pytestmark = pytest.mark.integration

#: How far sums in another order may be apart over some steps, of weights that several stages hold.
TIED = 3e-6


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
@pytest.mark.parametrize("name", ["llama", "qwen3", "resnet", "vit"])
def test_gradients_of_1f1b_are_bit_equal_in_three_processes(tmp_path: Path, name: str) -> None:
    task = make_task(name)
    check(run_processes(tmp_path, 3, train, task), task.model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gemma3", "t5"])
def test_gradients_of_tied_weights_are_added_over_three_processes(tmp_path: Path, name: str) -> None:
    for result in run_processes(tmp_path, 3, train, make_task(name), "Schedule1F1B", (9, 9, 9), 0.01):
        assert result.worst < TIED
        assert result.losses < TIED


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleGPipe"])
def test_lengths_may_change_between_steps(tmp_path: Path, schedule: str) -> None:
    task = make_task("llama")
    check(run_processes(tmp_path, 3, train, task, schedule, (9, 6, 12)), task.model)


@pytest.mark.slow
def test_losses_of_fifty_steps_of_adam_are_those_of_the_whole_model(tmp_path: Path) -> None:
    results = run_processes(tmp_path, 3, train, make_task("gpt2"), "Schedule1F1B", (9,) * 50, 1e-3, "Adam")
    assert max(result.losses for result in results) < 1e-5


def train_in_parallel(rank: int, _: int, task: Task, kind: str) -> list[float]:
    """Run both stages on a part of the batch; return how far averaged gradients are from those of the whole model."""
    torch.manual_seed(0)
    (ids,), target = task.batch(9)
    parts, targets = ids.chunk(2), target.chunk(2)
    whole = copy.deepcopy(task.model)
    for part, part_target in zip(parts, targets, strict=True):
        (loss_of(task.wrap(part).run(whole), part_target) / 2).backward()
    stages = mt.split(task.model, task.wrap(parts[0]), at=task.cuts[0], grad=True)
    modules: list[nn.Module] = [stage.as_module() for stage in stages]
    for index, module in enumerate(modules):
        if kind == "DDP":
            modules[index] = DistributedDataParallel(module)
        else:
            for layer in module.get_submodule("model.layers").children():
                if list(layer.parameters()):
                    fully_shard(layer)
            fully_shard(module)
    output = modules[1](*modules[0](parts[rank]))
    loss_of(output, targets[rank]).backward()
    found = {name.removeprefix("module."): weight.grad for one in modules for name, weight in one.named_parameters()}
    gradients = {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in found.items()}
    expected = {name: weight.grad for name, weight in whole.named_parameters()}
    assert gradients.keys() == expected.keys()
    return [float((gradients[name] - grad).abs().max()) for name, grad in expected.items() if grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_stages_train_data_parallel(tmp_path: Path, kind: str) -> None:
    for differences in run_processes(tmp_path, 2, train_in_parallel, make_task("llama"), kind):
        assert max(differences) < 1e-7


def test_gradients_of_modules_of_two_splits_are_not_added() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    tied = copy.deepcopy(model)
    tied[2].weight = tied[0].weight
    modules = [mt.split(one, "2x4", at="1", grad=True)[0].as_module(tied="sum") for one in (model, tied)]
    with pytest.raises(BadQuery, match='expected the modules of one split, made with tied="sum"'):
        mt.sum_tied_gradients(*modules)
    with pytest.raises(BadQuery, match="expected the modules of one split"):
        mt.sum_tied_gradients()
