"""The face of tracr's split models: change the import, keep the code.

The layers of a model are numbered in the order they run. An edge runs it up to one of them, a cloud goes on from there,
and together they give what the model gives, bit for bit; where that cannot be, they say why.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Self

import torch
from torch import Tensor, nn

from microtome.engine import Call, Probe, Session
from microtome.engine.select import check_model
from microtome.engine.structure import map_tensors
from microtome.errors import BadBoundary, BadFile, BadInputs, BadQuery, NoMatch, Unsupported, said
from microtome.inputs import Inputs, device_of
from microtome.profile import Profile, Row, profile
from microtome.split.boundary import Boundary
from microtome.split.stages import Splitter, Stages
from microtome.zoo.packages import need
from microtome.zoo.resolver import resolve

__all__ = ["EarlyOutput", "HookExitException", "WrappedModel"]


class HookExitException(Exception):
    """Ends a run at once: where a hook or a layer of yours raises it, `forward` returns `EarlyOutput(result)`."""

    def __init__(self, result: Any) -> None:
        super().__init__("the run was ended by a hook")
        self.result = result


@dataclass(frozen=True, eq=False)
class EarlyOutput:
    """What an edge gives a cloud; called, the banked outputs: those of the layer where it stopped and of `save_layers`.

    Attributes:
        inner_dict: The banked outputs, by the number of the layer.
        boundary: What the layers after it need, which may be more than its output; None: it is not known, and no cloud
            can go on from here.
        layer: The number of the layer where the run stopped.
    """

    inner_dict: Any
    boundary: Boundary | None = None
    layer: int | None = None

    def __call__(self) -> Any:
        return self.inner_dict

    @property
    def shape(self) -> torch.Size | None:
        """The shape, if one tensor is held rather than a dict."""
        return getattr(self.inner_dict, "shape", None)

    def to_bytes(self, codec: str = "raw") -> bytes:
        """What a cloud needs, as bytes; see `Boundary.to_bytes`."""
        boundary = self.known_boundary()
        return replace(boundary, facts={**boundary.facts, "layer": self.layer}).to_bytes(codec)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, limit: int | str = "4GB") -> Self:
        """What `to_bytes` made bytes of. Of the banked outputs, it holds that of the last layer if the cloud needs it.

        Args:
            limit: The most memory that reading may take; see `Boundary.from_bytes`.
        """
        boundary = Boundary.from_bytes(data, limit=limit)
        layer = boundary.facts.get("layer")
        if type(layer) is not int:
            raise BadBoundary("the bytes are a boundary, but not of an EarlyOutput: they do not say which layer it is")
        own = boundary.tensors.get(boundary.at)
        return cls({} if own is None else {layer: own}, boundary, layer)

    def known_boundary(self) -> Boundary:
        if self.boundary is None:
            raise BadInputs(
                "this EarlyOutput holds outputs of layers alone, which may not be all that the layers after them need: "
                "take the one that the edge returned, or EarlyOutput.from_bytes of its bytes"
            )
        return self.boundary


class WrappedModel(nn.Module):
    """A model whose run can be stopped after any of its layers, and gone on with elsewhere.

    Args:
        config: The model; or tracr's configuration, a dict or a YAML file, whose sections `default` and `model` are
            read.
        inputs: An example of what the model is given; a configuration has an `input_size` in its place.
        master_dict: Where runs that have an `inference_id` are written.
        depth: How deep in the tree of modules the layers lie. A module above that has no modules running inside it is
            a layer too.
        save_layers: The layers whose outputs are kept in `banked_output`.
        warmup_iterations: How many passes to make at once.
        collect_metrics: What `get_layer_metrics` measures: True for time, energy and load; or some of these by name.

    What is None is taken from the configuration, where there is one.

    Attributes:
        layers: The addresses of the layers, in the order they run.
        banked_output: The outputs of the last run that were kept, by the number of the layer.

    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> wrapped = WrappedModel(model, x)
    >>> wrapped.layers[3:6]
    ('layer1.0', 'layer1.1', 'layer2.0')
    >>> early = wrapped(x, end=4)
    >>> list(early())
    [4]
    >>> wrapped(early, start=4).equal(model(x))
    True
    """

    def __init__(
        self,
        config: nn.Module | Mapping[str, Any] | str | Path,
        inputs: Any = None,
        *,
        master_dict: MutableMapping[str, Any] | None = None,
        depth: int | None = None,
        save_layers: Collection[int] | None = None,
        warmup_iterations: int | None = None,
        collect_metrics: bool | Collection[str] | None = None,
    ) -> None:
        super().__init__()
        known = _DEFAULTS if isinstance(config, nn.Module) else _DEFAULTS | _configured(config)
        given = {
            "model": config if isinstance(config, nn.Module) else None,
            "inputs": inputs,
            "depth": depth,
            "save_layers": save_layers,
            "warmup_iterations": warmup_iterations,
            "collect_metrics": collect_metrics,
        }
        known = known | {name: value for name, value in given.items() if value is not None}
        if "inputs" not in known:
            raise BadInputs('say what the model is given: WrappedModel(model, x), or inputs="1x3x224x224"')
        self.model = check_model(known["model"])
        self.inputs = _copied(known["inputs"], device_of(self.model))
        self.depth = _number("depth", known["depth"], 1)
        self.save_layers: Collection[int] = known["save_layers"]
        self.warmup_iterations = _number("warmup_iterations", known["warmup_iterations"], 0)
        self.master_dict = master_dict
        self.banked_output: dict[int, Any] = {}
        self._measure = _quantities(known["collect_metrics"])
        self._profile: Profile = profile(self.model, self.inputs)
        self._is_measured = not self._measure
        self.layers = tuple(row.address for row in _layers(self._profile, self._profile.total, self.depth))
        self._ran = range(self.layer_count)
        self._splitter: Splitter | None = None
        self._stages: dict[int, Stages] = {}
        self._parts: tuple[nn.Module, ...] = ()  # of the model, as it was looked at
        self._state: Any = None
        self.warmup()

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    def forward(
        self,
        x: Any,
        inference_id: str | None = None,
        start: int = 0,
        end: float = math.inf,
        log: bool = True,
    ) -> Any:
        """Run the model, or the layers up to one, or those after one.

        Args:
            x: What the model is given; a tuple for several arguments, a dict for those by name. In a cloud, the
                `EarlyOutput` of the edge.
            inference_id: Under which the run is written to `master_dict`.
            start: In a cloud, the layer after which the edge stopped.
            end: In an edge, the layer to stop after. From `layer_count` on, the whole model runs.
            log: Whether `get_layer_metrics` and `master_dict` are to tell of this run.

        Returns:
            What the model returns; of an edge, an `EarlyOutput`.
        """
        first = _number("start", start, 0)
        last = self.layer_count if end == math.inf else min(_number("end", end, 0), self.layer_count)
        self.banked_output = {}
        try:
            with self._gradients():
                cut = self._cut(x, first, last)
                stages = None if cut is None else self._split(cut)
                began = self._clock_ns()
                output = self._run(x, cut, stages)
                elapsed_ns = self._clock_ns() - began
        except HookExitException as stopped:
            return EarlyOutput(stopped.result)
        if log:
            self._ran = range(first + 1 if isinstance(x, EarlyOutput) else 0, min(last + 1, self.layer_count))
            self._write(inference_id, elapsed_ns)
        return output

    def warmup(self, iterations: int | None = None) -> None:
        """Run the model on the example, in eval mode; None: `warmup_iterations` times."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                for _ in range(self.warmup_iterations if iterations is None else _number("iterations", iterations, 0)):
                    self.inputs.run(self.model)
        finally:
            for module, training in modes:
                module.training = training

    @property
    def profile(self) -> Profile:
        """What `get_layer_metrics` takes its numbers from; `unavailable` says why some are None."""
        if not self._is_measured:
            rows = [self._profile[_exact(address)] for address in self.layers]
            deepest = max((row.depth for row in rows), default=0)
            with self._gradients():
                self._profile = profile(self.model, self._example(), measure=self._measure, depth=deepest)
            self._is_measured = True
        return self._profile

    def get_layer_metrics(self) -> dict[int, dict[str, Any]]:
        """What is known of each layer of the last run, by its number; None for what was not measured.

        It is measured on the example, in runs of their own, when it is first asked for.
        """
        return _metrics(self.profile, self.layers, self._ran)

    # -- the parts of a run --------------------------------------------------------------------------------------------

    def _cut(self, x: Any, start: int, end: int) -> int | None:
        """The layer where the run begins or ends; None: all of it runs."""
        if not isinstance(x, EarlyOutput):
            if start:
                raise BadInputs(
                    f"start={start} goes on with a run that was stopped after layer {start}: give the EarlyOutput of "
                    f"forward(x, end={start}), not a {type(x).__name__}"
                )
            return end if end < self.layer_count else None
        if end < self.layer_count:
            raise BadQuery(f"a cloud runs to the end, not to layer {end}: mt.split cuts a model into several stages")
        at = x.known_boundary().at
        if at not in self.layers:
            raise BadBoundary(f"the edge stopped after {at!r}, which is no layer here: have the same depth on both")
        if self.layers.index(at) != start:
            raise BadQuery(f"the edge stopped after layer {self.layers.index(at)}, {at!r}: say so, not start={start}")
        return start

    def _run(self, x: Any, cut: int | None, stages: Stages | None) -> Any:
        if isinstance(x, EarlyOutput):
            assert stages is not None
            self.banked_output = dict(x())
            return stages[1](x.boundary)
        given = Inputs.of(x, device=device_of(self.model)) if isinstance(x, str) else Inputs.of(x)
        bank = _Bank({self.layers[at]: at for at in self._saved() if cut is None or at < cut})
        if cut is None or stages is None:
            output = self._whole(given, bank)
        else:
            bank.last = self.layers[cut], cut
            boundary = stages[0].run(given.args, given.kwargs, [bank])
            output = EarlyOutput(bank.outputs, boundary, cut)
        bank.check()
        self.banked_output = dict(bank.outputs)
        return output

    def _whole(self, given: Inputs, bank: _Bank) -> Any:
        if not bank.wanted:
            return given.run(self.model)
        with Session(self.model, [bank], fast_paths=True):
            return given.run(self.model)

    def _split(self, layer: int) -> Stages:
        """The model cut after a layer. It is looked at again if its weights, or its mode, are others than before."""
        if self._splitter is None or self._state != _state(self._parts):
            self._stages.clear()
            self._splitter = Splitter(self.model, self._example())
            self._parts = tuple(self.model.modules())
            self._state = _state(self._parts)
        if layer not in self._stages:
            try:
                self._stages[layer] = self._splitter.at(_exact(self.layers[layer]))
            except (NoMatch, Unsupported) as error:
                raise Unsupported(f"a run cannot be stopped after layer {layer}: {error}") from error
        return self._stages[layer]

    def _gradients(self) -> AbstractContextManager[Any]:
        """None in eval mode."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.model.training)

    def _clock_ns(self) -> int:
        """The time, once a GPU has done what it was given."""
        if self.master_dict is not None and (device := device_of(self.model)).startswith("cuda"):
            torch.cuda.synchronize(device)
        return perf_counter_ns()

    def _example(self) -> Inputs:
        return self.inputs.to(device_of(self.model))

    def _saved(self) -> list[int]:
        saved = [_number("a layer of save_layers", at, 0) for at in self.save_layers]
        if wrong := [at for at in saved if at >= self.layer_count]:
            raise BadQuery(f"save_layers names layer {wrong[0]}, and the {self.layer_count} layers are numbered from 0")
        return saved

    def _write(self, inference_id: str | None, elapsed_ns: int) -> None:
        if self.master_dict is None or not inference_id:
            return
        base, _, number = inference_id.rpartition(".")
        if not (base and number.isdecimal()):
            base, number = inference_id, "-1"
        self.master_dict[base] = {
            "inference_id": f"{base}.{int(number) + 1}",
            "total_time": elapsed_ns,
            "layer_information": _metrics(self._profile, self.layers, self._ran),
        }


class _Bank(Probe):
    """Keeps what layers return.

    Attributes:
        wanted: The layers, by address.
        last: The one after which the run stops, so that nobody changes what it returned.
    """

    def __init__(self, wanted: dict[str, int]) -> None:
        self.wanted = wanted
        self.last: tuple[str, int] | None = None
        self.outputs: dict[int, Any] = {}

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.last is not None and call.address == self.last[0]:
            self.outputs[self.last[1]] = map_tensors(Tensor.detach, output)
        elif call.address in self.wanted:
            self.outputs[self.wanted[call.address]] = map_tensors(lambda tensor: tensor.detach().clone(), output)

    def check(self) -> None:
        for address, at in self.wanted.items():
            if at not in self.outputs:
                raise Unsupported(
                    f"layer {at}, {address!r}, of save_layers was not seen to run: this input did not lead to it, or "
                    "torch ran it with those around it as one fused operator"
                )


def _layers(profile: Profile, row: Row, depth: int) -> Iterator[Row]:
    for child in profile.children(row):
        if child.height == 1 or child.path.count(".") + 1 >= depth:
            yield child
        else:
            yield from _layers(profile, child, depth)


def _metrics(profile: Profile, layers: tuple[str, ...], ran: range) -> dict[int, dict[str, Any]]:
    depths = {profile[_exact(layers[at])].depth for at in ran}
    records = {record["layer_name"]: record for depth in depths for record in profile.layer_metrics(depth)}
    return {at: records[layers[at]] | {"layer_id": at} for at in ran}


def _exact(address: str) -> str:
    """The address of a call, said so that it is not taken for one of several."""
    return address if "#" in address else f"{address}#0"


def _state(modules: Iterable[nn.Module]) -> Any:
    """Something that is equal as long as modules hold what they held, and are in the modes that they were in."""
    return [
        (
            module.training,
            [id(child) for child in module._modules.values()],
            [_version(tensor) for held in (module._parameters, module._buffers) for tensor in held.values()],
        )
        for module in modules
    ]


def _version(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _copied(inputs: Any, device: str) -> Inputs:
    given = Inputs.of(inputs, device=device)
    args, kwargs = map_tensors(Tensor.clone, (given.args, given.kwargs))
    return Inputs(*args, **kwargs)


def _number(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise BadQuery(f"{name} is a whole number from {least} on, got {value!r}")
    return number


def _quantities(collect: bool | Collection[str]) -> tuple[str, ...]:
    if isinstance(collect, bool):
        return ("time", "energy", "load") if collect else ()
    return (collect,) if isinstance(collect, str) else tuple(collect)


# -- tracr's configuration ---------------------------------------------------------------------------------------------

_DEFAULTS: dict[str, Any] = {"depth": 2, "save_layers": (), "warmup_iterations": 2, "collect_metrics": True}


def _configured(config: Any) -> dict[str, Any]:
    """The arguments of a `WrappedModel` that a configuration stands for."""
    if isinstance(config, str | Path):
        config = _read(Path(config))
    if not isinstance(config, Mapping):
        raise BadQuery(f"a WrappedModel is made of an nn.Module or a configuration, got a {type(config).__name__}")
    default, section = (config.get(name) or {} for name in ("default", "model"))
    for key in ("model_name", "input_size"):
        if key not in section:
            raise BadQuery(f"the section `model` of the configuration lacks {key!r}")
    known = {key: section[key] for key in _DEFAULTS if section.get(key) is not None}
    if default.get("collect_metrics") is not None:
        known["collect_metrics"] = default["collect_metrics"]
    return known | _built(section, str(default.get("device", "cpu")))


def _built(section: Mapping[str, Any], device: str) -> dict[str, Any]:
    name, weights, classes = section["model_name"], section.get("weight_path"), section.get("num_classes")
    if section.get("pretrained") and weights is None:
        raise BadQuery(
            f"`pretrained` would download the weights of {name}, and microtome downloads nothing: give a `weight_path` "
            "of a .safetensors file, or the model itself: WrappedModel(model, inputs)"
        )
    mode = section.get("mode", "eval")
    if mode not in ("eval", "train"):
        raise BadQuery(f"the mode of a model is 'eval' or 'train', got {mode!r}")
    found = resolve(
        name if ":" in name else f"torchvision:{name}",
        inputs="x".join(map(str, (1, *section["input_size"]))),
        args=None if classes is None else {"num_classes": classes},
        weights=weights,
    )
    return {"model": found.model.to(device).train(mode == "train"), "inputs": found.inputs.to(device)}


def _read(file: Path) -> Any:
    yaml = need("yaml")
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadFile(f"{file} cannot be read as a configuration: {said(error)}") from error
