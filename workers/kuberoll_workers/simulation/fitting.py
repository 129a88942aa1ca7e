"""Times of a modelled engine's steps from a run that was made.

A response of n tokens takes n steps. Meanwhile the engine generates tokens of other trajectories, reads their contexts,
and computes prompts, so that the time of a response is a sum of these numbers, each times what one of them costs. The
numbers follow from the times and lengths in the run's records: a response's tokens are taken as spread evenly over its
time. The costs are the non-negative ones with the least squared error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy
import numpy.typing as npt

from kuberoll_workers.data.messages import is_response
from kuberoll_workers.data.record import TrajectoryRecord

_Matrix = npt.NDArray[numpy.float64]

COSTS: Final = ("step", "decode", "prefill", "attention", "request")
_FEWEST: Final = 20


class NotFitted(ValueError):
    """A run does not say what a step costs; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Times of an engine.

    Attributes:
        step_seconds, decode_seconds, prefill_seconds, attention_seconds: As in `EngineLimits`.
        request_seconds: As in `ReplaySettings`.
        responses: Number of responses that they were fitted to.
        error: Mean difference between their times and those that were fitted, as a fraction of their mean.
    """

    step_seconds: float
    decode_seconds: float
    prefill_seconds: float
    attention_seconds: float
    request_seconds: float
    responses: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response of a run.

    Attributes:
        asked, answered: Times, by one clock.
        computed: Prompt tokens that the engine computed, since it had not cached them.
        prompt, generated: Tokens.
    """

    asked: float
    answered: float
    computed: int
    prompt: int
    generated: int


def responses_of(records: Sequence[TrajectoryRecord], *, block_tokens: int) -> list[Response]:
    """The responses of a run whose prefixes were all cached, as far as they can be, in whole blocks.

    Trajectories whose turns have no times are left out.
    """
    found: list[tuple[float, int, Response]] = []
    for record in records:
        known, context = 0, 0
        timing = iter(
            zip(
                record.timing.generation_seconds,
                record.timing.environment_seconds,
                record.timing.ended_at,
                strict=False,
            )
        )
        for message in record.messages:
            tokens = len(message.token_ids)
            if is_response(message) and (times := next(timing, None)) is not None:
                generating, stepping, ended = times
                if ended is not None and tokens:
                    answered = ended - stepping
                    cached = min(known, context - 1) // block_tokens * block_tokens
                    response = Response(
                        asked=answered - generating,
                        answered=answered,
                        computed=context - cached,
                        prompt=context,
                        generated=tokens,
                    )
                    found.append((response.asked, record.task_index if not known else -1, response))
                # The last token has no keys and values yet.
                known = context + tokens - 1
            context += tokens
    return _with_shared_prompts(found, block_tokens)


def _with_shared_prompts(found: list[tuple[float, int, Response]], block_tokens: int) -> list[Response]:
    """Let the first of a prompt group compute its prompt for all.

    Args:
        found: Responses with the time of their request and, if they are the first of their trajectory, their group.
    """
    groups: set[int] = set()
    responses: list[Response] = []
    for _, group, response in sorted(found, key=lambda item: item[:2]):
        if group in groups:
            cached = (response.prompt - 1) // block_tokens * block_tokens
            response = Response(
                asked=response.asked,
                answered=response.answered,
                computed=response.prompt - cached,
                prompt=response.prompt,
                generated=response.generated,
            )
        elif group >= 0:
            groups.add(group)
        responses.append(response)
    return responses


def fit(responses: Sequence[Response], *, replicas: int = 1) -> Fitted:
    """Fit the times of an engine to the responses of a run in which no request waited.

    Args:
        replicas: Replicas of the run, over which its requests were spread evenly.

    Raises:
        NotFitted: There are too few responses, or they are too much alike.
    """
    if len(responses) < _FEWEST:
        raise NotFitted(f"found {len(responses)} responses with times; at least {_FEWEST} are needed")
    work = _work(responses, replicas)
    seconds = numpy.array([response.answered - response.asked for response in responses])
    # Errors count relative to the square root of the time, as those of sums of steps.
    weights = 1 / numpy.sqrt(numpy.maximum(seconds, 1e-3))
    costs = _non_negative(work * weights[:, None], seconds * weights)
    if costs[COSTS.index("step")] <= 0:
        raise NotFitted(
            "the run's responses are too much alike to tell what a step costs; make one in which few and many "
            "trajectories are in flight: its end must not be cut off"
        )
    named = {f"{name}_seconds": float(cost) for name, cost in zip(COSTS, costs, strict=True)}
    error = float(numpy.abs(work @ costs - seconds).mean() / seconds.mean())
    return Fitted(responses=len(responses), error=error, **named)


def _work(responses: Sequence[Response], replicas: int) -> _Matrix:
    """What the engine did during each response, in the order of `COSTS`."""
    asked = numpy.array([response.asked for response in responses])
    answered = numpy.array([response.answered for response in responses])
    generated = numpy.array([response.generated for response in responses], dtype=numpy.float64)
    computed = numpy.array([response.computed for response in responses], dtype=numpy.float64)
    prompt = numpy.array([response.prompt for response in responses], dtype=numpy.float64)
    length = numpy.maximum(answered - asked, 1e-6)
    rows = []
    for number in range(len(responses)):
        begin = numpy.clip((asked[number] - asked) / length, 0, 1)
        end = numpy.clip((answered[number] - asked) / length, 0, 1)
        share = end - begin
        decoded = generated * share
        contexts = decoded * (prompt + generated * (begin + end) / 2)
        # Prompts are computed when they come.
        came = (asked >= asked[number]) & (asked < answered[number])
        others = numpy.array([decoded.sum(), (computed * came).sum(), contexts.sum()])
        own = numpy.array([generated[number], computed[number], contexts[number]])
        rows.append([generated[number], *(own + (others - own) / replicas), 1.0])
    return numpy.array(rows)


def _non_negative(work: _Matrix, seconds: _Matrix) -> _Matrix:
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
