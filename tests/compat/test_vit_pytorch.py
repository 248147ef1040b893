"""The drop-ins for vit-pytorch: its results to the last bit where it works, and results where it has none."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from microtome import zoo
from microtome.capture.attention.probe import AttentionProbe
from microtome.compat.vit_pytorch import Extractor, Recorder
from microtome.engine import tensors_in
from microtome.errors import BadQuery, BadSelector, NoMatch, NotAModule, SessionError

zoo.import_torchvision()  # vit-pytorch imports it
pytest.importorskip("vit_pytorch")

SIZES = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
    "dim": 12,
    "depth": 2,
    "heads": 3,
    "mlp_dim": 16,
    "dim_head": 4,
}


def theirs(kind: str) -> Any:
    return getattr(import_module(f"vit_pytorch.{kind.lower()}"), kind)


def of_vit_pytorch(file: str, kind: str, **options: Any) -> nn.Module:
    arguments = {name: value for name, value in {**SIZES, **options}.items() if value is not None}
    torch.manual_seed(0)
    vit: nn.Module = getattr(import_module(f"vit_pytorch.{file}"), kind)(**arguments)
    return vit.eval()


def plain_vit(**options: Any) -> nn.Module:
    return of_vit_pytorch("vit", "ViT", **options)


def image() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def same(one: Any, other: Any) -> bool:
    """Whether two structures of one kind hold the same bits."""
    first, second = (tree_flatten(value) for value in (one, other))
    pairs = list(zip(first[0], second[0], strict=True))
    return first[1] == second[1] and all(a.equal(b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=0, atol=2e-6)


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


# -- where vit-pytorch works -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_input", [False, True])
@pytest.mark.parametrize("name", ["transformer", "to_patch_embedding", "mlp_head", "to_latent"])
def test_the_extractor_gives_what_vit_pytorchs_does(name: str, save_input: bool) -> None:
    vit = plain_vit()
    options: dict[str, Any] = {"layer_name": name, "layer_save_input": save_input}
    expected = theirs("Extractor")(vit, **options)
    prediction, latents = expected(image())
    expected.eject()
    ours = Extractor(vit, **options)(image())
    assert same(ours, (prediction, latents))
    assert type(ours[1]) is type(latents)


def test_the_extractor_takes_a_module_as_vit_pytorchs_does() -> None:
    vit = plain_vit()
    layer = vit.get_submodule("transformer.layers.0.1")
    expected = theirs("Extractor")(vit, layer=layer)
    found = expected(image())
    expected.eject()
    assert same(Extractor(vit, layer=layer)(image()), found)


@pytest.mark.parametrize("path", ["transformer.layers.0.1", "transformer", "mlp_head"])
def test_the_extractor_takes_a_path_as_layer_or_as_layer_name(path: str) -> None:
    vit = plain_vit()
    expected = Extractor(vit, layer=vit.get_submodule(path))(image())
    assert same(Extractor(vit, layer=path)(image()), expected)
    assert same(Extractor(vit, layer_name=path)(image()), expected)


@pytest.mark.parametrize("name", ["layer", "layer_name"])
@pytest.mark.parametrize("value", [3, nn.Linear, [nn.Linear(1, 1)], lambda path, module: True, b"transformer", False])
def test_a_layer_that_is_neither_a_module_nor_a_path_raises(name: str, value: Any) -> None:
    vit = plain_vit()
    with pytest.raises(BadSelector, match="expected a module of the model or its path as layer, got "):
        Extractor(vit, **{name: value})
    extractor = Extractor(vit)
    setattr(extractor, name, value)
    with pytest.raises(BadSelector, match="expected a module of the model or its path as layer, got "):
        extractor(image())


@pytest.mark.parametrize("at_call", [False, True])
def test_latents_alone_are_those_of_vit_pytorch(at_call: bool) -> None:
    vit = plain_vit()
    made: dict[str, Any] = {} if at_call else {"return_embeddings_only": True}
    called: dict[str, Any] = {"return_embeddings_only": True} if at_call else {}
    expected = theirs("Extractor")(vit, **made)
    found = expected(image(), **called)
    expected.eject()
    assert same(Extractor(vit, **made)(image(), **called), found)


@pytest.mark.parametrize("kind", ["vit", "t2t"])
def test_the_recorder_gives_what_vit_pytorchs_does(kind: str) -> None:
    t2t = {"patch_size": None, "t2t_layers": ((7, 4), (3, 2))}
    vit = plain_vit() if kind == "vit" else of_vit_pytorch("t2t", "T2TViT", **t2t)
    expected = theirs("Recorder")(vit)
    found = expected(image())
    expected.eject()
    ours = Recorder(vit)(image())
    assert same(ours, found)
    assert ours[1].shape == (2, 2, 3, 17, 17)


def test_attention_in_training_is_that_before_dropout() -> None:
    vit = plain_vit(dropout=0.5).train()
    expected = theirs("Recorder")(vit)
    torch.manual_seed(3)
    found = expected(image())
    expected.eject()
    torch.manual_seed(3)
    prediction, attentions = Recorder(vit)(image())
    assert same((prediction, attentions), found)
    assert near(attentions.sum(-1), torch.ones(2, 2, 3, 17))
    assert not attentions.requires_grad
    prediction.sum().backward()


@pytest.mark.parametrize("kind", [Extractor, Recorder])
def test_names_of_the_wrapper_are_those_of_vit_pytorchs(kind: type[nn.Module]) -> None:
    vit = plain_vit()
    ours, expected = kind(vit), theirs(kind.__name__)(vit)
    assert list(ours.state_dict()) == list(expected.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in expected.named_parameters()]
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in expected.named_modules()]


# -- where its Recorder has nothing ------------------------------------------------------------------------------------


class Softmaxes(TorchFunctionMode):
    """Attention weights seen without microtome: what softmaxes give, and those of fused attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in (F.softmax, torch.softmax, Tensor.softmax) and output.dim() > 2:  # less is a pool or a class
            self.weights.append(output.detach().clone())
        elif func is F.scaled_dot_product_attention:
            q, k = (tensor.detach().double() for tensor in args[:2])
            scores = q @ k.transpose(-2, -1) * (kwargs.get("scale") or 1 / math.sqrt(q.shape[-1]))
            self.weights.append(scores.softmax(-1).float())
        return output


