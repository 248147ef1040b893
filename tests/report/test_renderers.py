"""Every form that a result asks for has a renderer."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import microtome
from microtome.report import find_renderer
from microtome.results.base import _KINDS
from tests.files.samples import samples

ROOT = Path(microtome.__file__).parent


def forms_asked_for() -> set[str]:
    """The forms in calls of `render` and `find_renderer` in the package; `{result.kind}` stands for each kind."""
    found = set()
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("render", "find_renderer")
            ):
                for argument in node.args:
                    form = ast.unparse(argument).lstrip("f").strip("'\"")
                    if isinstance(argument, ast.Constant | ast.JoinedStr):
                        found |= {form.replace("{result.kind}", kind) for kind in _KINDS}
    return found


def test_every_form_that_is_asked_for_has_a_renderer() -> None:
    forms = forms_asked_for()
    assert forms >= {
        "graph.drawing.draw_svg",
        "profile.report",
        "sweep.records",
        "formats.html",
        "pictures.attention.plot",
    }
    assert all(callable(find_renderer(form)) for form in forms)


def test_every_cell_of_a_csv_file_is_a_number_or_a_text(tmp_path: Path) -> None:
    known = {kind: sample for kind, sample in samples(tmp_path).items() if kind in _KINDS}
    assert {"profile", "plan", "run", "sweep"} <= known.keys()
    for kind, sample in known.items():
        records = find_renderer(f"{kind}.records")(microtome.load(sample.file))
        nested = {
            (kind, name): value
            for record in records
            for name, value in record.items()
            if not isinstance(value, str | int | float | None)
        }
        assert not nested


def test_reports_are_not_imported_before_a_result_is_rendered() -> None:
    code = "import sys, microtome; print([name for name in sys.modules if name.startswith('microtome.report')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['microtome.report']"
