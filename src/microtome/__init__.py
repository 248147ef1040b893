"""microtome opens a PyTorch model at any layer: measure it, watch it, cut it.

Public names are imported when they are first used: `import microtome` does not import torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from microtome.report import find_renderer
from microtome.results.base import register_renderers

if TYPE_CHECKING:
    from microtome import errors, zoo
    from microtome.capture.attention.attention import attention, rollout
    from microtome.capture.edit import edit, noise, patch_from, scale, zero
    from microtome.capture.extract import extract, extractor
    from microtome.capture.features import Features
    from microtome.capture.record import record
    from microtome.devices.meters import Meter, register_meter
    from microtome.engine import Call, Probe, Replace, Session, Skip, Stop, Stopped, select
    from microtome.errors import MicrotomeError
    from microtome.flops import OpCost, register_formula
    from microtome.inputs import Inputs
    from microtome.load import load
    from microtome.plan import plan
    from microtome.profile import profile
    from microtome.profile.energy import EnergyModel
    from microtome.remote.connect import connect
    from microtome.remote.server import serve
    from microtome.results.cuts import Cuts
    from microtome.results.link import Link
    from microtome.results.metrics import register_column
    from microtome.results.phases import Phases
    from microtome.results.plan import Plan
    from microtome.results.profile import Profile
    from microtome.results.trace import Trace
    from microtome.split import split
    from microtome.split.boundary.boundary import Boundary
    from microtome.split.checkpoint import load_stage
    from microtome.split.cuts.cuts import cuts
    from microtome.split.graph.exported_stage import load_exported
    from microtome.split.pipelining.tied_gradients import sum_tied_gradients
    from microtome.split.run_until import run_until
    from microtome.trace import trace
    from microtome.track import Tracker, track

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
    "Phases",
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
    "errors",
    "extract",
    "extractor",
    "load",
    "load_exported",
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
    "sum_tied_gradients",
    "trace",
    "track",
    "zero",
    "zoo",
]

#: The module that defines each name of `__all__`.
_MODULES = {
    name: module
    for module, names in {
        "microtome.capture.attention.attention": ["attention", "rollout"],
        "microtome.capture.edit": ["edit", "noise", "patch_from", "scale", "zero"],
        "microtome.capture.extract": ["extract", "extractor"],
        "microtome.capture.features": ["Features"],
        "microtome.capture.record": ["record"],
        "microtome.devices.meters": ["Meter", "register_meter"],
        "microtome.engine": ["Call", "Probe", "Replace", "Session", "Skip", "Stop", "Stopped", "select"],
        "microtome.errors": ["MicrotomeError"],
        "microtome.flops": ["OpCost", "register_formula"],
        "microtome.inputs": ["Inputs"],
        "microtome.load": ["load"],
        "microtome.plan": ["plan"],
        "microtome.profile": ["profile"],
        "microtome.profile.energy": ["EnergyModel"],
        "microtome.remote.connect": ["connect"],
        "microtome.remote.server": ["serve"],
        "microtome.results.cuts": ["Cuts"],
        "microtome.results.link": ["Link"],
        "microtome.results.metrics": ["register_column"],
        "microtome.results.phases": ["Phases"],
        "microtome.results.plan": ["Plan"],
        "microtome.results.profile": ["Profile"],
        "microtome.results.trace": ["Trace"],
        "microtome.split": ["split"],
        "microtome.split.boundary.boundary": ["Boundary"],
        "microtome.split.checkpoint": ["load_stage"],
        "microtome.split.graph.exported_stage": ["load_exported"],
        "microtome.split.cuts.cuts": ["cuts"],
        "microtome.split.pipelining.tied_gradients": ["sum_tied_gradients"],
        "microtome.split.run_until": ["run_until"],
        "microtome.trace": ["trace"],
        "microtome.track": ["Tracker", "track"],
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    """Import a public name, and keep it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_MODULES.get(name, f"microtome.{name}"))
    globals()[name] = value = getattr(module, name) if name in _MODULES else module
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


class _Package(ModuleType):
    """Keeps `microtome.profile` the function when the subpackage of the same name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets each imported submodule as an attribute of its package.
        if name not in _MODULES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


register_renderers(find_renderer)
sys.modules[__name__].__class__ = _Package
