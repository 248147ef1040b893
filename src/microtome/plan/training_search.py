"""The best stages of a model in training.

The time of a step has no closed form for unequal stages, so placements are priced by running their schedule. A lower
bound leads the search: a stage begins after one forward of the stages before it, works for all micro-batches, and the
backward of the last of them returns through the stages before it. The least bound of the stages from a point on does
not depend on what is before the point, so one pass from the last stage to the first computes all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import ceil, inf
from typing import NamedTuple

import torch
from torch import Tensor

from microtome.plan.schedules import in_flight
from microtome.plan.training import Pipeline
from microtome.results.plan import Candidate

#: The most placements that a search prices or extends.
_MAX_STEPS = 1_000
#: Shorter steps by less than this fraction are not searched: measured times are less exact.
_TOLERANCE = 1e-3


class Found(NamedTuple):
    """The best placement on so many devices.

    Attributes:
        bound_s: No placement takes less for a step; the step of the candidate itself if it is the best.
    """

    candidate: Candidate
    bound_s: float


def candidates(pipeline: Pipeline) -> tuple[tuple[Candidate, ...], list[str]]:
    """Return every placement on two devices, or the best ones for each number of more, the best first; and notes."""
    count = len(pipeline.devices)
    notes: list[str] = []
    priced = [pipeline.price_whole(device) for device in range(count)]
    if count == 2:
        priced += [pipeline.price((point,)) for point in range(1, pipeline.end)]
    else:
        for stages in range(2, count + 1):
            found = _PlacementSearch(pipeline, stages).run()
            if found is not None:
                priced.append(found.candidate)
                notes += _gap(found, stages)
    ranked = sorted(priced, key=lambda candidate: (candidate.refused is not None, candidate.rank("training")))
    return tuple(ranked), notes


def _gap(found: Found, stages: int) -> Iterator[str]:
    """Yield a note if the search ended before it was known that no other placement is faster."""
    step_s = _step_s(found.candidate)
    if found.bound_s < step_s * (1 - _TOLERANCE):
        gap = 1 - found.bound_s / step_s
        yield f"{stages} stages: the search ended early; the best step may be up to {gap:.1%} shorter"


class _Partial(NamedTuple):
    """A placement up to a point, in the order of the search.

    Attributes:
        bound_s: No placement that begins with it takes less for a step.
        stages_left: Those after the last point.
        elapsed_s: Seconds of one micro-batch alone, forward and backward, in the stages before.
        reached_s: The greatest bound of those stages.
    """

    bound_s: float
    stages_left: int
    points: tuple[int, ...]
    elapsed_s: float
    reached_s: float


class _PlacementSearch:
    """The search for the best placement with a stage on each of the first `stages` devices."""

    def __init__(self, pipeline: Pipeline, stages: int) -> None:
        self._pipeline, self._stages = pipeline, stages
        self._work_s = [pipeline.forward_s[stage] + pipeline.backward_s[stage] for stage in range(stages)]
        # By link and point: seconds for which activations and gradients occupy the link, and of a round trip.
        links = pipeline.links[: stages - 1]
        self._sent_s = [pipeline.sent_bytes / link.bytes_per_s for link in links]
        self._returned_s = [pipeline.returned_bytes / link.bytes_per_s for link in links]
        self._links_s = [
            sent + returned + link.rtt_s
            for sent, returned, link in zip(self._sent_s, self._returned_s, links, strict=True)
        ]
        self._allowed = [self._is_allowed(stage) for stage in range(stages)]
        self._tails, self._tables = self._bounds()

    def run(self) -> Found | None:
        """Price placements in the order of their bounds until none can be better."""
        root = _Partial(float(self._tails[0][0, 0]), self._stages, (), 0.0, 0.0)
        if root.bound_s == inf:
            return None
        partial = root
        while partial.stages_left > 1:
            partial = min(self._continue(partial, inf))
        best = self._pipeline.price(partial.points)
        queue = [root]
        for _ in range(_MAX_STEPS):
            if not queue or queue[0].bound_s >= _step_s(best) * (1 - _TOLERANCE):
                return Found(best, _step_s(best))
            partial = heapq.heappop(queue)
            if partial.stages_left == 1:
                candidate = self._pipeline.price(partial.points)
                best = min(best, candidate, key=lambda one: one.rank("training"))
                continue
            for following in self._continue(partial, _step_s(best) * (1 - _TOLERANCE)):
                heapq.heappush(queue, following)
        return Found(best, queue[0].bound_s if queue else _step_s(best))

    def _continue(self, partial: _Partial, most_s: float) -> Iterator[_Partial]:
        """Yield the placements with one more stage whose bound is below `most_s`."""
        stage = len(partial.points)
        begin = partial.points[-1] if partial.points else 0
        bounds = (partial.elapsed_s + self._tables[stage][begin]).clamp(min=partial.reached_s)
        work = self._work_s[stage][begin]
        for end in torch.nonzero(bounds < most_s).flatten().tolist():
            elapsed_s = partial.elapsed_s + float(work[end] + self._links_s[stage][end])
            reached_s = partial.elapsed_s + self._pipeline.micro_batches * float(work[end])
            yield _Partial(
                float(bounds[end]),
                self._stages - stage - 1,
                (*partial.points, end),
                elapsed_s,
                max(partial.reached_s, reached_s),
            )

    # -- bounds --------------------------------------------------------------------------------------------------------

    def _is_allowed(self, stage: int) -> Tensor:
        """Mark the parts of the model, not empty, that fit on the device of a stage."""
        pipeline = self._pipeline
        index = torch.arange(len(pipeline.points))
        limit = pipeline.limits.get(pipeline.devices[stage].name, inf)
        return (pipeline.memory_bytes(stage, self._stages) <= limit) & (index[:, None] < index[None, :])

    def _bounds(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the least bounds from a point on: of each stage from each point, and also to each other point.

        The former have two rows, the bound of a step and the time of one micro-batch alone.
        """
        last = self._stages - 1
        work = self._work_s[last][:, -1].masked_fill(~self._allowed[last][:, -1], inf)
        tails = [torch.stack([self._pipeline.micro_batches * work, work])]
        tables: list[Tensor] = []
        for stage in reversed(range(last)):
            tables.insert(0, self._stage_bounds(stage, tails[0]))
            alone = (self._work_s[stage] + self._links_s[stage] + tails[0][1]).masked_fill(~self._allowed[stage], inf)
            tails.insert(0, torch.stack([tables[0].amin(1), alone.amin(1)]))
        return tails, tables

    def _stage_bounds(self, stage: int, tail: Tensor) -> Tensor:
        """Return the bound of a stage from each point (row) to each other, with the best stages after it."""
        count, passed_s = self._pipeline.micro_batches, self._work_s[stage] + self._links_s[stage]
        held = in_flight(self._pipeline.schedule, stage, self._stages, count)
        alone_s = passed_s + tail[1]  # one micro-batch, to the end of the model and back
        bounds = torch.stack(
            [
                passed_s + tail[0],
                count * self._work_s[stage] + self._idle_s(stage, held, self._links_s[stage] + tail[1]),
                alone_s + (count - 1) * torch.maximum(self._sent_s[stage], self._returned_s[stage]),
                alone_s * ceil(count / held),  # a forward waits for the backward of the one so many before
            ]
        )
        return bounds.amax(0).masked_fill(~self._allowed[stage], inf)

    def _idle_s(self, stage: int, held: int, away_s: Tensor) -> Tensor:
        """Return the least time for which a stage waits between its first forward and its last backward.

        Args:
            away_s: Seconds from the end of a forward until the gradients of its outputs return.
        """
        forward_s, backward_s = self._pipeline.forward_s[stage], self._pipeline.backward_s[stage]
        if self._pipeline.schedule == "gpipe":  # the first micro-batch is away, then the others pass its slowest stage
            return away_s
        # Other forwards fill the time until the first gradients return, other backwards that until the last return.
        waits = [(away_s - (held - 1) * seconds).clamp(min=0.0) for seconds in (forward_s, backward_s)]
        return waits[0] + waits[1] if self._pipeline.micro_batches > held else torch.maximum(*waits)


def _step_s(candidate: Candidate) -> float:
    assert candidate.training is not None
    return candidate.training.step_s
