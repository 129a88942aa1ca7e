"""Events: on transitions only."""

from __future__ import annotations

from typing import Any

import pytest

from kuberoll_api.conditions import CONDITION_TYPES, Reason
from kuberoll_operator.transitions import NOTE_CHARACTERS, RULES, Event, transitions
from tests.operator.support import condition

Status = dict[str, Any]


def status(*conditions: Any) -> Status:
    return {"conditions": list(conditions)}


STARTING = condition("GenerationReady", False, "Starting", "0 of 2 replicas are ready")
READY = condition("GenerationReady", True, "Ready", "2 of 2 replicas are ready")
RELEASED = condition("GenerationReady", False, "Released", "all shards are done")
UNSCHEDULABLE = condition("GenerationReady", False, "Unschedulable", "Insufficient nvidia.com/gpu")
WAITING = condition("WorkersReady", False, "WaitingForGeneration")
RUNNING = condition("WorkersReady", True, "Running", "2 workers are running")
DONE = condition("WorkersReady", False, "ShardsDone", "4 of 4 shards are done")

ROWS: list[tuple[Status | None, Status, list[tuple[str, str, str]]]] = [
    (None, status(STARTING, WAITING), [("Normal", "GenerationStarting", "StartGeneration")]),
    (None, status(condition("Suspended", True, "JobSuspended")), [("Normal", "Suspended", "Suspend")]),
    (
        status(condition("Suspended", True, "JobSuspended")),
        status(condition("Suspended", False, "JobResumed")),
        [("Normal", "Resumed", "Resume")],
    ),
    (status(STARTING), status(UNSCHEDULABLE), [("Warning", "Unschedulable", "StartGeneration")]),
    (status(UNSCHEDULABLE), status({**UNSCHEDULABLE, "message": "other words"}), []),
    (status(STARTING), status(READY), [("Normal", "GenerationReady", "StartWorkers")]),
    (status(READY), status({**READY, "message": "1 of 2 replicas are ready"}), []),
    (status(READY), status(STARTING), [("Normal", "GenerationStarting", "StartGeneration")]),
    (status(WAITING), status(RUNNING), [("Normal", "WorkersRunning", "RunWorkers")]),
    (
        status(READY, RUNNING),
        status(RELEASED, DONE),
        [("Normal", "GenerationReleased", "ReleaseGeneration"), ("Normal", "ShardsDone", "Aggregate")],
    ),
    (
        status(RUNNING, condition("WeightsServed", True, "WeightsCurrent")),
        status(RUNNING, condition("WeightsServed", False, "WeightsLoading")),
        [("Normal", "WeightsChanged", "LoadWeights")],
    ),
    (
        status(RUNNING, condition("WeightsServed", False, "WeightsLoading")),
        status(RUNNING, condition("WeightsServed", True, "WeightsCurrent")),
        [("Normal", "WeightsServed", "ServeWeights")],
    ),
    (
        status(condition("WeightsServed", True, "WeightsCurrent")),
        status(condition("WeightsServed", False, "Released")),
        [],
    ),
    (
        status(DONE),
        status(DONE, condition("SuccessCriteriaMet", False, "ShardsDone")),
        [],
    ),
    (
        status(condition("SuccessCriteriaMet", False, "ShardsDone")),
        status(condition("SuccessCriteriaMet", False, "Unschedulable")),
        [("Warning", "Unschedulable", "Aggregate")],
    ),
    (
        status(DONE),
        status(
            DONE,
            condition("SuccessCriteriaMet", True, "TrajectoriesDone"),
            condition("Complete", True, "TrajectoriesDone"),
        ),
        [("Normal", "TrajectoriesDone", "ReleaseGeneration"), ("Normal", "Completed", "Complete")],
    ),
    (
        status(RUNNING),
        status(condition("WorkersReady", False, "FailedShards"), condition("FailureTarget", True, "FailedShards")),
        [("Warning", "FailedShards", "StopJob")],
    ),
    (
        status(condition("FailureTarget", True, "Refused")),
        status(condition("FailureTarget", True, "Refused"), condition("Failed", True, "Refused")),
        [("Warning", "Failed", "Fail")],
    ),
]


@pytest.mark.parametrize(("old", "new", "expected"), ROWS)
def test_table(old: Status | None, new: Status, expected: list[tuple[str, str, str]]) -> None:
    assert [event[:3] for event in transitions(old, new)] == expected
    assert transitions(new, new) == []


def test_a_note_has_the_cause_and_fits_an_event() -> None:
    [event] = transitions(None, status({**UNSCHEDULABLE, "message": "x" * 5000}))
    assert len(event.note) == NOTE_CHARACTERS
    [event] = transitions(None, status(UNSCHEDULABLE))
    assert event == Event("Warning", "Unschedulable", "StartGeneration", "Insufficient nvidia.com/gpu")


def test_the_table_speaks_of_what_there_is() -> None:
    reasons = {value for name, value in vars(Reason).items() if not name.startswith("_")}
    for rule in RULES:
        assert rule.condition in CONDITION_TYPES
        assert rule.reasons is None or rule.reasons <= reasons
        assert len(rule.action) <= 128
