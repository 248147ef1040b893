"""List the models of all sources."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from fnmatch import fnmatchcase

from microtome.errors import MicrotomeError, NoMatch
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
    """List the available models, or those that match a pattern.

    A word matches anywhere in the name; a pattern such as `torchvision:resnet*` must match all of it. Models in your
    own Python code are not listed. Only sources that the pattern can match are imported.

    >>> listing("zoo:*-vit").names
    ('zoo:tiny-vit',)
    """
    names: list[str] = []
    unavailable: list[str] = []
    for source in _matching_sources(pattern):
        try:
            names += [f"{source}:{name}" for name in SOURCES[source].names()]
        except MicrotomeError as error:
            unavailable.append(f"{source}: {error}")
    is_word = pattern is not None and not any(sign in pattern for sign in "*?[:")
    full_pattern = "*" if pattern is None else f"*{pattern}*" if is_word else pattern
    matching = tuple(name for name in names if fnmatchcase(name, full_pattern))
    if not matching:
        raise NoMatch(_explain_no_match(pattern or "", names, unavailable))
    return Listing(matching, tuple(unavailable))


def _matching_sources(pattern: str | None) -> list[str]:
    prefix, colon, _ = (pattern or "").partition(":")
    sources = [source for source in SOURCES if not colon or fnmatchcase(source, prefix)]
    if not sources:
        near = difflib.get_close_matches(prefix, SOURCES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise NoMatch(f"there is no source {prefix!r} of models: {hint}expected one of {', '.join(SOURCES)}")
    return sources


def _explain_no_match(pattern: str, names: list[str], unavailable: list[str]) -> str:
    bare = pattern.strip("*?").rpartition(":")[2].strip("*?")
    near = difflib.get_close_matches(pattern.strip("*?"), names, n=3, cutoff=0.5)
    near += [name for name in names if bare and bare in name][: 3 - len(near)]
    hint = f" Near: {', '.join(dict.fromkeys(near))}." if near else ""
    reasons = f" {'. '.join(unavailable)}." if unavailable and not names else ""
    return (
        f"no model matches {pattern!r}: a word matches anywhere in the name; a pattern such as 'torchvision:resnet*' "
        f"must match all of it.{hint}{reasons}"
    )
