from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.scale.serve_cluster import ray_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster with one node for the tests of a file; a test may add others, and must remove them."""
    with ray_cluster(edge=1) as cluster:
        yield cluster
