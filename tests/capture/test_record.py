"""`mt.record`: the outputs of modules over many runs."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.capture.record import RecordTotals
from microtome.devices.base import Backend
from microtome.errors import BadFile, BadQuery, NoMatch, SessionError, Unsupported


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def batches(count: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2 + at % 3, 3, generator=generator) for at in range(count)]


@pytest.mark.parametrize("on_disk", [False, True])
def test_every_output_is_kept_as_it_was_made(on_disk: bool, tmp_path: Path) -> None:
    model, xs = chain(), batches()
    with torch.no_grad(), mt.record(model, ["0", "2"], to=tmp_path / "acts" if on_disk else None) as rec:
        for x in xs:
            model(x)
    assert list(rec) == ["0", "2"]
    with torch.no_grad():
        assert [torch.equal(a, model[0](x)) for a, x in zip(rec["0"], xs, strict=True)] == [True] * 5
        assert torch.equal(rec["2"].cat(), torch.cat([model(x) for x in xs]))
    assert rec["0"].shapes == [(2 + at % 3, 4) for at in range(5)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("microtome")]


def test_a_folder_is_read_back_and_appended_to(tmp_path: Path) -> None:
    model, xs = chain(), batches(4)
    for part in (xs[:2], xs[2:]):
        with mt.record(model, "2", to=tmp_path / "acts", append=True) as rec:
            for x in part:
                model(x)
    found = mt.load(tmp_path / "acts")
    whole = torch.cat([model(x).detach() for x in xs])
    assert torch.equal(found["2"].cat(), whole)
    stats = found.stats("2")
    assert (stats.count, stats.min, stats.max) == (whole.numel(), whole.min().item(), whole.max().item())
    assert stats.mean == pytest.approx(whole.double().mean().item())
    assert stats.variance == pytest.approx(whole.double().var(correction=0).item())
    assert rec.stats("2").count == stats.count


def test_a_folder_of_another_model_or_of_other_layers_is_refused(tmp_path: Path) -> None:
    record_once(chain(), "2", to=tmp_path / "acts")
    with (
        pytest.raises(BadFile, match="model"),
        mt.record(zoo.build("tiny-vit")[0], "blocks.*", to=tmp_path / "acts", append=True),
    ):
        pass
    with (
        pytest.raises(BadFile, match="layout"),
        mt.record(nn.Sequential(*chain(), nn.ReLU()), "2", to=tmp_path / "acts", append=True),
    ):
        pass
    with pytest.raises(BadFile, match="selectors"), mt.record(chain(), "0", to=tmp_path / "acts", append=True):
        pass
    with pytest.raises(BadFile, match="append"), mt.record(chain(), "2", to=tmp_path / "acts"):
        pass
    with mt.record(model := zoo.build("tiny-vit")[0], attention=True, heads=[0], to=tmp_path / "heads"):
        model(torch.rand(1, 3, 32, 32))
    with (
        pytest.raises(BadFile, match="selectors"),
        mt.record(model, attention=True, heads=[1], to=tmp_path / "heads", append=True),
    ):
        pass


def test_two_recorders_on_one_folder_are_refused(tmp_path: Path) -> None:
    model = chain()
    with mt.record(model, "2", to=tmp_path / "acts"):
        model(torch.rand(1, 3))
        with pytest.raises(BadFile, match="record"), mt.record(model, "2", to=tmp_path / "acts", append=True):
            pass


def test_a_limit_counts_objects_in_memory_and_values_in_a_folder(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    kept = []
    for folder in (None, tmp_path / "acts"):
        with mt.record(model, "", to=folder, limit=4096) as rec, torch.no_grad():
            for _ in range(300):
                model(torch.ones(1, 4))
        kept.append(300 - rec.dropped)
    # Of 16 bytes each, and of 1 KiB more in memory.
    assert kept == [4096 // (1024 + 16), 4096 // 16]


@pytest.mark.parametrize(
    ("shape", "reduced"),
    [((2, 5, 3), (2, 3)), ((2, 3, 4, 4), (2, 3)), ((2, 3, 4, 4, 4), (2, 3)), ((2, 3), (2, 3))],
)
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_positions_are_reduced_by_the_number_of_dimensions(
    reduce: Any, shape: tuple[int, ...], reduced: tuple[int, ...]
) -> None:
    model = nn.Identity()
    with mt.record(model, "", reduce=reduce) as rec:
        model(torch.ones(shape))
    assert rec[""][0].shape == reduced


@pytest.mark.parametrize("to_folder", [False, True])
def test_a_recording_of_statistics_says_that_it_has_no_tensors(tmp_path: Path, to_folder: bool) -> None:
    model = nn.Linear(4, 4)
    with mt.record(model, "", keep="stats", to=tmp_path / "acts" if to_folder else None) as rec:
        model(torch.ones(1, 4))
    why = r"none is stored, due to keep='stats' or the limit; stats\(''\) has their statistics"
    with pytest.raises(IndexError, match=f"'' has no tensor 0: {why}") as raised:
        rec[""][0]
    assert isinstance(raised.value, NoMatch)
    with pytest.raises(BadQuery, match=f"cannot concatenate the tensors of '': {why}"):
        rec[""].cat()


def test_an_index_outside_a_series_is_an_error_with_the_range() -> None:
    model = nn.Linear(4, 4)
    with mt.record(model, "") as rec:
        _ = model(torch.ones(1, 4)), model(torch.ones(1, 4))
    assert torch.equal(rec[""][-2], rec[""][0])
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"'' has no tensor {index}: expected an index from 0 to 1"):
            rec[""][index]


def test_a_name_that_was_not_recorded_is_answered_with_the_names_there_are() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer)
    with mt.record(model, "0") as rec:
        model(torch.ones(1, 4))
    assert list(rec) == ["0#0", "0#1"]
    with pytest.raises(NoMatch, match="nothing was recorded as 'logits'; there is '0#0', '0#1'"):
        rec["logits"]


def test_memory_never_grows_past_its_limit() -> None:
    model, x = chain(), torch.rand(8, 3)
    with mt.record(model, "0", limit=10_000) as rec:
        for at in range(100):
            model(x + at)
            assert rec["0"].nbytes <= 10_000
    assert len(rec["0"]) == 10_000 // (8 * 4 * 4 + 1024)  # with what a tensor takes beside its values
    assert rec.dropped == 100 - len(rec["0"])
    assert torch.equal(rec["0"][-1], model[0](x + 99).detach())
    assert rec.stats("0").count == 100 * 32  # of all that was seen


def test_the_last_few_are_kept() -> None:
    model = chain()
    with mt.record(model, "0", last=3) as rec:
        for x in batches(7):
            model(x)
    assert len(rec["0"]) == 3


def test_statistics_alone_keep_no_tensor() -> None:
    model = chain()
    with mt.record(model, "0", keep="stats", histogram=(10, -1.0, 1.0)) as rec:
        for x in batches(7):
            model(x)
    whole = torch.cat([model[0](x).detach() for x in batches(7)])
    stats = rec.stats("0")
    assert stats.count == whole.numel()
    assert stats.histogram is not None
    assert sum(stats.histogram.counts) + stats.histogram.below + stats.histogram.above == whole.numel()


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("mean", lambda out: out.mean(1)),
        ("max", lambda out: out.amax(1)),
        ("cls", lambda out: out[:, 0]),
        ("last", lambda out: out[:, -1]),
        (lambda out: out.norm(dim=-1), lambda out: out.norm(dim=-1)),
    ],
)
def test_what_is_kept_of_tokens(reduce: Any, expected: Any) -> None:
    model, x = zoo.build("tiny-vit")
    model.eval()
    with torch.no_grad(), mt.record(model, "blocks.0", reduce=reduce) as rec:
        mt.Inputs.of(x).run(model)
    kept = rec["blocks.0"][0]
    assert torch.equal(kept, expected(mt.extract(model, x, "blocks.0")["blocks.0"]))
    assert kept.untyped_storage().nbytes() == kept.nbytes


def test_the_mean_of_an_image_is_over_its_places() -> None:
    model, x = zoo.build("tiny-resnet")
    with mt.record(model, "layer1", reduce="mean") as rec:
        mt.Inputs.of(x).run(model)
    assert rec["layer1"].shapes == [(2, 8)]
    with (
        pytest.raises(Unsupported, match="'cls' expected an output of shape"),
        mt.record(model, "layer1", reduce="cls"),
    ):
        mt.Inputs.of(x).run(model)


def test_several_tensors_have_names_by_their_place() -> None:
    model, x = nn.Sequential(nn.LSTM(3, 4)), torch.rand(5, 2, 3)
    with mt.record(model, "0") as rec:
        model(x)
    assert list(rec) == ["0[0]", "0[1][0]", "0[1][1]"]


def test_calls_of_a_module_that_runs_again_have_names_of_their_own() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.layer(self.layer(x))

    model = Twice()
    with mt.record(model, "layer") as rec:
        for _ in range(3):
            model(torch.rand(1, 3))
    assert {name: len(rec[name]) for name in rec} == {"layer#0": 3, "layer#1": 3}


def test_attention_is_recorded() -> None:
    model, x = zoo.build("tiny-vit")
    model.eval()
    with mt.record(model, attention=True, layers="blocks.1.**", heads=[0], rows="cls") as rec:
        for _ in range(2):
            mt.Inputs.of(x).run(model)
    (name,) = rec
    assert rec[name].shapes == [(2, 1, 1, 17)] * 2
    assert torch.allclose(rec[name].cat().sum(-1), torch.ones(4, 1, 1))


def test_progress_is_called_after_each_run() -> None:
    told: list[RecordTotals] = []
    model = chain()
    with mt.record(model, ["0", "2"], progress=told.append) as rec:
        for x in batches(3):
            model(x)
    assert [(one.runs, one.records) for one in told] == [(1, 2), (2, 4), (3, 6)]
    assert rec.totals.nbytes == sum(rec[name].nbytes for name in rec)
    assert rec.totals.bytes_per_s > 0


def test_what_was_recorded_before_an_exception_stays(tmp_path: Path) -> None:
    model = chain()

    def runs() -> None:
        with mt.record(model, "0", to=tmp_path / "acts"):
            model(torch.rand(1, 3))
            model(torch.rand(1, 5))

    with pytest.raises(RuntimeError, match="shapes"):
        runs()
    assert len(mt.load(tmp_path / "acts")["0"]) == 1
    assert not model[0]._forward_hooks


def test_a_layer_that_never_ran_is_an_error_and_what_was_written_stays(tmp_path: Path) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.a(x)

    model = Unused()
    with pytest.raises(NoMatch, match="'b' never ran"), mt.record(model, ["a", "b"], to=tmp_path / "acts"):
        model(torch.rand(1, 3))
    assert len(mt.load(tmp_path / "acts")["a"]) == 1


def test_recording_attention_of_a_model_without_raises() -> None:
    model = chain()
    with pytest.raises(NoMatch, match="no attention found in the Sequential"), mt.record(model, attention=True):
        model(torch.rand(1, 3))
    vit, x = zoo.build("tiny-vit")
    with (
        pytest.raises(NoMatch, match="the selected layers of the ViT computed no attention; these did: 'blocks.0"),
        mt.record(vit, attention=True, layers="head"),
    ):
        mt.Inputs.of(x).run(vit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected modules to record or attention=True, and not both"),
        ({"at": "0", "attention": True}, "expected modules to record or attention=True"),
        ({"at": "0", "heads": [0]}, "layers, heads and rows select attention"),
        ({"at": "0", "limit": "much"}, "expected a number of bytes, such as 4GB or 256MiB, got 'much'"),
        ({"at": "0", "reduce": "median"}, "expected reduce to be one of 'mean'"),
        ({"at": "0", "append": True}, "append=True continues a folder"),
        ({"at": "0/relu"}, "expected modules to record, got operators"),
    ],
)
def test_invalid_options_of_record_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        mt.record(chain(), **options)


def test_a_ring_on_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadQuery, match="`last` bounds a recording in memory"):
        mt.record(chain(), "0", last=3, to=tmp_path / "acts")


def test_a_recorder_records_once() -> None:
    model = chain()
    rec = mt.record(model, "0")
    with rec:
        model(torch.rand(1, 3))
    with pytest.raises(SessionError, match="a recorder is used in one `with` block"), rec:
        pass


@pytest.mark.parametrize("reduce", [lambda out: out, lambda out: out.contiguous(), lambda out: out.view(-1)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_reduction_that_gives_back_its_input_is_copied(reduce: Any, mode: Any) -> None:
    model, x = chain(), -torch.ones(2, 3)
    with mode(), mt.record(model, "0", reduce=reduce) as rec:
        model(x)
        assert torch.equal(rec["0"][0].flatten(), model[0](x).flatten())


def test_looking_ahead_is_not_recorded() -> None:
    model = chain()
    with mt.record(model, "0") as rec:
        mt.extract(model, torch.rand(2, 3), "2")
        mt.profile(model, "2x3")
    assert (rec.totals.runs, rec.totals.records) == (0, 1)


def test_what_is_written_can_be_read_meanwhile(tmp_path: Path) -> None:
    model = chain()
    with mt.record(model, "0", to=tmp_path / "acts") as rec:
        for at, x in enumerate(batches(3)):
            model(x)
            assert len(rec["0"]) == at + 1
    assert len(rec["0"]) == 3
    assert "nope" not in rec


def test_a_recorder_that_could_not_be_made_leaves_the_folder_free(tmp_path: Path) -> None:
    model = chain()
    with pytest.raises(NoMatch, match="nope"):
        mt.record(model, attention=True, layers="nope", to=tmp_path / "acts")
    with mt.record(model, "0", to=tmp_path / "acts"):
        model(torch.rand(1, 3))


def test_a_recording_of_nothing_leaves_no_folder(tmp_path: Path) -> None:
    model = chain()
    for folder, is_left in ((tmp_path / "new", False), (tmp_path / "old", True)):
        if is_left:
            folder.mkdir()
        with pytest.raises(RuntimeError, match="mat1 and mat2"), mt.record(model, "0", to=folder):
            model(torch.rand(1, 99))
        assert folder.exists() == is_left
        with mt.record(model, "0", to=folder):
            model(torch.rand(1, 3))
        assert len(mt.load(folder)["0"]) == 1


def test_a_file_is_not_a_folder_to_record_to(tmp_path: Path) -> None:
    (tmp_path / "net.py").touch()
    with pytest.raises(
        BadFile, match=r"expected a folder to record to, got the file '.*net\.py': record to another name"
    ):
        mt.record(chain(), "0", to=tmp_path / "net.py").__enter__()


def test_appending_with_another_reduction_is_refused(tmp_path: Path) -> None:
    model = chain()
    with mt.record(model, lambda path, _: path == "0", to=tmp_path / "acts"):
        model(torch.rand(1, 3))
    with mt.record(model, lambda path, _: path == "0", to=tmp_path / "acts", append=True):
        model(torch.rand(1, 3))
    again = mt.record(model, lambda path, _: path == "0", to=tmp_path / "acts", append=True, reduce="mean")
    with pytest.raises(BadFile, match="reduce"), again:
        pass


def test_a_reduction_that_keeps_what_it_gives_is_copied() -> None:
    model, sums = chain(), torch.zeros(4)
    with torch.no_grad(), mt.record(model, "0", reduce=lambda out: sums.add_(out.mean(0))) as rec:
        for x in batches(3):
            model(x)
    assert not torch.equal(rec["0"][0], rec["0"][1])


def test_a_recorder_that_is_not_used_holds_nothing(tmp_path: Path) -> None:
    mt.record(chain(), "0", to=tmp_path / "acts")
    assert not (tmp_path / "acts").exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("microtome")]


def test_what_was_recorded_goes_with_the_recorder() -> None:
    gc.disable()
    try:
        model = chain()
        with mt.record(model, "0") as rec:
            model(torch.rand(1, 3))
        gone = weakref.ref(rec["0"][0])
        del rec
        assert gone() is None
    finally:
        gc.enable()


def test_a_recording_without_records_is_replaced(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="reduce='cls'"):
        record_once(chain(), "0", to=tmp_path / "acts", reduce="cls")
    record_once(chain(), "0", to=tmp_path / "acts", reduce="mean")
    assert len(mt.load(tmp_path / "acts")["0"]) == 1


def record_once(model: nn.Module, *selectors: str, **options: Any) -> None:
    with mt.record(model, list(selectors), **options):
        model(torch.rand(1, 3))


def test_tensors_of_other_kinds_are_refused() -> None:
    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_sparse()

    with pytest.raises(Unsupported, match="'0' expected a dense tensor, got a sparse, nested or quantized one"):
        record_once(nn.Sequential(Sparse()), "0")


@pytest.mark.gpu
def test_from_a_gpu_the_values_are_those_of_the_moment() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(inplace=True), nn.Linear(512, 512)).cuda()
    xs = [torch.randn(256, 512, device="cuda") for _ in range(20)]
    with torch.no_grad(), mt.record(model, ["0", "2"]) as rec:
        for x in xs:
            model(x)
    with torch.no_grad():
        expected = [model[0](x).cpu() for x in xs]
    assert all(torch.equal(a, b) for a, b in zip(rec["0"], expected, strict=True))
    assert rec["0"][0].device.type == "cpu"
    assert not rec["0"][0].is_pinned()


@pytest.mark.gpu
def test_extracted_values_can_be_moved_as_they_are_captured() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)).cuda()
    feats = mt.extract(model, torch.rand(2, 4, device="cuda"), ["0", "1"], device="cpu", stop=False)
    assert feats["0"].device.type == "cpu"
    assert torch.equal(feats["0"].relu(), feats["1"])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_behind_every_kernel_of_a_gpu(backend: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    model = nn.Sequential(Attends()).cuda().bfloat16().eval()
    x = torch.randn(2, 32, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), sdpa_kernel(getattr(SDPBackend, backend)):
        weights = mt.attention(model, x).weights[:, 0]
        output = model(x)
    v = mt.extract(model, x, "0.qkv")["0.qkv"].unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)[2]
    assert torch.allclose(weights.float() @ v.float(), output.float(), atol=0.03)
    assert torch.allclose(weights.float().sum(-1), torch.ones(2, 4, 32, device="cuda"), atol=0.02)
    assert not weights.triu(1).any()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.again = self.layer

    def forward(self, x: Tensor) -> Any:
        return self.again(self.layer(x))


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_name_that_leaves_the_call_open_is_an_error_that_lists_the_calls(on_disk: bool, tmp_path: Path) -> None:
    model, x = Twice(), torch.rand(2, 3)
    with mt.record(model, "layer", to=tmp_path / "acts" if on_disk else None) as rec:
        model(x)
    readers: list[Any] = [rec, mt.load(tmp_path / "acts")] if on_disk else [rec]
    for found in readers:
        assert list(found) == ["layer#0", "layer#1"]
        assert len(found) == 2
        first, second = found["layer#0"][0], found["layer#1"][0]
        assert torch.equal(first, model.layer(x).detach())
        assert torch.equal(second, model(x).detach())
        assert torch.equal(found["again#1"][0], second)
        assert found.stats("layer#1").max == second.max().item()
        assert found.stats("again#0").max == first.max().item()
        assert "layer" in found
        assert "layer#2" not in found
        for ask in (found.__getitem__, found.stats):
            with pytest.raises(NoMatch, match="'layer' ran 2 times: say which of 'layer#0', 'layer#1'"):
                ask("layer")
            with pytest.raises(NoMatch, match="nope"):
                ask("nope")
            with pytest.raises(BadQuery, match="expected a name such as .* got 5"):
                ask(5)


def test_names_do_not_depend_on_how_many_tensors_there_are() -> None:
    class Maybe(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, x if len(x) > 1 else None

    model = nn.Sequential(Maybe())
    with mt.record(model, "0") as rec:
        model(torch.rand(1, 3))
        assert (list(rec), len(rec["0"])) == (["0[0]"], 1)
        model(torch.rand(2, 3))
    assert {name: len(rec[name]) for name in rec} == {"0[0]": 2, "0[1]": 1}
    with pytest.raises(NoMatch, match=r"'0' is the name of 2: say which of '0\[0\]', '0\[1\]'"):
        rec["0"]


def test_a_recorder_that_was_not_entered_says_so() -> None:
    model = chain()
    rec = mt.record(model, "0")
    model(torch.rand(2, 3))
    message = r"the recorder was not entered: use `with mt.record\(…\) as rec:`"
    for get in (rec.__getitem__, rec.stats):
        with pytest.raises(SessionError, match=message):
            get("0")
    assert repr(rec) == "<ActivationRecorder of Sequential, not entered: use it in a `with` block>"


def test_a_block_in_which_the_model_never_ran_is_an_error(tmp_path: Path) -> None:
    model, alone = chain(), nn.ReLU()
    with (
        pytest.raises(NoMatch, match="nothing was recorded: the ReLU never ran in this block"),
        mt.record(alone, "", to=tmp_path / "acts"),
    ):
        alone.forward(torch.rand(1, 3))
    with pytest.raises(NoMatch, match="nothing was recorded"), mt.record(model, attention=True):
        chain()(torch.rand(1, 3))
    with pytest.raises(NoMatch, match="nothing was recorded"), mt.record(model, "0"):
        mt.profile(model, "2x3")  # which runs it without values
    with pytest.raises(ValueError, match="mine"), mt.record(model, "0"):
        raise ValueError("mine")
    with mt.record(model, "0"), pytest.raises(RuntimeError, match="shapes"):
        model(torch.rand(1, 5))


def test_a_layer_that_gives_no_tensor_is_an_error() -> None:
    class Gives(nn.Module):
        def __init__(self, value: Any) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: Any) -> Any:
            return self.value

    for value in (3, "x", {torch.ones(1)}):
        model = nn.Sequential(nn.Identity(), Gives(value))
        with pytest.raises(NoMatch, match="'1' returned no tensor: expected one in a tuple"), mt.record(model, "1"):
            model(torch.rand(1))
        with mt.record(model, "*") as rec:
            model(torch.rand(1))
        assert list(rec) == ["0"]


def test_an_output_that_holds_itself_is_refused_with_its_name() -> None:
    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Any:
            loop: list[Any] = [x]
            loop.append(loop)
            return loop

    model = nn.Sequential(Loop())
    with pytest.raises(Unsupported, match="a list contains itself") as caught, mt.record(model, "0"):
        model(torch.rand(1))
    assert caught.value.__notes__ == ["in the output of '0'"]
    with pytest.raises(Unsupported, match="a list contains itself") as caught:
        mt.extract(model, torch.rand(1), "0")
    assert "in the output of '0'" in caught.value.__notes__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last": 1.5}, "expected `last` to be a number of tensors of at least 1, got 1.5"),
        ({"last": 0}, "expected `last` .* got 0"),
        ({"last": "3"}, "expected `last` .* got '3'"),
        ({"histogram": (2, 1)}, r"expected a histogram as \(bins, low, high\), such as .* got \(2, 1\)"),
        ({"histogram": 5}, "expected a histogram .* got 5"),
        ({"histogram": ("a", 0, 1)}, "expected a histogram .* got"),
        ({"to": 3}, "expected the path of a folder as `to`, got 3"),
        ({"progress": True}, "expected progress to be a function of the RecordTotals, got True"),
    ],
)
def test_invalid_numbers_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        mt.record(chain(), "0", **options)


def test_a_model_that_catches_the_error_of_a_module_is_recorded() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("broken")

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tried, self.unused = Raises(), nn.ReLU()

        def forward(self, x: Tensor) -> Any:
            try:
                return self.tried(x)
            except ValueError:
                return x

    model = Catches()
    with pytest.raises(NoMatch, match="'unused' never ran"), mt.record(model, "unused"):
        model(torch.rand(1))


def test_while_a_cuda_graph_is_captured_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain()
    monkeypatch.setattr(Backend, "is_capturing", lambda _: True)
    with pytest.raises(Unsupported, match="'0' ran during the capture of a CUDA graph"), mt.record(model, "0"):
        model(torch.rand(1, 3))


@pytest.mark.gpu
def test_a_capture_of_a_cuda_graph_is_refused_and_ends_well() -> None:
    model, x = chain().cuda(), torch.rand(1, 3, device="cuda")
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(Unsupported, match="CUDA graph"), mt.record(model, "0"), torch.cuda.graph(graph):
            model(x)
        with mt.record(model, "0") as rec:
            model(x)
    assert len(rec["0"]) == 1


def test_dropped_records_of_earlier_blocks_are_not_counted(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4)
    with mt.record(model, "0", to=tmp_path / "a", limit=16) as first:  # one tensor of four floats
        for _ in range(3):
            model(x)
    with mt.record(model, "0", to=tmp_path / "a", append=True, keep="stats") as second:
        model(x)
    assert (first.dropped, second.dropped) == (2, 0)
    assert mt.load(tmp_path / "a").dropped == 2
