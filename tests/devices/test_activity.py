"""Kernels and the marks they belong to, from fake events of torch's profiler."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

from microtome.devices import activity
from microtome.devices.activity import Activity, Allocation, Launch
from microtome.errors import Unsupported


@dataclass(frozen=True)
class Event:
    """One of torch's `_KinetoEvent`, as far as it is asked."""

    called: str
    start: int
    device: DeviceType = DeviceType.CPU
    duration: int = 0
    correlation: int = 0
    linked: int = 0
    annotation: bool = False
    size: int = 0

    def name(self) -> str:
        return self.called

    def device_type(self) -> DeviceType:
        return self.device

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def correlation_id(self) -> int:
        return self.correlation

    def linked_correlation_id(self) -> int:
        return self.linked

    def is_user_annotation(self) -> bool:
        return self.annotation

    def nbytes(self) -> int:
        return self.size


def mark(label: str, start: int, correlation: int = 0) -> Event:
    return Event(f"microtome:{label}", start, correlation=correlation, annotation=True)


def op(name: str, start: int, correlation: int) -> Event:
    return Event(name, start, correlation=correlation)


def launch(start: int, correlation: int, linked: int = 0, name: str = "cudaLaunchKernel") -> Event:
    return Event(name, start, correlation=correlation, linked=linked)


def kernel(name: str, start: int, correlation: int, linked: int = 0, duration: int = 1000) -> Event:
    return Event(name, start, DeviceType.CUDA, duration, correlation, linked)


def memory(start: int, size: int, device: DeviceType = DeviceType.CUDA) -> Event:
    return Event("[memory]", start, device, size=size)


def filled(*events: Event) -> Activity:
    found = Activity()
    activity._fill(found, list(events), "cuda", "cu")
    return found


def owners(found: Activity) -> dict[str, str | None]:
    return {one.name: None if one.mark < 0 else found.labels[one.mark] for one in found.launches}


def test_a_kernel_belongs_to_the_mark_before_its_launch_and_not_to_the_one_before_its_start() -> None:
    # The device is behind: both kernels run after both marks.
    found = filled(
        mark("a", 10), launch(11, 1), mark("b", 20), launch(21, 2), kernel("one", 100, 1), kernel("two", 200, 2)
    )
    assert owners(found) == {"one": "a", "two": "b"}


def test_durations_are_those_of_the_device_in_seconds() -> None:
    found = filled(mark("a", 10), launch(11, 1), kernel("one", 100, 1, duration=2_500_000))
    assert found.launches == [Launch(0, "one", 0.0025)]


def test_launches_before_the_first_mark_have_no_mark() -> None:
    found = filled(launch(5, 1), mark("a", 10), kernel("early", 100, 1))
    assert found.launches[0].mark == -1


def test_launches_at_the_time_of_a_mark_belong_to_it() -> None:
    assert owners(filled(mark("a", 10), mark("b", 20), launch(20, 1), kernel("one", 30, 1))) == {"one": "b"}


def test_the_numbers_of_operators_are_not_those_of_launches() -> None:
    # Both count from one: operator 7 began under "a", launch 7 under "b", and the kernel is that of launch 7, which
    # operator 3, begun under "c", has made.
    found = filled(
        mark("a", 10),
        op("aten::add", 11, 7),
        mark("b", 20),
        launch(21, 7, linked=3),
        mark("c", 30),
        op("aten::mul", 31, 3),
        kernel("one", 100, 7, linked=3),
    )
    assert owners(found) == {"one": "b"}


def test_a_launch_takes_precedence_over_an_operator_of_the_same_id_in_any_order() -> None:
    events = (mark("a", 10), launch(11, 4), mark("b", 20), op("aten::add", 21, 4), kernel("one", 100, 4, linked=9))
    assert {owners(filled(*some))["one"] for some in permutations(events)} == {"a"}


def test_without_its_launch_a_kernel_belongs_to_where_its_operator_began() -> None:
    # A launch that was not recorded: number 5 is unknown as a launch, though there is an operator 5.
    found = filled(
        mark("a", 10), op("aten::mm", 11, 2), mark("b", 20), op("aten::add", 21, 5), kernel("one", 100, 5, linked=2)
    )
    assert owners(found) == {"one": "a"}


def test_without_launch_and_operator_a_kernel_belongs_to_where_it_began() -> None:
    found = filled(mark("a", 10), mark("b", 20), kernel("one", 25, 1, linked=2), mark("c", 30))
    assert owners(found) == {"one": "b"}


@pytest.mark.parametrize("name", ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaGraphLaunch"])
def test_calls_of_both_interfaces_of_cuda_are_launches(name: str) -> None:
    found = filled(mark("a", 10), launch(11, 1, name=name), mark("b", 20), kernel("one", 100, 1))
    assert owners(found) == {"one": "a"}


def test_one_launch_may_have_many_kernels() -> None:
    found = filled(mark("a", 10), launch(11, 1), mark("b", 20), kernel("one", 100, 1), kernel("two", 200, 1))
    assert owners(found) == {"one": "a", "two": "a"}


def test_launches_are_in_the_order_of_the_host_and_not_of_the_device() -> None:
    found = filled(mark("a", 0), launch(11, 1), launch(12, 2), kernel("second", 100, 2), kernel("first", 200, 1))
    assert [one.name for one in found.launches] == ["first", "second"]


def test_a_range_on_the_device_is_no_kernel() -> None:
    shadow = Event("microtome:a", 50, DeviceType.CUDA, duration=900, annotation=True)
    found = filled(mark("a", 10), launch(11, 1), kernel("one", 100, 1), shadow)
    assert owners(found) == {"one": "a"}
    assert found.labels == ["a"]


def test_marks_are_in_the_order_of_time_and_may_have_the_same_label() -> None:
    found = filled(mark("b", 20), launch(31, 1), mark("a", 30), mark("a", 10), kernel("one", 100, 1))
    assert found.labels == ["a", "b", "a"]
    assert found.launches[0].mark == 2


def test_the_ranges_of_others_are_no_marks() -> None:
    other = Event("Optimizer.step", 15, annotation=True)
    found = filled(mark("a", 10), other, launch(16, 1), kernel("one", 100, 1))
    assert found.labels == ["a"]
    assert owners(found) == {"one": "a"}


def test_allocations_are_signed_and_in_order_of_time() -> None:
    found = filled(
        memory(25, -512), mark("a", 10), memory(5, 64), memory(15, 512), mark("b", 20), memory(16, 99, DeviceType.CPU)
    )
    assert found.allocations == [Allocation(-1, 64), Allocation(0, 512), Allocation(1, -512)]
    assert found.launches == []


def test_no_events_give_an_empty_activity() -> None:
    assert filled() == Activity([], [], [])


def test_the_marks_and_operators_of_torch_itself_are_read() -> None:
    with profile(use_kineto=True, profile_memory=True) as profiler:
        activity.mark("a")
        torch.ones(100).add(1)
        activity.mark("b.c#1")
    results = profiler.kineto_results
    assert results is not None
    found = Activity()
    activity._fill(found, results.events(), "cuda", "cu")
    assert found.labels == ["a", "b.c#1"]
    assert (found.launches, found.allocations) == ([], [])  # all of it was done on the CPU


def test_within_a_profiler_that_runs_nothing_is_watched() -> None:
    with (
        profile(use_kineto=True),
        pytest.raises(Unsupported, match="torch's profiler is running, and only one can"),
        activity.watch("cuda", launch_prefix="cu"),
    ):
        pass
