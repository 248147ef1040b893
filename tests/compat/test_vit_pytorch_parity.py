"""The drop-ins for vit-pytorch beside the originals: every public name, argument, result and error that those have."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from microtome import zoo
from microtome.compat.vit_pytorch import Extractor, Recorder
from microtome.errors import NoMatch, SessionError, Unsupported

zoo.import_torchvision()  # vit-pytorch imports it
pytest.importorskip("vit_pytorch")

KINDS = [Extractor, Recorder]
STATES = ["made", "called", "cleared", "ejected"]


def theirs(ours: type) -> Any:
    return getattr(import_module(f"vit_pytorch.{ours.__name__.lower()}"), ours.__name__)


def vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 8, "num_classes": 3, "dim": 8, "depth": 2, "heads": 2, "mlp_dim": 8}
    model: nn.Module = import_module("vit_pytorch.vit").ViT(**sizes, dim_head=4)
    return model.eval()


def image() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.equal(other) and one.requires_grad == other.requires_grad
    return bool(one == other)


def brought_to(state: str, wrapper: Any) -> Any:
    if state != "made":
        wrapper(image())
    if state == "cleared":
        wrapper.clear()
    if state == "ejected":
        wrapper.eject()
    return wrapper


def public(kind: type) -> dict[str, Any]:
    """What the class itself defines, without what nn.Module has."""
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_attribute_is_there_and_has_the_same_value(kind: Any, state: str) -> None:
    expected, ours = brought_to(state, theirs(kind)(vit())), brought_to(state, kind(vit()))
    names = {name for name in vars(expected) if not name.startswith("_")} | set(expected._modules)
    assert {"vit", "data", "hooks", "hook_registered", "ejected", "device"} <= names
    for name in names:
        value, found = getattr(expected, name), getattr(ours, name)
        if name == "vit":
            assert type(found) is type(value)
        elif name == "hooks":
            assert found == []  # it has none
        elif name == "detach_fn":
            tensor = torch.ones(1, requires_grad=True)
            assert same(found(tensor), value(tensor))
        else:
            assert same(value, found), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_takes_what_the_originals_takes_by_position_and_by_name(kind: Any) -> None:
    methods = public(theirs(kind)) | {"__init__": theirs(kind).__init__}
    assert {"forward", "eject", "clear"} <= methods.keys()
    for name, method in methods.items():
        expected, ours = inspect.signature(method).parameters, inspect.signature(getattr(kind, name))
        for by_position in range(1, len(expected) + 1):
            named = list(expected)[by_position:]
            ours.bind(*range(by_position), **dict.fromkeys(named))
        if name == "__init__":
            assert {p.name: p.default for p in ours.parameters.values()} == {
                p.name: p.default for p in expected.values()
            }


# -- calls -------------------------------------------------------------------------------------------------------------

ONLY = "return_embeddings_only"
WAYS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "by position": ((image(),), {}),
    "by name": ((), {"img": image()}),
    "embeddings by position": ((image(), True), {}),
    "no embeddings by position": ((image(), False), {}),
    "embeddings by name": ((image(),), {ONLY: True}),
    "all by name": ((), {"img": image(), ONLY: True}),
}


class Renamed(nn.Module):
    """A model whose input has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.model = vit()
        self.transformer = self.model.transformer

    def forward(self, pixels: Tensor) -> Any:
        return self.model(pixels)


class Aliased(nn.Module):
    """Has its transformer under names that are no paths."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = vit()

    @property
    def transformer(self) -> Any:
        return self.inner.transformer

    encoder = transformer

    def forward(self, img: Tensor) -> Any:
        return self.inner(img)


@pytest.mark.parametrize("build", [vit, Renamed, Aliased])
@pytest.mark.parametrize(
    ("kind", "way"), [(Extractor, way) for way in WAYS] + [(Recorder, "by position"), (Recorder, "by name")]
)
def test_every_way_of_calling_gives_what_the_originals_does(kind: Any, way: str, build: Callable[[], Any]) -> None:
    args, kwargs = WAYS[way]
    model = build()
    expected = theirs(kind)(model)
    result = expected(*args, **kwargs)
    expected.eject()
    assert same(kind(model)(*args, **kwargs), result)


class Flagged(nn.Module):
    """Takes a bool after its input."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Tanh()

    def forward(self, x: Tensor, double: bool = False, *, img: Tensor | None = None) -> Any:
        return self.transformer(x) * (2 if double else 1)


