"""Idle time of replicas: which second has which cause."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kuberoll_workers.telemetry.idle import CAUSES, AdmissionState, IdleCause, IdleMetrics, cause_of_idleness
from kuberoll_workers.telemetry.routing import RoutingState

BUSY = AdmissionState(held_back=False, exhausted=False)
HELD = AdmissionState(held_back=True, exhausted=False)
ALL_BEGUN = AdmissionState(held_back=False, exhausted=True)

LABELS = {"rolloutjob": "job"}


@pytest.mark.parametrize(
    ("answers", "answered", "waiting", "stepping", "admission", "cause"),
    [
        (False, False, 3, 0, BUSY, "cold start"),
        (False, True, 3, 0, BUSY, "unreachable"),
        (True, True, 3, 9, ALL_BEGUN, "admission"),
        (True, True, 0, 9, HELD, "trainer"),
        (True, True, 0, 9, ALL_BEGUN, "tail"),
        (True, True, 0, 9, BUSY, "environment"),
        (True, True, 0, 0, BUSY, "no work"),
    ],
)
def test_a_replica_is_idle_for_one_cause(
    answers: bool, answered: bool, waiting: int, stepping: int, admission: AdmissionState, cause: IdleCause
) -> None:
    found = cause_of_idleness(
        answers=answers, answered=answered, waiting=waiting, stepping=stepping, admission=admission
    )
    assert found == cause


class Sampled:
    """Metrics of a worker whose state a test sets."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = IdleMetrics("job", self.registry)
        self.admission = BUSY
        self.metrics.read_admission = lambda: self.admission

    @property
    def seconds(self) -> float:
        return self.registry.get_sample_value("kuberoll_replica_seconds_total", LABELS) or 0.0

    @property
    def idle(self) -> dict[str, float]:
        values = {
            cause: self.registry.get_sample_value("kuberoll_replica_idle_seconds_total", {**LABELS, "cause": cause})
            for cause in CAUSES
        }
        return {cause: value for cause, value in values.items() if value}


def state(*, usable: int, idle: int = 0, broken: int = 0, waiting: int = 0) -> RoutingState:
    return RoutingState(waiting=waiting, window=64, replicas={"closed": usable, "open": broken}, idle=idle)


def test_the_life_of_a_run() -> None:
    seen = Sampled()
    # Nobody answers yet, then all work, then one breaks while two wait for environments, then the tail.
    seen.metrics.sample(2.0, routing=state(usable=0), generating=0, stepping=0)
    seen.metrics.sample(1.0, routing=state(usable=4), generating=9, stepping=0)
    seen.metrics.sample(0.5, routing=state(usable=3, idle=2, broken=1), generating=1, stepping=5)
    seen.admission = ALL_BEGUN
    seen.metrics.sample(0.25, routing=state(usable=4, idle=3), generating=1, stepping=0)
    seen.metrics.sample(0.25, routing=state(usable=0, broken=4), generating=0, stepping=0)
    assert seen.seconds == 2.0 + 4.0 + 2.0 + 1.0 + 1.0
    assert seen.idle == {"cold start": 2.0, "unreachable": 0.5 + 1.0, "environment": 1.0, "tail": 0.75}


def test_one_endpoint_is_idle_while_nothing_is_asked_of_it() -> None:
    seen = Sampled()
    seen.metrics.sample(1.0, routing=None, generating=0, stepping=0)
    seen.metrics.sample(1.0, routing=None, generating=5, stepping=1)
    seen.metrics.sample(1.0, routing=None, generating=0, stepping=1)
    seen.admission = HELD
    seen.metrics.sample(1.0, routing=None, generating=0, stepping=0)
    assert seen.seconds == 4.0
    assert seen.idle == {"cold start": 1.0, "environment": 1.0, "trainer": 1.0}
