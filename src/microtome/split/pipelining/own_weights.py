"""Copy a model for one stage, so that the copy registers the parameters and buffers of that stage alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import Tensor, nn

from microtome.engine.fingerprint import named_weights
from microtome.engine.module_state import frozen_copy, replace_tensors, unregister_tensors
from microtome.errors import Unsupported
from microtome.split.weights import copy_with_weights

if TYPE_CHECKING:
    from microtome.split.stage import Stage

#: For each parameter and buffer of a model, the stages that hold it.
Holders = Mapping[str, tuple[int, ...]]

#: The parameters of each stage for weights that other stages train, too, by name: those of its modules are the same.
_tied_copies: WeakKeyDictionary[Stage, WeakValueDictionary[str, nn.Parameter]] = WeakKeyDictionary()


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


def copy_with_own_weights(stage: Stage, holders: Holders) -> nn.Module:
    """Copy the model of a stage; the copy registers the weights that the stage holds, and shares those with the model.

    Weights that the stage needs and does not hold are attributes of their modules: they have values, and are neither
    in `parameters()` nor in `state_dict()`. All others are on meta. Each stage has a parameter of its own for a weight
    that several train, also in one process: a schedule divides the gradients of each stage by itself. That of the first
    of these stages, or of the only stage whose weights are here, is the model's; those of the others are copies.
    """
    model, index = stage.model, stage.index
    own = {name for name, stages in holders.items() if index in stages}
    copied = copy_with_weights(model, own | set(stage.parameters_needed()))
    tied = {name: stages for name, stages in tied_weights(model, holders).items() if name in own}
    copies = {
        id(model.get_parameter(name)): _copy_tied(stage, name)
        for name, stages in tied.items()
        if index != stages[0] and not stage.has_weights_alone
    }
    replace_tensors(copied, lambda weight: copies.get(id(weight), weight))
    foreign = {id(weight): _guard(weight, name, index) for name, weight in named_weights(copied) if name not in own}
    unregister_tensors(copied, lambda weight: foreign.get(id(weight)))
    return copied


def _copy_tied(stage: Stage, name: str) -> nn.Parameter:
    """The copy of a weight that is the parameter of a stage."""
    copies = _tied_copies.setdefault(stage, WeakValueDictionary())
    copied = copies.get(name)
    if copied is None:
        copied = copies[name] = nn.Parameter(stage.model.get_parameter(name).detach().clone())
    return copied


def _guard(weight: Tensor, name: str, index: int) -> Tensor:
    """Make a weight of other stages raise if it gets a gradient here, since no optimizer would see that."""
    if not weight.requires_grad or weight.is_meta:
        return weight

    def refuse(gradient: Tensor) -> None:
        raise Unsupported(
            f"{name!r} gets a gradient in stage {index}, and not on the example: split the model on an example where "
            "it does"
        )

    return frozen_copy(weight, refuse)
