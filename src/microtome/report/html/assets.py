"""The style and the scripts of the page, and the policy that lets these run and nothing else."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

#: In the order in which they build on each other.
_OURS = ("format", "dom", "model", "chart", "icicle", "table", "memory", "roofline", "explorer", "compare", "main")
_VENDORED = ("d3-hierarchy.min.js", "uPlot.iife.min.js")


@cache
def style() -> str:
    steps = "".join(f".b{at}{{--b:{at}%}}" for at in range(101)) + "".join(f".d{at}{{--d:{at}}}" for at in range(33))
    return "\n".join((_read("vendor/uPlot.min.css"), _read("page.css"), steps))


@cache
def scripts() -> tuple[str, ...]:
    """The vendored libraries, with the licences they ask to be kept with, and the page's own."""
    vendored = [_with_licence(name) for name in _VENDORED]
    ours = "\n".join(_read(f"js/{name}.js") for name in _OURS)
    return (*vendored, f'(() => {{\n"use strict";\n{ours}\n}})();')


@cache
def policy() -> str:
    """A Content-Security-Policy: what the page holds by its hash, and no more."""
    allowed = " ".join(map(_hash, scripts()))
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style())}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _with_licence(name: str) -> str:
    licence = _read(f"vendor/{name.partition('.')[0]}.LICENSE").strip()
    return f"/*!\n{licence}\n*/\n{_read(f'vendor/{name}')}"


def _read(name: str) -> str:
    return files("microtome.report.html").joinpath(name).read_text(encoding="utf-8")
