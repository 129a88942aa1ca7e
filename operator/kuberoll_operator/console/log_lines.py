"""Log lines: time, source and presentation. Pure."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import click

_NANOSECONDS: Final = 1_000_000_000
_STAMP: Final = re.compile(
    r"(?P<second>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(?P<fraction>\d{1,9})\d*)?(?P<zone>Z|[+-]\d\d:\d\d)"
)
_COLORS: Final = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_blue")
_LEVEL_COLORS: Final = {"warning": "yellow", "error": "red", "critical": "red"}
# No escape sequence of a program's output reaches the terminal.
_CONTROL: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DURATION: Final = re.compile(r"(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+)s?)?")


@dataclass(frozen=True, slots=True, order=True)
class LogLine:
    """One log line.

    Attributes:
        when: Time, in nanoseconds since 1970.
        source: Name of its source, as it is displayed.
        text: Text without the newline.
    """

    when: int
    source: str
    text: str


def nanoseconds(stamp: str) -> int | None:
    """An RFC 3339 time with at most nine fractional digits, in nanoseconds since 1970; None if it cannot be parsed."""
    found = _STAMP.fullmatch(stamp)
    if found is None:
        return None
    zone = "+00:00" if found["zone"] == "Z" else found["zone"]
    try:
        second = int(datetime.fromisoformat(found["second"] + zone).timestamp())
    except ValueError:
        return None
    return second * _NANOSECONDS + int((found["fraction"] or "0").ljust(9, "0"))


def stamped_line(source: str, line: bytes, before: int) -> LogLine:
    """A line as the kubelet returns it with `timestamps=true`.

    Args:
        before: Time of the previous line, for a line without a timestamp.
    """
    text = line.decode(errors="replace").rstrip("\r\n")
    stamp, separator, rest = text.partition(" ")
    when = nanoseconds(stamp) if separator or stamp else None
    return LogLine(before, source, text) if when is None else LogLine(when, source, rest)


def event_line(event: Mapping[str, Any]) -> LogLine | None:
    """An event of the operator as a line; None if it has no time."""
    series = event.get("series") or {}
    stamps = (
        series.get("lastObservedTime"),
        event.get("eventTime"),
        event.get("deprecatedLastTimestamp"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    )
    when = next((found for stamp in stamps if stamp and (found := nanoseconds(str(stamp))) is not None), None)
    if when is None:
        return None
    level = "warning" if event.get("type") == "Warning" else "info"
    message = f"{event.get('reason')}: {event.get('note') or ''}"
    return LogLine(when, "operator", json.dumps({"level": level, "message": message}))


def format_line(line: LogLine, *, width: int, raw: bool = False) -> str:
    """A line for a terminal; several lines if it has a traceback.

    Args:
        width: Width of the column of sources.
        raw: True to leave JSON as it is.
    """
    color = _COLORS[zlib.crc32(line.source.encode()) % len(_COLORS)]
    prefix = click.style(f"{line.source:<{width}} |", fg=color)
    clock = datetime.fromtimestamp(line.when // _NANOSECONDS, UTC).strftime("%H:%M:%S")
    clock = f"{clock}.{line.when % _NANOSECONDS // 1_000_000:03d}"
    level, text = ("", line.text) if raw else _plain(line.text)
    words = [f"{clock} {f'{level} ' if level else ''}{part}" for part in text.splitlines()] or [clock]
    return "\n".join(
        f"{prefix} {click.style(clean, fg=_LEVEL_COLORS[level]) if level in _LEVEL_COLORS else clean}"
        for clean in (_CONTROL.sub("", part.expandtabs()) for part in words)
    )


def _plain(text: str) -> tuple[str, str]:
    """Level and text of a line; KubeRoll's own lines are JSON, others are left unchanged."""
    if not text.startswith("{"):
        return "", text
    try:
        found = json.loads(text)
    except ValueError:
        return "", text
    if not isinstance(found, dict):
        return "", text
    if isinstance(found.get("event"), str):
        fields = (f"{key}={_short(value)}" for key, value in found.items() if key != "event")
        return "", " ".join([found["event"], *fields])
    if not isinstance(found.get("message"), str):
        return "", text
    traceback = found.get("traceback")
    message = found["message"] + (f"\n{traceback}" if isinstance(traceback, str) else "")
    return str(found.get("level") or ""), message


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def seconds_of(text: str) -> int:
    """Seconds in `90`, `90s`, `10m` or `1h30m`.

    Raises:
        ValueError: The text has another form.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        raise ValueError(f"found {text!r}; write seconds, 10m or 1h30m")
    hours, minutes, seconds = (int(found[name] or 0) for name in "hms")
    return hours * 3600 + minutes * 60 + seconds
