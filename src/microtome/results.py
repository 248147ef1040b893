"""What all results can do: be shown, be written to a file, and be read again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from math import inf
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from microtome.errors import BadFile

#: Where the class of each kind of result is, to be imported when a file holds one.
_KINDS = {
    "profile": ("microtome.profile.data", "Profile"),
    "diff": ("microtome.profile.difference", "Diff"),
    "cuts": ("microtome.split.data", "Cuts"),
    "plan": ("microtome.plan.data", "Plan"),
    "codecs": ("microtome.plan.codecs", "CodecCosts"),
    "run": ("microtome.remote.ran", "Ran"),
    "sweep": ("microtome.remote.swept", "Sweep"),
}

File = str | PathLike[str]


class Result:
    """A result that has a kind, a schema and a report.

    Attributes:
        kind: The name of the kind in files.
        schema: The version of its JSON: raised when a reader of the old one would misread the new one.
    """

    kind: ClassVar[str]
    schema: ClassVar[int]

    def __str__(self) -> str:
        return self._report().text(self)

    def __rich__(self) -> Any:
        return import_module("microtome.report.terminal").Printable(self._report().renderable(self))

    def _repr_html_(self) -> str | None:
        """What a notebook shows."""
        html: str | None = import_module("microtome.report.notebook").html(self)
        return html

    def to_markdown(self, file: File | None = None) -> str:
        """As a Markdown table; written to the file if one is named."""
        return write(self._report().markdown(self), file)

    def to_csv(self, file: File | None = None) -> str:
        """As CSV, raw numbers, one line a row; written to the file if one is named."""
        return write(self._report().csv(self), file)

    def to_json(self, file: File | None = None) -> str:
        """As JSON that `microtome.load` reads; written to the file if one is named."""
        data = {"kind": self.kind, "schema": self.schema, **self.as_dict()}
        return write(json.dumps(data, indent=1) + "\n", file)

    def as_dict(self) -> dict[str, Any]:
        """What the JSON holds."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The result that `as_dict` described."""
        raise NotImplementedError

    def _report(self) -> Any:
        # By name: results stand below reports and do not import them.
        return import_module(f"microtome.report.{self.kind}")


def write(text: str, file: File | None) -> str:
    """The text, written to the file if one is named.

    >>> write("text", "/does/not/exist.md")
    Traceback (most recent call last):
        ...
    microtome.errors.BadFile: cannot write '/does/not/exist.md': No such file or directory
    """
    if file is not None:
        try:
            Path(file).write_text(text, encoding="utf-8", errors="replace")  # names may hold halves of characters
        except OSError as error:
            raise BadFile(f"cannot write {str(file)!r}: {error.strerror}") from error
    return text


def load(file: File) -> Any:
    """Read a result that `to_json` wrote, or a folder that `mt.record` wrote to.

    >>> load("/does/not/exist.json")
    Traceback (most recent call last):
        ...
    microtome.errors.BadFile: cannot read '/does/not/exist.json': No such file or directory
    """
    if Path(file).is_dir():
        return import_module("microtome.capture.store").open_folder(file)
    try:
        text = Path(file).read_bytes()
    except OSError as error:
        raise BadFile(f"cannot read {str(file)!r}: {error.strerror}") from error
    return parse(text, repr(str(file)))


def parse(text: str | bytes, what: str) -> Any:
    """The result that `to_json` made a text of.

    Args:
        what: Where the text comes from, for errors.
    """
    try:
        data = json.loads(text, parse_constant=str)  # NaN and Infinity, which are no numbers of JSON
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{what} is not JSON: {error}") from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadFile(f"{what} holds no result of microtome: its 'kind' is {kind!r}, not {' or '.join(_KINDS)}")
    module, name = _KINDS[kind]
    cls: Any = getattr(import_module(module), name)
    if data.get("schema") != cls.schema:
        raise BadFile(f"{what} has version {data.get('schema')!r} of a {kind}; this microtome reads {cls.schema}")
    try:
        result = cls.from_dict(data)
        wrong = _look(cls)(result)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadFile(f"{what} is not a whole {kind}: {type(error).__name__} {error}") from error
    if wrong is not None:
        raise BadFile(f"{what} is not a {kind}: {wrong.removeprefix('.')}")
    return result


@cache
def _look(hint: Any) -> Callable[[Any], str | None]:
    """What says where a value is not of the type that it is annotated with, and what is there; None where it is.

    Made once of a type, since a profile has a hundred numbers a call. It looks for numbers and texts.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        look, *others = [_look(part) for part in parts if part is not NoneType]
        return _nothing if others else lambda value: None if value is None else look(value)
    if hint in (int, float):
        return lambda value: None if type(value) in _NUMBERS and abs(value) != inf else f" is {value!r}, not a number"
    if hint is str:
        return lambda value: None if isinstance(value, str) else f" is {value!r}, not a text"
    if is_dataclass(hint) or hasattr(hint, "_fields"):  # or a named tuple
        hints = get_type_hints(hint)
        names = [field.name for field in fields(hint)] if is_dataclass(hint) else hint._fields
        return partial(_in_fields, [(name, _look(hints[name])) for name in names])
    if origin is tuple and parts[1:] == (...,):
        return partial(_in_items, _look(parts[0]), enumerate)
    if origin is dict:
        return partial(_in_items, _look(parts[1]), dict.items)
    return _nothing


_NUMBERS = (int, float)


def _nothing(value: Any) -> None:
    return None


def _in_fields(looks: list[tuple[str, Callable[[Any], str | None]]], value: Any) -> str | None:
    for name, look in looks:
        if (wrong := look(getattr(value, name))) is not None:
            return f".{name}{wrong}"
    return None


def _in_items(look: Callable[[Any], str | None], pairs: Callable[[Any], Iterable[Any]], value: Any) -> str | None:
    for key, part in pairs(value) if look is not _nothing else ():
        if (wrong := look(part)) is not None:
            return f"[{key!r}]{wrong}"
    return None
