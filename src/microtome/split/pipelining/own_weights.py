"""Copy a model for one stage, so that the copy registers the parameters and buffers of that stage alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from microtome.engine.fingerprint import named_weights
from microtome.engine.module_state import frozen_copy, replace_tensors, unregister_tensors
from microtome.errors import Unsupported
from microtome.split.weights import copy_with_weights

#: For each parameter and buffer of a model, the stages that hold it.
Holders = Mapping[str, tuple[int, ...]]

#: For each weight that several stages train: the first of them in this process, and the copies of the others.
_tied_copies = WeakTensorKeyDictionary()


def find_holders(
    model: nn.Module, needed: Sequence[Collection[str]], trained: Sequence[Collection[str]] | None
) -> Holders:
    """Find the stages that hold each weight.

    A parameter belongs to the stages in which it gets a gradient on the example. Others may take it to compute values
    that nobody needs, as code between calls is run again. What no stage needs belongs to the first.

    Args:
        needed: For each stage, the weights that its operators read.
        trained: For each stage, the parameters that get a gradient in it; None: unknown.
    """
    holders: dict[str, tuple[int, ...]] = {}
    for name, _ in named_weights(model):
        reading = tuple(index for index, names in enumerate(needed) if name in names)
        training = tuple(index for index, names in enumerate(trained or ()) if name in names)
        holders[name] = training or reading or (0,)
    return holders


def tied_weights(model: nn.Module, holders: Holders) -> dict[str, tuple[int, ...]]:
    """The parameters that several stages train, with these stages."""
    trained = (name for name, weight in model.named_parameters() if weight.requires_grad)
    return {name: holders[name] for name in trained if len(holders[name]) > 1}


def copy_with_own_weights(model: nn.Module, index: int, needed: Collection[str], holders: Holders) -> nn.Module:
    """Copy a model; the copy registers the weights that a stage holds, and shares those with the model.

    Weights that the stage needs and does not hold are attributes of their modules: they have values, and are neither
    in `parameters()` nor in `state_dict()`. All others are on meta. Each stage has a parameter of its own for a weight
    that several train, also in one process: a schedule divides the gradients of each stage by itself.
    """
    own = {name for name, stages in holders.items() if index in stages}
    copied = copy_with_weights(model, own | set(needed))
    tied = {name: model.get_parameter(name) for name in tied_weights(model, holders) if name in own}
    copies = {id(weight): _of_stage(weight, index) for weight in tied.values()}
    replace_tensors(copied, lambda weight: copies.get(id(weight), weight))
    foreign = {id(weight): _guarded(weight, name, index) for name, weight in named_weights(copied) if name not in own}
    unregister_tensors(copied, lambda weight: foreign.get(id(weight)))
    return copied


def _of_stage(weight: nn.Parameter, index: int) -> nn.Parameter:
    """The parameter of a stage for a weight that several train: in the first stage of this process, the weight."""
    first, copies = _tied_copies.setdefault(weight, (index, WeakValueDictionary()))
    if index == first:
        return weight
    copied = copies.get(index)
    if copied is None:
        copied = copies[index] = nn.Parameter(weight.detach().clone())
    return copied


def _guarded(weight: Tensor, name: str, index: int) -> Tensor:
    """A weight of other stages, which raises if it gets a gradient here, since no optimizer would see that."""
    if not weight.requires_grad or weight.is_meta:
        return weight

    def refuse(gradient: Tensor) -> None:
        raise Unsupported(
            f"{name!r} gets a gradient in stage {index}, and not on the example: split the model on an example where "
            "it does"
        )

    return frozen_copy(weight, refuse)
