"""Which modules a session looks at, and what they are called."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from microtome.engine.calls import Site
from microtome.engine.select import check_model, names, no_path
from microtome.errors import NoMatch, Unsupported


class Sites(ABC):
    """The modules of a session: `by_id` knows most, `find` is asked about others, `refresh` comes before each run."""

    def __init__(self) -> None:
        self.by_id: dict[int, Site] = {}
        self._holders: dict[int, list[Site]] = {}

    @abstractmethod
    def find(self, module: nn.Module, caller: nn.Module | None) -> Site | None: ...
    @abstractmethod
    def refresh(self) -> None: ...
    @abstractmethod
    def module_of(self, path: str) -> nn.Module: ...
    @abstractmethod
    def paths_of(self, module: nn.Module) -> tuple[str, ...]: ...

    def holding(self, parameter: Tensor) -> list[str]:
        """The paths of the modules that hold a parameter as their own: several, where it is tied."""
        if not any(_holds(site, parameter) for site in self._holders.get(id(parameter), ())):
            self._holders = {}
            for site in list(self.by_id.values()):
                module = site.ref()
                for held in () if module is None else module._parameters.values():
                    self._holders.setdefault(id(held), []).append(site)
        return [site.path for site in self._holders.get(id(parameter), ()) if _holds(site, parameter)]


class ModelSites(Sites):
    """The modules of one model, also those added, moved or removed while the session is open."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        # What each module held when last looked at. It keeps the modules alive, so no id in `by_id` can be used again.
        self._held: list[tuple[dict[str, nn.Module | None], list[tuple[str, nn.Module | None]]]] = []
        self._by_hooks: dict[int, Site] = {}
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._scan()

    def refresh(self) -> None:
        """Look again if any module has gained, lost or moved a child."""
        if any(list(children.items()) != before for children, before in self._held):
            self._scan()

    def _scan(self) -> None:
        modules = dict(self._model.named_modules())
        _refuse_script(modules.items())
        gone = self.by_id.keys() - {id(module) for module in modules.values()}
        for path, module in modules.items():
            site = self.by_id.setdefault(id(module), Site(path, module))
            site.path = path
        for key in gone:
            del self.by_id[key]
        self._held = [(module._modules, list(module._modules.items())) for module in modules.values()]
        self._by_hooks = {id(module._forward_hooks): self.by_id[id(module)] for module in modules.values()}
        self._others.clear()

    def find(self, module: nn.Module, caller: nn.Module | None) -> Site | None:
        if getattr(module, "_is_replica", False):  # DataParallel's copy shares the dict of hooks with its original
            return self._by_hooks.get(id(module._forward_hooks))
        if module in self._others:
            return None
        self.refresh()
        if id(module) not in self.by_id:
            self._others.add(module)
        return self.by_id.get(id(module))

    def module_of(self, path: str) -> nn.Module:
        return _descend(self._model, path, path)

    def paths_of(self, module: nn.Module) -> tuple[str, ...]:
        paths = tuple(path for path, other in names(self._model) if other is check_model(module))
        if not paths:
            raise NoMatch(f"the {type(module).__name__} is not part of the model; was the model copied?")
        return paths


class ProcessSites(Sites):
    """Every module that runs in the process. A path begins with the class name of the outermost module that holds it.

    A second root of the same class is called `Net@2`, a third `Net@3`. A module that first ran alone and later inside
    another takes its name from the larger one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._roots: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()

    def refresh(self) -> None:
        """Nothing to do: a module is looked up when it first runs."""

    def find(self, module: nn.Module, caller: nn.Module | None) -> Site | None:
        if getattr(module, "_is_replica", False):
            return next((site for site in self.by_id.values() if _same_hooks(site, module)), None)
        caller_site = None if caller is None else self.by_id.get(id(caller))
        if caller_site is not None:
            self._name(caller_site.path.partition(".")[0])  # perhaps it was added to the tree that now runs
        if id(module) not in self.by_id:
            root = self._new_root(type(module).__name__)
            self._roots[root] = module
            self._name(root)
        return self.by_id[id(module)]

    def _forget(self, key: int) -> Callable[[object], object]:
        return lambda _: self.by_id.pop(key, None)

    def _new_root(self, name: str) -> str:
        count = 1
        root = name
        while root in self._roots:
            count += 1
            root = f"{name}@{count}"
        return root

    def _name(self, root: str) -> None:
        """Give a path to every module below the root that has none, and to those whose own root lies below it."""
        top = self._roots.get(root)
        if top is None:
            return
        modules = list(top.named_modules())
        _refuse_script(modules)
        below = {id(module) for _, module in modules}
        for path, module in modules:
            full = f"{root}.{path}" if path else root
            site = self.by_id.get(id(module))
            if site is None:
                self.by_id[id(module)] = Site(full, module, self._forget(id(module)))
            elif (other := self._roots.get(site.path.partition(".")[0])) is None or (
                other is not top and id(other) in below
            ):
                site.path = full
        for name, other in list(self._roots.items()):
            if other is not top and id(other) in below:
                del self._roots[name]

    def module_of(self, path: str) -> nn.Module:
        root, _, rest = path.partition(".")
        top = self._roots.get(root)
        if top is None:
            raise no_path(path, (site.path for site in self.by_id.values()))
        return _descend(top, rest, path)

    def paths_of(self, module: nn.Module) -> tuple[str, ...]:
        check_model(module)
        paths = tuple(
            f"{root}.{path}" if path else root
            for root, top in self._roots.items()
            for path, other in names(top)
            if other is module
        )
        if not paths:
            raise NoMatch(f"the {type(module).__name__} has not run in this session, nor has a module that holds it")
        return paths


def _holds(site: Site, parameter: Tensor) -> bool:
    module = site.ref()
    return module is not None and any(held is parameter for held in module._parameters.values())


def _same_hooks(site: Site, replica: nn.Module) -> bool:
    """Whether a copy that DataParallel made is one of this module: it shares the dict of hooks with its original."""
    original = site.ref()
    return original is not None and original._forward_hooks is replica._forward_hooks


def _descend(top: nn.Module, path: str, given: str) -> nn.Module:
    module: nn.Module | None = top
    for name in path.split(".") if path else ():
        module = None if module is None else module._modules.get(name)
    if module is None:
        raise no_path(given, (name for name, _ in names(top)))
    return module


def _refuse_script(modules: Iterable[tuple[str, nn.Module]]) -> None:
    for path, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            where = f"the module at {path!r}" if path else "the model"
            raise Unsupported(
                f"{where} is a {type(module).__name__}: TorchScript runs outside Python and cannot be watched. "
                "Give the original nn.Module, before torch.jit.script or torch.jit.trace."
            )
