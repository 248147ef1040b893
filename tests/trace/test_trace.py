"""Traces against what the model and torch report of the same run."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import microtome as mt
from microtome import zoo
from microtome.errors import NoMatch, NotAModule, Unsupported
from tests.engine.test_laws import assert_same, snapshot


def ops(trace: mt.Trace, address: str) -> list[str]:
    return [trace.ops[op].name.split(".")[1] for op in trace[address].ops]


class Glue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, *, scale: float = 2.0) -> dict[str, Tensor]:
        y = self.a(x) * scale
        return {"y": self.b(y.relu_()), "y_too": y}


def test_functional_ops_between_modules_belong_to_the_call_whose_forward_ran_them() -> None:
    with torch.no_grad():
        t = mt.trace(Glue(), mt.Inputs(torch.ones(3, 4), scale=3.0))
    assert (ops(t, ""), ops(t, "a"), ops(t, "b")) == (["mul", "relu_"], ["t", "addmm"], ["t", "addmm"])
    assert [t.calls[child].address for child in t[""].children] == ["a", "b"]
    assert (t[""].type, t["a"].type, t["a"].depth, t["a"].parent) == ("Glue", "Linear", 1, 0)
    assert str(t.how) == "meta"


def test_values_know_who_made_them_who_reads_them_and_who_changes_them() -> None:
    t = mt.trace(Glue(), torch.ones(3, 4))
    weight = next(value for value in t.values if value.name == "a.weight")
    transposed = next(value for value in t.values if value.alias_of == weight.index)
    assert (weight.origin, weight.shape, weight.nbytes, weight.dtype) == ("parameter", (4, 4), 64, torch.float32)
    assert t.ops[transposed.producer or 0].name == "aten.t.default"
    assert (transposed.memory, transposed.device) == (weight.memory, "cpu")
    (x,) = (value for value in t.values if value.origin == "input")
    assert (x.name, [t.ops[op].name for op in x.consumers]) == ("x", ["aten.addmm.default"])
    y, y_too = (t.values[index] for index in t[""].outputs)
    assert [t.ops[op].name for op in y_too.mutated_by] == ["aten.relu_.default"]
    assert t.ops[y.producer or 0].name == "aten.addmm.default"
    assert t["b"].inputs == (y_too.index,)
    assert t["b"].outputs == (y.index,)


def test_bytes_of_an_op_count_each_value_once_and_views_are_free() -> None:
    t = mt.trace(Glue(), torch.ones(3, 4))
    by_name = {op.name.split(".")[1]: op for op in t.ops[:4]}
    # addmm of (3, 4) by (4, 4) with a bias of 4 reads 12 + 16 + 4 floats and writes 12; relu_ reads and writes 12.
    assert (by_name["addmm"].read_bytes, by_name["addmm"].write_bytes) == (4 * 32, 4 * 12)
    assert (by_name["t"].read_bytes, by_name["t"].write_bytes) == (0, 0)
    assert (by_name["relu_"].read_bytes, by_name["relu_"].write_bytes) == (48, 48)

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.expand(5, 4) * x.expand(5, 4)

    multiply = mt.trace(Square(), torch.ones(4)).ops[-1]
    assert (multiply.read_bytes, multiply.write_bytes) == (16, 80)  # four floats in memory, read once; twenty written


def test_an_identity_returns_the_value_it_was_given() -> None:
    t = mt.trace(nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval(), torch.ones(1, 2))
    assert t["1"].inputs == t["1"].outputs == t["0"].outputs == t[""].outputs


class Peak(TorchDispatchMode):
    """The names of the operators of a plain run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", zoo.names())
def test_a_real_trace_is_the_run_of_the_model(name: str) -> None:
    model, inputs = zoo.build(name)
    with Peak() as plain:
        mt.Inputs.of(inputs).run(model)
    names = [op.name for op in mt.trace(model, inputs, fake=False).ops]
    whole = {"aten.scaled_dot_product_attention", "aten.lstm"}
    if not whole & set(names):
        assert names == plain.names
    ran = iter(plain.names)
    assert all(name in ran for name in names if name not in whole)  # in this order, with the kernels of those between


