"""Logs of both sides: one JSON object a line, with the id of the request where there is one."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from microtome.errors import sanitize_text

LEVELS = ("debug", "info", "warning", "error")
#: How much of a request's id, which a client chooses, is logged.
ID_CHARS = 64
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: its time, level, message and extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        beside = {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info and record.exc_info[1] is not None:
            beside["error"] = repr(record.exc_info[1])
        line = {"time": when, "level": record.levelname.lower(), "event": record.getMessage(), **beside}
        return sanitize_text(json.dumps(line, default=str))


def log_to_stderr(level: str) -> None:
    """Show what `microtome.remote` says from this level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    log = logging.getLogger("microtome.remote")
    log.addHandler(handler)
    log.setLevel(level.upper())
    log.propagate = False
