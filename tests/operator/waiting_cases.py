"""Pods that wait, and what the operator says of them: the cases of tests/operator/waiting, docs/reference/waiting*.md.

A case is what a real control plane of Kubernetes 1.36.2, with real kubelets where those have a say, made of a Job named
`j-workers` or a Deployment named `j-generation`: the objects and the events about them, verbatim but for managed fields
and for kinds that the operator does not read. Where a driver or an autoscaler would have spoken that was not there, the
case names what was written `by_hand`.

    python -m tests.operator.waiting_cases --update    # writes docs/reference/waiting*.md
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
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
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

PAGES: dict[str, dict[str, Sequence[str]]] = {
    "waiting.md": {
        "No node takes the pod": (
            "insufficient-gpu", "insufficient-cpu", "insufficient-memory", "taint-untolerated", "node-selector",
            "cordoned", "too-many-pods", "pod-anti-affinity", "topology-spread", "host-port", "dra-unallocatable",
            "preempting", "scheduling-gate", "no-nodes", "scheduler-missing",
        ),
        "Pods are refused": (
            "quota-gpu-job", "quota-must-specify-job", "limitrange-max-job", "pod-security-job",
            "service-account-missing-deployment", "webhook-denied-job", "webhook-denied-by-webhook-job",
            "webhook-down-job", "dra-template-missing",
        ),
        "The cluster took the pod away": (
            "node-unreachable", "node-deleted", "evicted-by-api", "preempted", "out-of-cpu", "sysctl-forbidden",
        ),
    },
    "waiting-storage.md": {
        "Claims": (
            "pvc-wait-for-consumer", "pvc-provisioning-failed", "pvc-access-mode", "pvc-class-missing",
            "pvc-no-default-class", "pvc-no-matching-volume", "pvc-access-mode-named-volume", "pvc-missing",
            "pvc-being-deleted", "pvc-lost",
        ),
        "Volumes": (
            "multi-attach", "pvc-storage-capacity", "volume-zone", "max-volumes", "rwop-in-use", "attach-failed",
            "csi-driver-missing", "nfs-mount",
        ),
    },
    "waiting-containers.md": {
        "Images": (
            "image-unknown", "image-unauthorized", "image-not-found", "image-rate-limit", "image-name-invalid",
            "image-never-pull", "image-architecture",
        ),
        "The container does not start": (
            "secret-volume-missing", "secret-volume-key-missing", "secret-env-missing", "secret-env-key-missing",
            "hostpath-type", "subpath-missing", "run-as-non-root", "command-not-found", "seccomp-profile-missing",
            "post-start-hook", "sandbox-network", "network-not-ready", "runtimeclass-handler", "user-namespace",
            "node-unreachable-before-start", "init-container-waiting", "startup-probe-failing", "crash-loop",
            "out-of-memory",
        ),
    },
}  # fmt: skip
"""Cases of each page of docs/reference, by what holds a pod up."""


def page(name: str) -> str:
    """Text of a page of `PAGES`."""
    lines = [_NOTE, _HEADS[name].rstrip()]
    for title, cases in PAGES[name].items():
        lines += [f"\n## {title}\n", "| reason | message |", "|---|---|"]
        for case in cases:
            told = tell(load(case))
            text = told.words.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
            lines.append(f"| `{told.reason}` | {text} |")
    return "\n".join([*lines, _TAILS.get(name, "")])


SECONDS = 6.0
LATE_SECONDS = 40.0
LATE = {"node-unreachable-before-start", "pvc-wait-for-consumer", "scheduler-missing"}
"""Causes that nobody tells of: that nothing happens for so long is the sign."""

_NOTE = "<!-- Written by `python -m tests.operator.waiting_cases --update`, from tests/operator/waiting. -->\n"

_HEADS = {
    "waiting.md": """\
# When a job waits

`kubectl get rlj` shows the reason why a job waits, `kubectl describe rlj JOB` the message: Kubernetes' own words, then
what to do. `kuberoll top` shows both; the [dashboard](../how-to/monitoring.md#fleet) *Fleet* and the alert
[KuberollJobWaiting](alerts.md#kuberolljobwaiting) show the reason. A cause appears within about 30 seconds and
disappears once it is over.

The tables have messages that Kubernetes 1.36 caused, with names, numbers and addresses of the test cluster. Two pages
have the rest: [storage](waiting-storage.md), [images and containers](waiting-containers.md). [Reasons](reasons.md)
lists every reason, [queues](../how-to/queues.md) explains waiting for quota.
""",
    "waiting-storage.md": """\
# When a pod waits for storage

Messages of jobs whose pods wait for a PersistentVolumeClaim or a volume. [When a job waits](waiting.md) says where to
find them.
""",
    "waiting-containers.md": """\
# When a pod's containers do not start

Messages of jobs whose pods have a node and are not ready. [When a job waits](waiting.md) says where to find them.
`Starting` needs no action. If a probe killed a container, the message quotes the kubelet:
`its liveness probe failed: …`.
""",
}

_TAILS = {
    "waiting.md": """
## What is not shown

- Kubernetes keeps events for an hour, some clusters for less. Events of a lasting problem, such as a failed mount, are
  repeated.
- Without the rights to list events and to get PersistentVolumeClaims (`events`, `persistentvolumeclaims` in the
  operator's role), a message has only what statuses say. The operator's log says that it lacks them.
- A message has at most 1,000 characters. Of several pods of one kind it names the first that has a problem.
""",
}


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("usage: python -m tests.operator.waiting_cases --update")
    for name in PAGES:
        (REFERENCE / name).write_text(page(name))
