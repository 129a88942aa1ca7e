"""Facts about a job: its stage and the reasons for it. Pure: equal observations give equal facts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Final, NamedTuple

from kuberoll_api import conditions, contract
from kuberoll_api.conditions import Reason
from kuberoll_api.contract import FinishMessage
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.output_claims import claim_problem
from kuberoll_api.output_location import InvalidOutput, output_of
from kuberoll_operator import names, queueing
from kuberoll_operator.backends import BACKENDS, Backend, GenerationState, backend_of, runs_in_job
from kuberoll_operator.backends.pods import (
    ContainerExit,
    describe_exit,
    holds_any,
    is_disrupted,
    is_running,
    last_exit,
    pods_of,
    redact,
    refusal,
    shard_of,
)
from kuberoll_operator.deadlines import active_deadline, idle_deadline, startup_deadlines
from kuberoll_operator.kube.resources import SANDBOX_CLAIMS
from kuberoll_operator.messages import finish_message, worker_message
from kuberoll_operator.model import Key, Object, Observed, Ref, condition, indexes, is_true, status_of, was_ready
from kuberoll_operator.queueing import Quota
from kuberoll_operator.render.hosting import Hosting
from kuberoll_operator.render.policy_access import policy_access_problem
from kuberoll_operator.render.sandbox_pods import sandboxed
from kuberoll_operator.render.sandbox_quota import quota_problem
from kuberoll_operator.render.sandboxes import any_network, sandbox_problem
from kuberoll_operator.render.servers import claim_names, claimed, deployed, served
from kuberoll_operator.servers import ServerState, server_states, service_states, unready
from kuberoll_operator.settings import Settings

FATAL_WRITE_ERRORS: Final = frozenset({Reason.INVALID_TEMPLATE})
_SHARDS_NAMED: Final = 20
# Kubernetes allows 256 KiB for all annotations of an object.
_CLAIM_CHARACTERS: Final = 128 * 1024


class Stage(Enum):
    """Stage of a job's life."""

    UNMANAGED = "managed by another controller, or being deleted"
    OVER = "Complete or Failed"
    FAILING = "a cause of failure is known; whatever holds resources is being removed"
    CLEARING = "all work is done; the last GPUs are being released"
    SUSPENDED = "stopped by the user"
    QUEUED = "without quota: waiting for it, or giving it back"
    CHECKING = "the workers' inputs are being checked, before any engine is started"
    FINISHING = "all shards are done and are being aggregated"
    RUNNING = "workers may run"
    STARTING = "waiting for generation and services"


STOPPED: Final = frozenset({Stage.SUSPENDED, Stage.QUEUED})
"""Stages in which nothing may run, but the job can go on later."""

UNDER_WAY: Final = frozenset({Stage.STARTING, Stage.RUNNING})
"""Stages in which generation runs or is starting."""


class Cause(NamedTuple):
    """Reason of a state: one of `conditions.Reason`, with a message for people."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """State of the workers' Job.

    Attributes:
        count: Number of shards of the dataset.
        exists: True if the Job exists and is not being deleted.
        started:True if it may run pods: it is not suspended.
        succeeded: Number of shards that are done.
        failed: Shards that failed permanently.
        active: Number of running pods.
        done: True if no shard needs the policy any more.
        exits:Last exit of a worker container, by shard.
        problem: Why the job fails; None if it does not.
    """

    count: int
    exists: bool = False
    started: bool = False
    succeeded: int = 0
    failed: Sequence[int] = ()
    active: int = 0
    done: bool = False
    exits: Mapping[int, ContainerExit]
    problem: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """State of the check Job.

    Attributes:
        done: True if engines may be started.
        planned: Number of trajectories that the job will produce; None if the check has not reported it.
        commit: The commit of the run's model at the hub; None: it has none, or it is unknown.
        problem: Why the job fails; None if it does not.
    """

    done: bool
    planned: int | None = None
    commit: str | None = None
    problem: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """State of the finish Job.

    Attributes:
        message: Its pod's termination message; None if there is none yet.
        done: True if everything is aggregated.
        problem: Why the job fails; None if it does not.
    """

    message: FinishMessage | None = None
    done: bool = False
    problem: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that plan and status decide by.

    Attributes:
        job: The validated object.
        raw: The live object: its metadata and status.
        now: Time of the observation.
        backend: Name of the generation backend.
        hosting: How the policy is hosted.
        ready: True if generation is ready: from when all replicas are, for as long as one is.
        servers: States of the environments' servers that the operator starts, in the order of the job.
        services: States of the services, in the order of the job.
        failure: First cause for which the job fails or has failed.
        name_conflict:Why a child cannot be written: an object of another owner has its name.
        quota: The job's share of a queue's quota.
        released: True if no pod of the job holds resources any more.
        idle: True if the engines are to be given back, because no worker has run for a while.
        first: The older job for which this one steps back: it holds no engines and has no workers; None: it goes on.
    """

    job: RolloutJob
    raw: Object
    observed: Observed
    settings: Settings
    now: datetime
    stage: Stage
    backend: str
    hosting: Hosting
    generation: GenerationState
    ready: bool
    servers: tuple[ServerState, ...]
    services: tuple[ServerState, ...]
    shards: Shards
    check: Check
    finish: Finish
    failure: Cause | None
    name_conflict: Cause | None
    quota: Quota
    released: bool
    idle: bool = False
    first: Key | None = None

    @property
    def wants_engines(self) -> bool:
        """True if engines and services are to run."""
        return self.stage in UNDER_WAY and not self.idle and self.first is None