@pytest.mark.parametrize("name", zoo.names())
@pytest.mark.parametrize("backward", [False, True])
def test_a_trace_without_computing_is_the_real_one(name: str, backward: bool) -> None:
    model, inputs = zoo.build(name)
    real = mt.trace(model, inputs, backward=backward, fake=False)
    if name == "tiny-lstm" and backward:
        pytest.skip("a CPU runs the backward of an LSTM layer by layer")
    for repeat in range(2):  # the second time, what operators gave is remembered
        meta = mt.trace(model, inputs, backward=backward)
        assert (meta.how.tensor_mode, real.how.tensor_mode) == ("meta", "real")
        assert [(op.name, op.call, op.phase) for op in meta.ops] == [(op.name, op.call, op.phase) for op in real.ops]
        assert meta.calls == real.calls, repeat
        if name != "tiny-lstm":  # what its kernels keep for a backward is their own
            assert [memory.ends for memory in meta.memories] == [memory.ends for memory in real.memories]


@pytest.mark.parametrize("name", zoo.names())
def test_the_order_of_calls_and_their_outputs_do_not_depend_on_how(name: str) -> None:
    model, inputs = zoo.build(name)

    def facts(t: mt.Trace) -> Any:
        return [
            (c.address, c.type, c.parent, [(t.values[v].shape, t.values[v].dtype) for v in c.outputs]) for c in t.calls
        ]

    meta, fake, real = (facts(mt.trace(model, inputs, fake=how)) for how in (None, True, False))
    with torch.inference_mode():
        inferred = facts(mt.trace(model, inputs))
    with torch.no_grad():
        without = facts(mt.trace(model, inputs))
    assert meta == fake == real == inferred == without


def test_operators_composed_of_others_are_the_same_in_inference_mode() -> None:
    model, x = zoo.build("tiny-vit")
    with torch.no_grad():
        plain = mt.trace(model, x)
    with torch.inference_mode():
        inferred = mt.trace(model, x)

    def facts(t: mt.Trace) -> Any:  # the name of a view may differ
        return [(op.name.replace("_unsafe_", ""), op.call, op.read_bytes, op.write_bytes) for op in t.ops]

    assert facts(plain) == facts(inferred)


def test_memory_ends_when_the_last_tensor_on_it_is_gone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    with torch.no_grad():
        t = mt.trace(model, torch.ones(1, 2))
    first = t.memories[t.values[t["0"].outputs[0]].memory]
    relu = next(op.index for op in t.ops if op.name == "aten.relu.default")
    assert first.ends == relu + 1  # nobody needs it once the ReLU has run
    assert t.memories[t.values[t[""].outputs[0]].memory].ends is None
    kept = mt.trace(model, torch.ones(1, 2), backward=True)
    saved = kept.memories[kept.values[kept["1"].outputs[0]].memory]
    backward = [op.index for op in kept.ops if op.phase == "backward"]
    assert saved.ends is not None
    assert saved.ends > backward[0]  # the backward needs it


def test_backward_ops_belong_to_the_calls_whose_backward_they_are() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    t = mt.trace(model, torch.ones(1, 2), backward=True)
    backward = {
        call.path: [t.ops[op].name for op in call.ops if t.ops[op].phase == "backward"] for call in t.calls if call.path
    }
    assert backward["1"] == ["aten.detach.default", "aten.tanh_backward.default"]  # the first unpacks what was saved
    assert "aten.mm.default" in backward["0"]
    assert model[0].weight.grad is None


