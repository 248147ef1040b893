"""Import Ray when a function needs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from microtome.errors import NotInstalled


def import_ray(package: str = "ray.data") -> Any:
    """Return the module `ray`, with one of its packages imported."""
    try:
        ray = import_module("ray")
        import_module(package)
    except ImportError as error:
        raise NotInstalled(
            f"{error.name or 'ray'} is not installed, which microtome.scale.ray needs: pip install 'microtome[ray]'"
        ) from error
    return ray
