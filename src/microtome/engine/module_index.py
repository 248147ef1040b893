"""The modules that a session observes, and their paths."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from microtome.addresses import expand_root, path_not_found, split_call_index
from microtome.engine.call import ModuleEntry
from microtome.engine.selectors import Selector, check_model, named_modules, select
from microtome.engine.torch_internals import MODULE_CALL
from microtome.errors import BadSelector, NoMatch, Unsupported

#: A module, and the names and ids of its children when it was last scanned.
_ScannedModule = tuple[weakref.ref[nn.Module], list[str], list[int]]


class ModuleIndex(ABC):
    """The modules of a session, also those added, moved or removed while it is open.

    `by_id` has most of them. Call `find` for the others, and `begin` before each run.

    Attributes:
        ignored: Modules that the session does not observe, by id.
        version: The number of scans of the modules.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, ModuleEntry] = {}
        self.version = 0
        self._lock = threading.RLock()
        self._is_stale = False
        # The scanned modules and, for modules that began a run, those at and below it that have children.
        self._scanned: dict[int, _ScannedModule] = {}
        self._subtrees: dict[int, list[_ScannedModule]] = {}
        # The modules whose children are compared with the last scan; None: all.
        self._compared: set[int] | None = None
        # Entries are removed when their module is freed, since its id may be reused.
        self.ignored: dict[int, weakref.ref[nn.Module]] = {}
        # The entries of the modules that hold each parameter, computed once per graph task.
        self._holders: dict[int, list[ModuleEntry]] = {}
        self._holders_task: int | None = None

    def on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Called by torch whenever a module gets a child."""
        if id(parent) in self._scanned:
            self._is_stale = True
            self.ignored.clear()

    def find(self, module: nn.Module, caller: nn.Module | None) -> ModuleEntry | None:
        """The entry of a module that is not in `by_id`; None if the session does not observe it."""
        with self._lock:
            if _is_replica(module):
                return next((entry for entry in list(self.by_id.values()) if _same_hooks(entry, module)), None)
            entry = self._find(module, caller)
            if entry is None:
                self.ignored[id(module)] = weakref.ref(module, _remover(id(module), self.ignored))
            return entry

    def begin(self, module: nn.Module, entry: ModuleEntry) -> ModuleEntry | None:
        """The entry of a module that begins a run, after a scan if modules below it have changed."""
        is_current = not self._is_stale and self._is_at_path(module, entry) and not self._has_changed(module)
        if is_current or _is_replica(module):
            return entry
        with self._lock:
            self._scan(module)
            return self.by_id.get(id(module))

    def _has_changed(self, module: nn.Module) -> bool:
        """Whether this module or one below it has gained, lost or moved a child since the last scan."""
        subtree = self._subtrees.get(id(module))
        if subtree is None:
            keys = {id(module): None}  # an ordered set
            pending = [id(module)]
            while pending:
                _, _, children = self._scanned[pending.pop()]
                fresh = [child for child in children if child in self._scanned and child not in keys]
                keys.update(dict.fromkeys(fresh))
                pending.extend(fresh)
            # A module without children can get one only through torch's own functions, which call `on_registration`.
            compared = keys if self._compared is None else [key for key in keys if key in self._compared]
            subtree = self._subtrees[id(module)] = [self._scanned[key] for key in compared if self._scanned[key][1]]
        for ref, names, ids in subtree:
            parent = ref()
            modules = {} if parent is None else parent._modules
            if list(modules) != names or list(map(id, modules.values())) != ids:
                return True
        return False

    def _add(self, path: str, module: nn.Module) -> None:
        remove = _remover(id(module), self.by_id, self._scanned, self._subtrees)
        self.by_id[id(module)] = ModuleEntry(path, module, remove)

    def _mark_scanned(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        for _, module in modules:
            children = module._modules
            self._scanned[id(module)] = weakref.ref(module), list(children), list(map(id, children.values()))
        self.version += 1
        self._is_stale = False
        self._subtrees.clear()
        self.ignored.clear()
        self._holders_task = None

    def paths_holding(self, parameter: Tensor, task: int) -> list[str]:
        """The paths of the modules whose own parameter this is: several, if it is tied."""
        if self._holders_task != task:
            self._holders_task, self._holders = task, {}
            for entry in list(self.by_id.values()):
                module = entry.ref()
                for own in () if module is None else module._parameters.values():
                    self._holders.setdefault(id(own), []).append(entry)
        return [entry.path for entry in self._holders.get(id(parameter), ())]

    @abstractmethod
    def _find(self, module: nn.Module, caller: nn.Module | None) -> ModuleEntry | None: ...
    @abstractmethod
    def _is_at_path(self, module: nn.Module, entry: ModuleEntry) -> bool: ...
    @abstractmethod
    def _scan(self, module: nn.Module) -> None: ...
    @abstractmethod
    def module_of(self, path: str) -> nn.Module: ...
    @abstractmethod
    def paths_of(self, module: nn.Module) -> tuple[str, ...]: ...


class ModelIndex(ModuleIndex):
    """The modules of one model, or the selected ones and the root."""

    def __init__(self, model: nn.Module, at: Selector | None = None) -> None:
        super().__init__()
        self._model = model
        self._at = at
        self._scan(model)

    def _scan(self, module: nn.Module) -> None:
        modules = dict(named_modules(self._model))
        reject_script(modules.items())
        selected = modules if self._at is None else {"": self._model, **self._select()}
        removed = self.by_id.keys() - {id(module) for module in selected.values()}
        for path, module in selected.items():
            if id(module) in self.by_id:
                self.by_id[id(module)].path = path
            else:
                self._add(path, module)
        for key in removed:
            self.by_id.pop(key, None)
        self._mark_scanned(modules.items())
        if isinstance(self._at, list) and all(isinstance(one, nn.Module) for one in self._at):
            # No other module can come to be selected, and paths depend on those above the selected ones alone.
            self._compared = {id(modules[path]) for path in _ancestors(selected)}
        for path in modules.keys() - selected.keys():
            key = id(modules[path])
            self.ignored[key] = weakref.ref(modules[path], _remover(key, self.ignored, self._scanned))

    def _select(self) -> dict[str, nn.Module]:
        try:
            return select(self._model, self._at or ())
        except NoMatch:
            if not self.version:
                raise
            return {}  # they were removed from the model

    def _find(self, module: nn.Module, caller: nn.Module | None) -> ModuleEntry | None:
        ancestor = self._model if self._is_stale else caller
        if ancestor is not None and any(module is other for _, other in named_modules(ancestor)):
            self._scan(module)
        return self.by_id.get(id(module))

    def _is_at_path(self, module: nn.Module, entry: ModuleEntry) -> bool:
        return _module_below(self._model, entry.path) is module

    def module_of(self, path: str) -> nn.Module:
        return _module_at(self._model, path, path)

    def paths_of(self, module: nn.Module) -> tuple[str, ...]:
        check_model(module)
        paths = tuple(path for path, other in named_modules(self._model, remove_duplicate=False) if other is module)
        if not paths:
            raise NoMatch(f"the {type(module).__name__} is not part of the model; was the model copied?")
        return paths


class ProcessIndex(ModuleIndex):
    """Every module that runs in the process. A path begins with the class name of the outermost module around it.

    A second root of the same class is named `Net@2`, a third `Net@3`. A module that first ran alone and later inside
    another is renamed by its path there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._roots: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        self._counts: Counter[str] = Counter()

    def _find(self, module: nn.Module, caller: nn.Module | None) -> ModuleEntry | None:
        entry = None if caller is None else self.by_id.get(id(caller))
        if entry is not None and caller is not None and any(module is other for _, other in named_modules(caller)):
            self._name(_root(entry.path))
        if id(module) not in self.by_id:
            self._scan(module)
        return self.by_id[id(module)]

    def _scan(self, module: nn.Module) -> None:
        entry = self.by_id.get(id(module))
        root = None if entry is None else self._roots.get(_root(entry.path))
        if entry is not None and root is not None and any(module is other for _, other in named_modules(root)):
            self._name(_root(entry.path))
            return
        name = type(module).__name__
        if name in self._roots:
            self._counts[name] += 1
            name = f"{name}@{self._counts[name] + 1}"
        self._roots[name] = module
        self.by_id.pop(id(module), None)
        self._name(name)

    def _name(self, root: str) -> None:
        """Set the paths of the modules below a root, except for those that belong to another root."""
        top = self._roots[root]
        modules = [(f"{root}.{path}" if path else root, module) for path, module in named_modules(top)]
        reject_script(modules)
        entries = [self.by_id.get(id(module)) for _, module in modules]
        absorbed = {entry.path for entry in entries[1:] if entry is not None and entry.path in self._roots}
        for (path, module), entry in zip(modules, entries, strict=True):
            if entry is None:
                self._add(path, module)
            elif (other := _root(entry.path)) == root or other in absorbed or other not in self._roots:
                entry.path = path
        for name in absorbed:
            del self._roots[name]
        self._mark_scanned(modules)

    def _is_at_path(self, module: nn.Module, entry: ModuleEntry) -> bool:
        root, _, rest = entry.path.partition(".")
        top = self._roots.get(root)
        return top is not None and _module_below(top, rest) is module

    def module_of(self, path: str) -> nn.Module:
        root, _, rest = str(path).partition(".")
        top = self._roots.get(root.partition("#")[0])
        if top is None:
            raise path_not_found(path, [entry.path for entry in self.by_id.values()])
        return _module_at(top, rest, path)

    def paths_of(self, module: nn.Module) -> tuple[str, ...]:
        check_model(module)
        paths = tuple(
            f"{root}.{path}" if path else root
            for root, top in list(self._roots.items())
            for path, other in named_modules(top, remove_duplicate=False)
            if other is module
        )
        if not paths:
            raise NoMatch(f"the {type(module).__name__} has not run in this session, nor has a module that contains it")
        return paths


