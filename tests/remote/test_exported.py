"""Exported stages on servers and devices, and requests of programs without microtome."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadBoundary, BadFile, BadInputs, BadQuery, NotAModule, RemoteError, Unsupported
from microtome.remote import protocol
from microtome.remote.tensor_messages import encode_tensors, parse_tensors
from microtome.split.graph import derived_facts
from microtome.split.graph.exported_stage import ExportedStage, load_exported
from microtome.split.stage import Stage
from microtome.zoo.writer import KVCache
from tests.remote.chains import CUTS, connected, serving
from tests.remote.small import small

pytest.importorskip("onnxruntime", reason="needs microtome[onnx]")
pytest.importorskip("onnxscript", reason="needs microtome[onnx]")

pytestmark = [
    pytest.mark.integration,
    # of the exporter
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TOLERANCE = 1e-5
LIMIT = 1 << 30


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", name="resnet")
def build_resnet() -> tuple[nn.Module, Tensor]:
    return small()


Resnet = tuple[nn.Module, Tensor]


@pytest.fixture(scope="module", name="files")
def export_stages(resnet: Resnet, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The three stages between `CUTS` as ONNX models."""
    folder = tmp_path_factory.mktemp("parts")
    with torch.no_grad():
        return [stage.export(folder / f"{stage.index}.onnx").file for stage in mt.split(*resnet, at=CUTS)]


def check_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


# -- on one device -----------------------------------------------------------------------------------------------------


def test_exported_stages_and_stages_take_the_boundaries_of_each_other(resnet: Resnet, files: list[str]) -> None:
    model, x = resnet
    stages: list[Any] = list(mt.split(model, x, at=CUTS))
    exported: list[Any] = [load_exported(file) for file in files]
    for image in (x, torch.randn(3, 3, 40, 48)):
        for kinds in ("EEE", "EEs", "EsE", "Ess", "sEE", "sEs", "ssE"):
            value: Any = image
            for kind, stage, program in zip(kinds, stages, exported, strict=True):
                value = (program if kind == "E" else stage)(value)
            check_close(value["output"] if isinstance(value, dict) else value, model(image))


@pytest.mark.slow
def test_a_compiled_stage_takes_the_boundary_of_an_exported_one(resnet: Resnet, files: list[str]) -> None:
    model, x = resnet
    exported = load_exported(files[0])
    middle, last = (stage.compile(backend="eager") for stage in mt.split(model, x, at=CUTS)[1:])
    for image in (x, *[torch.randn(3, 3, 40, 48)] * 2):
        check_close(last(middle(exported(image))), model(image))


def test_an_exported_stage_says_what_it_is(resnet: Resnet, files: list[str]) -> None:
    middle = load_exported(files[1])
    assert (middle.begins_at, middle.ends_at) == tuple(CUTS)
    assert middle.metadata["fingerprint"] == mt.split(*resnet, at="stem")[0].fingerprint
    assert repr(middle) == f"<Exported stage of ResNet in {files[1]}, from 'stem' to 'layer1'>"
    assert repr(load_exported(files[0])).endswith("from the inputs to 'stem'>")


def test_what_an_exported_stage_cannot_take_is_named(resnet: Resnet, files: list[str]) -> None:
    _, x = resnet
    first, middle = map(load_exported, files[:2])
    with pytest.raises(BadInputs, match=r"takes the tensors x, got x, y"):
        first(x, y=x)
    with pytest.raises(BadInputs, match=r"expected 'x' of float32 and shape \[s0, 3, s1, s2\], got torch.float64"):
        first(x.double())
    with pytest.raises(BadInputs, match=r"expected 'x' as a Tensor, got a ndarray: pass torch.as_tensor"):
        first(x.numpy())
    with pytest.raises(BadInputs, match=r"begins at 'stem': expected one Boundary, got Tensor"):
        middle(x)
    with pytest.raises(BadBoundary, match="expected a boundary of the cut at 'stem'"):
        middle(mt.Boundary("layer1", middle.metadata["fingerprint"], {}, {}))
    boundary = first(x)
    assert isinstance(boundary, mt.Boundary)
    with pytest.raises(BadBoundary, match="expected the tensors stem, got other"):
        middle(mt.Boundary("stem", boundary.fingerprint, {"other": x}, boundary.facts))
    with pytest.raises(BadBoundary, match="input_shapes: expected the inputs x, got"):
        middle(mt.Boundary("stem", boundary.fingerprint, boundary.tensors, {"input_shapes": {"y": [1]}}))

    def fail(tensors: Any) -> Any:
        raise RuntimeError("no kernel")

    with pytest.raises(Unsupported, match="first.onnx does not run on these shapes: .*no kernel"):
        ExportedStage("first.onnx", first.details, fail)(x)


