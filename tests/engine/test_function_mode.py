"""Code that calls `has_torch_function` takes the same branch with and without a session."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn, overrides
from torch.nn import functional as F  # noqa: N812
from torch.overrides import (
    TorchFunctionMode,
    handle_torch_function,
    has_torch_function,
    has_torch_function_unary,
    has_torch_function_variadic,
)

import microtome as mt
from microtome.engine.function_mode import hide_modes

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def handing_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if has_torch_function((q, k, v)):
        return handle_torch_function(handing_itself, (q, k, v), q, k, v)
    return 3 * F.scaled_dot_product_attention(q, k, v)


def handing_the_original(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if has_torch_function_variadic(q, k, v):
        return handle_torch_function(F.scaled_dot_product_attention, (q, k, v), q, k, v)
    return 3 * F.scaled_dot_product_attention(q, k, v)


def computing_otherwise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q + v if has_torch_function_unary(q) else 3 * F.scaled_dot_product_attention(q, k, v)


def asking_by_attribute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q + v if torch.overrides.has_torch_function((q, k)) else 3 * F.scaled_dot_product_attention(q, k, v)


def importing_when_it_runs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.overrides import has_torch_function as asked

    return q + v if asked((q, k)) else 3 * F.scaled_dot_product_attention(q, k, v)


class Net(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.embed = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.embed(x).view(2, 5, 2, 4).transpose(1, 2)
        return self.attend(heads, heads, heads)


@pytest.mark.parametrize(
    "attend",
    [handing_itself, handing_the_original, computing_otherwise, asking_by_attribute, importing_when_it_runs],
)
@pytest.mark.parametrize("grad", [True, False])
def test_looking_does_not_change_what_runs(attend: Attend, grad: bool) -> None:
    net, x = Net(attend).eval(), torch.randn(2, 5, 8)
    with torch.set_grad_enabled(grad):
        expected = net(x)
        for fake in (None, True, False):
            total = mt.profile(net, x, fake=fake).total
            # 10 tokens of 8 to 8; in 2 x 2 heads two products of 5 x 4 x 5. Of the scores 6 each, of the output 1.
            assert total.macs == 10 * 64 + 2 * 4 * 100
            assert total.flops == 2 * total.macs + 10 * 8 + 6 * 4 * 25 + 2 * 4 * 20 // 2
        heads = net.embed(x).view(2, 5, 2, 4).transpose(1, 2)
        weights = mt.attention(net, x)[""]
        assert weights.allclose((heads @ heads.mT / 2).softmax(-1), atol=1e-6)
        with mt.record(net, attention=True):
            assert torch.equal(net(x), expected)
        assert torch.equal(mt.extract(net, x, "embed/*", stop=False).output, expected)


def copy_of_multi_head_attention() -> ModuleType:
    """Torch's function as libraries copy it: with a change, and still handing over the one that it was copied from."""
    source = inspect.getsource(F.multi_head_attention_forward)
    handed = "return handle_torch_function(\n            "
    source = source.replace(f"{handed}multi_head_attention_forward", f"{handed}F.multi_head_attention_forward")
    assert "F.multi_head_attention_forward" in source
    source = source.replace("q = q.view(", "q = 2 * q.view(")
    module = ModuleType("microtome_tests_copied_attention")
    module.__dict__.update({name: value for name, value in vars(F).items() if not name.startswith("__")}, F=F)
    exec(compile(source, "copied_attention", "exec"), module.__dict__)
    return module


def test_a_copied_attention_function_runs_and_counts_as_without_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    module = copy_of_multi_head_attention()
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Copied(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            x = x.transpose(0, 1)
            out, _ = module.multi_head_attention_forward(
                x, x, x, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0,
                self.out_proj.weight, self.out_proj.bias, training=False, need_weights=False,
            )  # fmt: skip
            return out

    net, x = Copied(8, 2).eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = net(x)
        assert not torch.equal(
            expected, nn.MultiheadAttention.forward(net, x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0]
        )
        for fake in (None, True, False):
            assert mt.profile(net, x, fake=fake).total.macs == 10 * 64 * 4 + 2 * 4 * 100
        with mt.record(net, attention=True) as recording:
            assert torch.equal(net(x), expected)
        assert len(recording) == 1


class Tagged(Tensor):
    """A subclass that takes part in functions."""


class Other(TorchFunctionMode):
    """Somebody else's mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_subclasses_and_the_users_own_modes_are_dispatched_to() -> None:
    answers: list[tuple[bool, ...]] = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            tagged = torch.ones(1).as_subclass(Tagged)
            with torch._C.DisableTorchFunctionSubclass():
                off = has_torch_function_unary(tagged)
            with Other():
                answers.append((has_torch_function((x,)), True, True, True))
            answers.append((has_torch_function((x, nn.Parameter(x), 1, None)), has_torch_function((x, tagged)), has_torch_function_variadic(x, tagged), off))  # fmt: skip  # noqa: E501
            return x * 1

    net, x = Asking(), torch.ones(2)
    net(x)
    before = answers.copy()
    answers.clear()
    mt.profile(net, x, fake=False)
    assert answers == before == [(True, True, True, True), (False, True, True, False)]


def test_the_names_are_put_back() -> None:
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    before = [getattr(overrides, name) for name in names] + [has_torch_function, vars(F)["has_torch_function"]]
    late = ModuleType("microtome_tests_late")

    def now() -> list[Any]:
        return [getattr(overrides, name) for name in names] + [has_torch_function, vars(F)["has_torch_function"]]

    def fail_inside() -> None:
        with hide_modes(), hide_modes():
            sys.modules[late.__name__] = late
            exec("from torch.overrides import has_torch_function", late.__dict__)
            assert now()[:4] != before[:4]
            assert now()[4] is before[4]  # torch's own functions hand themselves over
            raise KeyError

    try:
        with pytest.raises(KeyError):
            fail_inside()
        assert all(a is b for a, b in zip(now(), before, strict=True))
        assert late.has_torch_function is before[0]
        assert has_torch_function((torch.ones(1),)) is False
    finally:
        sys.modules.pop(late.__name__, None)


def test_a_module_of_the_user_may_import_the_functions_after_the_first_trace() -> None:
    notebook = ModuleType("notebook_of_the_user")
    sys.modules[notebook.__name__] = notebook
    try:
        with hide_modes():
            pass
        exec("from torch.overrides import has_torch_function", notebook.__dict__)
        original = has_torch_function
        with hide_modes():
            assert vars(notebook)["has_torch_function"] is not original
        assert vars(notebook)["has_torch_function"] is original
    finally:
        del sys.modules[notebook.__name__]
