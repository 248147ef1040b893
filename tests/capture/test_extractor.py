"""`mt.extractor`: what `mt.extract` does, again and again."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.capture.feature_extractor import FeatureExtractor
from microtome.errors import BadQuery, NoMatch, Unsupported

OPTIONS: list[dict[str, Any]] = [
    {},
    {"stop": False},
    {"inputs": True},
    {"clone": True},
    {"clone": False},
    {"detach": False},
    {"transform": lambda output: output * 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[*map(str, OPTIONS[:-1]), "transform"])
@pytest.mark.parametrize("at", ["blocks.1", "blocks.*", "", "blocks.0/add", ["patch_embed", "head"]], ids=str)
def test_every_call_gives_what_extract_gives(at: Any, options: dict[str, Any]) -> None:
    model = zoo.build("tiny-vit")[0]
    extractor = mt.extractor(model, at, **options)
    for x in torch.randn(3, 2, 3, 32, 32):
        ours, expected = extractor(x), mt.extract(model, x, at, **options)
        assert ours.addresses == expected.addresses
        assert (ours.stopped, len(ours._output)) == (expected.stopped, len(expected._output))
        for address in expected.addresses:
            assert torch.equal(ours[address], expected[address]), address
            if "inputs" in options and "/" not in address:
                assert torch.equal(ours.inputs(address).args[0], expected.inputs(address).args[0])


def test_gradients_are_those_of_each_call() -> None:
    model, x = zoo.build("tiny-vit")
    extractor = mt.extractor(model, "blocks.1", grad=True)
    for scale in (1.0, 2.0, 3.0):
        feats = extractor(x)
        (scale * feats.output.sum()).backward()
        assert torch.allclose(feats.grad("blocks.1"), scale * gradient_by_hook(model, x), atol=1e-5)


def gradient_by_hook(model: nn.Module, x: Any) -> Tensor:
    """The gradient of the sum of the outputs with respect to the output of the block, by a hook of torch."""
    kept: list[Tensor] = []
    handle = model.get_submodule("blocks.1").register_forward_hook(lambda _, __, output: kept.append(output))
    loss = model(x).sum()
    handle.remove()
    return torch.autograd.grad(loss, kept[0])[0]


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(2, 2), 1
        self.options: dict[str, Any] = {"times": [1]}

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times * self.options["times"][0]):
            x = self.layer(x)
        return x


def double_attribute(model: Loops) -> None:
    model.times = 2


def double_item(model: Loops) -> None:
    model.options["times"][0] = 2


def add_hook(model: Loops) -> None:
    model.register_forward_hook(lambda module, _, output: module.layer(output))


def wrap_layer(model: Loops) -> None:
    model.layer = nn.Sequential(model.layer, nn.ReLU())  # type: ignore[assignment]


def set_class(model: Loops) -> None:
    class Twice(Loops):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    model.__class__ = Twice


@pytest.mark.parametrize("change", [double_attribute, double_item, add_hook, wrap_layer, set_class])
def test_a_changed_model_is_analyzed_again(change: Callable[[Loops], None]) -> None:
    model = Loops()
    extractor = mt.extractor(model, "layer")
    assert [extractor("1x2").addresses for _ in range(3)] == [("layer",)] * 3
    change(model)
    expected = mt.extract(model, "1x2", "layer")
    for _ in range(2):
        feats = extractor("1x2")
        assert feats.addresses == expected.addresses
        assert torch.equal(feats["layer"], expected["layer"])


def test_weights_may_change_between_calls() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    extractor = mt.extractor(nn.Sequential(layer, nn.ReLU()), "0")
    for _ in range(3):
        with torch.no_grad():
            layer.weight.add_(1)
        assert torch.equal(extractor(x)["0"], layer(x))


def test_a_later_call_runs_no_module_after_the_last_selected_one() -> None:
    ran: list[str] = []

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            ran.append(self.name)
            return x + 1

    model = nn.Sequential(*(Named(str(at)) for at in range(4)))
    extractor = mt.extractor(model, ["2", "0"])
    extractor("2x2")
    extractor("2x2")
    ran.clear()
    assert extractor("2x2").stopped
    assert ran == ["0", "1", "2"]


def test_a_later_call_with_another_shape_stops_where_that_shape_needs_it() -> None:
    class PerRow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(x.shape[0]):
                x = self.layer(x)
            return x

    extractor = mt.extractor(PerRow(), "layer")
    for rows in (1, 3, 1, 3, 1):
        assert len(extractor(torch.ones(rows, 2)).calls("layer")) == rows


def test_features_keep_their_values_in_later_runs() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
    extractor = mt.extractor(model, "0")
    runs = [(extractor(x)["0"], model[0](x)) for x in torch.randn(4, 1, 2)]
    assert all(torch.equal(ours, expected) for ours, expected in runs)


def test_what_the_model_or_the_user_has_too_is_copied_in_each_call() -> None:
    class Buffered(nn.Module):
        cache: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.cache += 1
            return self.cache

    extractor = mt.extractor(nn.Sequential(Buffered()), "0")
    kept = [extractor(torch.ones(3))["0"] for _ in range(4)]
    assert [tensor[0].item() for tensor in kept] == [1, 2, 3, 4]
    x = torch.ones(3)
    same = mt.extractor(nn.Sequential(nn.Identity()), "0")
    kept = [same(x)["0"] for _ in range(3)]
    x.zero_()
    assert all(torch.equal(tensor, torch.ones(3)) for tensor in kept)


def test_an_output_that_is_mutated_as_the_run_stops_is_refused() -> None:
    class Clears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            try:
                output: Tensor = self.inner(y)
                return output
            finally:
                y.zero_()

    model = nn.Sequential(Clears())
    extractor, copier = mt.extractor(model, "0.inner"), mt.extractor(model, "0.inner", clone=True)
    x = torch.ones(1, 2)
    assert extractor(x)["0.inner"].any()
    with pytest.raises(
        Unsupported, match=r"the output of '0\.inner' was mutated while the run was being stopped there"
    ):
        extractor(x)
    assert copier(x)["0.inner"].any()
    assert copier(x)["0.inner"].any()


def test_inference_mode_and_grad_mode_may_alternate() -> None:
    model, x = zoo.build("tiny-vit")
    extractor = mt.extractor(model, "blocks.1")
    expected = mt.extract(model, x, "blocks.1")["blocks.1"]
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad) * 3:
        with mode():
            assert torch.equal(extractor(x)["blocks.1"], expected)


def test_a_module_that_a_later_input_does_not_reach_is_an_error() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(x)
            return self.b(y) if x.sum() > 0 else y

    extractor = mt.extractor(Branches(), "b")
    extractor(torch.ones(1, 2))
    extractor(torch.ones(1, 2))
    with pytest.raises(NoMatch, match="'b' never ran: this input did not lead to it, or its .forward"):
        extractor(-torch.ones(1, 2))


def test_an_error_of_the_model_names_the_call_and_later_calls_work() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise ValueError("three rows")
            return x

    model = nn.Sequential(nn.Sequential(Fails()), nn.Linear(2, 2), nn.ReLU())
    extractor = mt.extractor(model, "1", stop=False)
    extractor(torch.ones(1, 2))
    with pytest.raises(ValueError, match="three rows") as caught:
        extractor(torch.ones(3, 2))
    assert any("in the call '0.0' (Fails)" in note for note in caught.value.__notes__)
    assert extractor(torch.ones(1, 2))["1"].shape == (1, 2)


def test_an_extractor_inside_the_call_of_itself_works() -> None:
    class Nested(nn.Module):
        extractor: FeatureExtractor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            if self.extractor is not None and x.shape[0] > 1:
                return torch.cat([self.extractor(row[None])["inner"] for row in x])
            y: Tensor = self.inner(x)
            return y

    model = Nested()
    model.extractor = mt.extractor(model, "inner", stop=False)
    outer, x = mt.extractor(model, "", stop=False), torch.randn(3, 2)
    for _ in range(3):
        assert torch.allclose(outer(x)[""], model.inner(x))


def test_threads_may_share_an_extractor() -> None:
    model, x = zoo.build("tiny-vit")
    extractor = mt.extractor(model, "blocks.1")
    expected = mt.extract(model, x, "blocks.1")["blocks.1"]
    same: list[bool] = []

    def work() -> None:
        same.extend(torch.equal(extractor(x)["blocks.1"], expected) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 40


def test_neither_the_features_nor_the_inputs_of_a_call_live_on() -> None:
    model = zoo.build("tiny-vit")[0]
    extractor = mt.extractor(model, "blocks.1")
    for _ in range(3):
        x = torch.randn(2, 3, 32, 32)
        feats = extractor(x)
    tensors = [weakref.ref(feats["blocks.1"]), weakref.ref(x)]
    del feats, x
    gc.collect()
    assert [tensor() for tensor in tensors] == [None, None]


def test_options_are_checked_when_it_is_created() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(NoMatch, match="no module matches the path 'nowhere'"):
        mt.extractor(model, "nowhere")
    with pytest.raises(BadQuery, match="expected inputs=True or False"):
        mt.extractor(model, "0", inputs=torch.ones(1, 2))
    assert repr(mt.extractor(model, "0")) == "<FeatureExtractor of Sequential at '0'>"
