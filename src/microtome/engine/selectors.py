"""Select modules of a model, or single calls of them: the one way to name layers everywhere in microtome."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from microtome.addresses import CALL_ADDRESS, ROOT, glob, is_glob, split_call_index, suggest_address, suggest_similar
from microtome.engine.call import Call
from microtome.errors import BadSelector, NoMatch, NotAModule, Unsupported

Atom = str | re.Pattern[str] | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]
#: An exact path, a glob, a compiled regex, a module type, a module, a callable `(path, module) -> bool`, or several.
Selector = Atom | Sequence["Selector"] | set["Selector"] | frozenset["Selector"]


def check_model(model: object) -> nn.Module:
    """Return the model, or raise if it is not an `nn.Module`."""
    if isinstance(model, nn.Module):
        return model
    hint = ""
    if isinstance(model, type) and issubclass(model, nn.Module):
        hint = "; create it first, with its arguments"
    elif isinstance(model, Tensor):
        hint = "; the model comes first, then its inputs"
    elif isinstance(model, str):
        hint = "; microtome.zoo.resolve builds a model from a name such as 'torchvision:resnet50'"
    elif hasattr(model, "begins_at"):  # a stage, which the engine does not know
        hint = "; a stage is part of a model: pass the model, or measure the stage with its method `time`"
    raise NotAModule(f"expected a torch.nn.Module, got {_describe(model)}{hint}")


def named_modules(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """`nn.Module.named_modules`, also for modules that are unhashable or contain themselves."""

    def walk(path: str, module: nn.Module, visited: set[int]) -> Iterator[tuple[str, nn.Module]]:
        yield path, module
        for name, child in module._modules.items():
            if child is None or id(child) in visited:
                continue
            if remove_duplicate:
                visited.add(id(child))
            inner = visited if remove_duplicate else visited | {id(child)}
            yield from walk(f"{path}.{name}" if path else name, child, inner)

    return walk("", model, {id(model)})


def path_aliases(model: nn.Module) -> dict[str, str]:
    """The further paths of shared modules, and those without wrappers; each with the path that calls carry."""
    first = {id(module): path for path, module in named_modules(model)}
    paths = dict(named_modules(model, remove_duplicate=False))
    aliases = {path: first[id(module)] for path, module in paths.items() if path != first[id(module)]}
    unwrapped = {path: first[id(module)] for path, module in _unwrapped_modules(model)}
    return aliases | {path: name for path, name in unwrapped.items() if path not in paths}


def module_paths(model: nn.Module) -> frozenset[str]:
    """The paths of all modules, shared ones under each of their names."""
    return frozenset(path for path, _ in named_modules(model, remove_duplicate=False))


#: The attributes in which wrappers keep a module, and the classes that use them: compiled modules, FSDP, activation
#: checkpointing, DataParallel and DistributedDataParallel, averaged models, peft, and Lightning.
_WRAPPERS: dict[str, tuple[str, ...]] = {
    "_orig_mod": ("OptimizedModule",),
    "_fsdp_wrapped_module": ("FullyShardedDataParallel",),
    "_checkpoint_wrapped_module": ("ActivationWrapper",),
    "module": ("DataParallel", "DistributedDataParallel", "AveragedModel"),
    "base_model": ("PeftModel",),
    "model": ("BaseTuner", "LightningModule"),
}


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside wrappers such as a compiled module or DataParallel; the model itself if it is none."""
    while (name := next((name for name in _WRAPPERS if _is_wrapper(model, name)), None)) is not None:
        model = getattr(model, name)
    return model


def _is_wrapper(module: nn.Module, name: str) -> bool:
    """Whether a module is a wrapper of its child of this name."""
    is_wrapper = any(base.__name__ in _WRAPPERS.get(name, ()) for base in type(module).__mro__)
    return is_wrapper and isinstance(module._modules.get(name), nn.Module)


