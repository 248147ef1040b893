"""What users may rely on."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
            "Phases",
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
            "errors",
            "extract",
            "extractor",
            "load",
        ),
        *(
            "load_exported",
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
        *(
            "rollout",
            "run_until",
            "scale",
            "select",
            "serve",
            "split",
            "sum_tied_gradients",
            "trace",
            "track",
            "zero",
            "zoo",
        ),
    ]
    assert all(getattr(microtome, name).__doc__ for name in microtome.__all__)


def test_every_error_is_in_the_tree_at_the_top_of_its_file() -> None:
    found = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    drawn = {word for line in (errors.__doc__ or "").splitlines() for word in line.split() if word[0].isupper()}
    assert found <= drawn
    assert all(issubclass(getattr(errors, name), errors.MicrotomeError) for name in found)


def run_python(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def test_dir_lists_the_public_names_and_no_others() -> None:
    script = "import microtome; print(*(name for name in dir(microtome) if not name.startswith('__')))"
    assert run_python(script).split() == sorted(microtome.__all__)
    # Submodules that are imported later are not listed either.
    assert {name for name in dir(microtome) if not name.startswith("__")} == set(microtome.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'microtome' has no attribute 'profiles'"):
        _ = microtome.profiles


#: Imports that bind a subpackage of microtome, before the function of the same name is looked up.
IMPORTS = [
    "import microtome.{name}",
    "from microtome.{name} import {name} as function",
    "from microtome import {name} as function; import microtome.{name}",
    "import microtome; microtome.{name}; import microtome.{name}",
    "from microtome import *",
    "import microtome.split.boundary.boundary, microtome.profile.energy, microtome.track.tracker",
    "import microtome.plan.cost, microtome.trace.costs, microtome.load",
    "import microtome.cli",
    "import microtome.remote.client",
]

LOOK_UP = """
import sys, types
from importlib import import_module

for first in {imports!r}:
    for name in ("load", "plan", "profile", "split", "trace", "track"):
        for module in [module for module in sys.modules if module.partition(".")[0] == "microtome"]:
            del sys.modules[module]
        exec(first.format(name=name), {{}})
        function = getattr(import_module("microtome"), name)
        assert isinstance(function, types.FunctionType), (first, name, function)
        assert function.__module__.startswith("microtome." + name), (first, name, function)
print("done")
"""


@pytest.mark.integration
def test_a_function_is_not_replaced_by_the_subpackage_of_its_name() -> None:
    assert run_python(LOOK_UP.format(imports=IMPORTS)) == "done"


def test_importing_microtome_imports_nothing_heavy() -> None:
    new = {name.partition(".")[0] for name in run_python("import sys, microtome; print(*sys.modules)").split()}
    assert not new & {"torch", "numpy", "rich", "click", "psutil", "safetensors", "grpc"}
