"""Pods that wait, and what the operator says of them: the cases of tests/operator/waiting, docs/reference/waiting.md.

A case is what a real control plane of Kubernetes 1.36.2, with real kubelets where those have a say, made of a Job named
`j-workers` or a Deployment named `j-generation`: the objects and the events about them, verbatim but for managed fields
and for kinds that the operator does not read. Where a driver or an autoscaler would have spoken that was not there, the
case names what was written `by_hand`.

    python -m tests.operator.waiting_cases --update    # writes docs/reference/waiting.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from kuberoll_api.conditions import Reason
from kuberoll_operator.backends.pods import (
    describe_lost,
    describe_removed,
    diagnose,
    first_problem,
    owner_problem,
    pod_creation_problem,
)
from kuberoll_operator.cache import trim
from kuberoll_operator.deadlines import parse_time
from kuberoll_operator.kube.resources import PODS
from kuberoll_operator.lost_pods import end_lost_pods
from kuberoll_operator.model import Object, Observed
from kuberoll_operator.signs import Signs, Subject, in_order, read_event
from kuberoll_operator.waiting.questions import questions

CASES = Path(__file__).parent / "waiting"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "waiting.md"
CONTAINERS = {"workers": "worker", "generation": "generation"}


class Told(NamedTuple):
    """What is said of a case: the reason and message of a condition, and what is said beside them."""

    reason: str
    message: str
    lost: str
    removed: str

    @property
    def words(self) -> str:
        """All words."""
        return "; ".join(filter(None, (self.message, self.lost, self.removed)))


def load(name: str) -> dict[str, Any]:
    """A case."""
    found: dict[str, Any] = json.loads((CASES / f"{name}.json").read_text())
    return found


def names() -> list[str]:
    """Names of all cases."""
    return sorted(path.stem for path in CASES.glob("*.json"))


def observe(case: Mapping[str, Any]) -> Observed:
    """A case as the operator's cache has it."""
    objects: Sequence[Object] = case["objects"]
    return Observed(
        children={(item["kind"], item["metadata"]["name"]): item for item in objects if item["kind"] in _OWNERS},
        pods=[trim(PODS, item) for item in objects if item["kind"] == "Pod"],
    )


def read(case: Mapping[str, Any], asked: Sequence[Subject], time: datetime) -> Signs:
    """What an API server answers to these questions."""
    events = {}
    for subject in asked:
        about = [item for item in case["events"] if _is_about(item["involvedObject"], subject)]
        events[subject.kind, subject.name] = [read_event(item) for item in about]
    claims = {item["metadata"]["name"]: item for item in case["objects"] if item["kind"] == "PersistentVolumeClaim"}
    names_asked = [subject.name for subject in asked if subject.kind == "PersistentVolumeClaim"]
    return Signs(events=events, claims={name: claims.get(name) for name in names_asked}, time=time)


def last_moment(case: Mapping[str, Any]) -> datetime:
    """When the last thing of a case happened."""
    seen = [event.seen for event in in_order(map(read_event, case["events"]))]
    seen += [str(item["metadata"].get("creationTimestamp") or "") for item in case["objects"]]
    return max(time for text in seen if (time := parse_time(text)) is not None)


def tell(case: Mapping[str, Any], seconds: float | None = None) -> Told:
    """What the operator says of a case, so many seconds after the last thing happened."""
    if seconds is None:
        seconds = LATE_SECONDS if case["cause"] in LATE else SECONDS
    now = last_moment(case) + timedelta(seconds=seconds)
    observed = _without_lost(observe(case), now)
    signs = read(case, [question.subject for question in questions(observed, now)], now)
    pods = sorted(observed.pods, key=lambda pod: str(pod["metadata"]["name"]))
    deployment = observed.get("Deployment", "j-generation")
    found = first_problem(
        (
            diagnose(pods, CONTAINERS[case["component"]], signs),
            None if deployment is None else pod_creation_problem(deployment),
            owner_problem(signs, "Job", "j-workers"),
        )
    )
    lost, removed = describe_lost(pods), describe_removed(pods)
    reason = found.reason if found else Reason.NODE_LOST if lost else Reason.POD_REMOVED if removed else Reason.STARTING
    return Told(reason, found.message if found else "", lost, removed)


def _without_lost(observed: Observed, now: datetime) -> Observed:
    """A case after what the operator itself does about pods on lost nodes."""
    ended = {patch.ref.name: patch.status for patch in end_lost_pods(observed.pods, now)}
    pods = [{**pod, "status": {**pod["status"], **ended.get(pod["metadata"]["name"], {})}} for pod in observed.pods]
    return replace(observed, pods=pods)


def _is_about(regarding: Mapping[str, Any], subject: Subject) -> bool:
    same = (regarding.get("kind"), regarding.get("name")) == (subject.kind, subject.name)
    return same and subject.uid in {"", regarding.get("uid")}


