"""Models by name: what each form builds, the inputs guessed for it, and what is said when it cannot be."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadInputs, BadWeights, BuildFailed, NoMatch, NotAModule, NotInstalled, Unsupported

BERT = {
    "model_type": "bert",
    "vocab_size": 50,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 20,
}

NET = """
from torch import nn
import neighbour

class Net(nn.Linear):
    example_inputs = "4x3"
    def __init__(self, width=2):
        super().__init__(3, width)

class Mute(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

def needs(width, depth=2):
    return nn.Linear(width, depth)

def breaks():
    number = 1
    return number / 0

def quits():
    raise SystemExit("bye")

def reads():
    import torch
    return nn.Linear(3, int(torch.ones(1).item()))

def gives_a_list():
    return [nn.Linear(3, 2)]

built = Net().train()
number = 7
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "net.py").write_text(NET)
    return str(tmp_path / "net.py")


def shapes(inputs: mt.Inputs) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in (*inputs.args, *inputs.kwargs.values())]


def folder(tmp_path: Path, **config: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


# What each form builds


@pytest.mark.parametrize("name", zoo.names())
def test_a_built_in_model_is_the_one_that_build_makes(name: str) -> None:
    model, inputs = zoo.build(name)
    found = zoo.resolve(f"zoo:{name}")
    torch.testing.assert_close(dict(found.model.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    expected = mt.Inputs.of(inputs)
    torch.testing.assert_close((found.inputs.args, found.inputs.kwargs), (expected.args, expected.kwargs))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchvision:squeezenet1_1", [(1, 3, 224, 224)]),
        ("torchvision:inception_v3", [(1, 3, 299, 299)]),
        ("torchvision:quantized_mobilenet_v2", [(1, 3, 224, 224)]),
        ("torchvision:lraspp_mobilenet_v3_large", [(1, 3, 520, 520)]),
        ("torchvision:r3d_18", [(1, 3, 16, 112, 112)]),
        ("torchvision:raft_small", [(1, 3, 368, 496), (1, 3, 368, 496)]),
        ("timm:test_vit", [(1, 3, 160, 160)]),
        ("timm:resnet18.a1_in1k", [(1, 3, 224, 224)]),
        ("hf:bert", [(1, 128)]),
        ("hf:t5", [(1, 128), (1, 128)]),
        ("hf:clip", [(1, 77), (1, 3, 224, 224)]),
        ("hf:vit", [(1, 3, 224, 224)]),
        ("hf:videomae", [(1, 16, 3, 224, 224)]),
        ("hf:whisper", [(1, 80, 3000), (1, 128)]),
    ],
)
def test_guessed_inputs_fit_the_model(name: str, expected: list[tuple[int, ...]]) -> None:
    found = zoo.resolve(name, meta=True)
    assert shapes(found.inputs) == expected
    assert not found.model.training
    with torch.no_grad():
        assert mt.trace(found.model, found.inputs).ops


def test_a_detection_model_takes_a_list_of_images_of_its_own_size() -> None:
    (images,) = zoo.resolve("torchvision:ssd300_vgg16", meta=True).inputs.args
    assert [tuple(image.shape) for image in images] == [(3, 300, 300)]


def test_arguments_go_to_what_builds_the_model_and_change_the_guess() -> None:
    vit = zoo.resolve("torchvision:vit_b_32", args={"image_size": 64, "num_classes": 5}, meta=True)
    assert shapes(vit.inputs) == [(1, 3, 64, 64)]
    assert vit.model.heads[-1].out_features == 5  # type: ignore[index, union-attr]
    assert shapes(zoo.resolve("timm:test_vit", args={"img_size": 64, "in_chans": 1}).inputs) == [(1, 1, 64, 64)]


def test_a_folder_gives_the_model_of_its_configuration(tmp_path: Path) -> None:
    found = zoo.resolve(f"hf:{folder(tmp_path, **BERT)}")
    assert type(found.model).__name__ == "BertModel"
    # No more tokens than the model has positions.
    assert shapes(found.inputs) == [(1, 20)]
    assert found.inputs.run(found.model).last_hidden_state.shape == (1, 20, 8)


def test_a_configuration_may_name_the_class(tmp_path: Path) -> None:
    place = folder(tmp_path, **BERT, architectures=["BertForMaskedLM"])
    assert type(zoo.resolve(f"hf:{place}").model).__name__ == "BertForMaskedLM"
    other = zoo.resolve(f"hf:{place}", args={"architectures": None, "hidden_size": 4})
    assert type(other.model).__name__ == "BertModel"
    assert other.inputs.run(other.model).last_hidden_state.shape == (1, 20, 4)


def test_a_name_in_a_package() -> None:
    found = zoo.resolve("torch.nn:Linear", args={"in_features": 3, "out_features": 2}, inputs="4x3")
    assert found.inputs.run(found.model).shape == (4, 2)


def test_a_name_in_a_module_of_the_folder_one_is_in(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(net).parent)
    Path("only_here.py").write_text("from torch import nn\n\ndef make():\n    return nn.ReLU()\n")
    assert isinstance(zoo.resolve("only_here:make", inputs="1").model, nn.ReLU)


def test_a_file_is_imported_beside_its_neighbours_and_the_path_is_left_as_found(net: str) -> None:
    path = sys.path.copy()
    found = zoo.resolve(f"{net}:Net", args={"width": 5})
    assert found.inputs.run(found.model).shape == (4, 5)
    assert sys.path == path
    assert "net" not in sys.modules


def test_a_built_model_is_copied(net: str) -> None:
    found = zoo.resolve(f"{net}:built")
    assert not found.model.training
    assert sys.modules[type(found.model).__module__].built.training


def test_weights_are_the_same_each_time_and_the_random_state_is_left_as_it_was(net: str) -> None:
    before = torch.get_rng_state()
    for name in (f"{net}:Net", f"{net}:built", "timm:test_vit"):
        first, again = zoo.resolve(name).model.state_dict(), zoo.resolve(name).model.state_dict()
        torch.testing.assert_close(dict(first), dict(again), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_on_meta_nothing_is_allocated() -> None:
    found = zoo.resolve("hf:llama", meta=True)  # 26 GB, had it weights
    assert {tensor.device.type for tensor in (*found.model.parameters(), *found.inputs.kwargs.values())} == {"meta"}


def test_nothing_reaches_for_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(host: str, *rest: object, **more: object) -> None:
        asked.append(host)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    zoo.resolve(f"hf:{folder(tmp_path, **BERT)}")
    for name in ("hf:detr", "torchvision:ssdlite320_mobilenet_v3_large", "timm:test_vit"):
        zoo.resolve(name, meta=True)
    assert asked == []
    with pytest.raises(BuildFailed, match="cannot be built: URLError"):
        zoo.resolve("torchvision:squeezenet1_1", args={"weights": "DEFAULT"})
    assert len(asked) == 1  # what asks for a download would have been seen


def test_importing_the_zoo_imports_no_source() -> None:
    script = "import sys, microtome.zoo; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torchvision", "timm", "transformers"} & set(done.stdout.split())


# Weights


def test_weights_are_loaded_from_a_file(net: str, tmp_path: Path) -> None:
    state = {"weight": torch.full((2, 3), 2.0), "bias": torch.ones(2)}
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    torch.save(state, tmp_path / "w.pth")
    for name in ("w.safetensors", "w.pt", "w.pth"):
        for meta in (False, True):
            found = zoo.resolve(f"{net}:Net", weights=tmp_path / name, meta=meta)
            # Each output is 3 times 2 plus 1.
            assert found.model(torch.ones(1, 3)).tolist() == [[7.0, 7.0]]


@pytest.mark.parametrize("meta", [False, True])
def test_a_tied_weight_may_be_in_the_file_once_and_stays_tied(tmp_path: Path, meta: bool) -> None:
    model, _ = zoo.build("tiny-decoder", seed=1)
    kept: dict[str, torch.Tensor] = dict(model.named_parameters())  # each parameter once
    kept |= {name: value for name, value in model.named_buffers() if name in model.state_dict()}
    assert kept.keys() < model.state_dict().keys()
    save_file({name: value.detach() for name, value in kept.items()}, tmp_path / "w.safetensors")
    loaded = zoo.resolve("zoo:tiny-decoder", weights=tmp_path / "w.safetensors", meta=meta).model
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert dict(loaded.named_parameters()).keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weight": (2, 3)}, "does not fit .*:Net: 1 not in the file: bias$"),
        ({"weight": (2, 3), "bias": (2,), "scale": (2,)}, "1 not in the model: scale$"),
        ({"weight": (5, 3), "bias": (2,)}, r"1 of another shape: weight \(5x3 in the file, 2x3 in the model\)$"),
        (dict.fromkeys("abcd", (1,)), "2 not in the file: weight, bias; 4 not in the model: a, b, c, …$"),
    ],
)
def test_weights_that_do_not_fit(net: str, tmp_path: Path, state: dict[str, tuple[int, ...]], message: str) -> None:
    save_file({name: torch.zeros(shape) for name, shape in state.items()}, tmp_path / "w.safetensors")
    with pytest.raises(BadWeights, match=message):
        zoo.resolve(f"{net}:Net", weights=tmp_path / "w.safetensors")


