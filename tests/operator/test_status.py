"""What a job's status says, row by row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from kuberoll_api.conditions import CONDITION_TYPES
from kuberoll_api.contract import PodProgress, UnansweringReplica
from kuberoll_api.status import RolloutJobStatus
from kuberoll_operator import model
from kuberoll_operator.backends.pods import ContainerExit, describe_exit, redact
from kuberoll_operator.deadlines import startup_deadlines
from kuberoll_operator.facts import compute_facts
from kuberoll_operator.model import Object, Observed, ServedWeights, WriteError
from kuberoll_operator.signs import ClusterEvent, Signs
from kuberoll_operator.status.job_status import compute_status, next_deadline
from kuberoll_operator.transitions import transitions
from tests.operator.support import (
    SETTINGS,
    at,
    check_job,
    child,
    condition,
    deployment,
    finish_job,
    job,
    job_condition,
    observed,
    pod,
    raw,
    stamp,
    terminated,
    unschedulable,
    waiting,
    workers_job,
)

STARTING = condition("GenerationReady", False, "Starting")
READY = condition("GenerationReady", True, "Ready")
WAITING = condition("WorkersReady", False, "WaitingForGeneration")
RUNNING = condition("WorkersReady", True, "Running")
DONE = condition("WorkersReady", False, "ShardsDone")
MET = condition("SuccessCriteriaMet", True, "TrajectoriesDone", "8 trajectories are stored, 0 failed")
SUSPENDED = condition("Suspended", True, "JobSuspended")
TARGET = condition("FailureTarget", True, "FailedShards", "1 of 4 shards failed")
BEGUN = {"startTime": stamp(0), "conditions": [STARTING, WAITING]}
WITH_WORKERS = {"startTime": stamp(0), "conditions": [READY, RUNNING]}
PENDING_WORKER = pod("workers", "0", phase="Pending", shard=0)
RUNNING_WORKER = pod("workers", "0", shard=0, container={"ready": True, "state": {"running": {}}})
NO_WORKER = condition("WorkersReady", False, "Unschedulable", "too few CPUs", seconds=60)
WITHOUT_WORKERS = {"startTime": stamp(0), "conditions": [READY, NO_WORKER]}
WITHOUT_ENGINES = {
    "startTime": stamp(0),
    "conditions": [condition("GenerationReady", False, "Released", seconds=660), NO_WORKER],
}
FINISHING = {"startTime": stamp(0), "conditions": [READY, DONE]}
EXTERNAL = {"generation": {"backend": "External", "external": {"url": "http://policy:1/"}, "replicas": None}}
ENDED_WELL = json.dumps({"trajectories": 8, "failed": 0, "dropped": 1, "planned": 9, "mean_reward": 0.5})

ENDED_IN_ERRORS = json.dumps({
    "trajectories": 6, "failed": 2, "planned": 8,
    "failure": "2 of them: step raised KeyError: 'answers' (guess.py:18 in grade)",
})  # fmt: skip


def failed_pod(shard: int, code: int, message: str, seconds: float = 0, **more: Any) -> Object:
    end = terminated(code, message, seconds=seconds)
    return pod("workers", f"{shard}-{seconds:g}", phase="Failed", shard=shard, container=end, **more)


def engine(**container: Any) -> list[Object]:
    return [pod("generation", container=container)]


def finished(code: int, message: str) -> list[Object]:
    phase = "Failed" if code else "Succeeded"
    return [pod("finish", phase=phase, container=terminated(code, message))]


def refused(kind: str, name: str, reason: str, message: str = "the server's words") -> dict[str, Any]:
    return {"errors": {(kind, name): WriteError(reason, message)}}


def on_lost_node(pod: Object, *, reason: str | None = None) -> Object:
    """A pod as the controller of nodes leaves it when a node's kubelet is silent (`MarkPodsNotReady`)."""
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-11-27T05:42:40Z"}
    if reason is not None:
        ready["reason"] = reason
    return {**pod, "spec": {"nodeName": "node-b"}, "status": {**pod["status"], "conditions": [ready]}}


def leaving(pod: Object) -> Object:
    """A pod that is being deleted."""
    return {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": stamp(50)}}


def born(pod: Object, seconds: float) -> Object:
    """A pod that was made at a time."""
    return {**pod, "metadata": {**pod["metadata"], "creationTimestamp": stamp(seconds)}}


def elsewhere(pod: Object) -> Object:
    """A pod with a node, and without its volumes."""
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(0)}
    return {**pod, "status": {**pod["status"], "conditions": [scheduled]}}


def signs_of(pod: str, reason: str, message: str) -> Signs:
    """An event about a pod."""
    return Signs(events={("Pod", pod): [ClusterEvent("Warning", reason, message, stamp(9))]}, time=at(60))


ANSWERS = pod("generation", container={"ready": True}, conditions=[{"type": "Ready", "status": "True"}])
MULTI_ATTACH = signs_of("puzzle-workers-1", "FailedAttachVolume", 'Multi-Attach error for volume "v" Volume is in use')
PULLING = signs_of("puzzle-workers-1", "Pulling", 'Pulling image "x:1"')


def preempted(pod: Object) -> Object:
    """A pod in whose place another one runs."""
    disrupted = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "default-scheduler: preempting to accommodate a higher priority pod",
        "lastTransitionTime": stamp(30),
    }
    return {**pod, "spec": {"nodeName": "node-b"}, "status": {**pod["status"], "conditions": [disrupted]}}


class Row(NamedTuple):
    """Facts, and what is said of them: a phase, and conditions as `Type=Status/Reason`, with words of a message."""

    name: str
    facts: Observed
    phase: str
    said: list[str]
    words: str = ""
    status: dict[str, Any] | None = None
    spec: Mapping[str, Any] = MappingProxyType({})
    seconds: float = 60


