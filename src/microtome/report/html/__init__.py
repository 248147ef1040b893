"""A profile as one page that needs nothing else: cards, a tree, a table, charts, and where to cut."""

from __future__ import annotations

from microtome.report.html.document import html

__all__ = ["html"]
