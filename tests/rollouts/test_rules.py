"""Arithmetic of windows and seeds against brute force."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.policy.interface import SamplingParameters
from kuberoll_workers.rollouts import rules
from kuberoll_workers.rollouts.failures import backoff
from kuberoll_workers.rollouts.seeds import job_seed, trajectory_seed, turn_seed
from kuberoll_workers.rollouts.settings import RetryPolicy, RolloutSettings

lengths = st.integers(min_value=0, max_value=40)


@given(prompt=lengths, generated=lengths, observation=lengths, window=st.integers(min_value=1, max_value=60))
def test_observation_room(prompt: int, generated: int, observation: int, window: int) -> None:
    kept, truncated = rules.observation_room(prompt, generated, observation, window)
    by_hand = 0
    while by_hand < observation and prompt + generated + by_hand < window:
        by_hand += 1
    assert kept == by_hand
    assert truncated == (prompt + generated + observation >= window)


@given(prompt=lengths, max_tokens=st.integers(min_value=1, max_value=60), window=st.integers(min_value=1, max_value=60))
def test_generation_room(prompt: int, max_tokens: int, window: int) -> None:
    room = rules.generation_room(prompt, max_tokens, window)
    assert 0 <= room <= max_tokens
    assert prompt + room <= max(prompt, window)
    assert (room == 0) == rules.prompt_fills_window(prompt, window)


@given(st.booleans(), st.booleans(), st.booleans(), st.integers(min_value=1, max_value=5))
def test_one_reason_at_most(terminated: bool, response: bool, context: bool, turns: int) -> None:
    reason = rules.stop_reason(
        terminated=terminated, response_truncated=response, context_truncated=context, turns=turns, max_turns=3
    )
    assert (reason is None) == (not (terminated or response or context) and turns < 3)
    if reason == "max_turns":
        assert not terminated
        assert not response
        assert not context


def test_seeds_are_fixed_numbers() -> None:
    # A stored run must be repeatable by a later version.
    assert job_seed("sliding-puzzle", None) == job_seed("sliding-puzzle", None) != job_seed("sliding-puzzle-2", None)
    assert job_seed("x", 7) == 7
    assert trajectory_seed(7, 1, 2) == 17546798659203744
    assert turn_seed(17546798659203744, 1) == 2258488866830845541


@given(st.integers(min_value=0, max_value=2**63 - 1), st.integers(min_value=1, max_value=10_000))
def test_turn_seeds_fit_a_signed_64_bit_number(seed: int, turn: int) -> None:
    assert 0 <= turn_seed(seed, turn) < 2**63


def test_seeds_do_not_collide_in_a_large_job() -> None:
    seeds = {
        turn_seed(trajectory_seed(1, task, repeat), turn)
        for task in range(50)
        for repeat in range(8)
        for turn in range(1, 21)
    }
    assert len(seeds) == 50 * 8 * 20


@given(
    tries=st.integers(min_value=1, max_value=2000),
    base=st.floats(min_value=0, max_value=600),
    longest=st.floats(min_value=0, max_value=3600),
)
def test_backoff_grows_to_its_bound(tries: int, base: float, longest: float) -> None:
    wait = backoff(tries, base=base, longest=longest, draw=random.Random(1))
    assert 0 <= wait <= longest


@pytest.mark.parametrize(("tries", "low", "high"), [(1, 0.25, 0.5), (2, 0.5, 1.0), (3, 1.0, 2.0), (9, 15.0, 30.0)])
def test_backoff_doubles(tries: int, low: float, high: float) -> None:
    waits = [backoff(tries, base=0.5, longest=30.0, draw=random.Random(seed)) for seed in range(200)]
    assert low <= min(waits) <= max(waits) <= high


def test_what_callers_of_the_loop_need_not_say() -> None:
    found = RolloutSettings(
        max_turns=1, max_sequence_length=2, concurrency=3, sampling=SamplingParameters(max_tokens=4)
    )
    assert (found.scheduling, found.generation_seconds, found.foreign_policy) == ("Concurrent", 600.0, False)
    assert (found.turn_seconds, found.trajectory_seconds) == (None, None)
    assert found.retries == RetryPolicy(
        generation_attempts=30, environment_attempts=2, backoff_seconds=0.5, max_backoff_seconds=30.0
    )
