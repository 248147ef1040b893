"""Compare stages as graphs and as ONNX models with the stages, on two inputs of different sizes.

Images differ in number, height and width where the model takes that. It exits with 1 if a stage computes something
else, an exported head cannot feed the tail, microtome crashes, or too few graphs are equal.

`python -m benchmarks.split_zoo.graphs [--save] [--every N] [NAMES]`
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import microtome as mt
from benchmarks.report import save
from benchmarks.split_zoo.models import Entry, build, entries
from microtome.engine.pytree import named_tensors, tensors_in
from microtome.errors import MicrotomeError
from microtome.split.graph.derived_facts import named_inputs
from microtome.split.graph.runtimes import run_onnx
from microtome.split.graph.size_conditions import find_unmet
from microtome.split.stage import Stage

#: Of the models, every 12th is tried; of each, so many cuts.
_EVERY, _CUTS = 12, 2
_TOLERANCE = 1e-5
#: The least share of graphs that are equal at both sizes; the others are refused, or have a fixed size.
_LEAST_EQUAL = 0.5
#: The most seconds of CPU time for a model.
_LIMIT_S = 400


def prove(entry: Entry) -> Iterator[tuple[str, str]]:
    """Yield what was tried, and `"… equal"`, `"rounding: …"`, `"refused: …"`, `"fixed size: …"` or `"wrong: …"`."""
    try:
        model, inputs = build(entry)
        model.eval()
        if any(name == "use_cache" for name in model.forward.__code__.co_varnames):
            inputs = [_without_cache(mt.Inputs.of(one)) for one in inputs]
        given = _resize_images(model, [mt.Inputs.of(one) for one in inputs])
        wholes = [one.run(model) for one in given]
    except Exception as error:  # noqa: BLE001  of a model that does not run here
        yield "", f"not run: {type(error).__name__}: {error}"[:300]
        return
    addresses = [cut.at for cut in mt.cuts(model, given[0]) if cut.refused is None]
    for at in random.Random(str(entry)).sample(addresses, min(_CUTS, len(addresses))):
        stages = mt.split(model, given[0], at=at)
        head, tail = stages
        boundaries = [head(*one.args, **one.kwargs) for one in given]
        arguments = [list({id(t): t for t in tensors_in((one.args, one.kwargs))}.values()) for one in given]
        expected = [dict(boundary.tensors) for boundary in boundaries]
        outputs = list(map(_outputs_of, wholes))
        exported = None
        for stage, tensors, results in (
            (head, arguments, expected),
            (tail, [list(boundary.tensors.values()) for boundary in boundaries], outputs),
        ):
            name = f"{at} {'head' if stage is head else 'tail'}"
            yield f"{name} graph", _describe(lambda: _try_graph(stage, tensors, results))  # noqa: B023
            found = _describe(lambda: _try_onnx(stage, tensors, results))  # noqa: B023
            yield f"{name} onnx", found
            exported = exported or (found == "onnx equal")
        if exported:
            for one, crossing, output in zip(given, expected, outputs, strict=True):
                shapes = {name: list(tensor.shape) for name, tensor in named_inputs(model, one).items()}
                boundary = mt.Boundary(at, tail.fingerprint, crossing, {"input_shapes": shapes})
                found = _describe(lambda: _compare("facts", _outputs_of(tail(boundary)), output, _TOLERANCE))  # noqa: B023
                is_broken = found.startswith("refused") and "derive" not in found  # which says what to do
                yield f"{at} facts", f"wrong: facts {found}" if is_broken else found


def _resize_images(model: nn.Module, inputs: list[mt.Inputs]) -> list[mt.Inputs]:
    """Make the images of the second input higher and wider, if the model takes that."""
    first, second = inputs
    if not all(isinstance(image, Tensor) and image.dim() == 4 for image in second.args) or second.kwargs:
        return inputs
    sizes = [(len(image), image.shape[1], image.shape[2] + 32, image.shape[3] + 64) for image in second.args]
    larger = mt.Inputs(*(torch.randn(size, dtype=image.dtype) for size, image in zip(sizes, second.args, strict=True)))
    try:
        larger.run(model)
    except Exception:  # noqa: BLE001  of a model of one size
        return inputs
    return [first, larger]


def _outputs_of(output: Any) -> dict[str, Tensor]:
    return {path or "output": tensor for path, tensor in named_tensors(output)}


def _without_cache(inputs: mt.Inputs) -> mt.Inputs:
    return mt.Inputs(*inputs.args, **{**inputs.kwargs, "use_cache": False})


def _describe(trial: Any) -> str:
    try:
        return str(trial())
    except MicrotomeError as error:
        return f"refused: {error}"


def _try_graph(stage: Stage, inputs: Sequence[list[Tensor]], expected: Sequence[dict[str, Tensor]]) -> str:
    graph = stage.graph()
    for tensors, results in zip(inputs, expected, strict=True):
        if fixed := _find_fixed(graph, tensors):
            return f"fixed size: {fixed}"
        try:
            got = graph(*tensors)
        except RuntimeError as error:
            if "expected sizes with" in str(error):
                return f"fixed size: {error}".splitlines()[0]
            raise
        if (found := _compare("graph", got, results, 0.0)) != "graph equal":
            return found
    return "graph equal"


def _try_onnx(stage: Stage, inputs: Sequence[list[Tensor]], expected: Sequence[dict[str, Tensor]]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        exported = stage.export(Path(folder) / "stage.onnx")
        run = run_onnx(Path(exported.file).read_bytes())
    sizes = [one.shape for one in exported.details.inputs.values()]
    for tensors, results in zip(inputs, expected, strict=True):
        if unmet := find_unmet(sizes, exported.details.conditions, [tuple(tensor.shape) for tensor in tensors]):
            return f"fixed size: expected {unmet}"
        try:
            got = dict(zip(exported.metadata["outputs"], run(tensors), strict=True))
        except Exception as error:  # noqa: BLE001  the runtime refuses a size
            return f"fixed size: {error}".splitlines()[0]
        if (found := _compare("onnx", got, results, _TOLERANCE)) != "onnx equal":
            return found
    return "onnx equal"


def _find_fixed(graph: Any, tensors: Sequence[Tensor]) -> str:
    """Name a size that is fixed in the graph, and that the tensors do not have."""
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(nodes, tensors, strict=True):
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int) and size != tensor.shape[dim]:
                return f"{node.name}[{dim}] {graph.meta['static']}"[:300]
    return ""


def _compare(kind: str, got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> str:
    for name, tensor in expected.items():
        found = got[name]
        if found.shape != tensor.shape or found.dtype != tensor.dtype:
            return f"wrong: {name} {found.dtype} {tuple(found.shape)}, not {tensor.dtype} {tuple(tensor.shape)}"
        if torch.equal(found, tensor):
            continue
        scale = float(tensor.abs().max())
        largest = float((found.double() - tensor.double()).abs().max())
        if not largest <= tolerance * scale:
            label = "rounding" if largest <= _TOLERANCE * scale else "wrong"
            return f"{label}: {kind} {name} differs by {largest:.3g} of {scale:.3g}"
    return f"{kind} equal"


class _OutOfTime(BaseException):
    """A model has had its CPU time; not an `Exception`, which the exporters catch."""


def _raise_out_of_time(*_: object) -> None:
    raise _OutOfTime


def _try(entry: Entry) -> tuple[str, list[tuple[str, str]]]:
    """Prove a model in a process of its own; return its name, and what was tried with the outcomes."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    found: list[tuple[str, str]] = []
    signal.signal(signal.SIGPROF, _raise_out_of_time)
    signal.setitimer(signal.ITIMER_PROF, _LIMIT_S)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for one in prove(entry):
                found.append(one)
    except _OutOfTime:
        found.append(("", f"not run: the rest, after {_LIMIT_S} s of CPU time"))
    except Exception as error:  # noqa: BLE001  of microtome: the model itself runs
        found.append(("", f"crashed: {type(error).__name__}: {error}"[:300]))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return str(entry), found


