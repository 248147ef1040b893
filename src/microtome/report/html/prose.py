"""Sentences of the library in HTML, where code is between backticks."""

from __future__ import annotations

import re
from html import escape


def prose(text: str) -> str:
    """Escape a sentence, and render what is between backticks as code.

    >>> prose("a < b: add --time of `microtome profile`")
    'a &lt; b: add --time of <code>microtome profile</code>'
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def plain_prose(text: str) -> str:
    """Return a sentence without backticks, for attributes and scripts.

    >>> plain_prose("add --time of `microtome profile`")
    'add --time of microtome profile'
    """
    return text.replace("`", "")