def compute_facts(job: RolloutJob, raw: Object, observed: Observed, settings: Settings, now: datetime) -> Facts:
    """Compute the facts about a job from one observation.

    Args:
        job: The validated object.
        raw: The live object: its metadata and status.
    """
    status = status_of(raw)
    name = backend_of(job, status, kuberay=settings.kuberay)
    backend = BACKENDS[name]
    quota = queueing.quota_of(job, workload_of(job, raw, observed), observed.quota, settings)
    engines = quota.assignments.get(names.GENERATION)
    generation = backend.state(job, observed, paid_for=None if engines is None else engines.count)
    shards = _shards(job, raw, observed)
    check = _check(job, raw, observed, name, generation=generation, shards=shards)
    end = _finish(job, raw, observed)
    ready = _is_ready(generation, status)
    services = tuple(service_states(job, observed))
    failure = _failure(
        job,
        raw,
        observed,
        name,
        settings,
        now,
        generation=generation,
        ready=ready,
        shards=shards,
        check=check,
        finish=end,
        quota=quota,
    )
    stage = _stage(
        job,
        raw,
        ready=ready,
        served_now=unready(services) is None,
        shards=shards,
        check=check,
        finish=end,
        failure=failure,
        quota=quota,
    )
    first = observed.first if stage in UNDER_WAY and not _any_worker_runs(observed) else None
    return Facts(
        job=job,
        raw=raw,
        observed=observed,
        settings=settings,
        now=now,
        stage=stage if first is None else Stage.STARTING,
        backend=name,
        hosting=backend.hosting(job, raw["metadata"]["namespace"], settings),
        generation=generation,
        ready=ready,
        servers=tuple(server_states(job, observed, settings)),
        services=services,
        shards=shards,
        check=check,
        finish=end,
        failure=failure,
        name_conflict=_name_conflict(job, raw, observed, backend),
        quota=quota,
        released=generation.released and not holds_any(observed.pods),
        idle=_is_idle(job, status, observed, shards, settings, now),
        first=first,
    )


def _is_idle(
    job: RolloutJob, status: Mapping[str, Any], observed: Observed, shards: Shards, settings: Settings, now: datetime
) -> bool:
    deadline = idle_deadline(job, status, settings.idle_engines_seconds)
    if deadline is None or now < deadline or not shards.started or shards.done:
        return False
    return not _any_worker_runs(observed)


def _any_worker_runs(observed: Observed) -> bool:
    return any(map(is_running, pods_of(observed.pods, names.WORKERS)))


def spec_problem(job: RolloutJob, backend: str, settings: Settings) -> str | None:
    """Reason why a valid job cannot run in this cluster, with the field and the remedy; None if it can."""
    try:
        output_of(job.spec.output.uri)
    except InvalidOutput as error:
        return str(error)
    if (problem := sandbox_problem(job, settings)) is not None:
        return problem
    queued = queueing.queue_of(job, settings) is not None
    if queued and (problem := quota_problem(job)) is not None:
        return problem
    for number, spec in served(job):
        if spec.used_services:
            return (
                f"spec.environments[{number}].isolation: the servers of environment {spec.name} do not reach the "
                f"service {spec.used_services[0]}, which it uses; use Process or Inline"
            )
    if (problem := policy_access_problem(job)) is not None:
        return problem
    for number, spec, _ in claimed(job):
        if spec.uses_policy:
            return (
                f"spec.environments[{number}].remote.sandbox: claimed sandboxes of environment {spec.name} do not get "
                "the policy's address and token, which it uses; remove remote.sandbox, or use Process or Inline"
            )
        if len(json.dumps(spec.config)) > _CLAIM_CHARACTERS:
            return (
                f"spec.environments[{number}].config: reaches claimed sandboxes in an annotation, and is longer than "
                f"{_CLAIM_CHARACTERS} characters as JSON; have the SandboxTemplate's image contain what it needs"
            )
    return BACKENDS[backend].problem(job, settings)


