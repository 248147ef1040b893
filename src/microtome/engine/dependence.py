"""Trace through a run which of several sources each element of each tensor depends on.

Every element has a label: a bit mask of the sources that its value depends on. Pointwise operators combine the labels
of their arguments. Any other operator is run again with the elements of one source replaced: the elements of its output
that change depend on that source. Since each operator is examined by itself, a dependence is found even if the model as
a whole hides it, as behind a threshold that the example does not reach.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from microtome.engine.function_mode import hide_modes
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.torch_internals import OpOverload, TorchDispatchMode
from microtome.errors import MicrotomeError

_aten = torch.ops.aten
#: Operators that overwrite their output by the last tensor argument, and its label.
_COPIES = {_aten._to_copy, _aten.copy_, _aten.copy, _aten.fill_, _aten.zero_}
#: Sums of products: one trial on values without zeros reveals every dependence.
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution, _aten.linear, _aten.native_layer_norm}
#: Operators that compute with integer arguments, and never use them as indices or sizes.
_ARITHMETIC = {
    *(_aten.sum, _aten.cumsum, _aten.mean, _aten.prod, _aten.mm, _aten.bmm, _aten.cat, _aten.stack),
    *(_aten.any, _aten.all, _aten.max, _aten.min, _aten.amax, _aten.amin, _aten.argmax, _aten.argmin),
    *(_aten.sort, _aten.topk),
}
_EMPTY = {_aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
_READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: Methods that return values to Python without an operator.
_READING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__}
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class Untraceable(MicrotomeError, RuntimeError):
    """The dependences of a run cannot be traced: it reads values into Python, or an operator cannot be run again."""


class Dependence:
    """Labels what a run computes in its `with` block.

    >>> x = torch.arange(6.0).view(2, 3)
    >>> with Dependence() as dependence:
    ...     dependence.mark(x[0], 1)
    ...     dependence.mark(x[1], 2)
    ...     rows, columns = x.sum(1), x.sum(0)
    >>> dependence.labels(rows).tolist(), dependence.labels(columns).tolist()
    ([1, 2], [3, 3, 3])

    Args:
        unwrap: Returns the plain tensor that a tensor of a subclass wraps, or the tensor itself.
    """

    def __init__(self, unwrap: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        self._labels = _Labels()
        self._modes = (hide_modes(), _Reads(self._labels), _Operators(self._labels, unwrap))

    def mark(self, tensor: Tensor, label: int) -> None:
        """Set the label of all elements of a tensor, 1 to 255."""
        self._labels.put(tensor, torch.full(tensor.shape, label, dtype=torch.uint8, device=tensor.device))

    def labels(self, tensor: Tensor) -> Tensor:
        """The label of each element."""
        labels = self._labels.get(tensor)
        return _unlabelled(tensor) if labels is None else labels

    def __enter__(self) -> Dependence:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Labels:
    """A label for each byte of each storage, so that views and mutations through them need no special treatment."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[Any, Tensor]] = {}

    def get(self, tensor: Tensor) -> Tensor | None:
        """The labels of a tensor, or None if it has none."""
        if type(tensor) not in _PLAIN or tensor.is_meta:
            return None
        entry = self._by_storage.get(id(_storage_of(tensor)))
        if entry is None:
            return None
        first, *others = _view_like(entry[1], tensor).unbind(-1)
        label = first.clone()
        for other in others:
            label |= other
        return label if bool(label.any()) else None

    def put(self, tensor: Tensor, label: Tensor) -> None:
        storage = _storage_of(tensor)
        key = id(storage)
        if key not in self._by_storage:
            labels = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=tensor.device)
            self._by_storage[key] = weakref.ref(storage, lambda _: self._by_storage.pop(key)), labels
        _view_like(self._by_storage[key][1], tensor).copy_(label.unsqueeze(-1).expand(*label.shape, tensor.itemsize))


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Untraceable(f"expected strided tensors, got one of layout {tensor.layout}")
    return tensor.untyped_storage()


