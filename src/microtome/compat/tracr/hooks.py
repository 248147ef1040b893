"""tracr's makers of hooks, which microtome does not need: they say what to use in their place."""

from __future__ import annotations

from typing import Any, NoReturn

from microtome.errors import Unsupported


def create_forward_prehook(
    wrapped_model: Any, layer_index: int, layer_name: str, input_shape: tuple[int, ...], device: str
) -> NoReturn:
    """Raise `Unsupported`: no hooks are put on layers."""
    raise _not_needed("create_forward_prehook", "wrapped.layers[i] is its path: register a pre-hook of your own")


def create_forward_posthook(
    wrapped_model: Any, layer_index: int, layer_name: str, input_shape: tuple[int, ...], device: str
) -> NoReturn:
    """Raise `Unsupported`: no hooks are put on layers."""
    raise _not_needed(
        "create_forward_posthook",
        "register a hook of your own, which may raise HookExitException(result); wrapped.save_layers keeps outputs",
    )


def _not_needed(name: str, instead: str) -> Unsupported:
    return Unsupported(f"{name}: WrappedModel measures and stops layers without hooks on them. {instead}")
