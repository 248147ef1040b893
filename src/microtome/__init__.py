"""microtome opens a PyTorch model at any layer: measure it, watch it, cut it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from microtome.engine import Call, Probe, Replace, Session, Skip, Stop, Stopped, select
from microtome.errors import MicrotomeError
from microtome.flops import OpCost, register_formula
from microtome.inputs import Inputs
from microtome.load import load
from microtome.plan import plan
from microtome.profile import profile
from microtome.report import find_renderer
from microtome.results.base import register_renderers
from microtome.split import split
from microtome.trace import trace
from microtome.track import Tracker, track

if TYPE_CHECKING:
    from microtome.capture.attention.attention import attention, rollout
    from microtome.capture.edit import edit, noise, patch_from, scale, zero
    from microtome.capture.extract import extract
    from microtome.capture.features import Features
    from microtome.capture.record import record
    from microtome.devices.meters import Meter, register_meter
    from microtome.profile.energy import EnergyModel
    from microtome.remote.client import connect
    from microtome.remote.server import serve
    from microtome.results.cuts import Cuts
    from microtome.results.link import Link
    from microtome.results.metrics import register_column
    from microtome.results.plan import Plan
    from microtome.results.profile import Profile
    from microtome.results.trace import Trace
    from microtome.split.boundary.boundary import Boundary
    from microtome.split.checkpoint import load_stage
    from microtome.split.cuts.cuts import cuts
    from microtome.split.run_until import run_until

__version__ = "0.1.0"

__all__ = [
    "Boundary",
    "Call",
    "Cuts",
    "EnergyModel",
    "Features",
    "Inputs",
    "Link",
    "Meter",
    "MicrotomeError",
    "OpCost",
    "Plan",
    "Probe",
    "Profile",
    "Replace",
    "Session",
    "Skip",
    "Stop",
    "Stopped",
    "Trace",
    "Tracker",
    "attention",
    "connect",
    "cuts",
    "edit",
    "extract",
    "load",
    "load_stage",
    "noise",
    "patch_from",
    "plan",
    "profile",
    "record",
    "register_column",
    "register_formula",
    "register_meter",
    "rollout",
    "run_until",
    "scale",
    "select",
    "serve",
    "split",
    "trace",
    "track",
    "zero",
]


def __getattr__(name: str) -> Any:
    """Import what most runs do not need when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


register_renderers(find_renderer)

_LATER = {
    "Boundary": "microtome.split.boundary.boundary",
    "Cuts": "microtome.results.cuts",
    "EnergyModel": "microtome.profile.energy",
    "Features": "microtome.capture.features",
    "Link": "microtome.results.link",
    "Meter": "microtome.devices.meters",
    "Plan": "microtome.results.plan",
    "Profile": "microtome.results.profile",
    "Trace": "microtome.results.trace",
    "attention": "microtome.capture.attention.attention",
    "connect": "microtome.remote.client",
    "cuts": "microtome.split.cuts.cuts",
    "edit": "microtome.capture.edit",
    "extract": "microtome.capture.extract",
    "load_stage": "microtome.split.checkpoint",
    "noise": "microtome.capture.edit",
    "patch_from": "microtome.capture.edit",
    "record": "microtome.capture.record",
    "register_column": "microtome.results.metrics",
    "register_meter": "microtome.devices.meters",
    "rollout": "microtome.capture.attention.attention",
    "run_until": "microtome.split.run_until",
    "scale": "microtome.capture.edit",
    "serve": "microtome.remote.server",
    "zero": "microtome.capture.edit",
}
