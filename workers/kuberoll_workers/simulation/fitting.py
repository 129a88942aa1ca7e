"""Times of a modelled engine's steps from steps of a real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy
import numpy.typing as npt

_Numbers = npt.NDArray[numpy.float64]

_COSTS: Final = ("step", "decode", "prefill", "attention")
_FEWEST: Final = 20
_ROUNDS: Final = 4
_OUTLYING: Final = 4.0


class NotFitted(ValueError):
    """The steps do not say what one costs; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of an engine.

    Attributes:
        sequences: Sequences that generated a token.
        contexts: Tokens of their contexts, together.
        prompt_tokens: Tokens of prompts that it computed.
    """

    sequences: int
    contexts: int
    prompt_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Times of an engine, as in `EngineLimits`.

    Attributes:
        steps: Number of steps that they were fitted to.
        error: Mean difference between the times of these steps and what was fitted, as a fraction of their mean.
    """

    step_seconds: float
    decode_seconds: float
    prefill_seconds: float
    attention_seconds: float
    steps: int
    error: float


def fit(steps: Sequence[Step]) -> Fitted:
    """Find the costs, none of them negative, with the least squared error of the times of steps.

    Steps that took much longer than the others, relative to these costs, are left out: the machine did something else.

    Raises:
        NotFitted: There are too few steps, or they are too much alike.
    """
    if len(steps) < _FEWEST:
        raise NotFitted(f"found {len(steps)} steps; at least {_FEWEST} are needed")
    work = numpy.array([[1.0, step.sequences, step.prompt_tokens, step.contexts] for step in steps])
    seconds = numpy.array([step.seconds for step in steps])
    # A long step may differ from the model by more than a short one.
    weights = 1 / numpy.sqrt(numpy.maximum(seconds, 1e-4))
    kept = numpy.ones(len(steps), dtype=bool)
    for _ in range(_ROUNDS):
        costs = _non_negative((work * weights[:, None])[kept], (seconds * weights)[kept])
        missed = numpy.abs(work @ costs - seconds) * weights
        kept = missed <= _OUTLYING * numpy.median(missed) + 1e-9
    if costs[0] < 1e-9:
        raise NotFitted("the steps are too much alike to tell their fixed time from that of their sequences")
    named = {f"{name}_seconds": float(cost) for name, cost in zip(_COSTS, costs, strict=True)}
    error = float(numpy.abs(work @ costs - seconds).mean() / seconds.mean())
    return Fitted(steps=len(steps), error=error, **named)


def _non_negative(work: _Numbers, seconds: _Numbers) -> _Numbers:
    """Non-negative least squares: of all subsets of the columns the best one whose solution is not negative."""
    best, least = numpy.zeros(work.shape[1]), float("inf")
    for size in range(1, work.shape[1] + 1):
        for columns in combinations(range(work.shape[1]), size):
            chosen = list(columns)
            costs, *_ = numpy.linalg.lstsq(work[:, chosen], seconds, rcond=None)
            residual = float(((work[:, chosen] @ costs - seconds) ** 2).sum())
            if (costs >= 0).all() and residual < least:
                least = residual
                best = numpy.zeros(work.shape[1])
                best[chosen] = costs
    return best
