"""Extraction of the program from a response."""

from __future__ import annotations

from kuberoll_workers.environments.builtin.responses import fences

_PYTHON = ("", "python", "python3", "py", "py3")


def program_of(response: str) -> str | None:
    """The program of a response: its last fenced block of Python, else the whole text after `</think>`.

    A block that is not closed counts up to the end: a stop string may have ended the response there.

    Returns:
        None if the response is empty, or has only blocks of other languages.
    """
    text = response.rpartition("</think>")[2]
    lines = list(fences(text))
    if not lines:
        return text if text.strip() else None
    found = None
    for opening in range(0, len(lines), 2):
        start = lines[opening].end + 1
        end = lines[opening + 1].start if opening + 1 < len(lines) else len(text)
        # What follows the ticks names the language.
        language = lines[opening].info.partition(" ")[0].partition("\t")[0]
        if language.lower() in _PYTHON and text[start:end].strip():
            found = text[start:end]
    return found
