"""Stages as graphs of operators."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import microtome as mt
from microtome import zoo
from microtome.engine.pytree import tensors_in
from microtome.errors import Unsupported
from microtome.split.graph.partition import to_identifier
from microtome.split.graph.stage_graph import StageGraph, capture_stage
from microtome.split.stage import Stage
from tests.split.language_models import build as build_language_model


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def chain(graphs: list[StageGraph], tensors: list[Tensor]) -> list[Tensor]:
    """Run graphs one after the other, and check the shapes of what each takes."""
    for graph in graphs:
        assert graph.shapes.find_mismatch(tensors) is None
        tensors = list(graph.module(*tensors).values())
    return tensors


def check(model: nn.Module, example: Any, at: Any, others: list[Any]) -> list[StageGraph]:
    """Check that the graphs of all stages compute the output bit for bit, also of other inputs."""
    graphs = list(map(capture_stage, mt.split(model, example, at=at)))
    for one in (example, *others):
        inputs = mt.Inputs.of(one)
        expected = list(tensors_in(inputs.run(model)))
        got = chain(graphs, list(tensors_in((inputs.args, inputs.kwargs))))
        assert len(got) == len(expected)
        assert all(map(torch.equal, got, expected))
    return graphs


@pytest.mark.parametrize(
    ("name", "at", "shape", "other"),
    [
        ("tiny-resnet", "layer1.0.conv1", "s0, 3, s1, s2", (5, 3, 48, 40)),
        ("tiny-resnet", ["stem", "layer1.0.relu#0", "pool"], "s0, 3, s1, s2", (3, 3, 40, 32)),
        ("tiny-unet", "pool#1", "s0, 3, s1, s2", (3, 3, 48, 48)),
        ("tiny-vit", "blocks.1.norm2", "s0, 3, s1, s2", (5, 3, 32, 32)),
    ],
)
def test_graphs_compute_what_stages_compute_at_other_sizes_too(
    name: str, at: Any, shape: str, other: tuple[int, ...]
) -> None:
    model, example = zoo.build(name)
    graphs = check(model, example, at, [torch.randn(other)])
    assert graphs[0].module.meta["shapes"] == f"x[{shape}]"
    assert graphs[0].module.meta["outputs"] == graphs[1].inputs


@pytest.mark.integration
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma2"])
def test_graphs_of_language_models_take_other_batches_and_lengths(name: str) -> None:
    model, cut = build_language_model(name)
    ids = torch.arange(3, 15)[None]
    graphs = check(model, mt.Inputs(ids, use_cache=False), cut, [mt.Inputs(ids[:, :7].repeat(3, 1), use_cache=False)])
    assert graphs[0].shapes.describe() == "input_ids[s0, s1]"


def test_a_graph_has_its_own_weights_alone_under_the_names_of_the_model() -> None:
    model, x = zoo.build("tiny-resnet")
    stages = mt.split(model, x, at="layer1")
    for stage in stages:
        graph = stage.graph()
        assert isinstance(graph, fx.GraphModule)
        assert set(graph.state_dict()) <= set(stage.parameters_needed())
        for name, tensor in graph.state_dict().items():
            assert tensor.data_ptr() == model.state_dict()[name].data_ptr()
    assert not {*stages[0].graph().state_dict()} & {*stages[1].graph().state_dict()}


def test_capturing_leaves_the_model_as_it_was() -> None:
    model, x = zoo.build("tiny-vit")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities = {name: id(tensor) for name, tensor in model.named_parameters()}
    stages, random_state = mt.split(model, x, at="blocks.1"), torch.get_rng_state()
    for stage in stages:
        stage.graph()
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == identities
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert torch.get_rng_state().equal(random_state)


def test_a_loaded_stage_is_captured_without_the_weights_of_others(tmp_path: Path) -> None:
    model, x = zoo.build("tiny-resnet")
    assert isinstance(x, Tensor)
    mt.split(model, x, at="layer1").save(tmp_path)
    head, tail = (mt.load_stage(lambda: zoo.build("tiny-resnet")[0], tmp_path, index) for index in range(2))
    got = chain([capture_stage(head), capture_stage(tail)], [x])
    assert got[0].equal(model(x))


class InPlace(nn.Module):
    """Writes to what crosses, before and after the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.first(x)
        y.mul_(self.scale)
        z = self.second(y)
        y[0].add_(1)
        return {"y": y, "pair": (z, z.shape[1]), "name": "pair"}


