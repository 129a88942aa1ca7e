"""The proof that an engine samples from the distribution that it reports, by its own numbers.

A few short texts are continued at temperature 1, and the engine scores what it has sampled once more, as a prompt. A
sound engine computes the same distribution both times, but for rounding. A fault of its sampler does not survive that:
the tokens are then impossible by the engine's own account.

Rounding differs by dtype, by kernel, by batch, and mixtures of experts even choose other experts. What is certain must
not depend on any of them, so it is a likelihood ratio. If tokens are drawn from the distribution `p` that scores them,
then for any other distribution `r` the product of `r/p` over the tokens has the expectation 1, and exceeds `x` with a
probability of at most `1/x` (Markov; Ville, for each place in the sequence). Here `r` is `p` with a small part of two
alternatives: the distribution that was reported, and the uniform one, which is what broken samplers draw from. Its
logarithm is the evidence against the engine, in nats. It takes a token that is next to impossible, or several that are
most unlikely, and a sound engine reaches the limit once in 10^9 checks. Rounding with a standard deviation of `s` nats
adds about `s²` hundredths of a nat for each token: even 0.5, which no engine should have, is far below the limit.

What is merely too imprecise shows in the mean difference, whose bound depends on the dtype.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

_Result = TypeVar("_Result")

TEXTS: Final = (
    # Repetitions, which draft models and n-grams propose to continue.
    "1, 2, 3, 1, 2, 3, 1, 2,",
    "Once upon a time there was a",
    "def add(a, b):\n    return",
    "The board is:\n1 _\n3 2\nThe board is:\n1 _\n",
)
TOKENS: Final = 32
SHORT_TEXTS: Final = 2
SHORT_TOKENS: Final = 16

EVIDENCE_LIMIT: Final = math.log(1e9)
"""Evidence in nats that a sound engine exceeds with a probability of 10^-9."""

_ALTERNATIVE: Final = 0.02
# Larger ones overflow, and say nothing more.
_MOST: Final = 500.0
# Tokens by which two responses with one seed are compared: a rounding that changes one token changes all after it.
_COMPARED: Final = 4
_SHOWN: Final = 0.01


class SelfCheckFailed(RuntimeError):
    """An engine samples what must not be trained on."""


class Pair(NamedTuple):
    """Log-probabilities of a sampled token: as it was reported, and as it is scored in a prompt."""

    reported: float
    rescored: float

    @property
    def difference(self) -> float:
        """Absolute difference, nats; infinite where one is no number, or both say that the token is impossible."""
        difference = abs(self.reported - self.rescored)
        return math.inf if math.isnan(difference) else difference


class Drawn(NamedTuple):
    """A response: its ids, their log-probabilities and its text with special tokens; `stopped` by a stop string."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    stopped: bool


class Scored(NamedTuple):
    """Log-probability of a prompt's token, and of the most likely one in its place."""

    logprob: float
    best: float


class Prober(Protocol):
    """An engine, as far as the check uses it."""

    async def sample(
        self, prompt: Sequence[int], *, temperature: float, seed: int, tokens: int, stop: str | None = None
    ) -> Drawn:
        """Continue a prompt by so many tokens, past its end; the prefix cache is not read."""
        ...

    async def score(self, ids: Sequence[int]) -> list[Scored] | None:
        """Score all tokens but the first; the prefix cache is not read. None: the engine scores no prompts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the bounds of a check depend on.

    Attributes:
        vocabulary: Number of ids that the engine samples from.
        dtype: Of the weights, in vLLM's spelling.
        mixture: The model is a mixture of experts.
        quantized: Weights or cache are of fewer bits than the dtype.
        measured: Bounds were measured on engines of this kind; on others they only warn.
    """

    vocabulary: int
    dtype: str = "float32"
    mixture: bool = False
    quantized: bool = False
    measured: bool = True

    @property
    def tolerance(self) -> float:
        """Largest mean difference, nats: float32 has some 10^-6, and half precision a few hundredths."""
        if self.mixture or self.quantized:
            return 0.3
        return 1e-3 if self.dtype == "float32" else 0.1


