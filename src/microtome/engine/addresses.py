"""Finding what is meant by a name, where there are addresses of calls and of what was captured at them."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from microtome.engine.calls import Call
from microtome.engine.select import Selector, named, names, no_path, select
from microtome.errors import BadQuery, NoMatch, Unsupported

_ADDRESS = re.compile(r"(.*?)(?:#(\d+))?(?:(/[^/#\[\]]+)(?:#(\d+))?)?(\[.*\])?", re.DOTALL)
_LOOKS_LIKE_A_CALL = re.compile(r".*#\d+", re.DOTALL)
_MOST_LISTED = 8


class _Parts(NamedTuple):
    """`path#call/operator#number[place]`. None: not said, which in an address is the first."""

    path: str
    call: int | None
    operator: str
    number: int | None
    place: str

    def of(self, address: _Parts) -> bool:
        """Whether a name that has these parts may mean the address; the path and the operator are its own."""
        call = self.call is None or self.call == (address.call or 0)
        number = self.number is None or self.number == (address.number or 0)
        return call and number and address.place.startswith(self.place)

    def text(self, *, call: bool, number: bool) -> str:
        """As an address, which says the first call or number too where that is asked for."""
        calls = f"#{self.call or 0}" if call or self.call is not None else ""
        numbers = f"#{self.number or 0}" if number or self.number is not None else ""
        return f"{self.path}{calls}{self.operator}{numbers}{self.place}"


def _parts(text: str) -> _Parts:
    found = _ADDRESS.fullmatch(text)
    assert found is not None
    path, call, operator, number, place = found.groups()
    return _Parts(path, _number(call), operator or "", _number(number), place or "")


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


class Addresses:
    """The addresses that there are. A name means one of them if it leaves nothing open.

    `layer` is the address of a module's first call and, where there is no other, all that need be said. `layer[0]` is a
    part of an output, `layer/add#1` an operator.

    >>> there = Addresses(["a", "b", "b#1", "c[0]"])
    >>> there.one("a"), there.one("b#0"), there.one("c"), there.one("d")
    ('a', 'b', 'c[0]', None)
    >>> there.spelled
    ['a', 'b#0', 'b#1', 'c[0]']
    >>> there.one("b")
    Traceback (most recent call last):
        ...
    microtome.errors.NoMatch: 'b' ran 2 times: say which of 'b#0', 'b#1'

    Args:
        others: More names of modules, such as shared ones have, and the names that they have in the addresses.
    """

    def __init__(self, known: Iterable[str], others: Mapping[str, str] | None = None) -> None:
        self._others = others or {}
        self._known: dict[str, _Parts] = {address: _parts(address) for address in known}
        self._alike: dict[tuple[str, str], list[str]] = {}
        for address, parts in self._known.items():
            self._alike.setdefault((parts.path, parts.operator), []).append(address)
        self._open = {key: self._left_open(alike) for key, alike in self._alike.items()}

    def _left_open(self, alike: list[str]) -> tuple[bool, bool]:
        """Whether there are several calls, and several of a number."""
        parts = [self._known[address] for address in alike]
        return len({one.call or 0 for one in parts}) > 1, len({one.number or 0 for one in parts}) > 1

    def __len__(self) -> int:
        return len(self._known)

    def find(self, name: object) -> list[str]:
        """The addresses that a name may mean."""
        if not isinstance(name, str):
            raise BadQuery(f"a name is a text, such as 'blocks.0' or 'blocks.0#1', got {reprlib.repr(name)}")
        return self._find(name) or [address for text in self._called(name) for address in self._find(text)]

    def _find(self, name: str) -> list[str]:
        wanted = _parts(name)
        found = [one for one in self._alike.get((wanted.path, wanted.operator), ()) if wanted.of(self._known[one])]
        return [one for one in found if self._known[one].place == wanted.place] or found

    def _called(self, name: str) -> list[str]:
        """The name with the first names of modules in the place of others."""
        parts = [(other, name[len(other) :]) for other in self._others if name.startswith(other)]
        return [self._others[other] + rest for other, rest in parts if not rest or rest[0] in "#/["]

    def one(self, name: object) -> str | None:
        """The address that a name means; None where there is none.

        Raises:
            NoMatch: It may mean several.
        """
        found = self.find(name)
        if len(found) > 1:
            calls = {self._known[address].call or 0 for address in found}
            why = f"ran {len(calls)} times" if len(calls) > 1 else f"is the name of {len(found)}"
            raise NoMatch(f"{name!r} {why}: say which of {self._listed(found)}")
        return found[0] if found else None

    def _listed(self, found: list[str]) -> str:
        listed = ", ".join(repr(self.spell(address)) for address in found[:_MOST_LISTED])
        return listed + (", …" if len(found) > _MOST_LISTED else "")

    def spell(self, address: str) -> str:
        """An address as a name that means nothing else: with the index of the first call, where there are others."""
        parts = self._known[address]
        calls, numbers = self._open[parts.path, parts.operator]
        return parts.text(call=calls, number=numbers)

    @property
    def spelled(self) -> list[str]:
        return [self.spell(address) for address in self._known]


def number_calls(addresses: Iterable[str]) -> list[str]:
    """The addresses of the calls of a run as results give them: with `#0` on the first of several calls of a module.

    >>> number_calls(["", "relu", "fc", "relu#1"])
    ['', 'relu#0', 'fc', 'relu#1']
    """
    listed = list(addresses)
    several = {path for path, index in map(call_of, listed) if index}
    return [f"{address}#0" if address in several else address for address in listed]


def unnumbered(address: str) -> str:
    """The address as `Call.address` gives it during a run, when it is not known whether the module will run again."""
    return address.removesuffix("#0")


def find_address(name: object, known: Collection[str]) -> str:
    """The one of the addresses in a result that a name means; `#0` may be said of a module's only call.

    Raises:
        NoMatch: There is none, or the name leaves open which of several calls is meant.
    """
    if not isinstance(name, str):
        raise BadQuery(f"expected the address of a call, such as 'layer1.0.conv1', got {reprlib.repr(name)}")
    for address in (name, unnumbered(name)):
        if address in known:
            return address
    several = [address for address in known if address != name and call_of(address)[0] == name]
    if several:
        listed = ", ".join(map(repr, several[:_MOST_LISTED])) + (", …" if len(several) > _MOST_LISTED else "")
        raise NoMatch(f"{name!r} ran {len(several)} times: say which of {listed}")
    raise no_path(name, known)


def other_names(model: nn.Module) -> dict[str, str]:
    """The further names of shared modules, and the first, which their calls carry."""
    first = {id(module): path for path, module in named(model)}
    return {path: first[id(module)] for path, module in names(model) if path != first[id(module)]}


def refuse_names(paths: Iterable[str]) -> None:
    """Raise where a module's own name cannot be told from the address of a call."""
    for path in paths:
        if _LOOKS_LIKE_A_CALL.fullmatch(path):
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
        every = {path for path, _ in names(model)}
        for selector in [] if at is None else each_selector(at) or [at]:
            refuse_names([selector] if isinstance(selector, str) and selector in every else ())
            modules, index = call_of(selector)
            for path, module in select(model, modules).items():
                self._add(path, module, None if index is None else {index})
        refuse_names(self.modules)

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


def each_selector(at: Selector) -> list[Any]:
    """The selectors in a selector that may be several."""
    several = isinstance(at, Sequence | set | frozenset) and not isinstance(at, str | bytes)
    return [one for part in at for one in each_selector(part)] if several else [at]  # type: ignore[union-attr]


def call_of(text: Any) -> tuple[Any, int | None]:
    """A selector, and which call of each module it names: that after a last `#`, or None."""
    if isinstance(text, str) and _LOOKS_LIKE_A_CALL.fullmatch(text):
        path, _, index = text.rpartition("#")
        return path, int(index)
    return text, None
