"""Select calls of modules by address."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from microtome.addresses import LOOKS_LIKE_A_CALL, call_of
from microtome.engine.call import Call
from microtome.engine.selectors import Selector, named_modules, named_modules_with_aliases, select
from microtome.errors import Unsupported


def other_names(model: nn.Module) -> dict[str, str]:
    """The further names of shared modules, and the first, which their calls carry."""
    first = {id(module): path for path, module in named_modules(model)}
    return {path: first[id(module)] for path, module in named_modules_with_aliases(model) if path != first[id(module)]}


def reject_ambiguous_names(paths: Iterable[str]) -> None:
    """Raise where a module's own name cannot be told from the address of a call."""
    for path in paths:
        if LOOKS_LIKE_A_CALL.fullmatch(path):
            base, _, index = path.rpartition("#")
            raise Unsupported(
                f"the name of the module {path!r} reads as the call {index} of {base!r}: "
                "give it a name that does not end with '#' and a number"
            )


class CallSelection:
    """The calls that selectors name: all calls of the modules or, by an address such as `"block#1"`, one of each.

    Attributes:
        modules: The modules, by path.
    """

    def __init__(self, model: nn.Module, at: Selector | None) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._indices: dict[str, set[int] | None] = {}
        every = {path for path, _ in named_modules_with_aliases(model)}
        for selector in [] if at is None else flatten_selector(at) or [at]:
            reject_ambiguous_names([selector] if isinstance(selector, str) and selector in every else ())
            modules, index = call_of(selector)
            for path, module in select(model, modules).items():
                self._add(path, module, None if index is None else {index})
        reject_ambiguous_names(self.modules)

    def _add(self, path: str, module: nn.Module, indices: set[int] | None) -> None:
        known = self._indices.get(path, set())
        self.modules[path] = module
        self._indices[path] = None if indices is None or known is None else known | indices

    def update(self, other: CallSelection) -> None:
        """Add the calls of another selection."""
        for path, module in other.modules.items():
            self._add(path, module, other._indices[path])

    def has(self, path: str, index: int) -> bool:
        known = self._indices.get(path, ())
        return known is None or index in known

    def __contains__(self, call: object) -> bool:
        return isinstance(call, Call) and self.has(call.path, call.index)

    def address(self, call: Call) -> str:
        """The address of a call, with `#0` where it was named as one of several."""
        return call.address if call.index or self._indices.get(call.path) is None else f"{call.path}#0"

    @property
    def addresses(self) -> list[str]:
        """The single calls that are named, as `Call.address` gives them."""
        indices = [(path, index) for path, known in self._indices.items() for index in sorted(known or ())]
        return [f"{path}#{index}" if index else path for path, index in indices]


def flatten_selector(at: Selector) -> list[Any]:
    """The selectors in a selector that may be several."""
    several = isinstance(at, Sequence | set | frozenset) and not isinstance(at, str | bytes)
    return [one for part in at for one in flatten_selector(part)] if several else [at]  # type: ignore[union-attr]
