"""The how-to pages of the drop-ins list each difference with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


@pytest.mark.parametrize("page", ["module-tracker", "torchstat", "vit-pytorch"])
def test_every_difference_has_a_reason(page: str) -> None:
    section = (PAGES / f"{page}.md").read_text().partition("## Differences from ")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    header, _, *differences = rows
    assert header[-2:] == ["microtome", "reason"]
    assert len(differences) > 10
    assert [row for row in differences if len(row) != 4 or not (row[0] and row[2] and row[3])] == []
