"""Running a model on stand-ins for its weights, so that nothing is computed and nothing of the model is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._pytree import tree_map_only

from microtome.engine.select import named
from microtome.errors import Unsupported
from microtome.inputs import Inputs

#: `meta`: shapes alone. `fake`: shapes, and the devices the tensors would be on. `real`: as it is, with copied buffers.
Stand = Literal["meta", "fake", "real"]


@contextmanager
def stand_in(model: nn.Module, inputs: Inputs, stand: Stand) -> Iterator[Inputs]:
    """For the time of the block, give the model stand-ins for weights and buffers; yield such inputs as go with them.

    Afterwards every module holds what it held, and the random state is as it was. While the block runs, no other thread
    may use the model.
    """
    modules = [module for _, module in named(model)]
    _refuse_lazy(model)
    held = [(module.__dict__, dict(module.__dict__)) for module in modules]
    held += [
        (space, dict(space)) for module in modules for space in (module._parameters, module._buffers, module._modules)
    ]
    with _random_state_kept(model, stand), _maker(stand) as make:
        try:
            made: dict[int, Tensor] = {}
            for module in modules:
                spaces: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for space in spaces:
                    for name, tensor in space.items():
                        if tensor is not None and (stand != "real" or space is module._buffers):
                            space[name] = made.setdefault(id(tensor), _dressed(make(tensor), tensor))
            args, kwargs = tree_map_only(Tensor, make, (inputs.args, inputs.kwargs))
            yield Inputs(*args, **kwargs)
        finally:
            for space, before in held:
                space.clear()
                space.update(before)


@contextmanager
def _maker(stand: Stand) -> Iterator[Callable[[Tensor], Tensor]]:
    if stand == "meta":
        yield _on_meta
    elif stand == "real":
        yield lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad)
    else:
        from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, seldom needed

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        quiet, logger.disabled = logger.disabled, True  # what it logs is raised too
        try:
            with mode:
                yield mode.from_tensor
        finally:
            logger.disabled = quiet


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(tensor.requires_grad)


def _dressed(made: Tensor, original: Tensor) -> Tensor:
    """The stand-in as a parameter if the original is one, with whatever was attached to it."""
    if isinstance(original, nn.Parameter):
        made = nn.Parameter(made.detach(), requires_grad=original.requires_grad)
    made.__dict__.update(original.__dict__)
    return made


def _refuse_lazy(model: nn.Module) -> None:
    for path, module in named(model):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if isinstance(tensor, UninitializedTensorMixin):
                raise Unsupported(
                    f"{path or 'the model'} ({type(module).__name__}) has no shape yet: run the model once on real "
                    "inputs, so that its lazy modules learn theirs"
                )


def _random_state_kept(model: nn.Module, stand: Stand) -> AbstractContextManager[None]:
    used = {tensor.device.index for tensor in model.parameters() if tensor.is_cuda} if stand == "real" else set()
    return torch.random.fork_rng(devices=sorted(used))
