"""Counts of a job: trajectories and tokens from its pods' reports, pace, and remaining time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from kuberoll_api import conditions
from kuberoll_api.contract import FinishMessage, PodProgress, WorkerMessage
from kuberoll_api.model.types import MAX_COUNT
from kuberoll_operator import names
from kuberoll_operator.backends.pods import (
    last_exit,
    pods_of,
    shard_of,
)
from kuberoll_operator.deadlines import parse_time
from kuberoll_operator.facts import Facts, Stage
from kuberoll_operator.messages import worker_message
from kuberoll_operator.model import Observed, condition, is_true

Json = dict[str, Any]

# The pace is a mean over this many seconds.
_PACE_SECONDS: Final = 900.0

_LARGEST: Final = 1e300


def mean_reward(reward: float | None) -> Json:
    """Field `meanReward`, rounded to six places; empty if there is no mean."""
    return {} if reward is None or abs(reward) > _LARGEST else {"meanReward": round(reward, 6)}


@dataclass(frozen=True, slots=True)
class _Tally:
    """Counts of one shard."""

    completed: int
    failed: int
    dropped: int
    turns: int
    tokens: int
    reward: float
    planned: int

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.dropped


def progress_of(old: Json, facts: Facts) -> Json:
    observed, now = facts.observed, facts.now
    before: Json = {
        key: value
        for key, value in (old.get("progress") or _new_progress()).items()
        if key != "estimatedSecondsRemaining"
    }
    if facts.finish.message is not None:
        found = _final_counts(before, facts.finish.message)
    else:
        if facts.check.planned is not None:
            before["trajectories"] = facts.check.planned
        # What the check counted is exact.
        known = facts.check.planned is not None or is_true(old, conditions.WORKERS_CHECKED)
        found = _sum_counts(before, _tallies(observed), before["trajectories"] if known else None, facts.shards.count)
    if facts.stage is Stage.RUNNING:
        ready = condition(old, conditions.WORKERS_READY)
        since = parse_time(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None
        remaining = _remaining(old.get("progress") or {}, found, since, now)
        found |= {} if remaining is None else {"estimatedSecondsRemaining": remaining}
    return found


def _new_progress() -> Json:
    counts = ("trajectories", "completed", "failed", "dropped", "turns", "generatedTokens", "percentage")
    return dict.fromkeys(counts, 0)


def _sum_counts(before: Json, tallies: list[_Tally], planned: int | None, shards: int) -> Json:
    """Sum of the shards' counts; the previous counts if missing reports would make the sum smaller.

    Args:
        planned: Number of trajectories that the job will produce; None if unknown: it is estimated.
    """
    completed, failed = sum(tally.completed for tally in tallies), sum(tally.failed for tally in tallies)
    if not tallies or completed + failed < before["completed"] + before["failed"]:
        return dict(before)
    if planned is None:
        # Shards that have not started are assumed to be as large as the others.
        planned = round(sum(tally.planned for tally in tallies) / len(tallies) * shards)
    reward = sum(tally.reward for tally in tallies)
    return {
        **before,
        "trajectories": planned,
        "completed": completed,
        "failed": failed,
        "dropped": sum(tally.dropped for tally in tallies),
        "turns": sum(tally.turns for tally in tallies),
        "generatedTokens": sum(tally.tokens for tally in tallies),
        "percentage": _percentage(sum(tally.ended for tally in tallies), planned),
        **(mean_reward(reward / completed) if completed else {}),
    }


def _final_counts(before: Json, message: FinishMessage) -> Json:
    """The final counts: those of the finish pod, taken from the stored trajectories."""
    ended = message.trajectories + message.failed + message.dropped
    return {
        **{key: value for key, value in before.items() if key != "meanReward"},
        "trajectories": message.planned,
        "completed": message.trajectories,
        "failed": message.failed,
        "dropped": message.dropped,
        "percentage": _percentage(ended, message.planned) if message.planned else 100,
        **mean_reward(message.mean_reward),
    }


def _tallies(observed: Observed) -> list[_Tally]:
    """Largest known counts of each shard: of its pod, or what pods said before they were lost or when they ended."""
    known: dict[int, list[_Tally]] = {}
    for reports in (observed.progress, observed.counted):
        for shard, report in reports.items():
            known.setdefault(shard, []).append(_tally(report))
    for pod in pods_of([*observed.pods, *observed.departed], names.WORKERS):
        message, index = worker_message(last_exit(pod, "worker")), shard_of(pod)
        # A pod that ended before it knew its shard has counted nothing.
        if index is None or message is None or message.shard is None:
            continue
        known.setdefault(index, []).append(_tally(message, dropped=message.dropped))
    return [max(known[shard], key=lambda tally: (tally.ended, tally.turns, tally.tokens)) for shard in sorted(known)]


def _tally(counts: PodProgress | WorkerMessage, dropped: int = 0) -> _Tally:
    return _Tally(
        completed=counts.trajectories,
        failed=counts.failed,
        dropped=dropped,
        turns=counts.turns,
        tokens=counts.generated_tokens,
        reward=counts.reward_sum,
        planned=counts.planned,
    )


def _remaining(before: Mapping[str, Any], found: Json, running_since: datetime | None, now: datetime) -> int | None:
    """Seconds until all planned trajectories have ended, at the mean pace of at most the last quarter of an hour.

    The pace is averaged, and recovered from the previous estimate. Averaging the estimates would overestimate for the
    rest of the run, because the first trajectories take long to come.
    """
    earlier, since = before.get("estimatedSecondsRemaining"), parse_time(before.get("lastUpdated"))
    if all(before.get(key) == value for key, value in found.items()):
        # The passing of time alone is no reason to write a status.
        return None if earlier is None else int(earlier)
    seconds = (now - since).total_seconds() if since else 0.0
    if seconds <= 0 or running_since is None:
        return None if earlier is None else int(earlier)
    ran = max(seconds, (now - running_since).total_seconds())
    weight = seconds / min(ran, max(seconds, _PACE_SECONDS))
    pace = 0.0 if earlier is None else _remaining_trajectories(before) / max(0.5, earlier)
    gained = sum(found[key] - before.get(key, 0) for key in ("completed", "failed"))
    pace += weight * (gained / seconds - pace)
    return min(round(_remaining_trajectories(found) / pace), MAX_COUNT) if pace > 0 else None


def _remaining_trajectories(progress: Mapping[str, Any]) -> int:
    planned, completed, failed = (progress.get(key) or 0 for key in ("trajectories", "completed", "failed"))
    return max(0, planned - completed - failed)


def _percentage(ended: int, planned: int) -> int:
    return min(100, 100 * ended // planned) if planned > 0 else 0
