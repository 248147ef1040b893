"""Read any result from its file or folder."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from os.path import isdir
from pathlib import Path
from typing import Any

from microtome.errors import BadFile, BadQuery, describe_value
from microtome.files.reading import File, read_json
from microtome.results.base import load_result


def load(file: File | Sequence[File]) -> Any:
    """Read a result that `to_json` wrote, or a folder that `mt.record` or `microtome.scale.ray.record` wrote to.

    A list of folders becomes one recording of them all, in the order of the list: its statistics are the same to the
    last bit as those of one recording of all the tensors.

    >>> load("/does/not/exist.json")
    Traceback (most recent call last):
        ...
    microtome.errors.BadFile: cannot read '/does/not/exist.json': No such file or directory
    """
    if isinstance(file, str | PathLike):
        return _load_recordings([file]) if isdir(file) else load_result(file)
    if not isinstance(file, Sequence) or not all(isinstance(one, str | PathLike) for one in file):
        raise BadQuery(f"expected the name of a file or a folder, or a list of folders, got {describe_value(file)}")
    return _load_recordings(list(file))


def _load_recordings(folders: list[File]) -> Any:
    from microtome.capture.store.merged import open_recordings  # not imported for other results: it is large
    from microtome.capture.store.parts import PARTS

    for folder in map(Path, folders):
        if folder.is_dir() and not any((folder / name).exists() for name in ("manifest.json", PARTS)):
            _check_holds_no_other(folder)
    return open_recordings(folders)


def _check_holds_no_other(folder: Path) -> None:
    """Raise if a folder without a recording holds a split model or files of results."""
    plan = folder / "plan.json"
    content = read_json(plan) if plan.is_file() else None
    if isinstance(content, dict) and content.get("kind") == "split":
        raise BadFile(f"{str(folder)!r} holds a split model: microtome.load_stage reads one of its stages")
    if files := sorted(map(str, folder.glob("*.json"))):
        expected = "expected the file of a result, or the folder of a recording"
        raise BadFile(f"{expected}, got the folder {str(folder)!r}: load a file in it, such as {files[0]!r}")
