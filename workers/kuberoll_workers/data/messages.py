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
    """Token ids in memory: 4 bytes per token, sent without conversion."""
    return array(TOKEN_TYPE, ids)


@dataclass(slots=True)
class Message:
    """One message.

    Attributes:
        role: `system`, `user`, `assistant`, `environment`, `tool`, or another one of the dataset or environment.
        content: The text; for a response, its ids decoded without special tokens.
        token_ids: Ids of this message in the policy's context; only of its first part if an observation was cut to fit
            the
            window.
        logprobs: For a response: one log-probability per token id, under the distribution it was sampled from.
        turn: 0 in the prompt; k for response and observation of turn k, counted from 1.
        policy_versions: For a response: spans `(version, start, end)` over `token_ids`, end exclusive.
        truncated: The response hit its length limit, or the observation was cut to fit the window.
    """

    role: str
    content: str
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    turn: int = 0
    policy_versions: Sequence[tuple[str, int, int]] | None = None
    truncated: bool = False
