"""microtome on Ray: stages as a Ray Serve application, data sets and profiles over a cluster.

Needs `microtome[ray]`. Ray is imported when a function is called, or a name of Ray Serve is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import microtome
from microtome.scale.ray.features import extract
from microtome.scale.ray.packages import import_ray
from microtome.scale.ray.profiles import profile
from microtome.scale.ray.recording import record

if TYPE_CHECKING:
    from microtome.scale.ray.deployment import Deployment
    from microtome.scale.ray.serve_application import application, deploy

__all__ = ["Deployment", "application", "deploy", "extract", "profile", "record"]

#: The modules of the names that need Ray Serve.
_MODULES = {
    "Deployment": "microtome.scale.ray.deployment",
    "application": "microtome.scale.ray.serve_application",
    "deploy": "microtome.scale.ray.serve_application",
}

# `microtome.scale` is the function that makes an edit: without this, `microtome.scale.ray.deploy` would fail.
microtome.scale.ray = sys.modules[__name__]  # type: ignore[attr-defined]


def __getattr__(name: str) -> Any:
    """Import a name of Ray Serve, and keep it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_ray("ray.serve")
    globals()[name] = value = getattr(import_module(_MODULES[name]), name)
    return value
