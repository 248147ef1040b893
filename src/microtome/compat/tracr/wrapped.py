"""A model whose run can be stopped after any of its layers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from microtome.compat.tracr.bank import Bank
from microtome.compat.tracr.cutting import LayerCuts
from microtome.compat.tracr.early import EarlyOutput, HookExitException
from microtome.compat.tracr.layers import exact, layers_in, metrics
from microtome.compat.tracr.settings import quantities, settle, whole_number
from microtome.engine import Session
from microtome.engine.select import check_model
from microtome.engine.structure import clone_tensors
from microtome.errors import BadBoundary, BadInputs, BadQuery
from microtome.inputs import Inputs, device_of
from microtome.profile import Profile, profile
from microtome.split.stages import Stages


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
        known = settle(
            config,
            inputs=inputs,
            depth=depth,
            save_layers=save_layers,
            warmup_iterations=warmup_iterations,
            collect_metrics=collect_metrics,
        )
        self.model = check_model(known["model"])
        self.inputs = _copied(known["inputs"], device_of(self.model))
        self.depth = whole_number("depth", known["depth"], 1)
        self.save_layers: Collection[int] = known["save_layers"]
        self.warmup_iterations = whole_number("warmup_iterations", known["warmup_iterations"], 0)
        self.master_dict = master_dict
        self.banked_output: dict[int, Any] = {}
        self._measure = quantities(known["collect_metrics"])
        self._profile: Profile = profile(self.model, self.inputs)
        self._is_measured = not self._measure
        self.layers = tuple(row.address for row in layers_in(self._profile, self._profile.total, self.depth))
        self._ran = range(self.layer_count)
        self._cuts = LayerCuts(self.layers)
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
        first = whole_number("start", start, 0)
        last = self.layer_count if end == math.inf else min(whole_number("end", end, 0), self.layer_count)
        self.banked_output = {}
        try:
            with self._gradients():
                cut = self._cut(x, first, last)
                stages = None if cut is None else self._cuts.after(cut, self.model, self._example)
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
        passes = self.warmup_iterations if iterations is None else whole_number("iterations", iterations, 0)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                for _ in range(passes):
                    self.inputs.run(self.model)
        finally:
            for module, training in modes:
                module.training = training

    @property
    def profile(self) -> Profile:
        """What `get_layer_metrics` takes its numbers from; `unavailable` says why some are None."""
        if not self._is_measured:
            rows = [self._profile[exact(address)] for address in self.layers]
            deepest = max((row.depth for row in rows), default=0)
            with self._gradients():
                self._profile = profile(self.model, self._example(), measure=self._measure, depth=deepest)
            self._is_measured = True
        return self._profile

    def get_layer_metrics(self) -> dict[int, dict[str, Any]]:
        """What is known of each layer of the last run, by its number; None for what was not measured.

        It is measured on the example, in runs of their own, when it is first asked for.
        """
        return metrics(self.profile, self.layers, self._ran)

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
        bank = Bank({self.layers[at]: at for at in self._saved() if cut is None or at < cut})
        if cut is None or stages is None:
            output = self._whole(given, bank)
        else:
            bank.last = self.layers[cut], cut
            boundary = stages[0].run(given.args, given.kwargs, [bank])
            output = EarlyOutput(bank.outputs, boundary, cut)
        bank.check()
        self.banked_output = dict(bank.outputs)
        return output

    def _whole(self, given: Inputs, bank: Bank) -> Any:
        if not bank.wanted:
            return given.run(self.model)
        with Session(self.model, [bank], fast_paths=True):
            return given.run(self.model)

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
        saved = [whole_number("a layer of save_layers", at, 0) for at in self.save_layers]
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
            "layer_information": metrics(self._profile, self.layers, self._ran),
        }


def _copied(inputs: Any, device: str) -> Inputs:
    given = Inputs.of(inputs, device=device)
    args, kwargs = clone_tensors((given.args, given.kwargs))
    return Inputs(*args, **kwargs)
