"""microtome opens a PyTorch model at any layer: measure it, watch it, cut it."""

from microtome.engine import Call, Probe, Replace, Session, Skip, Stop, Stopped, select
from microtome.errors import MicrotomeError
from microtome.inputs import Inputs
from microtome.trace import Trace, trace
from microtome.track import Tracker, track

__version__ = "0.1.0"

__all__ = [
    "Call",
    "Inputs",
    "MicrotomeError",
    "Probe",
    "Replace",
    "Session",
    "Skip",
    "Stop",
    "Stopped",
    "Trace",
    "Tracker",
    "select",
    "trace",
    "track",
]
