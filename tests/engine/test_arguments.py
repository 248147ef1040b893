"""Law: trace, profile, cuts and split change no object that the caller passes."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.engine.arguments import copy_arguments
from microtome.engine.meta_run import copy_inputs
from microtome.errors import Unsupported
from microtome.inputs import Inputs
from tests.marks import slow

ACTIONS: dict[str, Callable[[nn.Module, Inputs], object]] = {
    "trace": mt.trace,
    "trace-fake": partial(mt.trace, fake=True),
    "trace-real": partial(mt.trace, fake=False),
    "trace-backward": partial(mt.trace, backward=True),
    "profile": mt.profile,
    "profile-time": partial(mt.profile, measure=("time", "memory"), repeat=3, warmup=0),
    "cuts": mt.cuts,
    "split": lambda model, inputs: mt.split(model, inputs, at="first"),
}


def describe(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """Everything that a value holds, as something to compare."""
    if isinstance(value, Tensor):
        place = type(value), id(value), value.device.type
        return *place, value.requires_grad, value.is_leaf and value.grad, value.detach().tolist()
    if isinstance(value, np.ndarray):
        return id(value), value.tolist()
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().tolist()
    if isinstance(value, str | int | float | None | torch.dtype | torch.device) or id(value) in seen:
        return value
    inside = (*seen, id(value))
    parts: list[Any] = []
    if isinstance(value, dict):
        parts += [(key, describe(item, inside)) for key, item in value.items()]
    elif isinstance(value, list | tuple | set | deque):
        parts += [describe(item, inside) for item in value]
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name)]
    named = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}
    return type(value), id(value), parts, [(name, describe(item, inside)) for name, item in named.items()]


# -- objects of one's own ----------------------------------------------------------------------------------------------


class Plain:
    """Holds tensors as attributes, in lists, and as what autograd made."""

    def __init__(self) -> None:
        self.steps = 0
        self.state = torch.ones(2, 4)
        self.made = torch.ones(4, requires_grad=True) * 2
        self.weight = nn.Parameter(torch.ones(4))
        self.history: list[Any] = [torch.zeros(4)]

    def write(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.state.add_(1)
        self.state = self.state + x.mean(0)
        self.history.append(x)
        self.history[0].mul_(3)
        return x + self.state.mean(0) + self.made + self.weight


class Slotted:
    __slots__ = ("history", "state", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.state = torch.ones(2, 4)
        self.history: list[Any] = []

    def write(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.state.add_(1)
        self.history.append(self.state)
        self.state = x + self.state.mean(0)
        return x + self.state


class Inherits(Slotted):
    """Slots of the base class and a dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.more = {"a": torch.ones(4)}

    def write(self, x: Tensor) -> Tensor:
        self.more["b"] = x
        self.more["a"].add_(1)
        return super().write(x) + self.more["a"]


@dataclass
class Fields:
    state: Tensor

    def __post_init__(self) -> None:
        self.history: list[Any] = []  # no field

    def write(self, x: Tensor) -> Tensor:
        self.history.append(x)
        self.state.add_(1)
        return x + self.state


class Listed(list[Tensor]):
    """A list with a constructor of its own."""

    def __init__(self, size: int, *, like: Tensor) -> None:
        super().__init__([like.clone() for _ in range(size)])
        self.seen = [0]

    def write(self, x: Tensor) -> Tensor:
        self.seen[0] += 1
        self[0].add_(1)
        self.append(x)
        return x + self[0]


class Mapped(OrderedDict[str, Tensor]):
    def __init__(self) -> None:
        super().__init__(a=torch.ones(4))
        self.log: list[Tensor] = []

    def write(self, x: Tensor) -> Tensor:
        self.log.append(x)
        self["a"].add_(1)
        self["b"] = x
        return x + self["a"]


class Draws:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.chance = random.Random(0)
        self.array = np.zeros(2)

    def write(self, x: Tensor) -> Tensor:
        torch.rand(2, generator=self.generator)
        self.array += self.chance.random()
        return x * 2


class Queue:
    def __init__(self) -> None:
        self.waiting = deque([torch.ones(4)], maxlen=2)

    def write(self, x: Tensor) -> Tensor:
        self.waiting.append(x.mean(0))
        return x + self.waiting[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, held: Any) -> Tensor:
        for one in held if type(held) in (list, tuple) else [held]:
            x = one.write(x)
        return self.second(self.first(x))