def watched(run: Callable[[], Any]) -> list[Tensor]:
    with Softmaxes() as watch:
        run()
    return watch.weights


class Made(NamedTuple):
    file: str
    kind: str
    options: dict[str, Any]
    stacked: tuple[int, ...] | None


MODELS = [
    Made("simple_vit", "SimpleViT", {}, (2, 2, 3, 16, 16)),
    Made("deepvit", "DeepViT", {}, (2, 2, 3, 17, 17)),
    Made("cait", "CaiT", {"cls_depth": 1}, None),
    Made("pit", "PiT", {"depth": (1, 1)}, None),
    Made("parallel_vit", "ViT", {}, (2, 4, 3, 17, 17)),
    Made("vit_for_small_dataset", "ViT", {}, (2, 2, 3, 17, 17)),
    Made("simple_flash_attn_vit", "SimpleViT", {}, (2, 2, 3, 16, 16)),
    Made("simple_vit_with_register_tokens", "SimpleViT", {}, (2, 2, 3, 20, 20)),
    Made("simple_vit_with_qk_norm", "SimpleViT", {}, (2, 2, 3, 16, 16)),
    Made("simple_vit_with_value_residual", "SimpleViT", {}, (2, 2, 3, 16, 16)),
    Made("learnable_memory_vit", "ViT", {}, (2, 2, 3, 17, 17)),
    Made("jumbo_vit", "JumboViT", {}, (2, 2, 3, 22, 22)),
    Made("normalized_vit", "nViT", {}, (2, 2, 3, 16, 16)),
    Made("xcit", "XCiT", {"cls_depth": 1}, None),
    Made(
        "nest",
        "NesT",
        {"patch_size": 4, "num_hierarchies": 2, "block_repeats": (1, 1), "depth": None, "mlp_dim": None},
        None,
    ),
    Made(
        "cct",
        "CCT",
        {name: None for name in SIZES if name != "num_classes"}
        | {"img_size": 32, "embedding_dim": 12, "num_layers": 2, "num_heads": 3, "mlp_ratio": 2.0},
        (2, 2, 3, 64, 64),
    ),
]


