"""A drop-in for `torch.utils.module_tracker`: change the import, keep the code."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import nn
from torch.utils import module_tracker

from microtome.engine import Call, Probe, Session
from microtome.engine.signals import SignalSafe

__all__ = ["ModuleTracker"]

#: The methods of torch's tracker that update `parents`; a subclass that overrides one updates `parents` itself.
_UPDATE_METHODS = ("_fw_pre_hook", "_fw_post_hook", "_get_append_fn", "_get_pop_fn", "_maybe_set_engine_callback")


class ModuleTracker(SignalSafe[Any], module_tracker.ModuleTracker):
    """Tracks the names of the running modules: the root's class name and the attribute path, and always `"Global"`.

    A subclass of torch's. Unlike torch's, it is exact for keyword arguments, for inputs that need no gradient, in
    `autograd.grad`, after an exception and with threads; and `FlopCounterMode` can use it:

    >>> import torch
    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> counter = FlopCounterMode(display=False)
    >>> counter.mod_tracker = ModuleTracker()
    >>> with counter:
    ...     _ = torch.nn.Linear(2, 3)(input=torch.ones(4, 2))
    >>> sum(counter.get_flop_counts()["Linear"].values())
    48
    """

    _updates_parents = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._updates_parents = any(getattr(cls, name) is not getattr(ModuleTracker, name) for name in _UPDATE_METHODS)
        overridden = [name for name in _UPDATE_METHODS if name in vars(cls)]
        if overridden:
            warnings.warn(
                f"{cls.__name__} overrides {', '.join(overridden)}, so it runs on torch's own hooks: its parents are "
                "wrong in the backward after keyword arguments or inputs that need no gradient, and with threads. "
                "microtome.track(on_enter=..., on_exit=...) calls back exactly",
                stacklevel=2,
            )

    def __init__(self) -> None:
        self._order = _HookOrder()
        self._session = Session(None, [self._order], backward=True)
        super().__init__()

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    def _set_up(self) -> Self:
        if not self._updates_parents:
            self._session.__enter__()
        module_tracker.ModuleTracker.__enter__(self)
        return self

    def _tear_down(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        try:
            module_tracker.ModuleTracker.__exit__(self, kind, error, trace)
        finally:
            if not self._updates_parents:
                self._session.__exit__(kind, error, trace)

    @property
    def parents(self) -> set[str]:
        """The names of the modules whose forward or backward runs in this thread, and `"Global"`; a new set."""
        if not self._session.is_open:
            return self._parents
        return {"Global", *(self._name(call) for call in self._session.stack if call not in self._order.outside)}

    @parents.setter
    def parents(self, names: set[str]) -> None:
        if self._session.is_open:
            raise AttributeError("parents cannot be set while modules are tracked: it is computed from running calls")
        self._parents = names

    def _name(self, call: Call) -> str:
        module = call.module
        return _torch_name(call.path) if module is None else self._get_mod_name(module)

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:  # noqa: A002  torch's name
        if not self._session.is_open:
            super()._fw_pre_hook(mod, input)
            return
        self._get_mod_name(mod)  # names follow the order in which modules run
        self._order.outside.discard(self._session.current)

    def _fw_post_hook(self, mod: nn.Module, input: Any, output: Any) -> None:  # noqa: A002  torch's name
        if not self._session.is_open:
            super()._fw_post_hook(mod, input, output)
            return
        call = self._session.current
        if call is not None and call.module is mod:
            self._order.outside.add(call)


class _HookOrder(Probe):
    """Finds calls that are running hooks outside of what torch's tracker encloses.

    torch's tracker enters a module after the global hooks that were registered before it, and leaves the module before
    the module's own forward hooks.

    Attributes:
        outside: The open calls that torch's tracker has not entered yet, or has left already.
    """

    def __init__(self) -> None:
        self.outside: set[Call | None] = set()

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.outside.add(call)

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.outside.discard(call)

    def fail(self, call: Call, error: BaseException) -> None:
        self.outside.discard(call)


def _torch_name(path: str) -> str:
    """Convert a path to torch's name, which is the same for two roots of one class: the engine's are `Net`, `Net@2`."""
    root, dot, rest = path.partition(".")
    return root.partition("@")[0] + dot + rest
