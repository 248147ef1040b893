"""Everything that can be named here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from fnmatch import fnmatchcase

from microtome.errors import MicrotomeError, NoMatch
from microtome.zoo.sources import SOURCES
from microtome.zoo.torchvision_import import operators_note


@dataclass(frozen=True)
class Listing:
    """Names that `resolve` takes.

    Attributes:
        names: Each with its source, such as `zoo:tiny-vit`.
        notes: Which sources are missing, and why.
    """

    names: tuple[str, ...]
    notes: tuple[str, ...]


def listing(pattern: str | None = None) -> Listing:
    """The models that can be named here; with a pattern such as `torchvision:resnet*`, those whose full name fits it.

    Python code of your own can be named too and is not listed. Only the sources that the pattern may mean are imported.

    >>> listing("zoo:*-vit").names
    ('zoo:tiny-vit',)
    """
    names: list[str] = []
    notes: list[str] = []
    for source, module in SOURCES.items():
        if pattern is not None and not _may_mean(pattern, source):
            continue
        try:
            names += [f"{source}:{name}" for name in module.names()]
        except MicrotomeError as error:
            notes.append(f"{source}: {error}")
    notes += operators_note()
    if pattern is not None and not any(sign in pattern for sign in "*?[:"):
        pattern = f"*{pattern}*"  # a word, wherever it is in the name
    fitting = tuple(names) if pattern is None else tuple(name for name in names if fnmatchcase(name, pattern))
    if not fitting:
        raise NoMatch(_nothing(pattern or "", names, notes))
    return Listing(fitting, tuple(notes))


def _may_mean(pattern: str, source: str) -> bool:
    wanted, colon, _ = pattern.partition(":")
    return not colon or fnmatchcase(source, wanted)


def _nothing(pattern: str, names: list[str], notes: list[str]) -> str:
    bare = pattern.strip("*?").rpartition(":")[2].strip("*?")
    near = difflib.get_close_matches(pattern.strip("*?"), names, n=3, cutoff=0.5)
    near += [name for name in names if bare and bare in name][: 3 - len(near)]
    hint = f" Near: {', '.join(dict.fromkeys(near))}." if near else ""
    why = f" {'. '.join(notes)}." if notes and not names else ""
    return f"no model fits {pattern!r}: a pattern is matched against the whole name, such as 'zoo:*'.{hint}{why}"