def test_a_file_that_is_no_weights(net: str, tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match=r"expected a .safetensors, .pt or .pth file of weights, got w.onnx"):
        zoo.resolve(f"{net}:Net", weights="w.onnx")
    with pytest.raises(BadWeights, match="there is no file nowhere.safetensors"):
        zoo.resolve(f"{net}:Net", weights="nowhere.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"not at all")
    with pytest.raises(BadWeights, match="w.safetensors' is corrupt: ValueError: its header would be"):
        zoo.resolve(f"{net}:Net", weights=tmp_path / "w.safetensors")


class Ran(Exception):
    """Raised by code in a file of weights."""


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import tests.zoo.test_resolve as t; raise t.Ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (nn.Linear(3, 2), r"w.pt cannot be read with weights_only=True \(.*write torch.save\(model.state_dict\(\), "),
        (RunsCode(), r"w.pt cannot be read with weights_only=True \("),
        (
            {"epoch": 3, "state_dict": {}},
            "expected a dict of tensors in .*, got a dict of 'epoch', 'state_dict'",
        ),
        ([torch.ones(1)], "expected a dict of tensors in .*w.pt, .* got a list"),
    ],
)
def test_a_pt_file_that_is_no_state_dict(net: str, tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(BadWeights, match=message):
        zoo.resolve(f"{net}:Net", weights=tmp_path / "w.pt")
    (tmp_path / "w.pt").write_bytes((tmp_path / "w.pt").read_bytes()[:40])
    with pytest.raises(BadWeights, match="w.pt cannot be read with weights_only=True"):
        zoo.resolve(f"{net}:Net", weights=tmp_path / "w.pt")


def test_the_error_for_a_saved_model_has_no_colour_codes_and_keeps_the_file(net: str, tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 2), tmp_path / "w.pt")
    with pytest.raises(BadWeights, match=r"w-weights\.pt'\)$") as caught:
        zoo.resolve(f"{net}:Net", weights=tmp_path / "w.pt")
    assert "[1m" not in str(caught.value)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_the_weights_of_a_training_checkpoint_are_read(net: str, tmp_path: Path, key: str) -> None:
    state = {name: torch.full_like(value, 3) for name, value in zoo.resolve(f"{net}:Net").model.state_dict().items()}
    torch.save({"epoch": 3, key: state}, tmp_path / "w.pt")
    found = zoo.resolve(f"{net}:Net", weights=tmp_path / "w.pt").model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_a_buffer_that_no_file_holds_would_have_no_values_on_meta(tmp_path: Path) -> None:
    place = folder(tmp_path, **BERT)
    save_file(dict(zoo.resolve(f"hf:{place}").model.state_dict()), tmp_path / "w.safetensors")
    with pytest.raises(Unsupported, match="embeddings.position_ids.* would have no values.* Leave out meta"):
        zoo.resolve(f"hf:{place}", weights=tmp_path / "w.safetensors", meta=True)