def _remover(key: int, *dicts: dict[int, Any]) -> Callable[[object], None]:
    """A callback that removes the entries of a module that is freed, since its id may be reused."""

    def remove(_: object) -> None:
        for entries in dicts:
            entries.pop(key, None)

    return remove


def _root(path: str) -> str:
    return path.partition(".")[0]


def _is_replica(module: nn.Module) -> bool:
    """Whether a module is a replica that DataParallel created."""
    return bool(module.__dict__.get("_is_replica"))


def _same_hooks(entry: ModuleEntry, replica: nn.Module) -> bool:
    """Whether this is the original of a replica, with which it shares the dict of hooks."""
    original = entry.ref()
    return original is not None and original._forward_hooks is replica._forward_hooks


def _ancestors(paths: Iterable[str]) -> set[str]:
    """The paths of the modules above those at these paths."""
    parts = [path.split(".") for path in paths if path]
    return {".".join(names[:count]) for names in parts for count in range(len(names))}


def _module_below(top: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = top
    for name in path.split(".") if path else ():
        module = None if module is None else module._modules.get(name)
    return module


def _module_at(top: nn.Module, path: str, full_path: str) -> nn.Module:
    if not isinstance(full_path, str):
        raise BadSelector(f"expected a path such as 'layer1.0', got {full_path!r}")
    module = _module_below(top, path) or _module_below(top, split_call_index(expand_root(path))[0])  # or an address
    if module is None:
        raise path_not_found(full_path, [name for name, _ in named_modules(top, remove_duplicate=False)])
    return module


def untraced_root_error(cls: type[nn.Module]) -> Unsupported:
    """The error for a model of a class whose calls no session can observe."""
    overrides = "__call__" if cls.__call__ is not nn.Module.__call__ else MODULE_CALL
    return Unsupported(
        f"expected a model that runs through nn.Module.__call__, got {cls.__name__}, which overrides {overrides} and "
        "does not call that of nn.Module: its run cannot be observed. Call it there, or pass a module that contains "
        "the model and calls it, such as nn.Sequential(model)"
    )


def reject_script(modules: Iterable[tuple[str, nn.Module]]) -> None:
    for path, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            where = f"the module at {path!r}" if path else "the model"
            raise Unsupported(
                f"{where} is a {type(module).__name__}: TorchScript runs outside Python and cannot be observed. "
                "Pass the original nn.Module, before torch.jit.script or torch.jit.trace."
            )
