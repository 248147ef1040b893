"""Verify that stages compute the gradients of the whole model, as if each ran in a process of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from microtome.engine.meta_run import copy_inputs
from microtome.engine.pytree import tensors_in
from microtome.engine.snapshot import restore_afterwards
from microtome.errors import MicrotomeError, Unsupported, describe_error
from microtome.inputs import Inputs
from microtome.results.cuts import Cut
from microtome.split.analysis.randomness import devices_of, save_random_state
from microtome.split.boundary.boundary import Boundary
from microtome.split.cuts.crossing import ValueLocation
from microtome.split.cuts.refusals import find_gradient_refusal
from microtome.split.execution.placeholder import Placeholder
from microtome.split.gradient_comparison import GradientComparison, GradientMismatch, compare_gradients
from microtome.split.verification import run_whole

if TYPE_CHECKING:
    from microtome.split.splitter import Splitter

Gradients = dict[str, Tensor]

_NO_LIMIT = 1 << 62  # the example is the user's own
_SEED = 0
#: Put before the names of inputs and of tensors of a boundary, which no parameter has.
_INPUT, _BOUNDARY = "input ", "boundary "


def check_trainable(splitter: Splitter, chosen: Sequence[Cut]) -> None:
    """Raise if gradients cannot cross these cuts, whatever the example."""
    if splitter.spec.states:
        names = ", ".join(sorted({type(state).__name__ for state in splitter.spec.states}))
        raise Unsupported(
            f"the model takes or makes state ({names}), whose gradients cannot cross a cut: call it for a single pass, "
            "such as with use_cache=False"
        )
    for crossing in splitter.crossings(chosen, [()] * len(chosen)):
        if (refusal := find_gradient_refusal(splitter.analysis, crossing)) is not None:
            raise Unsupported(refusal)


class GradientVerification:
    """Compares the gradients of parameters and inputs, from the same random state, through bytes.

    Args:
        extra: The values that cross each cut beside those that the analysis found.
    """

    def __init__(self, splitter: Splitter, chosen: Sequence[Cut], extra: Sequence[Iterable[ValueLocation]]) -> None:
        self._splitter = splitter
        self._stages = splitter.stages(chosen, extra)
        cuts = ", ".join(cut.at for cut in chosen)
        self._where = f"the {type(splitter.model).__name__} cannot be trained across the cut at {cuts}"

    def run(self) -> GradientComparison:
        """Compare them.

        Raises:
            Unsupported: They differ, or the backward fails.
        """
        model, analysis = self._splitter.model, self._splitter.analysis
        reset_random = save_random_state(
            devices_of(model, self._splitter.example),
            analysis.generators,
            draws=bool(analysis.draws),
            packages={draw.package for draw in analysis.python_draws},
        )
        with restore_afterwards(model, analysis.written_parameters) as snapshot, torch.enable_grad():
            try:
                expected = self._run_model()
                snapshot.restore()
                reset_random()
                found = self._run_stages()
                snapshot.restore()
                reset_random()
                return self._compare(found, expected)
            finally:
                reset_random()

    def _compare(self, by_stage: list[Gradients], expected: Gradients) -> GradientComparison:
        trained = tuple(frozenset(name for name in stage if not name.startswith(_INPUT)) for stage in by_stage)
        precision = self._precision()
        result = compare_gradients(_sum(by_stage), expected, trained, precision)
        if isinstance(result, GradientMismatch):
            again = compare_gradients(self._run_model(), expected, trained, precision)
            varies = "; two runs of the whole model differ, too" if isinstance(again, GradientMismatch) else ""
            raise Unsupported(f"{self._where}: {result}{varies}")
        return result

    def _precision(self) -> float:
        """The relative precision of the least precise operator of the model, such as one under autocast."""
        values = self._splitter.analysis.trace.values
        dtypes = {value.dtype for value in values if value.origin == "op" and value.dtype.is_floating_point}
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)

    def _run_model(self) -> Gradients:
        """The gradients of the whole model, from fixed gradients of its outputs."""
        model = self._splitter.model
        inputs = copy_inputs(self._splitter.example, model)
        outputs = _differentiable(run_whole(model, inputs))
        if not outputs:
            raise Unsupported(
                f"{self._where}: expected an output that requires a gradient, got none. Do its parameters require one?"
            )
        try:
            return _gradients(outputs, _output_gradients(outputs), _leaves(model, inputs))
        except RuntimeError as error:
            raise Unsupported(
                f"{self._where}: the backward of the whole model raised {describe_error(error)}; activation "
                "checkpoints need use_reentrant=False"
            ) from error

    def _run_stages(self) -> list[Gradients]:
        """The gradients of each stage; boundaries and their gradients travel as bytes."""
        try:
            found = self._run_backward(*self._run_forward())
            if any(isinstance(gradient, Placeholder) for gradients in found for gradient in gradients.values()):
                raise CheckpointError("a call of another stage ran again")
            return found
        except MicrotomeError:
            raise
        except CheckpointError as error:
            raise Unsupported(
                f"{self._where}: it is inside an activation checkpoint, which runs calls on both sides of it again in "
                "the backward. Cut at the end of the checkpointed block, or checkpoint a smaller one"
            ) from error
        except Exception as error:
            raise Unsupported(f"{self._where}: the backward of the stages raised {describe_error(error)}") from error

    def _run_forward(self) -> tuple[Inputs, list[Boundary], list[Boundary], Any]:
        """The inputs, each boundary as it was sent and as it was received, and the output."""
        inputs = copy_inputs(self._splitter.example, self._splitter.model)
        value = self._stages[0](*inputs.args, **inputs.kwargs)
        sent: list[Boundary] = []
        received: list[Boundary] = []
        for stage in self._stages[1:]:
            sent.append(value)
            received.append(Boundary.from_bytes(value.to_bytes(), limit=_NO_LIMIT))
            value = stage(received[-1])
        return inputs, sent, received, value

    def _run_backward(
        self, inputs: Inputs, sent: list[Boundary], received: list[Boundary], output: Any
    ) -> list[Gradients]:
        outputs = _differentiable(output)
        grads = _output_gradients(outputs)
        found: list[Gradients] = []
        for stage in reversed(self._stages):
            leaves = _leaves(self._splitter.model, None if stage.index else inputs)
            before = received[stage.index - 1].tensors if stage.index else {}
            leaves |= {_BOUNDARY + name: tensor for name, tensor in before.items() if tensor.requires_grad}
            gradients = _gradients(outputs, grads, leaves)
            found.append({name: grad for name, grad in gradients.items() if not name.startswith(_BOUNDARY)})
            names = [name for name in before if _BOUNDARY + name in gradients]
            outputs = [sent[stage.index - 1].tensors[name] for name in names]
            received_grads = [gradients[_BOUNDARY + name] for name in names]
            grads = [grad.to(output.device) for grad, output in zip(received_grads, outputs, strict=True)]
        return found[::-1]


def _leaves(model: nn.Module, inputs: Inputs | None) -> dict[str, Tensor]:
    """The parameters that require a gradient, and the inputs that do."""
    named: dict[str, Tensor] = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if inputs is not None:
        found = tensors_in((inputs.args, inputs.kwargs))
        named |= {f"{_INPUT}{index}": tensor for index, tensor in enumerate(found) if tensor.requires_grad}
    return named


def _differentiable(output: Any) -> list[Tensor]:
    """The distinct tensors of an output that require a gradient."""
    return list({id(tensor): tensor for tensor in tensors_in(output) if tensor.requires_grad}.values())


def _output_gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Fixed gradients of outputs, the same for the model and its stages."""
    generator = torch.Generator().manual_seed(_SEED)
    numbers = (torch.randn(output.shape, generator=generator) for output in outputs)
    return [number.to(output.device, output.dtype) for number, output in zip(numbers, outputs, strict=True)]


def _gradients(outputs: Sequence[Tensor], grads: Sequence[Tensor], leaves: dict[str, Tensor]) -> Gradients:
    """The gradients that are not None; the `grad` of the parameters stays as it is."""
    if not outputs or not leaves:
        return {}
    found = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
    return {name: grad.to_dense() for name, grad in zip(leaves, found, strict=True) if grad is not None}


def _sum(by_stage: Sequence[Gradients]) -> Gradients:
    """The sums over stages, from the last to the first, as a backward adds them."""
    total: Gradients = {}
    for gradients in reversed(by_stage):
        for name, gradient in gradients.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total
