"""Fence the examples in docstrings, which mkdocs would otherwise render as text and links."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Fences(griffe.Extension):  # type: ignore[misc]  # only installed with the docs extra
    """Show doctests as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Put the examples in a text between fences.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2").replace("`", "'").splitlines()
    ['Adds.', '', "'''pycon", '>>> 1 + 1', '2', "'''"]
    """
    return _EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", text)
