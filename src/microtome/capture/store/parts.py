"""A recording in parts, which several processes write: a folder for each, and a list of those that count.

parts.json                  names the parts, in order; written last
part-1f0a-00000/ …          each a recording of its own, which gets its name when it is complete
.part-1f0a-00000.….tmp/     a part being written, or left by a killed process
.lock                       locked by the process that collects the parts
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from microtome.capture.store.folder import LOCK, FolderLock, record_error
from microtome.errors import BadFile
from microtome.files.reading import read_json, translate_read_errors
from microtome.files.types import find_mismatch
from microtome.files.writing import write_atomically, write_buffers

PARTS = "parts.json"
KIND = "parts of a recording"
SCHEMA = 1

_NAME = re.compile(r"part-[0-9a-f]{4,}-[0-9]{5,}")
_PARTIAL = re.compile(r"\.part-[0-9a-f]{4,}-[0-9]{5,}\.[0-9a-f]+\.tmp|\.parts\.json\.[0-9a-f]+\.tmp")


def part_name(key: str, number: int) -> str:
    """Return the name of a part.

    Args:
        key: Hexadecimal digits that no other recording to the folder has.
    """
    return f"part-{key}-{number:05d}"


def write_part(folder: Path, name: str, write: Callable[[Path], object]) -> Path:
    """Write a part under a temporary name and rename it; return it as it is if it is complete already.

    If several processes write the same part, the first that completes it wins, and the work of the others is removed.
    """
    final = folder / name
    if final.is_dir():
        return final
    partial = folder / f".{name}.{os.urandom(8).hex()}.tmp"
    try:
        write(partial)
        os.rename(partial, final)
    except OSError:
        if not final.is_dir():  # else another process has completed it
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


class PartsFolder:
    """A folder in which the parts of a recording are collected, locked until `close`.

    It must be new or empty, or hold only what a killed process left of another recording in parts, which is removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_new = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _check_has_no_recording(folder)
            self._lock = FolderLock(folder)
            self._remove(keep=())
        except OSError as error:
            raise record_error(folder, error) from error

    def publish(self, names: Sequence[str]) -> None:
        """Write the list of the parts, and remove all others."""
        if missing := [name for name in names if not (self.folder / name).is_dir()]:
            raise BadFile(
                f"{len(missing)} of {len(names)} parts are not in {str(self.folder)!r}, such as {missing[0]!r}: "
                "record to a folder that all nodes share"
            )
        data = {"kind": KIND, "schema": SCHEMA, "parts": list(names), "sum": _sum(names)}
        text = json.dumps(data, indent=1).encode() + b"\n"
        write_atomically(self.folder / PARTS, lambda descriptor: write_buffers(descriptor, [text]))
        self._remove(keep=names)

    def discard(self) -> None:
        """Remove all parts, and the folder if it was new."""
        self._remove(keep=())
        if self._is_new:
            (self.folder / LOCK).unlink(missing_ok=True)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    def _remove(self, keep: Sequence[str]) -> None:
        kept = set(keep)
        for path in self.folder.iterdir():
            if _PARTIAL.fullmatch(path.name) or (_NAME.fullmatch(path.name) and path.name not in kept):
                shutil.rmtree(path, ignore_errors=True)


def _check_has_no_recording(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    if PARTS in names:
        raise BadFile(f"{str(folder)!r} already holds a recording in parts: record to another folder")
    others = [name for name in names if name != LOCK and not (_NAME.fullmatch(name) or _PARTIAL.fullmatch(name))]
    if others:
        raise BadFile(
            f"expected a new or empty folder, got {str(folder)!r}, which has {others[0]!r}: record to another folder"
        )


def read_parts(folder: Path) -> list[Path]:
    """Return the folders of the parts of a recording, in order; the folder itself if it has no parts."""
    file = folder / PARTS
    if not file.exists():
        return [folder]
    data = read_json(file)
    with translate_read_errors(repr(str(file))):
        names = data["parts"]
        if data["kind"] != KIND or data["schema"] != SCHEMA:
            raise BadFile(f"{str(file)!r}: expected version {SCHEMA} of {KIND}, got {data['schema']!r:.80}")
        if find_mismatch(names, list[str]) is not None or not all(map(_NAME.fullmatch, names)):
            raise ValueError("expected names of parts in the folder")
        if data["sum"] != (expected := _sum(names)):
            raise BadFile(f"{str(file)!r} is corrupt: expected the checksum {expected}, got {data['sum']!r:.80}")
    return [folder / name for name in names]


def _sum(names: Sequence[str]) -> str:
    return xxh3_64_hexdigest(json.dumps(list(names)).encode())
