"""Read the arguments of a call of a schedule: their structure is analyzed once, and recognized in later runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from microtome.engine.pytree import is_state, tensor_occurrences
from microtome.engine.torch_internals import DisableTorchFunction, recorded_versions
from microtome.inputs import Inputs
from microtome.split.analysis.call_arguments import CallArguments, record_arguments, state_objects_in
from microtome.split.analysis.signature import Arguments, describe, describe_shape, digest_of_call
from microtome.split.analysis.structure_spec import PLAIN, Plain, StructureSpec, flatten

_INT = frozenset((int,))
_get_shape, _get_dtype = attrgetter("shape"), attrgetter("dtype")
_MAX_LAYOUTS = 8  # those of the head, of the tail, and of other variants of a step


class ArgumentLayout:
    """The positions of tensors, plain values and state objects among arguments of one structure.

    Only for structures that the call cannot mutate: leaves, and tuples of leaves.

    Attributes:
        is_complete: Whether all leaves are such; a layout that is not complete is of no use.
        digest: A digest of the call and of the structure.
        spec: The structure of the arguments, where they are those of the model; None: not known yet.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: str, *, in_order: bool) -> None:
        values = [*args, *kwargs.values()]
        count = len(values)
        self._tuples: list[tuple[int, list[type]]] = []
        items: dict[int, range] = {}
        for position in [at for at, value in enumerate(values) if type(value) is tuple]:
            self._tuples.append((position, list(map(type, values[position]))))
            items[position] = range(len(values), len(values) + len(values[position]))
            values += values[position]
        by_name = dict(zip(kwargs, range(len(args), count), strict=True))
        ordered = by_name.values() if in_order else [by_name[name] for name in sorted(by_name)]
        described = list(_expand([*range(len(args)), *ordered], items))
        self._tensors = [at for at in _expand(range(count), items) if isinstance(values[at], Tensor)]
        self._described_tensors = [at for at in described if isinstance(values[at], Tensor)]
        self._plain = [at for at in described if type(values[at]) in PLAIN]
        self._states = [at for at in _expand(range(count), items) if is_state(values[at])]
        self._strings = [(at, values[at]) for at in self._plain if type(values[at]) is str]
        self._has_subclasses = any(type(values[at]) is not Tensor for at in self._tensors)
        self._has_floats = any(type(values[at]) is float for at in self._plain)  # 0.0 is not -0.0, and equal to it
        # What was described last: shapes, dtypes and plain values, and their description, which is the same object if
        # they are the same again.
        self._last: tuple[Any, Arguments] | None = None
        self.is_complete = len(self._tensors) + len(self._plain) + len(self._states) == len(described)
        self.spec: StructureSpec | None = None
        self._example = describe(args, kwargs, in_order=in_order)
        self.digest = digest_of_call(key, self._example)

    def expand(self, values: list[Any]) -> list[Any] | None:
        """Append the items of tuples among arguments to these; None: they have another structure.

        Args:
            values: Arguments whose number, names and types are those of the layout.
        """
        for position, types in self._tuples:
            items = values[position]
            if list(map(type, items)) != types:
                return None
            values += items
        if self._strings and any(values[at] != text for at, text in self._strings):
            return None
        return values

    def describe(self, values: list[Any]) -> Arguments:
        plain = [values[at] for at in self._plain]
        tensors = [values[at] for at in self._described_tensors]
        if self._has_subclasses:
            with DisableTorchFunction():  # else reading the shape of a placeholder calls Python code
                shapes, dtypes = list(map(_get_shape, tensors)), list(map(_get_dtype, tensors))
        else:
            shapes, dtypes = list(map(_get_shape, tensors)), list(map(_get_dtype, tensors))
        last, now = self._last, (shapes, dtypes, plain)
        # Other classes than int are symbolic sizes, while a graph is captured: comparing these would fix them.
        is_comparable = not self._has_floats and _INT.issuperset(map(type, chain.from_iterable(shapes)))
        if last is not None and is_comparable and now == last[0]:  # as in most steps of a sequence
            return last[1]
        described = list(map(describe_shape, shapes, dtypes))
        arguments = Arguments(self._example.structure, self._describe_plain(plain), described)
        if is_comparable:
            self._last = now, arguments
        return arguments

    def _describe_plain(self, plain: list[Any]) -> list[Any]:
        if not self._strings:
            return plain
        pairs = zip(plain, self._example.plain, strict=True)  # strings are described in other words, such as devices
        return [example if type(value) is str else value for value, example in pairs]

    @property
    def num_states(self) -> int:
        """The number of state objects, counting repetitions."""
        return len(self._states)

    def plain(self, values: list[Any]) -> list[Any]:
        return [values[at] for at in self._plain]

    def tensors(self, values: list[Any]) -> list[Tensor]:
        return [values[at] for at in self._tensors]

    def state_objects(self, values: list[Any]) -> list[Any]:
        if len(self._states) < 2:
            return [values[at] for at in self._states]
        return list({id(values[at]): values[at] for at in self._states}.values())


