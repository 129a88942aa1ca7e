"""The numbers of a replay, next to what is possible at best."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy

from kuberoll_workers.simulation.engine_model import EngineLimits
from kuberoll_workers.simulation.idle import CAUSES
from kuberoll_workers.simulation.replay import Replayed, ReplaySettings
from kuberoll_workers.simulation.trace import TraceTrajectory

_DIGITS: Final = 6
_PERCENTILES: Final = (50, 99)


def longest_seconds(
    trajectories: Sequence[TraceTrajectory], limits: EngineLimits, *, request_seconds: float = 0.0
) -> float:
    """Time of the longest trajectory alone on an idle engine that has all of it cached: no schedule ends earlier.

    Of each prompt only what no turn before had is computed, and of a group's first prompts nothing.
    """
    longest = 0.0
    step = limits.step_seconds + limits.decode_seconds
    for trajectory in trajectories:
        seconds, fresh, context = 0.0, 0, trajectory.prompt
        for turn in trajectory.turns:
            # A step that computes tokens samples one.
            decoded = max(0, turn.generated - 1)
            chunks = max(1, -(-fresh // limits.max_num_batched_tokens))
            seconds += request_seconds + chunks * limits.step_seconds + limits.prefill_seconds * fresh
            seconds += decoded * step + limits.attention_seconds * _read(context, decoded) + turn.environment_seconds
            # The last response's last token has no keys and values, and a prompt's last token is computed always.
            fresh = max(1, turn.observed + min(1, turn.generated))
            context += turn.generated + turn.observed
        longest = max(longest, seconds)
    return longest


def work_seconds(trajectories: Sequence[TraceTrajectory], limits: EngineLimits, *, replicas: int) -> float:
    """Time in which the replicas could do all work, always with full batches and with all prefixes cached.

    Each group's prompt is computed once.
    """
    groups: set[int] = set()
    prefill = decoded = read = 0
    for trajectory in trajectories:
        if trajectory.group not in groups:
            groups.add(trajectory.group)
            prefill += trajectory.prompt
        context = trajectory.prompt
        for turn in trajectory.turns:
            # The step that ends a prompt samples a token besides.
            decoded += max(0, turn.generated - 1)
            read += _read(context, max(0, turn.generated - 1))
            context += turn.generated + turn.observed
        prefill += sum(turn.observed for turn in trajectory.turns[:-1])
    steps = decoded / limits.max_num_seqs
    total = steps * limits.step_seconds + decoded * limits.decode_seconds + prefill * limits.prefill_seconds
    return (total + read * limits.attention_seconds) / replicas


def _read(context: int, steps: int) -> int:
    """Tokens of contexts that so many steps of a sequence read, the first one after a prompt of this length."""
    return steps * context + steps * (steps - 1) // 2


def report_of(trajectories: Sequence[TraceTrajectory], settings: ReplaySettings, found: Replayed) -> dict[str, Any]:
    """The report as plain data: the same replay gives the same bytes of JSON. Times are virtual seconds."""
    longest = longest_seconds(trajectories, settings.engine, request_seconds=settings.request_seconds)
    work = work_seconds(trajectories, settings.engine, replicas=settings.replicas)
    bound = max(longest, work)
    tallies = found.tallies
    engine_seconds = found.ledger.busy_seconds + sum(found.ledger.idle_seconds.values())
    busy_ps = sum(tally.busy_ps for tally in tallies)
    prompted = sum(tally.prompted for tally in tallies)
    cached = sum(tally.cached for tally in tallies)
    return {
        "trajectories": len(trajectories),
        "turns": found.turns,
        "generated_tokens": found.generated,
        "makespan_seconds": _rounded(found.makespan),
        "bound_seconds": _rounded(bound),
        "bound": "longest trajectory" if longest >= work else "work",
        "longest_trajectory_seconds": _rounded(longest),
        "work_seconds": _rounded(work),
        "makespan_over_bound": _ratio(found.makespan, bound),
        "tokens_per_second": _ratio(found.generated, found.makespan),
        "busy_share": _ratio(found.ledger.busy_seconds, engine_seconds),
        "idle_share": {cause: _ratio(found.ledger.idle_seconds[cause], engine_seconds) for cause in CAUSES},
        "mean_batch": _ratio(sum(tally.batch_ps for tally in tallies), busy_ps),
        "prompt_tokens": prompted,
        "cached_tokens": cached,
        "hit_rate": _ratio(cached, prompted),
        "best_hit_rate": _ratio(found.possible, prompted),
        "preemptions": sum(tally.preemptions for tally in tallies),
        "recomputed_tokens": sum(tally.recomputed for tally in tallies),
        "router_wait_seconds": _percentiles(found.waits.router),
        "engine_wait_seconds": _percentiles(found.waits.engine),
        "generation_seconds": _percentiles(found.turn_seconds),
        "failures": found.failures,
        "first_failure": found.first_failure,
        "moves": found.moves,
        "deaths": found.deaths,
    }


def _percentiles(values: array[float]) -> Mapping[str, float]:
    if not values:
        return {}
    sorted_values = numpy.sort(numpy.frombuffer(values, dtype=numpy.float32).astype(numpy.float64))
    found = {f"p{rank}": _rounded(float(numpy.percentile(sorted_values, rank))) for rank in _PERCENTILES}
    # Sorted, so that the sum does not depend on the order.
    return {"mean": _rounded(float(sorted_values.mean())), **found, "max": _rounded(float(sorted_values[-1]))}


def _ratio(part: float, whole: float) -> float:
    return _rounded(part / whole) if whole else 0.0


def _rounded(value: float) -> float:
    return round(value, _DIGITS)