# What is said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torchvision:resnet51", "torchvision has no model 'resnet51'. Did you mean torchvision:resnet"),
        ("torchvision:resnet51", r"microtome models 'torchvision:\*' lists them"),
        ("timm:hf-hub:timm/resnet18", "timm has no model 'hf-hub:timm/resnet18'"),
        ("hf:bertt", "a model type or a folder with a config.json, and downloads nothing. Did you mean hf:bert"),
        (
            "hf:bart-large",
            "looks like the name of a repository on the Hugging Face Hub, .*: pass hf:bart for",
        ),
        (
            "hf:meta-llama/Llama-3.1-8B",
            r"pass hf:llama for .*\(hf download meta-llama/Llama-3.1-8B --local-dir F",
        ),
        ("hf:someone/something", "pass its model type, such as hf:bert .* or download .* and pass hf:FOLDER"),
        ("hf:", r"'hf:' lacks the name of a model: microtome models 'hf:\*' lists them"),
        ("resnet50", "such as 'torchvision:resnet50' or 'timm:resnet50'"),
        ("nowhere.at.all:Net", "'nowhere.at.all' is neither a source nor a module that can be imported"),
        ("torch.nowhere:Net", "cannot import torch.nowhere: there is no module 'torch.nowhere'"),
        ("torch.nn:Linaer", "torch.nn has no 'Linaer'. Did you mean torch.nn:Linear"),
        ("./nowhere.py:Net", "there is no file nowhere.py"),
    ],
)
def test_a_name_that_is_not_there(text: str, message: str) -> None:
    with pytest.raises(NoMatch, match=message):
        zoo.resolve(text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs", r"missing a required argument: 'width'. Its parameters are \(width, depth=2\): pass them as --arg"),
        ("breaks", r"net.py:breaks cannot be built: ZeroDivisionError: division by zero \(line 19 of net.py\)"),
        ("quits", "cannot be built: SystemExit: bye"),
    ],
)
def test_a_factory_that_fails(net: str, name: str, message: str) -> None:
    with pytest.raises(BuildFailed, match=message):
        zoo.resolve(f"{net}:{name}")


