"""Profiles of nets with closed-form counts."""

from __future__ import annotations

import csv
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadFile, BadInputs, BadQuery, NoMatch, NotInstalled, Unsupported
from microtome.results.metrics import METRICS, Amounts
from microtome.results.rows import AMOUNTS


class Net(nn.Module):
    """A layer that runs twice, a tied weight, an operator between modules, a module that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.spare = nn.Sequential(nn.Linear(4, 2))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * self.scale
        return self.head(self.block(self.block(x)))


IDS = torch.zeros(3, dtype=torch.int64)


@pytest.fixture
def p() -> mt.Profile:
    return mt.profile(Net(), IDS)


def test_tied_and_shared_parameters_count_once_and_show_where_used(p: mt.Profile) -> None:
    # Embedding 28, the block's layer 20, the spare one 10; the head has the embedding's.
    assert p.total.params == 58 == sum(parameter.numel() for parameter in Net().parameters())
    assert (p["tokens"].params, p["head"].params, p["head"].shared_params) == (28, 0, 28)
    assert (p["block.0#0"].params, p["block.0#1"].params, p["block.0#1"].shared_params) == (20, 0, 20)
    assert (p["block#1"].params, p["block#1"].shared_params) == (0, 20)
    assert p.total.shared_params == 0  # what is used in the whole is counted in it


class SharedTwice(nn.Module):
    """Runs a layer twice, and adds a bias of its own that another module holds, too."""

    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x)) + self.bias


def test_own_rows_count_shared_parameters_once(p: mt.Profile) -> None:
    # What the root uses is counted in it, though head and block#1 use parameters of other calls.
    assert [row.shared_params for row in p.rows(granularity=2) if row.type == "Net (own)"] == [0]
    first = nn.Linear(4, 4)
    q = mt.profile(nn.Sequential(first, SharedTwice(first.bias), nn.Identity()), "1x4")
    # The 4 of the tied bias; the second call of the layer shares 20 with the first, which are counted inside.
    assert [row.shared_params for row in q.rows(granularity=1) if row.type == "SharedTwice (own)"] == [4]


def test_parameters_of_a_module_that_never_ran_are_those_of_the_call_above(p: mt.Profile) -> None:
    assert p.total.own.params == 10
    assert p.coverage.never_ran == ("spare",)
    assert p.total.buffer_bytes == 16


def test_frozen_parameters_are_not_trainable() -> None:
    net = Net()
    net.head.weight.requires_grad_(False)
    assert mt.profile(net, IDS).total.trainable_params == 30
    assert mt.profile(net.half(), IDS).total.param_bytes == 2 * 58


def test_macs_flops_and_madds_of_a_call(p: mt.Profile) -> None:
    # 3 rows of 4 by a 4 x 4 matrix: 12 sums of 4 products, 12 biases.
    row = p["block.0#1"]
    assert (row.macs, row.flops, row.madds) == (48, 96 + 12, 96 - 12 + 12)
    # Twice, with 12 ReLUs each, the scale, and the head's 21 sums of 4.
    assert p.total.macs == 2 * 48 + 84
    assert p.total.flops == 2 * (108 + 12) + 12 + 168


def test_shapes_dtypes_types_and_bytes_of_a_call(p: mt.Profile) -> None:
    row = p["block#1"]
    assert (row.type, row.depth, row.height, row.parent) == ("Sequential", 1, 2, "")
    assert [(t.shape, t.dtype) for t in (*row.inputs, *row.outputs)] == [((3, 4), "float32")] * 2
    assert row.output_bytes == 48
    # The product reads 12 + 16 + 4 floats and writes 12; the ReLU reads and writes 12.
    assert (row.read_bytes, row.write_bytes) == (4 * (32 + 12), 4 * (12 + 12))
    assert row.intensity == pytest.approx((108 + 12) / (4 * 68))


def test_the_root_is_the_total_and_glue_is_its_own(p: mt.Profile) -> None:
    assert p.total is p[""]
    assert p.total.own.flops == 12  # the scale
    assert [(op.name, op.runs) for op in p.total.ops] == [("aten.mul.Tensor", 1)]


def test_peak_is_the_most_that_lives_at_once() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = x + 1  # x, a
            b = a + 1  # x, a, b
            del a
            return b + 1  # x, b, the output

    with torch.no_grad():
        p = mt.profile(Wide(), torch.rand(1000))
        assert p.total.peak_bytes == 3 * 4000
        assert mt.profile(nn.Sequential(nn.Linear(10, 10, bias=False)), "5x10").total.peak_bytes == 4 * (50 + 100 + 50)
        inplace = mt.profile(nn.Sequential(nn.ReLU(inplace=True), nn.ReLU(inplace=True)), "1000")
        assert inplace.total.peak_bytes == 4000
        assert mt.profile(nn.Identity(), "1000").total.peak_bytes == 4000


def test_the_backward_and_the_bytes_saved_for_it() -> None:
    # 6 x 5 by 5 x 4, ReLU, by 4 x 3. Backward: the second layer's input and weight 72 each, the first's weight 120.
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    p = mt.profile(model, "6x5", backward=True)
    assert [p[str(at)].backward_macs for at in range(3)] == [120, 0, 144]
    assert p.total.backward_macs == 264
    # Kept: what ReLU gives, which it and the second layer read. The input was there before.
    assert [p[str(at)].saved_bytes for at in range(3)] == [0, 6 * 4 * 4, 0]
    forward = mt.profile(model, "6x5")
    assert (forward.total.backward_flops, forward.total.saved_bytes) == (None, None)


def test_saved_bytes_are_those_of_the_call_that_computed_them() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.GELU())
    p = mt.profile(model, "4x3x16x16", backward=True)
    # The GELU saves its input, 4 x 3 x 16 x 16 floats, which the batch norm computed. That saves the model's input,
    # which is not counted, and the mean and the deviation of 3 channels.
    assert [row.saved_bytes for row in p] == [12288 + 24, 12288 + 24, 0, 0]
    description = METRICS["saved_bytes"].description
    assert "at the call that computed them" in description
    assert "inputs and weights of the model are not counted" in description


def test_checkpointing_computes_again_and_keeps_less() -> None:
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
            self.again = again

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layers, x, use_reentrant=False) if self.again else self.layers(x)

    x = torch.rand(4, 8, requires_grad=True)
    plain: Any = mt.profile(Block(False), x, backward=True).total
    again: Any = mt.profile(Block(True), x, backward=True).total
    assert again.macs == plain.macs
    assert plain.backward_macs < again.backward_macs <= plain.backward_macs + plain.macs
    assert again.saved_bytes < plain.saved_bytes


class Attends(nn.Module):
    """Attention whose checkpoint saves its input alone."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.qkv, self.again = nn.Linear(16, 48), again

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Any:
        from torch.utils.checkpoint import checkpoint

        x = x * 1.0
        return (checkpoint(self.attend, x, use_reentrant=False) if self.again else self.attend(x)).relu()


