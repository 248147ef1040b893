"""The page of a profile: one self-contained HTML document, with a policy that lets only its own scripts run."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from os import PathLike
from typing import Any

from microtome.errors import BadQuery, describe_value
from microtome.report.html.compare import compare_data, compare_table
from microtome.report.html.data import block, columns, memory, metrics
from microtome.report.html.explorer import explorer
from microtome.report.html.overview import about, cards, caveats, facts, quiet_line
from microtome.report.html.prose import prose
from microtome.report.html.table import alive_table, layer_table
from microtome.report.palette import variables
from microtome.results.base import load_result
from microtome.results.cuts import Cuts
from microtome.results.metrics import METRICS, why_missing
from microtome.results.profile import Profile


def html(profile: Profile, cuts: Any = None, compare: Any = None) -> str:
    """Render the page.

    Args:
        cuts: The cuts of the model, for the split explorer, or their file.
        compare: Another profile to show beside this one, or its file.
    """
    places = _load(cuts, Cuts, "the cuts that microtome.cuts returns")
    other = _load(compare, Profile, "a profile to compare with")
    explored = explorer(profile, places, other)
    title = escape(profile.heading)
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{title}</title><style>{style()}</style></head><body>",
        f'<header><p class="brand">microtome profile</p><h1>{escape(profile.title)}</h1>{facts(profile)}</header>',
        f'<nav class="toc" aria-label="Sections">{_contents(other)}</nav><main>',
        *_sections(profile, explored, other),
        "</main>",
        block("data", _data(profile, explored, other)),
        *(f"<script>{script}</script>" for script in scripts()),
        "</body></html>",
    ]
    return ("\n".join(lines) + "\n").encode("utf-8", "replace").decode()  # a name may hold a lone surrogate


def _load(result: Any, kind: type[Any], expected: str) -> Any:
    if isinstance(result, str | PathLike):
        result = load_result(result)
    if result is not None and not isinstance(result, kind):
        raise BadQuery(f"expected {expected}, or the file that holds it, got {describe_value(result)}")
    return result


def _data(profile: Profile, explored: dict[str, Any], other: Profile | None) -> dict[str, Any]:
    return {
        "calls": columns(profile),
        "metrics": metrics(profile),
        "memory": memory(profile),
        "explorer": explored,
        "compare": None if other is None else compare_data(profile, other),
    }


_TITLES = {
    "overview": "At a glance",
    "tree": "Where it goes",
    "table": "Layers",
    "memory": "Memory over the run",
    "roofline": "Roofline",
    "explorer": "Where to cut",
    "compare": "Two runs",
    "about": "Environment and method",
}


_LEADS = {
    "tree": "Each module call is as wide as its cost. Click to zoom.",
    "table": "Every module call, with all calls inside it. Sort by a column, open a row, or search.",
    "memory": "Bytes that are live while each operator runs, as computed from the run.",
    "roofline": "How fast each layer computes for the bytes it moves; the larger a point, the longer its time.",
    "explorer": "The time to a result if the first part of the model runs on the edge and the rest in the cloud.",
}


def _contents(other: Profile | None) -> str:
    shown = {name: title for name, title in _TITLES.items() if name != "compare" or other is not None}
    return "".join(f'<a href="#section:{name}">{title}</a>' for name, title in shown.items())


def _sections(profile: Profile, explored: dict[str, Any], other: Profile | None) -> Iterator[str]:
    known = "".join(f"<li>{prose(caveat)}</li>" for caveat in caveats(profile))
    quiet = f'<p class="quiet">{quiet_line(profile)}</p>'
    yield _section("overview", cards(profile) + quiet + (f'<ul class="caveats">{known}</ul>' if known else ""))
    yield _section("tree", _view("The module tree, as wide as what each call costs"))
    yield _section("table", f'<div id="controls"></div>{layer_table(profile)}')
    yield _section("memory", _memory(profile))
    yield _section("roofline", _roofline(profile))
    missing = explored.get("missing")
    yield _section("explorer", _reason(missing) if missing else _view("The split explorer"))
    if other is not None:
        yield _section("compare", compare_table(profile, other) + _view("The calls that changed the most"))
    yield _section("about", about(profile))


def _memory(profile: Profile) -> str:
    if profile.timeline is None:
        return _reason(
            "This profile was written by an older microtome, which kept no memory over the run: profile again."
        )
    if profile.timeline.peak is None:
        return _reason("No operator ran.")
    return _view("Live bytes at each operator") + alive_table(profile.timeline)


def _roofline(profile: Profile) -> str:
    if profile.total.time_s is not None:
        return _view("Achieved rate against intensity")
    return _reason(f"There are no times to compute rates from: {why_missing(profile, METRICS['time_s'])}.")


def _section(name: str, body: str) -> str:
    has_lead = name in _LEADS and not body.startswith(_REASON)
    lead = f'<p class="lead">{_LEADS[name]}</p>' if has_lead else ""
    head = f'<h2 id="title:{name}">{_TITLES[name]}</h2>{lead}'
    return f'<section id="section:{name}" aria-labelledby="title:{name}">{head}{body}</section>'


def _view(title: str) -> str:
    """Return the place of a chart that the script draws."""
    return f'<div class="view"></div><p class="dim nojs">{title}: drawn where JavaScript may run.</p>'


_REASON = '<p class="reason">'


def _reason(why: str) -> str:
    """Return the reason why a section is empty."""
    return f"{_REASON}– {prose(why)}</p>"  # noqa: RUF001


# -- style, scripts and policy -----------------------------------------------------------------------------------------

#: In the order in which they build on each other.
_OURS = (
    "format", "dom", "model", "chart", "kinds", "search", "icicle", "table", "memory", "roofline", "cut_groups",
    "explorer", "compare", "main",
)  # fmt: skip
_VENDORED = ("d3-hierarchy.min.js", "uPlot.iife.min.js")


@cache
def style() -> str:
    steps = "".join(f".b{at}{{--b:{at}%}}" for at in range(101)) + "".join(f".d{at}{{--d:{at}}}" for at in range(33))
    return "\n".join((read_asset("vendor/uPlot.min.css"), variables(), read_asset("page.css"), steps))


@cache
def scripts() -> tuple[str, ...]:
    """Return the vendored libraries with their licences, and the page's own script."""
    vendored = []
    for name in _VENDORED:
        licence = read_asset(f"vendor/{name.partition('.')[0]}.LICENSE").strip()
        vendored.append(f"/*!\n{licence}\n*/\n{read_asset(f'vendor/{name}')}")
    ours = "\n".join(read_asset(f"js/{name}.js") for name in _OURS)
    return (*vendored, f'(() => {{\n"use strict";\n{ours}\n}})();')


@cache
def policy() -> str:
    """Return a Content-Security-Policy that allows the contents of the page by their hashes, and nothing else."""
    allowed = " ".join(map(_hash, scripts()))
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style())}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def read_asset(name: str) -> str:
    return files("microtome.report.html").joinpath(name).read_text(encoding="utf-8")
