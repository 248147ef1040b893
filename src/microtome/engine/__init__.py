"""The one engine that touches a model; everything else reads what it saw. README.md here states its invariants."""

from microtome.engine.calls import Call, Phase
from microtome.engine.probes import Feed, Intervention, Probe, Replace, ReplaceOp, Skip, Stop, Stopped
from microtome.engine.select import Selector, select
from microtome.engine.session import Session
from microtome.engine.structure import tensors_in

__all__ = [
    "Call",
    "Feed",
    "Intervention",
    "Phase",
    "Probe",
    "Replace",
    "ReplaceOp",
    "Selector",
    "Session",
    "Skip",
    "Stop",
    "Stopped",
    "select",
    "tensors_in",
]
