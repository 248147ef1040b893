"""The drop-in for torch's ModuleTracker beside torch's own, at every point of the same programs."""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import module_tracker as torchs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from microtome import Inputs, zoo
from microtome.compat.module_tracker import ModuleTracker
from microtome.errors import SessionError

Build = Callable[[], nn.Module]
full_backward = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


class Mark(torch.autograd.Function):
    """Reports where the forward is, and where the backward is when it comes back to the same place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, report: Callable[[str], Any]) -> Tensor:
        ctx.report, ctx.there = report, report("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.report("backward", ctx.there)
        return grad, None


class Marked(nn.Linear):
    """A Linear that reports after its product."""

    report: Any = staticmethod(lambda *_: None)

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Any:
        return Mark.apply(super().forward(x), self.report)


class Block(nn.Module):
    """A layer, and a module that is called as `run` says."""

    def __init__(self, inner: nn.Module, run: Callable[[nn.Module, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.fc = Marked()
        self.inner = inner
        self.run = run or (lambda module, x: module(x))

    def forward(self, x: Tensor) -> Any:
        return self.run(self.inner, self.fc(x).relu()) + 1


class Pair(nn.Module):
    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a = a
        self.b = b

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x) * 2)


class Branches(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.a(x) + self.b(x)


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = Marked()

    def forward(self, *, x: Tensor) -> Any:
        return self.fc(x=x)


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = Marked()

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        return {"y": y, "more": (y * 2, None)}


def shared_in_two_parents() -> nn.Module:
    shared = Pair(Marked(), nn.Tanh())
    return Pair(Block(shared), Block(shared))


def shared_in_one_parent() -> nn.Module:
    shared = Marked()
    return nn.Sequential(shared, nn.Tanh(), shared)


def checkpointed(reentrant: bool) -> nn.Module:
    inner = nn.Sequential(Marked(), nn.Tanh())
    return nn.Sequential(Marked(), Block(inner, lambda m, x: checkpoint(m, x, use_reentrant=reentrant)), Marked())


#: Nets whose backward torch's tracker follows, if the input needs no gradient.
CHAINS: dict[str, Build] = {
    "chain": lambda: nn.Sequential(Marked(), nn.Tanh(), Marked()),
    "nested": lambda: nn.Sequential(Block(nn.Sequential(Marked(), nn.Tanh())), Block(Marked())),
    "shared in two parents": shared_in_two_parents,
    "shared in one parent": shared_in_one_parent,
    "in place": lambda: nn.Sequential(Marked(), nn.BatchNorm1d(4), nn.ReLU(inplace=True), Marked()),
}
NETS: dict[str, Build] = CHAINS | {
    "branches": lambda: Branches(Marked(), Block(Marked())),
    "keywords": lambda: nn.Sequential(Block(Keyword(), lambda module, x: module(x=x)), Marked()),
    "structures": lambda: Block(Structured(), lambda module, x: module(x)["more"][0]),
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
    "two kinds deep": lambda: Block(Block(Marked())),
}


class Point(NamedTuple):
    where: str
    is_bw: bool
    theirs: set[str]
    ours: set[str]


class Points(TorchDispatchMode):
    """What both trackers say at every operator, and wherever it is asked."""

    def __init__(self, ours: ModuleTracker, theirs: torchs.ModuleTracker) -> None:
        super().__init__()
        self.trackers = theirs, ours
        self.seen: list[Point] = []

    def at(self, where: str) -> None:
        theirs, ours = self.trackers
        assert theirs.is_bw == ours.is_bw
        self.seen.append(Point(where, ours.is_bw, set(theirs.parents), ours.parents))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.at(f"operator {func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def both(model: nn.Module) -> Iterator[Points]:
    """Both trackers, with every kind of hook on every module reporting."""
    # Ours first: torch's runs operators inside its own hooks.
    with ModuleTracker() as ours, torchs.ModuleTracker() as theirs, Points(ours, theirs) as points:
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: points.at(f"pre-hook of {path}"))
            module.register_forward_hook(lambda *_, path=path: points.at(f"hook of {path}"))
        yield points


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_in_the_forward_parents_are_torchs_at_every_operator_and_hook(net: str, needs_grad: bool) -> None:
    model = NETS[net]()
    with both(model) as points:
        for _ in range(2):
            model(torch.ones(2, 4, requires_grad=needs_grad))
    assert len(points.seen) > 20
    assert [point for point in points.seen if point.theirs != point.ours] == []


@pytest.mark.parametrize("net", CHAINS)
def test_in_the_backward_parents_are_torchs_where_torch_is_right(net: str) -> None:
    model = CHAINS[net]()
    with both(model) as points:
        model(torch.ones(2, 4)).sum().backward()
    backward = [point for point in points.seen if point.is_bw]
    assert len(backward) > 10
    assert [point for point in backward if point.theirs != point.ours] == []


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_the_backward_of_a_place_has_the_parents_that_its_forward_had(net: str, needs_grad: bool) -> None:
    model = NETS[net]()
    pairs: list[tuple[set[str], set[str]]] = []
    with ModuleTracker() as tracker:

        def report(phase: str, there: set[str] | None = None) -> set[str]:
            if there is not None:
                pairs.append((there, tracker.parents))
            return tracker.parents

        for module in model.modules():
            if isinstance(module, Marked):
                module.report = report
        model(torch.ones(2, 4, requires_grad=needs_grad)).sum().backward()
        assert tracker.parents == {"Global"}
    assert len(pairs) > 1
    assert all(forward == backward for forward, backward in pairs)


@full_backward
@pytest.mark.parametrize("net", ["chain", "nested", "shared in one parent"])
def test_in_a_modules_own_backward_hooks_its_backward_runs(net: str) -> None:
    model = CHAINS[net]()
    points: list[tuple[str, str, set[str], set[str]]] = []
    with ModuleTracker() as ours, torchs.ModuleTracker() as theirs:

        def at(hook: str, path: str) -> None:
            points.append((hook, path, set(theirs.parents), ours.parents))

        for path, module in model.named_modules():
            module.register_full_backward_pre_hook(lambda *_, path=path: at("pre-hook", path))
            module.register_full_backward_hook(lambda *_, path=path: at("hook", path))
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    root = type(model).__name__
    for hook, path, torchs_parents, parents in points:
        own = f"{root}.{path}" if path else root
        assert own in parents
        # torch enters the module after its pre-hooks, which the docs list.
        assert torchs_parents == (parents - {own} if hook == "pre-hook" else parents)


def test_global_hooks_see_what_torchs_order_of_registration_gives() -> None:
    seen: list[tuple[str, set[str], set[str]]] = []
    trackers: list[Any] = []

    def report(kind: str) -> Callable[..., None]:
        return lambda *_: seen.append((kind, trackers[0].parents, set(trackers[1].parents)))

    handles = [register_module_forward_pre_hook(report("early")), register_module_forward_hook(report("early end"))]
    try:
        with ModuleTracker() as ours, torchs.ModuleTracker() as theirs:
            trackers += [ours, theirs]
            handles += [register_module_forward_pre_hook(report("late")), register_module_forward_hook(report("end"))]
            nn.Sequential(nn.Tanh())(torch.ones(1))
    finally:
        for handle in handles:
            handle.remove()
    assert all(ours == theirs for _, ours, theirs in seen)
    assert ("early", {"Global"}, {"Global"}) in seen


def test_names_follow_the_order_in_which_modules_first_run() -> None:
    shared = Marked()
    first, second = nn.Sequential(shared), nn.ModuleDict({"x": shared})
    holder = Pair(nn.Sequential(second["x"]), nn.Tanh())
    with both(shared) as points:
        for model in (shared, first, holder, first):
            model(torch.ones(2, 4))
        first.append(Marked())  # added after the Sequential was named
        first(torch.ones(2, 4))
    assert all(point.theirs == point.ours for point in points.seen)
    names = set().union(*(point.ours for point in points.seen))
    assert {"Marked", "Sequential.0", "Pair.a.0"} <= names


def test_a_model_that_is_gone_keeps_its_names_in_the_backward() -> None:
    with ModuleTracker() as tracker:
        seen: list[set[str]] = []
        layer = Marked()
        layer.report = lambda *_: seen.append(tracker.parents)
        model = nn.Sequential(layer)
        loss = model(torch.ones(2, 4)).sum()
        del layer, model
        gc.collect()
        loss.backward()
    assert seen == [{"Global", "Sequential", "Sequential.0"}] * 2


@pytest.mark.parametrize("name", zoo.names())
def test_the_flops_of_a_forward_are_counted_under_torchs_names(name: str) -> None:
    counts = []
    for kind in (ModuleTracker, torchs.ModuleTracker):
        model, inputs = zoo.build(name)
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = kind()
        with counter:
            Inputs.of(inputs).run(model)
        counts.append({module: dict(ops) for module, ops in counter.get_flop_counts().items()})
    assert counts[0] == counts[1]
    assert len(counts[0]) > 2


def test_each_thread_has_its_own_parents() -> None:
    seen: dict[str, set[str]] = {}
    together = threading.Barrier(2, timeout=60)

    def run(model: nn.Module, layer: Marked, name: str) -> None:
        def report(*_: Any) -> None:
            together.wait()  # both run now
            seen[name] = tracker.parents
            together.wait()

        layer.report = report
        with torch.no_grad():
            model(torch.ones(2, 4))

    one, two = Marked(), Marked()
    with ModuleTracker() as tracker:
        threads = [
            threading.Thread(target=run, args=(nn.Sequential(one), one, "one")),
            threading.Thread(target=run, args=(Pair(nn.Tanh(), two), two, "two")),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {"one": {"Global", "Sequential", "Sequential.0"}, "two": {"Global", "Pair", "Pair.b"}}


def test_nothing_is_left_after_an_exception_and_autograd_grad_works() -> None:
    model = nn.Sequential(Marked(), nn.Linear(4, 4))
    x = torch.ones(2, 4, requires_grad=True)
    with ModuleTracker() as tracker:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            nn.Sequential(Marked(), nn.Linear(3, 3))(x)
        assert tracker.parents == {"Global"}
        assert torch.autograd.grad(model(x).sum(), x)[0].shape == (2, 4)
        assert tracker.parents == {"Global"}
        assert tracker._hooks == []


# -- attributes --------------------------------------------------------------------------------------------------------


def test_it_is_one_of_torchs() -> None:
    ours, theirs = ModuleTracker(), torchs.ModuleTracker()
    assert isinstance(ours, torchs.ModuleTracker)
    with ours, theirs:
        missing = [name for name in {*dir(theirs), *vars(theirs)} if not hasattr(ours, name)]
    assert missing == []
    assert ours.parents == theirs.parents == {"Global"}


def test_is_bw_is_true_in_any_backward_as_in_torch() -> None:
    ours, theirs = ModuleTracker(), torchs.ModuleTracker()
    with ours, theirs:
        pass
    seen: list[tuple[bool, bool]] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append((ours.is_bw, theirs.is_bw)))
    x.sum().backward()
    assert seen == [(True, True)]
    assert not ours.is_bw


def test_parents_cannot_be_set_while_modules_are_tracked() -> None:
    tracker = ModuleTracker()
    tracker.parents = {"Global", "mine"}
    assert tracker.parents == {"Global", "mine"}
    with tracker, pytest.raises(AttributeError, match="parents cannot be set while modules are tracked"):
        tracker.parents = {"Global"}


def test_it_cannot_be_entered_twice_at_once() -> None:
    tracker = ModuleTracker()
    with tracker, pytest.raises(SessionError, match="this session is already open"):
        tracker.__enter__()
    with pytest.raises(SessionError, match="this session is not open"):
        tracker.__exit__()


# -- subclasses --------------------------------------------------------------------------------------------------------

Tracker = type[torchs.ModuleTracker]


def subclass(base: Tracker, *names: str) -> Tracker:
    """A subclass that overrides these methods and writes down how each is called."""

    def override(name: str) -> Any:
        def method(self: Any, *args: Any) -> Any:
            told = [a if isinstance(a, str | bool) else type(a).__name__ for a in args]
            self.events.append((name, *told))
            result = getattr(super(made, self), name)(*args)
            return f"<{result}>" if name == "_get_mod_name" and result.isidentifier() else result

        return method

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Tracker = type("Sub", (base,), {"events": [], **{name: override(name) for name in names}})
    return made


POINTS = ["_fw_pre_hook", "_fw_post_hook", "_get_append_fn", "_get_pop_fn", "_maybe_set_engine_callback"]


@pytest.mark.parametrize("names", [[name] for name in POINTS] + [POINTS], ids=lambda names: " ".join(names))
@pytest.mark.parametrize("net", NETS)
def test_methods_that_a_subclass_overrides_are_called_as_torch_calls_them(net: str, names: list[str]) -> None:
    events = []
    for base in (ModuleTracker, torchs.ModuleTracker):
        torch.manual_seed(0)
        model = NETS[net]()
        seen: list[set[str]] = []
        with subclass(base, *names)() as tracker:
            for module in model.modules():
                if isinstance(module, Marked):
                    module.report = lambda *_, t=tracker, s=seen: s.append(set(t.parents))
            model(torch.ones(2, 4)).sum().backward()
        events.append((tracker.events, seen))
    assert events[0] == events[1]
    assert events[0][0]


@pytest.mark.parametrize("net", NETS)
def test_a_subclass_may_give_its_methods_other_arguments(net: str) -> None:
    def made(base: Tracker) -> Any:
        class Running(base):  # type: ignore[valid-type, misc]
            """Knows the kinds of the modules that run in the forward."""

            def __init__(self) -> None:
                super().__init__()
                self.running: list[str] = []

            def _get_append_fn(self, module: nn.Module, name: str, is_bw: bool) -> Any:
                def enter(*_: Any) -> None:
                    self.running.append(type(module).__name__)
                    self.parents.add(name)

                return enter

            def _get_pop_fn(self, module: nn.Module, name: str, is_bw: bool) -> Any:
                def leave(*_: Any) -> None:
                    self.running.remove(type(module).__name__)
                    self.parents.discard(name)

                return leave

            def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:  # noqa: A002
                self._get_append_fn(mod, self._get_mod_name(mod), False)()

            def _fw_post_hook(self, mod: nn.Module, input: Any, output: Any) -> None:  # noqa: A002
                self._get_pop_fn(mod, self._get_mod_name(mod), False)()

        return Running()

    found = []
    for base in (ModuleTracker, torchs.ModuleTracker):
        model = NETS[net]()
        seen: list[tuple[list[str], set[str]]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tracker = made(base)
        with tracker:
            for module in model.modules():
                if isinstance(module, Marked):
                    module.report = lambda *_, t=tracker, s=seen: s.append((t.running.copy(), set(t.parents)))
            model(torch.ones(2, 4)).sum().backward()
        found.append(seen)
    assert found[0] == found[1]
    assert any(running[-1:] == ["Marked"] for running, _ in found[0])


def test_a_subclass_that_keeps_parents_is_warned_of_torchs_errors() -> None:
    overrides = (
        "Counting overrides _fw_pre_hook, _get_pop_fn, so it runs on torch's own hooks: its parents are wrong in"
    )
    with pytest.warns(UserWarning, match=overrides) as said:

        class Counting(ModuleTracker):
            def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:  # noqa: A002
                super()._fw_pre_hook(mod, input)

            def _get_pop_fn(self, name: str, is_bw: bool) -> Any:
                return super()._get_pop_fn(name, is_bw)

    assert said[0].filename == __file__


def test_a_subclass_that_leaves_these_alone_stays_exact() -> None:
    class Named(ModuleTracker):
        def _get_mod_name(self, mod: nn.Module) -> str:
            return type(mod).__name__.upper()

        def __enter__(self) -> Any:
            self.entered = True
            return super().__enter__()

    model = NETS["keywords"]()
    seen: list[set[str]] = []
    with Named() as tracker:
        model[1].report = lambda *_: seen.append(tracker.parents)  # type: ignore[index]
        model(torch.ones(2, 4)).sum().backward()
    assert seen == [{"Global", "SEQUENTIAL", "MARKED"}] * 2
    assert tracker.entered


def test_a_subclass_with_an_enter_of_its_own_has_what_torchs_would() -> None:
    def made(base: Tracker) -> Any:
        class Own(base):  # type: ignore[valid-type, misc]
            def __enter__(self) -> Any:
                self._fw_pre_handle = register_module_forward_pre_hook(self._fw_pre_hook)
                self._fw_post_handle = register_module_forward_hook(self._fw_post_hook)
                return self

            def __exit__(self, *args: Any) -> None:
                torchs.ModuleTracker.__exit__(self, *args)

        return Own()

    found = []
    for base in (ModuleTracker, torchs.ModuleTracker):
        model = NETS["nested"]()
        seen: list[set[str]] = []
        with made(base) as tracker:
            for module in model.modules():
                if isinstance(module, Marked):
                    module.report = lambda *_, t=tracker, s=seen: s.append(set(t.parents))
            model(torch.ones(2, 4)).sum().backward()
        found.append(seen)
    assert found[0] == found[1]
    assert {"Global", "Sequential", "Sequential.1", "Sequential.1.inner"} in found[0]


# -- where torch's says that it is confused ----------------------------------------------------------------------------


class Outer(nn.Module):
    """Calls another of its class, which is no child of it, and then a layer."""

    def __init__(self, other: Outer | None = None) -> None:
        super().__init__()
        self.layer = Marked()
        self.other = (other,)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x if self.other[0] is None else self.other[0](x))


@pytest.mark.parametrize("kind", [torchs.ModuleTracker, ModuleTracker])
def test_a_module_inside_one_of_its_name_confuses_torch_alone(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torch.utils.module_tracker")
    model = Outer(Outer())
    seen: list[set[str]] = []
    with kind() as tracker:
        model.layer.report = lambda *_: seen.append(set(tracker.parents))
        model(torch.ones(2, 4))
    ours = kind is ModuleTracker
    assert ("Outer" in seen[0]) == ours  # the outer one still runs
    assert ("already entered. Outer during forward" in caplog.text) == (not ours)
