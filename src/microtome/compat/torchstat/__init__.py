"""A drop-in for torchstat: change the import, keep the code.

Unlike torchstat's, the report is correct, at every granularity, for layers that run several times or never, for outputs
that are tuples, and for a Linear on three dimensions. The model and the process are left unchanged.
"""

from microtome.compat.torchstat.compute_flops import compute_flops
from microtome.compat.torchstat.compute_madd import compute_madd
from microtome.compat.torchstat.compute_memory import compute_memory
from microtome.compat.torchstat.model_hook import ModelHook
from microtome.compat.torchstat.reporter import report_format
from microtome.compat.torchstat.stat_tree import StatNode, StatTree
from microtome.compat.torchstat.statistics import ModelStat, stat

#: The release of torchstat whose names and numbers these are.
__version__ = "0.0.7"

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
