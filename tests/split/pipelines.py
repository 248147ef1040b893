"""Train models over the processes of a pipeline, beside the whole model."""

from __future__ import annotations

import copy
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

import microtome as mt
from microtome.split.pipelining.stage_module import StageModule
from tests.split import language_models

MICRO_BATCHES = 4
CPU = torch.device("cpu")


class Task(NamedTuple):
    """A model to train.

    Attributes:
        cuts: Where it is cut, for three stages.
        batch: Makes the inputs of a step and its targets; the argument is its length.
        wrap: Makes the arguments of the model from the inputs of a micro-batch.
    """

    model: nn.Module
    cuts: list[str]
    batch: Callable[[int], tuple[tuple[Tensor, ...], Tensor]]
    wrap: Callable[..., mt.Inputs]


def loss_of(output: Any, target: Tensor) -> Tensor:
    """The cross entropy of the first tensor of an output."""
    first = output if isinstance(output, Tensor) else next(iter(output if type(output) is tuple else output.values()))
    return nn.functional.cross_entropy(first.flatten(0, -2), target.flatten())


#: Cuts inside blocks. That of ResNet-50, which is bit-equal, is in its task.
INSIDE = {
    "llama": ["model.layers.0.mlp.gate_proj", "model.layers.1.self_attn.q_proj"],
    "qwen3": ["model.layers.0.self_attn.q_norm", "model.layers.1.mlp.up_proj"],
    "gemma3": ["model.layers.0.mlp.gate_proj", "model.layers.1.self_attn"],
    "gpt2": ["transformer.h.0.mlp.c_fc", "transformer.h.1.attn"],
    "t5": ["encoder.block.1.layer.0", "decoder.block.0.layer.1"],
    "vit": ["encoder.layers.encoder_layer_0.ln_2", "encoder.layers.encoder_layer_1.self_attention"],
}


def make_task(name: str, *, inside: bool = False) -> Task:
    task = _make_task(name)
    return task._replace(cuts=INSIDE[name]) if inside else task


def without_dropout(task: Task) -> Task:
    for module in task.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return task


def _make_task(name: str) -> Task:
    torch.manual_seed(0)
    if name in ("resnet50", "narrow resnet50", "vit"):
        return _make_image_task(name)
    tokens = language_models.VOCABULARY

    def batch(length: int) -> tuple[tuple[Tensor, ...], Tensor]:
        ids = torch.randint(3, tokens, (2 * MICRO_BATCHES, length))
        return ((ids, ids.roll(1, 1)) if name == "t5" else (ids,)), ids.roll(-1, 1)

    if name == "t5":
        model, cuts = language_models.build_t5(), ["encoder.block.1", "decoder.block.0"]
    else:
        model, block = language_models.build(name)
        cuts = [block.replace("1", "0"), block]

    def wrap(ids: Tensor, decoder_ids: Tensor | None = None) -> mt.Inputs:
        more = {} if decoder_ids is None else {"decoder_input_ids": decoder_ids}
        return mt.Inputs(input_ids=ids, use_cache=False, **more)

    return Task(model.train(), cuts, batch, wrap)


def _make_image_task(name: str) -> Task:
    from microtome import zoo

    torchvision = zoo.import_torchvision()
    size = {"resnet50": 64, "narrow resnet50": 32, "vit": 16}[name]
    if name != "vit":
        resnet = torchvision.models.resnet
        model, cuts = resnet.resnet50(num_classes=5), ["layer1", "layer3.1.bn2"]
        if name == "narrow resnet50":  # an eighth of the channels inside blocks, for many steps
            model = resnet.ResNet(resnet.Bottleneck, [3, 4, 6, 3], num_classes=5, width_per_group=8)
    else:
        kind = torchvision.models.vision_transformer.VisionTransformer
        model = kind(16, 8, 3, 2, 16, 32, dropout=0.2, attention_dropout=0.2, num_classes=5)
        cuts = [f"encoder.layers.encoder_layer_{index}" for index in (0, 1)]

    def batch(_: int) -> tuple[tuple[Tensor, ...], Tensor]:
        return (torch.randn(2 * MICRO_BATCHES, 3, size, size),), torch.randint(0, 5, (2 * MICRO_BATCHES,))

    return Task(model.train(), cuts, batch, mt.Inputs)