def test_an_attribute_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_net.py").write_text("def __getattr__(name):\n    import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BuildFailed, match=r"lazy_net:Net cannot be imported: ModuleNotFoundError: No module named"):
        zoo.resolve("lazy_net:Net")


@pytest.mark.parametrize("name", ["transformers:LlamaForCausalLM", "transformers.models.bert:BertModel"])
def test_models_of_transformers_are_named_by_their_type(name: str) -> None:
    with pytest.raises(NoMatch, match=rf"'{name}': models of transformers are named hf:TYPE, such as hf:llama"):
        zoo.resolve(name)


def test_what_takes_no_such_argument(net: str) -> None:
    with pytest.raises(BuildFailed, match="got an unexpected keyword argument 'depth'. Its parameters are .width=2.:"):
        zoo.resolve(f"{net}:Net", args={"depth": 1})
    with pytest.raises(BuildFailed, match="built is a Net instance: it takes no arguments"):
        zoo.resolve(f"{net}:built", args={"width": 1})
    with pytest.raises(
        BuildFailed,
        match=r"torchvision:resnet18 cannot be built: TypeError: .*'classes'\. Did you mean 'num_classes'\?",
    ):
        zoo.resolve("torchvision:resnet18", args={"classes": 1})
    with pytest.raises(BuildFailed, match="of hf:bert has no 'hidden_sise'. Did you mean hidden_size"):
        zoo.resolve("hf:bert", args={"hidden_sise": 1})
    small = {"hidden_size": 100, "num_hidden_layers": 1}
    with pytest.raises(BuildFailed, match=r"of hf:llama: .* The hidden size \(100\) is not a multiple of the number"):
        zoo.resolve("hf:llama", args=small)


