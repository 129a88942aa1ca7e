"""One request to vLLM's API on its way through the replica."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from kuberoll_workers.serving.openai_api.continuation import Continuity

VersionSpans = list[tuple[str, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One response that the engine sampled.

    Attributes:
        prompt: Ids that the model read.
        response: Ids that it sampled.
        logprobs: Log-probability of each sampled id.
        versions: Spans `(version, start, end)` over the response.
        finish_reason: `stop`, `length`, or what else the engine says.
        continuity: How the prompt relates to what was sampled before in the session.
        began, ended: Unix times, seconds.
    """

    prompt: array[int]
    response: array[int]
    logprobs: array[float]
    versions: Sequence[tuple[str, int, int]]
    finish_reason: str
    continuity: Continuity
    began: float
    ended: float


class Exchange:
    """A request and what is known of its responses.

    Attributes:
        session: Session of the request; None: it names none.
        calls: Of each call of the engine, in order: version spans of its sequences, by their index.
        continuity: How the prompt relates to what was generated before in its session; None: not known yet.
        record: Called with each response when it has ended; None: nothing is recorded.
    """

    def __init__(self, session: str | None, record: Callable[[Sampled], None] | None = None) -> None:
        self.session = session
        self.record = record
        self.calls: list[dict[int, VersionSpans]] = []
        self.continuity: Continuity | None = None

    def versions(self) -> list[VersionSpans]:
        """Version spans of all choices, in their order."""
        return [call[index] for call in self.calls for index in sorted(call)]


EXCHANGE: Final[ContextVar[Exchange]] = ContextVar("exchange")
