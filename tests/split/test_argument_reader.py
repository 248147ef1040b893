"""Arguments that are read by a layout found before are described and recorded as by walking their structure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from microtome.engine.pytree import as_state, tensor_occurrences
from microtome.inputs import Inputs
from microtome.split.analysis import structure_spec
from microtome.split.analysis.call_arguments import record_arguments, state_objects_in
from microtome.split.analysis.signature import describe, digest_of_call
from microtome.split.analysis.structure_spec import flatten
from microtome.split.execution.argument_reader import ArgumentReader, InputReader


class Memory:
    """A state object."""

    def __init__(self) -> None:
        self.kept = [torch.ones(2)]


_MEMORY, _OTHER = Memory(), Memory()
_TENSORS = [torch.ones(2, 3), torch.zeros(1, dtype=torch.int64), torch.nn.Parameter(torch.ones(4))]

leaves = st.one_of(
    st.sampled_from(_TENSORS),
    st.sampled_from([None, True, False, 0, 1, 2.5, "mean", "cuda:0", "x" * 100, torch.float16, _MEMORY, _OTHER, 1j]),
)
values = st.one_of(
    leaves, st.lists(leaves, max_size=3).map(tuple), st.lists(leaves, max_size=2), st.tuples(leaves, st.tuples(leaves))
)
calls = st.tuples(
    st.lists(values, max_size=3).map(tuple), st.dictionaries(st.sampled_from(["b", "a", "mask", "c"]), values)
)


def is_same(values: list[Any], others: list[Any]) -> bool:
    return len(values) == len(others) and all(one is other for one, other in zip(values, others, strict=True))


@given(st.lists(calls, min_size=1, max_size=4), st.booleans())
def test_a_reader_describes_and_records_as_a_walk_does(sequence: list[Any], in_order: bool) -> None:
    reader = ArgumentReader("key", in_order=in_order)
    with as_state((Memory,)):
        for args, kwargs in [*sequence, *sequence]:  # again, by the layouts that were found
            read = reader.read(args, kwargs)
            expected = describe(args, kwargs, in_order=in_order)
            assert read.describe(None) == (digest_of_call("key", expected), expected)
            assert repr(read.describe(None)[1].plain) == repr(expected.plain)  # 1 is not True
            assert is_same(read.tensors(), list(tensor_occurrences((args, kwargs))))
            assert is_same(read.state_objects(), state_objects_in((args, kwargs)))
            recorded, walked = read.record(), record_arguments(args, kwargs)
            assert is_same(recorded.tensors, walked.tensors)
            assert recorded.versions == walked.versions
            assert is_same(recorded.containers, walked.containers)
            assert is_same(recorded.objects, walked.objects)


@given(st.lists(calls, min_size=1, max_size=4))
def test_inputs_are_flattened_as_by_a_walk(sequence: list[Any]) -> None:
    reader = InputReader()
    with as_state((Memory,)):
        for args, kwargs in [*sequence, *sequence]:
            flat = reader.read(Inputs(*args, **kwargs))
            spec, tensors, plain = flatten((args, kwargs), arrays=[])
            assert (flat.spec.text, flat.spec.unsupported) == (spec.text, spec.unsupported)
            assert is_same(flat.tensors, tensors)
            assert repr(flat.plain) == repr(plain)


def test_arguments_of_frequent_structures_have_a_layout() -> None:
    reader, x = ArgumentReader("key", in_order=False), torch.ones(2)
    kwargs = {"mask": None, "rotary": (x, x), "memory": _MEMORY, "use_cache": True, "device": "cpu"}
    with as_state((Memory,)):
        assert [reader.read((x,), kwargs).layout is None for _ in range(2)] == [True, False]
        assert reader.read((x,), kwargs | {"device": "cuda:0"}).layout is None  # another string may be described apart
        assert reader.read((x,), kwargs | {"rotary": (x, None)}).layout is None


def test_what_a_call_may_mutate_is_recorded_in_every_run() -> None:
    reader, hidden = ArgumentReader("key", in_order=False), [torch.ones(1)]
    for _ in range(2):
        recorded = reader.read((torch.ones(1), hidden), {}).record()
        assert is_same(recorded.containers, [hidden])
    hidden.append(torch.ones(1))
    assert list(recorded.mutated_containers()) == [0]


def test_writes_are_found_by_either_way_of_reading() -> None:
    reader, x = ArgumentReader("key", in_order=False), torch.ones(1)
    for _ in range(2):
        recorded = reader.read((x,), {"scale": 2}).record()
        assert list(recorded.mutated_tensors()) == []
        x.add_(1)
        assert list(recorded.mutated_tensors()) == [0]


def test_a_reader_remembers_few_layouts() -> None:
    reader = ArgumentReader("key", in_order=False)
    for count in range(100):
        args: tuple[Tensor | None, ...] = (None,) * count
        assert reader.read(args, {}).describe(None)[1].plain == [None] * count
    assert len(reader._layouts) <= 8


@given(calls)
def test_positional_tensors_are_flattened_as_other_arguments_are(call: Any) -> None:
    args = tuple(value for value in call[0] if isinstance(value, Tensor))
    variants: list[Any] = [call, (args, {}), (args, call[1])]
    for arguments in variants:
        with as_state((Memory,)), pytest.MonkeyPatch.context() as patch:
            spec, tensors, plain = flatten(arguments, arrays=[])
            patch.setattr(structure_spec, "_are_positional_tensors", lambda _: False)
            walked, walked_tensors, walked_plain = flatten(arguments, arrays=[])
            assert (spec.text, spec.num_tensors, spec.num_plain) == (walked.text, walked.num_tensors, walked.num_plain)
            assert spec.unsupported == walked.unsupported
            assert is_same(tensors, walked_tensors)
            assert repr(plain) == repr(walked_plain)
