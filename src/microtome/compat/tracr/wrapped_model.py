"""A model whose run can be stopped after any of its layers and resumed elsewhere."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from microtome.compat.tracr.hooks import EarlyOutput, HookExitException, share_tensors
from microtome.compat.tracr.images import image_to_tensor, is_image
from microtome.compat.tracr.layers import LayerCuts, OutputBank, find_layers
from microtome.compat.tracr.metrics import LayerObserver, LayerRecord, MetricsCollector
from microtome.compat.tracr.settings import check_integer, parse_metrics, parse_mode, read_settings
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
    """A model whose run can be stopped after any of its layers and resumed elsewhere.

    Args:
        config: The model; or tracr's configuration, a dict or a YAML file with the sections `default` and `model`.
        second: After a model, its `inputs`; after a configuration, the `master_dict`.
        inputs: Example inputs of the model; a configuration has an `input_size` instead.
        master_dict: Receives a record of each run that has an `inference_id`, by its `update`.
        depth: The depth of the layers in the tree of modules. A module above without running children is a layer too.
        save_layers: The numbers of the layers whose outputs are kept in `banked_output`.
        warmup_iterations: The number of warm-up runs, made at once.
        collect_metrics: Whether runs measure the times of layers; and what `profile` measures: True for time, energy
            and load; or some of these by name.

    Arguments that are None are read from the configuration, if there is one.

    Attributes:
        layers: The addresses of the layers, in execution order.
        banked_output: The outputs of the last run that were kept, by the number of the layer.
        forward_info: A record of each layer, by its number, with the measurements of the last run.
        metrics_collector: The same records, where tracr's code expects them; None without metrics.

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
        settings = read_settings(
            config,
            second,
            inputs=inputs,
            master_dict=master_dict,
            depth=depth,
            save_layers=save_layers,
            warmup_iterations=warmup_iterations,
            collect_metrics=collect_metrics,
        )
        self.model = check_model(settings.model)
        # A copy: the caller may mutate them.
        self.inputs = copy_inputs(Inputs.of(settings.inputs, self.model), self.model)
        self.depth = check_integer("depth", settings.depth, 1)
        self.save_layers = settings.save_layers
        self.warmup_iterations = check_integer("warmup_iterations", settings.warmup_iterations, 0)
        self.master_dict = settings.master_dict
        self.collect_metrics = settings.collect_metrics
        self.banked_output: dict[int, Any] = {}
        self._metrics = parse_metrics(self.collect_metrics)
        self._profile: Profile = profile(self.model, self.inputs)
        self._is_measured = not self._metrics
        self.layers = tuple(row.address for row in find_layers(self._profile, self._profile.total, self.depth))
        self.metrics_collector = MetricsCollector(self) if self._metrics else None
        self.energy_monitor = None
        self._reset_records()
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
            x: The input of the model; a tuple for several arguments, a dict for named ones. In a cloud, the
                `EarlyOutput` of the edge.
            inference_id: The key of this run in `master_dict`.
            start: In a cloud, the layer after which the edge stopped.
            end: In an edge, the layer after which to stop. From `layer_count` on, the whole model runs.
            log: Whether to report this run in `get_layer_metrics` and `master_dict`.

        Returns:
            The output of the model; in an edge, an `EarlyOutput`.
        """
        first = check_integer("start", start, 0)
        last = self.layer_count if end == math.inf else min(check_integer("end", end, 0), self.layer_count)
        self.banked_output = {}
        if log:
            self._reset_records()
        is_written = log and self.master_dict is not None and bool(inference_id)
        observer = LayerObserver(self.model) if (log and self._metrics) or is_written else None
        with self._grad_mode():
            x = self.parse_input(x) if is_image(x) else x
            cut = self._find_cut(x, first, last)
            stages = None if cut is None else self._cuts.after(cut, self.model, self._example)
            with self._observe(observer):
                began = self._clock_ns()
                try:
                    output = self._run(x, cut, stages)
                except HookExitException as stopped:
                    output = EarlyOutput(stopped.result)
                elapsed_ns = self._clock_ns() - began
        if observer is not None:
            self._fill_records(observer, self.layers[first] if isinstance(x, EarlyOutput) else None)
        if is_written:
            self._write(str(inference_id), elapsed_ns)
        return output

    def warmup(self, iterations: int | None = None) -> None:
        """Run the model on the example in eval mode, by default `warmup_iterations` times."""
        count = self.warmup_iterations if iterations is None else check_integer("iterations", iterations, 0)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                for _ in range(count):
                    self.inputs.run(self.model)
        finally:
            for module, training in modes:
                module.training = training

    @property
    def profile(self) -> Profile:
        """The profile of the model on the example, measured in separate runs on first access.

        `unavailable` says why a quantity is None.
        """
        if not self._is_measured:
            depth = max((self._profile[address].depth for address in self.layers), default=0)
            with self._grad_mode():
                self._profile = profile(self.model, self._example(), measure=self._metrics, depth=depth)
            self._is_measured = True
        return self._profile

    def get_layer_metrics(self) -> dict[int, LayerRecord]:
        """Return the records of the layers that ran in the last run, by number; none if metrics are not collected.

        They have what was measured in that run; for tracr's other names `record[name]` is None.
        """
        return {layer: self.forward_info[layer] for layer in self._ran} if self._metrics else {}

    # -- the rest of tracr's names -------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """The device of the model."""
        return device_of(self.model)

    @property
    def input_size(self) -> tuple[int, ...] | None:
        """The shape of the first tensor in the example, without the batch; None if there is none."""
        return next((tuple(tensor.shape[1:]) for tensor in tensors_in((self.inputs.args, self.inputs.kwargs))), None)

    def set_mode(self, mode: str) -> None:
        """Set the mode of the model, "eval" or "train"."""
        self.model.train(parse_mode(mode))

    def get_mode(self) -> str:
        return "train" if self.model.training else "eval"

    def parse_input(self, input_data: Any) -> Tensor:
        """Convert a PIL image, an array or a tensor to a tensor on the model's device; an image to a batch of one."""
        if is_image(input_data):
            return image_to_tensor(input_data, self.input_size, self.device)
        try:
            return torch.as_tensor(input_data, device=self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInputs(f"expected an image, an array or a tensor, got a {type(input_data).__name__}") from error

    def get_state_dict(self) -> dict[str, Any]:
        """Return the weights under their names in the model, without the wrapper's `model.`."""
        return self.model.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights under the names of `get_state_dict`, or of the wrapper's own `state_dict`."""
        if self.model.state_dict().keys() & state_dict.keys():
            return self.model.load_state_dict(state_dict, strict, assign)
        return super().load_state_dict(state_dict, strict, assign)

    def update_master_dict(self) -> None:
        """Do nothing: each run is in `master_dict` when `forward` returns."""

    def cleanup(self) -> None:
        """Drop the banked outputs and the cuts, which are created again on use."""
        self.banked_output = {}
        self._cuts = LayerCuts(self.layers)

    # -- the parts of a run --------------------------------------------------------------------------------------------

    def _find_cut(self, x: Any, start: int, end: int) -> int | None:
        """Return the layer after which the run starts or stops; None: the whole model runs."""
        if not isinstance(x, EarlyOutput):
            if start:
                raise BadInputs(
                    f"start={start} resumes a run: expected the EarlyOutput of forward(x, end={start}), got a "
                    f"{type(x).__name__}"
                )
            return end if end < self.layer_count else None
        if end < self.layer_count:
            raise BadQuery(f"a cloud runs to the end, got end={end}: mt.split cuts a model into several stages")
        at = x.require_boundary().at
        if at not in self.layers:
            raise BadBoundary(f"the edge stopped after {at!r}, which is not a layer here: use the same depth on both")
        if self.layers.index(at) != start:
            raise BadQuery(f"the edge stopped after {at!r}: expected start={self.layers.index(at)}, got start={start}")
        return start

    def _run(self, x: Any, cut: int | None, stages: Stages | None) -> Any:
        if isinstance(x, EarlyOutput):
            assert stages is not None
            self.banked_output = dict(x())
            return stages[1](x.updated_boundary(self.layers))
        inputs = Inputs.of(x, self.model)
        banked = [layer for layer in self._checked_save_layers() if cut is None or layer < cut]
        if cut is not None:
            banked.append(cut)
        bank = OutputBank({self.layers[layer]: layer for layer in banked}, last=cut)
        if cut is not None and stages is not None:
            boundary = stages[0].run(inputs.args, inputs.kwargs, [bank])
            bank.outputs = share_tensors(bank.outputs, boundary, self.layers)
            output: Any = EarlyOutput(bank.outputs, boundary, cut)
        else:
            session = Session(self.model, [bank], fast_paths=True, other_threads="ignore") if banked else nullcontext()
            with session:
                output = inputs.run(self.model)
        bank.check()
        self.banked_output = dict(bank.outputs)
        return output

    def _grad_mode(self) -> AbstractContextManager[Any]:
        """Disable gradients in eval mode."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.model.training)

    def _clock_ns(self) -> int:
        """Return the time, once the device has completed its work."""
        if self.master_dict is not None:
            device = torch.device(device_of(self.model))
            backend_of(device).synchronize(device)
        return perf_counter_ns()

    def _example(self) -> Inputs:
        return self.inputs.to(device_of(self.model))

    def _checked_save_layers(self) -> list[int]:
        layers = [check_integer("a layer of save_layers", layer, 0) for layer in self.save_layers]
        if invalid := [layer for layer in layers if layer >= self.layer_count]:
            raise BadQuery(f"expected save_layers from 0 to {self.layer_count - 1}, got {invalid[0]}")
        return layers

    def _observe(self, observer: LayerObserver | None) -> AbstractContextManager[Any]:
        paths = {self._profile[address].path for address in self.layers}
        at = [module for path, module in self.model.named_modules(remove_duplicate=False) if path in paths]
        if observer is None or not at:
            return nullcontext()
        return Session(self.model, [observer], at=at, fast_paths=True, other_threads="ignore")

    def _reset_records(self) -> None:
        rows = [self._profile[address] for address in self.layers]
        self.forward_info = {
            layer: LayerRecord(layer_id=layer, layer_name=row.address, layer_type=row.type)
            for layer, row in enumerate(rows)
        }
        self._ran: tuple[int, ...] = ()

    def _fill_records(self, observer: LayerObserver, resumed_after: str | None) -> None:
        runs = observer.by_address(self._profile, resumed_after)
        self._ran = tuple(layer for layer, address in enumerate(self.layers) if address in runs)
        for layer in self._ran:
            run = runs[self.layers[layer]]
            self.forward_info[layer].update(run.output)
            if "time" in self._metrics and (seconds := run.seconds) is not None:
                self.forward_info[layer]["inference_time"] = seconds

    def _write(self, inference_id: str, elapsed_ns: int) -> None:
        base, _, number = inference_id.rpartition(".")
        if not (base and number.isdecimal()):
            base, number = inference_id, "-1"
        run = {
            "inference_id": f"{base}.{int(number) + 1}",
            "total_time": elapsed_ns,
            "layer_information": {layer: LayerRecord(self.forward_info[layer]) for layer in self._ran},
        }
        self.master_dict.update({base: run})
