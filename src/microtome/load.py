"""Read any result from its file or folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from microtome.errors import BadFile
from microtome.files.reading import File, read_json
from microtome.results.base import load_result


def load(file: File) -> Any:
    """Read a result that `to_json` wrote, or a folder that `mt.record` wrote to.

    >>> load("/does/not/exist.json")
    Traceback (most recent call last):
        ...
    microtome.errors.BadFile: cannot read '/does/not/exist.json': No such file or directory
    """
    if not Path(file).is_dir():
        return load_result(file)
    from microtome.capture.store import open_folder  # not imported for other results: it is large

    if not (Path(file) / "manifest.json").exists():
        _check_holds_no_other(Path(file))
    return open_folder(file)


def _check_holds_no_other(folder: Path) -> None:
    """Raise if a folder without a recording holds a split model or files of results."""
    plan = folder / "plan.json"
    content = read_json(plan) if plan.is_file() else None
    if isinstance(content, dict) and content.get("kind") == "split":
        raise BadFile(f"{str(folder)!r} holds a split model: microtome.load_stage reads one of its stages")
    if files := sorted(map(str, folder.glob("*.json"))):
        expected = "expected the file of a result, or the folder of a recording"
        raise BadFile(f"{expected}, got the folder {str(folder)!r}: load a file in it, such as {files[0]!r}")
