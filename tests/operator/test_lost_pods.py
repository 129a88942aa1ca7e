"""Pods whose end nobody tells: which are ended, and when."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from kuberoll_operator.lost_pods import end_lost_pods, next_loss
from kuberoll_operator.model import Object, is_true
from tests.operator.support import at, pod, stamp

SILENT = {"type": "Ready", "status": "False"}
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
RUNS = {"ready": True, "state": {"running": {}}}


def deleted(component: str = "workers", *, by: float | None = 120, **fields: Any) -> Object:
    """A pod that was deleted, with a grace period that ends after so many seconds; None: it was not."""
    found = pod(component, container=RUNS, **fields)
    found["metadata"]["resourceVersion"] = "7"
    if by is not None:
        found["metadata"]["deletionTimestamp"] = stamp(by)
    return found


def test_one_on_a_node_that_does_not_answer_is_ended_at_once() -> None:
    [patch] = end_lost_pods([deleted(conditions=[SILENT, EVICTED])], at(0))
    assert (patch.ref.kind, patch.ref.name, patch.version) == ("Pod", "puzzle-workers-a", "7")
    assert patch.status == {"phase": "Failed", "reason": "NodeLost"}


def test_one_that_somebody_deleted_by_hand_is_no_failure_of_its_shard() -> None:
    [patch] = end_lost_pods([deleted(conditions=[SILENT])], at(0))
    assert is_true(patch.status, "DisruptionTarget")
    assert SILENT in patch.status["conditions"]


@pytest.mark.parametrize("component", ["check", "workers", "finish"])
@pytest.mark.parametrize("phase", ["Pending", "Running"])
def test_one_whose_end_is_overdue_is_ended(component: str, phase: str) -> None:
    """Its node may never have begun with it, so that nothing says that it does not answer."""
    found = deleted(component, phase=phase, conditions=[EVICTED])
    assert end_lost_pods([found], at(149)) == ()
    assert next_loss([found], at(100)) == 50
    [patch] = end_lost_pods([found], at(150))
    assert patch.status["phase"] == "Failed"
    assert next_loss([found], at(150)) is None


@pytest.mark.parametrize(
    "found",
    [
        deleted(by=None, conditions=[SILENT]),
        deleted(phase="Failed", conditions=[SILENT, EVICTED]),
        deleted(phase="Succeeded", conditions=[SILENT]),
        # Its successor is there as soon as it is deleted.
        deleted("generation", conditions=[SILENT, EVICTED]),
        deleted(conditions=[{**SILENT, "reason": "ContainersNotReady"}]),
    ],
    ids=["not deleted", "failed", "succeeded", "engine", "its kubelet answers"],
)
def test_others_are_left_alone(found: Object) -> None:
    assert end_lost_pods([found], at(0) + timedelta(seconds=60)) == ()
