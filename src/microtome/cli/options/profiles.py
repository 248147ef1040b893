"""Profiles in files, for commands that compare or use them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microtome.cli.progress import print_notes
from microtome.errors import BadFile
from microtome.results.base import Result

if TYPE_CHECKING:
    from microtome.results.profile import Profile


def load_profile(file: str) -> Profile:
    from microtome.load import load
    from microtome.results.phases import Phases
    from microtome.results.profile import Profile

    if ":" in file and not Path(file).exists():
        raise BadFile(f"expected a file of a profile, which microtome profile {file} --json F writes, got {file!r}")
    result = load(file)
    if not isinstance(result, Profile):
        got = f"a file of kind {result.kind!r}" if isinstance(result, Result) else "a recording"
        if isinstance(result, Phases):
            got += ", of which mt.load(F)['prefill'] is one"
        raise BadFile(f"expected a profile in {str(Path(file))!r} (see microtome profile --json), got {got}")
    return result


def note_busy_machines(results: Mapping[str, Any]) -> None:
    """Print a note on each profile among results, by its file, whose machine was too busy for its times."""
    from microtome.report.notes import busy_notes
    from microtome.results.phases import Phases
    from microtome.results.profile import Profile

    for file, result in results.items():
        named = [(file, result)] if isinstance(result, Profile) else []
        if isinstance(result, Phases):
            named = [(f"{file}, {phase}", profile) for phase, profile in result]
        for name, profile in named:
            print_notes(f"{name}: {note.replace('this machine', 'the machine', 1)}" for note in busy_notes(profile))
