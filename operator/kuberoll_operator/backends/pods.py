"""Diagnosis of pods, from what the scheduler, the kubelet and the programs report."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kuberoll_api import contract
from kuberoll_api.conditions import Reason
from kuberoll_operator import names
from kuberoll_operator.model import Object, condition, is_true
from kuberoll_operator.signs import NO_SIGNS, Signs
from kuberoll_operator.waiting import rules
from kuberoll_operator.waiting.causes import (
    Claim,
    claims_of,
    creation_cause,
    is_unscheduled,
    owner_cause,
    probe_that_failed,
    removal_cause,
    scheduling_cause,
    start_cause,
)
from kuberoll_operator.waiting.rules import Explanation, explain

MESSAGE_CHARACTERS: Final = 1000

# A container that was killed by a signal has 128 plus the signal's number as exit code.
_SIGNALS: Final = range(128 + 1, 128 + 65)

# Containers that load a model: an engine's, and the server of a service.
_SERVERS_OF_MODELS: Final = frozenset({names.GENERATION, names.SERVICE})

_IMAGE_REASONS: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_POD_REASONS: Final = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "PreCreateHookError",
        "PreStartHookError",
        "PostStartHookError",
    }
)
_MISSING_SECRET: Final = re.compile(r'^secret "([^"]+)" not found$')
_REDACTED: Final = "[redacted]"
_SECRETS: Final = re.compile(
    r"""
    (?<![A-Za-z0-9])(?:
        hf_[A-Za-z0-9]{6,}
      | sk-[A-Za-z0-9_-]{6,}
      | gh[pousr]_[A-Za-z0-9]{16,}
      | github_pat_[A-Za-z0-9_]{16,}
      | glpat-[A-Za-z0-9_-]{16,}
      | xox[a-z]-[A-Za-z0-9-]{8,}
      | A[KS]IA[0-9A-Z]{12,}
      | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?
    )
    | (?<=://)[^\s/@:]*:[^\s/@]+(?=@)
    """,
    re.VERBOSE,
)
_BEARER: Final = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_NAMED: Final = re.compile(
    r"""(?i)\b([\w-]*(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|signature)[\w-]*)(["']?\s*[=:]\s*["']?)"""
    r"""(?![\s"',;&\[])([^\s"',;&]{6,})"""
)


class PodProblem(NamedTuple):
    """Reason why a pod is not ready.

    Attributes:
        reason: One of `conditions.Reason`.
        message: Redacted, at most `MESSAGE_CHARACTERS`.
        repeats: True if the message only says that the kubelet backs off.
    """

    reason: str
    message: str
    repeats: bool = False


class ContainerExit(NamedTuple):
    """Exit of a container.

    Attributes:
        pod: Name of its pod.
        finished: Time, as the kubelet wrote it.
        message: Its termination message, not redacted.
        started: Time of its start, as the kubelet wrote it.
    """

    pod: str
    exit_code: int
    reason: str
    finished: str
    message: str
    started: str = ""


def redact(text: str, limit: int = MESSAGE_CHARACTERS) -> str:
    """A foreign text for use in a status: secrets are replaced, and it is cut to `limit` characters."""
    text = _SECRETS.sub(_REDACTED, text)
    text = _BEARER.sub(rf"\1 {_REDACTED}", text)
    text = _NAMED.sub(rf"\1\2{_REDACTED}", text)
    text = " ".join(text.split()) if "\n" not in text.strip() else text.strip()
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def component_of(pod: Mapping[str, Any]) -> str | None:
    """Component that a pod belongs to; None if it has no such label."""
    found = (pod.get("metadata", {}).get("labels") or {}).get(names.COMPONENT_LABEL)
    return None if found is None else str(found)


def pods_of(pods: Iterable[Object], component: str) -> list[Object]:
    """Pods of a component, sorted by name."""
    return sorted((pod for pod in pods if component_of(pod) == component), key=_name)


def shard_of(pod: Mapping[str, Any]) -> int | None:
    """Shard of a worker pod; None if it has no index."""
    metadata = pod.get("metadata", {})
    for kind in ("annotations", "labels"):
        text = (metadata.get(kind) or {}).get("batch.kubernetes.io/job-completion-index")
        if text is not None and str(text).isdecimal():
            return int(text)
    return None


def is_leader(pod: Mapping[str, Any]) -> bool:
    """True if a generation pod answers for its replica: it is the only one, or the leader of its group."""
    return str((pod.get("metadata", {}).get("labels") or {}).get(names.WORKER_INDEX_LABEL, "0")) == "0"


def any_active(pods: Iterable[Object]) -> bool:
    """True if a pod still holds its resources: it has neither succeeded nor failed."""
    return any(pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"} for pod in pods)


def last_exit(pod: Mapping[str, Any], container: str) -> ContainerExit | None:
    """Last exit of a pod's container; None if it has never exited."""
    for status in _statuses(pod):
        if status.get("name") != container:
            continue
        for state in (status.get("state"), status.get("lastState")):
            if found := (state or {}).get("terminated"):
                return ContainerExit(
                    pod=_name(pod),
                    exit_code=int(found.get("exitCode", 0)),
                    reason=str(found.get("reason", "")),
                    finished=str(found.get("finishedAt") or ""),
                    message=str(found.get("message") or ""),
                    started=str(found.get("startedAt") or ""),
                )
    return None


def is_disrupted(pod: Mapping[str, Any]) -> bool:
    """True if the cluster removed the pod: eviction, preemption, a lost node."""
    return is_true(pod.get("status") or {}, "DisruptionTarget")


def is_lost(pod: Mapping[str, Any]) -> bool:
    """True if nobody has heard of a pod's node for a while: Kubernetes has taken the pod's Ready from it.

    The kubelet, which alone reports containers, last said that all of them were ready.
    """
    status = pod.get("status") or {}
    ready, containers = condition(status, "Ready"), status.get("containerStatuses") or ()
    return (
        status.get("phase") == "Running"
        and ready.get("status") == "False"
        # The controller changes the status alone; a kubelet also gives a reason.
        and not ready.get("reason")
        and bool(containers)
        and all(container.get("ready") for container in containers)
    )


def is_running(pod: Mapping[str, Any]) -> bool:
    """True if a pod runs, as far as its node is heard of."""
    return (pod.get("status") or {}).get("phase") == "Running" and not is_lost(pod)


def holds_any(pods: Iterable[Object]) -> bool:
    """True if one of these pods holds resources that others could use.

    One that is being deleted and whose node does not answer does not: nobody says its end, and nothing else can run
    there before the node is back, which then ends it.
    """
    return any_active(pod for pod in pods if not (is_lost(pod) and pod["metadata"].get("deletionTimestamp")))


def describe_lost(pods: Iterable[Object]) -> str:
    """What is known of the lost ones among pods; empty if there are none."""
    lost = [pod for pod in pods if is_lost(pod)]
    if not lost:
        return ""
    first = min(lost, key=lambda pod: str(condition(pod["status"], "Ready").get("lastTransitionTime") or ""))
    node = (first.get("spec") or {}).get("nodeName") or "unknown"
    since = condition(first["status"], "Ready").get("lastTransitionTime") or "an unknown time"
    others = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    text = f"pod {_name(first)}{others} not heard of since {since}: its node {node} does not answer"
    if shard_of(first) is None or not first["metadata"].get("deletionTimestamp"):
        return text
    # Kubernetes makes no second pod of an index while it cannot know that the first one has ended.
    taint = f"kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    return (
        f"{text}; no other pod is made until the node is back, or has the taint of one that is shut down: {taint}; or "
        "let the operator end such pods: jobs.replaceLostWorkers of the chart"
    )


def diagnose(pods: Sequence[Object], container: str, signs: Signs = NO_SIGNS) -> PodProblem | None:
    """The problem that keeps pods from being ready: of the first pod that has one, most specific kinds first.

    Args:
        pods: Pods, sorted by name.
        container: Name of the container whose exit and message count.
        signs: What was read about pods that wait.
    """
    living = [pod for pod in pods if not pod.get("metadata", {}).get("deletionTimestamp")]
    for find in (_image_problem, _pod_problem, _crash):
        for pod in living:
            if (found := find(pod, container, signs)) is not None:
                return found
    return first_problem(find(pod, signs) for find in (_not_started, _unscheduled) for pod in living)


def missing_secrets(pods: Iterable[Object]) -> set[str]:
    """Names of Secrets that containers refer to and the kubelet does not find."""
    found = set()
    for pod in pods:
        for _, reason, message in _waiting(pod):
            if reason == "CreateContainerConfigError" and (match := _MISSING_SECRET.match(message.strip())):
                found.add(match[1])
    return found


def refusal(pods: Sequence[Object], container: str) -> str | None:
    """Message of a container that exited because it can never run; None if there is none."""
    for pod in pods:
        # Before an engine's container, the one that fetches its model.
        for name in (contract.MODEL_CACHE_CONTAINER, container):
            if (last := last_exit(pod, name)) is not None and last.exit_code == contract.EXIT_REFUSED:
                return redact(last.message) or f"pod {last.pod}: exit code {contract.EXIT_REFUSED}, without a message"
    return None


def pod_creation_problem(owner: Mapping[str, Any]) -> PodProblem | None:
    """Reason why a Deployment's controller cannot create pods, from the Deployment's conditions; None if it can."""
    failure = condition(owner.get("status") or {}, "ReplicaFailure")
    if failure.get("status") != "True":
        return None
    return _problem(creation_cause(str(failure.get("message", ""))))


def first_problem(problems: Iterable[PodProblem | None]) -> PodProblem | None:
    """The first problem, after which no other is looked at; what is only under way counts if there is none."""
    under_way = None
    for problem in problems:
        if problem is not None and problem.reason != Reason.STARTING:
            return problem
        under_way = under_way or problem
    return under_way


def owner_problem(signs: Signs, kind: str, name: str) -> PodProblem | None:
    """Reason why the controller of a Job, or of another kind without such a condition, cannot create pods."""
    found = owner_cause(signs.about(kind, name))
    return None if found is None else _problem(found)


def describe_removed(pods: Sequence[Object]) -> str:
    """Why the cluster removed a pod of a component, the latest that it removed; empty if another is in its place.

    Args:
        pods: Of the component, those that are gone, too.
    """
    removed = [(_removed_at(pod), pod, found) for pod in pods if (found := removal_cause(pod)) is not None]
    if not removed:
        return ""
    time, pod, found = max(removed, key=lambda item: (item[0], _name(item[1])))
    if any(_born(other) >= time and is_true(other.get("status") or {}, "Ready") for other in pods if other is not pod):
        return ""
    node = (pod.get("spec") or {}).get("nodeName")
    where = (f" from node {node}" if node else "") + (f" at {time}" if time else "")
    return f"pod {_name(pod)} was removed{where}: {found.message}"


def _born(pod: Object) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")


def _removed_at(pod: Object) -> str:
    return str(condition(pod.get("status") or {}, "DisruptionTarget").get("lastTransitionTime") or "")


def describe_exit(last: ContainerExit, probe: str = "") -> str:
    """Description of a container's exit: its own message if it left one, else the kernel's reason.

    Args:
        probe: That the kubelet ended it because of a probe, as `probe_that_failed` says; empty if it did not.
    """
    killed = last.exit_code in _SIGNALS
    words = redact(message_cause(last.message, killed=killed))
    if last.reason == "OOMKilled":
        return redact(f"out of memory (OOMKilled); raise the memory limit. {words}")
    if probe:
        return redact(f"{probe}; it was ended and said: {words}" if words else probe)
    if killed:
        text = f"killed by {_signal_name(last.exit_code - 128)} (exit code {last.exit_code})"
        return redact(f"{text}: {words}" if words else text)
    reason = f" ({last.reason})" if last.reason not in {"", "Error", "Completed"} else ""
    return words or f"exit code {last.exit_code}{reason}"


def parse_message(message: str) -> Mapping[str, Any] | None:
    """Fields of a termination message in this project's format, a JSON object; None if it is none."""
    try:
        found = json.loads(message)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def message_cause(message: str, *, killed: bool = False) -> str:
    """The cause in a termination message; empty if it names none.

    If the program could not write one, the message is the end of its log (FallbackToLogsOnError). Of a log only an
    error counts, or the last line if the program was not killed, which is usually an exception's.

    Args:
        killed: True if it was killed by a signal, so that its last output is not the cause.
    """
    if (fields := parse_message(message)) is not None and "level" not in fields:
        return str(fields.get("cause") or "")
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    records = [parse_message(line) if line.startswith("{") else None for line in lines]
    # The beginning of a log may be cut off.
    if not any(records) and not (lines and '"level": ' in lines[0]):
        return message
    errors = [item for item in records if item is not None and item.get("level") in {"error", "critical"}]
    if errors:
        return str(errors[-1].get("message", ""))
    plain = [line for line, item in zip(lines[1:], records[1:], strict=True) if item is None]
    return plain[-1] if plain and not killed else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _image_problem(pod: Object, container: str, signs: Signs) -> PodProblem | None:  # noqa: ARG001
    for name, reason, message in _waiting(pod):
        if reason in _IMAGE_REASONS:
            told = explain(rules.shorten(message or reason), rules.IMAGES, otherwise=Reason.IMAGE_PULL)
            text = redact(f"container {name}: {told.message}")
            return PodProblem(Reason.IMAGE_PULL, text, repeats=reason == "ImagePullBackOff")
    return None


def _pod_problem(pod: Object, container: str, signs: Signs) -> PodProblem | None:  # noqa: ARG001
    for name, reason, message in _waiting(pod):
        if reason in _POD_REASONS:
            told = explain(rules.shorten(message or reason), rules.CONTAINERS, otherwise=Reason.POD_CONFIG)
            return PodProblem(Reason.POD_CONFIG, redact(f"container {name}: {told.message}"))
    return None


def _crash(pod: Object, container: str, signs: Signs) -> PodProblem | None:
    for status in _statuses(pod):
        name = str(status.get("name", ""))
        last = last_exit({**pod, "status": {"containerStatuses": [status]}}, name)
        # A container that runs again after a crash is starting; the last exit is all that is known about it.
        if last is None or last.exit_code == 0 or status.get("ready"):
            continue
        waiting = (status.get("state") or {}).get("waiting") or {}
        # The count never decreases, so the reason of a container that keeps restarting does not flap.
        crashing = waiting.get("reason") == "CrashLoopBackOff" or int(status.get("restartCount", 0)) > 1
        probe = probe_that_failed(signs.about("Pod", _name(pod)), name, last.started)
        words = explain(rules.shorten(describe_exit(last, probe)), rules.EXITS, otherwise=Reason.CRASHING).message
        text = words if name == container else redact(f"container {name}: {words}")
        once = Reason.ENGINE_FAILED if container in _SERVERS_OF_MODELS else Reason.CONTAINER_FAILED
        return PodProblem(Reason.CRASHING if crashing else once, text)
    return None


def _unscheduled(pod: Object, signs: Signs) -> PodProblem | None:
    if not is_unscheduled(pod):
        return None
    known = [name for name in claims_of(pod) if name in signs.claims]
    claims = [Claim(name, signs.claims[name], signs.about("PersistentVolumeClaim", name)) for name in known]
    found = scheduling_cause(pod, claims, signs)
    return None if found is None else _problem(found)


def _not_started(pod: Object, signs: Signs) -> PodProblem | None:
    found = start_cause(pod, signs)
    return None if found is None else _problem(found._replace(message=f"pod {_name(pod)} waits: {found.message}"))


def _problem(found: Explanation) -> PodProblem:
    return PodProblem(found.reason, redact(found.message))


def _waiting(pod: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for status in _statuses(pod):
        waiting = (status.get("state") or {}).get("waiting")
        if waiting:
            yield str(status.get("name", "")), str(waiting.get("reason", "")), str(waiting.get("message", ""))


def _statuses(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _name(pod: Mapping[str, Any]) -> str:
    return str(pod.get("metadata", {}).get("name", ""))
