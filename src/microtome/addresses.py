"""Addresses of calls and of what was captured at them: parse them, and find the one that a name means."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from microtome.errors import BadQuery, BadSelector, NoMatch

_ADDRESS = re.compile(r"(.*?)(?:#(\d+))?(?:(/[^/#\[\]]+)(?:#(\d+))?)?(\[.*\])?", re.DOTALL)
LOOKS_LIKE_A_CALL = re.compile(r".*#\d+", re.DOTALL)
_GLOB = re.compile(r"[*?\[]")
_MOST_LISTED = 8


class _AddressParts(NamedTuple):
    """`path#call/operator#number[place]`. None: not said, which in an address is the first."""

    path: str
    call: int | None
    operator: str
    number: int | None
    place: str

    def of(self, address: _AddressParts) -> bool:
        """Whether a name that has these parts may mean the address; the path and the operator are its own."""
        call = self.call is None or self.call == (address.call or 0)
        number = self.number is None or self.number == (address.number or 0)
        return call and number and address.place.startswith(self.place)

    def text(self, *, call: bool, number: bool) -> str:
        """As an address, which says the first call or number too where that is asked for."""
        calls = f"#{self.call or 0}" if call or self.call is not None else ""
        numbers = f"#{self.number or 0}" if number or self.number is not None else ""
        return f"{self.path}{calls}{self.operator}{numbers}{self.place}"


def _parts(text: str) -> _AddressParts:
    found = _ADDRESS.fullmatch(text)
    assert found is not None
    path, call, operator, number, place = found.groups()
    return _AddressParts(path, _number(call), operator or "", _number(number), place or "")


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
        self._known: dict[str, _AddressParts] = {address: _parts(address) for address in known}
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


def call_of(text: Any) -> tuple[Any, int | None]:
    """A selector, and which call of each module it names: that after a last `#`, or None."""
    if isinstance(text, str) and LOOKS_LIKE_A_CALL.fullmatch(text):
        path, _, index = text.rpartition("#")
        return path, int(index)
    return text, None


def is_glob(text: str) -> bool:
    """Whether a text has wildcards."""
    return _GLOB.search(text) is not None


def glob(text: str) -> re.Pattern[str]:
    """`**` spans parts, `*` and `?` stay within one, `[...]` is a set of characters; all else is itself."""
    wild = {"**.": r"(?:.+\.)?", "**": ".+", "*": r"[^.]*", "?": r"[^.]"}
    tokens = re.findall(r"\*\*\.|\*\*|\*|\?|\[!?[^\]]+\]|.", text)
    parts = (wild.get(token) or (_characters(token) if len(token) > 1 else re.escape(token)) for token in tokens)
    try:
        return re.compile("(?=.)" + "".join(parts))  # the root, whose path is empty, is matched by '' alone
    except re.error as error:
        raise BadSelector(f"cannot read the glob {text!r}: {error}") from error


def _characters(token: str) -> str:
    negated = token.startswith("[!")
    inside = token[2 if negated else 1 : -1].replace("\\", r"\\").replace("[", r"\[").replace("^", r"\^")
    return f"[{'^' if negated else ''}{inside}]"


def no_path(path: str, known: Iterable[str]) -> NoMatch:
    """The error for a path that does not exist, with the nearest that do."""
    return NoMatch(f"no module at path {path!r}. {nearest(path, known)}")


def nearest(wanted: str, known: Iterable[str]) -> str:
    """A sentence that names the most similar of the known names, or some of them."""
    known = [name for name in known if name]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(map(repr, near))}?"
    some = ", ".join(map(repr, known[:5])) + (", …" if len(known) > 5 else "")
    return f"There are: {some}." if known else "The model has no submodules; its own path is ''."
