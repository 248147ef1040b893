"""Stages in a folder: each is loaded with its own weights alone, and what does not fit is told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadBoundary, BadFile, BadQuery, BadWeights, Unsupported
from tests.split.test_stages import same


def built_in(name: str) -> Callable[[], nn.Module]:
    return lambda: zoo.build(name)[0]


@pytest.mark.parametrize("name", zoo.names())
@pytest.mark.parametrize("count", [2, 3])
def test_every_stage_is_loaded_alone(name: str, count: int, tmp_path: Path) -> None:
    model, inputs = zoo.build(name)
    given = mt.Inputs.of(inputs)
    cuts = mt.cuts(model, inputs)
    chosen = [cuts[(at + 1) * len(cuts) // count] for at in range(count - 1)]
    stages = mt.split(model, inputs, at=chosen)
    stages.save(tmp_path)
    value: Any = None
    for index in range(count):
        stage = mt.load_stage(built_in(name), tmp_path, index)
        held = dict([*stage.model.named_parameters(), *stage.model.named_buffers()])
        assert {key for key, tensor in held.items() if not tensor.is_meta} == set(stage.parameters_needed())
        assert set(stage.parameters_needed()) == set(stages[index].parameters_needed())
        value = stage(*given.args, **given.kwargs) if index == 0 else stage(mt.Boundary.from_bytes(value.to_bytes()))
    assert same(value, given.run(model))


def test_loaded_and_split_stages_go_together(tmp_path: Path) -> None:
    model, x = zoo.build("tiny-resnet")
    stages = mt.split(model, x, at="layer1")
    stages.save(tmp_path)
    head, tail = (mt.load_stage(built_in("tiny-resnet"), tmp_path, index) for index in (0, 1))
    assert same(stages[1](head(x)), model(x))
    assert same(tail(stages[0](x)), model(x))
    assert same(tail(head(torch.ones(5, 3, 24, 40))), model(torch.ones(5, 3, 24, 40)))


def test_a_folder_holds_what_it_says(tmp_path: Path) -> None:
    model, x = zoo.build("tiny-resnet")
    stages = mt.split(model, x, at="layer1")
    stages.save(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert sorted(file.name for file in folder.iterdir()) == ["plan.json", "stage0.safetensors", "stage1.safetensors"]
    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["at"], plan["fingerprint"], plan["model"]) == (["layer1"], stages.fingerprint, "ResNet")
    state = dict(model.state_dict())
    for index, listed in enumerate(plan["stages"]):
        weights = load_file(folder / listed["file"])
        assert set(weights) == set(stages[index].parameters_needed()) == set(listed["weights"])
        assert all(same(tensor, state[name]) for name, tensor in weights.items())
        assert listed["nbytes"] == sum(tensor.nbytes for tensor in weights.values())


def test_saving_again_replaces_the_weights_and_leaves_nothing_of_before(tmp_path: Path) -> None:
    (model, x), (other, _) = zoo.build("tiny-resnet"), zoo.build("tiny-resnet", seed=1)
    mt.split(model, x, at="layer1").save(tmp_path)
    (tmp_path / "stage2.safetensors").touch()
    mt.split(other, x, at="layer1").save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plan.json", "stage0.safetensors", "stage1.safetensors"]
    tail = mt.load_stage(built_in("tiny-resnet"), tmp_path, "tail")
    assert same(dict(tail.model.named_parameters())["fc.weight"], dict(other.named_parameters())["fc.weight"])


def test_stages_are_not_saved_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    with pytest.raises(BadFile, match=f"expected a folder, got the file '{tmp_path / 'model.py'}'"):
        mt.split(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "1x4", at="0").save(tmp_path / "model.py")


def test_stages_are_not_saved_into_a_recording(tmp_path: Path) -> None:
    model, x = zoo.build("tiny-resnet")
    with mt.record(model, "fc", to=tmp_path):
        model(x)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadFile, match=r"already holds a recording, which has a manifest\.json: save to another folder"):
        mt.split(model, x, at="layer1").save(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_saving_does_not_replace_another_split_or_another_plan(tmp_path: Path) -> None:
    model, x = zoo.build("tiny-resnet")
    mt.split(model, x, at="layer1").save(tmp_path)
    before = (tmp_path / "plan.json").read_bytes()
    wider = zoo.resolve("zoo:tiny-resnet", args={"classes": 4}).model
    for stages in (mt.split(model, x, at="layer2"), mt.split(wider, x, at="layer1")):
        with pytest.raises(
            BadFile, match=r"already holds another split, of ResNet at 'layer1': save to another folder, or remove it"
        ):
            stages.save(tmp_path)
    assert (tmp_path / "plan.json").read_bytes() == before
    (tmp_path / "plan.json").write_text('{"kind": "plan"}')
    with pytest.raises(
        BadFile, match=r"cannot save stages to .*, which has another plan\.json: save to another folder"
    ):
        mt.split(model, x, at="layer1").save(tmp_path)


# -- what models have --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mid = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mid(self.embed(x)))


def test_tied_weights_are_on_both_sides_and_stay_tied(tmp_path: Path) -> None:
    model, x = Tied(), torch.tensor([[1, 2, 6]])
    mt.split(model, x, at="mid").save(tmp_path)
    head, tail = (mt.load_stage(Tied, tmp_path, index) for index in (0, 1))
    assert same(tail(head(x)), model(x))
    for stage in (head, tail):
        assert stage.model.get_parameter("out.weight") is stage.model.get_parameter("embed.weight")


class Buffered(nn.Module):
    """Buffers that `state_dict` has and has not, a tensor as a plain attribute, and a number."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.register_buffer("shift", torch.arange(4.0), persistent=False)
        self.plain = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.by = 2

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x * self.scale) + self.shift) * self.plain * self.by


