"""Run a model on substitutes for its weights, so that nothing is computed and nothing of the model is changed."""

from __future__ import annotations

import gc
import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from microtome.engine import self_test
from microtome.engine.arguments import CannotSubstitute, as_non_leaf, copy_arguments, modules_in
from microtome.engine.code_references import references_of
from microtome.engine.function_caches import preserve_closures, replace_caches
from microtome.engine.meta_tensors import INTEGER_DTYPES, copy_values, simulate_device
from microtome.engine.module_index import reject_script
from microtome.engine.pytree import accelerators_in, tensors_in
from microtome.engine.random_states import preserve_random_states
from microtome.engine.selectors import named_modules
from microtome.engine.session import Session
from microtome.engine.signals import Modes, signal_safe
from microtome.engine.snapshot import (
    WriteBackups,
    preserve_state,
    preserve_tensors,
    restore_gradients,
    user_classes,
)
from microtome.engine.symbolic_shapes import SymbolicShapes
from microtome.engine.thread_stacks import runs_in_other_thread
from microtome.engine.torch_internals import FAKE_TENSOR_LOGGER, fake_tensor_types
from microtome.errors import Unsupported
from microtome.inputs import Inputs
from microtome.results.trace import TensorMode

#: Held while a model has substitute tensors: a second trace would take them for the model's own.
SUBSTITUTION_LOCK = threading.RLock()
#: The time that calls in other threads have to return before the weights are replaced.
PATIENCE_S = 5.0
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


@signal_safe
def substitute_tensors(
    model: nn.Module,
    inputs: Inputs,
    tensor_mode: TensorMode,
    backups: WriteBackups | None = None,
    *,
    shapes: SymbolicShapes | None = None,
) -> Iterator[Inputs]:
    """Replace the weights and buffers of a model in the block; yield matching inputs.

    Afterwards the state of every module, in lists and dicts too, and random states are as before. In the block, no
    other thread may run the model; one that traces a model waits.

    Args:
        tensor_mode: The kind of substitutes. With `"real"`, parameters stay, and buffers and inputs are copied.
        backups: To be notified before a tensor is mutated in a real run; without it, such tensors are not restored.
        shapes: Makes the fake tensors; None: their sizes are numbers.
    """
    self_test.CALLS.ensure()
    reject_script(named_modules(model))
    _reject_lazy(model)
    if tensor_mode != "real":
        self_test.SHAPES.ensure()
    with SUBSTITUTION_LOCK, ExitStack() as stack:
        stack.push(Modes().restore_after)
        every_module = [module for _, module in named_modules(model)] + modules_in(inputs)
        modules = list({id(module): module for module in every_module}.values())
        if tensor_mode != "real":
            stack.enter_context(exclude_other_threads(model, modules))
        if gc.isenabled():  # so many small objects would trigger it, with little to free
            gc.disable()
            stack.callback(_enable_garbage_collection)
        classes = user_classes(modules)
        originals = (*model.parameters(), *model.buffers(), *tensors_in((inputs.args, inputs.kwargs)))
        # Code that names its device draws there in a run on meta tensors, too.
        stack.enter_context(preserve_random_states(classes, accelerators_in(originals)))
        if tensor_mode == "meta":
            stack.enter_context(simulate_device(originals))
        tensors = preserve_state(modules, classes, stack)
        if tensor_mode == "real":
            preserve_tensors(tensors, stack, WriteBackups() if backups is None else backups)
        else:  # tensors that are neither parameters nor buffers are not replaced, and autograd sets their gradients
            leaves = [tensor for tensor in tensors if tensor.is_leaf and not tensor.is_inference()]
            stack.callback(restore_gradients, [(leaf, leaf.grad, leaf.requires_grad) for leaf in leaves])
            references = references_of(classes)
            replace_caches(references.caches, stack)
            preserve_closures(references.functions, stack)
        substitute = stack.enter_context(_open_factory(tensor_mode, shapes))
        for module in modules:
            namespaces: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for namespace in namespaces if tensor_mode != "real" else namespaces[1:]:
                for name, tensor in list(namespace.items()):
                    if tensor is not None:
                        namespace[name] = substitute(tensor)
        substitute_inputs = copy_arguments(inputs, substitute, modules)
        substitute.forget()  # a cache among the inputs frees the tensors that it replaces
        stack.push(Modes().restore_after)
        yield substitute_inputs


def _enable_garbage_collection() -> None:
    """Enable garbage collection, and collect the youngest generation.

    Otherwise the next allocation would, perhaps in `PyObject_ClearWeakRefs`, where CPython 3.11 crashes if weak
    references are collected.
    """
    gc.enable()
    gc.collect(0)


def _reject_lazy(model: nn.Module) -> None:
    for path, module in named_modules(model):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if isinstance(tensor, UninitializedTensorMixin):
                raise Unsupported(
                    f"{path or 'the model'} ({type(module).__name__}) has no shape yet: run the model once on real "
                    "inputs to initialize its lazy modules"
                )


