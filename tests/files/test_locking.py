"""Locks of files, also where there is no fcntl."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import microtome as mt
from microtome import zoo
from microtome.errors import BadFile
from microtome.files.locking import lock_exclusively, unlock


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what Windows does not have, and lock by file as its runtime library locks regions."""
    msvcrt = ModuleType("msvcrt")
    msvcrt.LK_NBLCK, msvcrt.LK_UNLCK = 2, 0  # type: ignore[attr-defined]

    def locking(descriptor: int, mode: int, nbytes: int) -> None:
        assert nbytes == 1
        assert os.lseek(descriptor, 0, os.SEEK_CUR) > 1 << 20  # others must be able to read the content
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if mode == 2 else fcntl.LOCK_UN)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    msvcrt.locking = locking  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", msvcrt)
    for name in ("pread", "pwrite", "writev"):
        monkeypatch.delattr(os, name)


@pytest.mark.parametrize("system", ["posix", "windows"])
def test_a_file_is_locked_once(system: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if system == "windows":
        request.getfixturevalue("windows")
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    try:
        lock_exclusively(first)
        with pytest.raises(BlockingIOError):
            lock_exclusively(second)
        unlock(first)
        lock_exclusively(second)
    finally:
        os.close(first)
        os.close(second)


@pytest.mark.usefixtures("windows")
def test_a_folder_is_recorded_to_without_fcntl(tmp_path: Path) -> None:
    model, x = zoo.build("tiny-resnet")
    with torch.no_grad(), mt.record(model, "layer1", to=tmp_path / "acts"):
        model(x)
        with pytest.raises(BadFile, match=rf"is being recorded to by the process with pid {os.getpid()} \(this proc"):
            mt.record(model, "layer1", to=tmp_path / "acts", append=True).__enter__()
    with torch.no_grad(), mt.record(model, "layer1", to=tmp_path / "acts", append=True):
        model(x)
    assert len(mt.load(tmp_path / "acts")["layer1"]) == 2
