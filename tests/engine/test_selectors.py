"""Selectors."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

import microtome as mt
from microtome.errors import BadSelector, NoMatch, NotAModule


@pytest.fixture
def model() -> nn.Module:
    def block() -> nn.ModuleDict:
        return nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2), "mlp": nn.Sequential(nn.Linear(4, 4), nn.GELU())})

    return nn.ModuleDict({"blocks": nn.ModuleList([block(), block()]), "head": nn.Linear(4, 2)})


CASES: list[tuple[Any, list[str]]] = [
    ("head", ["head"]),
    ("", [""]),
    ("blocks.*", ["blocks.0", "blocks.1"]),
    ("blocks.*.attn", ["blocks.0.attn", "blocks.1.attn"]),
    ("blocks.1.**", ["blocks.1.attn", "blocks.1.attn.out_proj", "blocks.1.mlp", "blocks.1.mlp.0", "blocks.1.mlp.1"]),
    ("**.mlp.?", ["blocks.0.mlp.0", "blocks.0.mlp.1", "blocks.1.mlp.0", "blocks.1.mlp.1"]),
    ("blocks.[!0]", ["blocks.1"]),
    ("*", ["blocks", "head"]),
    ("**.head", ["head"]),
    ("h*ead*", ["head"]),
    (re.compile(r"mlp\.0$"), ["blocks.0.mlp.0", "blocks.1.mlp.0"]),
    (re.compile(r"^head"), ["head"]),
    (nn.GELU, ["blocks.0.mlp.1", "blocks.1.mlp.1"]),
    (lambda path, module: isinstance(module, nn.Linear) and path.endswith("0"), ["blocks.0.mlp.0", "blocks.1.mlp.0"]),
    (["head", "blocks.0"], ["blocks.0", "head"]),
    (("head", {"blocks.0.mlp", nn.GELU}), ["blocks.0.mlp", "blocks.0.mlp.1", "blocks.1.mlp.1", "head"]),
]


@pytest.mark.parametrize(("selector", "paths"), CASES)
def test_selectors_choose_in_the_order_of_the_model(model: nn.Module, selector: Any, paths: list[str]) -> None:
    chosen = mt.select(model, selector)
    assert list(chosen) == paths
    assert all(model.get_submodule(path) is module for path, module in chosen.items())


def test_a_module_selects_itself_and_a_shared_one_is_found_by_any_name() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    assert list(mt.select(model, shared)) == list(mt.select(model, "1.0")) == list(mt.select(model, "1.*")) == ["0.0"]


def test_a_path_with_the_characters_of_a_glob_is_found_first() -> None:
    model = nn.ModuleDict({"a[0]": nn.ReLU(), "a0": nn.ReLU(), "b^": nn.ReLU()})
    assert list(mt.select(model, "a[0]")) == ["a[0]"]
    assert list(mt.select(model, "a[012]")) == ["a0"]
    assert list(mt.select(model, "b[^]")) == ["b^"]


def test_a_glob_that_cannot_be_read(model: nn.Module) -> None:
    with pytest.raises(BadSelector, match=r"invalid glob '\[z-a\]': bad character range"):
        mt.select(model, "[z-a]")


MISSES: list[tuple[Any, str]] = [
    ("heads", r"no module matches the path 'heads'. Did you mean 'head'\?"),
    ("blocks.*.attnn", r"no module matches the glob 'blocks.\*.attnn'. Did you mean 'blocks.*attn'"),
    ("zzz", r"There are: 'blocks', 'blocks.0', .*…"),
    (re.compile("mlq"), "no module's path matches the regex 'mlq'"),
    (nn.LSTM, "no module of type LSTM. There are: "),
    (nn.Linear(1, 1), "the Linear given as selector is not part of the model; was the model copied"),
    (lambda path, module: False, "is true for none of the model's 15 modules"),
    (["head", "nope"], "no module matches the path 'nope'"),
    ([], "the selector is empty"),
]


@pytest.mark.parametrize(("selector", "message"), MISSES)
def test_no_match_is_an_error_with_the_nearest(model: nn.Module, selector: Any, message: str) -> None:
    with pytest.raises(NoMatch, match=message):
        mt.select(model, selector)


def test_a_model_without_children_says_so() -> None:
    with pytest.raises(NoMatch, match="The model has no submodules; its own path is ''"):
        mt.select(nn.ReLU(), "layer1")


@pytest.mark.parametrize("selector", [3, int, None, b"head"])
def test_a_selector_of_an_unknown_kind(model: nn.Module, selector: Any) -> None:
    with pytest.raises(BadSelector, match="cannot select modules by .* expected a path"):
        mt.select(model, selector)


def test_only_models_can_be_selected_from() -> None:
    with pytest.raises(NotAModule, match="got list"):
        mt.select([nn.ReLU()], "0")  # type: ignore[arg-type]