def _stage(
    job: RolloutJob,
    raw: Object,
    *,
    ready: bool,
    served_now: bool,
    shards: Shards,
    check: Check,
    finish: Finish,
    failure: Cause | None,
    quota: Quota,
) -> Stage:
    status = status_of(raw)
    if job.spec.managed_by not in {None, names.MANAGED_BY} or raw["metadata"].get("deletionTimestamp"):
        return Stage.UNMANAGED
    if is_true(status, conditions.COMPLETE) or is_true(status, conditions.FAILED):
        return Stage.OVER
    if failure is not None:
        return Stage.FAILING
    if finish.done:
        return Stage.CLEARING
    if job.spec.suspend:
        return Stage.SUSPENDED
    if not quota.granted:
        return Stage.QUEUED
    if shards.done:
        return Stage.FINISHING
    if not check.done:
        return Stage.CHECKING
    return Stage.RUNNING if (ready and served_now) or shards.started else Stage.STARTING


def _is_ready(state: GenerationState, status: Mapping[str, Any]) -> bool:
    if state.reason == Reason.EXTERNAL or (state.stable and 0 < state.desired <= state.ready):
        return True
    return state.ready > 0 and was_ready(status)


def _failure(
    job: RolloutJob,
    raw: Object,
    observed: Observed,
    backend: str,
    settings: Settings,
    now: datetime,
    *,
    generation: GenerationState,
    ready: bool,
    shards: Shards,
    check: Check,
    finish: Finish,
    quota: Quota,
) -> Cause | None:
    """The first cause for which the job fails. A cause that has been recorded is never replaced."""
    status = status_of(raw)
    if is_true(status, conditions.FAILURE_TARGET):
        found = condition(status, conditions.FAILURE_TARGET)
        return Cause(found.get("reason", ""), found.get("message", ""))
    if is_true(status, conditions.SUCCESS_CRITERIA_MET):
        return None
    for cause in (shards.problem, check.problem, finish.problem):
        if cause is not None:
            return cause
    if job.spec.suspend or finish.done:
        # A suspended job can still be fixed: its spec may be edited.
        return None
    claim = observed.output_claim
    problem = spec_problem(job, backend, settings)
    problem = problem or claim_problem(job.spec.output.uri, job.spec.workers.replicas, claim)
    if problem is not None:
        return Cause(Reason.INVALID_SPEC, problem)
    for (kind, name), error in sorted(observed.errors.items()):
        if error.reason in FATAL_WRITE_ERRORS:
            return Cause(error.reason, redact(f"{kind} {name}: {error.message}"))
    if not quota.granted:
        # Its engines are not wanted, or are being removed.
        return None
    if not shards.done and generation.refused is not None:
        return Cause(Reason.REFUSED, redact(f"generation: {generation.refused}"))
    refused = refusal(pods_of(observed.pods, names.ENVIRONMENT), "environment")
    if not shards.done and refused is not None:
        return Cause(Reason.REFUSED, redact(f"environment: {refused}"))
    refused = refusal(pods_of(observed.pods, names.SERVICE), "service")
    if not shards.done and refused is not None:
        return Cause(Reason.REFUSED, redact(f"service: {refused}"))
    deadline = active_deadline(job, status, stored=shards.done)
    if deadline is not None and now >= deadline:
        text = f"not done within activeDeadlineSeconds ({job.spec.active_deadline_seconds})"
        if shards.done:
            text += f" and startupDeadlineSeconds ({job.spec.startup_deadline_seconds}) for their aggregation"
            text = f"all trajectories are stored; {text}"
        return Cause(Reason.ACTIVE_DEADLINE, text)
    return None if shards.done else _not_started(job, status, generation, now, ready=ready, check=check)


