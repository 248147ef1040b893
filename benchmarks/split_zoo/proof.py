"""Verify cut by cut that head and tail compute the model's output."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import microtome as mt
from benchmarks.detection import detection_runs
from microtome.errors import MicrotomeError
from microtome.results.cuts import Cut
from microtome.split.comparison import differences
from microtome.split.splitter import Splitter


@dataclass
class Tally:
    """The results of the cuts of a model.

    Attributes:
        listed: The number of cuts that `mt.cuts` lists, refused ones included.
        unlisted: The cuts that it refuses, by reason.
        tried: The number of cuts that were made and compared.
        exact: The number of cuts that are bit-equal for both inputs, with serialized boundaries.
        late: The reasons of `mt.split` or a stage to refuse a listed cut, by address.
        wrong: The differences of cuts with another output, by address.
        failed: The errors that are not microtome's, by address.
    """

    name: str
    listed: int = 0
    unlisted: Counter[str] = field(default_factory=Counter)
    tried: int = 0
    exact: int = 0
    late: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def refused(self) -> int:
        return self.unlisted.total() + len(self.late)


def prove(name: str, model: nn.Module, inputs: list[Any], most: int | None = None) -> Tally:
    """Cut the model and compare.

    Args:
        inputs: The example, and others of other sizes.
        most: Maximum number of cuts to try, spread evenly; None: all, and every fifth if there are more than 100.
    """
    tally = Tally(name)
    model.eval()
    examples = [mt.Inputs.of(one) for one in inputs]
    with torch.no_grad(), detection_runs(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wholes = [_seeded(_copy(one)).run(model) for one in examples]
        splitter = Splitter(model, examples[0])
        cuts = splitter.cuts
        tally.listed = len(cuts) + len(cuts.refused)
        tally.unlisted.update(cut.refused for cut in cuts.refused if cut.refused)
        step = max(5 if len(cuts) > 100 else 1, 1 if most is None else -(-len(cuts) // most))
        for cut in cuts[step // 2 :: step]:
            tally.tried += 1
            _try(tally, splitter, cut, examples, wholes)
    return tally


def _try(tally: Tally, splitter: Splitter, cut: Cut, examples: list[mt.Inputs], wholes: list[Any]) -> None:
    found: str | None = "not tried"
    # A cut that is wrong without verification is tried with it: `mt.split` then refuses.
    for verify in (False, True):
        try:
            found = _wrong(splitter, cut, examples, wholes, verify)
        except MicrotomeError as error:
            found = str(error)
            if verify:
                tally.late[cut.at] = found
                return
        except Exception as error:  # noqa: BLE001
            found = f"{type(error).__name__}: {error}"
            if verify:
                tally.failed[cut.at] = found[:300]
                return
        if found is None:
            tally.exact += 1
            return
    tally.wrong[cut.at] = found or ""


def _wrong(splitter: Splitter, cut: Cut, examples: list[mt.Inputs], wholes: list[Any], verify: bool) -> str | None:
    head, tail = splitter.at(cut, verify=verify)
    for number, (example, whole) in enumerate(zip(examples, wholes, strict=True)):
        given = _seeded(_copy(example))
        boundary = head(*given.args, **given.kwargs)
        if not number and boundary.nbytes != cut.nbytes and not verify:
            return f"{boundary.nbytes} bytes cross in place of {cut.nbytes}"
        output = tail(mt.Boundary.from_bytes(boundary.to_bytes()))
        for difference in differences(output, whole):
            return f"input {number}{difference.path}: {difference.description}"
    return None


def _seeded(given: mt.Inputs) -> mt.Inputs:
    """Seed the run on these inputs: a model may draw random numbers in evaluation mode, too."""
    torch.manual_seed(0)
    return given


def _copy(given: mt.Inputs) -> mt.Inputs:
    args, kwargs = tree_map_only(Tensor, Tensor.clone, (given.args, given.kwargs))
    return mt.Inputs(*args, **kwargs)


def table(tallies: dict[str, list[Tally]]) -> Iterator[str]:
    """Return a row for each family, and one for all."""
    yield "| family | models | cuts listed | refused there | tried | bit-equal | refused by mt.split | errors | wrong |"
    yield "|---|---|---|---|---|---|---|---|---|"
    every = [one for several in tallies.values() for one in several]
    for family, several in (*tallies.items(), ("all", every)):
        counts = [
            len(several),
            sum(one.listed for one in several),
            sum(one.unlisted.total() for one in several),
            sum(one.tried for one in several),
            sum(one.exact for one in several),
            sum(len(one.late) for one in several),
            sum(len(one.failed) for one in several),
            sum(len(one.wrong) for one in several),
        ]
        yield f"| {family} | " + " | ".join(map(str, counts)) + " |"