old_names = pytest.mark.filterwarnings("ignore:.*sdp_kernel:FutureWarning")  # of torch, in simple_flash_attn_vit


@old_names
@pytest.mark.parametrize("made", MODELS, ids=lambda made: made.file)
def test_attention_of_any_model_of_vit_pytorch(made: Made) -> None:
    vit = of_vit_pytorch(made.file, made.kind, **made.options)
    expected = watched(lambda: vit(image()))
    prediction, attentions = Recorder(vit)(image())
    assert prediction.equal(vit(image()))
    assert (tuple(attentions.shape) if isinstance(attentions, Tensor) else None) == made.stacked
    layers = list(attentions.unbind(1)) if isinstance(attentions, Tensor) else attentions
    assert len(layers) == len(expected)
    assert all(near(*pair) for pair in zip(layers, expected, strict=True))


@old_names
@pytest.mark.parametrize("made", MODELS, ids=lambda made: made.file)
def test_any_layer_of_any_model_of_vit_pytorch(made: Made) -> None:
    vit = of_vit_pytorch(made.file, made.kind, **made.options)
    seen: dict[str, Any] = {}
    handles = [
        module.register_forward_hook(lambda _, __, output, path=path: seen.update({path: output}))
        for path, module in vit.named_modules()
    ]
    expected = vit(image())
    for handle in handles:
        handle.remove()
    for path in list(seen)[:: max(1, len(seen) // 6)]:
        assert same(Extractor(vit, layer_name=path)(image()), (expected, seen[path])), path


def test_layers_that_run_several_times_are_recorded_each_time() -> None:
    loop = {"pre_loop_depth": 1, "num_looped_blocks": 1, "post_loop_depth": 1, "loop_depth": 3, "depth": None}
    vit = of_vit_pytorch("looped_vit", "LoopedViT", **loop)
    attentions = Recorder(vit)(image())[1]
    assert attentions.shape == (2, 5, 3, 17, 17)  # one before, three loops, one after


# -- torchvision, timm, transformers -----------------------------------------------------------------------------------


def of_torchvision() -> nn.Module:
    torchvision = zoo.import_torchvision()
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.VisionTransformer(32, 8, 2, 3, 12, 16, num_classes=5)
    nn.init.normal_(model.get_submodule("heads.head").weight)  # type: ignore[arg-type]
    return model.eval()


def of_timm() -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 12, "num_heads": 3, "num_classes": 5}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **sizes)
    return model.eval()


def of_transformers(attn: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16, image_size=32, patch_size=8
    )
    config._attn_implementation = attn
    torch.manual_seed(0)
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model.eval()


def test_torchvisions_vit() -> None:
    vit = of_torchvision()
    expected: list[Tensor] = []

    def look(module: nn.Module, args: Any) -> None:
        expected.append(F.multi_head_attention_forward(*(arg.transpose(0, 1) for arg in args), *weights_of(module))[1])  # type: ignore[arg-type]

    def weights_of(m: Any) -> tuple[Any, ...]:
        own = m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0, m.out_proj.weight, m.out_proj.bias
        return (m.embed_dim, m.num_heads, *own, False, None, True, None, False, None, None, None, None, None, False)

    handles = [m.register_forward_pre_hook(look) for m in vit.modules() if isinstance(m, nn.MultiheadAttention)]
    vit(image())
    for handle in handles:
        handle.remove()
    prediction, attentions = Recorder(vit)(image())
    assert near(prediction, vit(image()))
    assert near(attentions, torch.stack(expected, 1))
    prediction, latents = Extractor(vit, layer_name="encoder.layers.encoder_layer_1")(image())
    assert latents.shape == (2, 17, 12)
    assert near(vit.get_submodule("heads")(vit.get_submodule("encoder.ln")(latents)[:, 0]), prediction)


def test_torchvisions_swin_gives_a_list() -> None:
    torchvision = zoo.import_torchvision()
    torch.manual_seed(0)
    swin = torchvision.models.SwinTransformer([4, 4], 8, [1, 1], [2, 4], [2, 2], num_classes=5).eval()
    expected = watched(lambda: swin(image()))
    _, attentions = Recorder(swin)(image())
    # Windows of 2x2 tokens: 16 of the 8x8 tokens, then 4 of the 4x4, of each of two images.
    assert [tuple(attn.shape) for attn in attentions] == [(32, 2, 4, 4), (8, 4, 4, 4)]
    assert all(near(*pair) for pair in zip(attentions, expected, strict=True))


