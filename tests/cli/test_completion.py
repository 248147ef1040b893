"""Shell completion, and the cache of names that it reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from microtome.cli import completion, main

NAMES = {"torchvision": ["resnet18", "resnet50"], "timm": ["resnet50"], "hf": ["bert"]}
VERSIONS = {"torchvision": version("torchvision"), "timm": version("timm"), "hf": version("transformers")}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "microtome" / "models.json"


def write_cache(file: Path, versions: dict[str, str]) -> None:
    file.parent.mkdir()
    file.write_text(json.dumps({name: {"version": versions[name], "names": NAMES[name]} for name in NAMES}))


def complete(*words: str) -> list[str]:
    """The completions of the last word."""
    completions = ShellComplete(main, {}, "microtome", "_MICROTOME_COMPLETE").get_completions([*words[:-1]], words[-1])
    return [item.value if item.type == "plain" else f"({item.type})" for item in completions]


def test_commands_options_and_choices() -> None:
    assert complete("pro") == ["profile"]
    assert complete("profile", "--conv") == ["--convention"]
    assert complete("profile", "--convention", "t") == ["torchvision", "torchstat"]
    assert complete("record", "--reduce", "") == ["mean", "max", "cls", "last"]
    assert complete("plan", "--objective", "e") == ["energy"]
    assert complete("profile", "--json", "") == ["(file)"]


def test_a_model_is_completed_from_its_source_on(cache: Path) -> None:
    write_cache(cache, VERSIONS)
    assert complete("profile", "") == ["zoo:", "torchvision:", "timm:", "hf:"]
    assert complete("profile", "t") == ["torchvision:", "timm:"]
    assert complete("profile", "to") == ["torchvision:resnet18", "torchvision:resnet50"]
    assert complete("cuts", "torchvision:resnet5") == ["torchvision:resnet50"]
    assert complete("track", "hf:") == ["hf:bert"]
    assert complete("track", "zoo:tiny-v") == ["zoo:tiny-vit"]
    assert complete("track", "nowhere:") == []
    assert complete("track", "./net") == ["(file)"]
    assert complete("track", "net") == ["(file)"]  # no source begins like this


FILES = {"F", "FILE", "FOLDER", "FOLDER_OR_NPY", "PROFILE.json", "A.json", "B.json"}


@pytest.mark.parametrize("command", main.list_commands(click.Context(main)))
def test_every_option_and_argument_that_names_a_file_completes_it(command: str) -> None:
    found = main.get_command(click.Context(main), command)
    assert found is not None
    context = click.Context(found)
    for parameter in found.params:
        if parameter.metavar in FILES:
            completed = parameter.shell_complete(context, "a")
            assert [item.type for item in completed] in (["file"], ["dir"]), parameter.name


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"torchvision": []}', '{"torchvision": {"names": 1}}', "\xff"])
def test_without_a_cache_the_sources_are_completed(text: str | None, cache: Path) -> None:
    if text is not None:
        cache.parent.mkdir()
        cache.write_text(text, encoding="latin-1")
    assert complete("profile", "to") == ["torchvision:"]
    assert complete("profile", "torchvision:res") == []
    assert complete("profile", "zoo:tiny-l") == ["zoo:tiny-lstm"]


def test_the_names_of_another_version_are_not_completed(cache: Path) -> None:
    write_cache(cache, VERSIONS | {"timm": "0.1"})
    assert complete("profile", "timm:res") == []
    assert complete("profile", "hf:") == ["hf:bert"]


def test_models_writes_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(main, ["models", "zoo:*"]).exit_code == 0
    assert not cache.exists()  # a pattern lists some of the names
    done = CliRunner().invoke(main, ["models"])
    assert set(json.loads(cache.read_text())) == {"zoo", "torchvision", "timm", "hf"}
    assert [file.name for file in cache.parent.iterdir()] == ["models.json"]
    listed = [name for name in done.stdout.split() if name.startswith("torchvision:vit_b")]
    assert complete("profile", "torchvision:vit_b") == listed
    assert listed


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "microtome").write_text("a file in its place")
    completion.cache_names(["zoo:tiny-vit"])
    assert complete("profile", "zoo:tiny-v") == ["zoo:tiny-vit"]


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("microtome prof", ["profile"]),
        ("microtome profile torchvision : resnet5", ["resnet50"]),
        ("microtome profile torchvision :", ["resnet18", "resnet50"]),
        ("microtome profile torchv", ["torchvision:resnet18", "torchvision:resnet50"]),
        ("microtome profile torchvision : resnet50 --conv", ["--convention"]),
    ],
)
def test_bash_completes_names_that_it_splits_at_colons(
    words: str, completions: list[str], cache: Path, tmp_path: Path
) -> None:
    write_cache(cache, VERSIONS)
    program = tmp_path / "bin" / "microtome"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m microtome "$@"\n')
    program.chmod(0o755)
    script = f"""
        eval "$(_MICROTOME_COMPLETE=bash_source microtome)"
        COMP_WORDS=({words})
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _microtome_completion microtome
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = os.environ | {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == completions
    assert done.stderr == ""
