"""The base class of results: render them, write them to files, read them back."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from microtome.errors import BadFile
from microtome.files.reading import JSON_LIMIT, File, parse_json, read_bytes, translate_read_errors
from microtome.files.types import find_mismatch, from_plain, to_plain
from microtome.files.writing import translate_write_errors

#: Returns the renderer of a name such as `"formats.text"`.
#: `microtome/__init__.py` sets it, since results do not import `microtome.report`.
_find_renderer: Callable[[str], Callable[..., Any]] | None = None
#: The module and the class of each kind of result, imported when a file of that kind is read.
_KINDS = {
    "profile": ("profile", "Profile"),
    "profiles": ("profiles", "Profiles"),
    "phases": ("phases", "Phases"),
    "diff": ("diff", "Diff"),
    "cuts": ("cuts", "Cuts"),
    "plan": ("plan", "Plan"),
    "codecs": ("codec_costs", "CodecCosts"),
    "run": ("requests", "RequestLog"),
    "sweep": ("sweep", "Sweep"),
    "summary": ("summary", "ModelSummary"),
}


def register_renderers(find: Callable[[str], Callable[..., Any]]) -> None:
    """Set the function by which `render` looks up renderers."""
    global _find_renderer
    _find_renderer = find


def render(name: str, *args: Any, **options: Any) -> Any:
    """Call a renderer by its name."""
    assert _find_renderer is not None, "microtome/__init__.py registers the renderers of microtome.report"
    return _find_renderer(name)(*args, **options)


class Result:
    """A result of which `microtome.report` renders tables, and which JSON stores.

    Attributes:
        kind: The name of the kind in files.
        schema: The version of the JSON: raise it when readers of the old one would misread the new one.
    """

    kind: ClassVar[str]
    schema: ClassVar[int]

    def __init_subclass__(cls, *, kind: str | None = None, schema: int = 1, **options: Any) -> None:
        super().__init_subclass__(**options)
        if kind is not None:  # else as in the base class
            cls.kind, cls.schema = kind, schema

    def __str__(self) -> str:
        text: str = render("formats.text", self)
        return text

    def __rich__(self) -> Any:
        return render("formats.describe", self)

    def show(self) -> None:
        """Print the tables; in a notebook, display them."""
        render("formats.show", self)

    def _repr_html_(self) -> str:
        """Render the tables as HTML for a notebook."""
        html: str = render("formats.html", self)
        return html

    def to_markdown(self, file: File | None = None) -> str:
        """Export Markdown tables: return the text, or write it to the file and return its path."""
        return write(render("formats.markdown", self), file)

    def to_csv(self, file: File | None = None) -> str:
        """Export CSV, raw numbers, one line a row: return the text, or write it to the file and return its path."""
        return write(render("formats.csv", self), file)

    def to_json(self, file: File | None = None) -> str:
        """Export JSON that `microtome.load` reads: return the text, or write it to the file and return its path."""
        data = {"kind": self.kind, "schema": self.schema, **self.as_dict()}
        return write(json.dumps(data, indent=1) + "\n", file)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the JSON."""
        data: dict[str, Any] = to_plain(self)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build a result from the fields of its JSON."""
        result: Self = from_plain(data, cls)
        return result

    def check(self) -> None:
        """Raise ValueError if fields, each of the right type, contradict each other."""


def write(text: str, file: File | None) -> str:
    """Return the text, or write it to the file and return its path.

    >>> write("text", "/does/not/exist.md")
    Traceback (most recent call last):
        ...
    microtome.errors.BadFile: cannot write '/does/not/exist.md': No such file or directory: create the folder first
    """
    if file is None:
        return text
    with translate_write_errors(repr(str(file))):
        Path(file).write_text(text, encoding="utf-8", errors="replace")  # names may hold lone surrogates
    return str(file)


def load_result(file: File) -> Any:
    """Read a result that `to_json` wrote."""
    return parse(read_bytes(file, JSON_LIMIT), repr(str(file)))


def parse(text: str | bytes, source: str) -> Any:
    """Parse the JSON of a result.

    Args:
        source: The name of the file, for errors.
    """
    data = parse_json(text, source)
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "split":
        raise BadFile(f"{source} describes a split model: microtome.load_stage reads the stages in its folder")
    if kind == "rows":
        why = f"{source} has selected rows of a {data.get('of')!r:.80}, not the whole result"
        raise BadFile(f"{why}: write it without options that select rows, such as --top")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadFile(
            f"{source} holds no result of microtome: expected a 'kind' of {' or '.join(_KINDS)}, got {kind!r}"
        )
    module, name = _KINDS[kind]
    cls: Any = getattr(import_module(f"microtome.results.{module}"), name)
    if data.get("schema") != cls.schema:
        raise BadFile(f"{source}: expected version {cls.schema} of a {kind}, got {data.get('schema')!r}")
    with translate_read_errors(f"the {kind} in {source}"):
        result = cls.from_dict(data)
        if (wrong := find_mismatch(result, cls)) is not None:
            raise BadFile(f"{source} is not a {kind}: {wrong.removeprefix('.')}")
        result.check()
    return result
