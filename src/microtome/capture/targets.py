"""Resolve selectors to the modules and operators to capture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from torch import nn

from microtome.addresses import glob, is_glob, split_call_index
from microtome.engine import Call, Selector, select
from microtome.engine.probes import AnyOp
from microtome.engine.selectors import CallSelection, flatten_selector
from microtome.errors import BadSelector, NoMatch


class Targets:
    """The calls and operators of a model that selectors name.

    A string with a slash names operators: `"blocks.3/softmax"` those of that name in the calls of `blocks.3`, and
    `"blocks.3/softmax#0"` the first of them. `"blocks.3#1"` is one call of a module, and `"blocks.3#1/softmax"` names
    operators in it. Globs work on both sides.

    Attributes:
        calls: The calls whose outputs are selected.
        modules: Their modules, by path.
        owners: The modules whose operators are selected, by path.
    """

    def __init__(self, model: nn.Module, at: Selector) -> None:
        self._model = model
        self.selectors = flatten_selector(at)
        if not self.selectors:
            raise NoMatch("expected at least one path, glob, regex, module type, module or callable, got none")
        self.calls, self._owners = CallSelection(model, None), CallSelection(model, None)
        self._by_selector: list[tuple[Any, CallSelection]] = []
        self._ops: list[tuple[str, CallSelection, Any]] = []
        for selector in self.selectors:
            if self._names_operators(selector):
                self._add_op(selector)
            else:
                selection = CallSelection(model, selector)
                self.calls.update(selection)
                self._by_selector.append((selector, selection))

    @property
    def modules(self) -> dict[str, nn.Module]:
        return self.calls.modules

    @property
    def owners(self) -> dict[str, nn.Module]:
        return self._owners.modules

    def _names_operators(self, selector: Any) -> bool:
        """Return whether a selector is a string with a slash that is not the name of a module."""
        if not isinstance(selector, str) or "/" not in selector:
            return False
        try:
            select(self._model, selector)
        except NoMatch:
            return True
        return False

    def _add_op(self, text: str) -> None:
        path, _, name = text.rpartition("/")
        if not name:
            raise BadSelector(f"expected an operator after the slash, such as 'blocks.3/softmax', got {text!r}")
        selection = CallSelection(self._model, path)
        self._owners.update(selection)
        pattern = name if "#" in name else f"{name}#*"
        self._ops.append((text, selection, glob(pattern) if is_glob(pattern) else pattern))

    @property
    def fast_paths(self) -> bool:
        """Whether torch's fused paths hide no selected call, so that the model may take them."""
        parents = {ancestor for path in self.modules if path for ancestor in _ancestors(path)}
        hiding = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
        modules = dict(self._model.named_modules())
        return not self.owners and not any(isinstance(modules.get(path), hiding) for path in parents)

    def includes_op(self, call: Call, name: str) -> bool:
        """Return whether an operator of a call, such as `softmax#0`, is selected."""
        return any(call in selection and _matches(name, pattern) for _, selection, pattern in self._ops)

    @property
    def addresses(self) -> list[str]:
        """The addresses of calls that are selected one by one, as `Call.address` gives them."""
        return [*self.calls.addresses, *self._owners.addresses]

    def selects(self, address: str) -> bool:
        """Return whether the output of a call, by its address, is selected."""
        path, index = split_call_index(address)
        return self.calls.has(path, index or 0)

    def address(self, call: Call) -> str:
        """Return the address of a selected call, with `#0` if the selector has it."""
        return (self.calls if call.path in self.modules else self._owners).address(call)

    def check(
        self,
        captured: Iterable[str],
        last_calls: Mapping[str, int],
        ops: dict[str, list[str]],
        *,
        is_complete: bool = True,
    ) -> tuple[str, ...]:
        """Return the paths that a pattern selects and that never ran.

        Args:
            captured: The paths and operators that were captured.
            last_calls: The index of the last call of each module that ran, by path.
            ops: The names of operators that ran, by the path of their call.
            is_complete: Whether `last_calls` has all modules that ran; False: the selected ones alone.

        Raises:
            NoMatch: A path that a selector names never ran, or nothing that it matches.
        """
        captured_names, ran = set(captured), set(last_calls)
        missing: dict[str, None] = {}
        for selector, selection in self._by_selector:
            _check_index(selector, selection, last_calls)
            absent = sorted(selection.modules.keys() - captured_names)
            if absent and (len(absent) == len(selection.modules) or isinstance(selector, nn.Module)):
                raise _not_captured_error(self._model, absent[0], ran if is_complete or absent[0] in ran else None)
            missing |= dict.fromkeys(absent)
        for text, selection, pattern in self._ops:
            _check_index(text.rpartition("/")[0], selection, last_calls)
            names = sorted({name for path in selection.modules for name in ops.get(path, [])})
            if not any(_matches(name, pattern) for name in names):
                raise NoMatch(f"no operator matches {text!r}; operators that ran: {', '.join(names) or 'none'}")
        return tuple(missing)


