"""Why pods wait, from what real clusters said of them, and what the operator reads to learn it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.conditions import Reason
from kuberoll_operator.backends.pods import describe_removed, diagnose
from kuberoll_operator.cache import Cache
from kuberoll_operator.kube.errors import Forbidden, Unavailable
from kuberoll_operator.kube.resources import PODS, Resource
from kuberoll_operator.kube.sign_reader import LAST_SECONDS, PATIENT_LAST_SECONDS, SignReader
from kuberoll_operator.main_condition import PROBLEMS
from kuberoll_operator.model import Key, Object, Observed
from kuberoll_operator.signs import ClusterEvent, Signs, Subject, in_order, read_event
from kuberoll_operator.waiting import rules
from kuberoll_operator.waiting.causes import Claim, claim_cause, start_cause
from kuberoll_operator.waiting.questions import Question, questions
from tests.operator import waiting_cases
from tests.operator.support import pod, waiting
from tests.operator.waiting_cases import load, observe, tell

NOW = datetime(2026, 11, 27, 12, 0, 0, tzinfo=UTC)

# What a person reads: the reason, and words of the message that say what is wrong and what to do.
WORDS = {
    "attach-failed": ("VolumeNotReady", "api error VolumeInUse", "the log of the storage driver's controller"),
    "command-not-found": ("PodConfigError", '"kuberoll-nowhere": executable file not found', "has no such program"),
    "configmap-env-missing": ("PodConfigError", "ConfigMap settings does not exist", "`envFrom`"),
    "configmap-volume-key-missing": ("PodConfigError", "volume v: what it mounts has no key b", "add it"),
    "configmap-volume-missing": ("PodConfigError", "volume v: ConfigMap settings does not exist", "create it"),
    "cordoned": ("Unschedulable", "3 node(s) were unschedulable", "`kubectl uncordon`"),
    "crash-loop": ("Crashing", "model /models/m has no config.json", ""),
    "csi-driver-missing": ("VolumeNotReady", "the node has no plugin of efs.csi.aws.com", "install it there"),
    "dra-template-missing": ("PodConfigError", 'resource claim template "gpu"', "create it"),
    "dra-unallocatable": ("Unschedulable", "cannot allocate all claims", "no node has the devices"),
    "extended-resource-unknown": ("Unschedulable", "3 Insufficient example.com/tpu", "example.com/tpu 1, memory 1Gi"),
    "host-port": ("Unschedulable", "didn't have free ports", "a hostPort in `podTemplate`"),
    "hostpath-type": ("PodConfigError", "/data/models is not a directory", "choose nodes that have it"),
    "image-architecture": ("Crashing", "exec format error", "kubernetes.io/arch"),
    "image-forbidden": ("ImagePullError", "403 Forbidden", "imagePullSecrets"),
    "image-name-invalid": ("ImagePullError", "repository name (Team/Worker) must be lowercase", "correct it"),
    "image-never-pull": ("ImagePullError", "is not present with pull policy of Never", "imagePullPolicy: IfNotPresent"),
    "image-not-found": ("ImagePullError", "image registry.example.com/team/worker:9: failed", "does not reach"),
    "image-rate-limit": ("ImagePullError", "429 Too Many Requests", "the registry limits pulls"),
    "image-unauthorized": ("ImagePullError", "401 Unauthorized", "imagePullSecrets"),
    "image-unknown": ("ImagePullError", "localhost:5000/team/worker:9: not found", "correct its name or tag"),
    "init-container-waiting": ("Starting", "init container setup runs since", ""),
    "insufficient-cpu": ("Unschedulable", "3 Insufficient cpu", "it asks for cpu 64"),
    "insufficient-ephemeral-storage": ("Unschedulable", "Insufficient ephemeral-storage", "lower resources.requests"),
    "insufficient-gpu": ("Unschedulable", "3 Insufficient nvidia.com/gpu", "wait until nvidia.com/gpu is free"),
    "insufficient-memory": ("Unschedulable", "3 Insufficient memory", "lower resources.requests.memory"),
    "limitrange-max-job": ("Forbidden", "maximum cpu usage per Container is 2", "a LimitRange of the namespace"),
    "max-volumes": ("Unschedulable", "exceed max volume count", "as many volumes attached as they can"),
    "mixed": ("Unschedulable", "2 Insufficient nvidia.com/gpu", "wait until nvidia.com/gpu is free"),
    "multi-attach": ("VolumeNotReady", "Multi-Attach error", "ReadWriteMany claim or an object store"),
    "multi-attach-exclusive": ("VolumeNotReady", "already exclusively attached", "its pod on the other node has ended"),
    "network-not-ready": ("PodSandboxError", "network is not ready", "network plugin"),
    "nfs-mount": ("VolumeNotReady", "unknown filesystem type", ""),
    "no-nodes": ("Unschedulable", "no nodes available", "no node that is ready"),
    "node-affinity": ("PodRemoved", "NodeAffinity", "nodeName was set"),
    "node-deleted": ("Unschedulable", "was removed from node node-removed-1", "does not exist any more"),
    "node-selector": ("Unschedulable", "didn't match Pod's node affinity/selector", "correct `nodeSelector`"),
    "node-taint-eviction": ("Unschedulable", "deleting due to NoExecute taint", "taken for lost"),
    "node-unreachable": ("NodeLost", "and 1 more not heard of since", "its node node-unreachable-1 does not answer"),
    "node-unreachable-before-start": ("NodeLost", "its node node-unreachable-1 has not begun with it since", ""),
    "nodes-not-ready": ("Unschedulable", "had untolerated taint", "a node that is not ready has one"),
    "evicted-by-api": ("PodRemoved", "Eviction API: evicting", "its node is being drained"),
    "ordinary-provisioning": ("Starting", "a volume of class gp3 is awaited", ""),
    "ordinary-provisioning-single": ("Starting", "a volume of class gp3 is awaited", ""),
    "out-of-cpu": ("PodRemoved", "Node didn't have enough resource: cpu", "another one is made"),
    "out-of-memory": ("EngineFailed", "out of memory (OOMKilled)", "raise the memory limit"),
    "pod-affinity": ("Unschedulable", "didn't match pod affinity rules", "leaves it no node"),
    "pod-anti-affinity": ("Unschedulable", "didn't match pod anti-affinity rules", "leaves it no node"),
    "pod-security-job": ("Forbidden", 'violates PodSecurity "restricted:latest"', "remove what it names"),
    "post-start-hook": ("PodConfigError", "exited with 4", "correct the hook"),
    "preempted": ("PodRemoved", "preempting to accommodate a higher priority pod", "a priorityClassName"),
    "preempting": ("Unschedulable", "is kept for it until pods of lower priority there have ended", "or its volumes"),
    "priority-class-missing-job": ("Forbidden", "PriorityClass training-high does not exist", "create it"),
    "projected-secret-missing": ("PodConfigError", "volume v: Secret creds does not exist", "create it"),
    "pvc-access-mode": ("VolumeNotReady", "PersistentVolumeClaim data: no volume plugin", "create a PersistentVolume"),
    "pvc-access-mode-named-volume": ("VolumeNotReady", "incompatible accessMode", "correct one of them"),
    "pvc-being-deleted": ("VolumeNotReady", "PersistentVolumeClaim data is being deleted", "no pod uses it any more"),
    "pvc-class-missing": ("VolumeNotReady", "StorageClass fast does not exist", "correct storageClassName"),
    "pvc-lost": ("VolumeNotReady", "PersistentVolumeClaim data has lost its volume", "unless its storage was retained"),
    "pvc-missing": ("VolumeNotReady", "PersistentVolumeClaim data does not exist", "create it"),
    "pvc-no-default-class": ("VolumeNotReady", "no storage class is set", "no default class"),
    "pvc-no-matching-volume": ("VolumeNotReady", "didn't find available persistent volumes", "a class that provisions"),
    "pvc-provisioning-failed": ("VolumeNotReady", "failed to provision volume", "VolumeLimitExceeded"),
    "pvc-storage-capacity": ("VolumeNotReady", "did not have enough free storage", "use another class"),
    "pvc-unbound-immediate": ("Starting", "PersistentVolumeClaim data: a volume of class gp3 is awaited", ""),
    "pvc-wait-for-consumer": ("VolumeNotReady", "is awaited since", "look whether the provisioner of the class runs"),
    "quota-deployment": ("QuotaExceeded", "exceeded quota: team-quota", "raise the quota"),
    "quota-gpu-job": ("QuotaExceeded", "requested: requests.nvidia.com/gpu=8", "raise the quota"),
    "quota-must-specify-job": ("QuotaExceeded", "must specify limits.cpu", "set `resources`"),
    "run-as-non-root": ("PodConfigError", "image will run as root", "set runAsUser"),
    "runtime-class-missing-job": ("Forbidden", "RuntimeClass nvidia does not exist", "correct runtimeClassName"),
    "runtimeclass-handler": ("PodSandboxError", 'no runtime for "kata" is configured', "choose nodes that have it"),
    "rwop-in-use": ("VolumeNotReady", "ReadWriteOncePod access mode already in-use", "one pod at a time"),
    "sandbox-network": ("PodSandboxError", "network", "the node's network plugin does not work"),
    "scheduler-missing": ("Unschedulable", "no scheduler has looked at it since", "look whether volcano runs"),
    "scheduling-gate": ("Unschedulable", "non-empty scheduling gates", "take them back"),
    "seccomp-profile-missing": ("PodConfigError", "cannot load seccomp profile", "install it there"),
    "secret-env-key-missing": ("PodConfigError", "Secret creds has no key token", "add it"),
    "secret-env-missing": ("PodConfigError", "Secret creds does not exist", "create it"),
    "secret-volume-key-missing": ("PodConfigError", "volume v: what it mounts has no key token", "add it"),
    "secret-volume-missing": ("PodConfigError", "volume v: Secret creds does not exist", "create it"),
    "service-account-missing-deployment": ("Forbidden", "ServiceAccount trainer does not exist", "create it"),
    "startup-probe-failing": ("Starting", "it runs and is not ready: Startup probe failed", "connection refused"),
    "subpath-missing": ("PodConfigError", "failed to create subPath directory", "correct it"),
    "sysctl-forbidden": ("PodRemoved", 'forbidden sysctl: "net.core.somaxconn"', "--allowed-unsafe-sysctls"),
    "taint-untolerated": ("Unschedulable", "had untolerated taint", "belong into `tolerations`"),
    "too-many-pods": ("Unschedulable", "Too many pods", "add nodes"),
    "topology-spread": ("Unschedulable", "didn't match pod topology spread constraints", "ScheduleAnyway"),
    "user-namespace": ("PodSandboxError", "does not support user namespaces", "hostUsers: false"),
    "volume-zone": ("Unschedulable", "didn't match PersistentVolume's node affinity", "of another zone"),
    "webhook-denied-by-webhook-job": ("Forbidden", "pods must carry the label team", "what the webhook asks for"),
    "webhook-denied-job": ("Forbidden", "images must come from registry.internal", "what the policy asks for"),
    "webhook-down-job": ("Forbidden", "context deadline exceeded", "webhook pods.policy.example.com of the cluster"),
}  # fmt: skip

# Of these there is nothing to say in their first seconds.
ORDINARY = {
    "ordinary-starting",
    "ordinary-suspended",
    "ordinary-terminating",
    "ordinary-provisioning-after",
    # A pod that is ending is not lost.
    "pod-deadline",
}


@pytest.mark.parametrize("name", sorted(WORDS))
def test_what_a_person_reads(name: str) -> None:
    reason, *words = WORDS[name]
    told = tell(load(name))
    assert told.reason == reason, told
    for text in words:
        assert text in told.words


@pytest.mark.parametrize("name", sorted(ORDINARY))
def test_what_is_ordinary_is_no_problem(name: str) -> None:
    told = tell(load(name), 6)
    assert told == (Reason.STARTING, "", "", "")


def test_every_case_is_told_of() -> None:
    assert set(waiting_cases.names()) == {*WORDS, *ORDINARY}
    told = [name for page in waiting_cases.PAGES.values() for cases in page.values() for name in cases]
    assert len(told) == len(set(told))
    assert set(told) <= set(WORDS)


@pytest.mark.parametrize("name", waiting_cases.PAGES)
def test_the_pages_are_what_is_said(name: str) -> None:
    """`python -m tests.operator.waiting_cases --update` writes them."""
    assert (waiting_cases.REFERENCE / name).read_text() == waiting_cases.page(name)


def test_every_rule_has_a_reason_that_is_known() -> None:
    for table in rules.TABLES.values():
        for rule in table:
            assert rule.reason in PROBLEMS | {Reason.STARTING}, rule.cause
            # Groups that a remedy names are those of its pattern.
            rule.remedy.format(**dict.fromkeys(rule.pattern.groupindex, "x"))
            rule.words.format(**dict.fromkeys(rule.pattern.groupindex, "x"))


@pytest.mark.parametrize("name", sorted(WORDS))
def test_the_order_of_events_and_objects_says_nothing(name: str) -> None:
    case = load(name)
    draw = random.Random(name)
    shuffled = {**case, **{key: draw.sample(case[key], len(case[key])) for key in ("events", "objects")}}
    assert tell(shuffled) == tell(case)


@pytest.mark.parametrize("name", sorted(WORDS))
def test_a_pod_that_runs_waits_for_nothing(name: str) -> None:
    """Events stay for an hour: what is over is not told."""
    case = load(name)
    for item in case["objects"]:
        if item["kind"] == "Pod":
            containers = [
                {"name": one["name"], "ready": True, "state": {"running": {}}} for one in item["spec"]["containers"]
            ]
            ready = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
            item["status"] = {"phase": "Running", "conditions": ready, "containerStatuses": containers}
            item["metadata"].pop("deletionTimestamp", None)
        elif item["kind"] == "Job":
            item["status"] = {"active": item["spec"]["parallelism"]}
        elif item["kind"] == "Deployment":
            item["status"] = {"readyReplicas": item["spec"]["replicas"]}
    assert tell(case) == (Reason.STARTING, "", "", "")
    observed = observe(case)
    if observed.pods:
        assert questions(observed, NOW) == []


def event(reason: str, message: str, seconds: float, kind: str = "Warning") -> ClusterEvent:
    """An event so many seconds after noon."""
    return ClusterEvent(kind, reason, message, f"2026-11-27T12:00:{seconds:09.6f}Z")


def creating(name: str = "puzzle-workers-a") -> Object:
    found = pod("workers", phase="Pending", container=waiting("ContainerCreating"))
    found["metadata"] |= {"name": name, "uid": name}
    found["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-27T12:00:00Z"}
    ]
    return found


def cause_of(*events: ClusterEvent) -> str | None:
    found = start_cause(creating(), Signs(events={("Pod", "puzzle-workers-a"): events}, time=NOW))
    return None if found is None else found.cause


MULTI = event("FailedAttachVolume", 'Multi-Attach error for volume "v" Volume is already used by pod(s) x', 1)
MOUNT = event("FailedMount", 'MountVolume.SetUp failed for volume "s" : secret "creds" not found', 2)
TIMEOUT = event(
    "FailedMount", "Unable to attach or mount volumes: unmounted volumes=[v]: context deadline exceeded", 20
)


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ([], None),
        ([MULTI], "multi-attach"),
        # Kubernetes says it once, and only that something takes long after that.
        ([MULTI, TIMEOUT], "multi-attach"),
        ([TIMEOUT], "mount-timeout"),
        ([MULTI, event("SuccessfulAttachVolume", "AttachVolume.Attach succeeded", 3, "Normal")], None),
        ([MULTI, MOUNT], "secret-missing"),
        # The Secret still does not exist.
        ([MOUNT, event("SuccessfulAttachVolume", "AttachVolume.Attach succeeded", 3, "Normal")], "secret-missing"),
        ([MOUNT, event("Pulling", 'Pulling image "x:1"', 9, "Normal")], "pulling"),
        ([MOUNT, event("Pulled", "Successfully pulled", 9, "Normal")], None),
        ([event("FailedCreatePodSandBox", "something new", 4)], "sandbox"),
    ],
)  # fmt: skip
def test_the_newest_event_that_says_something_counts(events: list[ClusterEvent], cause: str | None) -> None:
    for order in (events, events[::-1]):
        assert cause_of(*order) == cause


def test_an_image_that_is_pulled_is_told_of_as_under_way() -> None:
    pulling = event("Pulling", 'Pulling image "registry/generation:1"', 9, "Normal")
    found = start_cause(creating(), Signs(events={("Pod", "puzzle-workers-a"): [pulling]}, time=NOW))
    assert found is not None
    assert found[1:3] == (Reason.STARTING, 'pulling image "registry/generation:1" since 2026-11-27T12:00:09Z')


PROBE_WORDS = 'Get "http://10.244.1.13:8080/livez": context deadline exceeded'


def restarted_pod(code: int = 137, **state: Any) -> Object:
    """The recorded pod of an engine that does not become ready, after its first container was ended."""
    found: Object
    [found] = [item for item in load("startup-probe-failing")["objects"] if item["kind"] == "Pod"]
    end = {
        "exitCode": code,
        "reason": "Error",
        "startedAt": "2026-11-27T12:00:10Z",
        "finishedAt": "2026-11-27T12:00:40Z",
    }
    running = {"running": {"startedAt": "2026-11-27T12:00:41Z"}}
    found["status"]["containerStatuses"][0] |= {"restartCount": 1, "lastState": {"terminated": end}, "state": running}
    found["status"]["containerStatuses"][0] |= state
    return found


def told_of_probe(pod: Object, *events: ClusterEvent) -> str:
    signs = Signs(events={("Pod", pod["metadata"]["name"]): events}, time=NOW)
    found = diagnose([pod], "generation", signs)
    assert found is not None
    return found.message


@pytest.mark.parametrize("kind", ["Liveness", "Startup"])
@pytest.mark.parametrize("code", [137, 143])
def test_a_container_that_a_probe_has_ended_was_not_just_killed(kind: str, code: int) -> None:
    failed = event("Unhealthy", f"{kind} probe failed: {PROBE_WORDS}", 38)
    ended = event("Killing", f"Container generation failed {kind.lower()} probe, will be restarted", 38, "Normal")
    pod = restarted_pod(code)
    for order in ((failed, ended), (ended, failed)):
        assert told_of_probe(pod, *order) == f"its {kind.lower()} probe failed: {PROBE_WORDS}"
    # Of events that are asked about: its status alone does not say it.
    subjects = [question.subject.name for question in questions(Observed(pods=[pod]), NOW)]
    assert subjects == [pod["metadata"]["name"]]
    waits = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    backing_off = restarted_pod(code, state=waits)
    assert told_of_probe(backing_off, failed, ended) == f"its {kind.lower()} probe failed: {PROBE_WORDS}"
    assert [question.subject.kind for question in questions(Observed(pods=[backing_off]), NOW)] == ["Pod"]


def test_a_probe_that_ended_another_container_or_an_earlier_start_is_not_the_cause() -> None:
    failed = event("Unhealthy", f"Liveness probe failed: {PROBE_WORDS}", 5)
    earlier = event("Killing", "Container generation failed liveness probe, will be restarted", 5, "Normal")
    other = event("Killing", "Container sidecar failed liveness probe, will be restarted", 38, "Normal")
    readiness = event("Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503", 39)
    stopped = event("Killing", "Stopping container generation", 38, "Normal")
    told = told_of_probe(restarted_pod(), failed, earlier, other, readiness, stopped)
    assert told == "killed by SIGKILL (exit code 137)"


def test_a_worker_that_ends_is_no_engine() -> None:
    """The reason of a part that starts a model is the engine's; that of what runs environments is not."""
    worker = pod("workers", shard=0, container={"state": {"terminated": {"exitCode": 1, "message": "no such file"}}})
    engine = pod("generation", container={"state": {"terminated": {"exitCode": 1, "message": "no such file"}}})
    found = {name: diagnose([item], name) for name, item in (("worker", worker), ("generation", engine))}
    reasons = {name: problem.reason for name, problem in found.items() if problem is not None}
    assert reasons == {"worker": Reason.CONTAINER_FAILED, "generation": Reason.ENGINE_FAILED}