def test_buffers_and_plain_tensors_come_along(tmp_path: Path) -> None:
    model, x = Buffered(), torch.randn(2, 4)
    mt.split(model, x, at="a").save(tmp_path)
    head, tail = (mt.load_stage(Buffered, tmp_path, index) for index in (0, 1))
    assert same(tail(head(x)), model(x))


class ReadsValues(nn.Module):
    """Cannot be made on meta: its code reads numbers of tensors."""

    def __init__(self) -> None:
        super().__init__()
        rates = [value.item() for value in torch.linspace(0, 1, 3)]
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in rates))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_model_that_cannot_be_made_without_weights_is_made_and_emptied(tmp_path: Path) -> None:
    model, x = ReadsValues(), torch.randn(2, 4)
    mt.split(model, x, at="layers.0").save(tmp_path)
    tail = mt.load_stage(ReadsValues, tmp_path, 1)
    assert tail.model.get_parameter("layers.0.weight").is_meta
    assert same(tail(mt.split(model, x, at="layers.0")[0](x)), model(x))


def test_inputs_of_any_structure_are_described(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, batch: dict[str, Any], *, scale: float, names: list[str]) -> Tensor:
            return self.b(self.a(batch["x"][0])) * scale + batch["x"][1] * len(names)

    model = Takes()
    given = mt.Inputs({"x": (torch.randn(2, 4), torch.randn(2, 4)), "none": None}, scale=2.0, names=["a", "b"])
    mt.split(model, given, at="a").save(tmp_path)
    head, tail = (mt.load_stage(Takes, tmp_path, index) for index in (0, 1))
    assert same(tail(head(*given.args, **given.kwargs)), given.run(model))


def test_what_the_models_code_reads_crosses_in_a_loaded_stage_too(tmp_path: Path) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(x) * (2.0 if float(y.sum()) > 0 else 0.5)

    torch.manual_seed(0)
    model, x = Reads(), torch.randn(2, 4)
    stages = mt.split(model, x, at="b")
    stages.save(tmp_path)
    try:
        head, tail = (mt.load_stage(Reads, tmp_path, index) for index in (0, 1))
    except Unsupported:  # its code reads values, and half of them are not there
        return
    assert same(tail(head(x)), model(x))