@pytest.mark.parametrize("names", ["[LlamaForCausalLM]", ["LlamaForCausaLM"], [5]])
def test_a_class_that_transformers_lacks_is_an_error(names: Any) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(BuildFailed, match="hf:llama: transformers has no class .*"):
        zoo.resolve("hf:llama", args={"architectures": names})


def test_one_class_of_transformers_needs_no_list() -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    resolved = zoo.resolve("hf:llama", args={"architectures": "LlamaForCausalLM", "num_hidden_layers": 1, **sizes})
    assert type(resolved.model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("name", "argument", "hint"),
    [
        ("torchvision:resnet18", "num_class", r"Did you mean 'num_classes'\?"),
        ("timm:resnet18", "num_class", r"Did you mean 'num_classes'\?"),
        ("zoo:tiny-resnet", "clases", r"Did you mean 'classes'\?"),
        ("zoo:tiny-resnet", "colour", "It takes width, classes"),
        ("zoo:tiny-writer", "width", "It takes none"),
    ],
)
def test_the_parameter_nearest_to_an_unexpected_argument_is_named(name: str, argument: str, hint: str) -> None:
    with pytest.raises(BuildFailed, match=rf"got an unexpected keyword argument '{argument}'\. {hint}$"):
        zoo.resolve(name, args={argument: 1})


@pytest.mark.parametrize("text", ["torchvision.resnet18", "torchvision/resnet18", "torchvision.models.resnet18"])
def test_a_source_and_a_name_with_another_separator_are_joined_by_a_colon(text: str) -> None:
    with pytest.raises(NoMatch, match=rf"'{text}' is not the name of a model: .* such as 'torchvision:resnet18'$"):
        zoo.resolve(text)
    with pytest.raises(NoMatch, match="such as 'timm:resnet18'$"):
        zoo.resolve("timm.resnet18")


def test_what_is_no_module(net: str) -> None:
    with pytest.raises(
        NotAModule, match="expected .*net.py:gives_a_list to return an nn.Module, got list: define its inputs"
    ):
        zoo.resolve(f"{net}:gives_a_list")
    with pytest.raises(NotAModule, match="net.py:number: expected an nn.Module, a class or a factory of one, got int"):
        zoo.resolve(f"{net}:number")


def test_what_needs_weights_on_meta(net: str) -> None:
    with pytest.raises(Unsupported, match="reads cannot be built on the meta device: RuntimeError.*Try it without"):
        zoo.resolve(f"{net}:reads", meta=True)
    with pytest.raises(Unsupported, match="built is a Net instance with weights: leave out meta"):
        zoo.resolve(f"{net}:built", meta=True)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\nx.y\n", r"AttributeError: 'int' object has no attribute 'y' \(line 2 of bad.py\)"),
        ("\n\ndef (:\n", r"SyntaxError: [^(]* \(line 3 of bad.py\)$"),
        ("import nowhere_at_all\n", r"ModuleNotFoundError: No module named 'nowhere_at_all' \(line 1 of bad.py\)"),
        ("raise SystemExit\n", r"SystemExit \(line 1 of bad.py\)"),
    ],
)
def test_a_file_that_cannot_be_imported(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.py").write_text(code)
    modules = set(sys.modules)
    with pytest.raises(BuildFailed, match=f"bad.py cannot be imported: {message}"):
        zoo.resolve(f"{tmp_path}/bad.py:Net")
    assert not [name for name in set(sys.modules) - modules if "bad" in name]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BuildFailed, match="bad cannot be imported: "):
        zoo.resolve("bad:Net")


