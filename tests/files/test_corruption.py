"""Any bytes in any file that microtome reads give a result, or an error that names what is wrong, in bounded memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from microtome.errors import BadFile
from tests.files.mutations import mutated_bytes, mutated_json
from tests.files.samples import Sample, samples
from tests.remote.attack.harness import peak_of, reset_peak

KINDS = (
    *("profile", "diff", "cuts", "plan", "codecs", "run", "sweep"),
    *("manifest", "index", "shard", "stages", "stage weights"),
    *("weights.safetensors", "weights.pt", "meter", "array", "image", "settings", "token"),
)
#: Building a model or splitting one takes a while.
SLOW = ("stages", "stage weights", "settings")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    return samples(tmp_path_factory.mktemp("samples"))


@contextmanager
def bounded(most: int = 128 << 20) -> Iterator[None]:
    """Let the process take little more memory than it has: of addresses, and resident."""
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    rest = reset_peak(os.getpid())
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
    grew = peak_of(os.getpid()) - rest
    assert grew < most, f"expected at most {most} bytes more, got {grew}"


def test_every_kind_is_read_as_it_is(known: dict[str, Sample]) -> None:
    assert tuple(known) == KINDS
    for sample in known.values():
        sample.read()


@pytest.mark.parametrize("kind", KINDS)
def test_corrupt_bytes_give_a_result_or_an_error_that_names_the_file(known: dict[str, Sample], kind: str) -> None:
    sample = known[kind]
    whole, refused = sample.file.read_bytes(), 0
    try:
        with bounded():
            for data in mutated_bytes(whole, 20 if kind in SLOW else 150):
                sample.file.write_bytes(data)
                refused += not _is_read(sample, data[:200])
    finally:
        sample.file.write_bytes(whole)
    assert refused > 0
    sample.read()


@pytest.mark.parametrize("kind", [*KINDS[:12], "settings"])
def test_forged_values_give_a_result_or_an_error_that_names_the_file(known: dict[str, Sample], kind: str) -> None:
    sample = known[kind]
    assert sample.forge is not None
    folder = {file: file.read_bytes() for file in sample.file.parent.iterdir() if file.is_file()}
    refused = 0
    try:
        with bounded():
            for document in mutated_json(sample.document, 40 if kind in SLOW else 250):
                sample.forge(document)
                refused += not _is_read(sample, document)
    finally:
        for file, data in folder.items():
            file.write_bytes(data)
    assert refused > 0
    sample.read()


@pytest.mark.parametrize("names", [[-1], {"a": 1}])
def test_a_recording_whose_other_names_are_not_names_is_refused(known: dict[str, Sample], names: Any) -> None:
    sample = known["manifest"]
    assert sample.forge is not None
    before = sample.file.read_bytes()
    try:
        sample.forge(sample.document | {"manifest": sample.document["manifest"] | {"other_names": names}})
        with pytest.raises(BadFile, match=r"the recording in .* is corrupt: ValueError: other_names.*: expected a"):
            sample.read()
    finally:
        sample.file.write_bytes(before)


def _is_read(sample: Sample, tried: Any) -> bool:
    try:
        sample.read()
    except sample.errors as error:
        refusal = str(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} in place of a result for {tried!r:.500}") from error
    else:
        return True
    # Errors in settings name the key.
    assert str(sample.file.parent) in refusal or sample.file.suffix == ".yaml"
    return False
