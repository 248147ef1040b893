"""Stages as programs of torch.export, ONNX and ExecuTorch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.cli import main
from microtome.errors import BadQuery, NotInstalled, Unsupported
from microtome.split.graph import export, runtimes
from microtome.split.graph.comparison import compare_outputs
from microtome.split.graph.runtimes import run_onnx

pytestmark = [
    pytest.mark.integration,
    # of the exporters and of what they import
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(name="small")
def split_small() -> tuple[nn.Module, Tensor, Any]:
    model, x = zoo.build("tiny-resnet")
    assert isinstance(x, Tensor)
    return model, x, mt.split(model, x, at="layer1.0.conv1")


Small = tuple[nn.Module, Tensor, Any]


def test_a_program_of_torch_computes_the_stage_bit_for_bit(small: Small, tmp_path: Path) -> None:
    model, _, (head, tail) = small
    exported = [stage.export(tmp_path / f"{stage.index}.pt2") for stage in (head, tail)]
    assert [one.verified for one in exported] == ["bit-equal"] * 2
    files: dict[str, Any] = {"stage.json": ""}
    first = torch.export.load(exported[0].file, extra_files=files).module()
    last = torch.export.load(exported[1].file).module()
    for size in ((2, 3, 32, 32), (5, 3, 40, 48)):
        image = torch.randn(size)
        (output,) = last(*first(image).values()).values()
        assert output.equal(model(image))
    metadata = json.loads(files["stage.json"])
    assert metadata == exported[0].metadata
    assert (metadata["model"], metadata["begins_at"], metadata["ends_at"]) == ("ResNet", None, "layer1.0.conv1")
    assert metadata["inputs"] == {"x": {"shape": ["s0", "3", "s1", "s2"], "dtype": "float32"}}
    assert metadata["outputs"] == ["stem", "layer1.0.conv1"]
    stem = {"shape": ["s0", "8", "s1", "s2"], "dtype": "float32"}
    assert metadata["output_types"] == {"stem": stem, "layer1.0.conv1": stem}
    assert exported[1].metadata["output_types"] == {"output": {"shape": ["s0", "10"], "dtype": "float32"}}
    assert metadata["fingerprint"] == head.fingerprint
    with pytest.raises(Exception, match="Guard failed|Expected|shape"):  # torch.export checks shapes itself
        first(torch.randn(2, 4, 32, 32))


def test_a_model_of_onnx_runs_at_other_sizes(small: Small, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs microtome[onnx]")
    pytest.importorskip("onnxscript", reason="needs microtome[onnx]")
    model, x, (head, tail) = small
    exported = [stage.export(tmp_path / f"{stage.index}.onnx") for stage in (head, tail)]
    first, last = (run_onnx(Path(one.file).read_bytes()) for one in exported)
    for image in (x, torch.randn(5, 3, 40, 48)):
        expected = model(image)
        (output,) = last(first([image]))
        assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()
    loaded = onnx.load(exported[0].file)
    assert [one.name for one in loaded.graph.input] == ["x"]
    assert [one.name for one in loaded.graph.output] == ["stem", "layer1.0.conv1"]
    metadata = json.loads({one.key: one.value for one in loaded.metadata_props}["microtome"])
    assert metadata == {**exported[0].metadata, "opset": 20}
    assert [one.version for one in loaded.opset_import if not one.domain] == [20]
    crossed = mt.Boundary(
        "layer1.0.conv1", tail.fingerprint, dict(zip(metadata["outputs"], first([x]), strict=True)), head(x).facts
    )
    assert (tail(crossed) - model(x)).abs().max() <= 1e-5 * model(x).abs().max()


class OtherForOneRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if x.shape[0] == 1:
            y = y * 2
        if x.shape[1] % 8 == 0:
            y = y + 1
        output: Tensor = self.second(y)
        return output


def test_programs_refuse_sizes_of_another_branch(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs microtome[onnx]")
    model = OtherForOneRow().eval()
    head, tail = mt.split(model, torch.randn(2, 16, 4), at="first")
    program = torch.export.load(tail.export(tmp_path / "tail.pt2").file).module()
    loaded = mt.load_exported(tail.export(tmp_path / "tail.onnx").file)
    assert loaded.metadata["conditions"] == ["Eq(Mod(s1, 8), 0)", "s0 >= 2"]
    for shape, text in (((1, 16, 4), r"s0 >= 2"), ((2, 12, 4), r"Eq\(Mod\(s1, 8\), 0\)|% 8")):
        crossing = head(torch.randn(shape))
        with pytest.raises((RuntimeError, AssertionError), match=text):
            program(*crossing.tensors.values())
        with pytest.raises(mt.MicrotomeError, match=rf"takes first\[s0, s1, 4\]: expected sizes with ({text}), got s0"):
            loaded(crossing)
    x = torch.randn(3, 24, 4)
    assert program(*head(x).tensors.values())["output"].equal(model(x))
    output = loaded(head(x))
    assert isinstance(output, dict)
    torch.testing.assert_close(output["output"], model(x))


class Skip(nn.Module):
    """Its input crosses the cut, two operators have the name of a module, and a weight that of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((4,), 2.0))
        self.relu = nn.ReLU()
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.relu(self.b(torch.relu(x * self.x)).neg())
        return {"y": self.b(torch.relu(y)) + x, "x": x, "weight": self.x}


