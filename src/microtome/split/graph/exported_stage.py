"""A stage in a file that another runtime runs."""

from __future__ import annotations

from typing import Any, NamedTuple


class ExportedStage(NamedTuple):
    """A stage that was written to a file.

    Attributes:
        file: The file.
        metadata: What it says about itself: model, fingerprint, cuts, names, shapes and dtypes.
        verified: How its outputs on the example differ from those of the stage.
    """

    file: str
    metadata: dict[str, Any]
    verified: str