KINDS: dict[str, Callable[[], Any]] = {
    "plain": Plain,
    "slots": Slotted,
    "slots-and-dict": Inherits,
    "dataclass": lambda: Fields(torch.ones(4)),
    "list": lambda: Listed(2, like=torch.ones(4)),
    "dict": Mapped,
    "generators": Draws,
    "deque": Queue,
    "nested": lambda: [Plain(), (Slotted(), Mapped())[0]],
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_the_caller_are_not_changed(kind: str, action: str) -> None:
    inputs = Inputs(torch.ones(3, 4), KINDS[kind]())
    before = describe(inputs)
    with suppress(mt.MicrotomeError):  # whether it can be done is another question
        ACTIONS[action](Model(), inputs)
    assert describe(inputs) == before


def test_an_object_that_cannot_be_copied_is_refused() -> None:
    class Guarded(Slotted):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is one of me")

    held = Guarded()
    before = describe(held)
    message = r"expected arguments that can be copied, got a Guarded in 'held' that cannot be: .*there is one of me"
    for action in ACTIONS.values():
        with pytest.raises(Unsupported, match=message):
            action(Model(), Inputs(torch.ones(3, 4), held=held))
    assert describe(held) == before


@pytest.mark.parametrize("action", ACTIONS)
def test_a_method_of_a_container_appends_to_a_copy(action: str) -> None:
    class Reports(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor, report: Callable[[Tensor], None]) -> Tensor:
            y: Tensor = self.first(x)
            report(y)
            return y + 1

    outputs: list[Tensor] = []
    with suppress(mt.MicrotomeError):
        ACTIONS[action](Reports(), Inputs(torch.ones(3, 4), outputs.append))
    assert outputs == []


def test_an_iterator_that_the_run_would_exhaust_is_refused() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor, more: Iterator[int]) -> Tensor:
            return x * next(more)

    numbers = (number for number in range(3))
    with pytest.raises(Unsupported, match=r"got a generator in 'more' that cannot be: .*__deepcopy__"):
        mt.trace(Reads(), (torch.ones(2), numbers))
    assert next(numbers) == 0


def test_a_module_among_the_arguments_is_as_found() -> None:
    class Applies(nn.Module):
        def forward(self, x: Tensor, other: nn.Module) -> Tensor:
            other.register_buffer("seen", x)
            y: Tensor = other(x)
            return y

    norm = nn.BatchNorm1d(4)
    before = describe(norm)
    for name in ("trace", "trace-fake", "trace-real", "trace-backward", "profile-time"):
        ACTIONS[name](Applies(), Inputs(torch.rand(3, 4), norm))
        assert describe(norm) == before, name


class Pair(NamedTuple):
    left: Any
    right: Any


def test_what_arguments_share_their_copies_share() -> None:
    x, parts, held, model = torch.ones(2), [torch.ones(1)], Plain(), nn.Linear(1, 1)
    held.state = x
    held.model = model  # type: ignore[attr-defined]
    given = Inputs(held, x, parts, Pair(parts, {"held": held}), model.forward)
    made: dict[int, Tensor] = {}
    copied = copy_arguments(given, lambda t: made.setdefault(id(t), t.detach().clone()), model.modules())
    one, tensor, again, pair, method = copied.args
    assert one is not held
    assert (one.state is tensor, tensor is not x) == (True, True)
    assert pair.left is again
    assert again is not parts
    assert pair.right["held"] is one
    assert one.model is model
    assert method.__self__ is model


@pytest.mark.parametrize("view", ["plain", "slice", "column", "expanded", "transposed", "empty", "scalar"])
def test_a_copy_has_strides_and_takes_only_the_memory_that_its_original_spans(view: str) -> None:
    base = torch.rand(100, 6)
    x = {
        "plain": base,
        "slice": base[40:42],
        "column": base[40:44, 2],
        "expanded": base[3].expand(5, 6),
        "transposed": base[7:9].T,
        "empty": base[5:5],
        "scalar": base[8, 3],
    }[view]
    (copied,) = copy_inputs(Inputs(x), nn.Identity()).args
    assert copied.equal(x)
    assert copied.stride() == x.stride()
    assert copied.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    assert copied.untyped_storage().nbytes() <= (base.nbytes if view == "plain" else 20 * 4)


def test_arguments_that_hold_themselves_are_refused() -> None:
    held: list[Any] = []
    held.append(held)
    with pytest.raises(Unsupported, match=r"expected finite arguments, got a list in 'input' that contains itself"):
        mt.trace(nn.Identity(), Inputs(held))