def _not_started(
    job: RolloutJob,
    status: Mapping[str, Any],
    generation: GenerationState,
    now: datetime,
    *,
    ready: bool,
    check: Check,
) -> Cause | None:
    """The startup deadline that has passed, as a cause; None if none has."""
    parts = [
        (conditions.WORKERS_CHECKED, not check.done, "the check of the workers' inputs did not succeed", ""),
        (conditions.GENERATION_READY, check.done and not ready, "generation was not ready", generation.message),
        (conditions.WORKERS_READY, ready, "no worker ran while generation was ready", ""),
    ]
    deadlines = startup_deadlines(job, status)
    for part, awaited, text, message in parts:
        if awaited and part in deadlines and now >= deadlines[part]:
            # Before a program has started, the last message comes from the scheduler or the kubelet.
            last = message or condition(status, part).get("message", "") or "no cause was given"
            seconds = job.spec.startup_deadline_seconds
            return Cause(Reason.STARTUP_DEADLINE, redact(f"{text} within startupDeadlineSeconds ({seconds}): {last}"))
    return None


def workload_ref(job: RolloutJob) -> Ref:
    return Ref("kueue.x-k8s.io/v1beta2", "Workload", names.workload(job.metadata.name))


def sandboxes_with_network_ref(job: RolloutJob) -> Ref:
    """Reference to the NetworkPolicy of sandboxes that reach everything."""
    return Ref("networking.k8s.io/v1", "NetworkPolicy", names.sandboxes_with_network(job.metadata.name))


def workload_of(job: RolloutJob, raw: Object, observed: Observed) -> Object | None:
    """The job's own Workload; None if there is none."""
    live = observed.get("Workload", names.workload(job.metadata.name))
    return None if live is None or not is_ours(live, job, raw) else live


def is_dying(live: Mapping[str, Any] | None) -> bool:
    """True if an object is being deleted."""
    return live is not None and bool(live["metadata"].get("deletionTimestamp"))


def is_ours(live: Mapping[str, Any], job: RolloutJob, raw: Object) -> bool:
    """True if an object is a child of this very job, not of an earlier one with the same name."""
    metadata = live["metadata"]
    labelled = (metadata.get("labels") or {}).get(names.JOB_LABEL) == job.metadata.name
    owners = metadata.get("ownerReferences") or ()
    return labelled and any(owner.get("uid") == raw["metadata"]["uid"] for owner in owners)


def child_refs(job: RolloutJob, backend: Backend) -> list[Ref]:
    """References to all children that a job may have."""
    name = job.metadata.name
    refs = [
        Ref("v1", "ConfigMap", names.config(name)),
        Ref("networking.k8s.io/v1", "NetworkPolicy", names.workers(name)),
        Ref("v1", "Service", names.workers(name)),
        Ref("batch/v1", "Job", names.check(name)),
        Ref("batch/v1", "Job", names.workers(name)),
        Ref("batch/v1", "Job", names.finish(name)),
        workload_ref(job),
    ]
    for number, _ in served(job):
        refs += [
            Ref("networking.k8s.io/v1", "NetworkPolicy", names.environment(name, number)),
            Ref("v1", "Service", names.environment(name, number)),
        ]
    for number, _ in deployed(job):
        refs += [
            Ref("apps/v1", "Deployment", names.environment(name, number)),
            Ref("v1", "ConfigMap", names.environment(name, number)),
        ]
    for number, spec, _ in claimed(job):
        refs += [Ref(SANDBOX_CLAIMS.api_version, SANDBOX_CLAIMS.kind, item) for item in claim_names(job, number, spec)]
    for number, _ in enumerate(job.spec.services):
        refs += [
            Ref("apps/v1", "Deployment", names.service(name, number)),
            Ref("networking.k8s.io/v1", "NetworkPolicy", names.service(name, number)),
            Ref("v1", "Service", names.service(name, number)),
        ]
    if any(True for _ in sandboxed(job)):
        refs.append(Ref("networking.k8s.io/v1", "NetworkPolicy", names.sandboxes(name)))
    if any_network(job):
        refs.append(sandboxes_with_network_ref(job))
    if backend.in_job:
        refs += [
            Ref("networking.k8s.io/v1", "NetworkPolicy", names.generation(name)),
            Ref("v1", "Service", names.generation(name)),
            Ref("v1", "Service", names.generation_pods(name)),
            *backend.engine_refs(job),
        ]
    return refs


