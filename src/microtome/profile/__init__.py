"""What each call of a model costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from microtome.profile.run import profile

if TYPE_CHECKING:
    from microtome.profile.data import Amounts, Coverage, Group, Profile, Row, Tensor, Unknown

__all__ = ["Amounts", "Coverage", "Group", "Profile", "Row", "Tensor", "Unknown", "profile"]


def __getattr__(name: str) -> Any:
    """Import the classes when they are first asked for: making dataclasses takes time."""
    if name in __all__:
        from microtome.profile import data

        return getattr(data, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
