"""Find the objects that calls mutate and that a model takes or returns: candidates for state, such as a KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from microtome.engine.argument_names import named_arguments
from microtome.engine.arguments import copy_arguments
from microtome.engine.meta_tensors import value_of
from microtome.engine.pytree import RECORD, base_class, is_plain_class, node_type, reachable_tensors
from microtome.engine.selectors import unwrap_model
from microtome.errors import BadQuery, Unsupported
from microtome.inputs import Inputs
from microtome.split.analysis.call_arguments import CallArguments
from microtome.split.state.snapshot import digest_of


class MutatedObject(NamedTuple):
    """An object that calls mutate.

    Attributes:
        cls: Its class.
        name: The argument of the model that it is, or the key of the model's output; None: it is neither.
        is_input: Whether it is an argument of the model.
        initial: A copy of it when it was first passed to a call; None: it cannot be copied.
    """

    cls: type
    name: str | None
    is_input: bool
    initial: Any


class MutatedObjects:
    """Observes the objects among the arguments of calls."""

    def __init__(self) -> None:
        self._initial: dict[int, tuple[Any, Any]] = {}  # each object, and a copy
        self._mutated: dict[int, Any] = {}
        self.found: list[MutatedObject] = []
        self.first_digest: str | None = None  # of the states when the first call takes them

    def enter(self, arguments: CallArguments, *, is_input: bool) -> None:
        """Copy objects that are passed for the first time."""
        if self.first_digest is None and arguments.state_objects and not is_input:
            self.first_digest = digest_of(arguments.state_objects, values=False)
        for item in _objects(arguments):
            if id(item) not in self._initial:
                self._initial[id(item)] = item, None if is_input else _try_copy(item)

    def exit(self, mutated: Iterable[Any]) -> None:
        """Note the objects that a call mutated."""
        for item in mutated:
            if id(item) in self._initial:
                self._mutated[id(item)] = item

    def find_names(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Name the objects by the model's arguments and output, at the end of a run; drop all references."""
        named = {**(dict(output) if isinstance(output, Mapping) else {}), **kwargs}
        inputs = [id(item) for item in (*args, *kwargs.values())]
        for item in self._mutated.values():
            name = next((name for name, value in named.items() if value is item), None)
            self.found.append(MutatedObject(type(item), name, id(item) in inputs, self._initial[id(item)][1]))
        self._initial, self._mutated = {}, {}


def find_states(model: nn.Module, found: list[MutatedObject]) -> tuple[tuple[type, ...], dict[str, Any]]:
    """Choose the objects that are state: arguments of the model, and caches of transformers that it can also take.

    An object of another class that the model makes may depend on its inputs, so it must be passed.

    Returns:
        The classes, and a new object for each argument that the model fills itself if it is not passed.
    """
    parameters = inspect.signature(unwrap_model(model).forward).parameters
    created = {
        item.name: item.initial
        for item in found
        if item.name in parameters and item.initial is not None and not item.is_input and _is_cache(item)
    }
    states = [item for item in found if item.is_input or item.name in created]
    classes = dict.fromkeys(base_class(item.cls) for item in states)
    return tuple(classes), {str(name): state for name, state in created.items()}


def named_states(model: nn.Module, example: Inputs, names: Sequence[str]) -> list[type]:
    """The classes of the arguments that the user names as state.

    Raises:
        BadQuery: There is no such argument, or it is no object of a Python class.
    """
    arguments = named_arguments(model, example) if names else {}
    for name in names:
        if arguments.get(name) is None:
            passed = ", ".join(key for key, value in arguments.items() if value is not None) or "nothing"
            raise BadQuery(
                f"expected the state {name!r} among the arguments of the example, got {passed}: pass a new one"
            )
        cls: Any = type(arguments[name])
        if not is_plain_class(cls):
            raise BadQuery(f"expected an object that holds state as {name!r}, got a {cls.__name__}")
    return [base_class(type(arguments[name])) for name in names]


def _is_cache(item: MutatedObject) -> bool:
    """Whether a new object is a cache of transformers that holds no values yet."""
    tensors = (tensor for tensor in reachable_tensors(item.initial) if tensor.numel())
    return item.cls.__module__.startswith("transformers.") and not any(
        tensor.is_meta or tensor.is_floating_point() for tensor in tensors
    )


def _objects(arguments: CallArguments) -> list[Any]:
    """The objects of Python classes."""
    records = [item for item in arguments.containers if node_type(item) is RECORD]
    objects = [item for item in arguments.objects if type(item).__dictoffset__]
    return [*records, *objects]


def _try_copy(item: Any) -> Any:
    """Copy an object, with the values of tensors that are known in a run without values; None: it cannot be copied."""
    try:
        return copy_arguments(Inputs(item), _copy_tensor).args[0]
    except Unsupported:
        return None


def _copy_tensor(tensor: Tensor) -> Tensor:
    value = value_of(tensor) if tensor.is_meta else tensor.detach().clone()
    return tensor if value is None else value
