"""Idle time of the replicas that a worker uses, by its cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, get_args

from prometheus_client import CollectorRegistry

from kuberoll_workers.telemetry import definitions as metrics
from kuberoll_workers.telemetry.routing import RoutingState
from kuberoll_workers.telemetry.tallies import counter

IdleCause = Literal["cold start", "unreachable", "admission", "trainer", "tail", "environment", "no work"]
"""Why a replica has no request.

`cold start`, `unreachable`: it does not answer, yet or any more; `admission`: requests wait in the worker; `trainer`:
the run's consumer lets nothing begin; `tail`: all trajectories have begun; `environment`: trajectories are in their
environments; `no work`: fewer trajectories are in flight than the replicas could take.
"""

CAUSES: Final = get_args(IdleCause)


class AdmissionState(NamedTuple):
    """What keeps a worker from beginning trajectories.

    Attributes:
        held_back: The run's consumer.
        exhausted: There are no more.
    """

    held_back: bool
    exhausted: bool


def cause_of_idleness(
    *, answers: bool, answered: bool, waiting: int, stepping: int, admission: AdmissionState
) -> IdleCause:
    """Why a replica has no request.

    Args:
        answers, answered: It answers now, and did once.
        waiting: Requests that wait in the worker.
        stepping: Trajectories in their environments.
    """
    if not answers:
        return "unreachable" if answered else "cold start"
    if waiting:
        return "admission"
    if admission.held_back:
        return "trainer"
    if admission.exhausted:
        return "tail"
    return "environment" if stepping else "no work"


class IdleMetrics:
    """Seconds of replicas, and of those without a request, sampled while the worker runs.

    Attributes:
        read_admission: Called for each sample; None: nothing is admitted yet.
    """

    def __init__(self, job: str, registry: CollectorRegistry) -> None:
        self.read_admission: Callable[[], AdmissionState] | None = None
        self._seconds = counter(metrics.REPLICA_SECONDS, registry).labels(job)
        idle = counter(metrics.REPLICA_IDLE_SECONDS, registry)
        # From the start at 0: Prometheus does not see the increase of a series that first appears above 0.
        self._idle = {cause: idle.labels(job, cause) for cause in CAUSES}
        self._answered = False

    def sample(self, seconds: float, *, routing: RoutingState | None, generating: int, stepping: int) -> None:
        """Count the seconds since the last sample.

        Args:
            routing: State of the replicas; None: there is one endpoint, or none yet.
        """
        if routing is None:
            self._answered = self._answered or generating > 0
            self._count(seconds, 1, 0 if generating else 1, answers=self._answered, waiting=0, stepping=stepping)
            return
        usable = routing.replicas.get("closed", 0)
        self._answered = self._answered or usable > 0
        absent = max(routing.replicas.get("open", 0) + routing.replicas.get("half-open", 0), 0 if usable else 1)
        self._count(seconds, usable, routing.idle, answers=True, waiting=routing.waiting, stepping=stepping)
        self._count(seconds, absent, absent, answers=False, waiting=routing.waiting, stepping=stepping)

    def _count(self, seconds: float, replicas: int, idle: int, *, answers: bool, waiting: int, stepping: int) -> None:
        self._seconds.inc(seconds * replicas)
        if not idle:
            return
        admission = AdmissionState(False, False) if self.read_admission is None else self.read_admission()
        cause = cause_of_idleness(
            answers=answers, answered=self._answered, waiting=waiting, stepping=stepping, admission=admission
        )
        self._idle[cause].inc(seconds * idle)