def test_values_of_onnx_have_names_of_their_own(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs microtome[onnx]")
    pytest.importorskip("onnxscript", reason="needs microtome[onnx]")
    model, x = Skip().eval(), torch.randn(3, 4)
    stages = mt.split(model, x, at="relu")
    exported = [stage.export(tmp_path / f"{stage.index}.onnx") for stage in stages]
    graphs = [onnx.load(one.file).graph for one in exported]
    assert [[one.name for one in graph.input] for graph in graphs] == [["x"], ["x", "relu"]]
    assert [one.name for one in graphs[0].output] == ["x.out", "relu"]
    assert exported[0].metadata["outputs"] == list(stages[0](x).tensors) == ["x", "relu"]
    first, last = (mt.load_exported(one.file) for one in exported)
    output = last(first(x))
    assert isinstance(output, dict)
    assert output["[x]"].equal(x)
    torch.testing.assert_close(list(output.values()), list(model(x).values()))


def test_sizes_of_onnx_have_the_symbols_of_the_metadata(small: Small, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs microtome[onnx]")
    pytest.importorskip("onnxscript", reason="needs microtome[onnx]")
    _, _, stages = small
    for stage in stages:
        exported = stage.export(tmp_path / f"{stage.index}.onnx")
        loaded = onnx.load(exported.file)
        onnx.checker.check_model(loaded, full_check=True)
        sizes = {
            one.name: [size.dim_param or str(size.dim_value) for size in one.type.tensor_type.shape.dim]
            for one in (*loaded.graph.input, *loaded.graph.output)
        }
        assert {name: sizes[name] for name in exported.metadata["inputs"]} == {
            name: one["shape"] for name, one in exported.metadata["inputs"].items()
        }
        assert {sizes[name][0] for name in exported.metadata["outputs"]} == {"s0"}


def test_an_example_of_one_row_gives_a_program_for_any_number(tmp_path: Path) -> None:
    model, x = zoo.build("tiny-vit")
    assert isinstance(x, Tensor)
    head, _ = mt.split(model, x[:1], at="blocks.1")
    program = torch.export.load(head.export(tmp_path / "head.pt2").file).module()
    image = torch.randn(3, 3, 32, 32)
    assert program(image)["blocks.1"].equal(head(image).tensors["blocks.1"])


def test_a_loaded_stage_needs_an_example_where_the_head_is_not(small: Small, tmp_path: Path) -> None:
    _, x, stages = small
    stages.save(tmp_path / "parts")
    tail = mt.load_stage(lambda: zoo.build("tiny-resnet")[0], tmp_path / "parts", "tail")
    with pytest.raises(Unsupported, match="pass the boundary of an example as example="):
        tail.export(tmp_path / "tail.pt2")
    assert tail.export(tmp_path / "tail.pt2", example=stages[0](x)).verified == "bit-equal"
    assert tail.compile(backend="eager").verified == "not verified: the example is not here"
    assert tail.compile(backend="eager", example=stages[0](x)).verified == "bit-equal"


def test_a_program_that_differs_once_loaded_again_leaves_no_file(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = export._WRITERS[".pt2"]

    def write_another(*args: Any) -> Any:
        data, run = write(*args)
        return data, lambda tensors: [tensor + 1 for tensor in run(tensors)]

    head = small[2][0]
    monkeypatch.setitem(export._WRITERS, ".pt2", write_another)
    with pytest.raises(Unsupported, match=r"head.pt2: expected outputs\['\S+'\] of .*, got others that differ by 1"):
        head.export(tmp_path / "head.pt2")
    assert not list(tmp_path.iterdir())
    (tmp_path / "head.pt2").write_bytes(b"an earlier one")
    with pytest.raises(Unsupported, match="that differ by 1"):
        head.export(tmp_path / "head.pt2")
    assert (tmp_path / "head.pt2").read_bytes() == b"an earlier one"


def test_mistakes_are_named(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = small[2][0]
    with pytest.raises(BadQuery, match=r"expected a file that ends in .pt2, .onnx, .pte, got '.*head.zip'"):
        head.export(tmp_path / "head.zip")
    calls: list[Any] = [head.export, mt.load_exported]
    for call in calls:
        with pytest.raises(BadQuery, match="expected the path of a file, such as 'head.onnx', got 3"):
            call(3)

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(runtimes, "import_module", missing)
    with pytest.raises(NotInstalled, match=r"onnx is not installed: pip install 'microtome\[onnx\]'"):
        head.export(tmp_path / "head.onnx")
    assert not list(tmp_path.iterdir())


def test_outputs_that_differ_by_more_than_rounding_are_refused() -> None:
    expected = {"y": torch.tensor([1.0, 100.0])}
    assert compare_outputs({"y": expected["y"] + 1e-4}, expected, "it", 1e-5) == (
        "the outputs differ by at most 0.0001, of numbers up to 100"
    )
    with pytest.raises(
        Unsupported,
        match=r"it: expected outputs\['y'\] of .* that differ by 0.01, of numbers up to 100",
    ):
        compare_outputs({"y": expected["y"] + 1e-2}, expected, "it", 1e-5)
    with pytest.raises(Unsupported, match=r"it returns another output than the stage: outputs\['y'\]"):
        compare_outputs({"y": expected["y"].double()}, expected, "it")
    with pytest.raises(Unsupported, match=r"it: expected outputs\['y'\] to be finite where those of the stage are"):
        compare_outputs({"y": torch.tensor([torch.nan, 100.0])}, expected, "it")


def test_a_quantized_program_says_how_far_it_is_off(small: Small, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs microtome[onnx]")
    model, x, (_, tail) = small
    whole = tail.export(tmp_path / "tail.onnx")
    quantized = tail.export(tmp_path / "tail8.onnx", int8=True)
    assert whole.metadata.get("quantized") is None
    assert re.fullmatch(r"the outputs differ by at most \S+, of numbers up to \S+", quantized.verified or "")
    assert Path(quantized.file).stat().st_size < 0.7 * Path(whole.file).stat().st_size
    loaded = mt.load_exported(quantized.file)
    assert loaded.metadata["quantized"] == "int8"
    for image in (x, torch.randn(5, 3, 40, 48)):
        output = loaded(small[2][0](image))
        assert isinstance(output, dict)
        assert 0 < (output["output"] - model(image)).abs().max() <= 0.1 * model(image).abs().max()
    with pytest.raises(BadQuery, match=r"expected a file that ends in .onnx, which int8=True is for, got 'tail.pt2'"):
        tail.export(tmp_path / "tail.pt2", int8=True)


def test_each_output_is_compared_at_its_own_scale() -> None:
    large, small = torch.tensor([1e6]), torch.tensor([1.0, -torch.inf, torch.nan])
    expected = {"large": large, "small": small}
    assert compare_outputs({"large": large + 1, "small": small * (1 + 1e-6)}, expected, "it", 1e-5) == (
        "the outputs differ by at most 1, of numbers up to 1e+06"
    )
    with pytest.raises(
        Unsupported,
        match=r"it: expected outputs\['small'\] of .* that differ by 0.1, of numbers up to 1",
    ):
        compare_outputs({"large": large, "small": small * 1.1}, expected, "it", 1e-5)
    for whole in (torch.tensor([1 << 60]), torch.tensor([True, False])):
        other = ~whole if whole.dtype is torch.bool else whole + 1
        with pytest.raises(Unsupported, match=r"it: expected outputs\['y'\] of torch.* to equal those of the stage"):
            compare_outputs({"y": other, "large": large}, {"y": whole, "large": large}, "it", 1e-5)


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_command_writes_programs_beside_the_stages(tmp_path: Path) -> None:
    words = ["split", "zoo:tiny-resnet", "--at", "layer1", "--to", str(tmp_path / "parts"), "--export", "pt2"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    for index in range(2):
        file = tmp_path / "parts" / f"stage{index}.pt2"
        assert re.search(
            rf"^{re.escape(str(file))}: \S+ KiB, bit-equal; (layer1\[1\] is fixed: 8 for all inputs of the model; )?"
            r"x\[1\] is fixed: ",
            result.output,
            re.MULTILINE,
        )
        assert file.exists()
    refused = CliRunner().invoke(main, [*words, "--int8"])
    assert (refused.exit_code, "--int8 needs --export onnx" in refused.output) == (2, True)
    refused = CliRunner().invoke(main, [*words[:-1], "zip"])
    assert refused.exit_code == 2
    assert "'zip' is not one of 'pt2', 'onnx', 'pte'" in refused.output


def test_the_command_writes_quantized_programs(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs microtome[onnx]")
    words = ["split", "zoo:tiny-resnet", "--at", "layer1", "--to", str(tmp_path / "parts"), "--export", "onnx"]
    for extra, quantized in (([], None), (["--int8"], "int8")):
        result = CliRunner().invoke(main, [*words, *extra])
        assert result.exit_code == 0, result.output
        assert "the outputs differ by at most" in result.output
        stages = [mt.load_exported(tmp_path / "parts" / f"stage{index}.onnx") for index in range(2)]
        assert [(one.begins_at, one.ends_at) for one in stages] == [(None, "layer1"), ("layer1", None)]
        assert {one.details.quantized for one in stages} == {quantized}


def test_an_operator_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs microtome[onnx]")

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.second(self.first(x))[0]
            return output

    _, tail = mt.split(Recurrent().eval(), torch.randn(2, 5, 4), at="first")
    with pytest.raises(Unsupported, match="as .onnx: .*No ONNX function found for .*mkldnn_rnn_layer") as error:
        tail.export(tmp_path / "tail.onnx")
    assert "\x1b" not in str(error.value)


# -- numbers of other dtypes -------------------------------------------------------------------------------------------


def make_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64)).eval()


def test_rounding_is_that_of_the_dtype(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs microtome[onnx]")
    _, tail = mt.split(make_mlp().half(), torch.randn(2, 64).half(), at="0")
    assert re.match("bit-equal|the outputs differ by", tail.export(tmp_path / "tail.onnx").verified or "")
    half = {"y": torch.tensor([1.0, 100.0]).half()}  # whose neighbors are 1/16 apart at 100
    assert compare_outputs({"y": half["y"] + 0.0625}, half, "it", 1e-5).startswith("the outputs differ by")
    with pytest.raises(Unsupported, match="that differ by 1, of numbers up to 100"):
        compare_outputs({"y": half["y"] + 1}, half, "it", 1e-5)


def test_dtypes_without_kernels_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs microtome[onnx]")
    head, _ = mt.split(make_mlp().bfloat16(), torch.randn(2, 64).bfloat16(), at="0")
    with pytest.raises(Unsupported, match="ONNX Runtime computes with .*, got a stage of torch.bfloat16: split"):
        head.export(tmp_path / "head.onnx")
    head, _ = mt.split(make_mlp().half(), torch.randn(2, 64).half(), at="0")
    with pytest.raises(Unsupported, match="int8=True quantizes .* torch.float32, got a stage of torch.float16: split"):
        head.export(tmp_path / "head.onnx", int8=True)


def test_the_example_of_a_model_that_writes_to_its_input_stays(tmp_path: Path) -> None:
    class WritesInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.second(self.first(x.mul_(2)))
            return output

    x = torch.ones(2, 4)
    stages = mt.split(WritesInput().eval(), x, at="first")
    before = x.clone()
    assert [stage.export(tmp_path / f"{stage.index}.pt2").verified for stage in stages] == ["bit-equal"] * 2
    assert x.equal(before)
