"""Logs of a process as JSON lines on standard error."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


class JsonLines(logging.Formatter):
    """One JSON object per line, as log collectors expect."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """
        Args:
            fields: Additional fields of every line.
        """
        super().__init__()
        self._fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr(level: str = "INFO", **fields: Any) -> None:
    """Make this process log JSON lines to standard error, each with these fields.

    Raises:
        ValueError: The level does not exist.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(fields))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