def test_timms_vit() -> None:
    vit = of_timm()
    expected = watched(lambda: vit(image()))
    prediction, attentions = Recorder(vit)(image())
    assert prediction.equal(vit(image()))
    assert near(attentions, torch.stack(expected, 1))
    assert attentions.shape == (2, 2, 3, 17, 17)
    prediction, latents = Extractor(vit, layer_name="blocks.1")(image())
    assert near(vit.forward_head(vit.norm(latents)), prediction)  # type: ignore[operator]


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_transformers_vit(attn: str) -> None:
    vit = of_transformers(attn)
    expected = of_transformers("eager")(pixel_values=image(), output_attentions=True, output_hidden_states=True)
    prediction, attentions = Recorder(vit)(pixel_values=image())
    assert near(prediction.logits, expected.logits)
    assert near(attentions, torch.stack(expected.attentions, 1))
    path = next(path for path, module in vit.named_modules() if type(module).__name__ == "ViTLayer")
    prediction, latents = Extractor(vit, layer_name=path)(pixel_values=image())
    assert near(next(tensors_in(latents)), expected.hidden_states[1])


def test_a_layer_of_transformers_that_gives_one_of_its_outputs() -> None:
    vit = of_transformers("sdpa")
    prediction, latents = Extractor(vit, layer_name="vit")(pixel_values=image())
    assert type(latents).__name__ == "BaseModelOutputWithPooling"
    assert near(vit.classifier(latents.last_hidden_state[:, 0]), prediction.logits)  # type: ignore[operator]
    assert not latents.last_hidden_state.requires_grad


# -- what flows --------------------------------------------------------------------------------------------------------