def main(words: list[str]) -> int:
    every = int(words[words.index("--every") + 1]) if "--every" in words else _EVERY
    names = [word for word in words if not word.startswith("--") and not word.isdigit()]
    listed = list(entries())
    chosen = [one for one in listed if str(one) in names] if names else listed[::every]
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()  # the outcomes of graphs
    lines = []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(_try, entry) for entry in chosen]):
            name, found = future.result()
            outcomes.update(outcome.partition(":")[0] for _, outcome in found)
            tried = [outcome for at, outcome in found if at.endswith(" graph")]
            kinds.update("graph equal" if outcome == "graph equal" else "graph other" for outcome in tried)
            bad = [f"- {name} at {at}: {outcome[:300]}" for at, outcome in found if not outcome.endswith("equal")]
            lines += bad
            print(
                f"{name}: {dict(Counter(outcome.partition(':')[0] for _, outcome in found))}",
                *bad,
                sep="\n",
                flush=True,
            )
    text = f"{len(chosen)} models, two cuts and two inputs of different sizes each: "
    text += ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    text = "\n".join([f"{text}.", "", *sorted(lines)])
    print(text)
    if "--save" in words:
        print("written to", save("graphs", text, "python -m benchmarks.split_zoo.graphs --save"))
    graphs = kinds.total()
    too_few = kinds["graph equal"] < _LEAST_EQUAL * graphs or not graphs
    if too_few:
        print(f"missed: {kinds['graph equal']} of {graphs} graphs are equal, expected {_LEAST_EQUAL:.0%} or more")
    return int(outcomes["wrong"] + outcomes["rounding"] + outcomes["crashed"] > 0 or too_few)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
