"""Log-probabilities and policy versions of a response's tokens, in the compact form that the page has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kuberoll_workers.analysis.report.token_texts import TokenTexts
from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.text import one_line, visible

MOST_TOKENS = 8_000
"""Maximum number of tokens of a trajectory whose log-probabilities are in the page."""


def token_details(message: Message, texts: TokenTexts | None, *, room: int, whole: bool) -> dict[str, Any]:
    """Details of the tokens of a response; empty if there are none to show.

    `logprobs` has one number per token: thousandths below 0, to two significant digits. `lengths` are the characters of
    each token in the displayed text, or, where these are unknown, `ids` are the tokens. `versions` has
    `[version, start, end]`.

    Args:
        room: Maximum number of tokens.
        whole: True if the whole content is displayed.
    """
    found: dict[str, Any] = {}
    if message.policy_versions:
        found["versions"] = [(one_line(version, 40), start, end) for version, start, end in message.policy_versions]
    if message.logprobs is None or len(message.logprobs) > room or not whole:
        return found
    found["logprobs"] = _thousandths(message.logprobs)
    pieces = None if texts is None else texts.pieces(message.token_ids, message.content)
    if pieces is None:
        found["ids"] = list(message.token_ids)
    else:
        found["lengths"] = list(map(_displayed_length, pieces))
    return found


def _thousandths(logprobs: Sequence[float]) -> list[int]:
    # Some engines' arithmetic leaves a little above 0.
    values = np.maximum(np.rint(-1000 * np.asarray(logprobs, dtype=np.float64)), 0)
    digits = 10 ** np.maximum(np.floor(np.log10(np.maximum(values, 1))) - 1, 0)
    found: list[int] = (np.rint(values / digits) * digits).astype(np.int64).tolist()
    return found


@lru_cache(maxsize=1 << 16)
def _displayed_length(piece: str) -> int:
    """Length of a text as it is displayed, in JavaScript's characters."""
    text = visible(piece)
    return len(text) + sum(character > "\uffff" for character in text)
