"""microtome on Ray: stages as a Ray Serve application, data sets and profiles over a cluster.

Needs `microtome[ray]`. Ray is imported when a function is called.
"""

from microtome.scale.ray.features import extract
from microtome.scale.ray.profiles import profile
from microtome.scale.ray.recording import record

__all__ = ["extract", "profile", "record"]