def _name_conflict(job: RolloutJob, raw: Object, observed: Observed, backend: Backend) -> Cause | None:
    for kind, name in sorted((item.kind, item.name) for item in child_refs(job, backend)):
        live = observed.get(kind, name)
        if live is None or is_ours(live, job, raw):
            continue
        owners = [owner for owner in live["metadata"].get("ownerReferences") or () if owner.get("kind") == "RolloutJob"]
        if any(owner.get("name") == job.metadata.name for owner in owners):
            message = f"{kind} {name} belongs to a deleted RolloutJob of the same name; waiting for its removal"
        else:
            message = f"{kind} {name} already exists and does not belong to this job; delete it, or rename the job"
        return Cause(Reason.NAME_TAKEN, message)
    return None


def _shards(job: RolloutJob, raw: Object, observed: Observed) -> Shards:
    status = status_of(raw)
    live = observed.get("Job", names.workers(job.metadata.name))
    if live is not None and (is_dying(live) or not is_ours(live, job, raw)):
        live = None
    spec = job.spec.workers
    recorded = status.get("workers") or {}
    count = recorded.get("shards") or spec.shards or max(1, spec.replicas)
    # Shards that were done stay done, whatever happens to the Job.
    done_before = condition(status, conditions.WORKERS_READY).get("reason") == Reason.SHARDS_DONE
    ends = _last_exits(observed)
    if live is None:
        return Shards(
            count=count, succeeded=recorded.get("succeeded", 0) if done_before else 0, done=done_before, exits=ends
        )
    found = live.get("status") or {}
    count = int(live["spec"].get("completions") or count)
    failed = indexes(str(found.get("failedIndexes") or ""))
    succeeded = int(found.get("succeeded") or 0)
    problem, ended_well = _verdict(live, failed, spec.max_failed_shards, ends, succeeded, count)
    return Shards(
        count=count,
        exists=True,
        started=not live["spec"].get("suspend", False),
        succeeded=succeeded,
        failed=failed,
        active=int(found.get("active") or 0),
        done=done_before or ended_well,
        exits=ends,
        problem=None if done_before else problem,
    )


def _verdict(
    live: Object, failed: Sequence[int], budget: int, ends: Mapping[int, ContainerExit], succeeded: int, count: int
) -> tuple[Cause | None, bool]:
    """Cause of the Job's failure, or None; and True if all its shards are done or within `maxFailedShards`."""
    status = live.get("status") or {}
    if is_true(status, "Complete") or is_true(status, "SuccessCriteriaMet") or succeeded >= count:
        return None, True
    verdict = next((condition(status, kind) for kind in ("FailureTarget", "Failed") if is_true(status, kind)), None)
    if verdict is None:
        return None, False
    reason, words = verdict.get("reason", ""), str(verdict.get("message", ""))
    if reason == "PodFailurePolicy":
        refused = _first_failure(ends, lambda end: end.exit_code == contract.EXIT_REFUSED)
        return Cause(Reason.REFUSED, refused or redact(words)), False
    if reason == "FailedIndexes" and 0 < len(failed) <= budget:
        return None, True
    guilty = {shard: end for shard, end in ends.items() if shard in failed} or ends
    first = _first_failure(guilty, lambda end: end.exit_code not in {0, contract.EXIT_DRAINED}) or redact(words)
    if not failed:
        return Cause(Reason.FAILED_SHARDS, redact(f"the workers' Job failed ({reason}): {first}")), False
    listed = ", ".join(map(str, failed[:_SHARDS_NAMED])) + (", ..." if len(failed) > _SHARDS_NAMED else "")
    text = (
        f"{len(failed)} of {count} shards failed ({listed}), more than workers.maxFailedShards ({budget}) allows; "
        f"the first: {first}"
    )
    return Cause(Reason.FAILED_SHARDS, redact(text)), False


def _first_failure(ends: Mapping[int, ContainerExit], wanted: Callable[[ContainerExit], bool]) -> str | None:
    """Cause of the shard that failed first, among those whose exit matches."""
    found = sorted((end.finished, shard) for shard, end in ends.items() if wanted(end))
    if not found:
        return None
    shard = found[0][1]
    return redact(f"shard {shard}: {describe_exit(ends[shard])}")