def _check_index(selector: Any, selection: CallSelection, last_calls: Mapping[str, int]) -> None:
    """Raise if a selector names a call with an index that no call of its modules has."""
    index = split_call_index(selector)[1]
    counts = [(last_calls[path], path) for path in selection.modules if path in last_calls]
    if index is not None and counts and max(counts)[0] < index:
        raise NoMatch(f"{selector!r} never ran: {describe_call_count(*max(counts))}")


def describe_call_count(last: int, path: str) -> str:
    """Describe how often a module ran, from the index of its last call."""
    count = f"{last + 1} times, from {f'{path}#0'!r} to {f'{path}#{last}'!r}" if last else "once"
    return f"{path!r} ran {count}"


def _matches(name: str, pattern: Any) -> bool:
    return pattern == name if isinstance(pattern, str) else pattern.fullmatch(name) is not None


def _ancestors(path: str) -> list[str]:
    """Return the paths of the modules that contain the module at a path, the root first."""
    return ["", *accumulate(path.split(".")[:-1], "{}.{}".format)]


_NOT_REACHED = "this input did not lead to it, or its .forward() was called directly"


def _not_captured_error(model: nn.Module, path: str, ran: set[str] | None) -> NoMatch:
    if ran is None:
        return NoMatch(f"{path!r} never ran: {_NOT_REACHED}")
    if path in ran:
        return NoMatch(
            f"{path!r} returned no tensor: expected one in a tuple, list, mapping or dataclass. "
            "mt.extract captures outputs of any type"
        )
    return NoMatch(f"{path!r} never ran: {explain_missing_call(model, path, ran)}")


def model_never_ran(model: nn.Module, outcome: str) -> NoMatch:
    """Return the error for a block in which the model did not run."""
    return NoMatch(
        f"{outcome}: the {type(model).__name__} never ran in this block. Call it inside the `with`, as model(…), not "
        "model.forward(…); a copy of it is another model"
    )


def explain_missing_call(model: nn.Module, path: str, ran: set[str]) -> str:
    """Return the likely reason why a module did not run."""
    module = model.get_submodule(path)
    if any(other.startswith(f"{path}.") for other in ran):
        if type(module).forward is nn.Module.forward:
            return f"a {type(module).__name__} is not called itself; select its children, such as {f'{path}.*'!r}"
        return "modules inside it ran, so its .forward() was called directly, which bypasses hooks; call the module"
    parent_path = path.rpartition(".")[0]
    parent = model.get_submodule(parent_path)
    if isinstance(parent, nn.MultiheadAttention):
        return "MultiheadAttention uses its weights and does not call it; select the attention itself"
    if parent_path in ran:
        return _NOT_REACHED
    return "the module that contains it did not run either with this input"


def op_name(func: AnyOp) -> str:
    """Return the short name of an operator: `softmax` for `aten._softmax.default`."""
    name = getattr(func, "overloadpacket", func).__name__
    return str(name).lstrip("_")
