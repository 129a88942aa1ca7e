"""One message of a trajectory: text for people and environments, token ids for the policy."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TOKEN_TYPE = "i"
"""`array` type code of token ids: 32-bit signed, which holds every vocabulary."""
LOGPROB_TYPE = "f"
"""`array` type code of log-probabilities: the engine computes them in float32."""


def token_array(ids: Iterable[int] = ()) -> array[int]:
    """Token ids in the form that the loop keeps them: 4 bytes a token, sent without conversion."""
    return array(TOKEN_TYPE, ids)


@dataclass(slots=True)
class Message:
    """One message.

    Attributes:
        role: `system`, `user`, `assistant`, `environment`, `tool`: whatever the dataset or environment names.
        content: The text; of an assistant, its ids decoded without special tokens.
        token_ids: The ids that stand for this message in the policy's context. Where an observation was cut to
            fit the window, they stand for its first part only.
        logprobs: Of an assistant: one log-probability per token id, under the distribution it was sampled from.
        turn: 0 in the prompt; k for the response and the observation of turn k, counted from 1.
        policy_versions: Of an assistant: spans `(version, start, end)` over `token_ids`, end exclusive.
        truncated: The response hit its length limit, or the observation was cut to fit the window.
    """

    role: str
    content: str
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    turn: int = 0
    policy_versions: Sequence[tuple[str, int, int]] | None = None
    truncated: bool = False
