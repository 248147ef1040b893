"""A head and a tail in two processes, where sets of strings have different orders: exact or refused."""

from __future__ import annotations

import pytest

from benchmarks.split_zoo.seeds import EXACT, in_two_processes
from tests.split.hash_seeds import BODIES, ZOO

#: Pairs under which `set(NAMES)` has different orders, in both ways round, and one under which it has the same.
SEEDS = [(0, 1), (4, 5), (3, 3)]


@pytest.mark.parametrize("seeds", SEEDS)
def test_calls_in_another_order_are_matched_or_refused(seeds: tuple[int, int]) -> None:
    found = in_two_processes("tests.split.hash_seeds", seeds, "toys")
    assert list(found) == [body.__name__ for body in BODIES]
    for name, cuts in found.items():
        wrong = {at: what for at, what in cuts.items() if what != EXACT and not what.startswith("refused")}
        assert not wrong, name
        assert cuts["last"] == EXACT or name in ("in_a_dict", "with_a_dict"), (name, cuts["last"])
        if seeds[0] == seeds[1]:
            assert set(cuts.values()) == {EXACT}, name
        refused = [what for what in cuts.values() if what.startswith("refused")]
        assert [what for what in refused if "PYTHONHASHSEED" not in what] == [], name
    if seeds[0] != seeds[1]:
        assert any(what.startswith("refused") for what in found["by_name"].values())


def test_models_of_transformers_are_exact_with_other_hash_seeds() -> None:
    found = in_two_processes("tests.split.hash_seeds", (0, 1), "zoo")
    assert list(found) == list(ZOO)
    assert {what for cuts in found.values() for what in cuts.values()} == {EXACT}
