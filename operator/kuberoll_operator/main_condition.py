"""The condition that says best how a job is, for all who tell it in one line: kubectl, `top`, metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kuberoll_api import conditions
from kuberoll_api.conditions import Reason
from kuberoll_operator.model import condition, is_true

PROBLEMS: Final = frozenset(
    {
        Reason.UNSCHEDULABLE,
        Reason.IMAGE_PULL,
        Reason.ENGINE_FAILED,
        Reason.CONTAINER_FAILED,
        Reason.CRASHING,
        Reason.POD_CONFIG,
        Reason.VOLUME,
        Reason.POD_SANDBOX,
        Reason.POD_REMOVED,
        Reason.SANDBOX,
        Reason.NODE_LOST,
        Reason.NOT_ANSWERING,
        Reason.WAITING_FOR_TURN,
        Reason.INVALID_TEMPLATE,
        Reason.FORBIDDEN,
        Reason.FIELD_CONFLICT,
        Reason.NAME_TAKEN,
        Reason.QUOTA,
    }
)
"""Reasons for waiting that somebody may have to resolve."""


def main_condition(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The most informative condition: of the end, else of whatever the job waits for; empty if there is none yet."""
    for kind in (conditions.COMPLETE, conditions.FAILED, conditions.FAILURE_TARGET, conditions.SUSPENDED):
        if is_true(status, kind):
            return condition(status, kind)
    if last := condition(status, conditions.SUCCESS_CRITERIA_MET):
        return last
    if condition(status, conditions.WORKERS_CHECKED).get("status") == "False":
        return condition(status, conditions.WORKERS_CHECKED)
    ready = is_true(status, conditions.GENERATION_READY)
    return condition(status, conditions.WORKERS_READY if ready else conditions.GENERATION_READY)


def waits_for_problem(status: Mapping[str, Any]) -> tuple[str, str] | None:
    """Type and reason of the condition for which a job waits until somebody resolves it; None if it does not."""
    found = main_condition(status)
    if found.get("status") == "False" and found.get("reason") in PROBLEMS:
        return str(found.get("type")), str(found.get("reason"))
    return None


def waiting_line(status: Mapping[str, Any]) -> str:
    """Reason and message of what a job waits for, or failed for; empty while it goes on, and when it is complete."""
    found = main_condition(status)
    failed = found.get("type") in {conditions.FAILED, conditions.FAILURE_TARGET}
    if not found or found.get("type") == conditions.COMPLETE or (found.get("status") == "True" and not failed):
        return ""
    text = " ".join(str(found.get("message") or "").split())
    return f"{found.get('reason')}: {text}" if text else str(found.get("reason"))
