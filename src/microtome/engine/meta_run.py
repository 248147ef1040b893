"""Running a model on stand-ins for its weights, so that nothing is computed and nothing of the model is changed."""

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
from microtome.engine.thread_stacks import runs_in_other_thread
from microtome.engine.torch_internals import FAKE_TENSOR_LOGGER, fake_tensor_types
from microtome.errors import Unsupported
from microtome.inputs import Inputs
from microtome.results.trace import TensorMode

#: Held while a model has stand-ins: two threads that look at one model would take the other's for what it holds.
SUBSTITUTION_LOCK = threading.RLock()


@signal_safe
def substitute_tensors(
    model: nn.Module, inputs: Inputs, tensor_mode: TensorMode, backups: WriteBackups | None = None
) -> Iterator[Inputs]:
    """For the time of the block, give the model stand-ins for weights and buffers; yield such inputs as go with them.

    Afterwards every module holds what it held, in lists and dicts too, and random states are as they were. While the
    block runs, no other thread may run the model; one that wants to look at a model, too, waits.

    Args:
        originals: What is told before a tensor is written to in a real run; without it, all are copied first.
    """
    self_test.CALLS.ensure()
    reject_script(named_modules(model))
    _refuse_lazy(model)
    if tensor_mode != "real":
        self_test.SHAPES.ensure()
    with SUBSTITUTION_LOCK, ExitStack() as stack:
        stack.push(Modes().restore_after)
        found = [module for _, module in named_modules(model)] + modules_in(inputs)
        modules = list({id(module): module for module in found}.values())
        if tensor_mode != "real":
            stack.enter_context(exclude_other_threads(model, modules))
        if gc.isenabled():  # so many small objects would set it off, with little for it to free
            gc.disable()
            stack.callback(_enable_collector)
        classes = user_classes(modules)
        given = (*model.parameters(), *model.buffers(), *tensors_in((inputs.args, inputs.kwargs)))
        # Code that names its device draws there in a run on meta tensors, too.
        stack.enter_context(preserve_random_states(classes, accelerators_in(given)))
        if tensor_mode == "meta":
            stack.enter_context(simulate_device(given))
        tensors = preserve_state(modules, classes, stack)
        if tensor_mode == "real":
            preserve_tensors(tensors, stack, backups)
        else:  # what is no parameter or buffer has no stand-in, and autograd writes its gradient
            leaves = [tensor for tensor in tensors if tensor.is_leaf and not tensor.is_inference()]
            stack.callback(restore_gradients, [(leaf, leaf.grad, leaf.requires_grad) for leaf in leaves])
            references = references_of(classes)
            replace_caches(references.caches, stack)
            preserve_closures(references.functions, stack)
        make = stack.enter_context(_tensor_factory(tensor_mode))
        for module in modules:
            spaces: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for space in spaces:
                for name, tensor in list(space.items()):
                    if tensor is not None and (tensor_mode != "real" or space is module._buffers):
                        space[name] = make(tensor)
        substitute_inputs = copy_arguments(inputs, make, modules)
        stack.push(Modes().restore_after)
        yield substitute_inputs


def _enable_collector() -> None:
    """Enable garbage collection, and collect now what is overdue.

    Else the next allocation would, which may be the one in `PyObject_ClearWeakRefs`. CPython 3.11 crashes when weak
    references are collected there.
    """
    gc.enable()
    gc.collect(0)


def copy_inputs(inputs: Inputs, model: nn.Module | None = None, shared: Iterable[Tensor] = ()) -> Inputs:
    """Copy inputs deeply, the tensors inside objects included; tensors that share memory share it in the copy.

    Args:
        model: Its modules are not copied where inputs refer to them.
        shared: Tensors that are not copied either.
    """
    made = {id(tensor): tensor for tensor in shared}
    tensors = tensors_in((inputs.args, inputs.kwargs))
    given = [t for t in tensors if t.layout is torch.strided and not t.is_nested and type(t) in _PLAIN]
    storages = Counter(id(tensor.untyped_storage()) for tensor in given)
    for tensor in given:
        if id(tensor) not in made and storages[id(tensor.untyped_storage())] == 1:
            made[id(tensor)] = _with_metadata(_clone_span(tensor), tensor)
    with _tensor_factory("real") as make:

        def copy_tensor(tensor: Tensor) -> Tensor:
            return made[id(tensor)] if id(tensor) in made else make(tensor)

        return copy_arguments(
            inputs, copy_tensor, [] if model is None else [module for _, module in named_modules(model)]
        )