def _expand(positions: Iterable[int], items: dict[int, range]) -> Iterator[int]:
    """Replace the positions of tuples by those of their items."""
    for position in positions:
        yield from items.get(position, (position,))


class ReadArguments(NamedTuple):
    """The arguments of one call; without a layout, each method walks their structure."""

    reader: ArgumentReader
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layout: ArgumentLayout | None
    values: list[Any]

    def describe(self, model: nn.Module | None) -> tuple[str, Arguments]:
        """Describe them, with a digest of the call and their structure; see `signature.describe`."""
        if self.layout is not None:
            return self.layout.digest, self.layout.describe(self.values)
        described = describe(self.args, self.kwargs, in_order=self.reader.in_order, model=model)
        return digest_of_call(self.reader.key, described), described

    def record(self) -> CallArguments:
        """Record them, to find out which of them the call mutates."""
        layout, values = self.layout, self.values
        if layout is None:
            return record_arguments(self.args, self.kwargs)
        tensors = layout.tensors(values)
        return CallArguments(tensors, recorded_versions(tensors), [], [], [], [], layout.state_objects(values))

    def tensors(self) -> list[Tensor]:
        """The tensors, once for each occurrence."""
        if self.layout is not None:
            return self.layout.tensors(self.values)
        return list(tensor_occurrences((self.args, self.kwargs)))

    def state_objects(self) -> list[Any]:
        """The state objects, each once."""
        if self.layout is not None:
            return self.layout.state_objects(self.values)
        return state_objects_in((self.args, self.kwargs))


class ArgumentReader:
    """Reads the arguments of one call of a schedule.

    Args:
        key: Identifies the call, in its digest.
        in_order: Whether the order of dicts matters, since tensors among the arguments are identified by position.
    """

    def __init__(self, key: str, *, in_order: bool) -> None:
        self.key = key
        self.in_order = in_order
        # By number, names and types of the arguments; None: arguments of these are walked each time.
        self._layouts: dict[Any, ArgumentLayout | None] = {}

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReadArguments:
        values = [*args, *kwargs.values()]
        key = (len(args), *kwargs, *map(type, values))
        layout = self._layouts.get(key)
        expanded = None if layout is None else layout.expand(values)
        if expanded is not None:
            return ReadArguments(self, args, kwargs, layout, expanded)
        if layout is not None or (key not in self._layouts and len(self._layouts) < _MAX_LAYOUTS):
            found = ArgumentLayout(args, kwargs, self.key, in_order=self.in_order)
            self._layouts[key] = found if found.is_complete else None
        return ReadArguments(self, args, kwargs, None, [])


class FlatInputs(NamedTuple):
    """The arguments of the model: their structure, tensors, plain values and numpy arrays."""

    spec: StructureSpec
    tensors: list[Tensor]
    plain: list[Plain]
    arrays: list[Any]


class InputReader:
    """Flattens the arguments of the model; the structure of arguments of one layout is found once."""

    def __init__(self) -> None:
        self._reader = ArgumentReader("", in_order=True)

    def read(self, inputs: Inputs) -> FlatInputs:
        read = self._reader.read(inputs.args, inputs.kwargs)
        layout = read.layout
        if layout is not None and layout.spec is not None:
            return FlatInputs(layout.spec, layout.tensors(read.values), layout.plain(read.values), [])
        arrays: list[Any] = []
        flat = FlatInputs(*flatten((inputs.args, inputs.kwargs), arrays=arrays), arrays)
        if layout is not None and layout.num_states < 2:  # two states may be one object, or not
            layout.spec = flat.spec
        return flat