@pytest.mark.parametrize("fake", [None, True, False])
def test_a_checkpoint_of_attention_saves_what_autograd_saves(fake: bool | None) -> None:
    x, model = torch.rand(8, 32, 16, requires_grad=True), Attends(again=True)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    p = mt.profile(model, x, backward=True, fake=fake)
    assert p.total.saved_bytes == sum(saved.values())
    plain = mt.profile(Attends(again=False), x, backward=True, fake=fake)
    assert (plain.total.saved_bytes or 0) > 2 * sum(saved.values())
    assert p.peak_bytes <= plain.peak_bytes  # while it computes again, the tensors of the first time are gone


@pytest.mark.parametrize("fake", [None, False])
def test_of_a_shared_module_only_the_calls_in_a_checkpoint_are_computed_again(fake: bool | None) -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self, *again: bool) -> None:
            super().__init__()
            self.inner, self.again = Attends(again=False), again

        def forward(self, x: Tensor) -> Any:
            for again in self.again:
                x = checkpoint(self.inner, x * 1.0, use_reentrant=False) if again else self.inner(x * 1.0)
            return x

    def saved(*again: bool) -> int:
        x = torch.rand(8, 32, 16, requires_grad=True)
        return mt.profile(Twice(*again), x, backward=True, fake=fake).total.saved_bytes or 0

    assert saved(True, True) < saved(True, False) == saved(False, True) < saved(False, False)