class Gives(nn.Module):
    """Returns its input in a structure, and can be called with anything."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.make = make

    def forward(self, x: Tensor, **rest: Any) -> Any:
        return self.make(self.linear(x))


class Holds(nn.Module):
    """A model with a layer called `transformer`."""

    def __init__(self, layer: nn.Module, run: Callable[[nn.Module, Tensor], Any] = lambda layer, x: layer(x)) -> None:
        super().__init__()
        self.transformer = layer
        self.run = run

    def forward(self, x: Tensor, *, times: int = 1) -> Any:
        return [self.run(self.transformer, x * n) for n in range(1, times + 1)]


STRUCTURES: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda t: (t, t + 1),
    "a tuple with None": lambda t: (t, None),
    "list": lambda t: [t, None, [t]],
    "dict": lambda t: {"a": t, "b": (t, None), "c": "text"},
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_latents_have_the_structure_of_what_the_layer_gave(kind: str) -> None:
    model = Holds(Gives(STRUCTURES[kind]))
    (output,), latents = Extractor(model)(torch.ones(1, 2))
    assert same(latents, output)
    assert not any(tensor.requires_grad for tensor in tensors_in(latents))
    assert all(tensor.requires_grad for tensor in tensors_in(output))


def test_a_layer_that_gives_none() -> None:
    model = Holds(Gives(lambda _: None))
    assert Extractor(model)(torch.ones(1, 2)) == ([None], None)


def test_of_a_layer_that_runs_twice_the_last_call_is_kept() -> None:
    model = Holds(Gives(lambda t: t))
    outputs, latents = Extractor(model)(torch.ones(1, 2), times=3)
    assert latents.equal(outputs[-1])
    assert not latents.equal(outputs[0])
    latents = Extractor(model, layer_save_input=True)(torch.ones(1, 2), times=3)[1]
    assert same(latents, (torch.full((1, 2), 3.0),))


def test_arguments_of_the_layer_are_all_kept_in_their_order() -> None:
    model = Holds(Gives(lambda t: t), lambda layer, x: layer(x, mask=None, scale=x + 1))
    latents = Extractor(model, layer_save_input=True)(x=torch.ones(1, 2))[1]
    assert latents[0].equal(torch.ones(1, 2))
    assert latents[1] is None
    assert latents[2].equal(torch.full((1, 2), 2.0))


def test_later_mutations_by_the_model_do_not_change_latents() -> None:
    model = Holds(Gives(lambda t: t), lambda layer, x: layer(x).add_(1))
    with torch.no_grad():
        (output,), latents = Extractor(model)(torch.ones(1, 2))
        assert latents.equal(model.transformer(torch.ones(1, 2)))
        assert output.equal(latents + 1)
        given = Extractor(Holds(nn.ReLU(inplace=True)), layer_save_input=True)(torch.full((1, 2), -1.0))[1]
    assert same(given, (torch.full((1, 2), -1.0),))


def test_without_detach_the_latents_are_in_the_graph() -> None:
    vit = plain_vit().train()
    prediction, latents = Extractor(vit, detach=False)(image())
    (grad,) = torch.autograd.grad(prediction.sum(), latents)
    assert grad.shape == latents.shape
    latents.sum().backward()
    assert vit.get_parameter("pos_embedding").grad is not None
    prediction, latents = Extractor(vit)(image())
    assert prediction.requires_grad
    assert not latents.requires_grad


def test_models_are_called_with_any_arguments() -> None:
    vit = plain_vit()
    assert same(Extractor(vit)(img=image()), Extractor(vit)(image()))
    assert same(Recorder(vit)(img=image()), Recorder(vit)(image()))


def test_a_model_without_tensors_among_its_inputs() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = plain_vit()

        def forward(self) -> Any:
            return self.vit(image())

    model = Own()
    assert same(Recorder(model)(), Recorder(model.vit)(image()))
    assert same(Extractor(model, layer_name="vit.transformer")(), Extractor(model.vit)(image()))


def test_results_are_on_the_requested_device() -> None:
    vit = plain_vit()
    assert Extractor(vit, "meta")(image())[1].is_meta
    assert Recorder(vit, "meta")(image())[1].is_meta
    assert not Recorder(vit, "meta")(image())[0].is_meta


def test_by_default_it_lies_where_the_inputs_do() -> None:
    vit = plain_vit().to("meta")
    assert Extractor(vit)(image().to("meta"))[1].is_meta


# -- what is held ------------------------------------------------------------------------------------------------------


def test_results_are_those_of_the_last_call_until_cleared() -> None:
    vit = plain_vit()
    extractor, recorder = Extractor(vit), Recorder(vit)
    assert extractor.latents is None
    for _ in range(2):
        assert extractor(image())[1] is extractor.latents
        assert recorder(image())[1].equal(torch.stack(recorder.recordings, 1))
    extractor.clear()
    recorder.clear()
    assert extractor.latents is None
    assert recorder.recordings == []


class ByHand(nn.Module):
    """Has attention that nobody sees, and says it."""

    recorder: Any = None

    def forward(self, weights: Tensor) -> Tensor:
        if self.recorder is not None:
            self.recorder[0].record(weights)
            self.recorder[0].record(weights)
            weights.zero_()
        return weights


def test_attention_may_be_recorded_by_hand() -> None:
    model = ByHand()
    recorder = Recorder(model)
    model.recorder = (recorder,)
    weights = torch.full((1, 2, 3, 3), 1 / 3)
    _, attentions = recorder(weights.clone())
    assert attentions.equal(torch.stack([weights, weights], 1))


# -- the model as found ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Extractor, Recorder])
def test_nothing_is_left_on_the_model(kind: Any) -> None:
    vit = plain_vit()
    names, before = list(vit.state_dict()), [vars(module).keys() for module in vit.modules()]
    wrapper = kind(vit)
    wrapper(image())
    assert hooks_of(wrapper) == 0
    assert list(vit.state_dict()) == names
    assert [vars(module).keys() for module in vit.modules()] == before
    assert list(wrapper.state_dict()) == [f"vit.{name}" for name in names]
    assert wrapper.eject() is vit


def test_a_layer_adds_no_names() -> None:
    vit = plain_vit()
    extractor = Extractor(vit, layer=vit.get_submodule("transformer"))
    extractor(image())
    assert list(extractor.state_dict()) == [f"vit.{name}" for name in vit.state_dict()]
    assert extractor.layer is vit.transformer


def test_a_parameter_that_a_layer_gives_adds_no_names() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.table

    model = Holds(Table())
    extractor = Extractor(model, detach=False)
    assert extractor(torch.ones(1))[1] is model.transformer.table
    assert list(extractor.state_dict()) == ["vit.transformer.table"]


def test_a_wrapper_can_be_copied_and_pickled() -> None:
    vit = plain_vit()
    extractor = Extractor(vit, layer=vit.get_submodule("transformer.norm"))
    expected = extractor(image())
    extractor.clear()
    for other in (copy.deepcopy(extractor), pickle.loads(pickle.dumps(extractor))):
        assert other.layer is other.vit.transformer.norm
        assert other.layer is not extractor.layer
        assert same(other(image()), expected)


def test_wrappers_nest() -> None:
    vit = plain_vit()
    prediction, latents = Extractor(vit)(image())
    found = Recorder(Extractor(vit))(image())
    assert same(found, ((prediction, latents), Recorder(vit)(image())[1]))


@pytest.mark.parametrize("kind", [Extractor, Recorder])
def test_results_are_cleared_after_an_exception(kind: Any) -> None:
    vit = plain_vit()
    wrapper = kind(vit)
    expected = wrapper(image())
    head = vit.mlp_head
    vit.mlp_head = nn.Linear(3, 3)  # after all that is looked at
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        wrapper(image())
    assert not (wrapper.latents if kind is Extractor else wrapper.recordings)
    assert hooks_of(vit) == 0
    vit.mlp_head = head
    assert same(wrapper(image()), expected)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Extractor, Recorder])
def test_after_eject_it_cannot_be_used(kind: Any) -> None:
    vit = plain_vit()
    wrapper = kind(vit)
    wrapper(image())
    assert wrapper.eject() is vit
    assert wrapper.eject() is vit
    with pytest.raises(SessionError, match=f"this {kind.__name__} has been ejected and cannot be used anymore"):
        wrapper(image())
    ejected = theirs(kind.__name__)(vit)
    ejected.eject()
    with pytest.raises(AssertionError, match="has been ejected, cannot be used anymore"):
        ejected(image())


def test_a_layer_that_does_not_exist_raises() -> None:
    vit = plain_vit()
    with pytest.raises(NoMatch, match="no module matches the path 'transfomer'. Did you mean 'transformer'"):
        Extractor(vit, layer_name="transfomer")
    with pytest.raises(AssertionError, match="no module matches the path 'transfomer.layers.0'. Did you mean 'trans"):
        Extractor(vit, layer="transfomer.layers.0")
    with pytest.raises(NoMatch, match="the Linear given as selector is not part of the model"):
        Extractor(vit, layer=nn.Linear(1, 1))
    with pytest.raises(BadQuery, match="expected one layer, got 2 at 'transformer.layers.*': use mt.extract"):
        Extractor(vit, layer_name="transformer.layers.*")
    with pytest.raises(NotAModule, match="expected a torch.nn.Module, got"):
        Recorder("vit")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Extractor, Recorder])
@pytest.mark.parametrize("index", [None, 90])
def test_a_device_that_this_machine_does_not_have_raises_when_the_wrapper_is_created(
    kind: Any, index: int | None
) -> None:
    if index is None and torch.cuda.is_available():
        pytest.skip("the machine has CUDA")
    device = "cuda" if index is None else f"cuda:{index + torch.cuda.device_count()}"
    with pytest.raises(BadQuery, match=f"expected a device of this machine, got '{device}': "):
        kind(plain_vit(), device=device)


def test_a_layer_that_never_ran() -> None:
    vit = plain_vit()
    with pytest.raises(NoMatch, match="'transformer.layers' never ran: a ModuleList is not called itself"):
        Extractor(vit, layer_name="transformer.layers")(image())
    vit.spare = nn.Linear(1, 1)
    with pytest.raises(NoMatch, match="'spare' never ran: this input did not lead to it"):
        Extractor(vit, layer_name="spare")(image())


def test_a_model_without_attention() -> None:
    recorder = Recorder(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)))
    with pytest.raises(NoMatch, match="no attention found in the Sequential: neither scaled_dot_product_attention nor"):
        recorder(torch.ones(1, 2))


def test_attention_beside_the_transformer() -> None:
    other = plain_vit()
    model = Holds(nn.Identity(), lambda layer, x: other(layer(x)))
    model.other = other
    with pytest.raises(NoMatch, match=r"the Holds computed no attention; these did: 'other.transformer.layers.0.0'"):
        Recorder(model)(image())


def test_heads_that_lie_in_the_batch_are_heads() -> None:
    from vit_pytorch.rvt import RvT

    model = RvT(image_size=32, patch_size=8, num_classes=5, dim=12, depth=2, heads=3, mlp_dim=16, dim_head=4).eval()
    _, attentions = Recorder(model)(torch.randn(2, 3, 32, 32))
    assert attentions.shape == (2, 2, 3, 17, 17)


# -- the cache of a Recorder -------------------------------------------------------------------------------------------


def test_later_calls_give_what_the_first_does() -> None:
    vit, x, other = plain_vit(), image(), torch.randn(3, 3, 32, 32)
    recorder = Recorder(vit)
    first = recorder(x)
    assert recorder._attention is not None
    assert recorder._attention._cache is not None
    assert same(recorder(x), first)
    assert same(recorder(other), Recorder(vit)(other))
    assert same(recorder(x), first)


def test_a_changed_model_is_observed_again() -> None:
    vit, x = plain_vit(), image()
    recorder = Recorder(vit)
    recorder(x)
    layers = vit.get_submodule("transformer.layers")
    assert isinstance(layers, nn.ModuleList)
    del layers[1]
    assert recorder(x)[1].shape[1] == 1
    assert recorder(x)[1].shape[1] == 1
    layers.append(copy.deepcopy(layers[0]))
    assert same(recorder(x), Recorder(vit)(x))


def test_in_training_mode_a_call_runs_the_model_once_on_the_same_random_numbers() -> None:
    vit, x = plain_vit(dropout=0.5), image()
    recorder = Recorder(vit)
    recorder(x)
    vit.train()
    for seed in range(3):
        torch.manual_seed(seed)
        got = recorder(x)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert same(got, Recorder(vit)(x))
        torch.manual_seed(seed)
        vit(x)
        assert torch.get_rng_state().equal(state)


def test_a_layer_that_is_dropped_at_random_is_dropped_for_the_recorder_too() -> None:
    class DropsLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = plain_vit().get_submodule("transformer")

        def forward(self, x: Tensor) -> Tensor:
            for attention, _ in self.transformer.layers:  # type: ignore[union-attr]
                if torch.rand(()) < 0.5 or random.random() < 0.2:
                    x = attention(x)
            return x + torch.rand(1)

    model, x = DropsLayers().train(), torch.randn(1, 4, 12)
    recorder = Recorder(model)
    for seed in range(12):
        random.seed(seed)
        torch.manual_seed(seed)
        expected, state = model(x), torch.get_rng_state()
        random.seed(seed)
        torch.manual_seed(seed)
        try:
            output, _ = recorder(x)
        except NoMatch:  # all layers were dropped
            continue
        assert torch.equal(output, expected)
        assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.Identity])
def test_buffers_change_once_in_each_call(kind: type[nn.Module]) -> None:
    vit, x = plain_vit(), image()
    vit.extra = kind(5)
    head = vit.get_submodule("mlp_head")
    vit.mlp_head = nn.Sequential(head, vit.extra)
    vit.train()
    recorder = Recorder(vit)
    for _ in range(3):
        recorder(x)
    if isinstance(vit.extra, nn.BatchNorm1d):
        assert vit.extra.num_batches_tracked == 3


def test_a_recorder_with_a_cache_can_be_copied() -> None:
    recorder = Recorder(plain_vit())
    recorder(image())
    assert same(copy.deepcopy(recorder)(image()), recorder(image()))


def test_a_recorder_drops_its_probe_after_each_run() -> None:
    recorder = Recorder(plain_vit())
    recorder(image())
    gc.collect()
    assert not [probe for probe in gc.get_objects() if isinstance(probe, AttentionProbe)]


class AttentionElsewhere(nn.Module):
    """Computes attention outside its transformer, where a recorder does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.attend = nn.Identity(), nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.transformer(self.attend(x @ x.mT) @ x)


def test_every_run_without_attention_in_the_transformer_raises() -> None:
    recorder = Recorder(AttentionElsewhere().eval())
    for _ in range(2):
        with pytest.raises(NoMatch, match="the selected layers of the AttentionElsewhere computed no attention"):
            recorder(torch.randn(1, 2, 3, 4))
