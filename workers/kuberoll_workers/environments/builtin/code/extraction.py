"""Extraction of the program from a response."""

from __future__ import annotations

from kuberoll_workers.environments.builtin.responses import fences

_PYTHON = ("", "python", "python3", "py", "py3")


def program_of(text: str, *, truncated: bool = False) -> str | None:
    """The program of a response: its last fenced block of Python, else the whole text.

    A block that is not closed counts up to the end, where a stop string may have ended the response.

    Args:
        text: What the response says after its thoughts.
        truncated: The response was cut off, so that only a block that is closed is a whole program.

    Returns:
        None if the response is empty, or has only blocks of other languages.
    """
    lines = list(fences(text))
    if not lines:
        return text if text.strip() and not truncated else None
    found = None
    for opening in range(0, len(lines) - truncated, 2):
        start = lines[opening].end + 1
        end = lines[opening + 1].start if opening + 1 < len(lines) else len(text)
        # What follows the ticks names the language.
        language = lines[opening].info.partition(" ")[0].partition("\t")[0]
        if language.lower() in _PYTHON and text[start:end].strip():
            found = text[start:end]
    return found
