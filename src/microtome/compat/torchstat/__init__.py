"""The face of torchstat: change the import, keep the code.

Unlike torchstat's, the report is right for models that run a layer several times or never, return tuples or give three
sizes to a Linear, at every granularity; and model and process are afterwards as they were.
"""

from microtome.compat.torchstat.compute import compute_flops, compute_madd, compute_memory
from microtome.compat.torchstat.hook import ModelHook
from microtome.compat.torchstat.report import report_format
from microtome.compat.torchstat.statistics import ModelStat, stat
from microtome.compat.torchstat.tree import StatNode, StatTree

__all__ = [
    "ModelHook",
    "ModelStat",
    "StatNode",
    "StatTree",
    "compute_flops",
    "compute_madd",
    "compute_memory",
    "report_format",
    "stat",
]