def test_a_network_in_training_counts_its_statistics_and_stays_in_training() -> None:
    model, x = zoo.build("tiny-resnet")
    evaluated: Any = mt.profile(model, x).total
    trained: Any = mt.profile(model.train(), x).total
    assert trained.macs == evaluated.macs
    assert trained.flops > evaluated.flops
    assert all(module.training for module in model.modules())


def test_large_counts_do_not_overflow() -> None:
    with torch.device("meta"):
        huge = nn.Linear(10**6, 10**6, bias=False)
    total = mt.profile(huge, torch.empty(10**6, 10**6, device="meta")).total
    assert (total.macs, total.params, total.param_bytes) == (10**18, 10**12, 4 * 10**12)
    assert total.flops == 2 * 10**18


def test_a_module_in_another_thread_is_refused() -> None:
    class Threaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(self.linear, x).result()

    with pytest.raises(Unsupported, match="'linear' runs in another thread than the model: its operators cannot be"):
        mt.profile(Threaded(), "2x4")


def test_transforms_of_functions_are_refused() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return torch.vmap(self.linear)(torch.vmap(torch.sin)(x))

    with pytest.raises(Unsupported, match="a module runs inside a transform of torch.func .vmap, grad, jvp."):
        mt.profile(Mapped(), "2x4")


# -- questions ---------------------------------------------------------------------------------------------------------


def test_rows_by_address_by_glob_and_without_a_match(p: mt.Profile) -> None:
    assert p["block.1#1"].type == "ReLU"
    assert [row.address for row in p["block.*"]] == ["block.0#0", "block.1#0", "block.0#1", "block.1#1"]
    with pytest.raises(NoMatch, match="'block.0' ran 2 times: say which of 'block.0#0', 'block.0#1'"):
        p["block.0"]
    with pytest.raises(NoMatch, match="no module at path 'blok'. Did you mean 'block#0' or 'block#1'"):
        p["blok"]
    with pytest.raises(NoMatch, match="no module at path 'blok.*'"):
        p["blok.*"]


def test_rows_by_depth_and_by_granularity(p: mt.Profile) -> None:
    assert [row.address for row in p.rows()] == [row.address for row in p]
    assert [row.address for row in p.rows(depth=0)] == [""]
    by_depth = [(row.address, row.type) for row in p.rows(depth=1)]
    assert by_depth == [
        *[("", "Net (own)"), ("tokens", "Embedding"), ("block#0", "Sequential")],
        *[("block#1", "Sequential"), ("head", "Linear")],
    ]
    leaves = [row.address for row in p.rows(granularity=1)]
    assert leaves == ["", "tokens", "block.0#0", "block.1#0", "block.0#1", "block.1#1", "head"]
    assert [row.address for row in p.rows(granularity=2)] == ["", "tokens", "block#0", "block#1", "head"]
    assert [row.address for row in p.rows(granularity=3)] == [""]


def test_invalid_queries_raise(p: mt.Profile) -> None:
    with pytest.raises(BadQuery, match="expected depth or granularity, got both"):
        p.rows(depth=1, granularity=1)
    with pytest.raises(BadQuery, match="expected granularity of 1 or more, got 0"):
        p.rows(granularity=0)
    with pytest.raises(BadQuery, match="no metric 'speed' to order by: expected one of params, "):
        p.top(3, by="speed")
    with pytest.raises(NoMatch, match="expected a convention of 'microtome'"):
        mt.profile(Net(), IDS, convention="thop")
    with pytest.raises(BadQuery, match="expected n of 1 or more, got -1"):
        p.top(-1)
    with pytest.raises(BadInputs, match="expected fake to be True, False or None, got 'meta'"):
        mt.profile(Net(), IDS, fake="meta")  # type: ignore[call-overload]


def test_the_top_by_an_unmeasured_quantity_names_the_option() -> None:
    p = mt.profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "2x4")
    unknown = [name for name in AMOUNTS if all(getattr(row.own, name) is None for row in p.calls)]
    assert {"time_s", "device_s", "energy_j", "backward_flops", "saved_bytes"} <= {*unknown}
    for name in unknown:
        with pytest.raises(BadQuery, match=f"no call has a value of '{name}' to order by: add [a-z]+="):
            p.top(by=name)
    for name in {*AMOUNTS} - {*unknown}:
        assert all(getattr(row.own, name) is not None for row in p.top(by=name))
    with pytest.raises(BadQuery, match=r"'time_s' to order by: add measure=\[\"time\"\]$"):
        p.top(by="time_s")


