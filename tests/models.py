"""Tiny nets that know the truth about themselves, independently of microtome."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Stack = tuple[str, ...]


class Witness:
    """Keeps the true stack of calls by having each module say itself when its forward begins and ends.

    `marks` holds, for every mark that a forward or a backward passed, its phase, the true stack when the mark was set,
    and what `ask` answered at that moment.
    """

    def __init__(self) -> None:
        self.ask: Callable[[], Any] = lambda: None
        self.marks: list[tuple[str, Stack, Any]] = []
        self._local = threading.local()

    def name(self, model: nn.Module) -> None:
        for path, module in model.named_modules():
            if isinstance(module, Told):
                module.path = path

    @contextmanager
    def inside(self, module: Told) -> Iterator[None]:
        stack: list[str] = self._local.__dict__.setdefault("stack", [])
        if not stack:
            self._local.counts = Counter()
        index = self._local.counts[module.path]
        self._local.counts[module.path] += 1
        stack.append(f"{module.path}#{index}" if index else module.path)
        try:
            yield
        finally:
            stack.pop()

    def mark(self, x: Tensor) -> Tensor:
        """Multiply by one, and write down the truth and the answer, now and when the backward comes through here."""
        truth = tuple(self._local.stack)
        self.marks.append(("forward", truth, self.ask()))
        marked: Tensor = _Mark.apply(x, self, truth)
        return marked

    def of(self, phase: str) -> list[tuple[Stack, Any]]:
        return [(truth, answer) for kind, truth, answer in self.marks if kind == phase]


class _Mark2(torch.autograd.Function):
    """What a marked backward leaves in a graph of its own: its backward is a double backward of the same call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, witness: Witness, truth: Stack) -> Tensor:
        ctx.witness, ctx.truth = witness, truth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.witness.marks.append(("double", ctx.truth, ctx.witness.ask()))
        return grad, None, None


class _Mark(_Mark2):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.witness.marks.append(("backward", ctx.truth, ctx.witness.ask()))
        return _Mark2.apply(grad, ctx.witness, ctx.truth), None, None


class Told(nn.Module):
    """A module that tells its witness when it runs. Subclasses write `body`."""

    path = ""

    def __init__(self, witness: Witness) -> None:
        super().__init__()
        self.witness = witness

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.witness.inside(self):
            return self.body(*args, **kwargs)

    def body(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Leaf(Told):
    """x -> weight * x, marked."""

    def __init__(self, witness: Witness) -> None:
        super().__init__(witness)
        self.weight = nn.Parameter(torch.tensor(0.5))

    def body(self, x: Tensor) -> Tensor:
        return self.witness.mark(x * self.weight)


class Chain(Told):
    """Runs its children one after the other, with a mark of its own before and after each."""

    def __init__(self, witness: Witness, *children: nn.Module) -> None:
        super().__init__(witness)
        self.parts = nn.ModuleList(children)

    def body(self, x: Tensor) -> Tensor:
        x = self.witness.mark(x)
        for part in self.parts:
            x = self.witness.mark(part(x))
        return x


@dataclass(frozen=True)
class Step:
    """One step of a `Program`: run a child, or mark where it has none; how it is called and what becomes of it."""

    child: int
    keyword: bool = False
    no_grad: bool = False
    in_place: bool = False
    aside: bool = False


class Program(Told):
    """Runs any program of steps over its children, which it may share with other modules and run many times."""

    def __init__(self, witness: Witness, children: Sequence[nn.Module], steps: Sequence[Step]) -> None:
        super().__init__(witness)
        self.parts = nn.ModuleList(children)
        self.steps = steps
        self.asides: list[Tensor] = []

    def body(self, x: Tensor) -> Tensor:
        self.asides = []
        for step in self.steps:
            y = self._run(step, x)
            if step.aside:
                self.asides.append(y.sum())
            else:
                x = y
        return x

    def _run(self, step: Step, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not step.no_grad):
            part = self.parts[step.child % len(self.parts)] if len(self.parts) else self.witness.mark
            y: Tensor = part(x=x) if step.keyword else part(x)
            y = y + x
            return self.witness.mark(y.mul_(0.5) if step.in_place else y)

    def losses(self) -> list[Tensor]:
        """The side branches of this and every program below, which no output depends on."""
        return [a for m in self.modules() if isinstance(m, Program) for a in m.asides if a.requires_grad]
