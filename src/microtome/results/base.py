"""The base class of results: show them, write them to files, read them again."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from microtome.errors import BadFile
from microtome.files.reading import JSON_LIMIT, File, parse_json, read_bytes, translate_read_errors
from microtome.files.types import find_mismatch, from_plain, to_plain
from microtome.files.writing import translate_write_errors
from microtome.results.rendering import render

#: The module and the class of each kind of result, imported when a file holds one.
_KINDS = {
    "profile": ("profile", "Profile"),
    "diff": ("diff", "Diff"),
    "cuts": ("cuts", "Cuts"),
    "plan": ("plan", "Plan"),
    "codecs": ("codec_costs", "CodecCosts"),
    "run": ("requests", "RequestLog"),
    "sweep": ("sweep", "Sweep"),
}


class Result:
    """A result that has a kind, a schema and a report.

    Attributes:
        kind: The name of the kind in files.
        schema: The version of its JSON: raised when a reader of the old one would misread the new one.
    """

    kind: ClassVar[str]
    schema: ClassVar[int]

    def __str__(self) -> str:
        text: str = render("formats.text", self)
        return text

    def __rich__(self) -> Any:
        return render("formats.describe", self)

    def _repr_html_(self) -> str:
        """The tables as HTML, for notebooks."""
        html: str = render("formats.html", self)
        return html

    def to_markdown(self, file: File | None = None) -> str:
        """Export Markdown tables; written to the file if one is named."""
        return write(render("formats.markdown", self), file)

    def to_csv(self, file: File | None = None) -> str:
        """Export CSV, raw numbers, one line a row; written to the file if one is named."""
        return write(render("formats.csv", self), file)

    def to_json(self, file: File | None = None) -> str:
        """Export JSON that `microtome.load` reads; written to the file if one is named."""
        data = {"kind": self.kind, "schema": self.schema, **self.as_dict()}
        return write(json.dumps(data, indent=1) + "\n", file)

    def as_dict(self) -> dict[str, Any]:
        """The fields of the JSON."""
        data: dict[str, Any] = to_plain(self)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build the result from what `as_dict` returned."""
        result: Self = from_plain(data, cls)
        return result

    def check(self) -> None:
        """Raise ValueError if its parts, each of the right type, do not belong together."""


def write(text: str, file: File | None) -> str:
    """Write the text to the file if one is named, and return it.

    >>> write("text", "/does/not/exist.md")
    Traceback (most recent call last):
        ...
    microtome.errors.BadFile: cannot write '/does/not/exist.md': No such file or directory
    """
    if file is not None:
        with translate_write_errors(repr(str(file))):
            Path(file).write_text(text, encoding="utf-8", errors="replace")  # names may hold halves of characters
    return text


def load_result(file: File) -> Any:
    """Read a result that `to_json` wrote."""
    return parse(read_bytes(file, JSON_LIMIT), repr(str(file)))


def parse(text: str | bytes, what: str) -> Any:
    """Parse the JSON of a result.

    Args:
        what: The source of the text, for errors.
    """
    data = parse_json(text, what)
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadFile(f"{what} holds no result of microtome: expected a 'kind' of {' or '.join(_KINDS)}, got {kind!r}")
    module, name = _KINDS[kind]
    cls: Any = getattr(import_module(f"microtome.results.{module}"), name)
    if data.get("schema") != cls.schema:
        raise BadFile(f"{what}: expected version {cls.schema} of a {kind}, got {data.get('schema')!r}")
    with translate_read_errors(f"the {kind} in {what}"):
        result = cls.from_dict(data)
        if (wrong := find_mismatch(result, cls)) is not None:
            raise BadFile(f"{what} is not a {kind}: {wrong.removeprefix('.')}")
        result.check()
    return result
