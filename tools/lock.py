"""Write the lock file of the development environment from a report of `pip install --report`.

torch and torchvision are omitted: their builds, and so their digests, depend on the source. constraints.txt pins their
versions.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements-dev.lock"

#: Packages without a digest: built locally, or with builds that depend on the source.
UNHASHED = {"microtome", "torch", "torchvision"}

_HEADER = """\
# The development environment with its digests, for Linux on x86-64 and CPython 3.11. Written by `make lock`, installed
# by `make LOCKED=1 ...`. torch and torchvision have no digest here, since their builds depend on where they come from:
# constraints.txt pins their versions.
"""


def locked(report: dict[str, object]) -> str:
    """Format the lock file."""
    found = {}
    for item in report["install"]:  # type: ignore[attr-defined]
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        if name not in UNHASHED:
            digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
            found[name] = f"{name}=={item['metadata']['version']} \\\n    --hash=sha256:{digest}\n"
    return _HEADER + "".join(found[name] for name in sorted(found))


if __name__ == "__main__":
    LOCK.write_text(locked(json.loads(Path(sys.argv[1]).read_text())))
