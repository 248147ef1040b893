"""A training step of a pipeline of two stages, beside the same parts of the model written by hand, in two processes."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.multiprocessing.spawn import spawn

import microtome as mt
from benchmarks import generate
from benchmarks.report import Target
from microtome import zoo

PROCESSES = 2
_TIMEOUT = timedelta(seconds=300)


class Workload(NamedTuple):
    """A model, its batch and its two parts.

    Attributes:
        cut: Where microtome cuts it.
        parts: Its parts before and after the cut, written by hand. They share its parameters.
        inputs: Those of a step.
        example: Makes the arguments of the model from the inputs of a micro-batch.
    """

    model: nn.Module
    cut: str
    parts: list[nn.Module]
    inputs: Tensor
    target: Tensor
    micro_batches: int
    example: Callable[[Tensor], mt.Inputs]


class LlamaPart(nn.Module):
    """Some layers of a llama, with what comes before the first one and after the last."""

    def __init__(self, model: Any, layers: Iterable[int], *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens if first else nn.Identity()
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(model.model.layers[index] for index in layers)
        self.output = nn.Sequential(model.model.norm, model.lm_head) if last else nn.Identity()

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.embedding(value)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        embeddings = self.rotary(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=embeddings, position_ids=positions)
        output: Tensor = self.output(hidden)
        return output


#: What differs between the stages and the parts of a llama.
LLAMA_FLOOR = (
    "three tensors cross the cut for each micro-batch, and one between the parts written by hand, which compute the "
    "rotary embeddings again."
)


def make_llama(
    layers: int,
    hidden: int,
    rows: int,
    length: int,
    micro_batches: int,
    dtype: torch.dtype = torch.float32,
    **more: int,
) -> Workload:
    """A llama that is cut after half of its layers."""
    model = generate.build(layers, hidden, **more).to(dtype).train()
    half = layers // 2
    parts: list[nn.Module] = [
        LlamaPart(model, range(half), first=True, last=False),
        LlamaPart(model, range(half, layers), first=False, last=True),
    ]
    ids = torch.randint(0, model.config.vocab_size, (rows * micro_batches, length))
    cut = f"model.layers.{half - 1}"
    return Workload(model, cut, parts, ids, ids.roll(-1, 1), micro_batches, _llama_inputs)


def _llama_inputs(ids: Tensor) -> mt.Inputs:
    return mt.Inputs(input_ids=ids, use_cache=False)


def make_resnet(rows: int, side: int, micro_batches: int) -> Workload:
    """A ResNet-50 that is cut after its second layer."""
    torch.manual_seed(0)
    net = zoo.import_torchvision().models.resnet50().train()
    parts: list[nn.Module] = [
        nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2),
        nn.Sequential(net.layer3, net.layer4, net.avgpool, nn.Flatten(), net.fc),
    ]
    pictures = torch.randn(rows * micro_batches, 3, side, side)
    return Workload(net, "layer2", parts, pictures, torch.randint(0, 1000, (len(pictures),)), micro_batches, mt.Inputs)


def loss_of(output: Any, target: Tensor) -> Tensor:
    """The cross entropy of the first tensor of an output, on the device of the target."""
    first = output if isinstance(output, Tensor) else next(iter(output.values()))
    return nn.functional.cross_entropy(first.to(target.device).flatten(0, -2).float(), target.flatten())


class _OnDevice(nn.Module):
    """A part on an accelerator that takes and returns tensors of the CPU, which gloo can send."""

    def __init__(self, part: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.part = part
        self.device = device

    def forward(self, *tensors: Tensor) -> Any:
        output = self.part(*(tensor.to(self.device) for tensor in tensors))
        return output.cpu() if isinstance(output, Tensor) else tuple(tensor.cpu() for tensor in output)


class Contestant:
    """One way to run a stage, with a schedule of its own."""

    def __init__(self, work: Workload, rank: int, part: nn.Module, device: torch.device, **shapes: Any) -> None:
        self._work, self._rank = work, rank
        self._parameters = [one for one in part.parameters() if one.requires_grad]
        edge = torch.device("cpu") if dist.get_backend() == "gloo" else device
        if edge != device:
            part = _OnDevice(part, device)
        stage = PipelineStage(part, rank, PROCESSES, edge, **shapes)
        self._schedule = Schedule1F1B(stage, work.micro_batches, loss_fn=loss_of)
        self.edge, self._device = edge, device

    def step(self) -> float:
        """Run a step and return its seconds."""
        for parameter in self._parameters:
            parameter.grad = None
        target = self._work.target.to(self.edge)
        inputs = self._work.inputs.to(self.edge)
        _synchronize(self._device)
        dist.barrier()
        start = time.perf_counter()
        if self._rank == 0:
            self._schedule.step(inputs)
        else:
            losses: list[Tensor] = []
            self._schedule.step(target=target, losses=losses)
        _synchronize(self._device)
        dist.barrier()
        return time.perf_counter() - start


def run_step(rank: int, make: Callable[[], Workload], device: torch.device, rounds: int) -> dict[str, Any]:
    """In one process: compare the gradients of a step with those of the whole model, and time steps in turns."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)  # backwards of attention add up in any order otherwise
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    work = make()
    model = work.model.to(device)
    micro_batch = work.inputs.chunk(work.micro_batches)[0].to(device)
    module = mt.split(model, work.example(micro_batch), at=work.cut, grad=True)[rank].as_module()
    contestants = {
        "stages": Contestant(work, rank, module, device, **module.shapes()),
        "by_hand": Contestant(work, rank, work.parts[rank], device, **_shapes_of_parts(work, micro_batch, rank)),
    }
    expected = _whole_gradients(work, device, contestants["stages"].edge)
    contestants["stages"].step()
    found = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
    result = _compare(found, expected)
    del expected, found
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 2):
        for name, contestant in contestants.items():
            seconds = contestant.step()
            if round_ > 1:  # the first ones warm up
                times[name].append(seconds)
    return result | {f"{name}_s": min(taken) for name, taken in times.items()}


