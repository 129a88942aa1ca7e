"""One request to vLLM's API on its way through the replica."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kuberoll_workers.data.sampling import Distribution
from kuberoll_workers.data.tools import Tool
from kuberoll_workers.serving.openai_api.continuation import Continuity

if TYPE_CHECKING:
    from vllm import SamplingParams

ChatMessage = dict[str, Any]
"""A message in OpenAI's form: role, content (text), `tool_calls` or `tool_call_id`."""

VersionSpans = list[tuple[str, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One response that the engine sampled.

    Attributes:
        prompt: Ids that the model read.
        response: Ids that it sampled.
        logprobs: Log-probability of each sampled id.
        versions: Spans `(version, start, end)` over the response.
        finish_reason: `stop` or `length`.
        continuity: How the prompt relates to what was sampled before in the session.
        began, ended: Unix times, seconds.
        chat: Messages of the request; None: it has none.
        tools: Functions that the request declares.
        demand: The one that must be called; empty: any; None: none.
        distribution: That it was sampled from (`data.sampling`).
    """

    prompt: array[int]
    response: array[int]
    logprobs: array[float]
    versions: Sequence[tuple[str, int, int]]
    finish_reason: str
    continuity: Continuity
    began: float
    ended: float
    chat: Sequence[ChatMessage] | None = None
    tools: Sequence[Tool] = ()
    demand: str | None = None
    distribution: Distribution | None = None


class RecordedSession(Protocol):
    """A session whose responses are recorded, with limits and defaults of its own."""

    @property
    def identity(self) -> str: ...

    @property
    def closed(self) -> bool: ...

    def record(self, sampled: Sampled, exchange: Exchange) -> None:
        """Store a response of an exchange.

        An exchange that repeats a request whose last answer nobody continued takes its place: that answer was lost on
        its way, and the caller never saw it.
        """
        ...

    def release(self, exchange: Exchange) -> None:
        """Give back the calls of an exchange that has ended without a recorded response."""
        ...

    def admit(self, params: SamplingParams, prompt: int) -> None:
        """Admit a call, and set what the session decides in its parameters.

        Args:
            prompt: Length of its prompt, tokens.

        Raises:
            ValueError: The session takes no such call; the caller reads the message.
        """
        ...

    def complete(self, path: str, body: dict[str, Any]) -> bool:
        """Set fields that a request's body leaves to the session; True if there are any."""
        ...


class Exchange:
    """A request and what is known of its responses.

    Attributes:
        session: Session of the request; None: it names none.
        recorded: The session, if its responses are recorded.
        chat: Messages of the request; None: it has none.
        tools: Functions that the request declares.
        demand: The one that must be called; empty: any; None: none.
        request: Digest of the request's body; empty: unknown.
        repeats: The caller says that it sends the request once more, because it got no answer.
        calls: Of each call of the engine, in order: version spans of its sequences, by their index.
        admitted: Number of calls of the engine that the session admitted.
        aborted: The engine did not finish one of its responses.
        calls_recorded: Indices of the recorded responses in the session.
        continuity: How the prompt relates to what was generated before in its session; None: not known yet.
    """

    def __init__(
        self,
        session: str | None,
        recorded: RecordedSession | None = None,
        chat: Sequence[ChatMessage] | None = None,
        tools: Sequence[Tool] = (),
        demand: str | None = None,
        *,
        request: bytes = b"",
        repeats: bool = False,
    ) -> None:
        self.session = session
        self.recorded = recorded
        self.chat = chat
        self.tools = tools
        self.demand = demand
        self.request = request
        self.repeats = repeats
        self.calls: list[dict[int, VersionSpans]] = []
        self.admitted = 0
        self.aborted = False
        self.calls_recorded: list[int] = []
        self.continuity: Continuity | None = None
        self._unsent: list[Sampled] = []

    def add(self, sampled: Sampled) -> None:
        """Add a response that the engine has ended; it is recorded when it is sent."""
        if self.recorded is not None:
            self._unsent.append(sampled)

    def record_sent(self) -> None:
        """Record the responses that are being sent to the caller."""
        unsent, self._unsent = self._unsent, []
        for sampled in unsent:
            assert self.recorded is not None
            self.recorded.record(sampled, self)

    def end(self) -> None:
        """End the exchange: what was not sent was never said."""
        if self.recorded is not None and (self.admitted or self.aborted) and not self.calls_recorded:
            self.recorded.release(self)

    def versions(self) -> list[VersionSpans]:
        """Version spans of all choices, in their order."""
        return [call[index] for call in self.calls for index in sorted(call)]


EXCHANGE: Final[ContextVar[Exchange]] = ContextVar("exchange")
