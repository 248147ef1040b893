"""The face of tracr's split models: change the import, keep the code.

The layers of a model are numbered in the order they run. An edge runs it up to one of them, a cloud goes on from there,
and together they give what the model gives, bit for bit; where that cannot be, they say why.
"""

from microtome.compat.tracr.early_output import EarlyOutput, HookExitException
from microtome.compat.tracr.hooks import create_forward_posthook, create_forward_prehook
from microtome.compat.tracr.wrapped_model import WrappedModel

__all__ = [
    "EarlyOutput",
    "HookExitException",
    "WrappedModel",
    "create_forward_posthook",
    "create_forward_prehook",
]
