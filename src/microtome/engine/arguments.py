"""Copy the arguments of a run, so that it cannot change the caller's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import BuiltinMethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from microtome.engine.argument_names import named_arguments
from microtome.engine.pytree import children_of
from microtome.engine.selectors import named_modules
from microtome.engine.torch_internals import disable_current_modes
from microtome.errors import Unsupported, describe_error
from microtome.inputs import Inputs

#: Types whose instances are immutable, and are not copied.
_IMMUTABLE = frozenset((type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device))
#: Handles of objects outside Python's heap: they cannot be copied, and using them does not change them.
_HANDLES = (nn.Module, ModuleType, torch.Stream, torch.Event)


class CannotSubstitute(Exception):
    """The model cannot run on substitute tensors of this kind; other kinds may do."""


def copy_arguments(
    inputs: Inputs, copy_tensor: Callable[[Tensor], Tensor], modules: Iterable[nn.Module] = ()
) -> Inputs:
    """Copy arguments deeply, and each tensor, also inside objects, by `copy_tensor`.

    Args:
        modules: Modules of the model, itself first, to which objects may refer. Neither these nor modules among the
            arguments are copied.

    Raises:
        Unsupported: An argument cannot be copied.
    """
    modules = list(modules)
    shared = [*modules, *modules_in(inputs)]
    copier = _ArgumentCopier(copy_tensor, {id(module): module for module in shared})
    arguments = named_arguments(modules[0] if modules else None, inputs)
    copies = {name: copier.copy(value, name) for name, value in arguments.items()}
    args = list(copies.values())[: len(inputs.args)]
    return inputs.with_arguments(args, {name: copies[name] for name in inputs.kwargs})


def modules_in(inputs: Inputs) -> list[nn.Module]:
    """Every module among the arguments, and the modules inside those."""
    found: dict[int, nn.Module] = {}
    visited: set[int] = set()
    pending: list[Any] = [inputs.args, inputs.kwargs]
    while pending:
        value = pending.pop()
        if isinstance(value, nn.Module):
            found.update((id(module), module) for _, module in named_modules(value))
        elif (parts := children_of(value)) and id(value) not in visited:
            visited.add(id(value))
            pending.extend(parts)
    return list(found.values())


class _ArgumentCopier:
    def __init__(self, copy_tensor: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> None:
        self._copy_tensor = copy_tensor
        self._memo = memo
        self._open: set[int] = set()

    def copy(self, value: Any, place: str) -> Any:
        """Copy one argument: built-in containers here, all other objects by `copy.deepcopy`."""
        kind = value.__class__
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if kind in _IMMUTABLE or isinstance(value, _HANDLES):
            return value
        if isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, ModuleType | None):
            return getattr(self.copy(value.__self__, place), value.__name__)  # `outputs.append` of a list, for example
        is_named_tuple = isinstance(value, tuple) and hasattr(value, "_make")
        if kind not in (list, tuple, dict, set, frozenset) and not is_named_tuple:
            return self._copy_object(value, place)
        if id(value) in self._open:
            raise Unsupported(f"expected finite arguments, got a {kind.__name__} in {place!r} that contains itself")
        if id(value) not in self._memo:
            self._open.add(id(value))
            if kind is dict:
                result = {self.copy(key, place): self.copy(item, place) for key, item in value.items()}
            else:
                parts = [self.copy(item, place) for item in value]
                # A named tuple without its `__new__`, which may check its arguments, as that of a PackedSequence does.
                result = value._make(parts) if is_named_tuple else kind(parts)
            self._open.remove(id(value))
            self._memo[id(value)] = result
        return self._memo[id(value)]

    def _copy_object(self, value: Any, place: str) -> Any:
        try:
            # Without modes: a FakeTensorMode would treat the copies of real tensors as its own.
            with disable_current_modes(), _CopyTensors(self._copy_tensor):
                return copy.deepcopy(value, self._memo)
        except (CannotSubstitute, Unsupported):
            raise
        except Exception as error:  # `__deepcopy__` and the like are somebody else's code
            kind = type(value).__name__
            raise Unsupported(
                f"expected arguments that can be copied, got a {kind} in {place!r} that cannot be: "
                f"{describe_error(error)}. The run may change it, and what the caller passes must stay as it is: "
                f"define {kind}.__deepcopy__, or pass what the model needs of it"
            ) from error


class _CopyTensors(TorchFunctionMode):
    """Makes `copy.deepcopy` copy tensors by a function of ours, also those that are not leaves."""

    def __init__(self, copy_tensor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._copy_tensor = copy_tensor

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = copied = self._copy_tensor(tensor)
            return copied
        return func(*args, **(kwargs or {}))


def as_non_leaf(tensor: Tensor) -> Tensor:
    """Make a tensor the output of an autograd function without inputs, as a non-leaf argument is to a model."""
    with torch.inference_mode(False), torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        output: Tensor = _NonLeaf.apply(anchor, [tensor])
        return output


class _NonLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor]) -> Tensor:
        return tensors[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None
