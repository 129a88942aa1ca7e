"""The order in which answers are graded: one in which leftovers of the answer or the row before show."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

from kuberoll_workers.certification.subjects import Answers
from kuberoll_workers.certification.trials import Trial

NETWORK_ROUNDS: Final = 2
"""Rounds in which answers are graded with the other network than usual, the first ones."""


def rounds(rows: Sequence[Answers], repetitions: int, seed: int) -> Iterator[list[tuple[int, list[Trial]]]]:
    """Rounds, in each of which all rows are graded: the rows' numbers, each with its trials in the order of the round.

    The first round has the rows in their order, later ones shuffle them. In every second one solutions come before no
    answer, and in the others after it, so that each comes after the other; attacks come last.

    Args:
        rows: Answers of each row.
        repetitions: Number of rounds.
        seed: Of the orders.
    """
    draw = random.Random(seed)
    for number in range(repetitions):
        order = list(range(len(rows)))
        if number:
            draw.shuffle(order)
        yield [(row, _trials(rows[row], number)) for row in order]


def _trials(answers: Answers, number: int) -> list[Trial]:
    usual = [trial for trial in answers.trials if trial.network is None]
    core = sorted(
        (trial for trial in usual if trial.kind != "attack"),
        key=lambda trial: (trial.kind == "solution") != (number % 2 == 1),
    )
    core += (trial for trial in answers.trials if trial.network is not None and number < NETWORK_ROUNDS)
    return [*core, *(trial for trial in usual if trial.kind == "attack" and number < answers.attack_rounds)]
