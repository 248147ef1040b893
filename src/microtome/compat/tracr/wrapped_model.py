"""A model whose run can be stopped after any of its layers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from microtome.compat.tracr.early_output import EarlyOutput, HookExitException, share_tensors
from microtome.compat.tracr.images import image_to_tensor, is_image
from microtome.compat.tracr.layer_cuts import LayerCuts
from microtome.compat.tracr.layers import LayerRecord, MetricsCollector, layers_in
from microtome.compat.tracr.observer import LayerObserver
from microtome.compat.tracr.output_bank import Bank
from microtome.compat.tracr.settings import quantities, settle, training_of, whole_number
from microtome.devices.base import backend_of
from microtome.engine import Session
from microtome.engine.meta_run import copy_inputs
from microtome.engine.module_calls import run_uncompiled
from microtome.engine.pytree import tensors_in
from microtome.engine.selectors import check_model
from microtome.errors import BadBoundary, BadInputs, BadQuery
from microtome.inputs import Inputs, device_of
from microtome.profile import profile
from microtome.results.profile import Profile
from microtome.split.stages import Stages


class WrappedModel(nn.Module):
    """A model whose run can be stopped after any of its layers, and gone on with elsewhere.

    Args:
        config: The model; or tracr's configuration, a dict or a YAML file, whose sections `default` and `model` are
            read.
        second: After a model, its `inputs`; after a configuration, the `master_dict`.
        inputs: An example of what the model is given; a configuration has an `input_size` in its place.
        master_dict: Where runs that have an `inference_id` are written, by its `update`.
        depth: How deep in the tree of modules the layers lie. A module above that has no modules running inside it is
            a layer too.
        save_layers: The layers whose outputs are kept in `banked_output`.
        warmup_iterations: How many passes to make at once.
        collect_metrics: Whether runs take the times of layers; and what `profile` measures: True for time, energy and
            load; or some of these by name.

    What is None is taken from the configuration, where there is one.

    Attributes:
        layers: The addresses of the layers, in the order they run.
        banked_output: The outputs of the last run that were kept, by the number of the layer.
        forward_info: A record of each layer, by its number, with what is known of it from the last run.
        metrics_collector: The same records, where tracr's code looks for them; None without metrics.

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
        *second: Any,
        inputs: Any = None,
        master_dict: Any = None,
        depth: int | None = None,
        save_layers: Collection[int] | None = None,
        warmup_iterations: int | None = None,
        collect_metrics: bool | Collection[str] | None = None,
    ) -> None:
        super().__init__()
        known = settle(
            config,
            second,
            inputs=inputs,
            master_dict=master_dict,
            depth=depth,
            save_layers=save_layers,
            warmup_iterations=warmup_iterations,
            collect_metrics=collect_metrics,
        )
        self.model = check_model(known["model"])
        given = Inputs.of(known["inputs"], device=device_of(self.model))
        self.inputs = copy_inputs(given, self.model)  # whoever gave them may write into them
        self.depth = whole_number("depth", known["depth"], 1)
        self.save_layers: Collection[int] = known["save_layers"]
        self.warmup_iterations = whole_number("warmup_iterations", known["warmup_iterations"], 0)
        self.master_dict: Any = known.get("master_dict")
        self.banked_output: dict[int, Any] = {}
        self.collect_metrics = known["collect_metrics"]
        self._measure = quantities(self.collect_metrics)
        self._profile: Profile = profile(self.model, self.inputs)
        self._is_measured = not self._measure
        self.layers = tuple(row.address for row in layers_in(self._profile, self._profile.total, self.depth))
        self.metrics_collector = MetricsCollector(self) if self._measure else None
        self.energy_monitor = None
        self._forget()
        self._cuts = LayerCuts(self.layers)
        self.warmup()

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @run_uncompiled
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
        if log:
            self._forget()
        is_written = log and self.master_dict is not None and bool(inference_id)
        observer = LayerObserver(self.model) if (log and self._measure) or is_written else None
        with self._gradients():
            x = self.parse_input(x) if is_image(x) else x
            cut = self._cut(x, first, last)
            stages = None if cut is None else self._cuts.after(cut, self.model, self._example)
            with self._observed(observer):
                began = self._clock_ns()
                try:
                    output = self._run(x, cut, stages)
                except HookExitException as stopped:
                    output = EarlyOutput(stopped.result)
                elapsed_ns = self._clock_ns() - began
        if observer is not None:
            self._note(observer, first if isinstance(x, EarlyOutput) else None)
        if is_written:
            self._write(str(inference_id), elapsed_ns)
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
        """A profile of the model on the example, measured in runs of their own when it is first asked for.

        Its numbers are the example's; `unavailable` says why some are None.
        """
        if not self._is_measured:
            rows = [self._profile[address] for address in self.layers]
            deepest = max((row.depth for row in rows), default=0)
            with self._gradients():
                self._profile = profile(self.model, self._example(), measure=self._measure, depth=deepest)
            self._is_measured = True
        return self._profile

    def get_layer_metrics(self) -> dict[int, LayerRecord]:
        """The records of the layers that ran in the last run, by their numbers; none if metrics are not collected.

        Each number was taken in that run. Under the names of tracr's that cannot be, there is nothing: `record[name]`
        is None.
        """
        return {at: self.forward_info[at] for at in self._ran} if self._measure else {}

    # -- the rest of tracr's names -------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """The device of the model."""
        return device_of(self.model)

    @property
    def input_size(self) -> tuple[int, ...] | None:
        """The shape of the first tensor of the example, without the batch; None: there is none."""
        return next((tuple(tensor.shape[1:]) for tensor in tensors_in((self.inputs.args, self.inputs.kwargs))), None)

    def set_mode(self, mode: str) -> None:
        """Put the model in the mode "eval" or "train"."""
        self.model.train(training_of(mode))

    def get_mode(self) -> str:
        return "train" if self.model.training else "eval"

    def parse_input(self, input_data: Any) -> Tensor:
        """A PIL image, an array of numpy or a tensor as a tensor on the model's device; an image as a batch of one."""
        if is_image(input_data):
            return image_to_tensor(input_data, self.input_size, self.device)
        try:
            return torch.as_tensor(input_data, device=self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInputs(f"expected an image, an array or a tensor, got a {type(input_data).__name__}") from error

    def get_state_dict(self) -> dict[str, Any]:
        """The weights under the names that they have in the model, without the wrapper's `model.`."""
        return self.model.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights under the names of `get_state_dict`, or of the wrapper's own `state_dict`."""
        if self.model.state_dict().keys() & state_dict.keys():
            return self.model.load_state_dict(state_dict, strict, assign)
        return super().load_state_dict(state_dict, strict, assign)

    def update_master_dict(self) -> None:
        """Do nothing: each run is in `master_dict` when `forward` returns."""

    def cleanup(self) -> None:
        """Let go of the banked outputs and of the cuts, which are made again when they are needed."""
        self.banked_output = {}
        self._cuts = LayerCuts(self.layers)

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
            return stages[1](x.boundary_as_banked(self.layers))
        given = Inputs.of(x, device=device_of(self.model)) if isinstance(x, str) else Inputs.of(x)
        bank = Bank({self.layers[at]: at for at in self._saved() if cut is None or at < cut})
        if cut is None or stages is None:
            output = self._whole(given, bank)
        else:
            bank.last = self.layers[cut], cut
            boundary = stages[0].run(given.args, given.kwargs, [bank])
            bank.outputs = share_tensors(bank.outputs, boundary, self.layers)
            output = EarlyOutput(bank.outputs, boundary, cut)
        bank.check()
        self.banked_output = dict(bank.outputs)
        return output

    def _whole(self, given: Inputs, bank: Bank) -> Any:
        if not bank.wanted:
            return given.run(self.model)
        with Session(self.model, [bank], fast_paths=True, other_threads="unseen"):
            return given.run(self.model)

    def _gradients(self) -> AbstractContextManager[Any]:
        """None in eval mode."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.model.training)

    def _clock_ns(self) -> int:
        """Return the time, after the device has completed its work."""
        if self.master_dict is not None:
            device = torch.device(device_of(self.model))
            backend_of(device).synchronize(device)
        return perf_counter_ns()

    def _example(self) -> Inputs:
        return self.inputs.to(device_of(self.model))

    def _saved(self) -> list[int]:
        saved = [whole_number("a layer of save_layers", at, 0) for at in self.save_layers]
        if wrong := [at for at in saved if at >= self.layer_count]:
            raise BadQuery(f"save_layers names layer {wrong[0]}, and the {self.layer_count} layers are numbered from 0")
        return saved

    def _forget(self) -> None:
        """Begin records that know no run."""
        rows = [self._profile[address] for address in self.layers]
        self.forward_info = {
            at: LayerRecord(layer_id=at, layer_name=row.address, layer_type=row.type) for at, row in enumerate(rows)
        }
        self._ran: tuple[int, ...] = ()

    def _observed(self, observer: LayerObserver | None) -> AbstractContextManager[Any]:
        modules = dict(self.model.named_modules(remove_duplicate=False))
        paths = dict.fromkeys(self._profile[address].path for address in self.layers)
        at = [modules[path] for path in paths if path in modules]
        if observer is None or not at:
            return nullcontext()
        return Session(self.model, [observer], at=at, fast_paths=True, other_threads="unseen")

    def _note(self, observer: LayerObserver, resumed_after: int | None) -> None:
        """Write what was seen of the layers into their records."""
        runs = observer.by_address(self._profile, None if resumed_after is None else self.layers[resumed_after])
        self._ran = tuple(at for at, address in enumerate(self.layers) if address in runs)
        for at in self._ran:
            run = runs[self.layers[at]]
            self.forward_info[at].update(run.facts)
            if "time" in self._measure and (seconds := run.seconds) is not None:
                self.forward_info[at]["inference_time"] = seconds

    def _write(self, inference_id: str, elapsed_ns: int) -> None:
        base, _, number = inference_id.rpartition(".")
        if not (base and number.isdecimal()):
            base, number = inference_id, "-1"
        run = {
            "inference_id": f"{base}.{int(number) + 1}",
            "total_time": elapsed_ns,
            "layer_information": {at: LayerRecord(self.forward_info[at]) for at in self._ran},
        }
        self.master_dict.update({base: run})
