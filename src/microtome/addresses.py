"""Addresses of calls and of values captured at them: parse them, and resolve the names that users write."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from microtome.errors import BadQuery, BadSelector, NoMatch
from microtome.units import some

_ADDRESS = re.compile(r"(.*?)(?:#(\d+))?(?:(/[^/#\[\]]+)(?:#(\d+))?)?(\[.*\])?", re.DOTALL)
CALL_ADDRESS = re.compile(r".*#\d+", re.DOTALL)
_GLOB = re.compile(r"[*?\[]")
#: A row of a tree for the operators that a module runs itself: `attn.(softmax, bmm, …)`.
_OPERATOR_ROW = re.compile(r"(?:(.*)\.)?\([^()]+\)", re.DOTALL)
_INNER_INDEX = re.compile(r"#\d+(?=\.)")
_MAX_SUGGESTIONS = 8

#: The root in tables, whose path is empty; accepted wherever an address is.
ROOT = "(root)"
#: The input of the model in tables. A client that is cut there sends the input.
INPUT = "(input)"
#: The output of the model in tables.
OUTPUT = "(output)"


class _AddressParts(NamedTuple):
    """`path#call/operator#op_index[item]`. An index of None means 0 in an address, and any in a user's name."""

    path: str
    call: int | None
    operator: str
    op_index: int | None
    item: str

    def may_mean(self, address: _AddressParts) -> bool:
        """Whether a name with these parts may refer to an address with the same path and operator."""
        return (
            self.call in (None, address.call or 0)
            and self.op_index in (None, address.op_index or 0)
            and address.item.startswith(self.item)
        )


def _parse(text: str) -> _AddressParts:
    match = _ADDRESS.fullmatch(text)
    assert match is not None
    path, call, operator, op_index, item = match.groups()
    return _AddressParts(path, _index(call), operator or "", _index(op_index), item or "")