def test_a_lock_is_refused_by_its_place() -> None:
    with pytest.raises(Unsupported, match=r"got a lock in 'guard' that cannot be"):
        mt.trace(Model(), Inputs(torch.ones(3, 4), guard=threading.Lock()))


def test_every_measured_pass_has_the_arguments_as_they_were_given() -> None:
    seen: list[tuple[int, int, float]] = []

    class Notes(nn.Module):
        def forward(self, x: Tensor, held: Any, log: list[Tensor]) -> Tensor:
            seen.append((held.steps, len(log), 0.0 if x.is_meta else x.sum().item()))
            y: Tensor = held.write(x.add_(1))
            log.append(y)
            return y

    mt.profile(Notes(), (torch.zeros(3, 4), Slotted(), []), measure=("time", "memory"), repeat=3, warmup=1)
    assert len(seen) > 6
    assert set(seen) == {(0, 0, 0.0)}


# -- non-leaf tensors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["trace", "trace-fake", "trace-real", "profile-time", "profile"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_tensor_that_autograd_made_may_be_written_in_place(action: str, backward: bool) -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    leaf = torch.ones(3, 4, requires_grad=True)
    x = leaf * -1
    result = ACTIONS[action](model, Inputs(x), backward=backward)  # type: ignore[call-arg]
    assert x.tolist() == [[-1] * 4] * 3
    assert (x.is_leaf, x.requires_grad, x._version, leaf.grad) == (False, True, 0, None)
    if backward and isinstance(result, mt.Trace):
        # Beside the products for input and weight and the sum for the bias, the ReLU's own: the input needs a gradient.
        assert any("threshold_backward" in op.name for op in result.ops if op.phase == "backward")


def test_views_of_one_tensor_that_autograd_made_still_share_memory() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return x + y

    base = torch.ones(4, requires_grad=True) * 2
    t = mt.trace(Adds(), (base, base.detach()), backward=True)
    assert len({value.memory for value in t.values if value.origin == "input"}) == 1


# -- the caches of transformers ----------------------------------------------------------------------------------------

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def caches() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    def decoder(family: str, cache: str, **config: Any) -> tuple[nn.Module, Any]:
        import transformers

        settings = getattr(transformers, f"{family}Config")(**SIZES, **HEADS, **config)
        model = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
        more = {"max_cache_len": 16} if cache == "StaticCache" else {}
        return model, getattr(transformers, cache)(config=settings, **more)

    def encoder_decoder() -> tuple[nn.Module, Any]:
        import transformers

        config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4)
        model = transformers.T5ForConditionalGeneration(config).eval()
        both = (transformers.DynamicCache(config=config), transformers.DynamicCache(config=config))
        return model, transformers.EncoderDecoderCache(*both)

    sliding = {"sliding_window": 4}
    return {
        "dynamic": partial(decoder, "Llama", "DynamicCache"),
        "static": partial(decoder, "Llama", "StaticCache"),
        "dynamic-sliding": partial(decoder, "Mistral", "DynamicCache", **sliding),
        "static-sliding": partial(decoder, "Mistral", "StaticCache", **sliding),
        "mixture": partial(decoder, "Mixtral", "DynamicCache", num_local_experts=4),
        "encoder-decoder": encoder_decoder,
    }


@pytest.mark.parametrize("grad", [False, *slow(True)])
@pytest.mark.parametrize("name", list(caches()))
@pytest.mark.filterwarnings("ignore")
def test_caches_of_transformers_are_not_changed(name: str, grad: bool) -> None:
    zoo.import_torchvision()  # which transformers imports
    pytest.importorskip("transformers")
    model, cache = caches()[name]()
    tokens = torch.arange(9)[None]
    given: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
    if name == "encoder-decoder":
        with torch.no_grad():
            given["encoder_outputs"] = (model.encoder(tokens)[0],)  # type: ignore[operator]
    token = {"decoder_input_ids" if name == "encoder-decoder" else "input_ids": tokens}
    with torch.set_grad_enabled(grad):  # with gradients, the cache holds what autograd made
        model(**given, **token)
        given |= {key: value[:, :1] for key, value in token.items()}
        before = describe(given)
        for action in ("trace", "trace-fake", "trace-real", "profile", "profile-time", "cuts", "split"):
            may_refuse = action in ("trace-fake", "split")  # a cache does not cross a cut
            with suppress(mt.MicrotomeError) if may_refuse else nullcontext():
                ACTIONS[action](model, Inputs(**given))
            assert describe(given) == before, action
