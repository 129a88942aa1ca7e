"""The cause for which a pod, an owner of pods or a claim waits, from its status and the events about it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from kuberoll_api.conditions import Reason
from kuberoll_api.contract import MODEL_CACHE_CONTAINER
from kuberoll_operator.deadlines import parse_time
from kuberoll_operator.model import Object, condition, status_of
from kuberoll_operator.signs import ClusterEvent, Signs, in_order
from kuberoll_operator.waiting import rules
from kuberoll_operator.waiting.rules import Explanation, explain

_STORAGE_EVENTS: Final = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_HOOK_EVENTS: Final = frozenset({"FailedPostStartHook"})
_SANDBOX_EVENTS: Final = frozenset({"FailedCreatePodSandBox", "NetworkNotReady"})
# Of cluster-autoscaler and of Karpenter.
_OF_AUTOSCALERS: Final = frozenset({"NotTriggerScaleUp", "TriggeredScaleUp", "Nominated"})
# After these a pod's volumes and its network are there.
_PAST_VOLUMES: Final = frozenset({"Pulling", "Pulled", "Created", "Started"})
_BEFORE_START: Final = frozenset({"ContainerCreating", "PodInitializing"})

# What is said of a pod that is not in the way of it: what preemption would do, and that no device claims are idle.
_ASIDES: Final = re.compile(r"[\s.,]*(?:preemption: |no new claims to deallocate|still not schedulable).*$", re.DOTALL)
_REMEDIES: Final = 2

# What the kubelet says of probes: `Unhealthy`, and `Killing` when it ends a container for one.
_PROBE_WORDS: Final = re.compile(
    r"(?P<kind>Liveness|Startup) probe (?:failed|errored(?: and resulted in \w+ state)?): (?P<words>.*)"
)
_ENDED_FOR_PROBE: Final = re.compile(r"Container (?P<name>\S+) failed (?P<kind>liveness|startup) probe")
# The exit code of a program that a signal has ended is greater.
_SIGNALED: Final = 128

UNSEEN_SECONDS: Final = 30
"""Seconds in which a scheduler looks at a pod, and a node begins with it."""

PROVISIONING_SECONDS: Final = 90
"""Seconds that a volume may take to be made before that is called a problem."""


class Claim(NamedTuple):
    """A PersistentVolumeClaim that a pod names.

    Attributes:
        live: None if it does not exist.
    """

    name: str
    live: Object | None
    events: Sequence[ClusterEvent] = ()


def awaits_start(pod: Mapping[str, Any]) -> bool:
    """True if a pod has a node and none of its containers has been started: it may be waiting for volumes."""
    status = status_of(pod)
    if status.get("phase") != "Pending" or condition(status, "PodScheduled").get("status") != "True":
        return False
    return all(
        ((item.get("state") or {}).get("waiting") or {}).get("reason") in _BEFORE_START for item in _containers(status)
    )


def is_unscheduled(pod: Mapping[str, Any]) -> bool:
    """True if a pod has no node: the scheduler has found none, has not looked, or waits for volumes."""
    status = status_of(pod)
    scheduled = condition(status, "PodScheduled").get("status")
    if scheduled is not None:
        return bool(scheduled == "False")
    return status.get("phase") == "Pending" and not (pod.get("spec") or {}).get("nodeName")


def is_unready(pod: Mapping[str, Any]) -> bool:
    """True if all containers of a pod run, and its probes do not find it ready."""
    status = status_of(pod)
    if status.get("phase") != "Running" or condition(status, "Ready").get("status") != "False":
        return False
    return all((item.get("state") or {}).get("running") for item in status.get("containerStatuses") or ())


def was_ended(pod: Mapping[str, Any]) -> bool:
    """True if a container of a pod that lives was ended by a signal and is not ready since: perhaps for its probe."""
    for item in _containers(status_of(pod)):
        ends = ((item.get(state) or {}).get("terminated") or {} for state in ("state", "lastState"))
        if not item.get("ready") and any(
            end.get("exitCode", 0) > _SIGNALED and end.get("reason") != "OOMKilled" for end in ends
        ):
            return status_of(pod).get("phase") in {"Pending", "Running"}
    return False


def claims_of(pod: Mapping[str, Any]) -> list[str]:
    """Names of the claims that a pod mounts."""
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    found = [(volume.get("persistentVolumeClaim") or {}).get("claimName") for volume in volumes]
    # A generic ephemeral volume has a claim of its own.
    found += [f"{pod['metadata']['name']}-{volume['name']}" for volume in volumes if volume.get("ephemeral")]
    return sorted({name for name in found if name})


def scheduling_cause(pod: Mapping[str, Any], claims: Sequence[Claim], signs: Signs) -> Explanation | None:
    """Why a pod has no node; None if it may be about to have one.

    Its claims come first, since the scheduler only says that there is something with them.
    """
    scheduled = condition(status_of(pod), "PodScheduled")
    if not scheduled:
        return _unseen_cause(pod, claims, signs)
    text = _ASIDES.sub("", str(scheduled.get("message") or scheduled.get("reason") or ""))
    found = explain(text, rules.SCHEDULING, otherwise=Reason.UNSCHEDULABLE, remedies=_REMEDIES)
    if found.cause in _OF_CLAIMS and (of_claim := _first_claim_cause(claims, signs)) is not None:
        return of_claim
    since = parse_time(scheduled.get("lastTransitionTime"))
    age = 0.0 if since is None else (signs.time - since).total_seconds()
    # The scheduler tries again by itself; a volume may be on its way, also where claims cannot be read.
    if scheduled.get("reason") == "SchedulerError" or (found.cause == "claim-unbound" and age < PROVISIONING_SECONDS):
        return found._replace(reason=Reason.STARTING)
    node = status_of(pod).get("nominatedNodeName")
    if node:
        # The scheduler also names the node while volumes are made for it.
        words = f"node {node} is kept for it until pods of lower priority there have ended, or its volumes are made"
        return Explanation("preempting", Reason.UNSCHEDULABLE, f"{words}; {found.message}")
    if "Insufficient" in text and (asked := _requests(pod)):
        found = found._replace(message=f"{found.message} (it asks for {asked})")
    if said := autoscaler_words(signs.about("Pod", str(pod["metadata"].get("name")))):
        found = found._replace(message=f"{found.message}; {said}")
    return found


def _unseen_cause(pod: Mapping[str, Any], claims: Sequence[Claim], signs: Signs) -> Explanation | None:
    """Why the scheduler has said nothing about a pod."""
    metadata = pod["metadata"]
    for event in reversed(in_order(signs.about("Pod", str(metadata.get("name"))))):
        if event.reason == "FailedResourceClaimCreation":
            return explain(event.message, rules.CLAIMED_DEVICES, otherwise=Reason.POD_CONFIG)
    # With volumes that are made for the node it says nothing until they are there.
    if (of_claim := _first_claim_cause(claims, signs)) is not None:
        return of_claim
    since = parse_time(metadata.get("creationTimestamp"))
    if since is None or (signs.time - since).total_seconds() < UNSEEN_SECONDS:
        return None
    name = (pod.get("spec") or {}).get("schedulerName") or "default-scheduler"
    words = f"no scheduler has looked at it since {metadata['creationTimestamp']}; look whether {name} runs"
    return Explanation("scheduler-silent", Reason.UNSCHEDULABLE, f"pod {metadata.get('name')} waits: {words}")


def _first_claim_cause(claims: Iterable[Claim], signs: Signs) -> Explanation | None:
    return next((found for claim in claims if (found := claim_cause(claim, signs.time)) is not None), None)


def autoscaler_words(events: Iterable[ClusterEvent]) -> str:
    """What an autoscaler of nodes last said about a pod; empty if it said nothing."""
    said = [event for event in in_order(events) if event.reason in _OF_AUTOSCALERS]
    return f"the autoscaler of nodes: {said[-1].message}" if said else ""


def start_cause(pod: Mapping[str, Any], signs: Signs) -> Explanation | None:
    """Why a pod with a node does not start, from the events about it; None if they say nothing.

    What the newest says counts. An attachment or a mount that succeeded ends what failed before.
    """
    found: Explanation | None = None
    pulling: ClusterEvent | None = None
    events = in_order(signs.about("Pod", str(pod["metadata"].get("name"))))
    for event in events:
        if event.reason in _PAST_VOLUMES:
            found, pulling = None, event if event.reason == "Pulling" else None
        elif event.reason == "SuccessfulAttachVolume" and found is not None and found.cause in _OF_ATTACHMENT:
            found = None
        elif event.reason in _STORAGE_EVENTS:
            told = explain(event.message, rules.STORAGE, otherwise=Reason.VOLUME)
            found = found if found is not None and told.vague else told
        elif event.reason in _SANDBOX_EVENTS:
            found = explain(event.message, rules.SANDBOX, otherwise=Reason.POD_SANDBOX)
        elif event.reason in _HOOK_EVENTS:
            found = explain(event.message, rules.CONTAINERS, otherwise=Reason.POD_CONFIG)
    if found is not None:
        return found
    if pulling is not None and awaits_start(pod):
        return Explanation("pulling", Reason.STARTING, f"{_lower(pulling.message)} since {_in_seconds(pulling.seen)}")
    if is_unready(pod):
        return _probe_cause(events)
    if awaits_start(pod) and not status_of(pod).get("containerStatuses"):
        return _silent_node(pod, events, signs)
    return _preparation(pod)


def _probe_cause(events: Iterable[ClusterEvent]) -> Explanation | None:
    """What a probe last said about a pod that runs; None if it said nothing."""
    failed = [event for event in events if event.reason == "Unhealthy" and event.type == "Warning"]
    return Explanation("probe", Reason.STARTING, f"it runs and is not ready: {failed[-1].message}") if failed else None


def probe_that_failed(events: Iterable[ClusterEvent], container: str, started: str) -> str:
    """The probe for which the kubelet has ended a container that started at this time, in its words; empty: none.

    Args:
        events: Those about the pod.
    """
    since, told = parse_time(started), ""
    words: dict[str, str] = {}
    for event in in_order(events):
        if event.reason == "Unhealthy" and (match := _PROBE_WORDS.match(event.message)):
            words[match["kind"].lower()] = match["words"]
        elif event.reason == "Killing" and (match := _ENDED_FOR_PROBE.match(event.message)):
            seen = parse_time(event.seen)
            # An event has whole seconds, and may be of an earlier start.
            if match["name"] == container and (since is None or seen is None or seen >= since):
                told = match["kind"].lower()
    return f"its {told} probe failed: {words[told]}" if told in words else f"its {told} probe failed" if told else ""


def _preparation(pod: Mapping[str, Any]) -> Explanation | None:
    """That an init container is at work; None if none is."""
    for item in status_of(pod).get("initContainerStatuses") or ():
        running = (item.get("state") or {}).get("running")
        # A sidecar is ready while it runs.
        if running and not item.get("ready"):
            if item.get("name") == MODEL_CACHE_CONTAINER:
                return Explanation("fetching-model", Reason.STARTING, _fetching(pod, running.get("startedAt")))
            words = f"init container {item.get('name')} runs since {running.get('startedAt')}"
            return Explanation("init-container", Reason.STARTING, words)
    return None


def _fetching(pod: Mapping[str, Any], since: Any) -> str:
    node = (pod.get("spec") or {}).get("nodeName") or "unknown"
    log = f"`kubectl logs {pod['metadata'].get('name')} -c {MODEL_CACHE_CONTAINER}` says how much of it is there"
    return f"its model is fetched into the cache of node {node} since {since}; {log}"


def _silent_node(pod: Mapping[str, Any], events: Sequence[ClusterEvent], signs: Signs) -> Explanation | None:
    """That a node has not begun with a pod; None if it has, or still may."""
    told = condition(status_of(pod), "PodScheduled").get("lastTransitionTime")
    since = parse_time(told)
    if since is None or (signs.time - since).total_seconds() < UNSEEN_SECONDS:
        return None
    if any(event.reason not in {"Scheduled", "NodeNotReady"} for event in events):
        return None
    node = (pod.get("spec") or {}).get("nodeName") or "unknown"
    return Explanation("node-silent", Reason.NODE_LOST, f"its node {node} has not begun with it since {told}")


def creation_cause(message: str) -> Explanation:
    """Why the API server refuses pods, from the words of a controller that creates them."""
    found = explain(_without_name(message), rules.CREATION, otherwise=_refusal_of(message))
    return found._replace(message=f"pods cannot be created: {found.message}")


def owner_cause(events: Iterable[ClusterEvent]) -> Explanation | None:
    """Why an owner's pods are not there, from the events about it; None if they say nothing."""
    # KubeRay's reasons are FailedToCreateHeadPod and FailedToCreateWorkerPod.
    failed = [
        event
        for event in in_order(events)
        if event.type == "Warning" and event.reason.startswith(("FailedCreate", "FailedToCreate"))
    ]
    return creation_cause(failed[-1].message) if failed else None


