"""What each call of a model costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from microtome.profile.run import profile

if TYPE_CHECKING:
    from microtome.profile.data import Coverage, Profile, Unknown
    from microtome.profile.rows import Amounts, Group, Row, Tensor

__all__ = ["Amounts", "Coverage", "Group", "Profile", "Row", "Tensor", "Unknown", "profile"]

_IN_DATA = ("Coverage", "Profile", "Unknown")


def __getattr__(name: str) -> Any:
    """Import the classes when they are first asked for: making dataclasses takes time."""
    if name in __all__:
        from microtome.profile import data, rows

        return getattr(data if name in _IN_DATA else rows, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