class Finding(NamedTuple):
    """A fault; `certain` if it is proof that samples must not be trained on."""

    words: str
    certain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a check.

    Attributes:
        pairs: Of the tokens that were sampled at temperature 1; empty if the engine scores no prompts.
        evidence: See the module, nats.
        findings: Empty for a sound engine.
    """

    pairs: Sequence[Pair]
    evidence: float
    findings: Sequence[Finding]

    @property
    def certain(self) -> bool:
        """True if samples of this engine must not be trained on."""
        return any(finding.certain for finding in self.findings)

    @property
    def words(self) -> str:
        """The findings in one line."""
        return "; ".join(finding.words for finding in self.findings)


def evidence(pairs: Iterable[Pair], vocabulary: int) -> float:
    """Evidence that tokens were not drawn from the distribution that scores them, nats; see the module."""
    return sum(_surprise(pair, -math.log(vocabulary)) for pair in pairs)


def _surprise(pair: Pair, uniform: float) -> float:
    ratios = (math.exp(min(_MOST, other - max(pair.rescored, -1e4))) for other in (pair.reported, uniform))
    return math.log1p(_ALTERNATIVE * (sum(ratios) - 2))


async def check(prober: Prober, prompts: Sequence[Sequence[int]], kind: Kind, *, whole: bool, tokens: int) -> Report:
    """Check an engine.

    Args:
        prompts: What is continued; all at once, as requests of a run are.
        whole: Also greedy responses, seeds and stop strings; otherwise only the distribution.
        tokens: Length of a response.
    """
    drawn = await _each(
        lambda n: prober.sample(prompts[n], temperature=1.0, seed=n + 1, tokens=tokens), range(len(prompts))
    )
    scores = await _each(lambda n: _score(prober, prompts[n], drawn[n].ids), range(len(prompts)))
    pairs = [pair for response, scored in zip(drawn, scores, strict=True) for pair in _pairs(response.logprobs, scored)]
    findings = list(distribution_findings(pairs, kind))
    if whole:
        findings += await _further(prober, prompts, drawn, kind, tokens)
    return Report(pairs=pairs, evidence=evidence(pairs, kind.vocabulary), findings=findings)


async def check_response(
    prober: Prober, prompt: Sequence[int], response: Sequence[int], logprobs: Sequence[float], kind: Kind
) -> Report:
    """Check a response that was sampled at temperature 1, by its reported log-probabilities."""
    pairs = _pairs(logprobs, await _score(prober, prompt, response))
    return Report(pairs=pairs, evidence=evidence(pairs, kind.vocabulary), findings=distribution_findings(pairs, kind))


def distribution_findings(pairs: Sequence[Pair], kind: Kind) -> list[Finding]:
    """Faults of the distribution that tokens were sampled from, and of the log-probabilities reported for them."""
    if not pairs:
        return []
    nats = evidence(pairs, kind.vocabulary)
    mean = math.fsum(pair.difference for pair in pairs) / len(pairs)
    if nats < EVIDENCE_LIMIT and mean <= kind.tolerance:
        return []
    worst = max(pairs, key=lambda pair: max(pair.difference, -pair.rescored))
    off = sum(pair.difference > max(_SHOWN, kind.tolerance) for pair in pairs)
    words = (
        f"{off} of {len(pairs)} tokens that it sampled at temperature 1 have other log-probabilities when it scores "
        f"them itself (the worst: reported {worst.reported:.3f}, scored {worst.rescored:.3f}; mean difference "
        f"{mean:.2g}, at most {kind.tolerance:g} for {kind.dtype})"
    )
    if nats >= EVIDENCE_LIMIT:
        return [Finding(f"it samples tokens that are impossible: {words}; evidence {nats:.0f} nats", certain=True)]
    return [Finding(f"its log-probabilities are imprecise: {words}", certain=kind.measured)]


async def _further(
    prober: Prober, prompts: Sequence[Sequence[int]], drawn: Sequence[Drawn], kind: Kind, tokens: int
) -> list[Finding]:
    stops = [_stop_of(response.text) for response in drawn]
    again = await _each(
        lambda n: prober.sample(prompts[n], temperature=1.0, seed=n + 1, tokens=tokens, stop=stops[n]),
        range(len(prompts)),
    )
    greedy = await _each(
        lambda n: prober.sample(prompts[n], temperature=0.0, seed=0, tokens=tokens // 2),
        range(min(SHORT_TEXTS, len(prompts))),
    )
    scores = await _each(lambda n: _score(prober, prompts[n], greedy[n].ids), range(len(greedy)))
    return [
        *stop_findings(list(zip(stops, again, strict=True))),
        *seed_findings(drawn, again, kind),
        *greedy_findings([score for scored in scores for score in scored], kind),
    ]


def stop_findings(responses: Iterable[tuple[str | None, Drawn]]) -> list[Finding]:
    """Faults of responses that a stop string should have ended."""
    for stop, response in responses:
        if stop is None:
            continue
        at = response.text.find(stop)
        whole = at + len(stop) == len(response.text) if response.stopped else at < 0
        if not whole:
            return [Finding(f"it does not end a response at its stop string ({stop!r})", certain=True)]
    return []


def seed_findings(first: Sequence[Drawn], again: Sequence[Drawn], kind: Kind) -> list[Finding]:
    """Faults of responses with the same prompts and seeds, the second ones possibly shorter.

    One rounding may change a token, and with it all that follow: most must differ at their very beginning.
    """
    pairs = list(zip(first, again, strict=True))
    other = sum(list(one.ids[:_COMPARED])[: len(two.ids)] != list(two.ids[:_COMPARED]) for one, two in pairs)
    if len(pairs) < 3 or other < len(pairs) - 1:
        return []
    exact = kind.measured and kind.dtype == "float32"
    return [Finding(f"the same seeds give other tokens: {other} of {len(pairs)} responses differ", certain=exact)]


def greedy_findings(scores: Sequence[Scored], kind: Kind) -> list[Finding]:
    """Faults of tokens that were sampled at temperature 0, by their scores."""
    if not scores:
        return []
    gap = math.fsum(max(0.0, score.best - score.logprob) for score in scores)
    if gap < EVIDENCE_LIMIT and gap / len(scores) <= kind.tolerance:
        return []
    words = f"at temperature 0 its tokens are not the most likely ones: {gap:.2f} nats less in {len(scores)} tokens"
    return [Finding(words, certain=gap >= EVIDENCE_LIMIT or kind.measured)]


def different_arguments(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Names of engine arguments that differ from their defaults."""
    return [name for name, value in given.items() if name not in defaults or defaults[name] != value]