def claim_cause(claim: Claim, now: datetime) -> Explanation | None:
    """Why a claim has no volume; None if it has one."""
    if claim.live is None:
        words = f"PersistentVolumeClaim {claim.name} does not exist; create it, or correct the name"
        return Explanation("claim-missing", Reason.VOLUME, words)
    phase, metadata = status_of(claim.live).get("phase"), claim.live["metadata"]
    if metadata.get("deletionTimestamp"):
        words = "is being deleted; it goes when no pod uses it any more; then create it again, or name another one"
        return Explanation("claim-deleted", Reason.VOLUME, f"PersistentVolumeClaim {claim.name} {words}")
    if phase == "Lost":
        words = "has lost its volume; what was stored there is gone with it, unless its storage was retained"
        return Explanation("claim-lost", Reason.VOLUME, f"PersistentVolumeClaim {claim.name} {words}")
    if phase == "Bound":
        return None
    warnings = [event for event in in_order(claim.events) if event.type == "Warning"]
    # The controller says FailedBinding as a Normal event.
    warnings = warnings or [event for event in in_order(claim.events) if event.reason == "FailedBinding"]
    if warnings:
        found = explain(warnings[-1].message, rules.CLAIMS, otherwise=Reason.VOLUME)
        return found._replace(message=f"PersistentVolumeClaim {claim.name}: {found.message}")
    name = (claim.live.get("spec") or {}).get("storageClassName")
    made = f"PersistentVolumeClaim {claim.name}: a volume of class {name or '(none)'} is awaited"
    since = parse_time(metadata.get("creationTimestamp"))
    if since is None or (now - since).total_seconds() < PROVISIONING_SECONDS:
        return Explanation("provisioning", Reason.STARTING, made)
    return Explanation(
        "provisioner-silent",
        Reason.VOLUME,
        f"{made} since {metadata['creationTimestamp']}; look whether the provisioner of the class runs",
    )