def test_bfloat16_and_channels_last(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return built_in("tiny-resnet")().to(torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    model, x = make(), torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)
    mt.split(model, x, at="layer1").save(tmp_path)
    head, tail = (mt.load_stage(make, tmp_path, index) for index in (0, 1))
    assert same(tail(head(x)), model(x))


# -- what does not fit -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, x = zoo.build("tiny-resnet")
    mt.split(model, x, at="layer1").save(tmp_path)
    return tmp_path


def test_messages_say_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    make = built_in("tiny-resnet")
    with pytest.raises(BadQuery, match=r"expected a class or function that builds the model"):
        mt.load_stage(make(), folder, 1)
    with pytest.raises(BadQuery, match=r"got folder '.*' first: load_stage\(Net, '.*', 'tail'\)"):
        mt.load_stage(folder, 1, make)  # type: ignore[arg-type]
    with pytest.raises(BadFile, match=r"0 to 1, got 2"):
        mt.load_stage(make, folder, 2)
    with pytest.raises(BadFile, match=r"0 to 1, got -3"):
        mt.load_stage(make, folder, -3)
    assert mt.load_stage(make, folder, -1).index == 1
    with pytest.raises(BadFile, match=r"holds no split model: plan.json: No such file"):
        mt.load_stage(make, tmp_path / "nowhere", 1)
    with pytest.raises(BadWeights, match=r"expected a ResNet, as in '.*', got a ViT"):
        mt.load_stage(built_in("tiny-vit"), folder, 1)


def test_a_model_of_other_sizes_is_refused(folder: Path) -> None:
    with pytest.raises(BadWeights, match=r"'fc.weight': expected \(10, 16\) .* in the folder, got \(11, 16\)"):
        mt.load_stage(lambda: zoo.resolve("zoo:tiny-resnet", args={"classes": 11}).model, folder, 1)


class Variable(nn.Module):
    """Layers that its arguments choose, as norms and activations are chosen."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d, act: type[nn.Module] = nn.ReLU, depth: int = 1) -> None:
        super().__init__()
        self.a, self.norm, self.act = nn.Linear(4, 4), norm(4), act()
        self.more = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.more(self.act(self.norm(self.a(x)))))
        return y


@pytest.mark.parametrize("arguments", [{"norm": nn.Identity}, {"act": nn.GELU}, {"depth": 2}], ids=str)
@pytest.mark.parametrize("stage", ["head", "tail"])
def test_a_model_of_other_layers_than_the_saved_one_is_refused_in_every_stage(
    arguments: dict[str, Any], stage: str, tmp_path: Path
) -> None:
    mt.split(Variable().eval(), torch.rand(2, 4), at="a").save(tmp_path)
    assert mt.load_stage(Variable, tmp_path, stage).index == (stage == "tail")
    # 3 linear layers of 4 * 4 + 4 parameters, and a norm of 2 * 4
    expected = r"expected the Variable that was saved in '.*' \(68 parameters, structure [0-9a-f]{16}\), got one of "
    with pytest.raises(BadWeights, match=expected + r"other layers or calls \(\d+ parameters, structure \w+\): build"):
        mt.load_stage(lambda: Variable(**arguments), tmp_path, stage)


def test_a_folder_without_a_number_of_parameters_is_loaded(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    del plan["parameters"]
    (folder / "plan.json").write_text(json.dumps(plan))
    assert mt.load_stage(built_in("tiny-resnet"), folder, "tail").index == 1
    plan["fingerprint"] = "0" * 16 + plan["fingerprint"][16:]
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(BadWeights, match=r"that was saved in '.*' \(structure 0{16}\), got one of"):
        mt.load_stage(built_in("tiny-resnet"), folder, "tail")


def test_stages_have_the_names_that_split_gives_them(folder: Path) -> None:
    for name, index in (("head", 0), ("tail", 1)):
        assert mt.load_stage(built_in("tiny-resnet"), folder, name).index == index
    with pytest.raises(BadFile, match=r"expected a stage in .*: 'head', 'tail' or a number from 0 to 1, got 'middle'"):
        mt.load_stage(built_in("tiny-resnet"), folder, "middle")


def test_the_name_of_a_model_is_not_what_builds_it(folder: Path) -> None:
    advice = r"got 'zoo:tiny-resnet': pass lambda: microtome\.zoo\.resolve\('zoo:tiny-resnet'\)\.model"
    with pytest.raises(BadQuery, match=advice):
        mt.load_stage("zoo:tiny-resnet", folder, 1)  # type: ignore[arg-type]


def test_load_names_the_function_that_reads_a_split(folder: Path) -> None:
    for file in (folder, folder / "plan.json"):
        with pytest.raises(BadFile, match=r"a split model: microtome\.load_stage reads"):
            mt.load(file)


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "plan"}', '{"kind": "split", "schema": 99}'])
def test_a_plan_that_cannot_be_read_is_refused(folder: Path, text: str) -> None:
    (folder / "plan.json").write_text(text)
    with pytest.raises(BadFile, match=r"plan\.json"):
        mt.load_stage(built_in("tiny-resnet"), folder, 1)


def test_weights_that_cannot_be_read_are_refused(folder: Path) -> None:
    file = folder / "stage1.safetensors"
    whole = file.read_bytes()
    for broken in (b"", whole[:100], whole[:-10]):
        file.write_bytes(broken)
        with pytest.raises(
            BadFile, match=r"stage1.safetensors' is corrupt: ValueError|cannot read '.*stage1.safetensors'"
        ):
            mt.load_stage(built_in("tiny-resnet"), folder, 1)
    file.unlink()
    with pytest.raises(BadFile, match=r"stage1.safetensors' is corrupt: ValueError|cannot read '.*stage1.safetensors'"):
        mt.load_stage(built_in("tiny-resnet"), folder, 1)


def test_stages_of_folders_of_other_weights_refuse_each_other(folder: Path, tmp_path: Path) -> None:
    _, x = zoo.build("tiny-resnet")
    other, _ = zoo.build("tiny-resnet", seed=1)
    mt.split(other, x, at="layer1").save(tmp_path / "other")
    head = mt.load_stage(built_in("tiny-resnet"), tmp_path / "other", 0)
    tail = mt.load_stage(built_in("tiny-resnet"), folder, 1)
    with pytest.raises(BadBoundary, match=r"the boundary is of another model: expected fingerprint"):
        tail(head(x))


def test_a_stage_whose_weights_were_dropped_cannot_be_saved(tmp_path: Path) -> None:
    model, x = zoo.build("tiny-resnet")
    stages = mt.split(model, x, at="layer1", load="head")
    with pytest.raises(Unsupported, match=r"of stage 1 is not loaded: save stages that were split without"):
        stages.save(tmp_path)


def test_an_example_that_cannot_be_described_is_refused(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
            return self.b(self.a(x)).to(dtype)

    stages = mt.split(Takes(), (torch.randn(2, 4), torch.float64), at="a")
    with pytest.raises(Unsupported, match=r"cannot save or send dtype of the example: expected .*, got a dtype"):
        stages.save(tmp_path)


# -- memory ------------------------------------------------------------------------------------------------------------

LARGE = """
import sys
import torch
from torch import nn

def make():
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))  # 12 times 16.8 MB
"""
SAVES = """
import microtome as mt
mt.split(make(), "1x2048", at="8", verify=False).save(sys.argv[1])  # nine layers and three
"""
LOADS = """
import psutil
import microtome as mt
import microtome.split.stages, safetensors.torch
torch.set_num_threads(1)
mt.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "1x4", at="0")(torch.ones(1, 4))  # what is imported late
before = psutil.Process().memory_info().rss
stage = mt.load_stage(make, sys.argv[1], int(sys.argv[2]))
given = torch.ones(1, 2048) if sys.argv[2] == "0" else mt.Boundary.from_bytes(open(sys.argv[1] + "/sent", "rb").read())
out = stage(given)
if sys.argv[2] == "0":
    open(sys.argv[1] + "/sent", "wb").write(out.to_bytes())
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.slow
def test_a_loaded_stage_takes_its_share_of_the_memory(tmp_path: Path) -> None:
    def python(code: str, *args: str) -> str:
        command = [sys.executable, "-c", LARGE + code, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    python(SAVES, str(tmp_path))
    layer = (2048 * 2048 + 2048) * 4
    for index, layers in ((0, 9), (1, 3)):
        held = int(python(LOADS, str(tmp_path), str(index)))
        # Its weights, and a little for all else. The whole model would be 12 layers.
        assert layers * layer * 0.9 < held < layers * layer * 1.25 + 24e6, (index, held / layer)


def test_weights_that_were_changed_after_saving_are_refused(folder: Path) -> None:
    """Whatever bit of a file is flipped: in the header, in the first and in the last weight."""
    file = folder / "stage1.safetensors"
    whole = file.read_bytes()
    for at in (20, len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[at] ^= 1
        file.write_bytes(changed)
        with pytest.raises(
            BadFile,
            match=r"stage1.safetensors' was changed since it was saved|stage1.safetensors' is (damaged|not JSON)",
        ):
            mt.load_stage(built_in("tiny-resnet"), folder, 1)
        assert mt.load_stage(built_in("tiny-resnet"), folder, 0).index == 0  # the other file is as it was
    file.write_bytes(whole)
    assert mt.load_stage(built_in("tiny-resnet"), folder, 1).index == 1


def test_weights_of_another_model_in_the_place_of_a_stage_are_refused(folder: Path, tmp_path: Path) -> None:
    other, x = zoo.build("tiny-resnet", seed=1)
    mt.split(other, x, at="layer1").save(tmp_path / "other")
    (folder / "stage1.safetensors").write_bytes((tmp_path / "other" / "stage1.safetensors").read_bytes())
    with pytest.raises(BadFile, match=r"expected checksum [0-9a-f]{32}, got [0-9a-f]{32}. Save the stages again"):
        mt.load_stage(built_in("tiny-resnet"), folder, 1)
