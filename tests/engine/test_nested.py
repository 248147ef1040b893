"""Models on nested tensors: every action works or is refused with an error of ours. None may end the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import microtome as mt
from microtome import zoo
from microtome.errors import MicrotomeError, Unsupported


class Attention(nn.Module):
    """Self-attention on sequences of several lengths, as one nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.outer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        split = [linear(x).view(x.size(0), -1, 2, 4).transpose(1, 2) for linear in self.inner]
        query, key, value = split if x.layout is torch.jagged else map(Tensor.contiguous, split)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return self.outer(mixed.reshape(x.size(0), -1, 8))


class Packed(nn.Module):
    """Takes and returns padded tensors; nested tensors live in between."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout = layout
        self.embed = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.embed(x)
        nested = torch.nested.as_nested_tensor([parts[0, :3], parts[1]], layout=self.layout)
        return self.head(self.norm(nested).to_padded_tensor(0.0))


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout)


def build(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    name, _, layout_name = kind.partition(" ")
    if name == "navit":
        zoo.import_torchvision()  # which vit-pytorch imports
        from vit_pytorch.na_vit_nested_tensor import NaViT

        sizes = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 16, "mlp_dim": 16, "depth": 1, "heads": 2}
        return NaViT(**sizes, dim_head=8, token_dropout_prob=0.1), ([torch.randn(3, 32, 32), torch.randn(3, 16, 32)],)
    layout = getattr(torch, layout_name)
    if name == "packed":
        return Packed(layout), torch.randn(2, 5, 8)
    layers = [nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)]
    return Attention() if name == "attention" else nn.Sequential(*layers), (nested(layout),)


KINDS = [f"{name} {layout}" for name in ("layers", "attention", "packed") for layout in ("jagged", "strided")]


# -- the actions -------------------------------------------------------------------------------------------------------


def record(net: nn.Module, inputs: Any, at: str | None, **options: Any) -> Any:
    with mt.record(net, at, **options):
        return mt.Inputs.of(inputs).run(net)


def edit(net: nn.Module, inputs: Any) -> Any:
    with mt.edit(net, {last(net): lambda output: output}):
        return mt.Inputs.of(inputs).run(net)


def track(net: nn.Module, inputs: Any) -> Any:
    with mt.track(net):
        return mt.Inputs.of(inputs).run(net)


def recorder(net: nn.Module, inputs: Any) -> Any:
    from microtome.compat.vit_pytorch import Recorder

    given = mt.Inputs.of(inputs)
    return Recorder(net)(*given.args)[0]


def extractor(net: nn.Module, inputs: Any) -> Any:
    from microtome.compat.vit_pytorch import Extractor

    given = mt.Inputs.of(inputs)
    return Extractor(net, layer_name=last(net))(*given.args)[0]


def last(net: nn.Module) -> str:
    """The path of the last layer, which gives the output of each of these models."""
    return [path for path, module in net.named_modules() if isinstance(module, nn.Linear)][-1]


ACTIONS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "extract": lambda net, x: mt.extract(net, x, last(net))[last(net)],
    "extract all": lambda net, x: mt.extract(net, x, "**", stop=False).output,
    "extract operators": lambda net, x: mt.extract(net, x, f"{last(net)}/*", stop=False).output,
    "extract grad": lambda net, x: mt.extract(net, x, last(net), grad=True).output,
    "attention": mt.attention,
    "record": lambda net, x: record(net, x, last(net)),
    "record attention": lambda net, x: record(net, x, None, attention=True),
    "edit": edit,
    "track": track,
    "Recorder": recorder,
    "Extractor": extractor,
    "trace": mt.trace,
    "trace fake": lambda net, x: mt.trace(net, x, fake=True),
    "trace real": lambda net, x: mt.trace(net, x, fake=False),
    "profile": mt.profile,
    "profile backward": lambda net, x: mt.profile(net, x, backward=True),
    "profile time": lambda net, x: mt.profile(net, x, measure="time"),
    "cuts": mt.cuts,
    "split": lambda net, x: mt.split(net, x, at=last(net)),
}
#: They give what the model gives, whatever tensors it works on.
WORK = {"extract", "extract all", "edit", "track", "Extractor"}
#: A nested tensor has no one shape, and no memory that a trace could follow.
REFUSED = {name for name in ACTIONS if name.split()[0] in ("trace", "profile", "cuts", "split")}


def same(a: Tensor, b: Tensor) -> bool:
    parts = [tuple(tensor.unbind()) if tensor.is_nested else (tensor,) for tensor in (a, b)]
    return len(parts[0]) == len(parts[1]) and all(map(torch.equal, *parts))


def act(name: str, net: nn.Module, inputs: Any) -> str:
    expected = mt.Inputs.of(inputs).run(net)
    try:
        output = ACTIONS[name](net, inputs)
    except MicrotomeError as error:
        return f"{type(error).__name__} {error}".splitlines()[0]
    if isinstance(output, Tensor):
        return "same" if same(output, expected) else "differs"
    return f"a {type(output).__name__}"


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def main(kind: str) -> None:
    """Try all actions in all modes and write what each did."""
    torch.set_num_threads(1)
    net, inputs = build(kind)
    net.eval()
    for mode, entered in MODES.items():
        with entered():
            for name in ACTIONS:
                sys.stdout.write(f"{mode} {name}: ")
                sys.stdout.flush()
                sys.stdout.write(f"{act(name, net, inputs)}\n")


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*KINDS[1:], "navit"])]
)
def test_every_action_works_on_nested_tensors_or_is_refused(kind: str) -> None:
    if kind == "navit" and find_spec("vit_pytorch") is None:
        pytest.skip("vit-pytorch is not installed")
    command = [sys.executable, "-W", "ignore", __file__, kind]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, f"after {run.stdout.splitlines()[-1:]}: {run.stderr[-2000:]}"
    found = dict(line.split(": ", 1) for line in run.stdout.splitlines())
    assert list(found) == [f"{mode} {name}" for mode in MODES for name in ACTIONS]
    assert "differs" not in found.values(), found
    for mode in MODES:
        assert {name: found[f"{mode} {name}"] for name in WORK} == dict.fromkeys(WORK, "same")
        for name in REFUSED:
            assert found[f"{mode} {name}"].startswith(("Unsupported", "NeedsValues")), (
                mode,
                name,
                found[f"{mode} {name}"],
            )


def test_a_trace_says_that_it_refuses_nested_tensors() -> None:
    net, inputs = build("layers jagged")
    with pytest.raises(Unsupported, match="nested.*cannot be traced"):
        mt.trace(net, inputs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_kept_as_they_were_captured(layout: torch.layout) -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), nested(layout)
    with torch.no_grad():
        feats = mt.extract(net, (x,), ["0", "1"])
        assert same(feats["0"], net[0](x))
        assert same(feats["1"], net(x))


if __name__ == "__main__":
    main(sys.argv[1])