def test_in_place_operators_are_replaced() -> None:
    model, x = InPlace().eval(), torch.randn(3, 4)
    graphs = check(model, x, "second", [torch.randn(5, 4)])
    assert not [node for graph in graphs for node in graph.module.graph.nodes if str(node.target).endswith("_.Tensor")]
    assert graphs[1].module.meta["outputs"] == ("[y]", "[pair][0]")
    check(model, x, "first", [torch.randn(5, 4)])


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.sum() > 0:
            y = -y
        output: Tensor = self.second(y)
        return output


class Tiny(Branching):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x))
        return output


class OfOneLength(Branching):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        output: Tensor = self.second(y) + torch.zeros(len(x), 4)
        return output


class HiddenLength(Branching):
    """The tail needs a length that does not cross the cut."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).sum(1)
        output: Tensor = self.second(y) * x.shape[1]
        return output


def test_control_flow_that_depends_on_values_is_refused_with_the_line() -> None:
    _, tail = mt.split(Branching().eval(), torch.ones(3, 4), at="first")
    with pytest.raises(Unsupported, match=r"test_graph.py:\d+, in forward, 'if y.sum\(\) > 0:': .*data-dependent"):
        tail.graph()


def test_a_head_is_captured_whatever_follows_the_cut() -> None:
    x = torch.randn(3, 4)
    head, _ = mt.split(Branching().eval(), x, at="first")
    graph = head.graph()
    assert graph(x)["first"].equal(head(x).tensors["first"])
    other = torch.randn(5, 4)
    assert head.compile(backend="eager")(other).tensors["first"].equal(head(other).tensors["first"])


def test_a_size_that_the_code_fixes_is_reported_with_the_line() -> None:
    head, tail = mt.split(OfOneLength().eval(), torch.ones(3, 4), at="first")
    assert head.graph().meta["shapes"] == "x[s0, 4]"  # the code that fixes it is after the cut
    graph = tail.graph()
    assert graph.meta["static"]["x[0]"].startswith("test_graph.py:")
    assert graph.meta["static"]["x[0]"].endswith(", in forward, needs 3")
    found = capture_stage(tail).shapes.find_mismatch([torch.ones(2, 4)])
    assert found == "expected first[3, 4], got first[2, 4]"


def test_a_size_that_does_not_cross_is_fixed() -> None:
    model = HiddenLength().eval()
    example = torch.randn(2, 6, 4)
    head, tail = map(capture_stage, mt.split(model, example, at="first"))
    assert head.shapes.describe() == "x[s0, s1, 4]"  # the sum is in the tail
    summed = mt.split(_Summed().eval(), example, at="sum")
    graphs = list(map(capture_stage, summed))
    assert graphs[1].static["x[1]"] == "the stage from 'sum' needs the size, which does not cross the cut"
    assert chain([graphs[1]], [graphs[0].module(example)["sum"]])[0].equal(_Summed().eval()(example))
    assert tail.static.keys() <= {"x[2]", "first[2]"}


class _Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


class _Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sum = _Sum()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.sum(x) * x.shape[1]
        return output


def test_a_static_graph_accepts_the_shapes_of_the_example_alone() -> None:
    model, x = zoo.build("tiny-resnet")
    graph = mt.split(model, x, at="layer1")[0].graph(dynamic=False)
    assert graph.meta["shapes"] == "x[2, 3, 32, 32]"
    assert set(graph.meta["static"].values()) == {"dynamic=False"}


class OtherForOneRow(Branching):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if x.shape[0] == 1:  # a graph for other sizes does not have this branch
            y = y * 2
        output: Tensor = self.second(y)
        return output


def test_a_graph_that_does_not_compute_the_example_has_its_sizes() -> None:
    model = OtherForOneRow().eval()
    x = torch.randn(1, 4)
    head, tail = mt.split(model, x, at="first")
    graph = tail.graph()
    assert graph.meta["verified"] == "bit-equal"
    assert graph.meta["shapes"] == "first[1, 4]"
    reason = "the graph of stage 1, for x[0] of 1: expected outputs['output'] of the stage, got others that differ by "
    assert graph.meta["static"]["x[0]"].startswith(reason)
    assert graph(head(x).tensors["first"])["output"].equal(model(x))
    assert head.graph().meta["shapes"] == "x[s0, 4]"
    assert tail.compile(backend="eager")(head(x)).equal(model(x))


def test_a_graph_that_does_not_compute_one_row_takes_two_or_more() -> None:
    model, one = OtherForOneRow().eval(), torch.randn(1, 4)
    head, tail = mt.split(model, torch.randn(2, 4), at="first")
    graph = tail.graph()
    assert (graph.meta["shapes"], graph.meta["conditions"]) == ("first[s0, 4]", ["s0 >= 2"])
    assert graph.meta["excluded_ones"]["x[0]"].startswith(
        "the graph of stage 1, for x[0] of 1: expected outputs['output'] of the stage"
    )
    with pytest.raises(RuntimeError, match=r"expected sizes with s0 >= 2 in first\[s0, 4\]"):
        graph(head(one).tensors["first"])
    compiled = tail.compile(backend="eager")
    with pytest.raises(mt.MicrotomeError, match=r"expected sizes with s0 >= 2 in first\[s0, 4\], got first\[1, 4\]"):
        compiled(head(one))
    three = torch.randn(3, 4)
    assert compiled(head(three)).equal(model(three))
    assert head.graph().meta["conditions"] == []
    assert head.graph()(one)["first"].equal(head(one).tensors["first"])


def test_a_loaded_stage_is_tried_with_one_row_of_random_numbers(tmp_path: Path) -> None:
    stages = mt.split(OtherForOneRow().eval(), torch.randn(2, 4), at="first")
    stages.save(tmp_path)
    tail = mt.load_stage(lambda: OtherForOneRow().eval(), tmp_path, 1)
    assert capture_stage(tail).shapes.spell_conditions() == ["s0 >= 2"]
    plain = mt.split(Tiny().eval(), torch.randn(2, 4), at="first")
    plain.save(tmp_path / "plain")
    tail = mt.load_stage(lambda: Tiny().eval(), tmp_path / "plain", 1)
    assert capture_stage(tail).shapes.spell_conditions() == []


class RefusesOneRow(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        if len(x.shape) and x.shape[0] == 1:
            raise ValueError("expected more than one row")
        return super().forward(x)


def test_a_size_that_the_model_refuses_is_refused_by_the_graph() -> None:
    head, _ = mt.split(RefusesOneRow().eval(), torch.randn(2, 4), at="first")
    graph = head.graph()
    assert graph.meta["conditions"] == ["s0 >= 2"]
    reason = "the stage does not run for x[0] of 1: ValueError: expected more than one row"
    assert graph.meta["excluded_ones"] == {"x[0]": reason}


class LongOrShort(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if x.shape[0] > 16:
            y = y * 2
        if x.shape[0] % 8 == 0:
            y = y + 1
        output: Tensor = self.second(y)
        return output


def test_a_graph_raises_for_sizes_of_another_branch() -> None:
    model = LongOrShort().eval()
    head, tail = mt.split(model, torch.randn(24, 4), at="first")
    graph = tail.graph()
    assert graph.meta["conditions"] == ["s0 > 16", "Eq(Mod(s0, 8), 0)"]
    x = torch.randn(32, 4)
    assert graph(head(x).tensors["first"])["output"].equal(model(x))
    for rows, text in ((12, "s0 > 16"), (20, "Eq(Mod(s0, 8), 0)"), (1, "s0 > 16")):
        with pytest.raises(RuntimeError, match=re.escape(f"expected sizes with {text} in first[s0, 4]")):
            graph(head(torch.randn(rows, 4)).tensors["first"])


def test_layouts_of_the_example_are_no_conditions() -> None:
    model, x = zoo.build("tiny-resnet")  # its convolutions have another kernel from 16 images on
    head, tail = mt.split(model, x, at="layer1.0.conv1")
    first, last = head.graph(), tail.graph()
    assert first.meta["conditions"] == []
    image = torch.randn(17, 3, 8, 8)
    assert last(*first(image).values())["output"].equal(model(image))


def test_fewer_sizes_are_symbols_where_a_graph_is_rejected() -> None:
    model, x = zoo.build("tiny-resnet")
    head = mt.split(model, x, at="layer1")[0]
    reasons: Iterator[str | None] = iter(["too many", "still too many"])
    rejected = capture_stage(head, reject=lambda _: next(reasons))
    assert rejected.shapes.describe() == "x[2, 3, 32, 32]"
    assert set(rejected.static.values()) == {"still too many"}
    reasons = iter(["too many", None])
    batch = capture_stage(head, reject=lambda _: next(reasons))
    assert batch.shapes.describe() == "x[s0, 3, 32, 32]"
    assert batch.static == dict.fromkeys(["x[1]", "x[2]", "x[3]"], "too many")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = nn.functional.scaled_dot_product_attention(y, y, y)
        output: Tensor = self.second(z.transpose(1, 2).reshape(len(x), -1, 8))
        return output


def test_fused_attention_in_a_graph_takes_other_strides() -> None:
    model, x = Attention().eval(), torch.randn(2, 2, 16, 4)
    graphs = [stage.graph() for stage in mt.split(model, x, at="first")]
    other = torch.randn(2, 2, 4, 16).transpose(2, 3)  # the kernel for x would read other memory
    for image in (x, other):
        (output,) = graphs[1](*graphs[0](image).values()).values()
        assert output.equal(model(image))


def test_what_cannot_be_a_graph_is_refused() -> None:
    writer, ids = zoo.build("tiny-writer")
    model, _ = build_language_model("llama")
    with_cache = mt.split(model, {"input_ids": torch.arange(3, 9)[None]}, at="model.layers.0")
    with pytest.raises(Unsupported, match="keeps state between runs, such as a KV cache, cannot be captured"):
        with_cache[0].graph()
    stage = mt.split(writer, ids, at="layers.1")[1]
    stage.example = None
    with pytest.raises(Unsupported, match="the example that the model was split on is not here"):
        stage.graph()


def test_stages_that_train_are_refused_with_the_reason(tmp_path: Path) -> None:
    model, x = zoo.build("tiny-vit")
    for stage in mt.split(model, x, at="blocks.1", grad=True):
        for use in (stage.graph, stage.compile, lambda stage=stage: stage.export(tmp_path / "stage.pt2")):
            with pytest.raises(Unsupported, match="a graph computes no gradient, .* split it without grad=True"):
                use()
    normalized = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).train()
    head, _ = mt.split(normalized, torch.randn(3, 4), at="1")
    with pytest.raises(Unsupported, match="in training mode writes to the buffer '1.running_mean' .* after model.eval"):
        head.graph()


def test_a_stage_that_draws_random_numbers_is_refused_with_the_operator(tmp_path: Path) -> None:
    class Noisy(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            output: Tensor = self.second(y + torch.randn_like(y))
            return output

    x = torch.randn(3, 4)
    dropout = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout()).train()
    for model, at, operator in (
        (Noisy().eval(), "first", "aten.randn_like"),
        (dropout, "0", "aten.*dropout|bernoulli"),
    ):
        head, tail = mt.split(model, x, at=at)
        for use in (tail.graph, tail.compile, lambda tail=tail: tail.export(tmp_path / "tail.pt2")):
            with pytest.raises(Unsupported, match=rf"stage 1 draws random numbers \(.*({operator}).*\), and cannot"):
                use()
        assert head.graph()(x)  # its numbers are those of the stage


def test_shapes_that_do_not_fit_each_other_are_named() -> None:
    model, x = zoo.build("tiny-resnet")
    tail = capture_stage(mt.split(model, x, at="layer1.0.conv1")[1])
    stem, conv = torch.zeros(2, 8, 32, 32), torch.zeros(3, 8, 32, 32)
    found = tail.shapes.find_mismatch([stem, conv])
    assert found == ("expected stem[s0, 8, s1, s2], layer1.0.conv1[s0, 8, s1, s2], got layer1.0.conv1[3, 8, 32, 32]")
    assert tail.shapes.find_mismatch([stem[0], conv]) == "expected 'stem' with 4 dimensions, got 3"


@pytest.mark.parametrize(("name", "identifier"), [("a.b#1", "a_b_1"), ("0", "x_0"), ("class", "x_class"), ("", "x_")])
def test_names_become_identifiers(name: str, identifier: str) -> None:
    assert to_identifier(name) == identifier


# -- compiled ----------------------------------------------------------------------------------------------------------


def split_small(at: str = "layer1.0.conv1") -> tuple[nn.Module, Tensor, Stage, Stage]:
    model, x = zoo.build("tiny-resnet")
    assert isinstance(x, Tensor)
    head, tail = mt.split(model, x, at=at)
    return model, x, head, tail


def test_compiled_stages_have_the_same_boundaries() -> None:
    model, x, head, tail = split_small()
    first, last = head.compile(backend="eager"), tail.compile(backend="eager")
    assert (first.verified, last.verified) == ("bit-equal", "bit-equal")
    for image in (x, torch.randn(3, 3, 40, 48), torch.randn(3, 3, 40, 48), x):
        expected = model(image)
        assert last(first(image)).equal(expected)
        assert tail(first(image)).equal(expected)
        assert last(head(image)).equal(expected)
        assert first(image).to_bytes() == head(image).to_bytes()
        assert last(mt.Boundary.from_bytes(first(image).to_bytes())).equal(expected)


def test_a_compiled_stage_in_the_middle_of_three() -> None:
    model, x = zoo.build("tiny-resnet")
    stages = mt.split(model, x, at=["stem", "layer1.0.conv1"])
    middle = stages[1].compile(backend="eager")
    for image in (x, torch.randn(1, 3, 48, 32), torch.randn(1, 3, 48, 32)):
        assert stages[2](middle(stages[0](image))).equal(model(image))


def test_a_compiled_stage_is_served_and_connected() -> None:
    model, x, head, tail = split_small()
    first, last = head.compile(backend="eager"), tail.compile(backend="eager")
    with (
        mt.serve(last, listen="127.0.0.1:0") as server,
        mt.connect(first, None, server.address, codec="raw") as remote,
    ):
        for image in (x, torch.randn(3, 3, 40, 48)):
            assert remote(image).equal(model(image))


def test_a_compiled_stage_raises_where_its_graph_does_not_fit() -> None:
    _, x, head, tail = split_small()
    first, last = head.compile(backend="eager", dynamic=False), tail.compile(backend="eager")
    with pytest.raises(
        mt.MicrotomeError, match=r"stage 0 does not fit: expected x\[2, 3, 32, 32\], got x\[3, 3, 32, 32\]"
    ):
        first(torch.randn(3, 3, 32, 32))
    with pytest.raises(mt.MicrotomeError, match=r"expected 'x' of torch.float32, as on the example, got torch.float64"):
        first(x.double())
    with pytest.raises(
        mt.MicrotomeError, match="expected a boundary of the cut at 'layer1.0.conv1', got one of 'stem'"
    ):
        last(mt.Boundary("stem", last.fingerprint, {}, {}))
    with pytest.raises(mt.MicrotomeError, match="expected the tensors stem, layer1.0.conv1, got stem"):
        last(mt.Boundary("layer1.0.conv1", last.fingerprint, {"stem": x}, {}))
    with pytest.raises(mt.MicrotomeError, match="the calls of a compiled stage cannot be observed"):
        first.run((x,), {}, [mt.Probe()])


def test_plain_arguments_are_constants_of_a_compiled_stage() -> None:
    class Scaled(Branching):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            output: Tensor = self.second(self.first(x) * scale)
            return output

    model, x = Scaled().eval(), torch.randn(2, 4)
    head, tail = mt.split(model, mt.Inputs(x, scale=2.0), at="first")
    first, last = head.compile(backend="eager"), tail.compile(backend="eager")
    assert last(first(x, scale=2.0)).equal(model(x, 2.0))
    with pytest.raises(mt.MicrotomeError, match=r"expected the arguments \[2.0\] of the example .*, got \[3.0\]"):
        first(x, scale=3.0)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_compiles_stages_that_are_served() -> None:
    model, x, head, tail = split_small()
    first, last = head.compile(), tail.compile()
    for stage in (first, last):
        assert stage.verified is not None
        assert re.fullmatch(r"bit-equal|the outputs differ by at most \S+, of numbers up to \S+", stage.verified)
    images = [x, torch.randn(3, 3, 40, 48), torch.randn(1, 3, 32, 32)]
    with (
        mt.serve(last, listen="127.0.0.1:0") as server,
        mt.connect(first, None, server.address, codec="raw") as remote,
    ):
        outputs = [remote(image) for image in images]
        streamed = list(remote.stream(images))
    for image, *got in zip(images, outputs, streamed, strict=True):
        for output in got:
            torch.testing.assert_close(output, model(image))


def test_stages_are_timed_as_they_are(tmp_path: Path) -> None:
    model, x, head, tail = split_small("layer1")
    compiled = head.compile(backend="eager")
    stages: dict[str, Any] = {
        "edge": {(None, "layer1"): compiled.time(repeat=3)},
        "cloud": {("layer1", None): tail.time(repeat=3)},
    }
    here = mt.profile(model, x, measure="time", repeat=3)
    plan = mt.plan(mt.cuts(model, x), edge=here, cloud=here, link="1Gbps", stages=stages)
    (candidate,) = (one for one in plan if one.at == ("layer1",))
    runs = [step.seconds for step in candidate.steps if step.what == "run"]
    assert runs == pytest.approx([stages["edge"][None, "layer1"], stages["cloud"]["layer1", None]])
    mt.split(model, x, at="layer1").save(tmp_path)
    loaded = mt.load_stage(lambda: zoo.build("tiny-resnet")[0], tmp_path, "tail")
    with pytest.raises(Unsupported, match="pass the boundary of an example as example="):
        loaded.time()
    assert loaded.time(head(x), repeat=3) > 0


def test_a_wrong_compiler_is_refused() -> None:
    def wrong(graph: fx.GraphModule, _: Any) -> Any:
        return lambda *tensors: tuple(tensor + 1 for tensor in graph(*tensors))

    _, _, _, tail = split_small()
    with pytest.raises(Unsupported, match="the compiled stage 1: expected outputs of the stage, got others that"):
        tail.compile(backend=wrong)  # type: ignore[arg-type]


def test_a_compiler_that_fails_raises() -> None:
    def failing(graph: fx.GraphModule, _: Any) -> Any:
        raise ValueError("no such kernel")

    _, _, _, tail = split_small()
    with pytest.raises(Unsupported, match="stage 1 cannot be compiled: .*no such kernel"):
        tail.compile(backend=failing)  # type: ignore[arg-type]
