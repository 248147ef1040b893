"""`mt.split`, without the imports that it needs when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from microtome.results.cuts import Cut
    from microtome.split.stages import Stages


def split(
    model: nn.Module,
    inputs: Any,
    at: str | Cut | Sequence[str | Cut] | Any,
    *,
    plan: Any = None,
    verify: bool = True,
    load: str | int | None = None,
    state: str | Sequence[str] = (),
    grad: bool = False,
) -> Stages:
    """Split the model into stages that together compute exactly what it computes.

    The model is not changed; the stages run parts of it. It is analyzed on one example; the stages also take inputs of
    other batch sizes and lengths.

    Args:
        inputs: An example: a tensor, a tuple, a dict, an `Inputs`, or a shape such as `"1x3x224x224"`.
        at: Where to cut: the address of a call, at whose exit the head ends; several for more than two stages; or
            `"auto"` for the cut of the plan.
        plan: A plan of `mt.plan`, which may also be given as `at`.
        verify: Run the model and the stages on the example, and compare their outputs.
        load: Keep the weights of this stage alone: `"head"`, `"tail"` or its index. The stages are then of a copy of
            the model, whose other weights are on `meta`.
        state: Names of arguments that are state, such as a cache of your own class: objects that calls mutate and that
            the next step goes on with. Those that calls mutate on the example are found without it.
        grad: Keep the gradient of what crosses, for training; without it, a backward ends at the cut. `tail(head(x))`
            backpropagates through the cut, and `Boundary.backward` takes gradients that come back from another
            process. The gradients are verified, too.

    Raises:
        NoMatch: There is no such call, or the model cannot be cut there; with the reason.
        Unsupported: The output of the stages differs from that of the model; with `grad`, also if its gradients differ,
            or cannot cross.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-vit")
    >>> head, tail = mt.split(model, x, at="blocks.1.attn")
    >>> tail(head(x)).equal(model(x))
    True
    """
    from microtome.split.splitter import Splitter  # imports much, so not before it is called

    where = plan if isinstance(at, str) and at == "auto" and plan is not None else at
    names = (state,) if isinstance(state, str) else tuple(state)
    return Splitter(model, inputs, state=names, grad=grad).at(where, verify=verify, load=load)