def test_a_bool_is_the_models_if_the_embeddings_are_named() -> None:
    output, latents = Extractor(Flagged())(torch.ones(1), True, return_embeddings_only=False)
    assert output.equal(2 * latents)
    assert Extractor(Flagged())(torch.ones(1), double=True)[0].equal(output)
    assert Extractor(Flagged())(torch.ones(1), True).equal(latents)


OPTIONS: dict[str, list[Any]] = {
    "layer_name": ["transformer", "mlp_head"],
    "layer_save_input": [False, True],
    "return_embeddings_only": [False, True],
    "detach": [True, False],
}


@pytest.mark.parametrize("values", list(itertools.product(*OPTIONS.values())), ids=str)
def test_every_option_gives_what_the_originals_does(values: tuple[Any, ...]) -> None:
    model, options = vit(), dict(zip(OPTIONS, values, strict=True))
    expected = theirs(Extractor)(model, **options)
    result = expected(image())
    expected.eject()
    assert same(Extractor(model, **options)(image()), result)


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "layer_name": lambda model: "mlp_head",
    "layer": lambda model: model.transformer.layers[0][1],
    "layer_save_input": lambda model: True,
    "return_embeddings_only": lambda model: True,
    "detach_fn": lambda model: lambda tensor: tensor.detach().half(),
    "device": lambda model: "cpu",
    "latents": lambda model: torch.ones(1),
    "data": lambda model: "mine",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_attribute_that_is_set_is_used(name: str) -> None:
    results = []
    for kind in (theirs(Extractor), Extractor):
        model = vit()
        wrapper = kind(model)
        setattr(wrapper, name, SETTINGS[name](model))
        results.append((wrapper(image()), wrapper.latents, wrapper.data))
        assert wrapper.eject() is model
    assert same(results[0], results[1])


def test_a_layer_that_is_set_adds_no_names() -> None:
    model = vit()
    extractor = Extractor(model)
    names = list(extractor.state_dict())
    extractor.layer = model.get_submodule("mlp_head")
    assert list(extractor.state_dict()) == names
    assert extractor(image())[1].equal(model(image()))


def test_a_detach_fn_sees_what_the_layer_gave_before_it_was_written_to() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.transformer(x).mul_(0)

    for kind in (theirs(Extractor), Extractor):
        extractor = kind(Writes())
        extractor.detach_fn = lambda tensor: tensor.double()
        _, latents = extractor(torch.ones(1))
        assert latents.equal(torch.ones(1).tanh().double())


def test_a_layer_may_be_named_by_any_attribute() -> None:
    model = Aliased()
    expected = theirs(Extractor)(model, layer_name="encoder")
    result = expected(image())
    expected.eject()
    assert same(Extractor(model, layer_name="encoder")(image()), result)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_raised_after_eject_is_an_assertion_error_too(kind: Any) -> None:
    for wrapper in (theirs(kind)(vit()), kind(vit())):
        wrapper.eject()
        with pytest.raises(AssertionError, match="has been ejected"):
            wrapper(image())
    with pytest.raises(SessionError, match=f"this {kind.__name__} has been ejected and cannot be used anymore"):
        wrapper(image())


def test_a_layer_that_is_not_there_is_an_assertion_error_too() -> None:
    with pytest.raises(AssertionError, match="not found"):
        theirs(Extractor)(vit(), layer_name="nowhere")(image())
    with pytest.raises(AssertionError, match="no module matches the path 'nowhere'") as raised:
        Extractor(vit(), layer_name="nowhere")
    assert isinstance(raised.value, NoMatch)


@pytest.mark.parametrize("name", ["_hook", "_register_hook"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_subclass_that_overrides_what_is_never_called_is_refused(kind: Any, name: str) -> None:
    assert hasattr(theirs(kind), name)
    expected = f"expected a subclass of {kind.__name__} that overrides public methods, got Mine with {name}, which"
    with pytest.raises(Unsupported, match=expected):
        type("Mine", (kind,), {name: lambda self, *_: None})


@pytest.mark.parametrize("kind", KINDS)
def test_a_subclass_of_public_methods_works(kind: Any) -> None:
    class Mine(kind):  # type: ignore[misc]
        def clear(self) -> None:
            self.cleared = True
            super().clear()

    mine = Mine(vit())
    mine(image())
    assert mine.cleared
