"""Models that hold a drop-in can be compiled: the drop-in runs as Python, and what is around it is compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from microtome import zoo
from microtome.compat.tracr import WrappedModel
from microtome.compat.vit_pytorch import Extractor, Recorder


class Around(nn.Module):
    """A model with work before and after a wrapper."""

    def __init__(self, wrapper: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.wrapper = wrapper

    def forward(self, x: Tensor) -> Any:
        seen = self.wrapper((x * self.scale).sin())
        return [part * self.scale for part in (seen if isinstance(seen, tuple) else (seen,))]


def extractor(model: nn.Module, x: Tensor) -> nn.Module:
    return Extractor(model, layer_name="blocks.1", detach=False)


def recorder(model: nn.Module, x: Tensor) -> nn.Module:
    return Recorder(model)


def wrapped(model: nn.Module, x: Tensor) -> nn.Module:
    return WrappedModel(model, x, collect_metrics="time")


WRAPPERS = [extractor, recorder, wrapped]

#: Dynamo asks every tensor at a graph break for its gradient; to import it warns in some versions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_compiled_model_that_holds_a_wrapper_gives_what_it_gives(
    wrap: Callable[..., nn.Module], backend: str
) -> None:
    model, x = zoo.build("tiny-vit")
    assert isinstance(x, Tensor)
    net = Around(wrap(model, x)).eval()
    whole = net(x)
    compiled = torch.compile(net, backend=backend)
    for _ in range(3):
        assert all(one.equal(other) for one, other in zip(compiled(x), whole, strict=True))
    made = graphs()
    assert made >= 2  # before the wrapper and after it
    compiled(x.flip(0))
    assert graphs() == made  # nothing is compiled again


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_so_does_a_compiled_wrapper(wrap: Callable[..., nn.Module]) -> None:
    model, x = zoo.build("tiny-vit")
    wrapper = wrap(model, x).eval()
    whole, compiled = wrapper(x), torch.compile(wrapper, backend="eager")(x)
    pairs = zip(*((one if isinstance(one, tuple) else (one,)) for one in (whole, compiled)), strict=True)
    assert all(one.equal(other) for one, other in pairs)


def test_gradients_go_through_it() -> None:
    model, x = zoo.build("tiny-vit")
    net: Any = Around(Extractor(model, layer_name="blocks.1", detach=False))
    found = []
    for run in (net, torch.compile(net, backend="aot_eager")):
        net.zero_grad()
        prediction, latents = run(x)
        (prediction.sum() + latents.square().sum()).backward()
        found.append([parameter.grad.clone() for parameter in net.parameters()])
    torch.testing.assert_close(found[0], found[1])


def test_afterwards_other_functions_are_compiled_as_before() -> None:
    model, x = zoo.build("tiny-vit")
    torch.compile(Around(Recorder(model)), backend="eager")(x)
    made, x = graphs(), torch.ones(3)
    assert torch.compile(lambda y: y.sin() + 1, backend="eager")(x).equal(x.sin() + 1)
    assert graphs() == made + 1


def test_one_whole_graph_cannot_be_made_of_it() -> None:
    model, x = zoo.build("tiny-vit")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Recorder.forward"):
        torch.compile(Around(Recorder(model)), backend="eager", fullgraph=True)(x)


def test_wrappers_do_not_import_dynamo() -> None:
    code = (
        "import sys; from microtome import zoo; from microtome.compat.vit_pytorch import Extractor, Recorder;"
        "model, x = zoo.build('tiny-vit'); Extractor(model, layer_name='norm')(x); Recorder(model)(x);"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
