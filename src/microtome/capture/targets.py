"""What is to be captured: modules, and operators inside their calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from microtome.engine import Selector, select
from microtome.engine.addresses import call_of, refuse_names
from microtome.engine.probes import AnyOp
from microtome.engine.select import glob, is_glob
from microtome.errors import BadSelector, NoMatch


class Targets:
    """The modules and operators that selectors name, in one model.

    A text with a slash names operators: `"blocks.3/softmax"` those of that name in the calls of `blocks.3`, and
    `"blocks.3/softmax#0"` the first of them. Globs work on both sides.

    Attributes:
        modules: The modules whose outputs are wanted, by path.
        owners: Those whose operators are, by path.
    """

    def __init__(self, model: nn.Module, at: Selector) -> None:
        self._model = model
        self.selectors = list(_several(at))
        if not self.selectors:
            raise NoMatch("nothing is selected: name at least one path, glob, regex, module type, module or callable")
        self.modules: dict[str, nn.Module] = {}
        self.owners: dict[str, nn.Module] = {}
        self._by_selector: list[tuple[Any, set[str]]] = []
        self._ops: list[tuple[str, set[str], Any]] = []
        for selector in self.selectors:
            if self._names_operators(selector):
                self._add_op(selector)
            else:
                found = _select(model, selector)
                self.modules |= found
                self._by_selector.append((selector, set(found)))
        refuse_names(self.modules.keys() | self.owners.keys())

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
        found = _select(self._model, path)
        self.owners |= found
        wanted = name if "#" in name else f"{name}#*"
        self._ops.append((text, set(found), glob(wanted) if is_glob(wanted) else wanted))

    @property
    def fast_paths(self) -> bool:
        """Whether torch's fused paths hide nothing of what is wanted, so that the model may run as it does alone."""
        parents = {above for path in self.modules if path for above in _above(path)}
        hiding = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
        modules = dict(self._model.named_modules())
        return not self.owners and not any(isinstance(modules.get(path), hiding) for path in parents)

    def wants_op(self, path: str, name: str) -> bool:
        """Whether an operator, such as `softmax#0`, of a call of the module at this path is wanted."""
        return any(_is_wanted(path, name, paths, pattern) for _, paths, pattern in self._ops)

    def check(self, captured: Iterable[str], seen: Iterable[str], ops: dict[str, list[str]]) -> tuple[str, ...]:
        """The paths that were selected by a pattern and never ran.

        Args:
            captured: The paths and operators that were captured.
            seen: The paths of all modules that ran.
            ops: The names of operators that ran, by the path of their call.

        Raises:
            NoMatch: A path that was named never ran, or nothing that a selector names.
        """
        got, ran = set(captured), set(seen)
        missing: dict[str, None] = {}
        for selector, paths in self._by_selector:
            lost = sorted(paths - got)
            if lost and (len(lost) == len(paths) or isinstance(selector, nn.Module)):
                raise _not_captured(self._model, lost[0], ran)
            missing |= dict.fromkeys(lost)
        for text, paths, pattern in self._ops:
            if not any(_is_wanted(path, name, paths, pattern) for path, names in ops.items() for name in names):
                there = sorted({name for path in paths for name in ops.get(path, [])})
                raise NoMatch(f"no operator matches {text!r}. There ran: {', '.join(there) or 'none'}")
        return tuple(missing)


def _select(model: nn.Module, selector: Selector) -> dict[str, nn.Module]:
    try:
        return select(model, selector)
    except NoMatch as error:
        if call_of(selector)[1] is None:
            raise
        text = f"{selector!r} is the address of a call: select modules, and read the calls of what they gave. {error}"
        raise NoMatch(text) from error


def _is_wanted(path: str, name: str, paths: set[str], pattern: Any) -> bool:
    fits = pattern == name if isinstance(pattern, str) else pattern.fullmatch(name) is not None
    return path in paths and fits


def _above(path: str) -> list[str]:
    """The paths of what contains it, the root's first."""
    return ["", *accumulate(path.split(".")[:-1], "{}.{}".format)]


def _several(at: Selector) -> Iterable[Any]:
    return at if isinstance(at, Sequence | set | frozenset) and not isinstance(at, str) else [at]


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
    name = getattr(func, "_overloadpacket", func).__name__
    return str(name).lstrip("_")
