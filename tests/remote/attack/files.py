"""Read damaged and forged files of every kind, and write to folders that were prepared with links."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from microtome.capture.store import DiskStore
from microtome.errors import BadFile, MicrotomeError
from tests.files.mutations import mutated_bytes, mutated_json
from tests.files.samples import Sample, samples
from tests.remote.attack.harness import Outcome, run_limited


def run(seconds: float) -> Outcome:
    found = run_limited("tests.remote.attack.files:read_all", seconds, most=1 << 30, timeout=seconds + 120.0)
    if found.fault is not None:
        return Outcome("files", 1, 0, float("inf"), faults=(found.fault,))
    tried, held, faults = found.result
    return Outcome("files", tried, held, found.peak_mb, found.rest_mb, faults=tuple(faults))


def read_all(seconds: float) -> tuple[int, int, list[str]]:
    """Damage files until the time is over: how many were tried, how many were read or refused, and other errors."""
    ends = time.monotonic() + seconds
    tried = held = 0
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        known = samples(Path(folder))
        for seed in count():
            for kind, sample in known.items():
                for what in _damaged(sample, seed):
                    tried += 1
                    held += _holds(sample, f"{kind}, seed {seed}: {what!r:.200}", faults)
            held += _is_left_alone(Path(folder) / f"prepared-{seed}", faults)
            tried += 1
            if time.monotonic() > ends or len(faults) > 20:
                return tried, held, faults
    raise AssertionError


def _damaged(sample: Sample, seed: int) -> Iterator[Any]:
    """Put damage into the files of a sample, one after the other; they are whole again afterwards."""
    whole = {file: file.read_bytes() for file in sample.file.parent.iterdir() if file.is_file()}
    try:
        for data in mutated_bytes(whole[sample.file], 10, seed):
            sample.file.write_bytes(data)
            yield data
        sample.file.write_bytes(whole[sample.file])
        if sample.forge is not None:
            for document in mutated_json(sample.document, 20, seed):
                sample.forge(document)
                yield document
    finally:
        for file, data in whole.items():
            file.write_bytes(data)


def _holds(sample: Sample, what: str, faults: list[str]) -> bool:
    """Whether a file gives a result, or an error of its kind."""
    try:
        sample.read()
    except sample.errors:
        return True
    except Exception as error:  # noqa: BLE001  any other is what the attack is after
        faults.append(f"{type(error).__name__}: {error!s:.200} for {what}")
        return False
    return True


def _is_left_alone(folder: Path, faults: list[str]) -> bool:
    """Whether recording to a folder full of links leaves the files alone that they point to."""
    folder.mkdir()
    victim = folder.with_suffix(".victim")
    victim.write_text("as it was")
    for name in (".manifest.json.tmp", ".shard-00000.safetensors.tmp"):
        (folder / name).symlink_to(victim)
    lock = folder.with_suffix(".locked")
    lock.mkdir()
    (lock / ".lock").symlink_to(victim)
    for place in (folder, lock):
        try:
            with DiskStore(place, {"model": "Net"}) as store:
                store.add("0", torch.zeros(32))
        except BadFile:
            pass
        except (MicrotomeError, OSError) as error:
            faults.append(f"{type(error).__name__}: {error!s:.200} for links in {place.suffix}")
    if victim.read_text() != "as it was":
        faults.append("a file outside of the folder was written")
        return False
    os.unlink(victim)
    return True
