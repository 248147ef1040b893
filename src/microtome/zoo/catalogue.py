"""List the models of all sources."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from fnmatch import fnmatchcase

from microtome.errors import MicrotomeError, NoMatch
from microtome.zoo.packages import operators_note
from microtome.zoo.sources import SOURCES


@dataclass(frozen=True)
class Listing:
    """Names that `resolve` accepts.

    Attributes:
        names: Each with its source, such as `zoo:tiny-vit`.
        notes: Which sources are unavailable, and why.
    """

    names: tuple[str, ...]
    notes: tuple[str, ...]


def listing(pattern: str | None = None) -> Listing:
    """List the available models, or those whose full names match a pattern such as `torchvision:resnet*`.

    Models in your own Python code are not listed. Only sources that the pattern can match are imported.

    >>> listing("zoo:*-vit").names
    ('zoo:tiny-vit',)
    """
    names: list[str] = []
    notes: list[str] = []
    prefix, colon, _ = (pattern or "").partition(":")
    for source, module in SOURCES.items():
        if colon and not fnmatchcase(source, prefix):
            continue
        try:
            names += [f"{source}:{name}" for name in module.names()]
        except MicrotomeError as error:
            notes.append(f"{source}: {error}")
    notes += operators_note()
    if pattern is not None and not any(sign in pattern for sign in "*?[:"):
        pattern = f"*{pattern}*"  # a plain word matches anywhere in the name
    matching = tuple(names) if pattern is None else tuple(name for name in names if fnmatchcase(name, pattern))
    if not matching:
        raise NoMatch(_explain_no_match(pattern or "", names, notes))
    return Listing(matching, tuple(notes))


def _explain_no_match(pattern: str, names: list[str], notes: list[str]) -> str:
    bare = pattern.strip("*?").rpartition(":")[2].strip("*?")
    near = difflib.get_close_matches(pattern.strip("*?"), names, n=3, cutoff=0.5)
    near += [name for name in names if bare and bare in name][: 3 - len(near)]
    hint = f" Near: {', '.join(dict.fromkeys(near))}." if near else ""
    reasons = f" {'. '.join(notes)}." if notes and not names else ""
    return f"no model matches {pattern!r}: a pattern must match the whole name, such as 'zoo:*'.{hint}{reasons}"
