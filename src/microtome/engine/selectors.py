"""Selectors: the one way to name modules, used by everything that takes "which layers"."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from microtome.addresses import glob, is_glob, nearest
from microtome.errors import BadSelector, NoMatch, NotAModule

Atom = str | re.Pattern[str] | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]
#: An exact path, a glob, a compiled regex, a module type, a module, a callable `(path, module) -> bool`, or several.
Selector = Atom | Sequence["Selector"] | set["Selector"] | frozenset["Selector"]


def check_model(model: object) -> nn.Module:
    """Return the model, or raise the error that says what was given instead."""
    if isinstance(model, nn.Module):
        return model
    hint = "; create it first, with its arguments" if isinstance(model, type) and issubclass(model, nn.Module) else ""
    raise NotAModule(f"expected a torch.nn.Module, got {_describe(model)}{hint}")


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules()`, for modules that cannot be hashed too."""
    seen = {id(model)}

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield path, module
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                yield from walk(f"{path}.{name}" if path else name, child)

    return walk("", model)


def named_modules_with_aliases(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every name of every module, root first: as `named_modules()`, but a shared module comes under all its names."""

    def walk(path: str, module: nn.Module, above: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
        yield path, module
        for name, child in module._modules.items():
            if child is not None and not any(child is a for a in above):  # a module may hold one that holds it
                yield from walk(f"{path}.{name}" if path else name, child, (*above, child))

    return walk("", model, (model,))


def select(model: nn.Module, selector: Selector) -> dict[str, nn.Module]:
    """The modules that the selector names, by path, in the order of `named_modules()`.

    A glob's `*` stays within one part of a path and `**` spans parts. A regex matches anywhere in a path unless
    anchored. Each part of a list must match something.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
    >>> list(select(net, "*")), list(select(net, nn.Linear)), list(select(net, ["1.0", "**.1"]))
    (['0', '1'], ['0', '1.1'], ['1', '1.0', '1.1'])
    """
    chosen = _match(check_model(model), selector)
    return {path: module for path, module in named_modules(model) if id(module) in chosen}


def _match(model: nn.Module, selector: Selector) -> set[int]:
    """The ids of the modules: a module need not be hashable."""
    if isinstance(selector, Sequence | set | frozenset) and not isinstance(selector, str | bytes):
        if not selector:
            raise NoMatch("the selector is empty: name at least one path, glob, regex, module type, module or callable")
        if all(isinstance(part, nn.Module) for part in selector):  # one look for all, since there may be many
            parts = {id(part) for part in selector}
            if parts <= {id(module) for _, module in named_modules(model)}:
                return parts
        return set().union(*(_match(model, part) for part in selector))
    # Only a path can be another name of a shared module; all else sees each module once.
    everything = list(
        named_modules_with_aliases(model) if isinstance(selector, str | re.Pattern) else named_modules(model)
    )
    test = _test(selector, everything)
    found = {id(module) for path, module in everything if test(path, module)}
    if not found:
        raise _no_match(selector, everything)
    return found


def _test(selector: Atom, everything: list[tuple[str, nn.Module]]) -> Callable[[str, nn.Module], bool]:
    # Modules and types are callable too, so the callable comes last.
    if isinstance(selector, str):
        if not is_glob(selector) or any(path == selector for path, _ in everything):
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
    raise BadSelector(
        f"cannot select modules by {_describe(selector)}: give a path ('blocks.0'), a glob ('blocks.*.attn'), a "
        "compiled regex, a module type (nn.Linear), a module, a callable (path, module) -> bool, or a list of these"
    )


def _no_match(selector: Atom, everything: list[tuple[str, nn.Module]]) -> NoMatch:
    paths = [path for path, _ in everything]
    if isinstance(selector, str):
        kind = "glob" if is_glob(selector) else "path"
        return NoMatch(f"no module matches the {kind} {selector!r}. {nearest(selector, paths)}")
    if isinstance(selector, re.Pattern):
        pattern = selector.pattern
        return NoMatch(f"no module's path matches the regex {pattern!r}. {nearest(pattern, paths)}")
    if isinstance(selector, type):
        kind = selector.__name__
        types = sorted({type(module).__name__ for _, module in everything})
        return NoMatch(f"the model has no module of type {kind}. {nearest(kind, types)}")
    if isinstance(selector, nn.Module):
        kind = type(selector).__name__
        return NoMatch(f"the {kind} given as selector is not part of the model; was the model copied?")
    name = getattr(selector, "__name__", selector)
    return NoMatch(f"the callable {name!r} is true for none of the model's {len(everything)} modules")


def _describe(thing: object) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    text = repr(thing)
    return f"{type(thing).__name__} {text if len(text) <= 60 else text[:57] + '…'}"
