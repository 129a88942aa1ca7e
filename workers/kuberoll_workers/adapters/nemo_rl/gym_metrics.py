"""Metrics of rollouts that NeMo Gym ran, by NeMo RL's names."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from kuberoll_workers.adapters.nemo_rl.gym_rows import GymRollout
from kuberoll_workers.rollouts.summary import nearest_rank

_PER_SAMPLE = {
    "turns_per_sample": "turns",
    "total_tokens_per_sample": "tokens",
    "gen_tokens_per_sample": "generated",
    "max_gen_tokens_per_turn": "longest_response",
    "total_reward": "reward",
}


def gym_metrics(
    rows: Sequence[Mapping[str, Any]], rollouts: Sequence[GymRollout | None], *, full_results: bool
) -> dict[str, Any]:
    """Compute the metrics of a group or batch.

    Rates are fractions of all samples and add up to 1; everything else covers finished samples only.

    Args:
        rows: NeMo Gym's rows; each has `agent_ref`.
        rollouts: One for each row; None for a failed one.
        full_results: Add a table of the agents' complete results.

    Returns:
        - For turns, tokens (`total_tokens_per_sample`, with prompts), generated tokens, the longest response
          (`max_gen_tokens_per_turn`) and rewards the values of `distribution`;
        - `turns_per_sample/p95`, `/p99`, `max_gen_tokens_per_turn/p95` (nearest rank), NaN without finished samples;
        - `mean_gen_tokens_per_sample`; `natural_termination_rate`, `truncation_rate`, `failed_rate`, `failed_samples`;
        - `<agent>/<field>` for each number of the agents' results, as in `distribution`, and `<agent>/full_result`.
    """
    finished = [rollout for rollout in rollouts if rollout is not None]
    count = len(rollouts)
    metrics: dict[str, Any] = {}
    for name, attribute in _PER_SAMPLE.items():
        metrics |= distribution(name, [getattr(rollout, attribute) for rollout in finished])
    turns = [rollout.turns for rollout in finished]
    truncated = sum(rollout.truncated for rollout in finished)
    metrics |= {
        "turns_per_sample/p95": nearest_rank(turns, 95),
        "turns_per_sample/p99": nearest_rank(turns, 99),
        "max_gen_tokens_per_turn/p95": nearest_rank([rollout.longest_response for rollout in finished], 95),
        "natural_termination_rate": (len(finished) - truncated) / count,
        "truncation_rate": truncated / count,
        "failed_rate": (count - len(finished)) / count,
        "failed_samples": count - len(finished),
        "mean_gen_tokens_per_sample": metrics["gen_tokens_per_sample/mean"],
    }
    by_agent: dict[str, list[dict[str, Any]]] = {}
    for row, rollout in zip(rows, rollouts, strict=True):
        if rollout is not None:
            by_agent.setdefault(row["agent_ref"]["name"], []).append(rollout.full_result)
    for agent, results in by_agent.items():
        for field in dict.fromkeys(field for result in results for field in result):
            values = [float(value) for result in results if isinstance(value := result.get(field), bool | int | float)]
            if values:
                metrics |= distribution(f"{agent}/{field}", values, count=len(results))
        if full_results:
            metrics[f"{agent}/full_result"] = _table(
                [[json.dumps(result, separators=(",", ":"))] for result in results]
            )
    return metrics


def distribution(name: str, values: Sequence[float], *, count: int | None = None) -> dict[str, Any]:
    """`<name>/mean`, `/max`, `/min`, `/median`, `/stddev` (of the sample; NaN for one) and `/histogram` of values.

    Without values all are NaN and there is no histogram. The histogram is a `wandb.Histogram`, which NeMo RL's loggers
    expect; a list of the values if wandb is not installed.

    Args:
        count: Divisor of the mean, if it is not the number of values.
    """
    if not values:
        return {f"{name}/{part}": math.nan for part in ("mean", "max", "min", "median", "stddev")}
    return {
        f"{name}/mean": sum(values) / (count or len(values)),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
        f"{name}/median": statistics.median(values),
        f"{name}/stddev": statistics.stdev(values) if len(values) > 1 else math.nan,
        f"{name}/histogram": _histogram(values),
    }


def _histogram(values: Sequence[float]) -> Any:
    if find_spec("wandb") is None or not all(math.isfinite(value) for value in values):
        return list(values)
    from wandb import Histogram

    return Histogram(list(values))


def _table(rows: list[list[str]]) -> Any:
    if find_spec("wandb") is None:
        return rows
    from wandb import Table

    return Table(data=rows, columns=["Full result"])