_OWNERS = {"Job", "Deployment"}

SECTIONS: dict[str, Sequence[str]] = {
    "No node takes the pod": (
        "insufficient-gpu", "insufficient-cpu", "insufficient-memory", "insufficient-ephemeral-storage",
        "extended-resource-unknown", "taint-untolerated", "nodes-not-ready", "node-selector", "cordoned",
        "too-many-pods", "pod-anti-affinity", "pod-affinity", "topology-spread", "host-port", "dra-unallocatable",
        "mixed", "preempting", "scheduling-gate", "no-nodes", "scheduler-missing",
    ),
    "Storage": (
        "multi-attach", "pvc-wait-for-consumer", "pvc-provisioning-failed", "pvc-access-mode", "pvc-class-missing",
        "pvc-no-default-class", "pvc-no-matching-volume", "pvc-access-mode-named-volume", "pvc-missing",
        "pvc-being-deleted", "pvc-lost", "pvc-storage-capacity", "volume-zone", "max-volumes", "rwop-in-use",
        "attach-failed", "csi-driver-missing", "nfs-mount",
    ),
    "Pods are refused": (
        "quota-gpu-job", "quota-must-specify-job", "limitrange-max-job", "pod-security-job",
        "service-account-missing-deployment", "priority-class-missing-job", "runtime-class-missing-job",
        "webhook-denied-job", "webhook-denied-by-webhook-job", "webhook-down-job", "dra-template-missing",
    ),
    "Images": (
        "image-unknown", "image-unauthorized", "image-not-found", "image-rate-limit", "image-name-invalid",
        "image-never-pull", "image-architecture",
    ),
    "The container does not start": (
        "secret-volume-missing", "secret-volume-key-missing", "configmap-volume-missing", "secret-env-missing",
        "secret-env-key-missing", "configmap-env-missing", "hostpath-type", "subpath-missing", "run-as-non-root",
        "command-not-found", "seccomp-profile-missing", "post-start-hook", "sandbox-network", "network-not-ready",
        "runtimeclass-handler", "user-namespace", "node-unreachable-before-start", "init-container-waiting",
        "startup-probe-failing", "crash-loop", "out-of-memory",
    ),
    "The cluster took the pod away": (
        "node-unreachable", "node-taint-eviction", "node-deleted", "evicted-by-api", "preempted", "out-of-cpu",
        "sysctl-forbidden",
    ),
}  # fmt: skip
"""Cases of docs/reference/waiting.md, by what holds a pod up."""


def page() -> str:
    """docs/reference/waiting.md."""
    lines = [_HEAD]
    for title, cases in SECTIONS.items():
        lines += [f"\n## {title}\n", "| reason | what the job says |", "|---|---|"]
        for name in cases:
            told = tell(load(name))
            text = told.words.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
            lines.append(f"| `{told.reason}` | {text} |")
    return "\n".join([*lines, _TAIL])


SECONDS = 6.0
LATE_SECONDS = 40.0
LATE = {"node-unreachable-before-start", "pvc-wait-for-consumer", "scheduler-missing"}
"""Causes that nobody tells of: that nothing happens for so long is the sign."""

_HEAD = """\
<!-- Written by `python -m tests.operator.waiting_cases --update`, from tests/operator/waiting. -->

# When a job waits

A job says for what it waits: the column `Reason` of `kubectl get rlj` has the reason of the condition that holds it up,
and `kubectl describe rlj JOB` the message, which has Kubernetes' own words, then what to do. `kuberoll top` has both
below its table, and the [dashboard](../how-to/monitoring.md#fleet) *Fleet* and the alert
[KuberollJobWaiting](alerts.md#kuberolljobwaiting) the reason. The operator reads the statuses of pods and of what makes
them, which it watches, and where those say nothing, the events about them and the PersistentVolumeClaims that they
mount: 10 seconds after a pod should have started, and then ever less often, every 25 seconds at most. What is over is
no longer told. Of a container that was killed they say whether a probe was the cause: `its liveness probe failed: …`,
in the kubelet's words.

The tables have what is said of real objects of Kubernetes 1.36: names, numbers and addresses are those of the cluster
where they were recorded. Most wait for somebody; `Starting` is under way. Reasons of a job's own doing are in
[reasons.md](reasons.md), queues' in [queues.md](../how-to/queues.md).
"""

_TAIL = """
## What is not told

- Kubernetes keeps events for an hour, and a cluster may keep them shorter. What only an event says, such as a failed
  mount, is repeated while it lasts.
- Without the rights to list events and to get PersistentVolumeClaims (`events`, `persistentvolumeclaims` in the
  operator's role) a job says only what statuses say; the operator's log says that it lacks them.
- A message has at most 1,000 characters, and of several pods of one kind it tells of the first that has a problem.
"""


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("usage: python -m tests.operator.waiting_cases --update")
    PAGE.write_text(page())
