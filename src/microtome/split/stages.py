"""The stages of a split model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from torch import nn

from microtome.engine.argument_names import named_arguments
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.session import keep_patched
from microtome.errors import BadQuery, NoMatch, Unsupported
from microtome.files.reading import File
from microtome.inputs import Inputs
from microtome.results.cuts import Cut, Cuts
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.codecs import is_lossless
from microtome.split.checkpoint import save_stages
from microtome.split.comparison import differences
from microtome.split.cuts.crossing import ValueLocation
from microtome.split.description import SplitDescription, describe_inputs
from microtome.split.pipelining.own_weights import find_holders
from microtome.split.stage import Stage
from microtome.split.state.contents import fill_placeholders
from microtome.split.verification import BIT_EQUAL, VerificationResult, run_whole
from microtome.split.weights import copy_with_weights

if TYPE_CHECKING:
    from microtome.split.session import StageSession
    from microtome.split.splitter import Splitter
    from microtome.split.variants import StageVariants, Variant


class CodecTrial(NamedTuple):
    """The effect of a codec on the example.

    Attributes:
        nbytes: The bytes sent, over all cuts.
        raw_nbytes: The same without a codec.
        largest: The largest absolute difference in the output.
        relative: The same over the largest absolute number in the output.
    """

    codec: str
    nbytes: int
    raw_nbytes: int
    largest: float
    relative: float


class Stages(Sequence[Stage]):
    """The stages of a split model, in order.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> head, tail = mt.split(model, x, at="layer1.0.conv1")
    >>> boundary = head(x)
    >>> list(boundary.tensors)
    ['stem', 'layer1.0.conv1']
    >>> tail(boundary).equal(model(x))
    True

    Attributes:
        at: The addresses of the cuts between them.
        fingerprint: A digest of the model's structure and weights.
        continues: Whether these stages also compute the next steps of a sequence.
        verified: `"bit-equal"` if the output of the stages on the example equals that of the model to the last bit;
            otherwise the largest difference, or why that is not known.
        gradients: With `grad=True`, the comparison of the gradients on the example; None: they are not compared.
    """

    def __init__(
        self,
        splitter: Splitter,
        chosen: Sequence[Cut],
        extra: Sequence[set[ValueLocation]],
        result: VerificationResult,
    ) -> None:
        self._splitter = splitter
        self._chosen = chosen
        self._extra = extra
        self.at = tuple(cut.at for cut in chosen)
        self.fingerprint = splitter.fingerprint
        self.verified = result.verified
        self.gradients = result.gradients
        self._stages = self._make(None)
        self._variants: StageVariants | None = None
        self.continues = result.continues

    def __len__(self) -> int:
        return len(self._stages)

    @overload
    def __getitem__(self, index: int) -> Stage: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Stage, ...]: ...
    def __getitem__(self, index: int | slice) -> Stage | tuple[Stage, ...]:
        if isinstance(index, str):
            raise BadQuery(f"expected the number of a stage from 0 to {len(self) - 1}, got {index!r}")
        return self._stages[index]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages, one after the other."""
        with keep_patched():
            value = self._stages[0](*args, **kwargs)
            for stage in self._stages[1:]:
                value = stage.run((value,), {}, release=True)
        return value

    def session(self) -> StageSession:
        """Begin a sequence of steps, in which each stage keeps its own part of the state, such as a KV cache."""
        from microtome.split.session import StageSession  # which imports much

        return StageSession(self.variants)

    @property
    def cuts(self) -> Cuts:
        """All cuts of the model, which are listed when they are first read."""
        return self._splitter.cuts

    @property
    def example(self) -> Inputs:
        """The inputs that the model was split on."""
        return self._splitter.example

    @property
    def variants(self) -> StageVariants:
        """The same cuts for inputs of other structures."""
        from microtome.split.variants import StageVariants

        if self._variants is None:
            self._variants = StageVariants([self._as_variant(None)], self._make_variant)
        return self._variants

    def _as_variant(self, first_kind: str | None) -> Variant:
        from microtome.split.variants import Variant

        return Variant(self, first_kind, self.continues, self.describe)

    def _make_variant(self, inputs: Inputs, first_kind: str | None) -> Variant:
        """Analyze the model on inputs of another structure."""
        from microtome.split.splitter import Splitter

        args, kwargs = map_tensors(lambda tensor: tensor, (inputs.args, inputs.kwargs), fill_placeholders)
        model = self._stages[0].model
        try:
            stages = Splitter(
                model,
                Inputs(*args, **kwargs),
                self.fingerprint,
                self._splitter.state_arguments,
                grad=self._splitter.grad,
            ).at(self.at)
        except NoMatch as error:
            names = ", ".join(named_arguments(model, inputs))
            raise Unsupported(
                f"the model cannot be cut at {', '.join(self.at)} when it is called with {names}: {error}. If the cut "
                "is in an encoder, `generate` runs it apart from these steps: cut in the decoder"
            ) from error
        return stages._as_variant(first_kind)

    def describe(self) -> SplitDescription:
        """Describe the split for a process that makes the same stages."""
        splitter = self._splitter
        sent = splitter.inputs_sent(self._chosen, self._extra)
        inputs = describe_inputs(splitter.model, splitter.example, splitter.spec.state_classes, sent)
        locations = splitter.export_locations(self._chosen, self._extra)
        state = splitter.state_arguments
        return SplitDescription(list(self.at), inputs, locations, self.continues, state=state)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens by the loop of transformers; the arguments are those of the model's own `generate`."""
        from microtome.split.session import generate

        return generate(self._stages[0].model, self.session(), args, kwargs)

    def try_codec(self, codec: str) -> CodecTrial:
        """Run the example with boundaries encoded by a codec, and compare the output with the model's."""
        example = self._splitter.example
        nbytes = raw_nbytes = 0
        value = self._stages[0](*example.args, **example.kwargs)
        for stage in self._stages[1:]:
            data = value.to_bytes(codec)
            nbytes, raw_nbytes = nbytes + len(data), raw_nbytes + value.nbytes
            value = stage(Boundary.from_bytes(data))
        expected = run_whole(self._splitter.model, example)
        changes = list(differences(value, expected))
        if any(difference.largest is None for difference in changes):
            where = f" at {changes[0].path}" if changes[0].path else ""
            raise Unsupported(f"with {codec} the structure of the output changes{where}: {changes[0].description}")
        largest = max((difference.largest or 0.0 for difference in changes), default=0.0)
        if largest and is_lossless(codec) and self.verified == BIT_EQUAL:
            raise Unsupported(f"the output changed by {largest:.3g} with {codec}, which is lossless: please report it")
        return CodecTrial(codec, nbytes, raw_nbytes, largest, largest / (_max_abs(expected) or 1.0))

    def keeping(self, index: int) -> Stages:
        """The same stages of a copy of the model that has the weights of one stage only; the others are on meta."""
        stage = self._stages[index]
        held = [name for name, stages in (stage.holders or {}).items() if stage.index in stages]
        kept = self._with_model(copy_with_weights(self._splitter.model, [*stage.parameters_needed(), *held]))
        kept[index].has_weights_alone = True
        return kept

    def without_weights(self) -> Stages:
        """The same stages of a copy of the model that has all weights on meta."""
        return self._with_model(copy_with_weights(self._splitter.model, ()))

    def _make(self, model: nn.Module | None) -> tuple[Stage, ...]:
        """The stages of a copy of the model; None: of the model itself."""
        stages = tuple(self._splitter.stages(self._chosen, self._extra, model))
        if self._splitter.grad:
            needed = [stage.parameters_needed() for stage in stages]
            trained = None if self.gradients is None else self.gradients.trained
            for stage in stages:
                stage.holders = find_holders(stage.model, needed, trained)
        return stages

    def _with_model(self, model: nn.Module) -> Stages:
        other = copy.copy(self)
        other._variants = None
        other._stages = self._make(model)
        return other

    def save(self, folder: File) -> None:
        """Write `stage0.safetensors`, `stage1.safetensors`, … and `plan.json`, which `mt.load_stage` reads.

        The stages for other structures of inputs that `generate` and sessions have needed so far are saved, too.
        """
        save_stages(folder, self._stages, self.variants.describe(), self.fingerprint)

    def __repr__(self) -> str:
        name = type(self._stages[0].model).__name__
        return f"<Stages of {name}, cut at {', '.join(map(repr, self.at))}: {self.verified}>"


def _max_abs(output: Any) -> float:
    numbers = (tensor.detach() for tensor in tensors_in(output) if tensor.is_floating_point() or tensor.is_complex())
    return max((float(tensor.abs().max()) for tensor in numbers if tensor.numel()), default=0.0)
