"""What comes from others: vendored scripts are those that were reviewed, and known-bad releases are not accepted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from hashlib import sha256
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import microtome
from tools.lock import UNHASHED, locked

ROOT = Path(__file__).parents[1]
VENDOR = Path(microtome.__file__).parent / "report" / "html" / "vendor"


def test_vendored_files_are_those_whose_digests_are_listed() -> None:
    lines = (VENDOR / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    found = {
        file.name: sha256(file.read_bytes()).hexdigest()
        for file in VENDOR.iterdir()
        if file.suffix not in ("", ".LICENSE")
    }
    assert found == listed
    assert len(found) == 3


@pytest.mark.parametrize(
    ("package", "bad", "good"),
    [
        ("grpcio", ["1.60.0", "1.64.1", "1.65.1", "1.65.2"], ["1.65.4", "1.66.0", "1.85.1"]),  # CVE-2024-7246
        (
            "protobuf",  # CVE-2025-4565
            ["4.25.3", "5.26.1", "5.28.3", "5.29.1", "5.29.4", "6.30.0", "6.30.1", "6.30.2", "6.31.0"],
            ["5.29.5", "5.29.6", "6.31.1", "6.32.0", "6.33.6", "7.34.0", "7.36.2"],
        ),
    ],
)
def test_releases_with_known_vulnerabilities_are_refused(package: str, bad: list[str], good: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = (one for one in map(Requirement, extras["remote"]) if one.name == package)
    assert not any(one in wanted.specifier for one in bad)
    assert all(one in wanted.specifier for one in good)


def _locked() -> dict[str, str]:
    """The versions in the lock file, each with a digest."""
    text = (ROOT / "requirements-dev.lock").read_text()
    entries = [line for line in text.replace("\\\n", "").splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"([a-z0-9-]+)==(\S+) +--hash=sha256:[0-9a-f]{64}", entry) for entry in entries]
    return {one[1]: one[2] for one in found if one is not None} if all(found) else {}


def test_the_lock_file_has_a_digest_and_a_fitting_version_of_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["remote"], *extras["dev"], *extras["docs"], *extras["bench"]]
    found = _locked()
    assert len(found) > 50
    for one in map(Requirement, wanted):
        if one.name not in UNHASHED:
            assert found[canonicalize_name(one.name)] in one.specifier, one
    assert not UNHASHED & found.keys()


def test_a_report_of_pip_becomes_a_lock_without_places() -> None:
    def item(name: str, version: str) -> dict[str, object]:
        place = {"url": f"https://example.org/{name}.whl", "archive_info": {"hashes": {"sha256": 64 * "a"}}}
        return {"metadata": {"name": name, "version": version}, "download_info": place}

    text = locked({"install": [item("torch", "2"), item("Typing_Extensions", "4.1"), item("attrs", "25")]})
    entries = [line for line in text.splitlines() if not line.startswith("#")]
    digest = f"    --hash=sha256:{64 * 'a'}"
    assert entries == ["attrs==25 \\", digest, "typing-extensions==4.1 \\", digest]
    assert "example.org" not in text


def test_the_bill_of_materials_names_what_is_installed(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("cyclonedx-py")), "environment", "--pyproject", "pyproject.toml"]
    file = tmp_path / "sbom.json"
    subprocess.run(
        [*command, "--no-validate", "--of", "JSON", "-o", str(file), sys.executable],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    document = json.loads(file.read_text())
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "microtome"
    assert {"torch", "grpcio", "protobuf"} <= {one["name"] for one in document["components"]}