def _view_like(labels: Tensor, tensor: Tensor) -> Tensor:
    """View the labels of a storage with a tensor's shape and a trailing dimension of bytes."""
    width = tensor.itemsize
    stride = [step * width for step in tensor.stride()]
    return labels.as_strided((*tensor.shape, width), (*stride, 1), tensor.storage_offset() * width)


def _unlabelled(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.uint8, device=like.device)


class _Reads(TorchFunctionMode):
    """Raises if Python code reads values of a labelled tensor without an operator."""

    def __init__(self, labels: _Labels) -> None:
        super().__init__()
        self._labels = labels

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READING_METHODS and self._labels.get(args[0]) is not None:
            raise Untraceable(f"Tensor.{func.__name__} reads values into Python")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, labels: _Labels, unwrap: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._labels = labels
        self._unwrap = unwrap

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = map_tensors(self._unwrap, (args, kwargs or {}))
        operands = list(tensors_in((args, kwargs)))
        labels = [self._labels.get(tensor) for tensor in operands]
        is_labelled = any(label is not None for label in labels)
        if not is_labelled or any(type(tensor) not in _PLAIN for tensor in operands):  # a subclass labels its output
            return func(*args, **kwargs)
        _check(func, operands, labels)
        written = _written(func, args, kwargs)
        before = map_tensors(_copy, (args, kwargs)) if written else (args, kwargs)
        output = func(*args, **kwargs)
        outputs = list(tensors_in(output))
        storages = {id(tensor.untyped_storage()) for tensor in operands}
        fresh = [tensor for tensor in outputs if id(tensor.untyped_storage()) not in storages]
        if func.overloadpacket in _EMPTY or not (fresh or written):
            return output
        targets = [*outputs, *written]
        new_labels = _combine_labels(func, labels, targets)
        if new_labels is None:
            new_labels = _labels_by_trial(func, before, labels)
        for tensor, label in zip(targets, new_labels, strict=True):
            if any(tensor is target for target in (*fresh, *written)):
                self._labels.put(tensor, label)
        return output


