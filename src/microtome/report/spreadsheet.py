"""CSV that a spreadsheet reads as data."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Spreadsheets take a cell that begins so for a formula; some leave out tabs and new lines before it.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any] | Mapping[str, Any]]) -> str:
    """A table as CSV. A string that a spreadsheet would take for a formula begins with an apostrophe.

    >>> csv_text(["name", "value"], [["=1+1", -1.5], {"name": "a,b"}]).splitlines()
    ['name,value', "'=1+1,-1.5", '"a,b",']
    """
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(map(_cell, header))
    for row in rows:
        cells = [row.get(name) for name in header] if isinstance(row, Mapping) else row
        writer.writerow(map(_cell, cells))
    return file.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