@signal_safe
def exclude_other_threads(model: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
    """Refuse calls of the model in other threads in the block, and wait before it for running ones to return.

    Raises:
        Unsupported: A running call does not return.
    """
    with Session(model, fast_paths=True, other_threads="refuse") as session:
        deadline = time.monotonic() + PATIENCE_S
        session.admits_running_calls = True
        while session.admits_running_calls:
            if not runs_in_other_thread(modules):
                session.admits_running_calls = False
                session.admits_running_calls = runs_in_other_thread(modules)  # one that began in between
            elif time.monotonic() > deadline:
                raise Unsupported(
                    f"expected a model that no other thread runs, got a {type(model).__name__} that is still inside a "
                    f"call in another thread after {PATIENCE_S:g} s: its weights cannot be replaced by substitutes "
                    "meanwhile; wait for that call to end, or use a copy of the model"
                )
            else:
                time.sleep(0.001)
        yield


# -- copies and substitutes --------------------------------------------------------------------------------------------


def copy_inputs(inputs: Inputs, model: nn.Module | None = None, shared: Iterable[Tensor] = ()) -> Inputs:
    """Copy inputs deeply, with the tensors inside objects; tensors that share a storage share one in the copy.

    Args:
        model: Its modules are not copied where inputs refer to them.
        shared: Tensors that are not copied either.
    """
    copies = {id(tensor): tensor for tensor in shared}
    tensors = tensors_in((inputs.args, inputs.kwargs))
    strided = [t for t in tensors if t.layout is torch.strided and not t.is_nested and type(t) in _PLAIN]
    counts = Counter(id(tensor.untyped_storage()) for tensor in strided)
    for tensor in strided:
        if id(tensor) not in copies and counts[id(tensor.untyped_storage())] == 1:
            copies[id(tensor)] = _with_metadata(_clone_span(tensor), tensor)
    modules = [] if model is None else [module for _, module in named_modules(model)]
    factory = _TensorFactory("real")

    def copy_tensor(tensor: Tensor) -> Tensor:
        return copies[id(tensor)] if id(tensor) in copies else factory(tensor)

    return copy_arguments(inputs, copy_tensor, modules)


def _clone_span(tensor: Tensor) -> Tensor:
    """Clone a tensor with its strides, and only the part of its storage from its first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    span = tensor.detach().as_strided((last + 1 if tensor.numel() else 0,), (1,)).clone()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(span.untyped_storage(), 0, tensor.size(), tensor.stride())


class _TensorFactory:
    """Makes one substitute for each tensor; substitutes share a storage where the tensors do.

    Args:
        from_tensor: Makes a fake tensor; needed for that mode only.
    """

    def __init__(self, tensor_mode: TensorMode, from_tensor: Callable[[Tensor], Tensor] | None = None) -> None:
        self._mode = tensor_mode
        self._from_tensor = from_tensor  # no bound method: a cycle would keep the copies until garbage collection
        self._substitutes: dict[int, Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.is_nested:
            raise Unsupported("a nested tensor cannot be traced: expected one shape and one storage; pad it")
        if self._mode != "real" and type(tensor) not in _PLAIN:
            raise CannotSubstitute(f"a {type(tensor).__name__} may behave differently than a tensor")
        if id(tensor) not in self._substitutes:
            make = self._from_tensor or self._copy
            self._substitutes[id(tensor)] = _with_metadata(make(tensor), tensor)
        return self._substitutes[id(tensor)]

    def forget(self) -> None:
        """Drop the references to substitutes."""
        self._substitutes.clear()
        self._storages.clear()

    def _copy(self, tensor: Tensor) -> Tensor:
        is_meta = self._mode == "meta"
        if tensor.layout is not torch.strided or type(tensor) not in _PLAIN:
            if is_meta:
                raise CannotSubstitute(f"a tensor of layout {tensor.layout} has no single storage")
            return tensor.detach().clone()
        storage = tensor.untyped_storage()
        if id(storage) not in self._storages:
            new = torch.UntypedStorage(storage.nbytes(), device="meta") if is_meta else storage.clone()
            self._storages[id(storage)] = new
            if is_meta and tensor.dtype in INTEGER_DTYPES and not tensor.is_meta:
                copy_values(new, storage)
        new = self._storages[id(storage)]
        empty = torch.empty(0, dtype=tensor.dtype, device=new.device)
        return empty.set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())


@contextmanager
def _open_factory(tensor_mode: TensorMode, shapes: SymbolicShapes | None) -> Iterator[_TensorFactory]:
    """A factory of substitutes; in the block, a fake tensor mode is active if it makes fake tensors."""
    if tensor_mode != "fake":
        yield _TensorFactory(tensor_mode)
        return
    self_test.FAKE.ensure()
    fake_mode = fake_tensor_types()[1](allow_non_fake_inputs=True) if shapes is None else shapes.mode
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    was_disabled, logger.disabled = logger.disabled, True  # what it logs is raised too
    try:
        with warnings.catch_warnings(), fake_mode:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by recurrent layers
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # by from_tensor
            yield _TensorFactory(tensor_mode, fake_mode.from_tensor if shapes is None else shapes.from_tensor)
    finally:
        logger.disabled = was_disabled


def _with_metadata(substitute: Tensor, original: Tensor) -> Tensor:
    """The substitute with the type, `requires_grad` and attributes of the original."""
    if isinstance(original, nn.Parameter):
        substitute = nn.Parameter(substitute.detach(), requires_grad=original.requires_grad)
    elif original.requires_grad and not original.is_leaf:
        substitute = as_non_leaf(substitute.detach())  # a leaf could not be mutated in place
    elif substitute.is_leaf:
        substitute.requires_grad_(original.requires_grad)
    substitute.__dict__.update(original.__dict__)
    if substitute.is_leaf and substitute.grad is not None:
        substitute.grad = None
    return substitute
