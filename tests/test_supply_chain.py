"""What comes from others: vendored scripts are those that were reviewed, and known-bad releases are not accepted."""

from __future__ import annotations

import tomllib
from hashlib import sha256
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import microtome

ROOT = Path(__file__).parents[1]
VENDOR = Path(microtome.__file__).parent / "report" / "page" / "vendor"


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
        ("grpcio", ["1.60.0", "1.65.3"], ["1.65.4", "1.85.1"]),  # CVE-2024-7246
        ("protobuf", ["4.25.3", "5.29.4", "6.30.2", "6.31.0"], ["5.29.5", "6.31.1", "7.36.2"]),  # CVE-2025-4565
    ],
)
def test_releases_with_known_vulnerabilities_are_refused(package: str, bad: list[str], good: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = (one for one in map(Requirement, extras["remote"]) if one.name == package)
    assert not any(one in wanted.specifier for one in bad)
    assert all(one in wanted.specifier for one in good)
