"""A run of a stage of a model that draws random numbers between the calls before a cut."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import tensors_in
from microtome.errors import BadBoundary, Unsupported
from microtome.split.boundary import Boundary
from microtome.split.crossing import ValueLocation
from microtome.split.effects import as_ghost, draws_of, is_entry, revive
from microtome.split.random_ops import is_random, op_name
from microtome.split.replay import StageRun
from microtome.split.schedule import Schedule, ScheduleFollower, SkippedDraw
from microtome.trace.op_schema import op_schema


class DrawingRun(StageRun):
    """A run that sends what was drawn before the cut to the tail, and has the tail draw nothing in its place."""

    def begin(
        self, boundary: Boundary | None = None, device: torch.device | None = None, *, release: bool = False
    ) -> None:
        super().begin(boundary, device, release=release)
        self._drawn = [] if boundary is None else _checked(boundary, self._begins)
        self._replayed = 0
        self._draws: list[dict[str, Any]] = []

    def draw(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give what the head drew; NotImplemented: the operator draws nothing, or lies after the cut."""
        if self._replay is None or not self._is_draw(self._replay, where, func, args, kwargs):
            return NotImplemented
        assert self._begins is not None
        step = _step(self._begins, self._replayed, func, where)
        entry = self._drawn[self._replayed]
        self._replayed += 1
        of = f"what {step.name} draws in {step.path or 'the model'!r}"
        made = [self._tensor(item, of, ValueLocation(None, at, draw=step.op)) for at, item in enumerate(entry["t"])]
        if written := op_schema(func).written(args, kwargs):
            for target, tensor in zip(written, made, strict=True):
                revive(target, tensor)
            made = written
        return made[0] if len(made) == 1 else tuple(made)

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._bank is None or not self._is_draw(self._bank, where, func, args, kwargs):
            return
        assert self._ends is not None
        step = _step(self._ends, len(self._draws), func, where)
        tensors: list[Tensor] = list(tensors_in(output))
        items = [
            self._send(step.outputs[at], tensor) if at in step.outputs else as_ghost(tensor)
            for at, tensor in enumerate(tensors)
        ]
        self._draws.append({"t": items, "p": [], "name": step.name})

    def boundary(self, fingerprint: str) -> Boundary:
        assert self._ends is not None
        _check_count(len(self._draws), self._ends)
        self._facts["draws"] = self._draws
        return super().boundary(fingerprint)

    def finished(self, output: Any) -> Any:
        if self._begins is not None:
            _check_count(self._replayed, self._begins)
        return super().finished(output)

    def _is_draw(
        self, follower: ScheduleFollower, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        here = where.phase == "forward" and get_ident() == self._thread and follower.is_between(where.call)
        return here and is_random(func, args, kwargs)


def _step(trail: Schedule, at: int, func: AnyOp, where: Where) -> SkippedDraw:
    """The draw of the example that the next draw of a run is."""
    step = trail.draws[at] if at < len(trail.draws) else None
    path = "" if where.call is None else where.call.path
    if step is None or (step.name, step.path) != (op_name(func), path):
        expected = "no further draw" if step is None else f"{step.name} in {step.path or 'the model'!r}"
        raise Unsupported(
            f"the model takes another way than on the example: expected {expected} before the cut at {trail.at!r}, got "
            f"{op_name(func)} in {path or 'the model'!r}. Split it on an example that takes this way"
        )
    return step


def _check_count(count: int, trail: Schedule) -> None:
    if count != len(trail.draws):
        raise Unsupported(
            f"the model takes another way than on the example: expected {len(trail.draws)} draws of random numbers "
            f"before the cut at {trail.at!r}, got {count}. Split it on an example that takes this way"
        )


def _checked(boundary: Boundary, trail: Schedule | None) -> list[dict[str, Any]]:
    """Return the boundary's entry of each draw, checked, since it comes from elsewhere."""
    assert trail is not None
    entries = draws_of(boundary)
    got = [(entry.get("name"), len(entry["t"])) for entry in entries if is_entry(entry)]
    if got != [(step.name, step.count) for step in trail.draws]:
        names = ", ".join(step.name for step in trail.draws) or "nothing"
        raise BadBoundary(
            f"expected what {names} drew before the cut at {trail.at!r}, got {len(got)} entries of other operators: "
            "split both sides on the same example"
        )
    return entries