class Does(nn.Module):
    """Runs a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def test_an_op_that_changes_the_shape_in_place_makes_the_value_it_leaves() -> None:
    t = mt.trace(Does(lambda x: (x * 2).unsqueeze_(0) + 1), torch.ones(3))
    multiply, unsqueeze, add = t.ops
    before, after = t.values[multiply.outputs[0]], t.values[unsqueeze.outputs[0]]
    assert (before.shape, before.consumers, after.shape, after.producer) == ((3,), (1,), (1, 3), 1)
    assert (after.alias_of, after.origin, add.inputs) == (before.index, "op", (after.index,))
    assert (unsqueeze.read_bytes, unsqueeze.write_bytes) == (0, 0)


def test_memory_that_is_resized_counts_at_its_largest() -> None:
    t = mt.trace(Does(lambda x: (x * 2).resize_(100)), torch.ones(3))
    assert t.memories[t.values[-1].memory].nbytes == 400


def test_inputs_and_weights_that_share_memory_share_it_in_the_trace() -> None:
    def branch(x: Tensor, y: Tensor) -> Tensor:
        x.zero_()
        return y * 2 if fake is not False or y.sum() == 0 else y

    x = torch.ones(4)
    for fake in (None, False):
        t = mt.trace(Does(branch), (x, x[:2]), fake=fake)
        assert "aten.mul.Tensor" in [op.name for op in t.ops]
        first, second = (value for value in t.values if value.origin == "input")
        assert (second.alias_of, second.memory) == (first.index, first.memory)
    (expanded,) = (v for v in mt.trace(Does(lambda x: x + 1), torch.ones(4).expand(9, 4)).values if v.origin == "input")
    assert t.memories[0].nbytes == 16
    assert expanded.nbytes == 144


def test_batch_norm_writes_its_statistics_in_training() -> None:
    model = nn.BatchNorm2d(3)
    t = mt.trace(model, torch.ones(2, 3, 4, 4))
    written = {value.name for value in t.values if value.mutated_by}
    assert written == {"running_mean", "running_var", "num_batches_tracked"}
    assert not any(value.mutated_by for value in mt.trace(model.eval(), torch.ones(2, 3, 4, 4)).values)


def test_what_an_operator_gave_is_not_remembered_across_default_dtypes() -> None:
    model, x = Does(lambda x: x / 2), torch.ones(3, dtype=torch.int64)
    assert mt.trace(model, x).values[-1].dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert mt.trace(model, x).values[-1].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_autocast_gives_the_dtypes_of_a_real_run() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        t = mt.trace(model, x)
        real = mt.trace(model, x, fake=False)
    assert "autocast chooses dtypes by the device" in t.how.why
    assert [op.name for op in t.ops] == [op.name for op in real.ops]
    assert t.values[t[""].outputs[0]].dtype == torch.bfloat16


def test_a_parameter_of_a_class_of_its_own_keeps_its_class() -> None:
    class Doubled(nn.Parameter):
        pass

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Doubled(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight if isinstance(self.weight, Doubled) else x

    t = mt.trace(Net(), torch.ones(2))
    assert [op.name for op in t.ops] == ["aten.mul.Tensor"]


def test_tensors_whose_parts_lie_apart_are_refused() -> None:
    with pytest.raises(Unsupported, match="expected tensors with one storage each"):
        mt.trace(Does(lambda x: x.to_sparse() @ x), torch.eye(2), fake=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_through_checkpoints_of_both_kinds(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model = Does(lambda x: checkpoint(block, x, use_reentrant=reentrant))
    model.block = block
    t = mt.trace(model, torch.ones(1, 2, requires_grad=True), backward=True)
    assert "aten.tanh_backward.default" in [op.name for op in t.ops if op.phase == "backward"]


def test_backward_of_a_complex_output() -> None:
    t = mt.trace(Does(torch.fft.fft), torch.ones(4, requires_grad=True), backward=True)
    assert any("fft" in op.name for op in t.ops if op.phase == "backward")


def test_recomputation_is_a_phase_of_its_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=False)

    t = mt.trace(Net(), torch.ones(1, 2), backward=True)
    assert {call.phase for call in t.calls if call.path == "block"} == {"forward", "recompute"}
    assert t["block"].phase == "forward"
    assert any(op.phase == "recompute" for op in t.ops)


# -- as found ----------------------------------------------------------------------------------------------------------


class Messy(nn.Module):
    """Keeps what it computes, updates buffers, draws random numbers, and has a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(4)
        self.drop = nn.Dropout()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.b(self.a(self.drop(self.bn(x))))
        self.late = self.seen + 1
        self.register_buffer("another", self.late.detach())
        self.train(False)
        return self.late


