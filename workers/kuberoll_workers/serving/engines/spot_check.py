"""Which responses of a run an engine scores once more, so that its self-check goes on after its start.

A response can be compared if its log-probabilities are those of the whole distribution at temperature 1, as scores of
prompts are. It is drawn from all that can, and waits until a share of all the tokens that the engine computes has paid
for its own: so the check's part of the engine's work has a bound, whatever the responses are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, NamedTuple

from kuberoll_workers.data.sampling import Distribution, unlike
from kuberoll_workers.serving.engines.self_check import Pair

SHARE: Final = 0.005
"""Part of an engine's tokens that are computed for checks, at most."""

MOST_LOGITS: Final = 1 << 26
"""Logits of all the scored tokens together: an engine has memory for no more than a batch needs of them, and ends
without. They are 256 MiB in float32."""


class Response(NamedTuple):
    """A response as its caller got it.

    Attributes:
        prompt: Ids that the model read.
        ids: Ids that it sampled.
        logprobs: Reported for each sampled id.
        version: Of the weights; empty: of several.
    """

    prompt: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float]
    version: str

    @property
    def tokens(self) -> int:
        """Number of tokens that a check of it computes."""
        return len(self.prompt) + len(self.ids)


class Tally(NamedTuple):
    """What was seen since the engine's start.

    Attributes:
        responses: Number of finished responses.
        checked: Number of those that were scored once more.
        largest: Largest absolute difference of a token's two log-probabilities, nats.
    """

    responses: int = 0
    checked: int = 0
    largest: float = 0.0


class SpotChecks:
    """The choice of responses, and the tally of what their checks found."""

    def __init__(self, *, longest: int, share: float = SHARE) -> None:
        """
        Args:
            longest: Number of tokens, prompt included, beyond which a response is never chosen.
            share: As `SHARE`.
        """
        self._longest, self._share = longest, share
        self._paid = 0.0
        self._drawn: Response | None = None
        self._candidates = 0
        # The same run checks the same responses again.
        self._random = random.Random(0)
        self.tally = Tally()

    def choose(self, response: Response, distribution: Distribution, *, computed: int, version: str) -> Response | None:
        """Note a finished response, and choose the one to be scored now; None: none.

        Args:
            distribution: That it was sampled from.
            computed: Number of tokens that the engine computed for it.
            version: Of the engine's present weights, with which alone a response can be scored.
        """
        self.tally = self.tally._replace(responses=self.tally.responses + 1)
        # What is paid in advance is no more than what one check costs.
        self._paid = min(self._paid + self._share * computed, float(self._longest))
        if self._drawn is not None and self._drawn.version != version:
            self._drawn, self._candidates = None, 0
        if (
            response.version == version
            and len(response.ids) > 0
            and response.tokens <= self._longest
            and not any(unlike(distribution, temperature=1.0))
        ):
            self._candidates += 1
            if self._random.random() * self._candidates < 1:
                self._drawn = response
        drawn = self._drawn
        if drawn is None or self._paid < drawn.tokens:
            return None
        self._paid -= drawn.tokens
        self._drawn, self._candidates = None, 0
        return drawn

    def count(self, pairs: Sequence[Pair]) -> None:
        """Count a response that was scored, by the pairs of its tokens."""
        largest = max(self.tally.largest, *(pair.difference for pair in pairs))
        self.tally = self.tally._replace(checked=self.tally.checked + 1, largest=largest)


def longest_for(vocabulary: int, window: int) -> int:
    """Number of tokens of the longest response, prompt included, whose scores an engine has memory for."""
    return min(window - 1, MOST_LOGITS // vocabulary)


def response_of(
    prompt: Sequence[int],
    ids: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[tuple[str, int, int]],
) -> Response:
    """A response with its spans `(version, start, end)`."""
    found = {version for version, _, _ in versions}
    return Response(prompt, ids, logprobs, found.pop() if len(found) == 1 else "")