def _check(func: Any, operands: list[Tensor], labels: list[Tensor | None]) -> None:
    """Raise if an operator returns values to Python or a shape that depends on them, or cannot be run again."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "quantized"):
        raise Untraceable(f"{func} is not an operator of torch: the rows that it combines are unknown")
    masks = [
        label
        for tensor, label in zip(operands[1:], labels[1:], strict=True)
        if tensor.dtype in (torch.bool, torch.uint8) and label is not None
    ]
    if func.overloadpacket in (_aten.index, _aten._unsafe_index) and not masks:
        return
    if _READING_TAGS & set(func.tags) or func.overloadpacket is _aten.is_nonzero:
        raise Untraceable(f"{func} reads values into Python, or returns a shape that depends on them")


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    writes = [(i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
    return list(tensors_in([args[index] if index < len(args) else kwargs.get(name) for index, name in writes]))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


def _combine_labels(func: OpOverload, labels: list[Tensor | None], targets: list[Tensor]) -> list[Tensor] | None:
    """The labels of the outputs of a pointwise operator; None if it is not one."""
    is_copy = func.overloadpacket in _COPIES
    if not (is_copy or torch.Tag.pointwise in func.tags):
        return None
    if is_copy and func.overloadpacket is not _aten._to_copy:
        labels = labels[1:]
    combined = []
    for target in targets:
        label = _unlabelled(target)
        for operand in labels:
            try:
                if operand is not None:
                    label |= operand.to(target.device).expand(target.shape)
            except RuntimeError:  # it does not broadcast, whatever the tag states
                return None
        combined.append(label)
    return combined


# -- trials ------------------------------------------------------------------------------------------------------------

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _labels_by_trial(func: OpOverload, arguments: _Arguments, labels: list[Tensor | None]) -> list[Tensor]:
    """The labels of the outputs of any other operator: replace the elements of one source after the other."""
    sources = [1 << bit for bit in range(8) if any(label is not None and (label & 1 << bit).any() for label in labels)]
    found: list[Tensor] = []
    for trial in (1,) if func.overloadpacket in _PRODUCTS else range(3):
        base = _run_trial(func, arguments, labels, trial, 0)
        found = found or list(map(_unlabelled, base))
        for source in sources:
            outputs = _run_trial(func, arguments, labels, trial, source)
            for label, before, after in zip(found, base, outputs, strict=True):
                if before.shape != after.shape:
                    raise Untraceable(f"{func} returns a shape that depends on values")
                label |= _differ(before, after).to(torch.uint8) * source
    return found


def _run_trial(
    func: OpOverload, arguments: _Arguments, labels: list[Tensor | None], trial: int, source: int
) -> list[Tensor]:
    """Run an operator with the elements of one source replaced; 0: of none."""
    label_of = dict(zip((id(tensor) for tensor in tensors_in(arguments)), labels, strict=True))
    may_be_indices = func.overloadpacket not in _ARITHMETIC

    def replace(tensor: Tensor) -> Tensor:
        label = label_of[id(tensor)]
        if label is None:
            return _copy(tensor)
        values = torch.where(label != 0, _context(tensor, trial, may_be_indices), tensor)
        if source:
            values = torch.where((label & source) != 0, _other_values(values, trial, may_be_indices), values)
        return torch.empty_like(tensor).copy_(values)

    args, kwargs = map_tensors(replace, arguments)
    try:
        output = func(*args, **kwargs)
    except (RuntimeError, IndexError, NotImplementedError) as error:
        raise Untraceable(f"{func} cannot be run on other values: {error}") from error
    return [*tensors_in(output), *_written(func, args, kwargs)]


def _context(tensor: Tensor, trial: int, may_be_indices: bool) -> Tensor:
    """The values of the run in the first trial, then others: a zero in a product or a True in `any` hides the rest."""
    if not trial or (may_be_indices and not _is_inexact(tensor) and tensor.dtype is not torch.bool):
        return tensor
    return _noise(tensor, trial) if _is_inexact(tensor) else torch.full_like(tensor, trial == 1)


def _other_values(context: Tensor, trial: int, may_be_indices: bool) -> Tensor:
    """Values other than those of the context: far above and below, or in their range if they may be indices."""
    if context.dtype is torch.bool:
        return ~context
    if _is_inexact(context):
        far = _scale(context) * 1000
        return (_noise(context, 3), context + far, context - far)[trial]
    if not may_be_indices:
        return context + (1, 100, -100)[trial]
    low, high = context.min(), context.max()
    if bool(low == high):
        raise Untraceable("the example has one value in all elements of a tensor of integers that may be indices")
    mirrored = low + high - context
    return (torch.where(mirrored == context, low, mirrored), high.expand_as(context), low.expand_as(context))[trial]


def _noise(like: Tensor, seed: int) -> Tensor:
    """Distinct, non-zero values of the magnitude of a tensor's, without using the process's random state."""
    positions = torch.arange(1, like.numel() + 1, device=like.device, dtype=torch.float32)
    values = (positions * (0.6180339 + 0.1 * seed)).frac() + 0.01
    signed = torch.where(positions % 2 == seed % 2, values, -values).view(like.shape)
    return (signed * _scale(like)).to(like.dtype)


def _scale(tensor: Tensor) -> float:
    magnitudes = tensor.detach().abs().to(torch.float32)
    largest = float(torch.where(magnitudes.isfinite(), magnitudes, 0.0).max()) if tensor.numel() else 0.0
    return min(max(largest, 1.0), torch.finfo(tensor.dtype).max / 2000)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Whether elements differ; NaNs are equal."""
    differ = a != b
    return differ & ~(a.isnan() & b.isnan()) if _is_inexact(a) else differ
