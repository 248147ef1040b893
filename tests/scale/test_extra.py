"""Without Ray: the package can be imported, and its functions say what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from microtome.scale import ray

CODE = """
import sys
sys.modules["ray"] = None  # as if it were not installed
import microtome.scale.ray
from microtome.scale.ray import deploy
"""


@pytest.mark.integration
def test_without_ray_a_function_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert "NotInstalled: ray is not installed, which microtome.scale.ray needs: pip install" in done.stderr


@pytest.mark.integration
def test_the_package_is_imported_whether_or_not_the_function_of_its_name_is_used() -> None:
    for statement in ("from microtome.scale import ray", "import microtome.scale.ray as ray"):
        printed = "ray.record, microtome.scale, microtome.scale.ray"
        code = f"import microtome; microtome.scale(0.5); {statement}; print({printed})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("<function record at")
        assert "<function scale at" in done.stdout
        assert "<module 'microtome.scale.ray'" in done.stdout


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'microtome.scale.ray' has no attribute 'deplox'"):
        ray.deplox  # noqa: B018