def test_groups_by_type_and_by_operator(p: mt.Profile) -> None:
    types = p.by_type()
    assert list(types) == ["Linear", "ReLU", "Net", "Embedding", "Sequential"]
    assert (types["Linear"].runs, types["Linear"].macs, types["Linear"].params) == (3, 180, 20)
    ops = p.by_op()
    assert (ops["aten.addmm.default"].runs, ops["aten.addmm.default"].macs) == (2, 96)


def test_the_costliest_calls_are_those_that_cost_it_themselves(p: mt.Profile) -> None:
    assert [row.address for row in p.top(2, by="macs")] == ["head", "block.0#0"]
    assert [row.address for row in p.top(1, by="params")] == ["tokens"]


@pytest.mark.parametrize(
    ("by", "shown"),
    [("macs", "own MACs; "), ("saved_bytes", "own saved; "), ("peak_bytes", " peak memory; ")],
)
def test_the_costliest_calls_are_shown_with_what_orders_them(by: str, shown: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    top = mt.profile(model, torch.ones(3, 4), backward=True).top(2, by=by)
    first, second = repr(top)[1:-1].split(">, <")
    assert shown in first
    assert shown in second
    assert top == tuple(top)


def test_the_tree_holds_every_row_once(p: mt.Profile) -> None:
    def walk(tree: dict[str, Any]) -> list[str]:
        return [tree["row"].address, *(address for child in tree["children"] for address in walk(child))]

    assert walk(p.tree) == [row.address for row in p]
    assert [row.address for row in p.children(p["block#1"])] == ["block.0#1", "block.1#1"]


# -- files -------------------------------------------------------------------------------------------------------------


def test_json_round_trip(tmp_path: Path) -> None:
    p = mt.profile(*zoo.build("tiny-decoder"), backward=True)
    assert p.to_json(tmp_path / "p.json") == str(tmp_path / "p.json")
    assert mt.load(tmp_path / "p.json") == p
    data = json.loads(p.to_json())
    assert (data["kind"], data["schema"], data["coverage"]["fraction"]) == ("profile", 2, 1.0)
    assert {"param_bytes", "read_bytes", "peak_bytes", "saved_bytes", "macs"} <= data["calls"][0].keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no result of microtome: expected a 'kind' of profile or .*, got None"),
        ('{"kind": "profile", "schema": 99}', "expected version 2 of a profile, got 99"),
        ('{"kind": "profile", "schema": 2}', "p.json' is corrupt: KeyError: 'calls'"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(BadFile, match=message):
        mt.load(file)


def test_a_profile_whose_calls_lie_inside_each_other_is_refused(tmp_path: Path) -> None:
    data = json.loads(mt.profile(*zoo.build("tiny-resnet")).to_json())
    data["calls"][0]["parent"] = data["calls"][1]["address"]
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(BadFile, match="expected the call 'stem' before '', which is inside it"):
        mt.load(tmp_path / "p.json")


def test_csv_and_pandas_have_a_line_for_each_call(p: mt.Profile, tmp_path: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(p.to_csv())))
    assert [line["address"] for line in lines] == [row.address for row in p]
    assert [int(line["macs"]) for line in lines] == [row.macs for row in p]
    frame = p.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert frame["own_flops"].sum() == p.total.flops
    assert frame["read_bytes"].iloc[0] == p.total.read_bytes


def test_a_profile_changes_nothing() -> None:
    model, inputs = zoo.build("tiny-vit")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    mt.profile(model, inputs, backward=True, convention="ptflops")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_failing_forward_names_the_call_and_those_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(5, 2))
    with pytest.raises(RuntimeError) as raised:
        mt.profile(model, torch.ones(3, 4))
    ran_on = "The model ran on Inputs(3x4:float32)."
    assert raised.value.__notes__ == ["in the call '2' (Linear)", "layers that ran before: 0, 1", ran_on]


def test_amounts_are_all_that_adds_up() -> None:
    assert set(AMOUNTS) == set(Amounts.__dataclass_fields__)


def test_to_pandas_without_pandas_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NotInstalled, match=r"pandas is not installed: pip install 'microtome\[pandas\]'"):
        mt.profile(nn.Linear(2, 2), "1x2").to_pandas()
