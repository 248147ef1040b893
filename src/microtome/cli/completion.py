"""Shell completion of the names of models and of files; click completes commands, options and choices.

The names of models in other packages are read from a cache, which `microtome models` writes: torchvision, timm and
transformers list theirs only after importing torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

from microtome.cli.options.choices import BUILT_IN, SOURCES

#: The package of the models of a source, if it is not of the same name.
_PACKAGES = {"hf": "transformers"}


def complete_model(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a model, or the path of a Python file."""
    if incomplete.startswith((".", "~")) or "/" in incomplete or os.sep in incomplete:
        return complete_file(context, parameter, incomplete)
    sources = [source for source in SOURCES if f"{source}:".startswith(incomplete.partition(":")[0])]
    if ":" not in incomplete and not sources:
        return complete_file(context, parameter, incomplete)
    if ":" not in incomplete and len(sources) > 1:
        return [CompletionItem(f"{source}:") for source in sources]
    names = [f"{source}:{name}" for source in sources for name in _names_of(source) or ("",)]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_file(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Let the shell complete the path of a file."""
    return [CompletionItem(incomplete, type="file")]


def _names_of(source: str) -> tuple[str, ...]:
    """Return the names of a source, without its prefix; none if they are not in the cache for the installed version."""
    if source == "zoo":
        return BUILT_IN
    cached = _read_cache().get(source)
    if not isinstance(cached, dict) or cached.get("version") != _version_of(source):
        return ()
    names = cached.get("names")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def cache_names(names: Iterable[str]) -> None:
    """Write the names of all models for later completions; do nothing if the cache cannot be written."""
    by_source: dict[str, list[str]] = {}
    for full_name in names:
        source, _, name = full_name.partition(":")
        by_source.setdefault(source, []).append(name)
    data = {source: {"version": _version_of(source), "names": listed} for source, listed in by_source.items()}
    file = _cache_file()
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(data), encoding="utf-8")
        partial.replace(file)
    except OSError:
        return


def _read_cache() -> dict[str, Any]:
    try:
        data = json.loads(_cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _cache_file() -> Path:
    variable, default = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    folder = os.environ.get(variable)
    return (Path(folder) if folder else Path.home() / default) / "microtome" / "models.json"


def _version_of(source: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # takes as long as the rest of a completion

    try:
        return version(_PACKAGES.get(source, source))
    except PackageNotFoundError:
        return None


class _BashComplete(BashComplete):
    """Completes names with colons, at which bash splits words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        words, index = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        *args, incomplete = _join_colons([*words[1:index], *(words[index : index + 1] or [""])])
        return args, incomplete

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """Leave out the part of the completions that precedes the last colon, which bash keeps."""
        items = super().get_completions(args, incomplete)
        kept = incomplete[: incomplete.rfind(":") + 1]
        for item in items:
            item.value = item.value.removeprefix(kept)
        return items


def _join_colons(words: Iterable[str]) -> list[str]:
    joined: list[str] = []
    for word in words:
        if joined and (word.startswith(":") or joined[-1].endswith(":")):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def register() -> None:
    """Replace click's completion for bash."""
    add_completion_class(_BashComplete)
