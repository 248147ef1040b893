"""Subclasses of the drop-ins that override private methods of the originals."""

from __future__ import annotations

from collections.abc import Iterable

from microtome.errors import Unsupported


def refuse_overrides(cls: type, names: Iterable[str], instead: str) -> None:
    """Raise if a class overrides methods that the original calls and the drop-in does not.

    Args:
        instead: What to do, as the end of the message.
    """
    overridden = [name for name in names if name in vars(cls)]
    if overridden:
        base = cls.__mro__[1].__name__
        raise Unsupported(
            f"expected a subclass of {base} that overrides public methods, got {cls.__name__} with "
            f"{', '.join(overridden)}, which microtome's {base} never calls: {instead}"
        )
