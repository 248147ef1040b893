"""The one engine that touches a model; everything else reads what it saw. README.md here states its invariants."""

from microtome.engine.call import Call
from microtome.engine.probes import Intervention, Probe, Replace, ReplaceInputs, ReplaceOp, Skip, Stop, Stopped
from microtome.engine.pytree import tensors_in
from microtome.engine.selectors import Selector, select
from microtome.engine.session import Session

__all__ = [
    "Call",
    "Intervention",
    "Probe",
    "Replace",
    "ReplaceInputs",
    "ReplaceOp",
    "Selector",
    "Session",
    "Skip",
    "Stop",
    "Stopped",
    "select",
    "tensors_in",
]
