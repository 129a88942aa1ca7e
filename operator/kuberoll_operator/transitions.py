"""Kubernetes Events of a job: one for every step that its user may care about, none while nothing changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from kuberoll_api import conditions
from kuberoll_api.conditions import Reason
from kuberoll_operator.main_condition import PROBLEMS
from kuberoll_operator.model import condition

NOTE_CHARACTERS: Final = 1000

EventType = Literal["Normal", "Warning"]


class Event(NamedTuple):
    """An Event about a RolloutJob.

    Attributes:
        reason: A name from the table below, or the condition's reason.
        action: What the operator did or does next.
        note: Message for people, at most `NOTE_CHARACTERS` characters.
    """

    type: EventType
    reason: str
    action: str
    note: str


class EventRule(NamedTuple):
    """Trigger of an event: a condition gets this status, with one of these reasons.

    Attributes:
        reasons: None for any reason.
        name: The event's reason; None for the condition's.
        on_reason_change: True if a change of the reason alone is an event, too.
    """

    condition: str
    status: Literal["True", "False"]
    reasons: frozenset[str] | None
    type: EventType
    name: str | None
    action: str
    on_reason_change: bool = False


def _is(kind: str, status: Literal["True", "False"], reason: str, name: str, action: str) -> EventRule:
    return EventRule(kind, status, frozenset({reason}), "Normal", name, action, on_reason_change=True)


RULES: Final[tuple[EventRule, ...]] = (
    _is(conditions.SUSPENDED, "True", Reason.JOB_SUSPENDED, "Suspended", "Suspend"),
    _is(conditions.SUSPENDED, "True", Reason.QUEUED, "Queued", "WaitForQuota"),
    _is(conditions.SUSPENDED, "False", Reason.SUSPENDING, "Suspending", "Suspend"),
    _is(conditions.SUSPENDED, "False", Reason.EVICTED, "Evicted", "GiveBackQuota"),
    _is(conditions.SUSPENDED, "False", Reason.JOB_RESUMED, "Resumed", "Resume"),
    _is(conditions.SUSPENDED, "False", Reason.ADMITTED, "Admitted", "Resume"),
    EventRule(conditions.WORKERS_CHECKED, "False", PROBLEMS, "Warning", None, "CheckWorkers", on_reason_change=True),
    EventRule(conditions.WORKERS_CHECKED, "True", None, "Normal", "WorkersChecked", "StartGeneration"),
    EventRule(
        conditions.GENERATION_READY,
        "False",
        frozenset({Reason.STARTING}),
        "Normal",
        "GenerationStarting",
        "StartGeneration",
        on_reason_change=True,
    ),
    EventRule(
        conditions.GENERATION_READY, "False", PROBLEMS, "Warning", None, "StartGeneration", on_reason_change=True
    ),
    EventRule(conditions.GENERATION_READY, "True", None, "Normal", "GenerationReady", "StartWorkers"),
    EventRule(
        conditions.GENERATION_READY,
        "False",
        frozenset({Reason.RELEASED}),
        "Normal",
        "GenerationReleased",
        "ReleaseGeneration",
        on_reason_change=True,
    ),
    EventRule(conditions.WORKERS_READY, "False", PROBLEMS, "Warning", None, "StartWorkers", on_reason_change=True),
    EventRule(conditions.WORKERS_READY, "True", None, "Normal", "WorkersRunning", "RunWorkers"),
    EventRule(
        conditions.WORKERS_READY,
        "False",
        frozenset({Reason.SHARDS_DONE}),
        "Normal",
        "ShardsDone",
        "Aggregate",
        on_reason_change=True,
    ),
    EventRule(
        conditions.WEIGHTS_SERVED,
        "False",
        frozenset({Reason.WEIGHTS_LOADING}),
        "Normal",
        "WeightsChanged",
        "LoadWeights",
        on_reason_change=True,
    ),
    EventRule(conditions.WEIGHTS_SERVED, "True", None, "Normal", "WeightsServed", "ServeWeights"),
    EventRule(conditions.HELD_BACK, "True", None, "Normal", "HeldBack", "BeginGroups"),
    EventRule(conditions.STARVED, "True", None, "Normal", "TrainerStarved", "BeginGroups"),
    EventRule(conditions.SUCCESS_CRITERIA_MET, "False", PROBLEMS, "Warning", None, "Aggregate", on_reason_change=True),
    EventRule(conditions.SUCCESS_CRITERIA_MET, "True", None, "Normal", "TrajectoriesDone", "ReleaseGeneration"),
    EventRule(conditions.FAILURE_TARGET, "True", None, "Warning", None, "StopJob"),
    EventRule(conditions.COMPLETE, "True", None, "Normal", "Completed", "Complete"),
    EventRule(conditions.FAILED, "True", None, "Warning", "Failed", "Fail"),
)
"""All events, in the order in which those of one change are sent."""


def transitions(old_status: Mapping[str, Any] | None, new_status: Mapping[str, Any]) -> list[Event]:
    """Events of a change of status; empty if no condition changed its status or reason."""
    old = old_status or {}
    return [
        _event(rule, condition(new_status, rule.condition))
        for rule in RULES
        if _holds(rule, condition(new_status, rule.condition)) and _is_new(rule, old, new_status)
    ]


def _holds(rule: EventRule, found: Mapping[str, Any]) -> bool:
    matches = rule.reasons is None or found.get("reason") in rule.reasons
    return found.get("status") == rule.status and matches


def _is_new(rule: EventRule, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    before, after = condition(old, rule.condition), condition(new, rule.condition)
    if before.get("status") != after.get("status"):
        return True
    return rule.on_reason_change and before.get("reason") != after.get("reason")


def _event(rule: EventRule, found: Mapping[str, Any]) -> Event:
    note = str(found.get("message") or found.get("reason", ""))
    clipped = note if len(note) <= NOTE_CHARACTERS else f"{note[: NOTE_CHARACTERS - 1]}…"
    return Event(rule.type, rule.name or str(found.get("reason", "")), rule.action, clipped)
