"""Paths of values in documents, written as `spec.environments[0].name`."""

from __future__ import annotations

import json
import re

Path = tuple[str | int, ...]
"""Position of a value in a document: keys and list indexes from the top."""

# Keys of these characters are written bare; all others in double quotes, as in JSON.
_BARE = re.compile(r"[\w/-]+")
_STEP = re.compile(r'\.(?P<bare>[^\s."\[\]=]+)|\.(?P<quoted>"(?:[^"\\]|\\.)*")|\[(?P<index>[0-9]{1,9})\]')


def format_path(path: Path) -> str:
    """The path as text: `spec.generation.resources.limits."nvidia.com/gpu"`; empty for the whole document."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part if _BARE.fullmatch(part) else quoted(part)}"
    return text.removeprefix(".")


def parse_path(text: str) -> tuple[Path, str]:
    """The path at the beginning of a text, and the rest of the text.

    The inverse of `format_path`. In addition, any key without `."[]=` and spaces may be bare.
    """
    path: list[str | int] = []
    dotted = text if text.startswith("[") else f".{text}"
    position = 0
    while (step := _STEP.match(dotted, position)) is not None:
        if step["index"] is not None:
            path.append(int(step["index"]))
        elif step["bare"] is not None:
            path.append(step["bare"])
        else:
            try:
                path.append(json.loads(step["quoted"]))
            except ValueError:
                break
        position = step.end()
    return tuple(path), dotted[position:]


MOST_SHOWN = 200
"""Maximum number of characters of a path, or of an option, in a message."""


def shown(text: str) -> str:
    """A text for a message: its beginning and its end, if it is long."""
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[: MOST_SHOWN // 2]}...{text[3 - MOST_SHOWN // 2 :]}"


def quoted(text: str) -> str:
    """A text in double quotes, with unprintable characters escaped."""
    return json.dumps(text, ensure_ascii=not text.isprintable())