def failure_message(report: Report, suspects: Sequence[str]) -> str:
    """What to say of an engine with faults, and what to do.

    Args:
        suspects: Engine arguments that differ from vLLM's defaults.
    """
    named = (
        f"spec.generation.engineArgs that differ from vLLM's defaults are suspects: {', '.join(suspects)}"
        if suspects
        else "spec.generation.engineArgs sets nothing, so that the build of vLLM is the suspect"
    )
    if not report.certain:
        return f"the engine's self-check found what proves no fault of this kind of engine: {report.words}. {named}"
    way = "remove them one by one" if suspects else "use another version"
    return (
        f"the engine fails its self-check, and must not be trained on: {report.words}. {named}: {way}, or let it start "
        "all the same with spec.generation.selfCheck: Warn"
    )


def _stop_of(text: str) -> str | None:
    """A piece of a response that comes first in its middle; None if there is none."""
    at = len(text) // 3
    piece = text[at : at + 3]
    return piece if piece.strip() and "\ufffd" not in piece else None


async def _score(prober: Prober, prompt: Sequence[int], response: Sequence[int]) -> list[Scored]:
    """Scores of a response's tokens; none if the engine scores no prompts."""
    scored = await prober.score([*prompt, *response])
    return [] if scored is None else scored[len(prompt) - 1 :]


def _pairs(logprobs: Sequence[float], scores: Sequence[Scored]) -> list[Pair]:
    """Pairs of a response's tokens; none if the engine scores no prompts."""
    return [Pair(*both) for both in zip(logprobs, [score.logprob for score in scores], strict=True)] if scores else []


async def _each(call: Callable[[int], Awaitable[_Result]], numbers: Iterable[int]) -> list[_Result]:
    return list(await asyncio.gather(*map(call, numbers)))
