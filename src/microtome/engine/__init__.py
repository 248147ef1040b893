"""The only package that touches a model; see README.md for its mechanisms and invariants."""

from microtome.engine.call import Call
from microtome.engine.interventions import Intervention, Replace, ReplaceInputs, ReplaceOp, Skip, Stop, Stopped
from microtome.engine.probes import Probe
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
