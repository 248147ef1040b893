"""Import Ray when a function needs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from microtome.errors import NotInstalled


def import_ray() -> Any:
    """Return the module `ray`, with `ray.data` imported."""
    try:
        ray = import_module("ray")
        import_module("ray.data")
    except ImportError as error:
        raise NotInstalled(
            f"{error.name or 'ray'} is not installed, which microtome.scale.ray needs: pip install 'microtome[ray]'"
        ) from error
    return ray
