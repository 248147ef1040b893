"""Read any result from its file or folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from microtome.errors import BadFile
from microtome.files.reading import File
from microtome.results.base import load_result


def load(file: File) -> Any:
    """Read a result that `to_json` wrote, or a folder that `mt.record` wrote to.

    >>> load("/does/not/exist.json")
    Traceback (most recent call last):
        ...
    microtome.errors.BadFile: cannot read '/does/not/exist.json': No such file or directory
    """
    if (Path(file) / "plan.json").is_file():
        raise BadFile(f"{str(file)!r} holds a split model: microtome.load_stage reads one of its stages")
    if Path(file).is_dir():
        from microtome.capture.store import open_folder  # not imported for other results: it is large

        return open_folder(file)
    return load_result(file)
