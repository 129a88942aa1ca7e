"""Quota of a job in a queue of Kueue: whether its pods may run, and the next status of its Workload. Pure.

A job with the label of a queue requests its whole quota, for engines and workers, by one Workload, and runs while that
is admitted. An evicted job stops like a suspended one, and releases its quota when its last pod has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.backends.pods import redact
from kuberoll_operator.deadlines import format_time
from kuberoll_operator.model import ClusterQuota, Object, condition, is_true
from kuberoll_operator.render.context import Assignment
from kuberoll_operator.settings import Settings

ADMITTED: Final = "Admitted"
EVICTED: Final = "Evicted"
FINISHED: Final = "Finished"
PODS_READY: Final = "PodsReady"
QUOTA_RESERVED: Final = "QuotaReserved"
REQUEUED: Final = "Requeued"

# Reasons of Evicted after which a Workload is requeued at once; after others, Kueue or a person decides.
_QUEUED_AGAIN: Final = frozenset({"Preempted", "NodeFailures"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A job's share of a queue's quota.

    Attributes:
        queue: Name of its LocalQueue; None if it needs no quota.
        granted: True if its pods may run.
        reserved: True if its Workload holds quota, which it does until the quota is released.
        outdated: True if its Workload must be replaced by a new one once its pods have ended.
        writable: True if its Workload can be written.
        message: Why it may run or not, in Kueue's own words if it has any.
        assignments: Node selectors, tolerations and metadata that the admission gives to the pods of each pod set.
    """

    queue: str | None = None
    granted: bool = True
    reserved: bool = False
    outdated: bool = False
    writable: bool = False
    message: str = ""
    assignments: Mapping[str, Assignment] = field(default_factory=dict)


def queue_of(job: RolloutJob, settings: Settings) -> str | None:
    """Name of the LocalQueue that a job waits in; None if it uses none."""
    return (job.metadata.labels.get(names.QUEUE_LABEL) or None) if settings.queues else None


def priority_class_of(job: RolloutJob) -> str | None:
    """Name of the WorkloadPriorityClass that a job is labelled with; None if there is none."""
    return job.metadata.labels.get(names.PRIORITY_LABEL) or None


def flavors_of(workload: Object | None) -> set[str]:
    """Names of the ResourceFlavors that are assigned to a Workload."""
    return {name for item in _pod_set_assignments(workload) for name in (item.get("flavors") or {}).values()}


def quota_of(job: RolloutJob, workload: Object | None, found: ClusterQuota, settings: Settings) -> Quota:
    """Compute a job's share of the quota from its Workload.

    Args:
        workload: The job's own live Workload; None if there is none.
        found: Cluster-wide objects that it refers to.
    """
    queue = queue_of(job, settings)
    if queue is None:
        return Quota(reserved=_has_reservation(workload))
    if settings.kueue is False:
        return _waiting(
            queue,
            "the cluster does not serve kueue.x-k8s.io/v1beta2 workloads; install Kueue, or remove the label "
            f"{names.QUEUE_LABEL}",
        )
    if workload is None:
        name = priority_class_of(job)
        if name is not None and found.priority is None:
            return _waiting(queue, f"WorkloadPriorityClass {name} does not exist")
        return _waiting(queue, "not requested yet", writable=True)
    if workload["metadata"].get("deletionTimestamp"):
        return _waiting(queue, "its Workload is being deleted")
    status = workload.get("status") or {}
    reserved = _has_reservation(workload)
    current_queue = (workload.get("spec") or {}).get("queueName")
    if is_true(status, FINISHED):
        words = condition(status, FINISHED).get("message", "")
        return _waiting(
            queue, f"its Workload is finished ({words}) and is being created again", reserved=reserved, outdated=True
        )
    if reserved and current_queue != queue:
        return _waiting(queue, f"moving from queue {current_queue}", reserved=True, outdated=True)
    if is_true(status, EVICTED):
        return _evicted(job, queue, workload, found, reserved=reserved)
    if is_true(status, ADMITTED):
        by = (status.get("admission") or {}).get("clusterQueue", "")
        return Quota(
            queue=queue,
            reserved=reserved,
            message=f"admitted by ClusterQueue {by}",
            assignments=_assignments(workload, found),
        )
    return _waiting(
        queue, _pending_reason(workload), reserved=reserved, writable=_is_writable(job, found, reserved=reserved)
    )


def finished_patch(workload: Object, *, succeeded: bool, message: str, now: datetime) -> Mapping[str, Any] | None:
    """Status patch for the Workload of a finished job, which frees its quota; None if it is applied already."""
    if is_true(workload.get("status") or {}, FINISHED):
        return None
    return {"conditions": _with(workload, now, (FINISHED, True, "Succeeded" if succeeded else "Failed", message))}


def release_patch(workload: Object, now: datetime) -> Mapping[str, Any] | None:
    """Status patch for an evicted Workload whose last pod has ended; None if it holds no quota.

    Kueue leaves this to the controller that runs the pods, and admits no other workload in their place until then.
    """
    status = workload.get("status") or {}
    if not is_true(status, EVICTED) or not _has_reservation(workload):
        return None
    evicted = condition(status, EVICTED)
    reason, message = str(evicted.get("reason", "")), str(evicted.get("message", ""))
    conditions = _with(
        workload,
        now,
        (QUOTA_RESERVED, False, "Pending", message),
        (ADMITTED, False, "NoReservation", "The workload has no reservation"),
        (PODS_READY, False, "WaitForStart", "Not all pods are ready"),
        (REQUEUED, reason in _QUEUED_AGAIN, reason, message),
    )
    return {"admission": None, "conditions": conditions}