@pytest.mark.parametrize("fake", [None, True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_found(fake: bool | None, fails: bool) -> None:
    model = Messy()
    x = torch.ones(3, 4, requires_grad=True)
    mt.trace(model, x, fake=fake, backward=True)  # what torch imports at first use is there
    before = snapshot(model)
    if fails:
        with pytest.raises((RuntimeError, Unsupported)):
            mt.trace(model, torch.ones(3, 5), fake=fake)
    else:
        t = mt.trace(model, x, fake=fake, backward=True)
        assert len({value.index for value in t.values if value.name == "a.weight"}) == 1
    assert_same(before, snapshot(model))
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


@dataclass
class Batch:
    x: Tensor
    history: list[Tensor]


class Wild(nn.Module):
    """Writes wherever it can: attributes, containers, its class, hooks, parameters, the caller's structures."""

    cache: ClassVar[dict[str, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.steps = torch.zeros(1)
        self.log: list[Any] = []
        self.inner = nn.ReLU()

    def forward(self, batch: Batch) -> Tensor:
        y = self.inner(batch.x * self.weight)
        self.steps.add_(1)
        self.log.append(y)
        self.cache["y"] = y
        self.inner.register_forward_hook(lambda *_: None)
        batch.history.append(y)
        with torch.no_grad():
            self.weight.mul_(0.5)
            batch.x.add_(1)
        self.weight.requires_grad_(False)
        random.random()
        np.random.rand()
        return y


@pytest.mark.parametrize("fake", [None, True, False])
def test_a_model_that_writes_wherever_it_can_is_as_found_and_so_are_its_inputs(fake: bool | None) -> None:
    model, batch = Wild(), Batch(torch.zeros(2), [])

    def trace() -> None:
        if fake:
            with pytest.raises(Unsupported, match="aten.add_.Tensor would mutate a tensor that the model keeps"):
                mt.trace(model, batch, fake=True)
        else:
            assert mt.trace(model, batch, fake=fake).how.tensor_mode == "real"

    trace()  # what torch imports at first use is there
    before = snapshot(model)
    trace()
    assert_same(before, snapshot(model))
    assert (model.steps.item(), model.log, Wild.cache) == (0, [], {})
    assert (batch.history, batch.x.tolist(), model.weight.tolist()) == ([], [0, 0], [1, 1])
    assert model.weight.requires_grad


def test_gradients_of_a_real_trace_do_not_reach_the_user() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), 3.0)
    mt.trace(model, torch.ones(1, 2), fake=False, backward=True)
    assert torch.equal(model.weight.grad, torch.full((2, 2), 3.0))
    assert model.bias.grad is None


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_script_module_is_refused_before_anything_is_touched() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(Unsupported, match="the module at '1' is a RecursiveScriptModule"):
        mt.trace(model, torch.ones(1, 2))
    assert model(torch.ones(1, 2)).device.type == "cpu"


def test_inputs_changed_in_place_are_not_the_users() -> None:
    model = nn.ReLU(inplace=True)
    x = -torch.ones(2)
    mt.trace(model, x, fake=False)
    assert torch.equal(x, -torch.ones(2))


# -- models that override __call__ -------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


class Through(Pair):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x + 1)


class Direct(Pair):
    def __call__(self, x: Tensor) -> Any:
        return self.forward(x)


class Alone(nn.Module):
    """Its one child is the first call of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def __call__(self, x: Tensor) -> Any:
        return self.a(x)


class Leaf(nn.Module):
    """No call at all is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.weight


class Compiled(Pair):
    _compiled_call_impl = None


class Twice(Pair):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(super().__call__(x))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.inner(x))
        return y


LOOKS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "trace": mt.trace,
    "profile": mt.profile,
    "profile-backward": partial(mt.profile, backward=True),
    "profile-time": partial(mt.profile, measure=("time", "memory"), repeat=3, warmup=0),
    "cuts": mt.cuts,
    "split": partial(mt.split, at="a"),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Direct, "expected a model that runs through nn.Module.__call__, got Direct, which overrides __call__"),
        (Alone, "got Alone, which overrides __call__"),
        (Leaf, "got Leaf, which overrides __call__"),
        (Compiled, "got Compiled, which overrides _compiled_call_impl"),
        (Twice, "expected one run of the model, got a second: Twice.__call__ runs it again"),
    ],
)
def test_a_root_whose_own_call_is_not_observed_once_is_refused(kind: type[nn.Module], message: str, look: str) -> None:
    with pytest.raises(Unsupported, match=message):
        LOOKS[look](kind(), torch.ones(2, 4))


