"""Throughput of a job, from its status and its worker pods' counters at two moments. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Final

from kuberoll_operator.deadlines import parse_time
from kuberoll_operator.main_condition import waiting_line
from kuberoll_operator.model import Object

TURNS: Final = "kuberoll_turns_total"
TOKENS: Final = "kuberoll_tokens_total"
ACTIVE: Final = "kuberoll_trajectories_active"
SANDBOX_STARTS: Final = "kuberoll_sandbox_starts_total"
SANDBOX_REMOVALS: Final = "kuberoll_sandbox_removals_total"
SANDBOXES_IN_USE: Final = "kuberoll_sandboxes_in_use"
SANDBOXES_WAITING: Final = "kuberoll_sandboxes_waiting"
SANDBOXES_LOST: Final = "kuberoll_sandboxes_lost_total"

_WANTED: Final = (
    TURNS, TOKENS, ACTIVE, SANDBOX_STARTS, SANDBOX_REMOVALS, SANDBOXES_IN_USE, SANDBOXES_WAITING, SANDBOXES_LOST
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxCounts:
    """Sandboxes of trajectories.

    Attributes:
        in_use: Those that trajectories have now.
        waiting: Those that trajectories wait for now.
        started: Those that have started, since the pods did.
        failed: Starts that failed.
        lost: Those that were gone before their trajectory had ended.
        left: Those that could not be removed.
    """

    in_use: float = 0.0
    waiting: float = 0.0
    started: float = 0.0
    failed: float = 0.0
    lost: float = 0.0
    left: float = 0.0


@dataclass(frozen=True, slots=True)
class PodCounts:
    """Counters of a worker pod, from its metrics.

    Attributes:
        turns: Turns finished since the pod started.
        tokens: Tokens generated since the pod started.
        active: Trajectories in flight now.
        sandboxes: Of its trajectories; None: they have none.
    """

    turns: float
    tokens: float
    active: float
    sandboxes: SandboxCounts | None = None


@dataclass(frozen=True, slots=True)
class JobSample:
    """Sample of a job at one moment.

    Attributes:
        seconds: Time on a monotonic clock.
        pods: Counters of the pods that answered, by uid.
    """

    job: Object
    seconds: float
    pods: Mapping[str, PodCounts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobRow:
    """Row of the table; None for unknown values.

    Attributes:
        waiting: Reason and message of what the job waits for, or failed for; empty while it goes on.
        sandboxes: Of the job's trajectories; None: they have none.
    """

    namespace: str
    name: str
    phase: str
    progress: str
    turns_per_second: float | None
    tokens_per_second: float | None
    mean_reward: float | None
    in_flight: int | None
    failed: int | None
    remaining_seconds: int | None
    waiting: str = ""
    sandboxes: SandboxCounts | None = None


def counts_of(text: str) -> PodCounts:
    """The counters in a page of metrics in Prometheus' text format.

    Raises:
        ValueError: The text cannot be parsed.
    """
    from prometheus_client.parser import text_string_to_metric_families

    # Parsing all of the page's hundreds of lines would be slow.
    wanted = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(_WANTED))
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(wanted):
        for sample in family.samples:
            found[sample.name, sample.labels.get("kind") or sample.labels.get("result") or ""] += sample.value
    totals: defaultdict[str, float] = defaultdict(float)
    for (name, _), value in found.items():
        totals[name] += value
    sandboxes = None
    if SANDBOXES_IN_USE in totals:
        sandboxes = SandboxCounts(
            in_use=totals[SANDBOXES_IN_USE],
            waiting=totals[SANDBOXES_WAITING],
            started=found[SANDBOX_STARTS, "started"],
            failed=found[SANDBOX_STARTS, "failed"],
            lost=totals[SANDBOXES_LOST],
            left=found[SANDBOX_REMOVALS, "failed"],
        )
    return PodCounts(totals[TURNS], found[TOKENS, "generated"], totals[ACTIVE], sandboxes)


def row_of(look: JobSample, before: JobSample | None) -> JobRow:
    """Row of a job: rates from its pods if they answered both times, else from its status.

    Args:
        before: The previous sample; for rates from the status, the last one with other numbers.
    """
    job = look.job
    status = job.get("status") or {}
    progress = status.get("progress") or {}
    turns, tokens = _rates(look, before)
    return JobRow(
        namespace=job["metadata"]["namespace"],
        name=job["metadata"]["name"],
        phase=str(status.get("phase") or "-"),
        progress=f"{progress.get('completed', 0)}/{progress.get('trajectories', 0)}" if progress else "-",
        turns_per_second=turns,
        tokens_per_second=tokens,
        mean_reward=progress.get("meanReward"),
        in_flight=round(sum(pod.active for pod in look.pods.values())) if look.pods else None,
        failed=progress.get("failed", 0) if progress else None,
        remaining_seconds=progress.get("estimatedSecondsRemaining"),
        waiting=waiting_line(status),
        sandboxes=_sandboxes([pod.sandboxes for pod in look.pods.values() if pod.sandboxes is not None]),
    )


def _sandboxes(pods: Sequence[SandboxCounts]) -> SandboxCounts | None:
    if not pods:
        return None
    return SandboxCounts(**{item.name: sum(getattr(pod, item.name) for pod in pods) for item in fields(SandboxCounts)})


def _rates(look: JobSample, before: JobSample | None) -> tuple[float | None, float | None]:
    if before is None or (look.job.get("status") or {}).get("phase") != "Running":
        return None, None
    pairs = list(_same_pods(look, before))
    seconds = look.seconds - before.seconds
    if pairs and seconds > 0:
        # A restarted worker counts from 0.
        turns = sum(max(0.0, now.turns - then.turns) for now, then in pairs)
        tokens = sum(max(0.0, now.tokens - then.tokens) for now, then in pairs)
        return turns / seconds, tokens / seconds
    now_at, then_at = _updated(look.job), _updated(before.job)
    if now_at is None or then_at is None or now_at <= then_at:
        return None, None
    passed = (now_at - then_at).total_seconds()
    return _growth(look, before, "turns") / passed, _growth(look, before, "generatedTokens") / passed


def _same_pods(look: JobSample, before: JobSample) -> Iterator[tuple[PodCounts, PodCounts]]:
    for uid, now in look.pods.items():
        if uid in before.pods:
            yield now, before.pods[uid]


def progress_of(job: Object) -> Mapping[str, Any]:
    """`status.progress`; empty if there is none."""
    found: Mapping[str, Any] = (job.get("status") or {}).get("progress") or {}
    return found


def _updated(job: Object) -> datetime | None:
    return parse_time(progress_of(job).get("lastUpdated"))


def _growth(look: JobSample, before: JobSample, name: str) -> float:
    return max(0.0, float(progress_of(look.job).get(name) or 0) - float(progress_of(before.job).get(name) or 0))
