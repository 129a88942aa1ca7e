"""Texts that a judge is shown: question and reference of a row, and what is too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kuberoll_workers.environments.interface import ChatMessage, UnusableRow

_REFERENCES: Final = ("ground_truth", "expected_answer", "reference", "answer")


def question_of(log: Sequence[ChatMessage], state: Mapping[str, Any]) -> str:
    """The question of a row, else the last message of the user before a log's last message.

    Raises:
        UnusableRow: The row's question is no text.
    """
    question = state.get("question")
    if isinstance(question, str):
        return question
    if question is not None:
        raise UnusableRow(f"metadata.question: found {repr(question)[:80]}; it must be a text")
    asked = [message.get("content") for message in log[:-1] if message.get("role") == "user"]
    return str(asked[-1] or "") if asked else ""


def reference_of(state: Mapping[str, Any]) -> str:
    """The reference answer of a row, or a list of the accepted ones.

    Raises:
        UnusableRow: It has none.
    """
    key = next((key for key in _REFERENCES if state.get(key) is not None), None)
    if key is None:
        raise UnusableRow(
            f"metadata.{_REFERENCES[0]}: found None; the judge compares the response with it (or with "
            f"{', '.join(_REFERENCES[1:])})"
        )
    value = state[key]
    texts = [_written(item) for item in (value if isinstance(value, list) else [value])]
    if not texts or not all(texts):
        raise UnusableRow(f"metadata.{key}: found {str(value)[:80]!r}; it must be a text, a number, or a list of them")
    return texts[0] if len(texts) == 1 else "One of these:\n" + "\n".join(f"- {text}" for text in texts)


def _written(value: Any) -> str:
    """A reference as text; empty if it is none."""
    if isinstance(value, str):
        return value.strip()
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def shortened(text: str, limit: int) -> str:
    """A text with at most so many of its characters, and how many are missing."""
    return text if len(text) <= limit else f"{text[:limit]}\n[… {len(text) - limit} more characters]"