@given(st.text(max_size=200))
def test_any_words_are_told(text: str) -> None:
    for table in rules.TABLES.values():
        found = rules.explain(text, table, otherwise=Reason.STARTING)
        assert found.cause or found.message == text


@pytest.mark.parametrize(
    ("item", "seen"),
    [
        ({"lastTimestamp": "2026-11-27T12:00:01Z", "count": 3}, "2026-11-27T12:00:01.000000Z"),
        (
            {"eventTime": "2026-11-27T12:00:01.5Z", "series": {"lastObservedTime": "2026-11-27T12:00:09.123456Z"}},
            "2026-11-27T12:00:09.123456Z",
        ),
        ({"lastTimestamp": None, "eventTime": "2026-11-27T12:00:01.123456Z"}, "2026-11-27T12:00:01.123456Z"),
        ({"metadata": {"creationTimestamp": "2026-11-27T12:00:02Z"}}, "2026-11-27T12:00:02.000000Z"),
        ({}, ""),
    ],
)
def test_when_an_event_was_seen_last(item: Any, seen: str) -> None:
    assert read_event(item).seen == seen
    first = ClusterEvent("Normal", "", "", "2026-11-27T12:00:00.000001Z")
    assert in_order([read_event(item), first])[-1].seen == max(seen, first.seen)


