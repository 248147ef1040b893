"""A drop-in for tracr's split models: change the import, keep the code.

The layers of a model are numbered in execution order. An edge runs the model up to a layer, and a cloud resumes from
there; together they return what the model returns, bit for bit, or an error says why that is not possible.
"""

from microtome.compat.tracr.hooks import (
    EarlyOutput,
    HookExitException,
    create_forward_posthook,
    create_forward_prehook,
)
from microtome.compat.tracr.wrapped_model import WrappedModel

__all__ = [
    "EarlyOutput",
    "HookExitException",
    "WrappedModel",
    "create_forward_posthook",
    "create_forward_prehook",
]