@pytest.mark.parametrize("kind", [Through, Direct, Alone, Leaf, Compiled, Twice])
def test_a_child_that_overrides_call_counts_with_the_model(kind: type[nn.Module]) -> None:
    inner = kind()
    params = sum(p.numel() for p in inner.parameters())
    macs = {Leaf: 0, Alone: 32, Twice: 128}.get(kind, 64)  # 2 x 4 x 4 for each Linear
    p = mt.profile(Around(inner), torch.ones(2, 4))
    assert (p.total.params, p.total.macs) == (params + 20, macs + 32)
    assert "last" in {cut.at for cut in mt.cuts(Around(inner), torch.ones(2, 4))}
    if kind is Through:
        assert mt.profile(inner, torch.ones(2, 4)).total.macs == macs


# -- how ---------------------------------------------------------------------------------------------------------------


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class ReadsValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x


def test_a_tensor_kept_as_a_plain_attribute_needs_fake_tensors() -> None:
    t = mt.trace(Attribute(), torch.ones(2))
    assert t.how.tensor_mode == "fake"
    assert "not on meta tensors: RuntimeError" in t.how.why
    assert {value.origin for value in t.values} == {"input", "constant", "op"}


def test_a_model_that_reads_values_needs_real_ones() -> None:
    t = mt.trace(ReadsValues(), torch.ones(2))
    assert t.how.tensor_mode == "real"
    assert "not on fake tensors: DataDependentOutputException" in t.how.why
    assert "aten.mul.Tensor" in [op.name for op in t.ops]
    assert mt.trace(nn.ReLU(), torch.ones(2), fake=True).how.tensor_mode == "fake"
    with pytest.raises(Unsupported, match="cannot be traced without computing: DataDependentOutputException"):
        mt.trace(ReadsValues(), torch.ones(2), fake=True)


def test_meta_tensors_that_outlive_their_run_do_not_change_a_real_one() -> None:
    held: list[Tensor] = []
    keep = held.append  # a list that the forward refers to would be restored after each attempt

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            keep(torch.arange(3, device=x.device))
            order = x.argsort()
            return order[order > 0]  # on meta tensors an error: the values of x are not known

    t = mt.trace(Keeps(), torch.ones(3))
    assert held[0].is_meta
    assert t.how.tensor_mode == "real"
    assert t.values[t[""].outputs[0]].device == "cpu"
    assert not held[-1].is_meta


def test_a_model_without_weights_in_memory_can_be_traced() -> None:
    with torch.device("meta"):
        model = nn.Linear(10**6, 10**6)
    t = mt.trace(model, "3x1000000")
    assert t.values[t[""].outputs[0]].shape == (3, 10**6)


def test_inputs_may_be_a_text_and_structures_pass_through() -> None:
    class Takes(nn.Module):
        def forward(self, ids: Tensor, *, extra: Any = None) -> Any:
            return [ids + 1, None, extra]

    t = mt.trace(Takes(), mt.Inputs(torch.ones(2), extra={"deep": (torch.ones(3), None, "text")}))
    assert [value.name for value in t.values if value.origin == "input"] == ["ids", "extra"]
    assert [value.shape for value in mt.trace(Takes(), "ids=2x3:int64").values] == [(2, 3), (2, 3)]


@dataclass
class Notes:
    count: int = 0
    last: Any = None