def removal_cause(pod: Mapping[str, Any]) -> Explanation | None:
    """Why the cluster has removed a pod, or is removing it; None if it has not."""
    status = status_of(pod)
    disrupted = condition(status, "DisruptionTarget")
    if disrupted.get("status") == "True":
        text = f"{disrupted.get('reason', '')}: {disrupted.get('message') or ''}"
    elif status.get("phase") == "Failed" and status.get("reason"):
        text = f"{status['reason']}: {status.get('message') or ''}"
    else:
        return None
    # A kubelet's own eviction says in the status what it lacked.
    if status.get("message") and disrupted.get("reason") == "TerminationByKubelet":
        text = f"{status.get('reason') or ''}: {status['message']}"
    return explain(" ".join(text.split()), rules.REMOVAL, otherwise=Reason.POD_REMOVED)


_OF_CLAIMS: Final = frozenset({"claim-missing", "claim-deleted", "claim-lost", "claim-unbound", "claim-binding"})
_OF_ATTACHMENT: Final = frozenset({"multi-attach", "attach"})


def _refusal_of(message: str) -> str:
    return Reason.FORBIDDEN if "forbidden" in message else Reason.INVALID_TEMPLATE


def _without_name(message: str) -> str:
    """A refusal without the name of the pod, which differs each time."""
    text = re.sub(r"^Error creating: ", "", message)
    return re.sub(r'^pods "[^"]+" is forbidden: ', "", text)


def _requests(pod: Mapping[str, Any]) -> str:
    """What a pod asks for, as `cpu 4, nvidia.com/gpu 8`; empty if that is unknown."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    asked = [((item.get("resources") or {}).get("requests") or {}).items() for item in containers]
    return ", ".join(f"{name} {amount}" for items in asked for name, amount in sorted(items))


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _in_seconds(time: str) -> str:
    return f"{time.partition('.')[0].removesuffix('Z')}Z"
