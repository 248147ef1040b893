"""Fences around the examples in docstrings, which would be read as text and links without them."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Fences(griffe.Extension):  # type: ignore[misc]  # without the docs extra it is not there
    """Show doctests as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with its examples between fences.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2").replace("`", "'").splitlines()
    ['Adds.', '', "'''pycon", '>>> 1 + 1', '2', "'''"]
    """
    return _EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", text)
