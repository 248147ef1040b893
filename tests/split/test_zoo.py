"""Real models: every cut gives what the model gives, to the last bit, or is refused with a reason."""

from __future__ import annotations

import pytest

from benchmarks.split_zoo.models import Entry, build, entries
from benchmarks.split_zoo.proof import Tally, prove
from tests.marks import slow

ALL = {str(entry): entry for entry in entries()}
#: The quickest of these, which `make test` runs.
QUICK = "torchvision:resnet18 transformers:gpt2 transformers:t5 vit-pytorch:cct"
#: Of each package a few that do unlike things: branches, dense blocks, shifted windows, shared modules, lists that are
#: changed, structures as outputs, two towers, encoders with decoders, experts.
SPREAD = """
    torchvision:densenet121 torchvision:googlenet torchvision:mobilenet_v3_large
    torchvision:shufflenet_v2_x1_0 torchvision:squeezenet1_1 torchvision:swin_t torchvision:lraspp_mobilenet_v3_large
    timm:coat/coat_lite_tiny timm:hrnet/hrnet_w18_small timm:mvitv2/mvitv2_tiny timm:vovnet/ese_vovnet19b_slim
    timm:xcit/xcit_nano_12_p8_224
    transformers:bert transformers:clip transformers:deberta-v2 transformers:dinov2 transformers:llama
    transformers:llava transformers:mixtral transformers:segformer transformers:swin
    transformers:wav2vec2 transformers:whisper
    vit-pytorch:cait vit-pytorch:nest vit-pytorch:regionvit
"""


def check(entry: Entry, tally: Tally) -> None:
    assert not tally.wrong
    assert not tally.failed
    assert tally.exact + len(tally.late) == tally.tried
    assert all((*tally.unlisted, *tally.late.values()))  # each with a reason
    assert tally.tried or tally.unlisted


@pytest.mark.parametrize("name", [*QUICK.split(), *slow(*SPREAD.split())])
def test_a_spread_of_models_is_cut_exactly(name: str) -> None:
    model, inputs = build(ALL[name])
    tally = prove(name, model, inputs, most=6)
    check(ALL[name], tally)
    assert tally.tried >= 3
    assert tally.refused == 0


def test_there_are_many() -> None:
    families = [entry.family for entry in ALL.values()]
    least = {"zoo": 5, "torchvision": 30, "timm": 85, "transformers": 300, "vit-pytorch": 35}
    assert {family: families.count(family) >= count for family, count in least.items()} == dict.fromkeys(least, True)