ROWS = [
    Row(
        "first sight",
        observed(),
        "Starting",
        [
            "WorkersChecked=False/Checking",
            "GenerationReady=False/WaitingForCheck",
            "WorkersReady=False/WaitingForGeneration",
        ],
        "a pod is checking the workers' inputs",
    ),
    Row(
        "a claim of the workers' that is not there",
        observed(check_job(active=1), pods=[pod("check", conditions=unschedulable('claim "nope" not found'))]),
        "Starting",
        ["WorkersChecked=False/Unschedulable", "GenerationReady=False/WaitingForCheck"],
        'claim "nope" not found',
    ),
    Row(
        "a Secret of the workers' that is not there",
        observed(
            check_job(active=1),
            pods=[pod("check", container=waiting("CreateContainerConfigError", 'secret "s3" not found'))],
        ),
        "Starting",
        ["WorkersChecked=False/PodConfigError"],
        "container worker: Secret s3 does not exist; create it",
    ),
    Row(
        "what workers need comes too late",
        observed(check_job(active=1), pods=[pod("check", conditions=unschedulable('claim "nope" not found'))]),
        "Failed",
        ["FailureTarget=True/StartupDeadlineExceeded"],
        "the check of the workers' inputs did not succeed within startupDeadlineSeconds (1800): "
        'claim "nope" not found',
        {
            "startTime": stamp(0),
            "conditions": [condition("WorkersChecked", False, "Unschedulable", 'claim "nope" not found')],
        },
        seconds=1801,
    ),
    Row(
        "workers that do not start while engines wait",
        observed(
            deployment(2),
            workers_job(active=1),
            pods=[pod("workers", "0", phase="Pending", shard=0, conditions=unschedulable("too few CPUs"))],
        ),
        "Failed",
        ["FailureTarget=True/StartupDeadlineExceeded"],
        "no worker ran while generation was ready within startupDeadlineSeconds (1800): too few CPUs",
        {
            "startTime": stamp(0),
            "conditions": [READY, condition("WorkersReady", False, "Unschedulable", "too few CPUs")],
        },
        seconds=1801,
    ),
    Row("first sight, suspended", observed(), "Suspended", ["Suspended=True/JobSuspended"], spec={"suspend": True}),
    Row("external", observed(), "Running", ["GenerationReady=True/External"], "http://policy:1", spec=EXTERNAL),
    Row(
        "one replica of two",
        observed(deployment(1)),
        "Starting",
        ["GenerationReady=False/Starting"],
        "1 of 2 replicas are ready",
        BEGUN,
    ),
    Row("both replicas", observed(deployment(2)), "Running", ["GenerationReady=True/Ready"], "2 of 2", BEGUN),
    Row(
        "numbers of an older generation do not count",
        observed(deployment(2, observedGeneration=0)),
        "Starting",
        ["GenerationReady=False/Starting"],
        "0 of 2",
        BEGUN,
    ),
    Row(
        "just scaled, numbers of an older generation, and a pod that goes on",
        observed(
            deployment(2, observedGeneration=0),
            workers_job(active=2),
            pods=[ANSWERS, leaving(born(ANSWERS, 1)), pod("workers", shard=0)],
        ),
        "Running",
        ["GenerationReady=True/Ready", "WorkersReady=True/Running"],
        "1 of 2",
        WITH_WORKERS,
    ),
    Row(
        "pods of an older generation do not make it ready",
        observed(deployment(2, observedGeneration=0), pods=[ANSWERS, ANSWERS]),
        "Starting",
        ["GenerationReady=False/Starting"],
        "",
        BEGUN,
    ),
    Row(
        "a replica lost on the way",
        observed(deployment(1), workers_job(active=2), pods=[pod("workers", shard=0)]),
        "Running",
        ["GenerationReady=True/Ready", "WorkersReady=True/Running"],
        "1 of 2",
        WITH_WORKERS,
    ),
    Row(
        "all replicas lost on the way",
        observed(deployment(0), workers_job(active=2), pods=[pod("workers", shard=0)]),
        "Running",
        ["GenerationReady=False/Starting", "WorkersReady=True/Running"],
        "0 of 2",
        WITH_WORKERS,
    ),
    Row(
        "unschedulable",
        observed(
            deployment(),
            pods=[
                pod(
                    "generation",
                    phase="Pending",
                    conditions=unschedulable("0/5 nodes are available: 5 Insufficient nvidia.com/gpu."),
                )
            ],
        ),
        "Starting",
        ["GenerationReady=False/Unschedulable"],
        "Insufficient nvidia.com/gpu",
        BEGUN,
    ),
    Row(
        "image pull",
        observed(deployment(), pods=engine(**waiting("ErrImagePull", "manifest unknown"))),
        "Starting",
        ["GenerationReady=False/ImagePullError"],
        "container generation: manifest unknown",
        BEGUN,
    ),
    Row(
        "waiting to pull again tells what was told before",
        observed(deployment(), pods=engine(**waiting("ImagePullBackOff", "Back-off pulling image"))),
        "Starting",
        ["GenerationReady=False/ImagePullError"],
        "manifest unknown",
        {
            "startTime": stamp(0),
            "conditions": [condition("GenerationReady", False, "ImagePullError", "manifest unknown")],
        },
    ),
    Row(
        "image of an init container",
        observed(deployment(), pods=[pod("generation", init=waiting("InvalidImageName", "no such name"))]),
        "Starting",
        ["GenerationReady=False/ImagePullError"],
        "container prepare: no such name",
        BEGUN,
    ),
    Row(
        "model that is being fetched",
        observed(
            deployment(),
            pods=[
                {
                    **pod("generation", init={"name": "model-cache", "state": {"running": {"startedAt": stamp(3)}}}),
                    "spec": {"nodeName": "gpu-1"},
                }
            ],
        ),
        "Starting",
        ["GenerationReady=False/Starting"],
        f"pod puzzle-generation-a waits: its model is fetched into the cache of node gpu-1 since {stamp(3)}; "
        "`kubectl logs puzzle-generation-a -c model-cache` says how much of it is there",
        BEGUN,
    ),
    Row(
        "model for which a node has no room",
        observed(deployment(), pods=[pod("generation", init={"name": "model-cache", **terminated(1, "no room")})]),
        "Starting",
        ["GenerationReady=False/EngineFailed"],
        "container model-cache: no room",
        BEGUN,
    ),
    Row(
        "missing secret",
        observed(deployment(), pods=engine(**waiting("CreateContainerConfigError", 'secret "hub" not found'))),
        "Starting",
        ["GenerationReady=False/PodConfigError"],
        "container generation: Secret hub does not exist; create it",
        BEGUN,
    ),
    Row(
        "model that does not exist",
        observed(
            deployment(),
            pods=[pod("generation", init={"name": "model-cache", **terminated(78, "model a/b: no revision (404)")})],
        ),
        "Failed",
        ["FailureTarget=True/Refused"],
        "generation: model a/b: no revision (404)",
        BEGUN,
    ),
    Row(
        "engine ended",
        observed(deployment(), pods=engine(**terminated(1, "ValueError: no such quantization"))),
        "Starting",
        ["GenerationReady=False/EngineFailed"],
        "ValueError: no such quantization",
        BEGUN,
    ),
    Row(
        "engine ends again and again",
        observed(
            deployment(),
            pods=engine(
                **waiting("CrashLoopBackOff", "back-off 5m0s", restartCount=4),
                lastState=terminated(1, "CUDA out of memory")["state"],
            ),
        ),
        "Starting",
        ["GenerationReady=False/Crashing"],
        "CUDA out of memory",
        BEGUN,
    ),
    Row(
        "while it runs after many crashes",
        observed(
            deployment(),
            pods=engine(state={"running": {}}, restartCount=4, lastState=terminated(1, "CUDA out of memory")["state"]),
        ),
        "Starting",
        ["GenerationReady=False/Crashing"],
        "CUDA out of memory",
        BEGUN,
    ),
    Row(
        "killed for memory",
        observed(deployment(), pods=engine(**terminated(137, reason="OOMKilled"))),
        "Starting",
        ["GenerationReady=False/EngineFailed"],
        "raise the memory limit",
        BEGUN,
    ),
    Row(
        "silent end",
        observed(deployment(), pods=engine(**terminated(139))),
        "Starting",
        ["GenerationReady=False/EngineFailed"],
        "exit code 139",
        BEGUN,
    ),
    Row(
        "words with a secret",
        observed(deployment(), pods=engine(**terminated(1, "401 for token hf_AbCdEfGhIjKlMnOp"))),
        "Starting",
        ["GenerationReady=False/EngineFailed"],
        "401 for token [redacted]",
        BEGUN,
    ),
    Row(
        "quota of pods",
        observed(
            deployment(
                conditions=[{"type": "ReplicaFailure", "status": "True", "message": "forbidden: exceeded quota: gpus"}]
            )
        ),
        "Starting",
        ["GenerationReady=False/QuotaExceeded"],
        "exceeded quota: gpus",
        BEGUN,
    ),
    Row(
        "pod security",
        observed(
            deployment(
                conditions=[
                    {"type": "ReplicaFailure", "status": "True", "message": 'is forbidden: violates "restricted"'}
                ]
            )
        ),
        "Starting",
        ["GenerationReady=False/Forbidden"],
        "violates",
        BEGUN,
    ),
    Row(
        "quota of objects",
        observed(**refused("Deployment", "puzzle-generation", "QuotaExceeded")),
        "Pending",
        ["GenerationReady=False/QuotaExceeded"],
        "Deployment puzzle-generation: the server's words",
    ),
    Row(
        "forbidden",
        observed(**refused("ConfigMap", "puzzle-config", "Forbidden")),
        "Pending",
        ["GenerationReady=False/Forbidden"],
        "ConfigMap puzzle-config",
        BEGUN,
    ),
    Row(
        "conflict of the workers' Job",
        observed(deployment(2), **refused("Job", "puzzle-workers", "FieldConflict")),
        "Running",
        ["GenerationReady=True/Ready", "WorkersReady=False/FieldConflict"],
        "Job puzzle-workers",
        BEGUN,
    ),
    Row(
        "invalid template",
        observed(**refused("Deployment", "puzzle-generation", "InvalidTemplate", "spec.template.spec.containers[0]")),
        "Failed",
        ["FailureTarget=True/InvalidTemplate"],
        "containers[0]",
        BEGUN,
    ),
    Row(
        "name taken by a stranger",
        observed({**child("ConfigMap", "puzzle-config", uid="other"), "metadata": {"name": "puzzle-config"}}),
        "Pending",
        ["GenerationReady=False/NameTaken", "WorkersReady=False/NameTaken"],
        "delete it, or rename the job",
        BEGUN,
    ),
    Row(
        "name still of an earlier job",
        observed(child("ConfigMap", "puzzle-config", uid="other")),
        "Pending",
        ["GenerationReady=False/NameTaken"],
        "waiting for its removal",
        BEGUN,
    ),
    Row(
        "output is a path",
        observed(),
        "Failed",
        ["FailureTarget=True/InvalidSpec", "GenerationReady=False/InvalidSpec"],
        "spec.output.uri",
        spec={"output": {"uri": "runs/x"}},
    ),
    Row(
        "output is a path, but it may be edited",
        observed(),
        "Suspended",
        ["Suspended=True/JobSuspended"],
        spec={"output": {"uri": "runs/x"}, "suspend": True},
    ),
    Row(
        "too few GPUs",
        observed(),
        "Failed",
        ["FailureTarget=True/InvalidSpec"],
        "tensor_parallel_size 3 x pipeline_parallel_size 1 = 3 GPUs a replica; pods have 2",
        spec={
            "generation": {
                "engineArgs": {"tensor_parallel_size": 3},
                "resources": {"limits": {"nvidia.com/gpu": "2"}},
            }
        },
    ),
    Row(
        "startup deadline",
        observed(deployment(), pods=engine(**terminated(1, "ValueError: bad dtype"))),
        "Failed",
        ["FailureTarget=True/StartupDeadlineExceeded"],
        "startupDeadlineSeconds (1800): ValueError: bad dtype",
        BEGUN,
        seconds=1800,
    ),
    Row("a second before", observed(deployment()), "Starting", ["GenerationReady=False/Starting"], "", BEGUN, {}, 1799),
    Row(
        "startup deadline counts from the resumption",
        observed(deployment()),
        "Starting",
        ["GenerationReady=False/Starting"],
        "",
        {**BEGUN, "startTime": stamp(1000)},
        seconds=2799,
    ),
    Row(
        "active deadline",
        observed(deployment(2), workers_job(active=2)),
        "Failed",
        ["FailureTarget=True/DeadlineExceeded"],
        "activeDeadlineSeconds (60)",
        WITH_WORKERS,
        {"activeDeadlineSeconds": 60},
    ),
    Row(
        "all is stored when the active deadline ends",
        observed(workers_job(succeeded=4, conditions=job_condition("Complete"))),
        "Finishing",
        ["SuccessCriteriaMet=False/ShardsDone"],
        "4 of 4 shards are done",
        WITH_WORKERS,
        {"activeDeadlineSeconds": 60},
    ),
    Row(
        "all is stored, and its aggregation does not end",
        observed(workers_job(succeeded=4, conditions=job_condition("Complete"))),
        "Failed",
        ["FailureTarget=True/DeadlineExceeded"],
        "all trajectories are stored",
        WITH_WORKERS,
        {"activeDeadlineSeconds": 60, "startupDeadlineSeconds": 30},
        seconds=5000,
    ),
    Row(
        "the engine refuses",
        observed(deployment(), pods=engine(**terminated(78, "no such model: org/model"))),
        "Failed",
        ["FailureTarget=True/Refused"],
        "generation: no such model: org/model",
        BEGUN,
    ),
    Row(
        "workers are running",
        observed(
            deployment(2),
            workers_job(active=2, succeeded=1),
            pods=[pod("workers", "a", shard=1), pod("workers", "b", shard=2)],
        ),
        "Running",
        ["WorkersReady=True/Running"],
        "2 workers are running, 1 of 4 shards are done",
        WITH_WORKERS,
    ),
    Row(
        "the node of one worker is lost",
        observed(
            deployment(2),
            workers_job(active=2, succeeded=1),
            pods=[pod("workers", "a", shard=1), on_lost_node(pod("workers", "b", shard=2, container={"ready": True}))],
        ),
        "Running",
        ["WorkersReady=True/Running"],
        "1 workers are running, 1 of 4 shards are done; pod puzzle-workers-b not heard of since 2026-11-27T05:42:40Z: "
        "its node node-b does not answer",
        WITH_WORKERS,
    ),
    Row(
        "the nodes of all workers are lost",
        observed(
            deployment(2),
            workers_job(active=2, succeeded=1),
            pods=[
                on_lost_node(pod("workers", name, shard=shard, container={"ready": True}))
                for shard, name in enumerate("ab")
            ],
        ),
        "Running",
        ["WorkersReady=False/NodeLost"],
        "pod puzzle-workers-a, and 1 more not heard of since",
        WITH_WORKERS,
    ),
    Row(
        "a worker whose container has ended is not lost",
        observed(
            deployment(2),
            workers_job(active=1),
            pods=[on_lost_node(pod("workers", shard=0, container={"ready": False}), reason="ContainersNotReady")],
        ),
        "Running",
        ["WorkersReady=True/Running"],
        "1 workers are running, 0 of 4 shards are done",
        WITH_WORKERS,
    ),
    Row(
        "the node of one engine is lost",
        observed(
            deployment(1),
            workers_job(active=1),
            pods=[on_lost_node(pod("generation", container={"ready": True})), pod("workers", shard=0)],
        ),
        "Running",
        ["GenerationReady=True/Ready"],
        "1 of 2 replicas are ready; pod puzzle-generation-a not heard of since 2026-11-27T05:42:40Z: its node node-b",
        WITH_WORKERS,
        {"generation": {"replicas": 2}},
    ),
    Row(
        "the nodes of all engines are lost before any worker runs",
        observed(deployment(0), pods=[on_lost_node(pod("generation", container={"ready": True}))]),
        "Starting",
        ["GenerationReady=False/NodeLost"],
        "0 of 2 replicas are ready; pod puzzle-generation-a not heard of since",
        BEGUN,
    ),
    Row(
        "workers wait for a node",
        observed(
            deployment(2),
            workers_job(active=1),
            pods=[pod("workers", shard=0, phase="Pending", conditions=unschedulable("0/5 nodes: Insufficient cpu"))],
        ),
        "Running",
        ["WorkersReady=False/Unschedulable"],
        "Insufficient cpu",
        {"startTime": stamp(0), "conditions": [READY, WAITING]},
    ),
    Row(
        "no worker is asked for",
        observed(deployment(2), workers_job()),
        "Running",
        ["WorkersReady=False/Starting"],
        "workers.replicas is 0",
        {"startTime": stamp(0), "conditions": [READY, WAITING]},
        {"workers": {"replicas": 0}},
    ),
    Row(
        "a shard is tried again",
        observed(deployment(2), workers_job(active=1), pods=[failed_pod(3, 1, '{"cause": "disk full"}')]),
        "Running",
        ["WorkersReady=True/Running"],
        "shard 3 was retried after: disk full",
        WITH_WORKERS,
    ),
    Row(
        "no worker runs any more, and none is made",
        observed(deployment(2), workers_job()),
        "Running",
        ["WorkersReady=False/Starting"],
        "0 workers are running, 0 of 4 shards are done",
        WITH_WORKERS,
    ),
    Row(
        "the next worker starts",
        observed(deployment(2), workers_job(active=1), pods=[born(pod("workers", "3", phase="Pending", shard=3), 40)]),
        "Running",
        ["WorkersReady=True/Running"],
        "0 workers are running, 0 of 4 shards are done",
        WITH_WORKERS,
    ),
    Row(
        "the next worker does not start",
        observed(deployment(2), workers_job(active=1), pods=[born(pod("workers", "3", phase="Pending", shard=3), 20)]),
        "Running",
        ["WorkersReady=False/Starting"],
        "0 workers are running, 0 of 4 shards are done",
        WITH_WORKERS,
    ),
    Row(
        "one worker runs, and the others' volume is attached elsewhere",
        replace(
            observed(
                deployment(2),
                workers_job(active=2),
                pods=[
                    RUNNING_WORKER,
                    elsewhere(pod("workers", "1", phase="Pending", shard=1)),
                ],
            ),
            signs=MULTI_ATTACH,
        ),
        "Running",
        ["WorkersReady=True/Running"],
        "1 workers are running, 0 of 4 shards are done; pod puzzle-workers-1 waits: Multi-Attach error",
        WITH_WORKERS,
    ),
    Row(
        "preempted workers that nothing replaces yet",
        replace(observed(deployment(2), workers_job()), departed=[preempted(pod("workers", "0", shard=0))]),
        "Running",
        ["WorkersReady=False/Starting"],
        "pod puzzle-workers-0 was removed from node node-b at 2026-03-01T12:00:30Z: PreemptionByScheduler",
        WITH_WORKERS,
    ),
    Row(
        "preempted workers whose successors find no room",
        replace(
            observed(
                deployment(2),
                workers_job(active=1),
                pods=[pod("workers", "1", phase="Pending", shard=0, conditions=unschedulable("too few CPUs"))],
            ),
            departed=[preempted(pod("workers", "0", shard=0))],
        ),
        "Running",
        ["WorkersReady=False/Unschedulable"],
        "too few CPUs; pod puzzle-workers-0 was removed from node node-b at 2026-03-01T12:00:30Z: Preemption",
        WITH_WORKERS,
    ),
    Row(
        "the next worker's image is pulled",
        replace(
            observed(
                deployment(2),
                workers_job(active=1),
                pods=[elsewhere(born(pod("workers", "1", phase="Pending", shard=1), 40))],
            ),
            signs=PULLING,
        ),
        "Running",
        ["WorkersReady=True/Running"],
        "0 workers are running, 0 of 4 shards are done; pod puzzle-workers-1 waits: pulling image",
        WITH_WORKERS,
    ),
    Row(
        "a preempted engine",
        replace(observed(deployment(1)), departed=[preempted(pod("generation"))]),
        "Starting",
        ["GenerationReady=False/PodRemoved"],
        "1 of 2 replicas are ready; pod puzzle-generation-a was removed from node node-b",
        BEGUN,
    ),
    Row(
        "a worker that is to leave a lost node",
        observed(
            deployment(2),
            workers_job(active=2),
            pods=[
                RUNNING_WORKER,
                leaving(
                    on_lost_node(pod("workers", "1", shard=1, container={"ready": True, "state": {"running": {}}}))
                ),
            ],
        ),
        "Running",
        ["WorkersReady=True/Running"],
        "no other pod is made until the node is back, or has the taint of one that is shut down: kubectl taint node "
        "node-b node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
        WITH_WORKERS,
    ),
    Row(
        "engines of workers that have not run for a while",
        observed(deployment(2), workers_job(active=1), pods=[PENDING_WORKER]),
        "Running",
        ["GenerationReady=False/Released", "WorkersReady=False/Starting"],
        "no worker has run since 2026-03-01T12:01:00Z; the first that runs brings them back",
        WITHOUT_WORKERS,
        seconds=660,
    ),
    Row(
        "the same in time",
        observed(deployment(2), workers_job(active=1), pods=[PENDING_WORKER]),
        "Running",
        ["GenerationReady=True/Ready"],
        "",
        WITHOUT_WORKERS,
        seconds=659,
    ),
    Row(
        "engines that were given back stay so",
        observed(workers_job(active=1), pods=[PENDING_WORKER]),
        "Running",
        ["GenerationReady=False/Released"],
        "no worker has run since",
        WITHOUT_ENGINES,
        seconds=9000,
    ),
    Row(
        "a worker runs again, and the engines start",
        observed(
            workers_job(active=1),
            pods=[RUNNING_WORKER],
        ),
        "Running",
        ["GenerationReady=False/Starting", "WorkersReady=True/Running"],
        "0 of 2 replicas are ready",
        WITHOUT_ENGINES,
        seconds=9000,
    ),
    Row(
        "they have their time to start",
        observed(
            deployment(),
            workers_job(active=1),
            pods=[RUNNING_WORKER],
        ),
        "Running",
        ["GenerationReady=False/Starting", "WorkersReady=True/Running"],
        "0 of 2 replicas are ready",
        {
            "startTime": stamp(0),
            "conditions": [
                condition("GenerationReady", False, "Starting", seconds=660),
                condition("WorkersReady", True, "Running", "", seconds=9000),
            ],
        },
        seconds=10000,
    ),
    Row(
        "workers that never ran: the startup deadline counts",
        observed(deployment(2), workers_job(active=1), pods=[PENDING_WORKER]),
        "Running",
        ["GenerationReady=True/Ready"],
        "",
        {"startTime": stamp(0), "conditions": [READY, condition("WorkersReady", False, "Starting", "")]},
        seconds=1000,
    ),
    Row(
        "suspended mid-run",
        observed(workers_job(suspend=True, succeeded=1)),
        "Suspended",
        ["Suspended=True/JobSuspended", "GenerationReady=False/Released", "WorkersReady=False/JobSuspended"],
        "1 of 4 shards are done",
        WITH_WORKERS,
        {"suspend": True},
    ),
    Row(
        "resumed",
        observed(workers_job(suspend=True)),
        "Starting",
        ["Suspended=False/JobResumed", "GenerationReady=False/Starting"],
        "",
        {"startTime": stamp(0), "conditions": [SUSPENDED, STARTING, WAITING]},
    ),
    Row(
        "all shards done",
        observed(deployment(2), workers_job(succeeded=4, conditions=job_condition("Complete"))),
        "Finishing",
        ["GenerationReady=False/Released", "WorkersReady=False/ShardsDone", "SuccessCriteriaMet=False/ShardsDone"],
        "4 of 4 shards are done",
        WITH_WORKERS,
    ),
    Row(
        "a failed shard within the budget",
        observed(workers_job(succeeded=3, failedIndexes="2", conditions=job_condition("Failed", "FailedIndexes"))),
        "Finishing",
        ["WorkersReady=False/ShardsDone"],
        "3 of 4 shards are done, 1 failed",
        WITH_WORKERS,
        {"workers": {"maxFailedShards": 1}},
    ),
    Row(
        "failed shards beyond the budget: the first cause",
        observed(
            deployment(2),
            workers_job(failedIndexes="0,2-3", conditions=job_condition("Failed", "MaxFailedIndexesExceeded")),
            pods=[
                failed_pod(0, 1, '{"cause": "later"}', 30),
                failed_pod(2, 1, '{"cause": "the first"}', 10),
                failed_pod(3, 75, '{"cause": "drained"}', 1),
            ],
        ),
        "Failed",
        ["FailureTarget=True/FailedShards", "WorkersReady=False/FailedShards"],
        "3 of 4 shards failed (0, 2, 3), more than workers.maxFailedShards (0) allows; the first: shard 2: the first",
        WITH_WORKERS,
    ),
    Row(
        "a worker refuses",
        observed(
            deployment(2),
            workers_job(conditions=job_condition("FailureTarget", "PodFailurePolicy", "exit code 78")),
            pods=[failed_pod(1, 78, '{"cause": "dataset row 7: no prompt"}')],
        ),
        "Failed",
        ["FailureTarget=True/Refused"],
        "shard 1: dataset row 7: no prompt",
        WITH_WORKERS,
    ),
    Row(
        "a worker refused, and its pod is gone",
        observed(workers_job(conditions=job_condition("Failed", "PodFailurePolicy", "Container worker: exit code 78"))),
        "Failed",
        ["FailureTarget=True/Refused"],
        "Container worker: exit code 78",
        WITH_WORKERS,
    ),
    Row(
        "aggregated, engines on their way out",
        observed(deployment(2), workers_job(succeeded=4), finish_job(conditions=job_condition("Complete"))),
        "Finishing",
        ["SuccessCriteriaMet=True/TrajectoriesDone", "WorkersReady=False/ShardsDone"],
        "",
        FINISHING,
    ),
    Row(
        "aggregated, a pod of the engines still there",
        observed(finish_job(conditions=job_condition("Complete")), pods=[pod("generation"), *finished(0, ENDED_WELL)]),
        "Finishing",
        ["SuccessCriteriaMet=True/TrajectoriesDone"],
        "8 trajectories are stored, 0 failed",
        FINISHING,
    ),
    Row(
        "aggregated, an engine gone with its node",
        observed(
            finish_job(conditions=job_condition("Complete")),
            pods=[leaving(on_lost_node(pod("generation", container={"ready": True}))), *finished(0, ENDED_WELL)],
        ),
        "Succeeded",
        ["Complete=True/TrajectoriesDone", "SuccessCriteriaMet=True/TrajectoriesDone"],
        "8 trajectories",
        FINISHING,
    ),
    Row(
        "aggregated, an engine on a lost node that is not deleted yet",
        observed(
            finish_job(conditions=job_condition("Complete")),
            pods=[on_lost_node(pod("generation", container={"ready": True})), *finished(0, ENDED_WELL)],
        ),
        "Finishing",
        ["SuccessCriteriaMet=True/TrajectoriesDone"],
        "8 trajectories are stored, 0 failed",
        FINISHING,
    ),
    Row(
        "complete",
        observed(finish_job(conditions=job_condition("Complete")), pods=finished(0, ENDED_WELL)),
        "Succeeded",
        ["Complete=True/TrajectoriesDone", "SuccessCriteriaMet=True/TrajectoriesDone"],
        "8 trajectories",
        FINISHING,
    ),
    Row(
        "aggregation failed",
        observed(finish_job(conditions=job_condition("Failed", "x")), pods=finished(1, '{"cause": "no bucket"}')),
        "Failed",
        ["FailureTarget=True/FinishFailed"],
        "aggregation failed: no bucket",
        FINISHING,
    ),
    Row(
        "too many trajectories failed",
        observed(
            finish_job(conditions=job_condition("Complete")),
            pods=finished(0, '{"trajectories": 6, "failed": 2, "planned": 8}'),
        ),
        "Failed",
        ["FailureTarget=True/FailureBudgetExceeded"],
        "2 of 8 trajectories failed, more than rollout.maxFailedFraction (0.1) allows",
        FINISHING,
        {"rollout": {"maxFailedFraction": 0.1}},
    ),
    Row(
        "too many trajectories failed, in a line of the environment's code",
        observed(finish_job(conditions=job_condition("Complete")), pods=finished(0, ENDED_IN_ERRORS)),
        "Failed",
        ["FailureTarget=True/FailureBudgetExceeded"],
        "allows; the most frequent cause: 2 of them: step raised KeyError: 'answers' (guess.py:18 in grade)",
        FINISHING,
        {"rollout": {"maxFailedFraction": 0.1}},
    ),
    Row(
        "some trajectories failed, within the budget",
        observed(finish_job(conditions=job_condition("Complete")), pods=finished(0, ENDED_IN_ERRORS)),
        "Succeeded",
        ["Complete=True/TrajectoriesDone"],
        "2 failed; the most frequent cause: 2 of them: step raised KeyError: 'answers' (guess.py:18 in grade)",
        FINISHING,
        {"rollout": {"maxFailedFraction": 0.5}},
    ),
    Row(
        "trajectories fail while workers run",
        observed(
            deployment(2),
            workers_job(active=1),
            pods=[pod("workers", shard=2)],
            progress={2: PodProgress(shard=2, failed=3, failure="KeyError: 'a' (guess.py:18 in grade) hf_abcdefghij")},
        ),
        "Running",
        ["WorkersReady=True/Running"],
        "trajectories of shard 2 failed: KeyError: 'a' (guess.py:18 in grade) [redacted]",
        WITH_WORKERS,
    ),
    Row(
        "workers wait for the policy",
        observed(
            deployment(2),
            workers_job(active=1),
            pods=[pod("workers", shard=2)],
            progress={2: PodProgress(shard=2, waiting="its policy: http://p:8000: connection refused")},
        ),
        "Running",
        ["WorkersReady=True/Running"],
        "shard 2 waits for its policy: http://p:8000: connection refused",
        WITH_WORKERS,
    ),
    Row(
        "all workers wait for the trainer",
        observed(
            deployment(2),
            workers_job(active=2),
            pods=[pod("workers", shard=0), pod("workers", shard=1)],
            progress={
                number: PodProgress(shard=number, held="the trainer 'grpo' has taken 8 prompt groups")
                for number in (0, 1)
            },
        ),
        "Running",
        ["HeldBack=True/WaitingForTrainer", "Starved=False/InStep", "WorkersReady=True/Running"],
        "the trainer 'grpo' has taken 8 prompt groups",
        WITH_WORKERS,
        {"rollout": {"onPolicy": {"maxLag": 1}}, "workers": {"replicas": 4, "shards": 4}},
    ),
    Row(
        "the trainer waits for some workers",
        observed(
            deployment(2),
            workers_job(active=2),
            pods=[pod("workers", shard=0), pod("workers", shard=1)],
            progress={
                0: PodProgress(shard=0, held="had its share", starved="the trainer 'grpo' waits for prompt groups"),
                1: PodProgress(shard=1),
            },
        ),
        "Running",
        ["HeldBack=False/InStep", "Starved=True/WaitingForRollouts"],
        "the trainer 'grpo' waits for prompt groups",
        WITH_WORKERS,
        {"rollout": {"onPolicy": {"maxLag": 1}}, "workers": {"replicas": 4, "shards": 4}},
    ),
    Row(
        "failing until what it holds is gone",
        observed(pods=[pod("workers", shard=0)]),
        "Failed",
        ["FailureTarget=True/FailedShards"],
        "1 of 4 shards failed",
        {**WITH_WORKERS, "conditions": [READY, RUNNING, TARGET]},
    ),
    Row(
        "failed",
        observed(child("ConfigMap", "puzzle-config")),
        "Failed",
        ["Failed=True/FailedShards", "GenerationReady=False/FailedShards"],
        "1 of 4 shards failed",
        {**WITH_WORKERS, "conditions": [READY, RUNNING, TARGET]},
    ),
    Row(
        "the first cause stays",
        observed(deployment(), workers_job(conditions=job_condition("Failed", "PodFailurePolicy"))),
        "Failed",
        ["FailureTarget=True/FailedShards"],
        "1 of 4 shards failed",
        {**WITH_WORKERS, "conditions": [READY, RUNNING, TARGET]},
        seconds=99999,
    ),
    Row(
        "shards that were done stay done, whatever becomes of their Job",
        observed(),
        "Finishing",
        ["WorkersReady=False/ShardsDone"],
        "4 of 4",
        {**FINISHING, "workers": {"succeeded": 4, "shards": 4}},
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_table(row: Row) -> None:
    found = compute_status(compute_facts(job(**row.spec), raw(row.status), row.facts, SETTINGS, at(row.seconds)))
    told_of = {f"{item['type']}={item['status']}/{item['reason']}" for item in found["conditions"]}
    assert set(row.said) <= told_of
    assert found["phase"] == row.phase
    if row.words:
        assert any(row.words in item["message"] for item in found["conditions"])
    if "FailureTarget" not in " ".join(row.said):
        assert not any(item["type"] == "FailureTarget" for item in found["conditions"]) or "Failed=True" in row.said[0]
    # What an API server takes, and in one order.
    RolloutJobStatus.model_validate(found)
    order = [CONDITION_TYPES.index(item["type"]) for item in found["conditions"]]
    assert order == sorted(order)
    # Said once, it is not said again.
    again = compute_status(compute_facts(job(**row.spec), raw(found), row.facts, SETTINGS, at(row.seconds)))
    if row.phase not in {"Succeeded", "Failed"}:
        assert json.dumps(again) == json.dumps(found)


def test_there_are_rows_enough() -> None:
    assert len(ROWS) >= 40
    assert len({row.name for row in ROWS}) == len(ROWS)


def run(status: dict[str, Any], facts: Observed, seconds: float, **spec: Any) -> dict[str, Any]:
    return compute_status(compute_facts(job(**spec), raw(status), facts, SETTINGS, at(seconds)))


def running(*shards: tuple[int, int, int]) -> Observed:
    """A running job whose shards say (shard, trajectories, planned)."""
    progress = {
        shard: PodProgress(
            shard=shard,
            trajectories=count,
            turns=2 * count,
            generated_tokens=10 * count,
            reward_sum=count / 2,
            planned=planned,
        )
        for shard, count, planned in shards
    }
    pods = [pod("workers", str(shard), shard=shard) for shard in progress]
    return observed(deployment(2), workers_job(active=len(pods)), pods=pods, progress=progress)


def test_progress_is_summed_and_planned_shards_are_estimated() -> None:
    found = run(WITH_WORKERS, running((0, 3, 10), (1, 5, 10)), 60)["progress"]
    assert found == {
        "trajectories": 40,
        "completed": 8,
        "failed": 0,
        "dropped": 0,
        "turns": 16,
        "generatedTokens": 80,
        "percentage": 20,
        "meanReward": 0.5,
        "lastUpdated": stamp(60),
    }


def test_progress_is_written_at_most_every_fifteen_seconds() -> None:
    first = run(WITH_WORKERS, running((0, 3, 10)), 60)
    assert run(first, running((0, 4, 10)), 74.9) == first
    later = run(first, running((0, 4, 10)), 75)
    assert (later["progress"]["completed"], later["progress"]["lastUpdated"]) == (4, stamp(75))


def test_what_is_not_progress_is_written_at_once_and_progress_with_it() -> None:
    first = run(WITH_WORKERS, running((0, 3, 10)), 60)
    later = run(first, running((0, 4, 10)), 61, suspend=True)
    assert later["phase"] == "Suspended"
    assert later["progress"]["completed"] == 4


def test_progress_never_falls_when_a_pod_is_not_heard() -> None:
    first = run(WITH_WORKERS, running((0, 3, 10), (1, 3, 10)), 60)
    later = run(first, running((0, 4, 10)), 90)["progress"]
    assert later == {**first["progress"], "lastUpdated": stamp(90)}


def test_a_shard_that_is_cut_off_keeps_its_numbers_while_others_go_on() -> None:
    """Its pod is gone, or its successor has not counted yet: what the others do is seen all the same."""
    facts = running((0, 3, 10), (1, 5, 10))
    first = run(WITH_WORKERS, replace(facts, counted=facts.progress), 60)
    for now in (running((0, 6, 10)), running((0, 6, 10), (1, 0, 0))):
        later = run(first, replace(now, counted={**facts.progress, 0: now.progress[0]}), 90)["progress"]
        assert (later["completed"], later["turns"], later["generatedTokens"]) == (11, 22, 110)


def test_a_shard_is_counted_once_by_what_is_most() -> None:
    message = json.dumps({"shard": 0, "trajectories": 2, "failed": 1, "dropped": 1, "reward_sum": 1, "planned": 10})
    less = json.dumps({"shard": 0, "trajectories": 1, "planned": 10})
    pods = [failed_pod(0, 1, less, 1), failed_pod(0, 75, message, 2)]
    facts = observed(deployment(2), workers_job(completions=1, active=1), pods=pods)
    found = run(WITH_WORKERS, facts, 60)["progress"]
    assert (found["completed"], found["failed"], found["dropped"], found["percentage"]) == (2, 1, 1, 40)


def test_messages_of_strangers_are_borne() -> None:
    for message in (
        "[]",
        '"x"',
        '{"trajectories": "many"}',
        '{"trajectories": 1e999, "reward_sum": 1e999}',
        "{",
        "\x00",
    ):
        facts = observed(
            deployment(2),
            workers_job(active=1),
            finish_job(conditions=job_condition("Complete")),
            pods=[failed_pod(0, 1, message), *finished(0, message)],
        )
        RolloutJobStatus.model_validate(run(WITH_WORKERS, facts, 60))
        RolloutJobStatus.model_validate(run(FINISHING, facts, 60))


def test_the_finish_pod_settles_the_numbers() -> None:
    message = json.dumps(
        {
            "trajectories": 30,
            "failed": 2,
            "dropped": 8,
            "planned": 40,
            "mean_reward": 0.25,
            "environments": {
                "sliding_puzzle": {"trajectories": 30, "failed": 2, "mean_reward": 0.25, "pass_at_1": 0.2},
                "unknown": {"trajectories": 1},
            },
            "cause": "",
        }
    )
    facts = observed(finish_job(conditions=job_condition("Complete")), pods=finished(0, message))
    before = run(WITH_WORKERS, running((0, 9, 10)), 60)
    before["conditions"] = FINISHING["conditions"]
    found = run(before, facts, 61, rollout={"maxFailedFraction": 0.5})
    assert found["phase"] == "Succeeded"
    assert found["completionTime"] == stamp(61)
    assert found["progress"]["completed"] == 30
    assert found["progress"]["percentage"] == 100
    assert found["progress"]["turns"] == 18
    assert found["progress"]["meanReward"] == 0.25
    assert found["results"] == {
        "trajectories": 30,
        "failed": 2,
        "dropped": 8,
        "meanReward": 0.25,
        "environments": [{"name": "sliding_puzzle", "trajectories": 30, "failed": 2, "meanReward": 0.25}],
    }
    assert found["summary"]["progress"] == "30/40"


def at_pace(*looks: tuple[float, int], status: dict[str, Any] = WITH_WORKERS) -> dict[str, Any]:
    """The status after looks at one shard of 100 trajectories: (seconds, those that are done)."""
    for seconds, done in looks:
        item = running((0, done, 100))
        item.children["Job", "puzzle-workers"]["spec"]["completions"] = 1
        status = run(status, item, seconds, workers={"shards": 1})
    return status


def remaining(*looks: tuple[float, int]) -> int | None:
    found: int | None = at_pace(*looks)["progress"].get("estimatedSecondsRemaining")
    return found


def test_the_remaining_time_follows_the_pace() -> None:
    assert remaining((20, 0)) is None
    assert remaining((20, 0), (40, 10)) == 360
    # 30 in 60 seconds, whenever it was looked at.
    assert remaining((20, 0), (40, 10), (60, 30)) == 140
    # It is not written again by time alone.
    assert remaining((20, 0), (40, 10), (60, 30), (1060, 30)) == 140
    third = at_pace((20, 0), (40, 10), (60, 30))
    facts = running((0, 30, 100))
    facts.children["Job", "puzzle-workers"]["spec"]["completions"] = 1
    assert run(third, facts, 500, workers={"shards": 1}) == third
    assert "estimatedSecondsRemaining" not in run(third, facts, 501, suspend=True)["progress"]


def test_a_slow_start_is_forgotten_as_soon_as_it_is_made_up_for() -> None:
    """The first of many that run at once come after all of their turns; seen on a cluster: 42 minutes for one."""
    assert remaining((15, 0), (30, 1), (45, 20), (60, 40)) == pytest.approx(60 * 60 / 40, abs=3)


def test_the_remaining_time_grows_while_turns_are_played_and_nothing_ends() -> None:
    before = at_pace((20, 0), (40, 40))
    facts = running((0, 40, 100))
    facts.children["Job", "puzzle-workers"]["spec"]["completions"] = 1
    live = facts.progress[0]
    facts = replace(facts, progress={0: replace(live, turns=live.turns + 9)})
    after = run(before, facts, 80, workers={"shards": 1})
    assert (before["progress"]["estimatedSecondsRemaining"], after["progress"]["estimatedSecondsRemaining"]) == (
        60,
        120,
    )


def test_a_pace_is_forgotten_in_a_quarter_of_an_hour() -> None:
    looks = [(900.0 * number, 10 * number) for number in range(1, 4)]
    assert remaining(*looks, (3600.0, 60)) == pytest.approx(40 / 30 * 900, abs=2)


def test_a_message_that_only_repeats_itself_does_not_grow() -> None:
    """The kubelet backs off while another pod was preempted: what is told of that is not told twice."""
    pulling = waiting("ErrImagePull", "manifest unknown")
    backing_off = waiting("ImagePullBackOff", 'Back-off pulling image "x:1"')
    first, *later = [
        replace(observed(deployment(1), pods=engine(**container)), departed=[preempted(pod("generation", "b"))])
        for container in (pulling, backing_off, backing_off)
    ]
    status = compute_status(compute_facts(job(), raw(BEGUN), first, SETTINGS, at(60)))
    told = next(item for item in status["conditions"] if item["type"] == "GenerationReady")
    assert "manifest unknown" in told["message"]
    assert told["message"].count("PreemptionByScheduler") == 1
    for number, facts in enumerate(later):
        status = compute_status(compute_facts(job(), raw(status), facts, SETTINGS, at(120 + 60 * number)))
        assert next(item for item in status["conditions"] if item["type"] == "GenerationReady") == told


def test_a_lost_engine_is_not_told_of_when_another_one_is_ready_in_its_place() -> None:
    gone = leaving(on_lost_node(pod("generation", container={"ready": True})))
    facts = observed(deployment(2), workers_job(active=1), pods=[gone, pod("workers", shard=0)])
    [said] = [
        item["message"]
        for item in run(WITH_WORKERS, facts, 60, generation={"replicas": 2})["conditions"]
        if item["type"] == "GenerationReady"
    ]
    assert said == "2 of 2 replicas are ready"


def replica(name: str, address: str) -> Object:
    """An engine that its probes find ready."""
    found = pod("generation", name, conditions=[{"type": "Ready", "status": "True"}])
    return {**found, "spec": {"nodeName": f"node-{name}"}, "status": {**found["status"], "podIP": address}}


def server(address: str, second: int, requests: int = 0) -> UnansweringReplica:
    url = f"http://{address}:8000"
    since, problem = f"2026-11-27T12:03:{second}Z", f"{url}: no answer within 6 s"
    return UnansweringReplica(url=url, since=since, problem=problem, requests=requests)


def heard(*reports: tuple[int | None, list[UnansweringReplica]], pods: list[Object] | None = None) -> Observed:
    """A job with two engines that are ready, and what its workers say of them: how many answer, and which do not."""
    progress = {
        shard: PodProgress(shard=shard, answering=answering, unanswering=tuple(silent))
        for shard, (answering, silent) in enumerate(reports)
    }
    workers = [pod("workers", str(shard), shard=shard) for shard in progress]
    engines = [replica("a", "10.0.0.1"), replica("b", "10.0.0.2")] if pods is None else pods
    return observed(deployment(2), workers_job(active=len(workers)), pods=[*engines, *workers], progress=progress)


def generation_ready(status: Mapping[str, Any]) -> dict[str, Any]:
    return next(item for item in status["conditions"] if item["type"] == "GenerationReady")


TWO: dict[str, Any] = {"generation": {"replicas": 2}}


def test_a_replica_that_is_ready_and_does_not_answer_the_workers_is_told_of_until_it_does() -> None:
    silent = [server("10.0.0.2", 20, 20)], [server("10.0.0.2", 11, 21)]
    found = run(WITH_WORKERS, heard((1, silent[0]), (1, silent[1]), (2, []), (None, [])), 60, **TWO)
    said = generation_ready(found)
    assert (said["status"], said["reason"]) == ("True", "Ready")
    assert said["message"] == (
        "2 of 2 replicas are ready; pod puzzle-generation-b on node node-b does not answer the workers since "
        "2026-11-27T12:03:11Z (2 of 3 workers say so, 41 requests were in flight there): http://10.0.0.2:8000: "
        "no answer within 6 s"
    )
    assert found["summary"]["reason"] == "Running"
    later = generation_ready(run(found, heard((2, []), (2, []), (2, [])), 90, **TWO))
    assert (later["message"], later["lastTransitionTime"]) == ("2 of 2 replicas are ready", said["lastTransitionTime"])


def test_a_job_whose_workers_get_no_answer_from_any_replica_waits_for_one() -> None:
    both = [server("10.0.0.1", 11, 4), server("10.0.0.2", 20, 5)]
    found = run(WITH_WORKERS, heard((0, both), (0, both[1:])), 60, **TWO)
    said = generation_ready(found)
    assert (said["status"], said["reason"]) == ("False", "NotAnswering")
    assert said["message"].startswith(
        "2 of 2 replicas are ready; no replica answers the workers since 2026-11-27T12:03:20Z; they wait for one; "
        "pod puzzle-generation-a on node node-a does not answer the workers since 2026-11-27T12:03:11Z (1 of 2 workers"
    )
    # The column of `kubectl get`, an event, and no deadline of what starts; the workers go on.
    assert (found["phase"], found["summary"]["reason"]) == ("Running", "NotAnswering")
    assert [event.reason for event in transitions(WITH_WORKERS, found)] == ["NotAnswering"]
    assert startup_deadlines(job(**TWO), found) == {}
    # One of two is ready when it answers again: as before, that is enough.
    facts = replace(
        heard((1, []), (1, [])), children={**heard().children, ("Deployment", "puzzle-generation"): deployment(1)}
    )
    again = generation_ready(run(found, facts, 90, **TWO))
    assert (again["status"], again["reason"]) == ("True", "Ready")


def test_one_worker_that_gets_answers_is_enough() -> None:
    both = [server("10.0.0.1", 11), server("10.0.0.2", 20)]
    said = generation_ready(run(WITH_WORKERS, heard((0, both), (1, both[:1])), 60, **TWO))
    assert said["reason"] == "Ready"
    assert "(2 of 2 workers say so)" in said["message"]


def test_of_a_pod_that_is_gone_or_whose_node_is_lost_kubernetes_tells() -> None:
    lost = on_lost_node(pod("generation", container={"ready": True}))
    lost["status"]["podIP"] = "10.0.0.1"
    gone, there = server("10.0.0.9", 20), replica("b", "10.0.0.2")
    facts = heard((1, [server("10.0.0.1", 11), gone]), pods=[lost, there])
    assert generation_ready(run(WITH_WORKERS, facts, 60, **TWO))["message"] == "2 of 2 replicas are ready"


def test_an_external_endpoint_that_does_not_answer_is_told_of_by_its_url() -> None:
    external = {"generation": {"backend": "External", "external": {"url": "http://gpu-7:8000"}, "engine": None}}
    status = {**WITH_WORKERS, "generation": {"backend": "External"}}
    silent = UnansweringReplica(url="http://gpu-7:8000", since="2026-11-27T12:03:11Z", problem="connection refused")
    facts = heard((0, [silent]), pods=[])
    found = run(status, facts, 60, **external)
    said = generation_ready(found)
    assert (said["status"], said["reason"]) == ("False", "NotAnswering")
    assert "; http://gpu-7:8000 does not answer the workers since 2026-11-27T12:03:11Z: connection" in said["message"]
    again = generation_ready(run(found, heard((1, []), pods=[]), 90, **external))
    assert (again["status"], again["reason"]) == ("True", "External")


def test_what_departed_workers_said_is_counted() -> None:
    message = json.dumps({"shard": 0, "trajectories": 7, "failed": 1, "planned": 10, "turns": 30, "cause": "stopped"})
    gone = pod("workers", "0", phase="Failed", shard=0, container=terminated(75, message))
    facts = replace(observed(workers_job(suspend=True)), departed=[gone])
    found = run(WITH_WORKERS, facts, 60, suspend=True)["progress"]
    assert (found["completed"], found["failed"], found["turns"]) == (7, 1, 30)


def test_suspended_is_true_when_nothing_runs_any_more() -> None:
    worker = pod("workers", "0", shard=0)
    ending = run(WITH_WORKERS, observed(deployment(2), workers_job(suspend=True), pods=[worker]), 60, suspend=True)
    found = model.condition(ending, "Suspended")
    assert (found["status"], found["reason"]) == ("False", "Suspending")
    assert "1 workers are finishing trajectories in flight" in found["message"]
    gone = run(ending, observed(workers_job(suspend=True)), 90, suspend=True)
    assert model.condition(gone, "Suspended")["status"] == "True"
    # Resumed before it was suspended, it has its time anew all the same.
    assert run(ending, observed(workers_job()), 70)["startTime"] == stamp(70)


def test_the_workers_column_counts_pods_that_run() -> None:
    dying = pod("workers", "1", shard=1)
    dying["metadata"]["deletionTimestamp"] = stamp(50)
    pods = [pod("workers", "0", phase="Pending", shard=0), dying, pod("workers", "2", shard=2)]
    found = run(WITH_WORKERS, observed(deployment(2), workers_job(active=3), pods=pods), 60)
    assert found["summary"]["workers"] == "1/2"
    assert found["workers"]["active"] == 3


def test_the_number_of_trajectories_is_known_from_the_check() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    said = terminated(0, json.dumps({"planned": 4096, "commit": commit, "done": True, "cause": ""}))
    facts = observed(
        check_job(conditions=job_condition("Complete")), pods=[pod("check", phase="Succeeded", container=said)]
    )
    before = {"startTime": stamp(0), "conditions": [condition("WorkersChecked", False, "Checking")]}
    checked = run(before, facts, 10)
    assert checked["progress"]["trajectories"] == 4096
    assert "4096 trajectories in 4 shards" in model.condition(checked, "WorkersChecked")["message"]
    assert checked["generation"]["modelCommit"] == commit
    assert run(checked, running((0, 10, 100)), 60)["generation"]["modelCommit"] == commit
    # A resumed job may have another model.
    suspended = run(checked, observed(), 60, suspend=True)
    assert "modelCommit" not in run(suspended, observed(), 61, suspend=True)["generation"]
    # Nor does an estimate from a few shards replace it.
    assert run(checked, running((0, 10, 100)), 60)["progress"]["trajectories"] == 4096


INFO = '{"time": "2026", "level": "info", "message": "shard 0: 52 of 500 trajectories are stored"}'
TRACEBACK = 'Traceback (most recent call last):\n  File "x"\nModuleNotFoundError: No module named y'


@pytest.mark.parametrize(
    ("code", "reason", "message", "words"),
    [
        (137, "Error", f"{INFO}\n[t] PyTorch was not found", "killed by SIGKILL (exit code 137)"),
        (139, "Error", "", "killed by SIGSEGV (exit code 139)"),
        (132, "Error", '{"level": "error", "message": "it died"}', "killed by SIGILL (exit code 132): it died"),
        (137, "OOMKilled", INFO, "out of memory (OOMKilled); raise the memory limit. "),
        (1, "Error", TRACEBACK, TRACEBACK),
        (1, "Error", f"{INFO}\n{TRACEBACK}", "ModuleNotFoundError: No module named y"),
        (1, "Error", '{"planned": 3, "cause": "OSError: disk full"}', "OSError: disk full"),
        (1, "Error", '{"planned": 3, "cause": ""}', "exit code 1"),
        (255, "Error", "", "exit code 255"),
        (2, "StartError", "", "exit code 2 (StartError)"),
    ],
)
def test_ends_are_told_in_words(code: int, reason: str, message: str, words: str) -> None:
    assert describe_exit(ContainerExit("p", code, reason, "", message)) == words.strip()


def test_transition_times_move_with_the_status_only() -> None:
    first = run({}, observed(deployment()), 0)
    second = run(first, observed(deployment(), pods=engine(**waiting("ErrImagePull", "no"))), 100)
    ready = run(second, observed(deployment(2)), 200)
    times = [model.condition(item, "GenerationReady")["lastTransitionTime"] for item in (first, second, ready)]
    assert times == [stamp(0), stamp(0), stamp(200)]


def test_the_start_time_is_that_of_the_resumption() -> None:
    fresh = run({}, observed(), 0, suspend=True)
    assert "startTime" not in fresh
    resumed = run(fresh, observed(), 50)
    assert resumed["startTime"] == stamp(50)
    assert run(resumed, observed(deployment(2)), 70)["startTime"] == stamp(50)
    again = run(resumed, observed(), 80, suspend=True)
    assert again["startTime"] == stamp(50)
    assert run(again, observed(), 90)["startTime"] == stamp(90)


@pytest.mark.parametrize("end", ["Complete", "Failed"])
def test_what_is_over_says_nothing_more(end: str) -> None:
    status = {"phase": "x", "conditions": [condition(end, True, "X")], "observedGeneration": 1}
    assert run(status, observed(deployment(2), workers_job(active=4)), 999, suspend=True) == status
    edited = compute_status(compute_facts(job(suspend=True), raw(status, generation=2), observed(), SETTINGS, at(1)))
    assert edited == {**status, "observedGeneration": 2}


@pytest.mark.parametrize("metadata", [{}, {"deletionTimestamp": stamp(0)}])
def test_somebody_elses_job_is_left_alone(metadata: dict[str, Any]) -> None:
    spec = {} if metadata else {"managedBy": "kueue.x-k8s.io/multikueue"}
    assert compute_status(
        compute_facts(job(**spec), raw({"phase": "Any"}, **metadata), observed(), SETTINGS, at(0))
    ) == {"phase": "Any"}


def test_deadlines() -> None:
    spec: dict[str, Any] = {"activeDeadlineSeconds": 3600, "ttlSecondsAfterFinished": 100}
    first = run({}, observed(), 0, **spec)
    # What was kept back for a while, then the startup, then the whole job.
    assert next_deadline(job(**spec), first, at(1)) == 14
    assert next_deadline(job(**spec), first, at(100)) == 1700
    # The check, the engines, then the workers have as much time each.
    checked = run(first, observed(check_job(conditions=job_condition("Complete"))), 100, **spec)
    assert next_deadline(job(**spec), checked, at(200)) == 1700
    ready = run(checked, observed(deployment(2)), 1700, **spec)
    assert next_deadline(job(**spec), ready, at(1800)) == 1700
    running = [pod("workers", "0", shard=0)]
    started = run(ready, observed(deployment(2), workers_job(active=1), pods=running), 1750, **spec)
    # Of a job that runs nothing is due but its own end.
    assert next_deadline(job(**spec), started, at(1800)) == 1800
    assert next_deadline(job(**spec), started, at(3599)) == 1
    # With all trajectories stored, their aggregation has startupDeadlineSeconds more.
    assert next_deadline(job(**spec), started, at(3700)) == 1700
    over = {"conditions": [condition("Complete", True, "X", seconds=10)]}
    assert next_deadline(job(**spec), over, at(20)) == 90
    assert next_deadline(job(**spec), over, at(200)) == 0
    assert next_deadline(job(), over, at(20)) is None
    assert next_deadline(job(**spec), {"conditions": [TARGET]}, at(20)) is None
    suspended = run({}, observed(), 0, suspend=True, **spec)
    assert next_deadline(job(suspend=True, **spec), suspended, at(60)) is None


SECRETS: list[tuple[str, str]] = [
    ("token hf_abcdefGHIJKL in use", "token [redacted] in use"),
    ("Authorization: Bearer abc.def-123456", "Authorization: Bearer [redacted]"),
    ("key sk-proj-abcdef123456", "key [redacted]"),
    ("AKIAABCDEFGHIJKLMNOP", "[redacted]"),
    ("postgres://user:pa55w0rd@db/x", "postgres://[redacted]@db/x"),
    ("aws_secret_access_key=abcdefghij", "aws_secret_access_key=[redacted]"),
    ('{"api_key": "0123456789"}', '{"api_key": "[redacted]"}'),
    ("max_tokens: 512 is too many", "max_tokens: 512 is too many"),
    ("unexpected token in JSON at position 5", "unexpected token in JSON at position 5"),
    ("task-force of desk-lamps", "task-force of desk-lamps"),
]


@pytest.mark.parametrize(("text", "expected"), SECRETS)
def test_secrets_do_not_stand_in_a_status(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_long_words_are_capped() -> None:
    assert len(redact("x" * 5000)) == 1000


NEW_WEIGHTS = {"uri": "/models/2", "version": "2"}


@pytest.mark.parametrize(
    ("served", "expected", "version", "words"),
    [
        ({}, False, None, "0 of 2"),
        ({"a": ServedWeights("1"), "b": ServedWeights("1")}, False, "1", "0 of 2"),
        ({"a": ServedWeights("2"), "b": ServedWeights("1")}, False, None, "1 of 2"),
        ({"a": ServedWeights("2"), "b": ServedWeights("1", "no such file")}, False, None, "no such file"),
        # One of the two has not told yet.
        ({"a": ServedWeights("2")}, False, None, "1 of 2"),
        ({"a": ServedWeights("2"), "b": ServedWeights(None)}, False, None, "1 of 2"),
        ({"a": ServedWeights("2"), "b": ServedWeights("2")}, True, "2", "all replicas serve version 2"),
    ],
)
def test_weights_are_served_when_all_replicas_say_so(
    served: dict[str, ServedWeights], expected: bool, version: str | None, words: str
) -> None:
    facts = observed(deployment(2), workers_job(), served=served)
    found = run(WITH_WORKERS, facts, 0, weights=NEW_WEIGHTS)
    told_of = condition_of(found, "WeightsServed")
    assert told_of["status"] == str(expected)
    assert words in told_of["message"]
    assert found["generation"].get("policyVersion") == version
    RolloutJobStatus.model_validate(found)


def test_versions_are_known_without_weights_and_forgotten_with_the_engines() -> None:
    own = {"a": ServedWeights("0"), "b": ServedWeights("0")}
    found = run(WITH_WORKERS, observed(deployment(2), workers_job(), served=own), 0)
    assert found["generation"]["policyVersion"] == "0"
    assert not condition_of(found, "WeightsServed")
    # A restarted operator has heard nothing yet.
    again = run(found, observed(deployment(2), workers_job()), 60)
    assert again["generation"]["policyVersion"] == "0"
    # A replica that is new changes nothing.
    more = observed(deployment(2), workers_job(), served={"a": ServedWeights("0")})
    assert run(found, more, 60)["generation"]["policyVersion"] == "0"
    stopped = run(found, observed(deployment(2), workers_job()), 60, suspend=True)
    assert "policyVersion" not in stopped["generation"]


def condition_of(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((item for item in status["conditions"] if item["type"] == kind), {})
