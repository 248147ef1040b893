"""What all results can do: be shown, be written to a file, and be read again."""

from __future__ import annotations

import json
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

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
        return self._report().renderable(self)

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
            Path(file).write_text(text, encoding="utf-8")
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
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{what} is not JSON: {error}") from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadFile(f"{what} holds no result of microtome: its 'kind' is {kind!r}, not {' or '.join(_KINDS)}")
    module, name = _KINDS[kind]
    cls: type[Result] = getattr(import_module(module), name)
    if data.get("schema") != cls.schema:
        raise BadFile(f"{what} has version {data.get('schema')!r} of a {kind}; this microtome reads {cls.schema}")
    try:
        return cls.from_dict(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadFile(f"{what} is not a whole {kind}: {type(error).__name__} {error}") from error