@contextmanager
def switched_random_states(model: nn.Module, cuts: list[str], states: list[Tensor]) -> Iterator[None]:
    """Let the parts of a model between cuts draw from states of their own, as its stages in processes do."""

    def switch(index: int, other: int) -> None:
        states[index] = torch.get_rng_state()
        torch.set_rng_state(states[other])

    def after(index: int) -> Callable[..., None]:
        return lambda *_: switch(index, index + 1)

    handles = [model.get_submodule(cut).register_forward_hook(after(index)) for index, cut in enumerate(cuts)]
    handles.append(model.register_forward_hook(lambda *_: switch(len(cuts), 0)))
    before = torch.get_rng_state()
    torch.set_rng_state(states[0])
    try:
        yield
    finally:
        states[0] = torch.get_rng_state()
        torch.set_rng_state(before)
        for handle in handles:
            handle.remove()


def _seeded(stage: int) -> Tensor:
    return torch.Generator().manual_seed(100 + stage).get_state()


def whole_steps(
    task: Task, lengths: list[int], rate: float, kind: type[torch.optim.Optimizer]
) -> Iterator[tuple[list[Tensor], dict[str, Tensor], nn.Module]]:
    """Train the whole model; yield the losses and the gradients of each step, and the model after it."""
    model = copy.deepcopy(task.model)
    optimizer = kind(model.parameters(), lr=rate)  # type: ignore[call-arg]
    states = [_seeded(index) for index in range(len(task.cuts) + 1)]
    for step, length in enumerate(lengths):
        torch.manual_seed(step)
        inputs, target = task.batch(length)
        optimizer.zero_grad()
        with switched_random_states(model, task.cuts, states):
            losses = run_micro_batches(task, model, inputs, target)
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.div_(MICRO_BATCHES)
        gradients = gradients_of(model)
        optimizer.step()
        yield losses, gradients, model


def run_micro_batches(task: Task, model: nn.Module, inputs: tuple[Tensor, ...], target: Tensor) -> list[Tensor]:
    """Run the backward of each micro-batch; return the losses."""
    losses = []
    for *part, part_target in zip(*(one.chunk(MICRO_BATCHES) for one in (*inputs, target)), strict=True):
        loss = loss_of(task.wrap(*part).run(model), part_target)
        loss.backward()
        losses.append(loss.detach())
    return losses


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}


def relative_difference(gradient: Tensor, expected: Tensor) -> float:
    """The largest difference of a gradient, relative to the largest number in it."""
    return float((gradient - expected).abs().max() / expected.abs().max())


class Result(NamedTuple):
    """What a process found.

    Attributes:
        equal: For each step, whether all gradients but those of tied weights are bit-equal to the whole model's.
        worst: The largest difference of a gradient, relative to the largest number in it.
        tied: The same of weights that several stages train.
        losses: The largest difference of a loss, in the last stage.
        names: The parameters and buffers of its modules.
    """

    equal: list[bool]
    worst: float
    tied: float
    losses: float
    names: list[str]


