"""Without the packages of the extra `remote`: every result can be read and shown, and the rest says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import microtome as mt
from microtome import zoo
from microtome.plan.codec_benchmark import codec_costs
from microtome.remote.sweep import sweep
from microtome.results.base import _KINDS
from microtome.results.profiles import ProfiledModel, ProfileFailure, Profiles
from microtome.zoo.writer import KVCache
from tests.marks import slow
from tests.remote.test_requests import request_log

#: Names a package, then runs the code with it made unimportable.
WITHOUT = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}.split():
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
import microtome as mt
{code}
"""
PACKAGES = "grpc grpc_health google prometheus_client"


def run_without(packages: str, code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(packages=packages, code=code)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of every kind of result."""
    folder = tmp_path_factory.mktemp("results")
    model, x = zoo.build("tiny-resnet")
    timed = mt.profile(model, x, measure="time", repeat=3)
    cuts = mt.cuts(model, x)
    with mt.serve(model, x, listen="127.0.0.1:0") as server:
        swept = sweep(model, x, server.address, ["layer1"], repeat=1)
    plan = mt.plan(cuts, edge=timed, cloud=timed, link=mt.Link("1Mbps", rtt="1ms"))
    writer, ids = zoo.build("tiny-writer")
    assert isinstance(ids, dict)
    phases = mt.profile(writer, {**ids, "cache": KVCache()}, phases=("prefill", "decode"))
    results = [timed, timed.diff(timed), cuts, plan, codec_costs(cuts, "raw"), request_log(), swept, mt.profile(model)]
    both = Profiles((ProfiledModel("resnet", timed), ProfiledModel("vit", None, ProfileFailure("BadQuery", "why"))))
    results += [phases, both]
    for result in results:
        result.to_json(folder / f"{result.kind}.json")
    assert {result.kind for result in results} == set(_KINDS)
    return folder


def test_every_result_is_read_and_shown_without_the_extra(folder: Path) -> None:
    code = """
for kind in {kinds!r}:
    found = mt.load(f"{{kind}}.json")
    assert found.to_json() == open(f"{{kind}}.json").read(), kind
    print(kind, len(str(found)) > 0)
assert "grpc" not in sys.modules
"""
    kinds = [kind for kind in _KINDS if kind != "codecs"]  # costs of codecs have no report
    assert run_without(PACKAGES, code.format(kinds=kinds), folder).split() == [
        word for kind in kinds for word in (kind, "True")
    ]


@pytest.mark.parametrize("package", [PACKAGES.split()[0], *slow(*PACKAGES.split()[1:])])
@pytest.mark.parametrize("name", ["serve", "connect"])
def test_what_needs_the_extra_says_what_to_install(package: str, name: str, tmp_path: Path) -> None:
    code = f"""
try:
    mt.{name}
except mt.errors.NotInstalled as error:
    print(error)
"""
    printed = run_without(package, f"import microtome.errors\n{code}", tmp_path)
    assert printed.startswith(package)
    assert "is not installed, which servers and clients need: pip install 'microtome[remote]'" in printed
