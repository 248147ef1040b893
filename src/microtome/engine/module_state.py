"""Read and write the state of modules without their `__setattr__`, and run the hooks that users registered on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from microtome.engine.signals import signal_safe
from microtome.engine.snapshot import CONTAINERS, copy_container, has_same_items, restore_containers, restore_dict

#: The names that torch itself stores in the `__dict__` of every module.
TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__)

_MISSING = object()


class Attributes(NamedTuple):
    """The attributes of a module at some time.

    Attributes:
        values: All of them, by name.
        contents: A copy of each that is a container, except torch's own.
    """

    values: dict[str, Any]
    contents: dict[str, Any]


# -- weights -----------------------------------------------------------------------------------------------------------


def replace_tensors(model: nn.Module, replacement: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of a model, tied ones in every module that holds them."""
    for module in model.modules():
        namespaces: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for namespace in namespaces:
            for name, tensor in namespace.items():
                if tensor is not None:
                    namespace[name] = replacement(tensor)


def unregister_tensors(model: nn.Module, replacement: Callable[[Tensor], Tensor | None]) -> None:
    """Replace parameters and buffers of a model by plain attributes; None: it stays registered."""
    for module in model.modules():
        namespaces: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for namespace in namespaces:
            for name, tensor in list(namespace.items()):
                if tensor is not None and (attribute := replacement(tensor)) is not None:
                    del namespace[name]
                    module.__dict__[name] = attribute


def set_buffer(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace one buffer of a module."""
    module._buffers[name] = tensor


# -- attributes --------------------------------------------------------------------------------------------------------


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a module that is neither a parameter nor a buffer, whatever its value."""
    module.__dict__[name] = value


def share_registered(module: nn.Module, model: nn.Module) -> None:
    """Register in a module what is registered in a model; they have the same dicts, so it stays so."""
    for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        module.__dict__[name] = model.__dict__[name]


def frozen_copy(weight: Tensor, refuse: Callable[[Tensor], None]) -> Tensor:
    """A parameter with the same memory; `refuse` is called with a gradient that it gets."""
    frozen = nn.Parameter(weight.detach())
    frozen.register_hook(refuse)
    return frozen


def copy_attributes(module: nn.Module) -> Attributes:
    """The attributes of a module, with copies of those that are containers, except torch's own."""
    values = dict(module.__dict__)
    own = values.keys() - TORCH_ATTRIBUTES
    contents = {name: copy_container(values[name]) for name in own if isinstance(values[name], CONTAINERS)}
    return Attributes(values, contents)


def restore_attributes(module: nn.Module, before: Attributes, *, where: Callable[[Any], bool]) -> None:
    """Restore the attributes whose values now satisfy a predicate, except torch's own; delete those that are new."""
    values, contents = before
    now = dict(module.__dict__)
    is_same = len(now) == len(values) and all(map(is_, map(values.get, now, repeat(_MISSING)), now.values()))
    if is_same and all(has_same_items(values[name], copied) for name, copied in contents.items()):
        return  # as nearly always
    for name, value in now.items():
        original = values.get(name, _MISSING)
        if value is original and (name not in contents or has_same_items(value, contents[name])):
            continue
        if name in TORCH_ATTRIBUTES or not where(value):
            continue
        if original is _MISSING:
            del module.__dict__[name]
            continue
        module.__dict__[name] = original
        if name in contents:
            restore_containers([(original, contents[name])])


@signal_safe
def without_attributes(modules: Iterable[tuple[nn.Module, Iterable[str]]]) -> Iterator[None]:
    """Remove these attributes of modules in the block; one that is set meanwhile keeps its new value."""
    modules = list(modules)
    states = [(module.__dict__, dict(module.__dict__)) for module, _ in modules]
    try:
        for module, names in modules:
            for name in names:
                module.__dict__.pop(name, None)
        yield
    finally:
        for attributes, before in states:
            restore_dict(attributes, {**before, **attributes})  # in their original order


# -- hooks -------------------------------------------------------------------------------------------------------------


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks."""
    return bool(module._forward_hooks)


def run_forward_hooks(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, ignore: type[BaseException]
) -> None:
    """Run a module's forward hooks for their side effects, where its call is skipped; return values are dropped.

    Args:
        ignore: An exception that hooks may raise.
    """
    for key, hook in list(module._forward_hooks.items()):
        with suppress(ignore):
            if key in module._forward_hooks_with_kwargs:
                hook(module, args, kwargs, output)
            else:
                hook(module, args, output)