def _index(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


class Addresses:
    """The addresses in a result, looked up by names that may leave out whatever is unambiguous.

    `layer` is the address of a module's first call, and its name if there is no other. `layer[0]` is an item of an
    output, `layer/add#1` an operator.

    >>> addresses = Addresses(["a", "b", "b#1", "c[0]"])
    >>> addresses.resolve("a"), addresses.resolve("b#0"), addresses.resolve("c"), addresses.resolve("d")
    ('a', 'b', 'c[0]', None)
    >>> addresses.names
    ['a', 'b#0', 'b#1', 'c[0]']
    >>> addresses.resolve("b")
    Traceback (most recent call last):
        ...
    microtome.errors.NoMatch: 'b' ran 2 times: say which of 'b#0', 'b#1'

    Args:
        aliases: Further paths of shared modules, each with the path used in the addresses.
    """

    def __init__(self, addresses: Iterable[str], aliases: Mapping[str, str] | None = None) -> None:
        self._aliases = aliases or {}
        self._parts: dict[str, _AddressParts] = {address: _parse(address) for address in addresses}
        self._groups: dict[tuple[str, str], list[str]] = {}
        for address, parts in self._parts.items():
            self._groups.setdefault((parts.path, parts.operator), []).append(address)
        self._needs_index = {key: self._repeats(group) for key, group in self._groups.items()}

    def _repeats(self, group: list[str]) -> tuple[bool, bool]:
        """Whether addresses with the same path and operator have several calls, and several operators."""
        parts = [self._parts[address] for address in group]
        return len({part.call or 0 for part in parts}) > 1, len({part.op_index or 0 for part in parts}) > 1

    def __len__(self) -> int:
        return len(self._parts)

    def matches(self, name: object) -> list[str]:
        """The addresses that a name may refer to."""
        if not isinstance(name, str):
            raise BadQuery(f"expected a name such as 'blocks.0' or 'blocks.0#1', got {reprlib.repr(name)}")
        names = [self._aliases[alias] + name[len(alias) :] for alias in self._aliases if _begins_with(name, alias)]
        names += [expand_root(name)]
        return self._match(name) or [address for other in names for address in self._match(other)]

    def _match(self, name: str) -> list[str]:
        wanted = _parse(name)
        group = self._groups.get((wanted.path, wanted.operator), ())
        found = [address for address in group if wanted.may_mean(self._parts[address])]
        return [address for address in found if self._parts[address].item == wanted.item] or found

    def resolve(self, name: object) -> str | None:
        """The address that a name refers to, or None.

        Raises:
            NoMatch: The name is ambiguous.
        """
        found = self.matches(name)
        if len(found) > 1:
            calls = {self._parts[address].call or 0 for address in found}
            why = f"ran {len(calls)} times" if len(calls) > 1 else f"is the name of {len(found)}"
            raise NoMatch(f"{name!r} {why}: say which of {_enumerate([self.name(address) for address in found])}")
        return found[0] if found else None

    def name(self, address: str) -> str:
        """The unambiguous name of an address: with `#0` on the first of several calls or operators."""
        path, call, operator, op_index, item = self._parts[address]
        has_calls, has_operators = self._needs_index[path, operator]
        return f"{path}{_suffix(call, has_calls)}{operator}{_suffix(op_index, has_operators)}{item}"

    @property
    def names(self) -> list[str]:
        """The unambiguous names of all addresses."""
        return [self.name(address) for address in self._parts]


def _begins_with(name: str, path: str) -> bool:
    return name.startswith(path) and name[len(path) : len(path) + 1] in ("", "#", "/", "[")


def expand_root(name: str) -> str:
    """Replace `(root)`, as tables print it, by the path of the root.

    >>> expand_root("(root)"), expand_root("(root)#0"), expand_root("(root).fc")
    ('', '#0', '(root).fc')
    """
    return name[len(ROOT) :] if _begins_with(name, ROOT) else name


def _suffix(index: int | None, is_needed: bool) -> str:
    return f"#{index or 0}" if is_needed or index is not None else ""


def _enumerate(names: list[str]) -> str:
    return some([*map(repr, names)], _MAX_SUGGESTIONS)


def number_calls(addresses: Iterable[str]) -> list[str]:
    """Append `#0` to the first of several calls of a module, as addresses in results have it.

    >>> number_calls(["", "relu", "fc", "relu#1"])
    ['', 'relu#0', 'fc', 'relu#1']
    """
    addresses = list(addresses)
    repeated = {path for path, index in map(split_call_index, addresses) if index}
    return [f"{address}#0" if address in repeated else address for address in addresses]


def strip_first_index(address: str) -> str:
    """The address as `Call.address` has it during a run, when further calls of the module are yet to come."""
    return address.removesuffix("#0")


def find_address(name: object, addresses: Collection[str], aliases: Mapping[str, str] | None = None) -> str:
    """The address in a result that a name refers to; the only call of a module may be named with `#0`.

    Args:
        aliases: Further paths of modules, each with the path used in the addresses.

    Raises:
        NoMatch: There is none, or the module ran several times and the name has no index.
    """
    if not isinstance(name, str):
        raise BadQuery(f"expected the address of a call, such as 'layer1.0.conv1', got {reprlib.repr(name)}")
    for spelling in (name, expand_root(name)):
        for address in (spelling, strip_first_index(spelling)):
            if address in addresses:
                return address
    path, index = split_call_index(name)
    alias = aliases.get(path) if aliases else None
    if alias is not None and (index is not None or alias in addresses):
        return find_address(alias + ("" if index is None else f"#{index}"), addresses)
    calls = [address for address in addresses if split_call_index(address) not in ((name, None), (alias, None))]
    calls = [address for address in calls if split_call_index(address)[0] in (name, alias)]
    if calls:
        what = repr(name) if alias is None else f"{name!r}, which is {alias!r},"
        raise NoMatch(f"{what} ran {len(calls)} times: say which of {_enumerate(calls)}")
    raise path_not_found(name, [*addresses, *(aliases or ())])


def split_call_index(selector: Any) -> tuple[Any, int | None]:
    """Split `"block#1"` into a selector of modules and the index of a call; the index is None if there is none."""
    if isinstance(selector, str) and CALL_ADDRESS.fullmatch(selector):
        path, _, index = selector.rpartition("#")
        return path, int(index)
    return selector, None


def is_glob(text: str) -> bool:
    """Whether a string has wildcards."""
    return _GLOB.search(text) is not None


def glob(text: str) -> re.Pattern[str]:
    """Compile a glob over dotted paths: `**` spans parts, `*` and `?` stay within one, `[...]` is a character set."""
    wildcards = {"**.": r"(?:.+\.)?", "**": ".+", "*": r"[^.]*", "?": r"[^.]"}
    tokens = re.findall(r"\*\*\.|\*\*|\*|\?|\[!?[^\]]+\]|.", text)
    parts = [wildcards.get(token) or _escape(token) for token in tokens]
    try:
        return re.compile("(?=.)" + "".join(parts))  # only '' matches the root, whose path is empty
    except re.error as error:
        raise BadSelector(f"invalid glob {text!r}: {error}") from error


def _escape(token: str) -> str:
    if len(token) == 1:
        return re.escape(token)
    negated = token.startswith("[!")
    characters = token[2 if negated else 1 : -1].replace("\\", r"\\").replace("[", r"\[").replace("^", r"\^")
    return f"[{'^' if negated else ''}{characters}]"


def path_not_found(path: str, paths: Iterable[str]) -> NoMatch:
    """The error for a path that does not exist, with the most similar ones that do."""
    return NoMatch(f"no module at path {path!r}. {suggest_address(path, paths)}")


def not_captured(
    name: str, captured: Iterable[str], modules: Collection[str], hint: str = "add it to the selectors"
) -> NoMatch:
    """The error for a name of which nothing was captured: of a module of the model, or of none.

    Args:
        captured: The addresses of what was captured.
        modules: The paths of the modules of the model.
    """
    captured = list(captured)
    path = split_call_index(expand_root(name))[0]
    if path not in modules or path in _with_paths(captured):
        return path_not_found(name, captured)
    return NoMatch(f"{name!r} was not captured; captured: {_enumerate(captured)}: {hint}")


def suggest_address(name: str, names: Iterable[str]) -> str:
    """A sentence with the addresses that a name in a table or of a part of one stands for, or with similar ones."""
    names = [other for other in names if other]
    explanations = (
        *(_explain_input, _explain_operator, _explain_list, _explain_inner_index, _explain_container),
        _explain_relative_name,
    )
    return next(filter(None, (explain(name, names) for explain in explanations)), "") or suggest_similar(name, names)


def _explain_input(name: str, names: list[str]) -> str:
    if name == INPUT:
        return "It stands for the input of the model, which only a client can be cut at: mt.connect, `microtome run`."
    return f"It stands for the output of the model, whose address is {ROOT!r}." if name == OUTPUT else ""


def _explain_operator(name: str, names: list[str]) -> str:
    if (row := _OPERATOR_ROW.fullmatch(name)) is not None:
        module = f", {row[1]!r}" if row[1] in _with_paths(names) else ""
        return (
            "A row in parentheses has the operators that the module above it runs itself, and no address of its own: "
            f"use that of the module{module}."
        )
    module, slash, _ = name.rpartition("/")
    if not slash or split_call_index(expand_root(module))[0] not in {"", *_with_paths(names)}:
        return ""
    return (
        "Operators can be captured, by mt.extract alone, but not recorded, edited or cut at; the module that runs "
        f"this one is {module!r}."
    )


def _explain_list(name: str, names: list[str]) -> str:
    parts = [part.strip() for part in name.split(",")]
    if len(parts) == 1 or not _with_paths(names).issuperset(parts):
        return ""
    return f"Expected one address, got {len(parts)}: pass each on its own, {' and '.join(map(repr, parts))}."


def _explain_inner_index(name: str, names: list[str]) -> str:
    meant = _calls_of(_INNER_INDEX.sub("", name), names) if _INNER_INDEX.search(name) else []
    return f"An address has one index, at its end. Did you mean {_enumerate(meant)}?" if meant else ""


def _explain_container(name: str, names: list[str]) -> str:
    inside = [other for other in names if other.startswith(f"{name}.")]
    inside = [other for other in inside if "." not in other[len(name) + 1 :]] or inside
    return f"It is not called itself, as a ModuleList is not; inside it are {_enumerate(inside)}." if inside else ""


def _explain_relative_name(name: str, names: list[str]) -> str:
    ends = [other for other in names if other.endswith(f".{name}")]
    ends = ends or [other for other in names if split_call_index(other)[0].endswith(f".{name}")]
    meant = _enumerate(ends)
    return f"Did you mean {meant}? Names in a tree are relative to the call that contains them." if ends else ""


def _with_paths(names: list[str]) -> set[str]:
    """The addresses, and the paths of their modules."""
    return {*names, *(split_call_index(name)[0] for name in names)}


def _calls_of(name: str, names: list[str]) -> list[str]:
    """The address of this name, or those of the calls of the module at this path."""
    return [name] if name in names else [other for other in names if split_call_index(other)[0] == name]


def _first_calls(similar: list[str], names: list[str]) -> list[str]:
    """Replace the calls of each module, in place of the first, by as many of its first calls, which are as similar."""
    paths = [split_call_index(other)[0] for other in similar]
    return [call for path in dict.fromkeys(paths) for call in _calls_of(path, names)[: paths.count(path)]]


def suggest_similar(name: str, names: Iterable[str]) -> str:
    """A sentence with the names most similar to one that does not exist, or with the first few."""
    names = [other for other in names if other]
    similar = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if similar:
        similar = similar if CALL_ADDRESS.fullmatch(name) else _first_calls(similar, names)
        return f"Did you mean {' or '.join(map(repr, similar))}?"
    first = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
    return f"There are: {first}." if names else "The model has no submodules; its own path is ''."
