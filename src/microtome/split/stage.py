"""A stage of a split model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx, nn

from microtome.engine import Probe, ReplaceOp, Session, Skip, Stop, Stopped
from microtome.engine.module_state import copy_attributes, restore_attributes
from microtome.engine.pytree import as_state, tensors_in
from microtome.engine.selectors import named_modules
from microtome.engine.signals import signal_safe
from microtome.errors import BadBoundary, BadInputs, MicrotomeError, Unsupported
from microtome.files.reading import File
from microtome.inputs import Inputs
from microtome.split.analysis.call_arguments import state_objects_in
from microtome.split.analysis.structure_spec import PLAIN, SplitSpec, check_structure
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import INPUT_SHAPES
from microtome.split.execution.argument_reader import FlatInputs, InputReader
from microtome.split.execution.placeholder import Placeholder
from microtome.split.execution.schedule import Schedule
from microtome.split.execution.stage_run import DrawingStageRun, StageRun
from microtome.split.modes import ModuleModes
from microtome.split.state.stage_state import StageState
from microtome.split.weights import tensor_at

if TYPE_CHECKING:
    from microtome.split.graph.derived_facts import DerivedFacts
    from microtome.split.graph.exported_stage import ExportedStage
    from microtome.split.pipelining.own_weights import Holders
    from microtome.split.pipelining.stage_module import StageModule
    from microtome.split.variants import StageVariants

#: The most shapes of inputs whose facts are kept.
_MAX_SHAPES = 1000


class Stage:
    """The part of a model between two cuts; the first stage begins with the inputs, the last ends with the output.

    The first stage takes the model's arguments and returns a `Boundary`; the others take a boundary. The last returns
    the model's output. Modules of other stages do not run.

    Attributes:
        index: The number of the stage, from 0.
        model: The whole model.
        begins: What happens before the cut where it begins; None for the first stage.
        ends: What happens before the cut where it ends; None for the last stage.
        fingerprint: The fingerprint of the model; boundaries with another one are refused.
        spec: The structures of the model's arguments and output.
        state: A description of the state that the model carries between runs; None: it has none.
        example: The inputs that the model was split on.
        last_module: The module at whose exit the stage ends; None for the last stage.
        grad: Whether what crosses keeps its gradient.
        has_weights_alone: Whether the model has the weights of this stage alone.
        holders: With `grad`, the stages that hold each parameter and buffer; None: unknown.
        verified: Of a compiled stage, how its outputs differ from those of the stage; None: it is not compiled.
        variants: The same cuts for other inputs, of a stage that was loaded from a folder.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        begins: Schedule | None,
        ends: Schedule | None,
        spec: SplitSpec,
        parameters: Iterable[str],
        fingerprint: str,
        state: str | None = None,
        example: Inputs | None = None,
        *,
        grad: bool = False,
    ) -> None:
        self.model = model
        self.grad = grad
        self.index = index
        self.fingerprint = fingerprint
        self.begins = begins
        self.ends = ends
        self.spec = spec
        self.state = state
        self.example = example
        self.holders: Holders | None = None
        self.has_weights_alone = False
        self.verified: str | None = None
        self.variants: StageVariants | None = None
        self._modes = ModuleModes(model)
        self._parameters = tuple(parameters)
        self._idle: list[tuple[Session, StageRun]] = []
        self._input_reader = InputReader()
        self._derived: dict[Any, DerivedFacts] = {}
        modules = dict(named_modules(model))
        schedules = [schedule for schedule in (begins, ends) if schedule is not None]
        self._observed_modules = [module for schedule in schedules for module in self.modules_of(schedule)]
        self._skipped_modules: list[nn.Module] = []
        self._enclosing_modules: list[nn.Module] = []
        if begins is not None:
            self._skipped_modules = [modules[path] for path in dict.fromkeys(call.path for call in begins.skipped)]
            self._enclosing_modules = [modules[path] for path in begins.enclosing_paths]
        self.last_module = None if ends is None else modules[ends.levels[-1].skipped[-1].path]

    @property
    def begins_at(self) -> str | None:
        """The address of the cut where the stage begins; None for the first stage."""
        return None if self.begins is None else self.begins.at

    @property
    def ends_at(self) -> str | None:
        """The address of the cut where the stage ends; None for the last stage."""
        return None if self.ends is None else self.ends.at

    @property
    def glue_state_paths(self) -> frozenset[Any]:
        """The parts of state objects that code between calls changes before the stage, and that it changes again."""
        return frozenset() if self.begins is None else self.begins.glue_state_paths

    @property
    def draws_random_numbers(self) -> bool:
        """Whether code between calls before a cut draws random numbers."""
        return any(schedule is not None and schedule.draws for schedule in (self.begins, self.ends))

    def modules_of(self, schedule: Schedule) -> list[nn.Module]:
        """The modules of the calls of a schedule."""
        modules = dict(named_modules(self.model))
        return [modules[path] for path in schedule.paths]

    def graph(self, *, dynamic: bool = True) -> fx.GraphModule:
        """Return the stage as a graph of operators, which needs neither microtome nor the model's code.

        It has only the stage's own weights, under their names in the model. It takes the tensors of the boundary before
        the stage, or those among the model's arguments, by position, and returns those after it in a dict by name.
        `graph.meta` has the names of the inputs and outputs, the shapes that it accepts, which sizes are fixed to those
        of the example, with the reason. `"verified"` is the largest difference from the stage on the example.
        Sizes are also fixed where a graph for others does not compute the example bit for bit, since these lead to
        other kernels. It checks the conditions on sizes in `graph.meta["conditions"]`, not fixed sizes and dtypes.

        Args:
            dynamic: Accept other batch sizes and lengths, where the model's code allows it.

        Raises:
            Unsupported: The control flow depends on values; the message names the line. Or the outputs on the example
                differ by more than rounding.

        >>> import microtome as mt
        >>> from microtome import zoo
        >>> model, x = zoo.build("tiny-resnet")
        >>> head, tail = mt.split(model, x, at="layer1.0.conv1")
        >>> graph = head.graph()
        >>> graph.meta["shapes"], sorted(graph.state_dict())[:2]
        ('x[s0, 3, s1, s2]', ['layer1.0.conv1.weight', 'stem.0.weight'])
        >>> boundary = graph(torch.ones(3, 3, 40, 48))
        >>> boundary["stem"].equal(head(torch.ones(3, 3, 40, 48)).tensors["stem"])
        True
        """
        from microtome.split.graph.stage_graph import capture_exact  # imports sympy

        return capture_exact(self, dynamic=dynamic).module

    def compile(self, *, backend: str = "inductor", dynamic: bool = True, example: Any = None, **options: Any) -> Stage:
        """Return the stage with its graph compiled: faster, with the same boundaries.

        `verified` of the result says how its outputs on the example differ from those of this stage: compilers round
        differently.

        Args:
            backend: The backend of `torch.compile`; `options` are other arguments of it.
            dynamic: As in `graph`.
            example: The boundary, or the `Inputs`, to verify it on; None: those of the example that the model was split
                on, if all weights before the stage are here.

        Raises:
            Unsupported: The stage cannot be captured or compiled, or returns other outputs.

        >>> import microtome as mt
        >>> from microtome import zoo
        >>> model, x = zoo.build("tiny-resnet")
        >>> head, tail = mt.split(model, x, at="layer1")
        >>> compiled = tail.compile(backend="eager")
        >>> compiled.verified, compiled(head(x)).equal(model(x))
        ('bit-equal', True)
        """
        from microtome.split.graph.compiled_stage import compile_stage

        return compile_stage(self, backend, dynamic, example, options)

    def export(self, file: File, *, dynamic: bool = True, example: Any = None, int8: bool = False) -> ExportedStage:
        """Write the stage as a program for another runtime, which needs neither microtome nor the model's code.

        The file is run on the example and compared with the stage before it is written; `verified` of the result is the
        largest difference. Its metadata name the model, the cuts, the inputs and the outputs.

        Args:
            file: A path that ends in `.pt2` (torch.export), `.onnx` (needs `microtome[onnx]`) or `.pte` (ExecuTorch, of
                the shapes of the example; needs `microtome[executorch]`).
            dynamic: As in `graph`.
            example: As in `compile`.
            int8: Quantize weights and activations to 8 bits, of ONNX. `verified` says how far the outputs are from the
                stage's; more than 10 % of the largest number of an output is an error.

        Raises:
            Unsupported: The stage cannot be captured or exported, or the file computes other outputs.
        """
        from microtome.split.graph.export import export_stage

        return export_stage(self, file, dynamic=dynamic, example=example, int8=int8)

    def time(self, example: Any = None, *, repeat: int = 30) -> float:
        """Measure the stage as it is, and return the median seconds of a run, for `stages` of `microtome.plan`.

        Args:
            example: As in `compile`.
            repeat: The number of runs; fewer if they take longer than five seconds.

        >>> import microtome as mt
        >>> from microtome import zoo
        >>> head, tail = mt.split(*zoo.build("tiny-resnet"), at="layer1")
        >>> 0 < head.time(repeat=3) < 1
        True
        """
        from microtome.split.graph.stage_example import example_of
        from microtome.split.stage_timing import time_runs

        example = example_of(self) if example is None else example
        if example is None:
            raise Unsupported("the weights before the stage are not here: pass the boundary of an example as example=")
        return time_runs(self, example, repeat)

    def as_module(self, example: Any = None, *, tied: Literal["sum"] | None = None) -> StageModule:
        """Return the stage of a model that was split with `grad=True` as a module for `torch.distributed.pipelining`.

        The module takes and returns tensors by position. Its parameters and buffers are the stage's own, shared with
        the model, under their names there. `shapes()` of it are arguments of `PipelineStage`.

        Args:
            example: Inputs of the model with the shapes of a micro-batch; None: those that the model was split on.
            tied: `"sum"`: allow weights that several stages train; call `mt.sum_tied_gradients` before each step.

        Raises:
            Unsupported: Several stages train a weight, or what crosses depends on values.

        >>> import microtome as mt
        >>> from microtome import zoo
        >>> model, x = zoo.build("tiny-vit")
        >>> head, tail = mt.split(model.train(), x, at="blocks.1", grad=True)
        >>> first, second = head.as_module(), tail.as_module()
        >>> second(first(x)[0]).equal(model(x))
        True
        >>> list(second.state_dict())[:2]
        ['blocks.2.norm1.weight', 'blocks.2.norm1.bias']
        """
        from microtome.split.pipelining.stage_module import make_module  # imports sympy

        return make_module(self, example, tied)

    def on(self, model: nn.Module) -> Stage:
        """The same stage of a copy of the model."""
        return Stage(
            model,
            self.index,
            self.begins,
            self.ends,
            self.spec,
            self._parameters,
            self.fingerprint,
            self.state,
            self.example,
            grad=self.grad,
        )

    def parameters_needed(self) -> list[str]:
        """The names of the parameters and buffers that the stage reads."""
        return list(self._parameters)

    @property
    def device(self) -> torch.device | None:
        """The device of the stage's first weight, or else of the model's; None: unknown."""
        own = (tensor_at(self.model, name) for name in self._parameters)
        for tensor in chain(own, self.model.parameters(), self.model.buffers()):
            if tensor is not None and not tensor.is_meta:
                return tensor.device
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        probes: Iterable[Probe] = (),
        *,
        state: StageState | None = None,
        release: bool = False,
    ) -> Any:
        """Run the stage, observed by probes.

        Args:
            state: The state of the stage in a sequence of steps, of which this is one, whose caller has checked the
                modes; None: it begins and ends here.
            release: Drop each tensor from the boundary after its last use, so that memory is free as early as in a run
                of the whole model; the boundary is empty afterwards.
        """
        boundary = self._check_boundary(args, kwargs)
        if boundary is not None:
            boundary = self.complete(boundary)
        if state is None:
            self.check_modes()
        # A session takes longer to make than to open, so it is reused; several threads may run the stage at once.
        probes = tuple(probes)
        session, run = (None if probes else self._idle_session()) or self._make_session(probes)
        with as_state(self.spec.state_classes), self._cleanup(session, run, reuse=not probes):
            if boundary is None:
                inputs = self.spec.complete(Inputs(*args, **kwargs), self.model)
                run.begin(state or StageState(state_objects_in((inputs.args, inputs.kwargs))))
            else:
                run.begin(state or StageState(self.spec.new_states()))
                inputs = run.receive(boundary, self.device, self.spec.inputs, release=release)
            if self.ends is not None:
                flat = self.flatten_inputs(inputs)
                check_structure("arguments of the head", self.spec.inputs, flat.spec, is_call=True)
                run.record_inputs(flat)
            try:
                with session:
                    return self._run(run, inputs)
            except (BadBoundary, Unsupported) as error:
                if boundary is not None and any(facts.record is boundary.record for facts in self._derived.values()):
                    raise Unsupported(
                        f"the facts of the boundary, derived from the shapes of the inputs, are not those of this run: "
                        f"{error}. Code that reads values before the cut takes another branch, as models of "
                        "transformers do for an attention_mask without padding: leave it out, or send the boundary of "
                        "a stage"
                    ) from error
                raise

    def check_modes(self) -> None:
        """Raise if modules are in another mode, of training or evaluation, than when the model was split."""
        self._modes.check()

    def before(self) -> Stage:
        """The stages before this one, as one."""
        return Stage(
            self.model, 0, None, self.begins, self.spec, (), self.fingerprint, self.state, self.example, grad=self.grad
        )

    def complete(self, boundary: Boundary) -> Boundary:
        """Return a boundary with its facts, if it has the shapes of the model's inputs instead.

        New shapes cost a run of the stages before this one on fake tensors, during which no other thread may run the
        model.

        Raises:
            BadBoundary: The shapes or the tensors are not those of the cut.
            Unsupported: The facts depend on more than shapes.
        """
        if not self.lacks_facts(boundary):
            return boundary
        from microtome.split.graph.derived_facts import derive_facts, input_shapes_of  # imports sympy

        shapes = input_shapes_of(boundary, self)
        facts = self._derived.get(shapes)
        if facts is None:
            facts = derive_facts(self, shapes)
            if len(self._derived) < _MAX_SHAPES:
                self._derived[shapes] = facts
        return facts.complete(boundary)

    def knows_facts(self, boundary: Boundary) -> bool:
        """Whether `complete` knows the facts for these shapes, so that it needs no run."""
        from microtome.split.graph.derived_facts import input_shapes_of

        return input_shapes_of(boundary, self) in self._derived

    @staticmethod
    def lacks_facts(boundary: Boundary) -> bool:
        """Whether a boundary has the shapes of the model's inputs in place of facts."""
        return boundary.record is None and boundary.facts.keys() == {INPUT_SHAPES}

    @signal_safe
    def _cleanup(self, session: Session, run: StageRun, *, reuse: bool) -> Iterator[None]:
        """Afterwards, remove placeholders from the modules that enclose the cut, and keep the session for reuse."""
        attributes_before = [(module, copy_attributes(module)) for module in self._enclosing_modules]
        try:
            yield
        finally:
            run.reset()
            for module, attributes in attributes_before:
                restore_attributes(module, attributes, where=_has_placeholders)
            if reuse:
                self._idle.append((session, run))

    def flatten_inputs(self, inputs: Inputs) -> FlatInputs:
        """Flatten the arguments of the model."""
        return self._input_reader.read(inputs)

    def _run(self, run: StageRun, inputs: Inputs) -> Any:
        try:
            output = inputs.run(self.model)
        except Stopped as stopped:
            if self.ends is None or not run.is_complete(stopped.call):
                raise
            return run.boundary(self.fingerprint)
        except (RuntimeError, NotImplementedError) as error:
            missing = self._missing()
            if missing and not isinstance(error, MicrotomeError):
                raise Unsupported(
                    f"stage {self.index} cannot run here: {len(missing)} of its weights are not loaded, such as "
                    f"{missing[0]!r}. Load them with mt.load_stage(…, {self.index}), or split without `load`"
                ) from error
            raise
        if self.ends is not None:
            raise Unsupported(
                f"the model returned before the cut at {self.ends.at!r}: its control flow depends on its inputs"
            )
        return run.check_output(output)

    def _idle_session(self) -> tuple[Session, StageRun] | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _make_session(self, probes: tuple[Probe, ...] = ()) -> tuple[Session, StageRun]:
        interventions: list[Any] = []
        run = StageRun(self.begins, self.ends, grad=self.grad)
        if self.draws_random_numbers:
            run = drawing = DrawingStageRun(self.begins, self.ends, grad=self.grad)
            interventions.append(ReplaceOp(drawing.draw))
        if self._skipped_modules:
            interventions.append(Skip(self._skipped_modules, run.output, when=run.is_skipped))
        if self.last_module is not None:
            interventions.append(Stop(self.last_module, when=run.is_complete))
        # In one session with the run, or the probes would not see the exit of the call at which it stops.
        at = None if probes else self._observed_modules
        session = Session(
            self.model, [run, *probes], interventions, at=at, fast_paths=True, other_threads="ignore", backward=False
        )
        return session, run

    def _missing(self) -> list[str]:
        tensors = {name: tensor_at(self.model, name) for name in self._parameters}
        return [name for name, tensor in tensors.items() if tensor is None or tensor.is_meta]

    def _check_boundary(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Boundary | None:
        if self.begins is None:
            if any(isinstance(value, Boundary) for value in (*args, *kwargs.values())):
                raise BadInputs("the head takes the inputs of the model, got a Boundary: pass it to the next stage")
            return None
        if len(args) != 1 or kwargs or not isinstance(args[0], Boundary):
            got = ", ".join(type(value).__name__ for value in (*args, *kwargs.values())) or "nothing"
            is_data = isinstance(args[0], bytes | bytearray | memoryview) if args else False
            hint = ": decode it with mt.Boundary.from_bytes" if is_data else ""
            raise BadInputs(
                f"stage {self.index} takes the output of the stage before it: expected one Boundary, got {got}{hint}"
            )
        boundary = args[0]
        if boundary.at != self.begins.at:
            raise BadBoundary(f"expected a boundary of the cut at {self.begins.at!r}, got one of {boundary.at!r}")
        if boundary.fingerprint != self.fingerprint:
            raise BadBoundary(
                f"the boundary is of another model: expected fingerprint {self.fingerprint}, got "
                f"{boundary.fingerprint}. Split the same model, with the same weights, on both sides"
            )
        return boundary

    def __repr__(self) -> str:
        start = "the inputs" if self.begins is None else repr(self.begins.at)
        end = "the output" if self.ends is None else repr(self.ends.at)
        return f"<Stage {self.index} of {type(self.model).__name__}, from {start} to {end}>"


def _has_placeholders(value: Any) -> bool:
    cls = type(value)
    items = value.values() if cls is dict else value if cls in (list, tuple, set) else (value,)
    if PLAIN.issuperset(map(type, items)):  # as nearly always
        return False
    return any(isinstance(tensor, Placeholder) for tensor in tensors_in(value))
