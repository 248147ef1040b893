"""Capture the outputs of modules and operators again and again, analyzing the model only when it has changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microtome.capture.execution_order import order_of, run_key
from microtome.capture.features import Features
from microtome.capture.model_state import ModelState, NotHashable
from microtome.capture.module_capture import ModuleCapture, OpCapture
from microtome.capture.retention import Clone, Retention
from microtome.capture.targets import Targets
from microtome.engine import Selector, Session, Stopped
from microtome.engine.selectors import check_model, module_paths, path_aliases
from microtome.engine.signals import grad_mode
from microtome.errors import BadQuery
from microtome.flops.composite import COMPOSITE_FORMULAS
from microtome.inputs import Inputs

_MAX_PLANS = 16


class FeatureExtractor:
    """Runs a model and returns the outputs of the selected modules, as `extract` does, at the cost of a forward hook.

    The first call with inputs of some shapes analyzes the model. Later ones only check that its modules and their
    attributes are the same, and observe the selected modules alone.
    """

    def __init__(
        self,
        model: nn.Module,
        at: Selector,
        *,
        stop: bool = True,
        inputs: bool = False,
        grad: bool = False,
        detach: bool = True,
        clone: Clone = "auto",
        device: torch.device | str | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self._model = check_model(model)
        self._at = at
        self._targets = Targets(model, at)
        if not isinstance(inputs, bool):
            raise BadQuery(
                f"expected inputs=True or False, whether to capture the arguments of calls, got a "
                f"{type(inputs).__name__}: pass the model's inputs as the second argument"
            )
        if grad and (transform is not None or self._targets.owners):
            raise BadQuery("gradients are collected for outputs of modules: leave out transform and operators, or grad")
        self._stop = stop and not grad
        self._inputs = inputs
        self._grad = grad
        self._retention = Retention(detach and not grad, clone, device, transform)
        self._state: ModelState | None = None
        self._plans: OrderedDict[Any, _Plan] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, inputs: Any) -> Features:
        """Run the model once.

        Args:
            inputs: A tensor, a tuple, a dict, an `Inputs`, or a shape such as `"1x3x224x224"`.
        """
        run = self._check_inputs(inputs)
        if not self._lock.acquire(blocking=False):  # it is running in another thread, or inside the model
            return self._run(run, self._make_plan(run))
        try:
            return self._run(run, self._find_plan(run))
        finally:
            self._lock.release()

    def run_once(self, inputs: Any) -> Features:
        """Run the model, which need not be the same in a later call."""
        run = self._check_inputs(inputs)
        return self._run(run, self._make_plan(run))

    def __repr__(self) -> str:
        return f"<FeatureExtractor of {type(self._model).__name__} at {self._at!r}>"

    def _check_inputs(self, inputs: Any) -> Inputs:
        if self._grad and torch.is_inference_mode_enabled():
            raise BadQuery("gradients do not exist in inference mode: leave the mode, or leave out grad")
        return Inputs.of(inputs, self._model)

    def _find_plan(self, run: Inputs) -> _Plan:
        """Return the plan of an earlier run of inputs that the model cannot distinguish from these, or a new one."""
        try:
            if self._state is None or not self._state.is_current():
                self._plans.clear()
                self._targets = Targets(self._model, self._at)
                self._state = ModelState(self._model, attributes=self._stop)
            key = run_key(run) if self._stop else None
        except NotHashable:
            return self._make_plan(run)
        if (plan := self._plans.get(key)) is None:
            while len(self._plans) >= _MAX_PLANS:
                self._plans.popitem(last=False)
            plan = self._plans[key] = self._make_plan(run)
            return plan
        self._plans.move_to_end(key)
        if not plan.is_narrow:
            self._narrow(plan)
        return plan

    def _make_plan(self, run: Inputs) -> _Plan:
        """Analyze the model; the plan's session observes all modules, to explain why one did not run."""
        targets = self._targets
        order = order_of(self._model, run, fast_paths=targets.fast_paths) if self._stop else None
        capture = self._make_capture()
        return _Plan(
            order, capture, self._open_session(capture, order), path_aliases(self._model), module_paths(self._model)
        )

    def _narrow(self, plan: _Plan) -> None:
        """Observe only the selected modules, and operators only where captured tensors may be mutated later."""
        plan.is_narrow = True
        if self._targets.owners:  # operators belong to the innermost call
            return
        selected = [address for address in plan.order or () if self._targets.selects(address)]
        plan.capture = self._make_capture(watch=self._inputs or len(selected) != 1, observes_all=False)
        at = list(self._targets.modules.values())  # not paths, with which the session compares all modules in each run
        plan.session = self._open_session(plan.capture, plan.order, at=at)

    def _make_capture(self, **options: bool) -> ModuleCapture:
        kind = OpCapture if self._targets.owners else ModuleCapture
        return kind(self._targets, self._retention, inputs=self._inputs, grad=self._grad, **options)

    def _open_session(
        self, capture: ModuleCapture, order: tuple[str, ...] | None, at: Selector | None = None
    ) -> Session:
        return Session(
            self._model,
            capture.probes,
            capture.plan(order),
            at=at,
            backward=False,
            composite=COMPOSITE_FORMULAS if self._targets.owners else (),
            fast_paths=self._targets.fast_paths,
            other_threads="ignore",
        )

    def _run(self, run: Inputs, plan: _Plan) -> Features:
        capture = plan.capture
        feats = capture.begin()
        try:
            try:
                with plan.session, grad_mode(torch.is_grad_enabled() or self._grad):
                    feats._output.append(run.run(self._model))
            except Stopped as stopped:
                if stopped.call is not capture.stopped_at:  # another session's
                    raise
                feats.stopped = True
            capture.finish(self._model, (run.args, run.kwargs), feats._output, plan.other_names, plan.module_paths)
        finally:
            capture.end()
        return feats


@dataclass
class _Plan:
    """The way to run the model on inputs of some shapes.

    Attributes:
        order: The addresses of its calls in the order they end, if known.
        other_names: Further paths of modules, each with the path that calls carry.
        is_narrow: Whether the session observes no more than it needs to.
    """

    order: tuple[str, ...] | None
    capture: ModuleCapture
    session: Session
    other_names: dict[str, str]
    module_paths: frozenset[str]
    is_narrow: bool = False
