"""microtome opens a PyTorch model at any layer: measure it, watch it, cut it."""

from typing import TYPE_CHECKING, Any

from microtome.count import Work, register_formula
from microtome.engine import Call, Probe, Replace, Session, Skip, Stop, Stopped, select
from microtome.errors import MicrotomeError
from microtome.inputs import Inputs
from microtome.profile import profile
from microtome.results import load
from microtome.trace import trace
from microtome.track import Tracker, track

if TYPE_CHECKING:
    from microtome.profile import Profile
    from microtome.trace import Trace

__version__ = "0.1.0"

__all__ = [
    "Call",
    "Inputs",
    "MicrotomeError",
    "Probe",
    "Profile",
    "Replace",
    "Session",
    "Skip",
    "Stop",
    "Stopped",
    "Trace",
    "Tracker",
    "Work",
    "load",
    "profile",
    "register_formula",
    "select",
    "trace",
    "track",
]


def __getattr__(name: str) -> Any:
    """Import classes that only results are made of when they are first asked for."""
    if name == "Trace":
        from microtome.trace.data import Trace

        return Trace
    if name == "Profile":
        from microtome.profile.data import Profile

        return Profile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
