"""microtome opens a PyTorch model at any layer: measure it, watch it, cut it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from microtome.count import Work, register_formula
from microtome.engine import Call, Probe, Replace, Session, Skip, Stop, Stopped, select
from microtome.errors import MicrotomeError
from microtome.inputs import Inputs
from microtome.plan import plan
from microtome.profile import profile
from microtome.rendering import Renderer, provide_renderers
from microtome.results import load
from microtome.split import split
from microtome.trace import trace
from microtome.track import Tracker, track

if TYPE_CHECKING:
    from microtome.capture.attention import attention, rollout
    from microtome.capture.edit import edit, noise, patch_from, scale, zero
    from microtome.capture.extract import extract
    from microtome.capture.features import Features
    from microtome.capture.record import record
    from microtome.measure.energy import Meter, register_meter
    from microtome.plan.data import Plan
    from microtome.plan.link import Link
    from microtome.profile import Profile
    from microtome.profile.energy import EnergyModel
    from microtome.remote.client import connect
    from microtome.remote.server import serve
    from microtome.report.columns import register_column
    from microtome.split.boundary import Boundary
    from microtome.split.cuts import cuts
    from microtome.split.data import Cuts
    from microtome.split.files import load_stage
    from microtome.split.until import run_until
    from microtome.trace import Trace

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
    "Work",
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


def _find_renderer(form: str) -> Renderer:
    from microtome.report.renderers import find_renderer

    return find_renderer(form)


provide_renderers(_find_renderer)


def __getattr__(name: str) -> Any:
    """Import what most runs do not need when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


_LATER = {
    "Boundary": "microtome.split.boundary",
    "Cuts": "microtome.split.data",
    "EnergyModel": "microtome.profile.energy",
    "Features": "microtome.capture.features",
    "Link": "microtome.plan.link",
    "Meter": "microtome.measure.energy",
    "Plan": "microtome.plan.data",
    "Profile": "microtome.profile.data",
    "Trace": "microtome.trace.data",
    "attention": "microtome.capture.attention",
    "connect": "microtome.remote.client",
    "cuts": "microtome.split.cuts",
    "edit": "microtome.capture.edit",
    "extract": "microtome.capture.extract",
    "load_stage": "microtome.split.files",
    "noise": "microtome.capture.edit",
    "patch_from": "microtome.capture.edit",
    "record": "microtome.capture.record",
    "register_column": "microtome.report.columns",
    "register_meter": "microtome.measure.energy",
    "rollout": "microtome.capture.attention",
    "run_until": "microtome.split.until",
    "scale": "microtome.capture.edit",
    "serve": "microtome.remote.server",
    "zero": "microtome.capture.edit",
}