def claim(phase: str, seconds: float, **metadata: Any) -> Claim:
    made = (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
    live = {"metadata": {"name": "out", "creationTimestamp": made, **metadata}, "status": {"phase": phase}}
    return Claim("out", {**live, "spec": {"storageClassName": "gp3"}})


def test_a_volume_may_take_its_time() -> None:
    assert claim_cause(claim("Bound", 1000), NOW) is None
    soon = claim_cause(claim("Pending", 89), NOW)
    late = claim_cause(claim("Pending", 91), NOW)
    assert soon is not None
    assert late is not None
    assert (soon.reason, late.reason) == (Reason.STARTING, Reason.VOLUME)


# What is read, and how often.


class Api:
    """An API server with one pod that cannot mount its volume; counts what is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.error: Exception | None = None

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        self.asked.append((resource.kind, name))
        if self.error is not None:
            raise self.error
        return None

    async def items(self, resource: Resource, namespace: str, selector: str = "", *, fields: str = "") -> Any:
        self.asked.append((resource.kind, fields))
        if self.error is not None:
            raise self.error
        yield {"type": "Warning", "reason": "FailedMount", "message": MOUNT.message, "lastTimestamp": MOUNT.seen}


KEY = Key("rollouts", "puzzle")


async def reads(asked: Sequence[Question], seconds: int) -> tuple[Api, list[int]]:
    """When an API server is asked, if the reader is called when it wants to be, and often beside."""
    api, at = Api(), []
    reader = SignReader(api)  # type: ignore[arg-type]
    for second in range(seconds):
        before = len(api.asked)
        _, due = await reader.read(KEY, asked, NOW + timedelta(seconds=second))
        assert due is not None
        assert due >= 0
        if len(api.asked) > before:
            at.append(second)
    return api, at


async def test_events_are_read_ever_less_often() -> None:
    one = Question(Subject("Pod", "puzzle-workers-a", "u"), NOW)
    api, at = await reads([one], 300)
    assert at[0] == 10
    assert all(later - earlier <= LAST_SECONDS for earlier, later in itertools.pairwise(at))
    assert len(at) <= 15
    assert api.asked[0] == (
        "Event", "involvedObject.kind=Pod,involvedObject.name=puzzle-workers-a,involvedObject.uid=u",
    )  # fmt: skip


async def test_a_job_whose_last_pod_has_just_ended_is_not_asked_about() -> None:
    """It is old, and lacks pods since a moment: until its controller has counted."""
    api = Api()
    reader = SignReader(api)  # type: ignore[arg-type]
    one = Question(Subject("Job", "puzzle-workers", "u"), NOW - timedelta(hours=1))
    for seconds, asked in ((0, [one]), (4, [one]), (5, []), (6, [one]), (10.5, [one])):
        await reader.read(KEY, asked, NOW + timedelta(seconds=seconds))
    assert api.asked == []
    await reader.read(KEY, [one], NOW + timedelta(seconds=11))
    assert len(api.asked) == 1


async def test_what_has_a_cause_already_is_asked_about_seldom() -> None:
    _, at = await reads([Question(Subject("Pod", "puzzle-workers-a", "u"), NOW, True)], 3600)
    assert at[0] == 30
    assert len(at) <= 3600 / PATIENT_LAST_SECONDS + 5


async def test_nothing_is_read_for_a_job_that_waits_for_nothing() -> None:
    api = Api()
    reader = SignReader(api)  # type: ignore[arg-type]
    assert await reader.read(KEY, [], NOW) == (Signs(time=NOW), None)
    assert api.asked == []


async def test_a_claim_that_cannot_be_read_is_not_one_that_does_not_exist() -> None:
    asked = [Question(Subject("PersistentVolumeClaim", "out"), NOW)]
    for error in (Forbidden("no", code=403, request="get"), Unavailable("no", request="get")):
        api = Api()
        reader = SignReader(api)  # type: ignore[arg-type]
        api.error = error
        signs, due = await reader.read(KEY, asked, NOW + timedelta(seconds=10))
        assert (signs.claims, due) == ({}, 5.0)
        signs, due = await reader.read(KEY, asked, NOW + timedelta(seconds=15))
        assert (signs.claims, due) == ({}, 10.0)
        api.error = None
        signs, _ = await reader.read(KEY, asked, NOW + timedelta(seconds=25))
        assert signs.claims == {"out": None}


def test_a_claim_without_a_volume_is_ordinary_for_a_while() -> None:
    case = load("pvc-unbound-immediate")
    pods = list(observe(case).pods)
    since = max(item["status"]["conditions"][0]["lastTransitionTime"] for item in pods)
    born = datetime.fromisoformat(since)
    for seconds, reason in ((5, Reason.STARTING), (100, Reason.VOLUME)):
        found = diagnose(pods, "worker", Signs(time=born + timedelta(seconds=seconds)))
        assert found is not None
        assert found.reason == reason


def test_a_full_cluster_asks_about_one_pod_of_each_kind() -> None:
    """50 workers without a node cost as much as one."""
    case = load("insufficient-cpu")
    first = next(item for item in case["objects"] if item["kind"] == "Pod")
    pods = [{**first, "metadata": {**first["metadata"], "name": f"w{number:02}"}} for number in range(50)]
    asked = questions(observe({**case, "objects": pods}), NOW)
    assert [(question.subject.name, question.patient) for question in asked] == [("w00", True)]


def test_what_the_cache_keeps_is_enough() -> None:
    """The cases above are told from trimmed objects; of a pod that runs less is kept."""
    cache = Cache(lambda _: None)
    item = next(item for item in load("pvc-missing")["objects"] if item["kind"] == "Pod")
    cache.add_page(PODS, None, [item], "1", last=True)
    [kept] = cache.pods(Key(item["metadata"]["namespace"], "j"))
    assert [volume["persistentVolumeClaim"]["claimName"] for volume in kept["spec"]["volumes"]] == ["data"]
    item = {**item, "status": {"phase": "Running"}, "metadata": {**item["metadata"], "resourceVersion": "99999999"}}
    cache.add_event(PODS, item, deleted=False)
    [kept] = cache.pods(Key(item["metadata"]["namespace"], "j"))
    assert set(kept["spec"]) <= {"nodeName"}


def test_a_removed_pod_is_remembered_until_another_is_in_its_place() -> None:
    case = load("preempted")
    victim = next(
        item for item in case["objects"] if item["kind"] == "Pod" and "PreemptionByScheduler" in str(item["status"])
    )
    cache = Cache(lambda _: None)
    cache.add_page(PODS, None, [victim], "1", last=True)
    cache.add_event(PODS, {**victim, "metadata": {**victim["metadata"], "resourceVersion": "99999999"}}, deleted=True)
    key = Key(victim["metadata"]["namespace"], "j")
    assert cache.pods(key) == []
    [gone] = cache.departed(key)
    assert "a higher priority pod" in describe_removed([gone])
    later = {"name": "next", "creationTimestamp": "2027-01-01T00:00:00Z"}
    ready = {"metadata": later, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert describe_removed([gone, ready]) == ""
