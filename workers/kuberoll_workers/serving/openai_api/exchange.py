"""One request to vLLM's API on its way through the replica."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from kuberoll_workers.serving.openai_api.continuation import Continuity

VersionSpans = list[tuple[str, int, int]]


class Exchange:
    """A request and what is known of its responses.

    Attributes:
        session: Session of the request; None: it names none.
        calls: Of each call of the engine, in order: version spans of its sequences, by their index.
        continuity: How the prompt relates to what was generated before in its session; None: not known yet.
    """

    def __init__(self, session: str | None) -> None:
        self.session = session
        self.calls: list[dict[int, VersionSpans]] = []
        self.continuity: Continuity | None = None

    def versions(self) -> list[VersionSpans]:
        """Version spans of all choices, in their order."""
        return [call[index] for call in self.calls for index in sorted(call)]


EXCHANGE: Final[ContextVar[Exchange]] = ContextVar("exchange")