def _unwrapped_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules by their paths without the names that wrappers add; a wrapper stands for what is inside it."""
    modules = dict(named_modules(model, remove_duplicate=False))
    unwrapped = {"": ""}
    yield "", model
    for path, module in modules.items():
        if path:
            above, _, name = path.rpartition(".")
            begin = unwrapped[above]
            if _is_wrapper(modules[above], name):
                unwrapped[path] = begin
            else:
                unwrapped[path] = f"{begin}.{name}" if begin else name
                yield unwrapped[path], module


def select(model: nn.Module, selector: Selector) -> dict[str, nn.Module]:
    """Select modules; return them by path, in the order of `named_modules()`.

    A glob's `*` stays within one part of a path and `**` spans parts. A regex matches anywhere in a path unless
    anchored. Each part of a list must match something.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
    >>> list(select(net, "*")), list(select(net, nn.Linear)), list(select(net, ["1.0", "**.1"]))
    (['0', '1'], ['0', '1.1'], ['1', '1.0', '1.1'])
    """
    selected = _match(check_model(model), selector)
    return {path: module for path, module in named_modules(model) if id(module) in selected}


def _is_list(selector: Any) -> bool:
    return isinstance(selector, Sequence | set | frozenset) and not isinstance(selector, str | bytes)


def flatten_selector(selector: Any) -> list[Any]:
    """The atoms of a possibly nested selector."""
    return [atom for part in selector for atom in flatten_selector(part)] if _is_list(selector) else [selector]


def _match(model: nn.Module, selector: Any) -> set[int]:
    """The ids of the selected modules: a module need not be hashable."""
    if _is_list(selector):
        if not selector:
            raise NoMatch("the selector is empty: name at least one path, glob, regex, module type, module or callable")
        if all(isinstance(part, nn.Module) for part in selector):  # one traversal for all, since there may be many
            parts = {id(part) for part in selector}
            if parts <= {id(module) for _, module in named_modules(model)}:
                return parts
        return set().union(*(_match(model, part) for part in selector))
    if isinstance(selector, str) and selector == ROOT and ROOT not in model._modules:
        selector = ""
    # Only strings and regexes can match an alias of a shared module; all other selectors visit each module once.
    modules = list(named_modules(model, remove_duplicate=not isinstance(selector, str | re.Pattern)))
    names = [modules]
    if isinstance(selector, str | re.Pattern):  # the names that wrappers add may be left out
        unwrapped = list(_unwrapped_modules(model))
        is_path = any(path == selector for path, _ in modules)
        names = [modules, unwrapped] if is_path else [unwrapped, modules]
    for known in names:
        predicate = _predicate(selector, known)
        if matches := {id(module) for path, module in known if predicate(path, module)}:
            return matches
    raise _no_match(selector, names[0])


def _predicate(selector: Atom, modules: list[tuple[str, nn.Module]]) -> Callable[[str, nn.Module], bool]:
    # Modules and types are callable too, so the callable comes last.
    if isinstance(selector, str):
        if not is_glob(selector) or any(path == selector for path, _ in modules):
            return lambda path, _: path == selector
        pattern = glob(selector)
        return lambda path, _: pattern.fullmatch(path) is not None
    if isinstance(selector, re.Pattern):
        return lambda path, _: selector.search(path) is not None
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return lambda _, module: isinstance(module, selector)
    if isinstance(selector, nn.Module):
        return lambda _, module: module is selector
    if callable(selector) and not isinstance(selector, type):
        return selector
    if isinstance(selector, Tensor):
        raise BadSelector(f"expected modules, such as 'blocks.0', got inputs of the model: {_describe(selector)}")
    raise BadSelector(
        f"cannot select modules by {_describe(selector)}: expected a path ('blocks.0'), a glob ('blocks.*.attn'), a "
        "compiled regex, a module type (nn.Linear), a module, a callable (path, module) -> bool, or a list of these"
    )


def _no_match(selector: Atom, modules: list[tuple[str, nn.Module]]) -> NoMatch:
    paths = [path for path, _ in modules]
    if isinstance(selector, str):
        kind = "glob" if is_glob(selector) else "path"
        return NoMatch(f"no module matches the {kind} {selector!r}. {suggest_address(selector, paths)}")
    if isinstance(selector, re.Pattern):
        pattern = selector.pattern
        return NoMatch(f"no module's path matches the regex {pattern!r}. {suggest_similar(pattern, paths)}")
    if isinstance(selector, type):
        kind = selector.__name__
        types = sorted({type(module).__name__ for _, module in modules})
        return NoMatch(f"the model has no module of type {kind}. {suggest_similar(kind, types)}")
    if isinstance(selector, nn.Module):
        kind = type(selector).__name__
        return NoMatch(f"the {kind} given as selector is not part of the model; was the model copied?")
    name = getattr(selector, "__name__", selector)
    return NoMatch(f"the callable {name!r} is true for none of the model's {len(modules)} modules")


def _describe(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = "x".join(map(str, value.shape)) if isinstance(value, Tensor) else repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '…'}"


# -- calls -------------------------------------------------------------------------------------------------------------


def reject_ambiguous_names(paths: Iterable[str]) -> None:
    """Raise if the path of a module reads as the address of a call."""
    for path in paths:
        if CALL_ADDRESS.fullmatch(path):
            base, _, index = path.rpartition("#")
            raise Unsupported(
                f"the name of the module {path!r} reads as the call {index} of {base!r}: "
                "rename it so that it does not end with '#' and a number"
            )


class CallSelection:
    """Selected calls: all calls of the selected modules or, by an address such as `"block#1"`, one call of each.

    Attributes:
        modules: The modules, by path.
    """

    def __init__(self, model: nn.Module, at: Selector | None) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._indices: dict[str, set[int] | None] = {}
        paths = {path for path, _ in named_modules(model, remove_duplicate=False)}
        for selector in [] if at is None else flatten_selector(at) or [at]:
            reject_ambiguous_names([selector] if isinstance(selector, str) and selector in paths else ())
            modules, index = split_call_index(selector)
            for path, module in select(model, modules).items():
                self._add(path, module, None if index is None else {index})
        reject_ambiguous_names(self.modules)

    def _add(self, path: str, module: nn.Module, indices: set[int] | None) -> None:
        before = self._indices.get(path, set())
        self.modules[path] = module
        self._indices[path] = None if indices is None or before is None else before | indices

    def update(self, other: CallSelection) -> None:
        """Add the calls of another selection."""
        for path, module in other.modules.items():
            self._add(path, module, other._indices[path])

    def has(self, path: str, index: int) -> bool:
        """Whether the call of this module with this index is selected."""
        indices = self._indices.get(path, ())
        return indices is None or index in indices

    def __contains__(self, call: object) -> bool:
        return isinstance(call, Call) and self.has(call.path, call.index)

    def address(self, call: Call) -> str:
        """The address of a call, with `#0` if it was selected by its index."""
        return call.address if call.index or self._indices.get(call.path) is None else f"{call.path}#0"

    @property
    def addresses(self) -> list[str]:
        """The calls that are selected by index, as `Call.address` has them."""
        calls = [(path, index) for path, indices in self._indices.items() for index in sorted(indices or ())]
        return [f"{path}#{index}" if index else path for path, index in calls]