class Keeps(nn.Module):
    """Changes what it holds in every way."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held: list[Any] = [torch.zeros(3), {"a": torch.zeros(3)}, (torch.zeros(3),)]
        self.notes = Notes()
        self.generator = torch.Generator().manual_seed(0)
        self.made = torch.zeros(3, requires_grad=True) * 2

    def forward(self, x: Tensor) -> Tensor:
        for tensor in (self.held[0], self.held[1]["a"], self.held[2][0], self.made.detach()):
            tensor.add_(1)
        self.notes.count += 1
        self.notes.last = x * 2
        Keeps.total += 1
        type(self).latest = x  # type: ignore[attr-defined]
        self.linear.weight.data = self.linear.weight.data * 2
        return self.linear(x * torch.rand(2, 4, generator=self.generator))


@pytest.mark.parametrize("fake", [None, False])
def test_whatever_a_forward_changes_in_what_the_model_holds_is_put_back(fake: bool | None) -> None:
    model = Keeps()
    weight, state = model.linear.weight.detach().clone(), model.generator.get_state()
    memory = model.linear.weight.data_ptr()
    mt.trace(model, torch.ones(2, 4), fake=fake)
    held = (model.held[0], model.held[1]["a"], model.held[2][0], model.made.detach())
    assert [float(tensor.sum()) for tensor in held] == [0.0] * 4
    assert (model.notes, Keeps.total, hasattr(Keeps, "latest")) == (Notes(), 0, False)
    assert torch.equal(model.linear.weight, weight)
    assert model.linear.weight.data_ptr() == memory
    assert torch.equal(model.generator.get_state(), state)


# -- wrong use ---------------------------------------------------------------------------------------------------------


def test_the_models_own_error_is_raised_and_says_where(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as caught:
        mt.trace(nn.Sequential(nn.Sequential(nn.Linear(3, 3))), torch.ones(1, 4))
    ran_on = "The model ran on Inputs(1x4:float32)."
    assert caught.value.__notes__ == ["in the call '0.0' (Linear)", "no layer ran before", ran_on]
    assert capfd.readouterr().err == ""


def test_a_lazy_model_must_run_first() -> None:
    with pytest.raises(Unsupported, match=r"0 \(LazyLinear\) has no shape yet: run the model once"):
        mt.trace(nn.Sequential(nn.LazyLinear(2)), torch.ones(1, 2))


def test_nothing_to_run_a_backward_of() -> None:
    with pytest.raises(Unsupported, match="requires a gradient; pass an input that does"):
        mt.trace(nn.ReLU(), torch.ones(2), backward=True)
    with torch.inference_mode(), pytest.raises(Unsupported, match="requires a gradient; leave inference_mode"):
        mt.trace(nn.Linear(2, 2), torch.ones(1, 2), backward=True)


def test_addresses() -> None:
    model, x = zoo.build("tiny-resnet")
    t = mt.trace(model, x)
    assert t["layer1.0.relu#1"].address == "layer1.0.relu#1"
    assert t["layer1.0.relu#0"].address == "layer1.0.relu#0"
    assert t["fc#0"] is t["fc"]
    with pytest.raises(
        NoMatch, match=r"'layer1.0.relu' ran 2 times: say which of 'layer1.0.relu#0', 'layer1.0.relu#1'"
    ):
        t["layer1.0.relu"]
    with pytest.raises(NoMatch, match="no module at path 'layer1.0.rely'. Did you mean 'layer1.0.relu"):
        t["layer1.0.rely"]
    assert [call.address for call in t.below(t["stem"])] == ["stem", "stem.0", "stem.1", "stem.2"]
    with pytest.raises(NotAModule):
        mt.trace("resnet", x)  # type: ignore[arg-type]


def test_reading_a_table_takes_the_rows_that_are_read() -> None:
    lookup = mt.trace(nn.Embedding(1000, 8), "1x4:int64").ops[0]
    assert (lookup.read_bytes, lookup.write_bytes) == (4 * 8 + 4 * 8 * 4, 4 * 8 * 4)  # four indices, four rows


def test_products_of_different_dtypes_are_refused_as_in_a_real_run() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        mt.trace(nn.Linear(4, 4), torch.zeros(1, 4, dtype=torch.float16))
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(Unsupported, match="aten.addmm.default expects one dtype, got"):
        mt.trace(model, torch.zeros(1, 4, dtype=torch.int64, device="meta"))


def test_a_collection_that_a_run_put_off_is_made_up_for_before_its_tensors_die() -> None:
    # CPython 3.11 crashes if it collects weak references while it clears those of a storage that dies.
    collected_in: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected_in.append(sys._getframe(1).f_code.co_name)

    model, x = zoo.build("tiny-resnet")
    gc.callbacks.append(note)
    try:
        mt.trace(model, x)
    finally:
        gc.callbacks.remove(note)
    assert "_enable_garbage_collection" in collected_in
    assert gc.isenabled()