def test_what_an_exported_stage_cannot_do_is_said(resnet: Resnet, files: list[str]) -> None:
    model, x = resnet
    head = load_exported(files[0])
    unsupported: Any = head
    with (
        serving(model, x) as server,
        pytest.raises(BadQuery, match=r"got <Exported stage .*: an exported stage has neither .* mt.load_stage"),
    ):
        mt.connect(unsupported, x, server.address)
    with pytest.raises(NotAModule, match="a stage is part of a model: pass the model, or measure .* its method `time`"):
        mt.profile(unsupported, x)
    boundary = head(x)
    assert 0 < head.time(x, repeat=3) < 10
    assert 0 < load_exported(files[1]).time(boundary, repeat=3) < 10
    with pytest.raises(BadQuery, match="expected a repeat of 1 or more runs, got 0"):
        head.time(x, repeat=0)


def test_files_that_are_no_exported_stages_are_refused(files: list[str], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs microtome[onnx]")
    with pytest.raises(BadFile, match="stage.pt2'?: load it with torch.export.load if you trust its source"):
        load_exported("stage.pt2")
    (tmp_path / "bad.onnx").write_bytes(b"no program")
    with pytest.raises(BadFile, match="is no program that its runtime loads"):
        load_exported(tmp_path / "bad.onnx")
    program = onnx.load(files[0])
    metadata = json.loads(program.metadata_props[0].value)
    del program.metadata_props[1:]  # the digest
    for value, message in (
        ("", "was not written by microtome"),
        (json.dumps({**metadata, "schema": 2}), "of version 1, got version 2"),
        (
            json.dumps({**metadata, "params": "many"}),
            "was not written by microtome: expected the metadata of a stage: ",
        ),
    ):
        program.metadata_props[0].value = value
        onnx.save(program, tmp_path / "other.onnx")
        with pytest.raises(BadFile, match=message):
            load_exported(tmp_path / "other.onnx")


def test_damaged_files_are_refused(files: list[str], tmp_path: Path) -> None:
    data = Path(files[0]).read_bytes()
    file = tmp_path / "head.onnx"
    for position in range(0, len(data), len(data) // 40):
        file.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with pytest.raises(BadFile, match="head.onnx.*damaged|no program that its runtime loads"):
            load_exported(file)
    for position in range(len(data) - 40, len(data)):
        file.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with pytest.raises(BadFile, match="head.onnx.*damaged|no program that its runtime loads"):
            load_exported(file)


def test_a_file_that_is_no_model_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no program")
    with pytest.raises(BadFile, match="is no program that its runtime loads"):
        load_exported(tmp_path / "bad.onnx")
    assert capfd.readouterr().out == ""


# -- in a chain --------------------------------------------------------------------------------------------------------


def test_a_chain_holds_exported_stages(resnet: Resnet, files: list[str]) -> None:
    model, x = resnet
    first, middle, last = map(load_exported, files)
    images = [x, torch.randn(3, 3, 40, 48)]
    with (
        serving(first) as a,
        serving(middle) as b,
        serving(last) as c,
        serving(model, x) as whole,
        serving(middle, forward=whole.address) as forwarding,
    ):
        for servers, cuts in (
            ((b, c), CUTS),
            ((b, whole), CUTS),
            ((whole, c), CUTS),
            ((forwarding, whole), CUTS),
            ((b,), CUTS),  # the last stage here
            ((a, b, c), ["(input)", *CUTS]),
            ((a, whole, c), ["(input)", *CUTS]),
        ):
            with connected(model, x, *[server.address for server in servers], at=cuts) as remote:
                for image in images:
                    check_close(remote(image), model(image))
        with pytest.raises(RemoteError, match="serves the stage from 'stem' to 'layer1', not the one from 'stem' to"):
            connected(model, x, b.address, at="stem")


def test_the_last_exported_stage_is_a_tail(resnet: Resnet, files: list[str]) -> None:
    model, x = resnet
    with serving(load_exported(files[2])) as server:
        assert (server.served.device_name, server.served.name) == ("cpu", "ResNet")
        with connected(model, x, server.address, at="layer1", codec="int8") as remote:
            output = remote(x)
            assert 0 < (output - model(x)).abs().max() <= 0.02 * model(x).abs().max()
        with pytest.raises(BadQuery, match="got 'auto': it serves stages, .*; choose one of 'layer1'"):
            mt.connect(model, x, server.address, at="auto")
    with pytest.raises(Unsupported, match="the server has one exported stage of the model"):
        server.served.profile()


def test_numbers_beside_tensors_are_constants_of_an_exported_stage(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
            return {"y": self.second(self.first(x) * scale), "name": "scaled"}

    model, x = Scaled().eval(), torch.randn(3, 4)
    inputs = mt.Inputs(x, scale=2.0)
    tail = mt.split(model, inputs, at="first")[1].export(tmp_path / "tail.onnx")
    with serving(load_exported(tail.file)) as server, connected(model, inputs, server.address, at="first") as remote:
        output = remote(x, scale=2.0)
        check_close(output["y"], model(x, 2.0)["y"])
        assert output["name"] == "scaled"
        with pytest.raises(RemoteError, match=r"with other values than \[2.0\] beside tensors"):
            remote(x, scale=3.0)


# -- requests of programs without microtome ----------------------------------------------------------------------------


def ask(server: Any, data: bytes, **fields: Any) -> Any:
    """Send a message `Tensors`; return the reply's."""
    from microtome.remote.connection import Connection
    from microtome.remote.message import Message

    connection = Connection(server.address)
    try:
        message = Message(protocol.Request(id="1", format=protocol.TENSORS, **fields))
        message.set_payload(data)
        message.retry_until = 0.0
        connection.submit(message)
        return protocol.Tensors.FromString(message.reply.result(60).output)
    finally:
        connection.close()


def message_of(head: ExportedStage, image: Tensor, codec: str = "raw", **shapes: Any) -> Any:
    """What a device sends after running an exported head."""
    boundary = head(image)
    assert isinstance(boundary, mt.Boundary)
    message = protocol.Tensors.FromString(encode_tensors(boundary.tensors, boundary.at, boundary.fingerprint, codec))
    for name, shape in (shapes or {"x": image.shape}).items():
        message.inputs.add(name=name, shape=list(shape))
    return message


def output_of(reply: Any) -> Tensor:
    (tensor,) = parse_tensors(reply.SerializeToString(), LIMIT).tensors.values()
    return tensor


@pytest.mark.parametrize("codec", ["raw", "zstd", "fp16+lz4"])
def test_a_server_derives_facts_once_for_each_shape(
    resnet: Resnet, files: list[str], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = resnet
    derived = []
    derive = derived_facts.derive_facts

    def count(stage: Stage, shapes: Any) -> Any:
        derived.append(shapes)
        return derive(stage, shapes)

    monkeypatch.setattr(derived_facts, "derive_facts", count)
    head = load_exported(files[0])
    with serving(model, x) as server:
        for image in (x, torch.randn(3, 3, 40, 48), x):
            reply = ask(server, message_of(head, image, codec).SerializeToString(), codec=codec)
            assert [tensor.name for tensor in reply.tensors] == ["output"]
            got, expected = output_of(reply), model(image)
            assert (got - expected).abs().max() <= (5e-3 if "fp16" in codec else TOLERANCE) * expected.abs().max()
    assert derived == [(("x", (2, 3, 32, 32)),), (("x", (3, 3, 40, 48)),)]


def test_a_served_stage_answers_programs_too(resnet: Resnet, files: list[str], tmp_path: Path) -> None:
    model, x = resnet
    mt.split(model, x, at=CUTS).save(tmp_path)
    head = load_exported(files[0])
    loaded = mt.load_stage(lambda: small()[0], tmp_path, 1)
    stage = protocol.StageRef(cuts=CUTS, index=1)
    expected = mt.split(model, x, at="layer1")[0](x).tensors["layer1"]
    for served in (loaded, load_exported(files[1])):
        with serving(served) as server:
            reply = ask(server, message_of(head, x).SerializeToString(), stage=stage)
            assert reply.at == "layer1"
            assert [tensor.name for tensor in reply.tensors] == ["layer1"]
            check_close(output_of(reply), expected)


def test_an_exported_head_on_a_server_takes_the_tensors_of_the_inputs(resnet: Resnet, files: list[str]) -> None:
    _, x = resnet
    head = load_exported(files[0])
    message = protocol.Tensors.FromString(encode_tensors({"x": x}, "", head.metadata["fingerprint"], "raw"))
    message.inputs.add(name="x", shape=list(x.shape))
    with serving(head) as server:
        reply = ask(server, message.SerializeToString(), stage=protocol.StageRef(cuts=["stem"], index=0))
        boundary = head(x)
        assert isinstance(boundary, mt.Boundary)
        assert output_of(reply).equal(boundary.tensors["stem"])


def test_requests_that_do_not_fit_are_answered_with_the_reason(resnet: Resnet, files: list[str]) -> None:
    model, x = resnet
    head = load_exported(files[0])

    def change(edit: Callable[[Any], Any], **shapes: Any) -> bytes:
        message = message_of(head, x, **shapes)
        edit(message)
        return bytes(message.SerializeToString())

    def rename(message: Any) -> None:
        message.tensors[0].name = "other"

    def cut_elsewhere(message: Any) -> None:
        message.at = "nowhere"

    def of_another(message: Any) -> None:
        message.fingerprint = "other"

    with serving(model, x) as server:
        for data, kind, message in (
            (b"\xff\xff", "BAD_REQUEST", "expected a message Tensors of split.proto, got 2 other bytes"),
            (change(rename), "BAD_REQUEST", "expected the tensors stem at the cut 'stem', got other"),
            (change(cut_elsewhere), "NO_CUT", "at 'nowhere' is not served"),
            (change(of_another), "WRONG_MODEL", "with the fingerprint .*, got other"),
            (change(id, y=(1,)), "BAD_REQUEST", "input_shapes: expected the inputs x, got y"),
            (change(id, x=(2, 3, 32)), "BAD_REQUEST", "expected 4 dimensions of 'x', such as .*, got"),
            (change(id, x=(1 << 20, 3, 1 << 10, 1 << 10)), "BAD_REQUEST", "expected 4 dimensions of 'x'"),
            (change(id, x=(2, 3, 32, 40)), "BAD_REQUEST", "expected tensor 'stem' of torch.float32 and shape"),
            (change(id, x=(2, 4, 32, 32)), "", "cannot derive the facts of the boundary for x of shape"),
        ):
            with pytest.raises(RemoteError, match=message) as raised:
                ask(server, data)
            assert not kind or raised.value.kind == kind
        with pytest.raises(RemoteError, match="expected the format BOUNDARY of a request that is forwarded"):
            ask(
                server,
                change(id),
                stage=protocol.StageRef(cuts=CUTS, index=1),
                forward=[protocol.Hop(servers=["127.0.0.1:1"])],
            )
        inputs = encode_tensors({"x": x}, "", head.metadata["fingerprint"], "raw")
        with pytest.raises(RemoteError, match="expected the tensors of a cut, got those of the inputs"):
            ask(server, inputs)
        check_close(output_of(ask(server, change(id))), model(x))  # it still serves


def test_messages_that_take_too_much_memory_or_lie_are_refused() -> None:
    def parse(limit: int = LIMIT, **fields: Any) -> Any:
        part = {"data": bytes(16), **fields.pop("part", {})}
        tensor = {"name": "x", "dtype": "float32", "shape": [2, 2], "parts": [protocol.Part(**part)], **fields}
        return parse_tensors(protocol.Tensors(tensors=[protocol.Tensor(**tensor)]).SerializeToString(), limit)

    assert parse().tensors["x"].equal(torch.zeros(2, 2))
    for limit, fields, message in (
        (LIMIT, {"dtype": "complex7"}, "has no dtype 'complex7'"),
        (LIMIT, {"shape": [2, 3]}, "expected 24 bytes, got 16"),
        (LIMIT, {"shape": [1 << 40, 1 << 40]}, "no memory holds a tensor of shape"),
        (LIMIT, {"parts": []}, "expected 1 parts"),
        (LIMIT, {"coded": "int8"}, "expected 2 parts"),
        (LIMIT, {"coded": "int64"}, "no codec stores float32 as int64"),
        (LIMIT, {"channel": 1}, "invalid channel 1"),
        (LIMIT, {"part": {"compression": "zip"}, "shape": [64]}, "invalid compression 'zip'"),
        (LIMIT, {"part": {"compression": "zstd"}, "shape": [64]}, "cannot decompress a tensor with zstd"),
        (LIMIT, {"part": {"compression": "zstd"}, "shape": [1 << 28]}, "expected at most"),
        (400, {"name": "x" * 8}, "may take .* of memory, and the limit is"),
    ):
        with pytest.raises(BadBoundary, match=message):
            parse(limit, **fields)
    tensor = protocol.Tensor(name="x", dtype="bool", shape=[1], parts=[protocol.Part(data=b"\2")])
    with pytest.raises(BadBoundary, match="expected bytes 0 and 1"):
        parse_tensors(protocol.Tensors(tensors=[tensor]).SerializeToString(), LIMIT)
    with pytest.raises(BadBoundary, match="duplicate tensor name"):
        parse_tensors(protocol.Tensors(tensors=[tensor, tensor]).SerializeToString(), LIMIT)


def test_facts_that_depend_on_more_than_shapes_are_not_derived() -> None:
    writer, ids = zoo.build("tiny-writer")
    assert isinstance(ids, dict)
    inputs = mt.Inputs(**ids, cache=KVCache())
    tail = mt.split(writer, inputs, at="layers.1")[1]
    shapes = {name: list(tensor.shape) for name, tensor in derived_facts.named_inputs(writer, inputs).items()}
    with pytest.raises(Unsupported, match="cannot be derived from shapes for a model with state"):
        tail(mt.Boundary("layers.1", tail.fingerprint, {}, {"input_shapes": shapes}))


@torch.no_grad()
def test_facts_of_a_mask_without_padding_are_refused_with_the_reason() -> None:
    zoo.import_torchvision()  # which transformers imports
    import transformers

    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model, ids = transformers.BertModel(config).eval(), torch.arange(10).view(2, 5)
    for inputs in (mt.Inputs(input_ids=ids), mt.Inputs(input_ids=ids, attention_mask=torch.ones_like(ids))):
        head, tail = mt.split(model, inputs, at="encoder.layer.0")
        shapes = {name: list(tensor.shape) for name, tensor in derived_facts.named_inputs(model, inputs).items()}
        boundary = mt.Boundary(
            "encoder.layer.0", tail.fingerprint, head(**inputs.kwargs).tensors, {"input_shapes": shapes}
        )
        if "attention_mask" in inputs.kwargs:
            with pytest.raises(Unsupported, match="derived from the shapes of the inputs, .*without padding: leave it"):
                tail(boundary)
        else:
            assert tail(boundary).last_hidden_state.equal(model(**inputs.kwargs).last_hidden_state)