def progress_patch(
    workload: Object, *, ready: bool, unneeded: Mapping[str, int], now: datetime
) -> Mapping[str, Any] | None:
    """Status patch for an admitted Workload; None if nothing changes.

    Args:
        ready: True if all pods of the job have been running at some time since its admission.
        unneeded: Pods of each pod set whose quota can be released early. A release is never taken back.
    """
    status = workload.get("status") or {}
    patch: dict[str, Any] = {}
    pods_ready = condition(status, PODS_READY).get("status")
    if ready and pods_ready != "True":
        patch["conditions"] = _with(workload, now, (PODS_READY, True, "Started", "All pods are ready"))
    elif pods_ready is None:
        patch["conditions"] = _with(workload, now, (PODS_READY, False, "WaitForStart", "Not all pods are ready"))
    before = {item["name"]: int(item["count"]) for item in status.get("reclaimablePods") or ()}
    counts = {item["name"]: int(item.get("count", 1)) for item in (workload.get("spec") or {}).get("podSets") or ()}
    after = {
        name: min(counts[name], max(before.get(name, 0), unneeded.get(name, 0)))
        for name in counts
        if before.get(name) or unneeded.get(name)
    }
    if after != before:
        patch["reclaimablePods"] = [{"name": name, "count": count} for name, count in sorted(after.items())]
    return patch or None


def _waiting(
    queue: str, words: str, *, reserved: bool = False, outdated: bool = False, writable: bool = False
) -> Quota:
    return Quota(
        queue=queue,
        granted=False,
        reserved=reserved,
        outdated=outdated,
        writable=writable,
        message=redact(f"waiting for quota in queue {queue}: {words}"),
    )


def _evicted(job: RolloutJob, queue: str, workload: Object, found: ClusterQuota, *, reserved: bool) -> Quota:
    evicted = condition(workload["status"], EVICTED)
    why = f"{evicted.get('reason', '')}: {evicted.get('message', '')}".rstrip(": ")
    if reserved:
        message = redact(f"evicted ({why}); its quota is released when its last pod has ended")
        return Quota(queue=queue, granted=False, reserved=True, message=message)
    writable = _is_writable(job, found, reserved=False)
    return _waiting(queue, f"{_pending_reason(workload)}; it was evicted ({why})", writable=writable)


def _is_writable(job: RolloutJob, found: ClusterQuota, *, reserved: bool) -> bool:
    """True if the Workload may be written; nothing in it may change while it holds quota."""
    return not reserved and (priority_class_of(job) is None or found.priority is not None)


def _pending_reason(workload: Object) -> str:
    """Reason why a Workload is not admitted, in Kueue's words."""
    status = workload.get("status") or {}
    if (workload.get("spec") or {}).get("active") is False:
        return "its Workload is deactivated (spec.active)"
    reserved = condition(status, QUOTA_RESERVED)
    if reserved.get("status") == "True":
        checks = [
            f"{item.get('name')} is {item.get('state')}: {item.get('message', '')}".rstrip(": ")
            for item in status.get("admissionChecks") or ()
            if item.get("state") != "Ready"
        ]
        return f"waiting for admission checks: {'; '.join(checks)}".rstrip(": ")
    return str(reserved.get("message") or "Kueue has not processed it yet")


def _has_reservation(workload: Object | None) -> bool:
    return bool(((workload or {}).get("status") or {}).get("admission"))


def _pod_set_assignments(workload: Object | None) -> Iterable[Mapping[str, Any]]:
    admission = ((workload or {}).get("status") or {}).get("admission") or {}
    return admission.get("podSetAssignments") or ()


def _assignments(workload: Object, found: ClusterQuota) -> dict[str, Assignment]:
    """Scheduling of the pods of each pod set, from its flavors and from admission checks."""
    updates = [
        update
        for check in (workload.get("status") or {}).get("admissionChecks") or ()
        for update in check.get("podSetUpdates") or ()
    ]
    assignments = {}
    for item in _pod_set_assignments(workload):
        name = str(item.get("name"))
        flavors = [found.flavors.get(flavor, {}) for flavor in sorted(set((item.get("flavors") or {}).values()))]
        own = [update for update in updates if update.get("name") == name]
        assignments[name] = Assignment(
            count=item.get("count"),
            node_selector=_merged([*(flavor.get("nodeLabels") for flavor in flavors)], own, "nodeSelector"),
            tolerations=[toleration for source in (*flavors, *own) for toleration in source.get("tolerations") or ()],
            labels=_merged([], own, "labels"),
            annotations=_merged([], own, "annotations"),
        )
    return assignments


def _merged(first: Iterable[Any], updates: Iterable[Mapping[str, Any]], key: str) -> dict[str, str]:
    return {
        name: value
        for part in (*first, *(update.get(key) for update in updates))
        for name, value in (part or {}).items()
    }


def _with(workload: Object, now: datetime, *changes: tuple[str, bool, str, str]) -> list[dict[str, Any]]:
    """All conditions of a Workload after these changes."""
    time = format_time(now)
    known = {item["type"]: dict(item) for item in (workload.get("status") or {}).get("conditions") or ()}
    for kind, true, reason, message in changes:
        status = "True" if true else "False"
        before = known.get(kind, {})
        known[kind] = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == status else time,
            "observedGeneration": workload["metadata"].get("generation", 0),
        }
    return list(known.values())