def _clone_span(tensor: Tensor) -> Tensor:
    """Clone a tensor with its strides, and of its memory only what lies between its first element and its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    span = tensor.detach().as_strided((last + 1 if tensor.numel() else 0,), (1,)).clone()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(span.untyped_storage(), 0, tensor.size(), tensor.stride())


# -- making ------------------------------------------------------------------------------------------------------------


@contextmanager
def _tensor_factory(tensor_mode: TensorMode) -> Iterator[Callable[[Tensor], Tensor]]:
    """Return a function that makes one substitute for each tensor; substitutes share memory where the tensors do."""
    made: dict[int, Tensor] = {}
    memories: dict[int, torch.UntypedStorage] = {}

    def once(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def maker(tensor: Tensor) -> Tensor:
            if tensor.is_nested:
                raise Unsupported("a nested tensor cannot be traced: expected one shape and one memory; pad it")
            if tensor_mode != "real" and type(tensor) not in _PLAIN:
                raise CannotSubstitute(f"a {type(tensor).__name__} may act otherwise than a tensor")
            if id(tensor) not in made:
                made[id(tensor)] = _with_metadata(make(tensor), tensor)
            return made[id(tensor)]

        return maker

    def copy(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or type(tensor) not in _PLAIN:
            if tensor_mode == "meta":
                raise CannotSubstitute(f"a tensor of layout {tensor.layout} does not lie in one place")
            return tensor.detach().clone()
        storage = tensor.untyped_storage()
        if id(storage) not in memories:
            new = torch.UntypedStorage(storage.nbytes(), device="meta") if tensor_mode == "meta" else storage.clone()
            memories[id(storage)] = new
            if tensor_mode == "meta" and tensor.dtype in INTEGER_DTYPES and not tensor.is_meta:
                copy_values(new, storage)
        empty = torch.empty(0, dtype=tensor.dtype, device=memories[id(storage)].device)
        return empty.set_(memories[id(storage)], tensor.storage_offset(), tensor.size(), tensor.stride())

    if tensor_mode != "fake":
        yield once(copy)
        return
    self_test.FAKE.ensure()
    mode = fake_tensor_types()[1](allow_non_fake_inputs=True)
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    quiet, logger.disabled = logger.disabled, True  # what it logs is raised too
    try:
        with warnings.catch_warnings(), mode:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # which recurrent layers do
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # from_tensor does
            yield once(mode.from_tensor)
    finally:
        logger.disabled = quiet


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def _with_metadata(made: Tensor, original: Tensor) -> Tensor:
    """The stand-in as a parameter if the original is one, with whatever was attached to it."""
    if isinstance(original, nn.Parameter):
        made = nn.Parameter(made.detach(), requires_grad=original.requires_grad)
    elif original.requires_grad and not original.is_leaf:
        made = as_non_leaf(made.detach())  # a leaf could not be written in place
    elif made.is_leaf:
        made.requires_grad_(original.requires_grad)
    made.__dict__.update(original.__dict__)
    if made.is_leaf and made.grad is not None:
        made.grad = None
    return made


def _refuse_lazy(model: nn.Module) -> None:
    for path, module in named_modules(model):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if isinstance(tensor, UninitializedTensorMixin):
                raise Unsupported(
                    f"{path or 'the model'} ({type(module).__name__}) has no shape yet: run the model once on real "
                    "inputs, so that its lazy modules learn theirs"
                )


#: How long calls that began before may take to end.
PATIENCE_S = 5.0


@signal_safe
def exclude_other_threads(model: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
    """Refuse calls of the model in other threads; those that began before the block end before it begins.

    Raises:
        Unsupported: A call that began before does not end.
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
                    f"call in another thread after {PATIENCE_S:g} s: its weights cannot be replaced by stand-ins "
                    "meanwhile; wait for that call to end, or look at a copy of the model"
                )
            else:
                time.sleep(0.001)
        yield
