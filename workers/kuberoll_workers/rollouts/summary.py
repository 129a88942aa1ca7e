"""Metrics of a rollout, with NeMo RL's names and exact definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import FINISHED


def summarize(results: Sequence[TrajectoryRecord | FailureRecord]) -> dict[str, Any]:
    """Compute the metrics of trajectories that have ended.

    Rates are fractions of all samples; each sample ended in exactly one way, so they add up to 1. All other values,
    except those named `failed`, cover finished samples only: a failed one has no reward and no length. Token counts
    are of the tokens that the rollout added, without prompts. Without samples, or without finished ones, means,
    extremes of rewards and percentiles are NaN, sums and other maxima are 0.

    Returns:
        - `total_turns`, `avg_turns_per_sample`, `max_turns_per_sample`, `turns_per_sample/p95`, `turns_per_sample/p99`
          (nearest rank);
        - `natural_termination_rate` (by the environment), `truncation_rate`, `max_turns_reached_rate`, `failed_rate`,
          `failed_samples`;
        - `mean_total_tokens_per_sample`, `mean_gen_tokens_per_sample`, `max_gen_tokens_per_sample`,
          `mean_env_tokens_per_sample`;
        - `mean_total_reward`, `max_total_reward`, `min_total_reward`;
        - `active_samples_per_turn`, `total_gen_tokens_per_turn`: lists, one entry for each turn.
    """
    finished = [result for result in results if isinstance(result, TrajectoryRecord)]
    turns = [record.turn_count for record in finished]
    generated = [record.tokens.generated for record in finished]
    environment = [record.tokens.environment for record in finished]
    rewards = [record.total_reward for record in finished]
    failed = len(results) - len(finished)

    def rate(reason: str) -> float:
        return _ratio(sum(record.stop_reason == reason for record in finished), len(results))

    return {
        "total_turns": sum(turns),
        "avg_turns_per_sample": _mean(turns),
        "max_turns_per_sample": max(turns, default=0),
        "turns_per_sample/p95": nearest_rank(turns, 95),
        "turns_per_sample/p99": nearest_rank(turns, 99),
        **{ending.rate: rate(reason) for reason, ending in FINISHED.items()},
        "failed_rate": _ratio(failed, len(results)),
        "failed_samples": failed,
        "mean_total_tokens_per_sample": _mean([*generated, *environment], len(finished)),
        "mean_gen_tokens_per_sample": _mean(generated),
        "max_gen_tokens_per_sample": max(generated, default=0),
        "mean_env_tokens_per_sample": _mean(environment),
        "mean_total_reward": _mean(rewards),
        "max_total_reward": _extreme(max, rewards),
        "min_total_reward": _extreme(min, rewards),
        "active_samples_per_turn": [sum(count > turn for count in turns) for turn in range(max(turns, default=0))],
        "total_gen_tokens_per_turn": _by_turn(finished),
    }


def nearest_rank(values: Sequence[float], percent: float) -> float:
    """Percentile by the nearest-rank method; NaN without values."""
    if not values:
        return math.nan
    return float(sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)])


def responses(messages: Sequence[Message]) -> list[Message]:
    """The policy's responses: the first message of each turn."""
    first: list[Message] = []
    for message in messages:
        if message.turn == len(first) + 1:
            first.append(message)
    return first


def _by_turn(finished: Sequence[TrajectoryRecord]) -> list[int]:
    totals = [0] * max((record.turn_count for record in finished), default=0)
    for record in finished:
        for turn, response in enumerate(responses(record.messages)):
            totals[turn] += len(response.token_ids)
    return totals


def _mean(values: Sequence[float], count: int | None = None) -> float:
    return _ratio(sum(values), len(values) if count is None else count)


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else math.nan


def _extreme(pick: Callable[[Sequence[float]], float], values: Sequence[float]) -> float:
    return pick(values) if values else math.nan