def test_inputs_that_nothing_tells(net: str) -> None:
    with pytest.raises(
        BadInputs, match=r":Mute has no example inputs. Pass them: --input 1x3x224x224.*define example_inputs"
    ):
        zoo.resolve(f"{net}:Mute")
    with pytest.raises(BadInputs, match="hf:patchtst has no example inputs"):
        zoo.resolve("hf:patchtst", meta=True)


def test_inputs_that_cannot_be_read_are_refused_before_anything_is_built() -> None:
    with pytest.raises(BadInputs, match="cannot read 'big'"):
        zoo.resolve("torchvision:nowhere", inputs="big")


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"model_type": "nowhere"}, NoMatch, "has the model_type 'nowhere', which transformers .* does not have"),
        ({"hidden_size": 1}, NoMatch, "has the model_type None"),
        ({**BERT, "num_attention_heads": 3}, BuildFailed, "cannot be built: ValueError: .*multiple of the number"),
    ],
)
def test_a_folder_whose_configuration_does_not_do(
    tmp_path: Path, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        zoo.resolve(f"hf:{folder(tmp_path, **config)}")


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(NoMatch, match="has no config.json"):
        zoo.resolve(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BuildFailed, match="config.json' is not JSON"):
        zoo.resolve(f"hf:{tmp_path}")


@pytest.mark.parametrize("name", ["./none", "../none", "/no/such", "none/", "~/none"])
def test_a_folder_that_does_not_exist_is_no_model_type(name: str) -> None:
    message = f"hf:{name}: expected a folder with the config.json of a model at '{name}', there is none"
    with pytest.raises(NoMatch, match=re.escape(message)):
        zoo.resolve(f"hf:{name}")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NoMatch, match="expected a folder with the config.json of a model at .*, got a file"):
        zoo.resolve(f"hf:{tmp_path / 'config.json'}")


def test_a_type_without_a_plain_model() -> None:
    with pytest.raises(NoMatch, match="transformers has no base model for hf:depth_anything: name a class with"):
        zoo.resolve("hf:depth_anything")


@pytest.mark.parametrize("package", ["torchvision", "timm", "transformers"])
def test_a_package_that_is_not_installed(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as Python marks what cannot be imported
    name = {"transformers": "hf"}.get(package, package)
    with pytest.raises(NotInstalled, match=f"{package} is not installed: pip install {package}"):
        zoo.resolve(f"{name}:resnet")


def test_a_package_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "timm.py").write_text("raise OSError('no library')")
    script = "from microtome import zoo; zoo.resolve('timm:resnet18')"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "BuildFailed: timm is installed but cannot be imported: OSError: no library" in done.stderr


# torchvision without its compiled operators

FAKE_TORCHVISION = """
import torch
from . import part
torch.library.register_fake("torchvision::nms")(lambda dets, scores, iou: dets)
"""


def test_operators_that_torchvision_misses_are_declared_once_and_said(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(FAKE_TORCHVISION)
    (tmp_path / "torchvision" / "part.py").write_text("")
    script = (
        "from microtome import zoo\n"
        "from microtome.zoo.packages import explain_missing_operators\n"
        "assert explain_missing_operators() is None\n"
        "first = zoo.import_torchvision()\n"
        "assert zoo.import_torchvision() is first\n"
        "assert first.part\n"
        "print(explain_missing_operators())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    reason = f"the compiled operators of this torchvision do not fit torch {torch.__version__}: install the torchvision"
    assert done.stdout.startswith(reason), done.stderr


def test_a_torchvision_that_fits_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("whole = True")
    script = (
        "import torch\n"
        "from microtome import zoo\n"
        "from microtome.zoo.packages import explain_missing_operators\n"
        "print(zoo.import_torchvision().whole, explain_missing_operators(), hasattr(torch.ops.torchvision, 'nms'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True None False"


def test_a_resolved_model_is_shown_without_its_modules() -> None:
    text = repr(zoo.resolve("zoo:tiny-vit"))
    assert "inputs=Inputs(2x3x32x32:float32)" in text
    assert "TransformerBlock" not in text
