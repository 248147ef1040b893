"""What users may rely on."""

from __future__ import annotations

import subprocess
import sys

import microtome
from microtome import errors


def test_public_names() -> None:
    assert sorted(microtome.__all__) == [
        *(
            "Boundary",
            "Call",
            "Cuts",
            "EnergyModel",
            "Features",
            "Inputs",
            "Link",
            "Meter",
            "MicrotomeError",
            "OpCost",
            "Plan",
            "Probe",
            "Profile",
            "Replace",
            "Session",
        ),
        *(
            "Skip",
            "Stop",
            "Stopped",
            "Trace",
            "Tracker",
            "attention",
            "connect",
            "cuts",
            "edit",
            "extract",
            "load",
        ),
        *(
            "load_stage",
            "noise",
            "patch_from",
            "plan",
            "profile",
            "record",
            "register_column",
            "register_formula",
            "register_meter",
        ),
        *("rollout", "run_until", "scale", "select", "serve", "split", "trace", "track", "zero"),
    ]
    assert all(getattr(microtome, name).__doc__ for name in microtome.__all__)


def test_every_error_is_in_the_tree_at_the_top_of_its_file() -> None:
    found = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    drawn = {word for line in (errors.__doc__ or "").splitlines() for word in line.split() if word[0].isupper()}
    assert found <= drawn
    assert all(issubclass(getattr(errors, name), errors.MicrotomeError) for name in found)


def test_importing_microtome_imports_nothing_heavy_beside_torch() -> None:
    script = "import torch, sys; before = set(sys.modules); import microtome; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    new = {name.partition(".")[0] for name in done.stdout.split()}
    assert new <= {"microtome", "difflib"}
