"""Costs of a step, found from steps."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.simulation.fitting import NotFitted, Step, fit


def steps(step: float, decode: float, prefill: float, attention: float, *, noise: float = 0.0) -> list[Step]:
    draw = random.Random(0)
    made = []
    for number in range(200):
        sequences = draw.randrange(1, 64)
        contexts = sum(draw.randrange(1, 2000) for _ in range(sequences))
        prompt = draw.randrange(0, 500) if number % 3 == 0 else 0
        seconds = step + decode * sequences + prefill * prompt + attention * contexts
        seconds *= draw.lognormvariate(0.0, noise)
        made.append(Step(sequences=sequences, contexts=contexts, prompt_tokens=prompt, seconds=seconds))
    return made


@given(st.floats(1e-3, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-3), st.floats(0, 1e-6))
def test_the_costs_are_found_again(step: float, decode: float, prefill: float, attention: float) -> None:
    found = fit(steps(step, decode, prefill, attention))
    assert found.step_seconds == pytest.approx(step, rel=1e-3)
    assert found.decode_seconds == pytest.approx(decode, rel=1e-3, abs=1e-7)
    assert found.prefill_seconds == pytest.approx(prefill, rel=1e-3, abs=1e-8)
    assert found.attention_seconds == pytest.approx(attention, rel=1e-3, abs=1e-10)
    assert found.error < 1e-3


def test_noise_makes_no_cost_negative() -> None:
    found = fit(steps(0.02, 1e-4, 0.0, 0.0, noise=0.3))
    assert min(found.decode_seconds, found.prefill_seconds, found.attention_seconds) >= 0
    assert found.step_seconds == pytest.approx(0.02, rel=0.2)
    assert 0.1 < found.error < 0.5


def test_steps_that_were_disturbed_are_left_out() -> None:
    made = steps(0.02, 1e-4, 1e-4, 1e-7, noise=0.02)
    for number in range(0, len(made), 5):
        made[number] = dataclasses.replace(made[number], seconds=made[number].seconds * 3)
    found = fit(made)
    assert found.step_seconds == pytest.approx(0.02, rel=0.1)
    assert found.attention_seconds == pytest.approx(1e-7, rel=0.25)


def test_steps_that_say_nothing_are_an_error() -> None:
    made = steps(0.02, 1e-4, 1e-4, 0.0)
    with pytest.raises(NotFitted, match="found 19 steps"):
        fit(made[:19])
    with pytest.raises(NotFitted, match="too much alike"):
        fit([Step(sequences=number, contexts=0, prompt_tokens=0, seconds=0.001 * number) for number in range(1, 40)])
