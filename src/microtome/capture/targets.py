"""What is to be captured: modules, and operators inside their calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from torch import nn

from microtome.addresses import call_of, glob, is_glob
from microtome.engine import Call, Selector, select
from microtome.engine.call_selection import CallSelection, each_selector
from microtome.engine.probes import AnyOp
from microtome.errors import BadSelector, NoMatch


class Targets:
    """The modules and operators that selectors name, in one model.

    A text with a slash names operators: `"blocks.3/softmax"` those of that name in the calls of `blocks.3`, and
    `"blocks.3/softmax#0"` the first of them. `"blocks.3#1"` is one call of a module, and `"blocks.3#1/softmax"` names
    operators in it. Globs work on both sides.

    Attributes:
        calls: The calls whose outputs are wanted.
        modules: Their modules, by path.
        owners: Those whose operators are, by path.
    """

    def __init__(self, model: nn.Module, at: Selector) -> None:
        self._model = model
        self.selectors = each_selector(at)
        if not self.selectors:
            raise NoMatch("nothing is selected: name at least one path, glob, regex, module type, module or callable")
        self.calls, self._owners = CallSelection(model, None), CallSelection(model, None)
        self._by_selector: list[tuple[Any, CallSelection]] = []
        self._ops: list[tuple[str, CallSelection, Any]] = []
        for selector in self.selectors:
            if self._names_operators(selector):
                self._add_op(selector)
            else:
                found = CallSelection(model, selector)
                self.calls.update(found)
                self._by_selector.append((selector, found))

    @property
    def modules(self) -> dict[str, nn.Module]:
        return self.calls.modules

    @property
    def owners(self) -> dict[str, nn.Module]:
        return self._owners.modules

    def _names_operators(self, selector: Any) -> bool:
        """Whether it is a text with a slash; but the names of modules may have slashes too, and go first."""
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
            raise BadSelector(f"{text!r} names no operator: write such as 'blocks.3/softmax'")
        found = CallSelection(self._model, path)
        self._owners.update(found)
        wanted = name if "#" in name else f"{name}#*"
        self._ops.append((text, found, glob(wanted) if is_glob(wanted) else wanted))

    @property
    def fast_paths(self) -> bool:
        """Whether torch's fused paths hide nothing of what is wanted, so that the model may run as it does alone."""
        parents = {above for path in self.modules if path for above in _above(path)}
        hiding = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
        modules = dict(self._model.named_modules())
        return not self.owners and not any(isinstance(modules.get(path), hiding) for path in parents)

    def wants_op(self, call: Call, name: str) -> bool:
        """Whether an operator of a call, such as `softmax#0`, is wanted."""
        return any(call in found and _fits(name, pattern) for _, found, pattern in self._ops)

    @property
    def addresses(self) -> list[str]:
        """The single calls that are named, as `Call.address` gives them."""
        return [*self.calls.addresses, *self._owners.addresses]

    def address(self, call: Call) -> str:
        """The address of a call whose outputs or operators are wanted, with `#0` where it was named so."""
        return (self.calls if call.path in self.modules else self._owners).address(call)

    def check(self, captured: Iterable[str], seen: Mapping[str, int], ops: dict[str, list[str]]) -> tuple[str, ...]:
        """The paths that were selected by a pattern and never ran.

        Args:
            captured: The paths and operators that were captured.
            seen: The index of the last call of each module that ran, by path.
            ops: The names of operators that ran, by the path of their call.

        Raises:
            NoMatch: A path that was named never ran, or nothing that a selector names.
        """
        got, ran = set(captured), set(seen)
        missing: dict[str, None] = {}
        for selector, found in self._by_selector:
            _check_index(selector, found, seen)
            lost = sorted(found.modules.keys() - got)
            if lost and (len(lost) == len(found.modules) or isinstance(selector, nn.Module)):
                raise _not_captured(self._model, lost[0], ran)
            missing |= dict.fromkeys(lost)
        for text, found, pattern in self._ops:
            _check_index(text.rpartition("/")[0], found, seen)
            there = sorted({name for path in found.modules for name in ops.get(path, [])})
            if not any(_fits(name, pattern) for name in there):
                raise NoMatch(f"no operator matches {text!r}. There ran: {', '.join(there) or 'none'}")
        return tuple(missing)


def _check_index(selector: Any, found: CallSelection, seen: Mapping[str, int]) -> None:
    """Raise if a selector names a call with an index that no call of its modules has."""
    index = call_of(selector)[1]
    runs = [(seen[path], path) for path in found.modules if path in seen]
    if index is not None and runs and max(runs)[0] < index:
        raise NoMatch(f"{selector!r} never ran: {times_ran(*max(runs))}")


def times_ran(last: int, path: str) -> str:
    """How often a module ran, by the index of its last call."""
    there = f"{last + 1} times, from {f'{path}#0'!r} to {f'{path}#{last}'!r}" if last else "once"
    return f"{path!r} ran {there}"


def _fits(name: str, pattern: Any) -> bool:
    return pattern == name if isinstance(pattern, str) else pattern.fullmatch(name) is not None


def _above(path: str) -> list[str]:
    """The paths of what contains it, the root's first."""
    return ["", *accumulate(path.split(".")[:-1], "{}.{}".format)]


def _not_captured(model: nn.Module, path: str, ran: set[str]) -> NoMatch:
    if path in ran:
        return NoMatch(
            f"{path!r} gave no tensor: what it returns holds none in a tuple, list, mapping or dataclass. "
            "mt.extract keeps outputs of any kind"
        )
    return NoMatch(f"{path!r} never ran: {why_not(model, path, ran)}")


def never_ran(model: nn.Module, outcome: str) -> NoMatch:
    """The error for a block in which the model was to run and did not."""
    return NoMatch(
        f"{outcome}: the {type(model).__name__} never ran in this block. Call it inside the `with`, as model(…), not "
        "model.forward(…); a copy of it is another model"
    )


def why_not(model: nn.Module, path: str, ran: set[str]) -> str:
    """The likely reason why a module did not run."""
    module = model.get_submodule(path)
    if any(other.startswith(f"{path}.") for other in ran):
        if type(module).forward is nn.Module.forward:
            return f"a {type(module).__name__} is not called itself; select what it holds, such as {f'{path}.*'!r}"
        return "modules inside it ran, so its .forward() was called directly, which nobody can see; call the module"
    above = path.rpartition(".")[0]
    parent = model.get_submodule(above)
    if isinstance(parent, nn.MultiheadAttention):
        return "MultiheadAttention uses its weights and does not call it; select the attention itself"
    if above in ran:
        return "this input did not lead to it, or its .forward() was called directly"
    return "what holds it did not run either with this input"


def op_name(func: AnyOp) -> str:
    """The short name of an operator: `softmax` of `aten._softmax.default`."""
    name = getattr(func, "overloadpacket", func).__name__
    return str(name).lstrip("_")
