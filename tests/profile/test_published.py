"""Parameters and GMACs of torchvision's models, against the table that comes with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import FOUND, Published, table
from benchmarks.zoo import Comparison, report
from tests.marks import slow

TABLE = table()
#: Every family, small and large, images, videos, segmentation, flow; what needs no real run.
SPREAD = """
    alexnet convnext_tiny convnext_large deeplabv3_mobilenet_v3_large deeplabv3_resnet50 densenet121 densenet161
    efficientnet_b0 efficientnet_b7 efficientnet_v2_s fcn_resnet101 googlenet inception_v3 lraspp_mobilenet_v3_large
    maxvit_t mc3_18 mnasnet0_5 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mvit_v1_b mvit_v2_s quantized_resnet50
    quantized_shufflenet_v2_x1_0 r2plus1d_18 raft_large raft_small regnet_x_400mf regnet_y_800mf resnet18 resnet50
    resnext50_32x4d s3d shufflenet_v2_x0_5 squeezenet1_1 swin3d_t swin_t swin_v2_b vgg16_bn vit_b_16 vit_h_14
    wide_resnet50_2
"""


def one_of_each() -> list[Published]:
    first = {entry.name: entry for entry in reversed(TABLE)}
    return [first[name] for name in SPREAD.split()]


def one_in_three(entries: list[Published]) -> list[Any]:
    return [entry if at % 3 == 0 else slow(entry)[0] for at, entry in enumerate(entries)]


def check(entry: Published) -> None:
    p = entry.profile()
    assert p.total.flops is not None
    assert (p.total.params, round(p.total.flops / 1e9, 3)) == (entry.params, entry.giga_macs) or entry.agrees(p)


@pytest.mark.parametrize("entry", one_in_three(one_of_each()), ids=str)
def test_a_sample_of_torchvision_models_costs_the_published_amounts(entry: Published) -> None:
    check(entry)


def test_results_name_the_detectors_whose_findings_are_chosen_to_agree() -> None:
    chosen = [entry for entry in TABLE if str(entry.weights) in FOUND]
    assert len(chosen) == len(FOUND)
    found = [Comparison(str(entry), (1, 1.0), (1, 1.0), True, FOUND.get(str(entry.weights))) for entry in TABLE]
    told = "\n".join(report(found)).partition("|")[0]
    saved = Path("benchmarks/results/zoo.md").read_text().partition("|")[0]
    readme = " ".join(Path("README.md").read_text().split())
    for text in (told, saved):
        assert all(f"{FOUND[str(entry.weights)]} in {entry}" in text for entry in chosen)
        assert f"Without those {len(chosen)}, {len(TABLE) - len(chosen)} agree." in text
    assert f"microtome matches {len(TABLE) - len(chosen)} of all {len(TABLE)} published entries" in readme


def test_the_table_is_whole() -> None:
    assert len(TABLE) >= 166
    assert len(SPREAD.split()) >= 40
