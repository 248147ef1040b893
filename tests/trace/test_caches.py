"""Law: no substitute tensor outlives a run on substitute tensors, whatever remembers it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache, cached_property, lru_cache, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from benchmarks.split_zoo.models import Entry, build, entries
from microtome.engine import tensors_in
from microtome.engine.composite_ops import is_meta_or_fake
from microtome.errors import Unsupported
from microtome.split.comparison import differences
from tests.marks import slow


@cache
def _positions(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device).float()


def _cached_in_a_closure(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `compile_compatible_method_lru_cache` of transformers does."""
    cached = lru_cache(maxsize=4)(function)

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return cached(*args, **kwargs)

    return wrapper


def _memoized(function: Callable[..., Any]) -> Callable[..., Any]:
    memo: dict[Any, Any] = {}

    @wraps(function)
    def wrapper(*args: Any) -> Any:
        if args not in memo:
            memo[args] = [function(*args)]
        return memo[args][0]

    return wrapper


def _latest() -> Callable[[int, torch.device], Tensor]:
    latest: Tensor | None = None

    def positions(length: int, device: torch.device) -> Tensor:
        nonlocal latest
        if latest is None:
            latest = torch.arange(length, device=device).float()
        return latest

    return positions


_in_closure = _cached_in_a_closure(_positions.__wrapped__)
_in_dict = _memoized(_positions.__wrapped__)
_in_variable = _latest()


def _in_default(length: int, device: torch.device, memo: dict[Any, Any] = {}) -> Any:  # noqa: B006
    return memo.setdefault("positions", torch.arange(length, device=device).float())


def _in_attribute(length: int, device: torch.device) -> Any:
    if not hasattr(_in_attribute, "positions"):
        _in_attribute.positions = torch.arange(length, device=device).float()  # type: ignore[attr-defined]
    return _in_attribute.positions  # type: ignore[attr-defined]


class Helper:
    @staticmethod
    @lru_cache(maxsize=2)
    def compute(length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device).float()

    @cached_property
    def positions(self) -> Tensor:
        return torch.arange(4).float()


class Remembers(nn.Module):
    """Adds positions that somebody remembers from run to run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kind = kind
        self.helper = Helper()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        given = y.shape[-1], y.device
        match self.kind:
            case "function":
                return y + _positions(*given)
            case "closure":
                return y + _in_closure(*given)
            case "dict":
                return y + _in_dict(*given)
            case "variable":
                return y + _in_variable(*given)
            case "default":
                return y + _in_default(*given)
            case "attribute":
                return y + _in_attribute(*given)
            case "class":
                return y + Helper.compute(*given)
            case "property":
                return y + self.helper.positions
            case _:
                return y + (self._method(*given) + self._static(*given))

    @lru_cache(maxsize=2)  # noqa: B019
    def _method(self, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device).float()

    @staticmethod
    @lru_cache(maxsize=2)
    def _static(length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device).float()


KINDS = ["function", "closure", "dict", "variable", "default", "attribute", "class", "property", "method"]


def _caches() -> list[Any]:
    """The cached functions themselves, where they are."""
    methods = vars(Remembers)
    cells = [cell.cell_contents for cell in _in_closure.__closure__ or ()]
    return [_positions, methods["_method"], methods["_static"].__func__, vars(Helper)["compute"].__func__, *cells]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    for cached in _caches():
        cached.cache_clear()
    for cell in _in_dict.__closure__ or ():
        if isinstance(cell.cell_contents, dict):
            cell.cell_contents.clear()
    _in_default.__defaults__[0].clear()  # type: ignore[index]
    vars(_in_attribute).clear()
    for cell in _in_variable.__closure__ or ():
        cell.cell_contents = None


@pytest.mark.parametrize("fake", [None, True])
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_run_after_a_trace_computes_with_real_tensors(kind: str, is_warm: bool, fake: bool | None) -> None:
    model, x = Remembers(kind), torch.randn(2, 4)
    expected = model.layer(x) + torch.arange(4) * (2 if kind == "method" else 1)
    if is_warm:
        model(x)
    found = [(id(cached), cached.cache_info()) for cached in _caches()]
    mt.trace(model, x, fake=fake)
    assert [(id(cached), cached.cache_info()) for cached in _caches()] == found
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("kind", ["function", "closure", "class", "method"])
def test_a_trace_does_not_depend_on_what_a_cache_holds(kind: str) -> None:
    model, x = Remembers(kind), torch.randn(2, 4)
    cold = mt.trace(model, x)
    model(x)
    warm = mt.trace(model, x)
    assert [op.name for op in cold.ops] == [op.name for op in warm.ops]
    assert (cold.how.tensor_mode, warm.how.tensor_mode) == ("meta", "meta")


@pytest.mark.parametrize("fake", [None, True])
def test_a_failed_run_on_substitute_tensors_leaves_none_behind(fake: bool | None) -> None:
    class Reads(Remembers):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + 1 if y.sum() > 0 else y

    model, x = Reads("closure"), torch.randn(2, 4)
    try:
        mt.trace(model, x, fake=fake)
    except Unsupported:
        assert fake
    assert not any(map(is_meta_or_fake, tensors_in(model(x))))


_names: list[str] = []


@cache
def _name_of(length: int) -> str:
    _names.append("computed")
    return f"length {length}"


class Names(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + len(_name_of(x.shape[-1]))


def test_a_cache_without_tensors_is_computed_once_by_traces() -> None:
    """The first trace learns that the results are no tensors; the second fills the cache, as a run does."""
    for expected in (0, 1, 1):
        mt.trace(Names(), torch.ones(2))
        assert _name_of.cache_info().currsize == expected
    _name_of.cache_clear()


def test_another_thread_does_not_get_substitute_tensors_from_a_cache() -> None:
    is_fake: list[bool] = []

    class Waits(Remembers):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            other = threading.Thread(target=lambda: is_fake.append(is_meta_or_fake(_positions(4, torch.device("cpu")))))
            other.start()
            other.join()
            return y

    mt.trace(Waits("function"), torch.randn(2, 4), fake=True)
    assert is_fake == [False]
    assert _positions.cache_info().currsize == 1


#: Those whose position embeddings, anchors or masks are in a cache of a function.
REMEMBERING = ["d_fine", "dinov3_vit", "maskformer-swin", "sapiens2"]
TRANSFORMERS = {entry.name: entry for entry in entries() if entry.family == "transformers"}


def _output(model: nn.Module, inputs: Any) -> Any:
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        return mt.Inputs.of(inputs).run(model)


def _check(entry: Entry) -> None:
    traced, (inputs, *_) = build(entry)
    outputs = []
    for fake in (True, None):
        try:
            mt.trace(traced, inputs, fake=fake)
        except Unsupported:  # it cannot be traced so; it must be as found all the same
            assert fake
        outputs.append(_output(traced, inputs))
    untraced, (inputs, *_) = build(entry)
    expected = _output(untraced, inputs)
    for output in outputs:
        assert not any(map(is_meta_or_fake, tensors_in(output)))
        assert list(differences(output, expected)) == []


@pytest.mark.parametrize("name", [slow(name)[0] if name == "d_fine" else name for name in REMEMBERING])
def test_models_of_transformers_with_caches_run_after_a_trace(name: str) -> None:
    _check(TRANSFORMERS[name])


@pytest.mark.zoo
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_model_of_transformers_runs_after_a_trace(name: str) -> None:
    _check(TRANSFORMERS[name])