def make_targets(results: list[dict[str, float]], note: str, of: str = "", floor: str = "") -> list[Target]:
    """The targets of the results of all processes.

    Args:
        of: Put after their names, such as `" of a llama"`.
        floor: Why the time may be above the target.
    """
    difference = max(result["relative_difference"] for result in results)
    seconds = [max(result[name] for result in results) for name in ("stages_s", "by_hand_s")]
    gradients = sum(result["gradients"] for result in results)
    figures = (
        f"{note}; a step takes {1e3 * seconds[0]:.1f} ms, that of parts written by hand {1e3 * seconds[1]:.1f} ms; "
        f"{gradients:.0f} gradients of {results[0]['of']:.0f}"
    )
    return [
        Target(f"largest relative difference of a gradient from the whole model's{of}", difference, 0, note=figures),
        Target(
            f"pipelined step over two stages / over parts written by hand{of}",
            seconds[0] / seconds[1],
            1.05,
            floor=floor,
        ),
    ]


def _shapes_of_parts(work: Workload, micro_batch: Tensor, rank: int) -> dict[str, tuple[Tensor, ...]]:
    with torch.no_grad():
        hidden = work.parts[0](micro_batch)
        output = work.parts[1](hidden)
    crossing, returned = (torch.empty_like(one, device="meta").requires_grad_() for one in (hidden, output))
    inputs = torch.empty_like(micro_batch, device="meta")
    takes, returns = ((inputs, crossing), (crossing, returned))[rank]
    return {"input_args": (takes,), "output_args": (returns,)}


def _whole_gradients(work: Workload, device: torch.device, edge: torch.device) -> dict[str, Tensor]:
    """The gradients of the whole model over the micro-batches of a step, with the loss on the device of the stages'."""
    work.model.zero_grad()
    batches = (one.chunk(work.micro_batches) for one in (work.inputs.to(device), work.target.to(edge)))
    for inputs, target in zip(*batches, strict=True):
        loss_of(work.example(inputs).run(work.model), target).backward()
    named = ((name, weight.grad) for name, weight in work.model.named_parameters())
    gradients = {name: grad / work.micro_batches for name, grad in named if grad is not None}
    work.model.zero_grad()
    return gradients


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    pairs = [(grad.float(), expected[name].float()) for name, grad in found.items()]
    worst = max(float((one - other).abs().max() / other.abs().max().clamp_min(1e-30)) for one, other in pairs)
    return {"gradients": len(found), "of": len(expected), "relative_difference": worst}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_processes(
    work: Callable[..., dict[str, Any]], *args: Any, processes: int = PROCESSES, backend: str = "gloo"
) -> list[dict[str, Any]]:
    """Run a function in fresh processes of one group, and return the results in the order of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_enter, (folder, processes, backend, work, args), nprocs=processes)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]


def _enter(rank: int, folder: str, world: int, backend: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(0)
    with _process_group(folder, rank, world, backend):
        (Path(folder) / f"{rank}.json").write_text(json.dumps(work(rank, *args)))


@contextmanager
def _process_group(folder: str, rank: int, world: int, backend: str) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=_TIMEOUT
    )
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