def train(
    rank: int,
    world: int,
    task: Task,
    schedule: str = "Schedule1F1B",
    lengths: tuple[int, ...] = (9, 9, 9),
    rate: float = 0.1,
    optimizer: str = "SGD",
    synced: bool = False,
) -> Result:
    """Train in one process of a pipeline, and compare with the whole model.

    Args:
        synced: Set the weights to those of the whole model after each step, so that rounding does not accumulate.
    """
    whole = whole_steps(task, list(lengths), rate, getattr(torch.optim, optimizer))
    stages = mt.split(task.model, _example(task, lengths[0]), at=task.cuts, grad=True)
    indices = indices_of(rank, world, len(stages), schedule)
    if len(indices) == 1:
        stages = stages.keeping(rank)
    modules = [stages[index].as_module(tied="sum") for index in indices]
    weights = [weight for module in modules for weight in module.parameters()]
    step_optimizer = getattr(torch.optim, optimizer)(weights, lr=rate)
    equal, worst, worst_tied, worst_loss, state = [], 0.0, 0.0, 0.0, _seeded(rank)
    for step, length in enumerate(lengths):
        if step == 0 or length != lengths[step - 1]:  # torch fixes the shapes of a schedule
            parts = [
                pipelining.PipelineStage(module, index, len(stages), CPU, **module.shapes(_example(task, length)))
                for module, index in zip(modules, indices, strict=True)
            ]
            run = getattr(pipelining, schedule)(parts if world < len(stages) else parts[0], MICRO_BATCHES, loss_of)
        torch.manual_seed(step)
        inputs, target = task.batch(length)
        losses: list[Tensor] = []
        step_optimizer.zero_grad()
        is_last = len(stages) - 1 in indices
        torch.set_rng_state(state)
        run.step(*(inputs if rank == 0 else ()), **({"target": target, "losses": losses} if is_last else {}))
        state = torch.get_rng_state()
        mt.sum_tied_gradients(*modules)
        expected_losses, expected, model = next(whole)
        own, tied = compare_gradients(modules, expected)
        equal.append(not any(own.values()))
        worst, worst_tied = max(worst, *own.values()), max(worst_tied, *tied.values(), 0.0)
        for loss, other in zip(losses, expected_losses, strict=is_last):
            worst_loss = max(worst_loss, float((loss.detach() - other).abs()))
        step_optimizer.step()
        if synced:
            for module in modules:
                module.load_state_dict(model.state_dict())
    return Result(equal, worst, worst_tied, worst_loss, sorted({one for each in modules for one in each.state_dict()}))


def indices_of(rank: int, world: int, num_stages: int, schedule: str) -> list[int]:
    """The stages of a process: of a schedule in the shape of a V, one from each end."""
    if schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, world))


def compare_gradients(
    modules: Sequence[StageModule], expected: dict[str, Tensor]
) -> tuple[dict[tuple[int, str], float], dict[tuple[int, str], float]]:
    """The relative differences of the gradients of each module, and of those of tied weights; 0: bit-equal."""
    found: tuple[dict[tuple[int, str], float], dict[tuple[int, str], float]] = ({}, {})
    for index, module in enumerate(modules):
        gradients = gradients_of(module)
        assert gradients.keys() == expected.keys() & dict(module.named_parameters()).keys()
        for name, grad in gradients.items():
            difference = 0.0 if grad.equal(expected[name]) else relative_difference(grad, expected[name])
            found[name in module.tied][index, name] = difference
    return found


def _example(task: Task, length: int) -> mt.Inputs:
    inputs, _ = task.batch(length)
    return task.wrap(*(one.chunk(MICRO_BATCHES)[0] for one in inputs))


def run_processes(folder: Path, world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function in processes of one gloo group; return what each returns."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(world):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_enter, args=(sending, folder / "store", rank, world, work, args))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            process.start()
        sending.close()
        pipes.append(receiving)
        processes.append(process)
    results: list[Any] = []
    for pipe in pipes:
        try:
            error, value = pipe.recv() if pipe.poll(120) else ("no answer after 120 s", None)
        except EOFError:
            error, value = "the process ended", None
        results.append((error, value))
    for process in processes:
        if any(error for error, _ in results):
            process.kill()
        process.join()
    errors = [error for error, _ in results if error]
    assert not errors, "\n".join(errors)
    return [value for _, value in results]


def _enter(pipe: Any, store: Path, rank: int, world: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        value = work(rank, world, *args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(("", value))
    except BaseException:  # noqa: BLE001  the other process shows it
        pipe.send((traceback.format_exc(), None))
