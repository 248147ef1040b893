"""Format the logs of both sides as JSON, one object a line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from microtome.errors import sanitize_text

#: The most characters of a client's text, such as the id of a request, in a log record.
MAX_ID_CHARS = 64
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Format a record as a JSON object of its time, level, message and extra attributes."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}
        if record.exc_info and record.exc_info[1] is not None:
            extra["error"] = repr(record.exc_info[1])
        line = {"time": time, "level": record.levelname.lower(), "event": record.getMessage(), **extra}
        return sanitize_text(json.dumps(line, default=str))


def log_to_stderr(level: str) -> None:
    """Write the records of `microtome.remote` from this level on to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    log = logging.getLogger("microtome.remote")
    log.addHandler(handler)
    log.setLevel(level.upper())
    log.propagate = False
