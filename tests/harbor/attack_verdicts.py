"""What an attack on a task shows of the task's tests."""

from __future__ import annotations

from typing import Literal

from kuberoll_workers.harbor.trials import Outcome

_EPSILON = 1e-9

Verdict = Literal["withstood", "gained", "full", "not carried out", "no reward", "unknown"]


def verdict_of(attack: Outcome, *, solution: Outcome | None, nothing: Outcome) -> Verdict:
    """What an attack shows of a task's tests.

    Args:
        solution: Of the reference solution; None: there is none, and any gain is `full`.

    Returns:
        `withstood`: worth no more than nothing; `gained`: more, and less than the solution; `full`: at least as much;
        `no reward`: it made the tests fail, so that a trajectory is lost which would have been worth nothing;
        `unknown`: something else failed.
    """
    if attack.problem is not None or nothing.reward is None:
        return "unknown"
    if not attack.carried_out:
        return "not carried out"
    if attack.reward is None:
        return "no reward"
    if attack.reward <= nothing.reward + _EPSILON:
        return "withstood"
    if solution is not None and solution.reward is not None and attack.reward < solution.reward - _EPSILON:
        return "gained"
    return "full"
