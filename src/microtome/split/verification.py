"""Verify that stages compute what the model computes, on its example, as if each ran in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from microtome.engine import Session
from microtome.engine.meta_run import copy_inputs
from microtome.engine.module_state import without_attributes
from microtome.engine.pytree import as_state, map_tensors
from microtome.engine.signals import signal_safe
from microtome.engine.snapshot import restore_afterwards
from microtome.errors import MicrotomeError, Unsupported, describe_error
from microtome.inputs import Inputs
from microtome.results.cuts import Cut
from microtome.split.analysis.analysis import Analysis
from microtome.split.analysis.call_arguments import state_objects_in
from microtome.split.analysis.randomness import devices_of, save_random_state
from microtome.split.boundary.boundary import Boundary
from microtome.split.comparison import Difference, differences, state_differences
from microtome.split.cuts.crossing import ValueLocation
from microtome.split.execution.placeholder import PlaceholderRead
from microtome.split.gradient_comparison import GradientComparison
from microtome.split.stage import Stage
from microtome.split.state.snapshot import digest_of
from microtome.split.state.stage_state import StageState
from microtome.split.state.steps import StepSequence, replace_states

if TYPE_CHECKING:
    from microtome.split.splitter import Splitter

BIT_EQUAL = "bit-equal"

#: How many requests a model with state in its modules is verified on, and how many steps one with a state object.
_REQUESTS, _STEPS = 3, 2
_NO_LIMIT = 1 << 62  # the example is the user's own


class VerificationResult(NamedTuple):
    """The result of comparing the stages with the model.

    Attributes:
        verified: See `Stages.verified`.
        continues: Whether the same stages also compute the next step of a sequence.
        gradients: See `Stages.gradients`.
    """

    verified: str
    continues: bool = False
    gradients: GradientComparison | None = None


class Verification:
    """Compares the stages with the whole model, through bytes.

    The whole model and the head draw from the same random state, and the tail from the state that the head leaves. A
    stateful model is compared over several requests, from the same state.

    Args:
        extra: Values that the model's code turns out to read are added here, for each cut.
    """

    def __init__(
        self, splitter: Splitter, analysis: Analysis, chosen: Sequence[Cut], extra: list[set[ValueLocation]]
    ) -> None:
        self._splitter = splitter
        self._analysis = analysis
        self._chosen = chosen
        self._extra = extra
        self._has_states = bool(splitter.spec.states)
        self._count = _REQUESTS if analysis.is_stateful else _STEPS if self._has_states else 1

    def run(self) -> VerificationResult:
        model, analysis = self._splitter.model, self._analysis
        reset_random = save_random_state(
            devices_of(model, self._splitter.example),
            analysis.generators,
            draws=bool(analysis.draws),
            packages={draw.package for draw in analysis.python_draws},
        )
        with restore_afterwards(model, analysis.written_parameters) as snapshot:

            def reset() -> None:
                snapshot.restore()
                reset_random()

            try:
                with as_state(analysis.state_classes):
                    verified = self._compare(reset)
            finally:
                reset()
        return VerificationResult(verified, continues=self._has_states and self._count > 1)

    def _compare(self, reset: Callable[[], None]) -> str:
        while True:
            reset()
            expected, states = self._run_model()
            reset()
            sequence = _VerifiedSequence(self._splitter, self._chosen)
            outputs: list[Any] = []
            try:
                for output in self._run_stages(sequence):
                    outputs.append(output)
                break
            except Unsupported as error:
                if isinstance(error, PlaceholderRead) and self._add_to_crossing(error, sequence.running):
                    continue  # the model's code reads values that the trace had none of
                if not outputs or not self._has_states:
                    raise
                self._count = 1  # the next step makes other calls, as with attention to an encoder's output
        pairs = zip(outputs, expected, strict=True)
        mismatches = [difference for pair in pairs for difference in differences(*pair)]
        for index, state in enumerate(states):
            mismatches += state_differences(state, [own[index] for own in sequence.states])
        if digest_of(states) != digest_of(sequence.states[0]):
            mismatches.append(Difference("the state", "other shapes, numbers or flags"))
        if not mismatches:
            return BIT_EQUAL
        reset()
        nondeterminism = [_magnitude(difference) for difference in differences(self._run_model()[0][0], expected[0])]
        worst = max(mismatches, key=_magnitude)
        if not nondeterminism or _magnitude(worst) > 10 * max(nondeterminism):
            where = f" at {worst.path}" if worst.path else ""
            raise Unsupported(
                f"the {type(self._splitter.model).__name__} cannot be cut at "
                f"{', '.join(cut.at for cut in self._chosen)}: the stages give{where} {worst.description}. State other "
                "than tensors crosses the cut"
            )
        return f"{worst.description}; two runs of the whole model differ as much"

    def _add_to_crossing(self, error: PlaceholderRead, stage: int) -> bool:
        """Let the value that a stage reads cross the cut before it; False: it does so already, or cannot."""
        location = error.placeholder.location
        if location is None or stage == 0 or location in self._extra[stage - 1]:
            return False
        self._extra[stage - 1].add(location)
        return True

    def _steps(self) -> Iterator[Inputs]:
        """The example once for each step, with new states."""
        splitter = self._splitter
        copies = (copy_inputs(splitter.example, splitter.model) for _ in range(self._count))
        return (splitter.spec.complete(inputs, splitter.model) for inputs in copies)

    def _run_model(self) -> tuple[list[Any], list[Any]]:
        """The outputs of the whole model, and its state afterwards."""
        outputs: list[Any] = []
        states: list[Any] = []
        for inputs in self._steps():
            if not outputs:
                output, states = self._run_first_step(inputs)
                outputs.append(self._detach(output))
                continue
            before = copy_inputs(Inputs(*states)).args
            try:
                outputs.append(self._detach(run_whole(self._splitter.model, _with_states(inputs, states))))
            except Exception:  # noqa: BLE001  the whole model cannot go on, such as with a mask of the example's length
                self._count = len(outputs)
                return outputs, list(before)
        return outputs, states

    def _run_first_step(self, inputs: Inputs) -> tuple[Any, list[Any]]:
        """Run the model as its user calls it: it makes its states itself, and returns them."""
        created = self._splitter.spec.created_states
        names = {id(inputs.kwargs[name]): name for name in created}
        raw = {name: value for name, value in inputs.kwargs.items() if name not in created}
        output = run_whole(self._splitter.model, inputs.with_arguments(inputs.args, raw))
        states = state_objects_in((inputs.args, inputs.kwargs))
        return output, [output[names[id(state)]] if id(state) in names else state for state in states]

    def _run_stages(self, sequence: StepSequence) -> Iterator[Any]:
        """The outputs of the stages."""
        stages = self._splitter.stages(self._chosen, self._extra)
        for inputs in self._steps():
            inputs = _with_states(inputs, sequence.states[0] if sequence.states else [])
            yield self._detach(sequence.run(stages, inputs))

    def _detach(self, output: Any) -> Any:
        """Copy an output where later runs may write to it."""
        return output if self._count == 1 else map_tensors(lambda tensor: tensor.detach().clone(), output)


class _VerifiedSequence(StepSequence):
    """Runs the stages as if each were in a process of its own, and refuses the cut if a tail fails."""

    def __init__(self, splitter: Splitter, chosen: Sequence[Cut]) -> None:
        super().__init__()
        self._splitter = splitter
        self._chosen = chosen

    def run_stage(self, stage: Stage, boundary: Boundary, state: StageState) -> Any:
        model, cut = self._splitter.model, self._chosen[stage.index - 1]
        received = Boundary.from_bytes(boundary.to_bytes(), limit=_NO_LIMIT)
        with refuse_errors(model, cut), hide_attributes(model, _attributes_before(self._splitter, cut)):
            return super().run_stage(stage, received, state)


def run_whole(model: nn.Module, inputs: Inputs) -> Any:
    """Run a whole model as its stages run, in a session: compiled code runs eagerly, since its last bits differ."""
    with Session(model, at=[model], fast_paths=True, other_threads="ignore", backward=False):
        return inputs.run(model)


def _attributes_before(splitter: Splitter, cut: Cut) -> dict[str, set[str]]:
    """The attributes that calls before a cut set on their modules, by path."""
    attributes: dict[str, set[str]] = {}
    analysis = splitter.analysis
    if analysis.mutates_attributes:
        for level in splitter.crossings([cut], [()])[0].levels:
            for call in (inner for skipped in level.skipped for inner in analysis.trace.below(skipped)):
                names = analysis.call_structures[call.index].mutated_attributes
                attributes.setdefault(call.path, set()).update(names)
    return attributes


def _with_states(inputs: Inputs, states: Sequence[Any]) -> Inputs:
    """The same inputs with the states of an earlier step; without states, the inputs themselves."""
    if not states:
        return inputs
    others = state_objects_in((inputs.args, inputs.kwargs))
    args, kwargs = replace_states((inputs.args, inputs.kwargs), others, states)
    return inputs.with_arguments(args, kwargs)


def _magnitude(difference: Difference) -> float:
    return float("inf") if difference.largest is None else difference.largest


@contextmanager
def refuse_errors(model: nn.Module, cut: Cut) -> Iterator[None]:
    """Turn an error of the model's own code in a tail into a refusal, since the whole model ran on the same example."""
    try:
        yield
    except MicrotomeError:
        raise
    except Exception as error:
        raise Unsupported(
            f"the {type(model).__name__} cannot be cut at {cut.at!r}: its code raised {describe_error(error)} in the "
            "tail, and not in a run of the whole model. It reads state that crosses in no tensor: cut before it is "
            "set, or after it is read"
        ) from error


@signal_safe
def hide_attributes(model: nn.Module, attributes: dict[str, set[str]]) -> Iterator[None]:
    """Remove the attributes that calls of the head set on their modules, which a tail in another process lacks."""
    modules = [(model.get_submodule(path), names) for path, names in attributes.items()]
    try:
        with without_attributes(modules):
            yield
    except AttributeError as error:
        for module, names in modules:
            if error.obj is module and error.name in names:
                raise Unsupported(
                    f"the tail reads attribute {error.name!r} of a {type(module).__name__}, which a call in the head "
                    "sets: in another process it is missing, or of another run. Return it from the call, or cut before "
                    "the call"
                ) from error
        raise
