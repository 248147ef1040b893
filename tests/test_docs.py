"""The manual and the README: nothing is left out of them, and what they point to is there."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest

from benchmarks import __main__ as suites
from benchmarks import report
from benchmarks.remote import __main__ as remote_suites

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "microtome"
PAGES = sorted(DOCS.rglob("*.md"))
READMES = sorted(PACKAGE.rglob("README.md"))
LINKING = [*PAGES, *ROOT.glob("*.md"), *READMES]


def test_every_page_is_in_the_contents() -> None:
    contents = set(re.findall(r"^ +- (?:.*: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert contents == {page.relative_to(DOCS).as_posix() for page in PAGES}


def test_every_result_of_a_benchmark_is_shown() -> None:
    shown = set(re.findall(r'"benchmarks/results/([\w-]+\.md):', (DOCS / "benchmarks.md").read_text()))
    assert shown == {file.name for file in (ROOT / "benchmarks" / "results").glob("*.md")}


def test_results_of_suites_are_those_that_their_commands_save() -> None:
    found = {file.stem for file in report.RESULTS.glob("*.md")}
    assert {*suites.SUITES, "remote-chain", "simulate", "chains"} <= found
    saved = {f"remote-{name}" for name in remote_suites.SUITES}
    assert {name for name in found if name.startswith("remote")} <= saved


def test_results_of_one_suite_replace_those_of_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "SUMMARY", tmp_path / "summary")
    monkeypatch.setattr(remote_suites, "two_hosts", nullcontext)  # needs root
    found = {name: lambda _, name=name: [report.Target(f"target of {name}", 1.0, 2.0)] for name in ("one", "two")}
    for name in found:
        assert remote_suites.main([name, "--save"], found) == 0
    for name in found:
        assert f"target of {name} | 1 | 2 | yes" in (tmp_path / f"remote-{name}.md").read_text()
        assert f"target of {name}" in report.SUMMARY.read_text()


def test_the_table_of_all_targets_is_that_of_the_results() -> None:
    assert report.SUMMARY.read_text() == report.summary()


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_in_python_are_run_and_pictures_are_there(page: Path) -> None:
    text = page.read_text()
    for code in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert code.startswith(">>>"), f"not run as a test: {code}"
    for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (page.parent / target).is_file(), target


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)", _prose(page)):
        if not link.startswith("http"):
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), link
            assert not anchor or anchor in _anchors(target), link


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_architecture_names_modules_and_files_that_exist() -> None:
    spans = re.findall(r"`([\w./-]+)`", _prose(DOCS / "architecture.md"))
    packages = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    names = [span for span in spans if "/" not in span and span.partition(".")[0] in packages and "." in span]
    files = [span for span in spans if span.partition("/")[0] in packages and "/" in span]
    assert len(names) > 40
    assert len(files) > 10
    for name in names:
        resolve_name(f"microtome.{name}")  # raises if it does not exist
    assert [file for file in files if not (PACKAGE / file).exists()] == []


@pytest.mark.parametrize("readme", READMES, ids=lambda page: page.parent.name)
def test_the_readme_of_a_folder_names_files_that_exist(readme: Path) -> None:
    cells = re.findall(r"^\| (`.*?) \|", readme.read_text(), re.MULTILINE)
    files = [file for cell in cells for file in re.findall(r"`([\w./]+)`", cell)]
    assert [file for file in files if not (readme.parent / file).exists()] == []


def test_pictures_need_nothing_from_elsewhere() -> None:
    for picture in (DOCS / "pictures").glob("*.svg"):
        links = set(re.findall(r"https?://[^\"'<> )]+", picture.read_text()))
        assert links <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}, picture


@pytest.mark.slow
@pytest.mark.skipif(find_spec("material") is None, reason="the docs extra is not installed: make docs")
def test_the_manual_is_built_without_a_warning(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    pages = [file.read_text() for file in (tmp_path / "site").rglob("*.html")]
    assert not [page for page in pages if re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?://(?!127)', page)]