def _last_exits(observed: Observed) -> dict[int, ContainerExit]:
    """Last exit of a worker container, by shard; a disruption or a drain only counts if there is no other exit."""
    found: dict[int, tuple[tuple[bool, str, str], ContainerExit]] = {}
    for pod in pods_of(observed.pods, names.WORKERS):
        shard, end = shard_of(pod), last_exit(pod, "worker")
        if shard is None or end is None:
            continue
        rank = (not is_disrupted(pod) and end.exit_code != contract.EXIT_DRAINED, end.finished, end.pod)
        if shard not in found or rank > found[shard][0]:
            found[shard] = rank, end
    return {shard: end for shard, (_, end) in sorted(found.items())}


def _check(
    job: RolloutJob, raw: Object, observed: Observed, backend: str, *, generation: GenerationState, shards: Shards
) -> Check:
    status = status_of(raw)
    recorded = condition(status, conditions.WORKERS_CHECKED)
    # With an external policy no GPUs of ours wait for workers. A job that an older operator started was never checked,
    # and continues.
    needless = not runs_in_job(backend) or (not recorded and (shards.exists or not generation.released))
    if needless or shards.done or recorded.get("status") == "True":
        # Only a check that succeeded has seen this spec.
        known = (status.get("generation") or {}).get("modelCommit") if recorded.get("status") == "True" else None
        return Check(done=True, commit=known)
    live = observed.get("Job", names.check(job.metadata.name))
    if live is None or is_dying(live) or not is_ours(live, job, raw):
        return Check(done=False)
    ends = sorted(
        (end for pod in pods_of(observed.pods, names.CHECK) if (end := last_exit(pod, "worker")) is not None),
        key=lambda end: end.finished,
    )
    found = live.get("status") or {}
    if is_true(found, "Complete"):
        last = next((end for end in reversed(ends) if end.exit_code == 0), None)
        message = worker_message(last)
        return Check(done=True) if message is None else Check(done=True, planned=message.planned, commit=message.commit)
    verdict = next((condition(found, kind) for kind in ("FailureTarget", "Failed") if is_true(found, kind)), None)
    if verdict is None:
        return Check(done=False)
    bad = [end for end in ends if end.exit_code not in {0, contract.EXIT_DRAINED}]
    refused = verdict.get("reason") == "PodFailurePolicy"
    text = describe_exit(bad[-1]) if bad else str(verdict.get("message", ""))
    return Check(done=False, problem=Cause(Reason.REFUSED if refused else Reason.CHECK_FAILED, redact(text)))


def _finish(job: RolloutJob, raw: Object, observed: Observed) -> Finish:
    recorded = is_true(status_of(raw), conditions.SUCCESS_CRITERIA_MET)
    live = observed.get("Job", names.finish(job.metadata.name))
    if live is None or not is_ours(live, job, raw):
        return Finish(done=recorded)
    pods = pods_of(observed.pods, names.FINISH)
    ends = sorted((end for pod in pods if (end := last_exit(pod, "finish")) is not None), key=lambda end: end.finished)
    status = live.get("status") or {}
    if is_true(status, "Failed") or is_true(status, "FailureTarget"):
        bad = [describe_exit(end) for end in ends if end.exit_code != 0]
        words = condition(status, "Failed").get("message") or condition(status, "FailureTarget").get("message", "")
        text = redact(f"aggregation failed: {bad[-1] if bad else words}")
        return Finish(problem=None if recorded else Cause(Reason.FINISH_FAILED, text), done=recorded)
    if not is_true(status, "Complete"):
        return Finish(done=recorded)
    message = finish_message(next((end for end in reversed(ends) if end.exit_code == 0), None))
    problem = None if recorded or message is None else _budget_problem(job, message)
    return Finish(message=message, done=problem is None, problem=problem)


def _budget_problem(job: RolloutJob, message: FinishMessage) -> Cause | None:
    budget = job.spec.rollout.max_failed_fraction
    if message.failed <= budget * message.planned:
        return None
    causes = [message.failure and f"the most frequent cause: {message.failure}", message.cause]
    cause = "".join(f"; {text}" for text in causes if text)
    text = (
        f"{message.failed} of {message.planned} trajectories failed, more than rollout.maxFailedFraction ({budget:g}) "
        f"allows{cause}"
    )
    return Cause(Reason.FAILURE_BUDGET, redact(text))


def is_at_rest(live: Mapping[str, Any]) -> bool:
    """True if a Job creates no more pods: it has ended, or is suspended."""
    ended_already = any(is_true(live.get("status") or {}, kind) for kind in ("Complete", "Failed"))
    return ended_already or bool((live.get("spec") or {}).get("suspend"))
