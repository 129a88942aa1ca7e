"""The self-check of engines, on models whose faults are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.serving.engines.self_check import (
    EVIDENCE_LIMIT,
    Drawn,
    Kind,
    Pair,
    Report,
    Scored,
    check,
    different_arguments,
    distribution_findings,
    evidence,
    failure_message,
    greedy_findings,
    seed_findings,
    stop_findings,
)

VOCABULARY = 512
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
FLOAT32 = Kind(vocabulary=VOCABULARY)


class Model:
    """A model with a sharp distribution after each context, and an engine of it that may have a fault.

    Args:
        noise: Standard deviation of rounding, nats, between what is sampled from and what scores.
        garbage: Share of tokens that are drawn uniformly, and reported so.
        seeded: Seeds have an effect.
        stops: Stop strings have an effect.
        temperature: What is sampled with when 1 is asked for.
        scores: It scores prompts.
    """

    def __init__(
        self,
        *,
        noise: float = 0.0,
        garbage: float = 0.0,
        seeded: bool = True,
        stops: bool = True,
        temperature: float = 1.0,
        scores: bool = True,
        number: int = 0,
    ) -> None:
        self._noise, self._garbage, self._temperature = noise, garbage, temperature
        self._seeded, self._stops, self._scores = seeded, stops, scores
        self._draw = numpy.random.default_rng(number)
        self._number = number

    def _logprobs(self, context: Sequence[int]) -> numpy.ndarray:
        draw = numpy.random.default_rng([self._number, *context[-3:]])
        return _normal(draw.normal(size=VOCABULARY) * 6.0)

    async def sample(
        self, prompt: Sequence[int], *, temperature: float, seed: int, tokens: int, stop: str | None = None
    ) -> Drawn:
        draw = numpy.random.default_rng([seed, *prompt]) if self._seeded else self._draw
        ids, logprobs, text = list(prompt), [], ""
        for _ in range(tokens):
            exact = self._logprobs(ids)
            own = _normal(exact / self._temperature + self._draw.normal(size=VOCABULARY) * self._noise)
            if temperature == 0:
                token = int(own.argmax())
            elif draw.random() < self._garbage:
                own = numpy.full(VOCABULARY, -math.log(VOCABULARY))
                token = int(draw.integers(VOCABULARY))
            else:
                token = int(draw.choice(VOCABULARY, p=numpy.exp(own)))
            ids.append(token)
            logprobs.append(float(own[token]))
            text += chr(0x4E00 + token)
            if stop is not None and self._stops and stop in text:
                return Drawn(ids[len(prompt) :], logprobs, text, stopped=True)
        return Drawn(ids[len(prompt) :], logprobs, text, stopped=False)

    async def score(self, ids: Sequence[int]) -> list[Scored] | None:
        if not self._scores:
            return None
        exact = [self._logprobs(ids[:n]) for n in range(1, len(ids))]
        return [Scored(float(row[token]), float(row.max())) for row, token in zip(exact, ids[1:], strict=True)]


def _normal(logits: numpy.ndarray) -> numpy.ndarray:
    logits = logits - logits.max()
    return numpy.asarray(logits - math.log(numpy.exp(logits).sum()))


async def report_of(model: Model, kind: Kind = FLOAT32) -> Report:
    return await check(model, PROMPTS, kind, whole=True, tokens=32)


@pytest.mark.parametrize("number", range(5))
async def test_a_sound_engine_has_no_findings(number: int) -> None:
    assert not (await report_of(Model(number=number))).findings
    assert not (await report_of(Model(number=number, noise=1e-5))).findings


@pytest.mark.parametrize("number", range(5))
async def test_rounding_of_half_precision_is_no_proof(number: int) -> None:
    for noise, kind in (
        (0.03, Kind(vocabulary=VOCABULARY, dtype="bfloat16")),
        (0.2, Kind(vocabulary=VOCABULARY, dtype="bfloat16", mixture=True, measured=False)),
        (0.2, FLOAT32),
        (0.4, FLOAT32),
    ):
        report = await report_of(Model(number=number, noise=noise), kind)
        assert report.evidence < EVIDENCE_LIMIT / 2
        # Where more precision is known of a kind of engines, its lack is a fault.
        assert bool(report.findings) == (kind is FLOAT32)


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_sampler_of_garbage_is_proof(number: int, dtype: str) -> None:
    kind = Kind(vocabulary=VOCABULARY, dtype=dtype, mixture=True, measured=False)
    report = await report_of(Model(number=number, garbage=0.15), kind)
    assert report.certain
    assert "tokens that are impossible" in report.words


async def test_a_temperature_that_is_not_applied_is_found() -> None:
    report = await report_of(Model(temperature=0.5))
    assert report.certain
    assert "imprecise" in report.words or "impossible" in report.words


async def test_seeds_and_stop_strings_without_effect_are_found() -> None:
    report = await report_of(Model(seeded=False))
    assert "the same seeds give other tokens" in report.words
    report = await report_of(Model(stops=False))
    assert "stop string" in report.words
    assert report.certain


async def test_an_engine_that_scores_no_prompts_is_asked_the_rest() -> None:
    report = await report_of(Model(scores=False, garbage=0.15))
    assert (list(report.pairs), report.findings) == ([], [])
    report = await report_of(Model(scores=False, stops=False))
    assert "stop string" in report.words


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.floats(0.1, 8.0))
def test_tokens_of_the_distribution_itself_are_no_evidence(seed: int, count: int, sharpness: float) -> None:
    # Whatever the reported distribution is: that is the point of a likelihood ratio.
    draw = numpy.random.default_rng(seed)
    logprobs = _normal(draw.normal(size=VOCABULARY) * sharpness)
    other = _normal(draw.normal(size=VOCABULARY) * 8.0)
    tokens = draw.choice(VOCABULARY, size=count, p=numpy.exp(logprobs))
    pairs = [Pair(float(other[token]), float(logprobs[token])) for token in tokens]
    assert evidence(pairs, VOCABULARY) < EVIDENCE_LIMIT


def test_the_fault_of_speculation_on_cpus_is_proof() -> None:
    """Twelve of 78 tokens drawn uniformly, as vLLM 0.32 does with n-grams on CPUs."""
    pairs = [Pair(-0.7, -0.7)] * 66 + [Pair(-math.log(VOCABULARY), -30.6)] + [Pair(-math.log(VOCABULARY), -11.0)] * 11
    (finding,) = distribution_findings(pairs, FLOAT32)
    assert finding.certain
    assert "reported -6.238, scored -30.600" in finding.words


@pytest.mark.parametrize(
    ("kind", "sound", "imprecise"),
    [
        ({}, 9e-4, 2e-3),
        ({"dtype": "bfloat16"}, 0.09, 0.2),
        ({"dtype": "bfloat16", "mixture": True}, 0.29, 0.4),
        ({"quantized": True}, 0.29, 0.4),
    ],
)
def test_how_imprecise_an_engine_may_be_depends_on_its_kind(
    kind: dict[str, Any], sound: float, imprecise: float
) -> None:
    of = Kind(vocabulary=VOCABULARY, **kind)
    for difference, said in ((sound, []), (imprecise, ["its log-probabilities are imprecise"])):
        # To both sides, as rounding is: no evidence of tokens that are impossible.
        pairs = [Pair(-1.0, -1.0 + sign * difference) for sign in (1, -1)] * 8
        assert [finding.words.partition(":")[0] for finding in distribution_findings(pairs, of)] == said


def test_numbers_that_overflow_are_evidence_too() -> None:
    assert evidence([Pair(-1.0, -math.inf)], VOCABULARY) > EVIDENCE_LIMIT
    for pair in (Pair(-math.inf, -math.inf), Pair(math.nan, -1.0), Pair(-1.0, math.nan)):
        (finding,) = distribution_findings([pair], FLOAT32)
        assert finding.certain
        assert "mean difference inf" in finding.words
    # Logits in place of log-probabilities.
    assert evidence([Pair(900.0, -1.0)], VOCABULARY) > EVIDENCE_LIMIT


def test_one_seed_of_four_may_take_another_way() -> None:
    first = [Drawn([1, 2, 3, 4, 5], [], "", stopped=False) for _ in range(4)]
    other = Drawn([1, 2, 9], [], "", stopped=True)
    assert not seed_findings(first, [other, *first[1:]], FLOAT32)
    (finding,) = seed_findings(first, [other, other, other, Drawn([1], [], "", stopped=True)], FLOAT32)
    assert finding.certain
    (finding,) = seed_findings(first, [other] * 4, Kind(vocabulary=VOCABULARY, dtype="bfloat16"))
    assert not finding.certain


def test_greedy_tokens_that_are_not_the_most_likely_ones() -> None:
    assert not greedy_findings([Scored(-1.0, -1.0)] * 16, FLOAT32)
    assert greedy_findings([Scored(-9.0, -1.0)] * 16, Kind(vocabulary=VOCABULARY, measured=False))[0].certain


def test_a_response_that_goes_on_after_its_stop_string() -> None:
    assert not stop_findings([("bc", Drawn([], [], "abc", stopped=True)), ("x", Drawn([], [], "abc", stopped=False))])
    for text, stopped in (("abcd", True), ("abcd", False), ("ad", True)):
        assert stop_findings([("bc", Drawn([], [], text, stopped=stopped))])


def test_the_message_names_the_arguments_that_differ() -> None:
    given_arguments = {"speculative_config": {"method": "ngram"}, "dtype": "auto", "seed": 0}
    suspects = different_arguments(given_arguments, {"speculative_config": None, "dtype": "auto", "seed": 0})
    assert suspects == ["speculative_config"]
    findings = distribution_findings([Pair(-6.2, -40.0)], FLOAT32)
    message = failure_message(Report(pairs=[], evidence=0.0, findings=findings), suspects)
    assert "suspects: speculative_config: remove them one by one" in message
    assert "spec.generation.selfCheck: Warn" in message
    # It fits into the message of a failed start.
    assert len(message) < 800


def test_what_is_no_proof_is_not_called_a_failure() -> None:
    kind = Kind(vocabulary=VOCABULARY, dtype="bfloat16", measured=False)
    findings = distribution_findings([Pair(-6.97, -7.53), Pair(-1.0, -1.0)], kind)
    message = failure_message(Report(pairs=[], evidence=0.0, findings=findings), ["dtype"])
    assert "its log-probabilities are imprecise" in message
    assert "dtype" in message
    # The engine has started, and goes on.
    assert "fails" not in message
    assert "must not be trained on" not in message
    assert "selfCheck" not in message
