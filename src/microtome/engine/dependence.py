"""Follow, through a run, which of several sources each element of each tensor depends on.

Every element has a label: one bit for each source that its value depends on. Pointwise operators combine the labels of
their arguments. Any other operator is run again with the elements of one source replaced, and what changes in its
output depends on that source. This asks each operator by itself, so that a dependence is found also where the model as
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
#: Operators that copy values and leave nothing of what was there: the label is that of the last tensor argument.
_COPIES = {_aten._to_copy, _aten.copy_, _aten.copy, _aten.fill_, _aten.zero_}
#: Sums of products: one trial on values without zeros shows every dependence.
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution, _aten.linear, _aten.native_layer_norm}
#: Operators whose integer arguments are numbers to compute with, never indices or sizes.
_ARITHMETIC = {
    *(_aten.sum, _aten.cumsum, _aten.mean, _aten.prod, _aten.mm, _aten.bmm, _aten.cat, _aten.stack),
    *(_aten.any, _aten.all, _aten.max, _aten.min, _aten.amax, _aten.amin, _aten.argmax, _aten.argmin),
    *(_aten.sort, _aten.topk),
}
_EMPTY = {_aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
_READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: Methods that hand values to Python without an operator.
_READING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__}
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class Untraceable(MicrotomeError, RuntimeError):
    """A run whose dependences cannot be followed: it reads values into Python, or an operator cannot be tried."""


class Dependence:
    """While it is entered, labels what the run computes.

    >>> x = torch.arange(6.0).view(2, 3)
    >>> with Dependence() as dependence:
    ...     dependence.mark(x[0], 1)
    ...     dependence.mark(x[1], 2)
    ...     rows, columns = x.sum(1), x.sum(0)
    >>> dependence.of(rows).tolist(), dependence.of(columns).tolist()
    ([1, 2], [3, 3, 3])

    Args:
        unwrap: Gives, for a tensor of a subclass, the plain one that it stands for, or the tensor itself.
    """

    def __init__(self, unwrap: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        self._labels = _Labels()
        self._modes = (hide_modes(), _Reads(self._labels), _Operators(self._labels, unwrap))

    def mark(self, tensor: Tensor, label: int) -> None:
        """Give all elements of a tensor a label, 1 to 255."""
        self._labels.put(tensor, torch.full(tensor.shape, label, dtype=torch.uint8, device=tensor.device))

    def of(self, tensor: Tensor) -> Tensor:
        """The label of each element."""
        found = self._labels.of(tensor)
        return torch.zeros(tensor.shape, dtype=torch.uint8, device=tensor.device) if found is None else found

    def __enter__(self) -> Dependence:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Labels:
    """A label for each byte of each storage, so that views and writes through them need no care."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[Any, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """None: nothing in its storage has one."""
        if type(tensor) not in _PLAIN or tensor.is_meta:
            return None
        held = self._by_storage.get(id(_storage_of(tensor)))
        if held is None:
            return None
        first, *others = _bytes_of(held[1], tensor).unbind(-1)
        label = first.clone()
        for other in others:
            label |= other
        return label if bool(label.any()) else None

    def put(self, tensor: Tensor, label: Tensor) -> None:
        storage = _storage_of(tensor)
        key = id(storage)
        if key not in self._by_storage:
            held = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=tensor.device)
            self._by_storage[key] = weakref.ref(storage, lambda _: self._by_storage.pop(key)), held
        _bytes_of(self._by_storage[key][1], tensor).copy_(label.unsqueeze(-1).expand(*label.shape, tensor.itemsize))


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Untraceable(f"dependences are followed in strided tensors, got one of layout {tensor.layout}")
    return tensor.untyped_storage()


def _bytes_of(held: Tensor, tensor: Tensor) -> Tensor:
    """View a storage's labels with a tensor's shape and a trailing byte dimension."""
    width = tensor.itemsize
    stride = [step * width for step in tensor.stride()]
    return held.as_strided((*tensor.shape, width), (*stride, 1), tensor.storage_offset() * width)


class _Reads(TorchFunctionMode):
    """Raises where Python code takes values out of a labelled tensor without an operator."""

    def __init__(self, labels: _Labels) -> None:
        super().__init__()
        self._labels = labels

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READING_METHODS and self._labels.of(args[0]) is not None:
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
        given = list(tensors_in((args, kwargs)))
        labels = {id(tensor): label for tensor in given if (label := self._labels.of(tensor)) is not None}
        if not labels or any(type(tensor) not in _PLAIN for tensor in given):  # a subclass says what it gives
            return func(*args, **kwargs)
        _check(func, given, labels)
        written = _written(func, args, kwargs)
        before = map_tensors(_copy, (args, kwargs)) if written else (args, kwargs)
        labels_before = [labels.get(id(tensor)) for tensor in given]
        output = func(*args, **kwargs)
        outputs = list(tensors_in(output))
        inside = {id(tensor.untyped_storage()) for tensor in given}
        fresh = [tensor for tensor in outputs if id(tensor.untyped_storage()) not in inside]
        if func.overloadpacket in _EMPTY or not (fresh or written):
            return output
        found = _by_rule(func, given, labels_before, [*outputs, *written])
        if found is None:
            found = _by_trial(func, before, labels_before)
        for tensor, label in zip([*outputs, *written], found, strict=True):
            if any(tensor is one for one in (*fresh, *written)):
                self._labels.put(tensor, label)
        return output


def _check(func: Any, given: list[Tensor], labels: dict[int, Tensor]) -> None:
    """Raise if an operator gives values to Python, or a shape that depends on them, or cannot be tried."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "quantized"):
        raise Untraceable(f"{func} is not an operator of torch: which rows it combines is not known")
    masks = func.overloadpacket in (_aten.index, _aten._unsafe_index)
    if masks and not any(tensor.dtype in (torch.bool, torch.uint8) and id(tensor) in labels for tensor in given[1:]):
        return
    if _READING_TAGS & set(func.tags) or func.overloadpacket is _aten.is_nonzero:
        raise Untraceable(f"{func} reads values into Python, or gives a shape that depends on them")


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    places = [(at, a.name) for at, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
    return list(tensors_in([args[at] if at < len(args) else kwargs.get(name) for at, name in places]))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


def _by_rule(
    func: OpOverload, given: list[Tensor], labels: list[Tensor | None], targets: list[Tensor]
) -> list[Tensor] | None:
    """The labels of what a pointwise operator gives; None: it is not one."""
    copies = func.overloadpacket in _COPIES
    if not (copies or torch.Tag.pointwise in func.tags):
        return None
    if copies and func.overloadpacket is not _aten._to_copy:
        given, labels = given[1:], labels[1:]
    known = [label for label in labels if label is not None]
    found = []
    for target in targets:
        label = torch.zeros(target.shape, dtype=torch.uint8, device=target.device)
        for one in known:
            try:
                label |= one.to(target.device).expand(target.shape)
            except RuntimeError:  # it is not broadcast, whatever the tag says
                return None
        found.append(label)
    return found


# -- operators that are tried ------------------------------------------------------------------------------------------


def _by_trial(
    func: OpOverload, given: tuple[tuple[Any, ...], dict[str, Any]], labels: list[Tensor | None]
) -> list[Tensor]:
    """The labels of what any other operator gives, found by replacing the elements of one source after the other."""
    sources = [1 << bit for bit in range(8) if any(label is not None and (label & 1 << bit).any() for label in labels)]
    found: list[Tensor] = []
    for trial in (1,) if func.overloadpacket in _PRODUCTS else range(3):
        base = _outcome(func, given, labels, trial, 0)
        found = found or [torch.zeros(tensor.shape, dtype=torch.uint8, device=tensor.device) for tensor in base]
        for source in sources:
            for label, one, other in zip(found, base, _outcome(func, given, labels, trial, source), strict=True):
                if one.shape != other.shape:
                    raise Untraceable(f"{func} gives a shape that depends on values")
                label |= _differ(one, other).to(torch.uint8) * source
    return found


def _outcome(
    func: OpOverload,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    labels: list[Tensor | None],
    trial: int,
    source: int,
) -> list[Tensor]:
    """Run an operator with one source's elements replaced (0: none)."""
    remaining = dict(zip((id(tensor) for tensor in tensors_in(given)), labels, strict=True))
    indices = func.overloadpacket not in _ARITHMETIC

    def replaced(tensor: Tensor) -> Tensor:
        label = remaining[id(tensor)]
        if label is None:
            return _copy(tensor)
        values = torch.where(label != 0, _context(tensor, trial, indices), tensor)
        if source:
            values = torch.where((label & source) != 0, _others(values, trial, indices), values)
        return torch.empty_like(tensor).copy_(values)

    args, kwargs = map_tensors(replaced, given)
    try:
        output = func(*args, **kwargs)
    except (RuntimeError, IndexError, NotImplementedError) as error:
        raise Untraceable(f"{func} cannot be run on other values: {error}") from error
    return [*tensors_in(output), *_written(func, args, kwargs)]


def _context(tensor: Tensor, trial: int, indices: bool) -> Tensor:
    """The values that the run has, then others: a zero in a product or a True in `any` hides what is beside it."""
    if not trial or (indices and not _is_inexact(tensor) and tensor.dtype is not torch.bool):
        return tensor
    return _noise(tensor, trial) if _is_inexact(tensor) else torch.full_like(tensor, trial == 1)


def _others(context: Tensor, trial: int, indices: bool) -> Tensor:
    """Values that differ from those of the context: far above and below, or in their range if they may be indices."""
    if context.dtype is torch.bool:
        return ~context
    if _is_inexact(context):
        far = _scale(context) * 1000
        return (_noise(context, 3), context + far, context - far)[trial]
    if not indices:
        return context + (1, 100, -100)[trial]
    low, high = context.min(), context.max()
    if bool(low == high):
        raise Untraceable("the example has one value in all elements of a tensor of integers that may be indices")
    turned = low + high - context
    return (torch.where(turned == context, low, turned), high.expand_as(context), low.expand_as(context))[trial]


def _noise(like: Tensor, seed: int) -> Tensor:
    """Values of the size of a tensor's, all different and none zero. The process's random state is not touched."""
    places = torch.arange(1, like.numel() + 1, device=like.device, dtype=torch.float32)
    values = (places * (0.6180339 + 0.1 * seed)).frac() + 0.01
    signed = torch.where(places % 2 == seed % 2, values, -values).view(like.shape)
    return (signed * _scale(like)).to(like.dtype)


def _scale(tensor: Tensor) -> float:
    sizes = tensor.detach().abs().to(torch.float32)
    largest = float(torch.where(sizes.isfinite(), sizes, 0.0).max()) if tensor.numel() else 0.0
    return min(max(largest, 1.0), torch.finfo(tensor.dtype).max / 2000)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Compare two tensors by element; NaNs compare equal."""
    differ = one != other
    return differ & ~(one.isnan() & other.isnan()) if _is_inexact(one) else differ
