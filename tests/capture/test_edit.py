"""`mt.edit`: replace outputs and arguments of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import Inputs, zoo
from microtome.errors import BadQuery, NoMatch, Unsupported


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


def bias(model: nn.Sequential) -> Tensor:
    found = model[2].bias
    assert isinstance(found, Tensor)
    return found


X = torch.ones(2, 3)


def test_outputs_are_changed_and_only_inside_the_block() -> None:
    model = chain()
    before = model(X)
    with mt.edit(model, {"2": lambda out: out * 0 + 7}):
        assert torch.equal(model(X), torch.full((2, 2), 7.0))
    assert torch.equal(model(X), before)


def test_ready_made_edits() -> None:
    model = chain()
    plain = model(X)
    with mt.edit(model, {"2": mt.scale(0.5)}):
        assert torch.equal(model(X), plain * 0.5)
    with mt.edit(model, {"2": mt.zero()}):
        assert torch.equal(model(X), torch.zeros(2, 2))
    with mt.edit(model, {"2": mt.noise(0.1, seed=3)}):
        state = torch.get_rng_state()
        once = model(X)
        assert torch.equal(torch.get_rng_state(), state)
    assert 0 < (once - plain).abs().max() < 1
    with mt.edit(model, {"2": mt.noise(0.1, seed=3)}):
        assert torch.equal(model(X), once)


def test_inputs_are_changed_as_a_whole() -> None:
    model = chain()
    with mt.edit(model, inputs={"2": lambda given: mt.Inputs(given.args[0] * 0)}):
        assert torch.equal(model(X), bias(model).expand(2, 2))
    with mt.edit(model, inputs={"2": mt.zero()}):
        assert torch.equal(model(X), bias(model).expand(2, 2))


def test_one_call_of_several_is_changed() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add = nn.Identity()

        def forward(self, x: Tensor) -> Any:
            return self.add(x), self.add(x)

    model = Twice()
    for address, expected in (("add#0", [0, 1]), ("add#1", [1, 0]), ("add", [0, 0])):
        with mt.edit(model, {address: mt.zero()}):
            assert [int(out) for out in model(torch.ones(()))] == expected


def test_a_patch_from_another_input_gives_that_inputs_answer() -> None:
    model, x = zoo.build("tiny-vit")
    model.eval()
    other = mt.Inputs(torch.zeros_like(mt.Inputs.of(x).args[0]))
    paths = [path for path, module in model.named_children() if not isinstance(module, nn.ModuleList)]
    feats = mt.extract(model, other, paths[-1], stop=False)
    with mt.edit(model, {paths[-1]: mt.patch_from(feats)}), torch.no_grad():
        assert torch.equal(mt.Inputs.of(x).run(model), feats.output)


def test_rows_of_an_output_are_patched() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    feats = mt.extract(model, torch.zeros(2, 3), "0")
    with mt.edit(model, {"0": mt.patch_from(feats, rows=0)}), torch.no_grad():
        out = model(X)
    assert torch.equal(out[0], feats["0"][0])
    assert torch.equal(out[1], model(X)[1])


def test_a_capture_sees_the_edited_value_in_either_order() -> None:
    model = chain()
    with mt.edit(model, {"0": mt.zero()}):
        assert not mt.extract(model, X, "0")["0"].any()
    with mt.record(model, "0") as rec, mt.edit(model, {"0": mt.zero()}):
        model(X)
    assert not rec["0"][0].any()


def test_edits_are_undone_after_an_exception() -> None:
    model = chain()
    before = model(X)

    def breaks(out: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), mt.edit(model, {"0": breaks}):
        model(X)
    assert torch.equal(model(X), before)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, BadQuery, "expected at least one edit, got none"),
        ("0", BadQuery, "expected edits as a dict, such as .*, got '0'"),
        ({"0": mt.scale}, BadQuery, "expected an edit, got the function that makes one"),
        ({"0": 3}, BadQuery, "expected an edit as a function of the value, or such as mt.scale"),
        ({"9": mt.zero()}, NoMatch, "no module matches the path '9'"),
    ],
)
def test_edits_that_cannot_be(changes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), mt.edit(chain(), changes):
        pass


def test_an_edit_that_returns_no_tensor_raises() -> None:
    model = chain()
    message = "expected the edit of '0' to return tensors, got a ndarray without any: torch.as_tensor converts"
    with mt.edit(model, {"0": lambda out: out.detach().numpy()}), pytest.raises(Unsupported, match=message):
        model(torch.rand(2, 3))
    changed = {"0": lambda inputs: mt.Inputs(inputs.args[0].numpy())}
    message = "expected the edit of the inputs of '0' to return tensors, got an Inputs without any"
    with mt.edit(model, inputs=changed), pytest.raises(Unsupported, match=message):
        model(torch.rand(2, 3))


def test_an_edit_that_returns_none_raises() -> None:
    model = chain()
    with (
        mt.edit(model, {"0": lambda out: None}),
        pytest.raises(Unsupported, match="expected the edit of '0' to return a Tensor, got None: return the output"),
    ):
        model(X)
    with (
        mt.edit(model, inputs={"0": lambda given: given.args}),
        pytest.raises(
            Unsupported,
            match="expected the edit of the inputs of '0' to return an Inputs, got tuple: .*return mt.Inputs",
        ),
    ):
        model(X)
    with (
        mt.edit(model, inputs={"0": lambda given: None}),
        pytest.raises(
            Unsupported, match=r"inputs of '0' to return an Inputs, got None: its tensors are in inputs\.args"
        ),
    ):
        model(X)


def test_an_edit_that_indexes_the_inputs_is_told_where_their_tensors_are() -> None:
    model = chain()
    edit: Any = {"0": lambda given: given[0]}
    with mt.edit(model, inputs=edit), pytest.raises(TypeError, match="not subscriptable") as caught:
        model(X)
    assert any("receives an Inputs: its tensors are in inputs.args" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"outputs": {"0": lambda out: out[:, :2]}}, "the edit of '0' changed 2x4:float32 to 2x2:float32"),
        ({"outputs": {"0": lambda out: out.double()}}, "the edit of '0' changed 2x4:float32 to 2x4:float64"),
        ({"inputs": {"2": lambda given: Inputs()}}, "the edit of the inputs of '2' changed 2x4:float32 to nothing"),
    ],
)
def test_an_error_after_an_edit_names_the_shapes_that_it_changed(changes: Any, note: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with mt.edit(model, **changes):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            model(torch.ones(2, 3))
        assert caught.value.__notes__ == ["in the call '2' (Linear)", note]
    with mt.edit(model, {"0": mt.scale(2.0)}), pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 9))
    assert caught.value.__notes__ == ["in the call '0' (Linear)"]


def test_a_session_of_edits_lists_them() -> None:
    assert repr(mt.edit(chain(), {"0": mt.scale(0.5)})) == "<edits of Sequential: '0': scale(0.5)>"


def test_arguments_are_patched_from_an_earlier_look() -> None:
    model = chain()
    feats = mt.extract(model, torch.zeros(2, 3), "2", inputs=True)
    with mt.edit(model, inputs={"2": mt.patch_from(feats)}), torch.no_grad():
        assert torch.equal(model(X), feats["2"])


def test_a_glob_with_an_index_is_that_call_of_each() -> None:
    model = chain()
    with mt.edit(model, {"*#0": mt.zero()}):
        assert not model(X).any()
    with (
        pytest.raises(NoMatch, match=r"the edit of '\*#1' was not applied: '2' ran once"),
        mt.edit(model, {"*#1": mt.zero()}),
    ):
        assert model(X).any()


def test_seeded_noise_is_the_same_in_every_run() -> None:
    noise = mt.noise(0.1, seed=0)
    model = chain()
    runs = []
    for _ in range(2):
        with mt.edit(model, {"*": noise}):
            runs += [model(X), model(X)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    with mt.edit(model, {"0": noise}):
        assert mt.extract(model, X, "0").stopped


def test_a_patch_leaves_what_was_captured_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with torch.no_grad():
        feats = mt.extract(model, X, "0")
        before = feats["0"].clone()
        with mt.edit(model, {"0": mt.patch_from(feats)}):
            model(X)
    assert torch.equal(feats["0"], before)


def test_noise_differs_between_the_tensors_of_a_call() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 0, x * 0

    model = nn.Sequential(Two())
    with mt.edit(model, {"0": mt.noise(1.0, seed=1)}):
        first, second = model(X)
    assert not torch.equal(first, second)


def test_captured_arguments_are_the_edited_ones_in_either_order() -> None:
    model = chain()
    with mt.edit(model, inputs={"2": mt.zero()}):
        feats = mt.extract(model, X, ["0", "2"], inputs=True)
    assert feats["0"].any()
    assert not feats.inputs("2").args[0].any()
    assert torch.equal(feats["2"], bias(model).expand(2, 2))
    with mt.edit(model, inputs={"": lambda given: mt.Inputs(given.args[0] * 0)}):
        assert not mt.extract(model, X, "", inputs=True).inputs("").args[0].any()


def test_edited_arguments_that_the_module_writes_to_are_captured_as_they_were() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(5)

    model = nn.Sequential(nn.Identity(), InPlace())
    with mt.edit(model, inputs={"1": mt.scale(2.0)}):
        feats = mt.extract(model, torch.ones(2), "1", inputs=True)
    assert feats.inputs("1").args[0].tolist() == [2, 2]
    assert feats["1"].tolist() == [7, 7]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.used(self.used(x))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"outputs": {"unused": mt.zero()}},
            "'unused' was not applied: it never ran: this input",
        ),
        (
            {"inputs": {"unused": mt.zero()}},
            "'unused' was not applied: it never ran: this input",
        ),
        (
            {"outputs": {"used#2": mt.zero()}},
            "'used#2' was not applied: 'used' ran 2 times, from 'used#0' to 'used#1'",
        ),
        ({"outputs": {"used": mt.zero(), "used#7": mt.zero()}}, "the edit of 'used#7' was not applied"),
    ],
)
def test_an_edit_that_was_never_made_is_an_error_with_the_likely_cause(changes: dict[str, Any], message: str) -> None:
    model = Unused()
    with pytest.raises(NoMatch, match=message), mt.edit(model, **changes):
        model(X)


def test_a_block_of_edits_in_which_the_model_never_ran_is_an_error() -> None:
    session = mt.edit(Unused(), {"used": mt.zero()})
    with pytest.raises(NoMatch, match="nothing was edited: the Unused never ran in this block"), session:
        pass
    assert not session.is_open


def test_an_exception_in_the_block_is_not_hidden_by_an_edit_that_was_not_made() -> None:
    with pytest.raises(ValueError, match="mine"), mt.edit(Unused(), {"unused": mt.zero()}):
        raise ValueError("mine")


def test_an_edit_behind_where_extract_stops_is_no_error_and_looking_ahead_is_no_run() -> None:
    model = chain()
    for _ in range(2):  # the second time, where to stop is known
        with mt.edit(model, {"2": mt.zero()}):
            assert mt.extract(model, X, "0").stopped
    with pytest.raises(NoMatch, match="nothing was edited"), mt.edit(model, {"2": mt.zero()}):
        mt.profile(model, "2x3")


def test_edits_can_be_opened_again() -> None:
    model = Unused()
    edits = mt.edit(model, {"used#1": mt.zero()})
    for _ in range(2):
        with edits:
            assert not model(X).any()
    with pytest.raises(NoMatch, match="nothing was edited"), edits:
        pass


def test_edit_functions_check_their_arguments() -> None:
    text: Any = "x"
    for make, message in (
        (mt.scale, "expected factor to be a number, got 'x'"),
        (mt.noise, "expected std to be a number, got 'x'"),
        (mt.patch_from, "patch_from expected the Features that mt.extract returns, got a str"),
    ):
        with pytest.raises(BadQuery, match=message):
            make(text)


def test_a_patch_of_other_shapes_is_refused() -> None:
    model = chain()
    feats = mt.extract(model, torch.ones(1, 3), "0", inputs=True)
    message = r"expected captured shapes \[\(2, 3\)\], got \[\(1, 3\)\]"
    for changes in ({"outputs": {"0": mt.patch_from(feats)}}, {"inputs": {"0": mt.patch_from(feats)}}):
        with pytest.raises(Unsupported, match=message), mt.edit(model, **changes):
            model(X)
