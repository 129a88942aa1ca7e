"""Reconcile of one job: get, observe, plan, write, report; the same for every trigger."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import ValidationError

from kuberoll_api import conditions
from kuberoll_api.conditions import Reason
from kuberoll_api.manifest.mistakes import explain
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.output_claims import output_claim
from kuberoll_api.paths import Path, format_path
from kuberoll_api.removed import without_removed
from kuberoll_operator import names, queueing
from kuberoll_operator.backends.pods import missing_secrets
from kuberoll_operator.cache import Cache
from kuberoll_operator.deadlines import format_time
from kuberoll_operator.defaults import with_defaults
from kuberoll_operator.facts import compute_facts
from kuberoll_operator.job_reader import JobReader
from kuberoll_operator.kube.apply import CREATE_ONLY_KINDS, Applier
from kuberoll_operator.kube.claim_reader import ClaimReader
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import (
    ApiError,
    Conflict,
    FieldConflict,
    Forbidden,
    Invalid,
    NotLeader,
    QuotaExceeded,
    TooMany,
)
from kuberoll_operator.kube.events import EventContent, Recorder
from kuberoll_operator.kube.quota import QuotaReader
from kuberoll_operator.kube.resources import PODS, ROLLOUT_JOBS, resource_of, resource_of_object
from kuberoll_operator.kube.sign_reader import SignReader
from kuberoll_operator.lost_pods import next_loss
from kuberoll_operator.metrics import Metrics
from kuberoll_operator.model import Key, Object, Observed, Plan, WriteError, is_true, status_of
from kuberoll_operator.mounts import config_map_uses
from kuberoll_operator.observe import observe
from kuberoll_operator.plan import plan
from kuberoll_operator.polling import ReportPoller
from kuberoll_operator.queue import WorkQueue
from kuberoll_operator.removed_fields import lost_event, lost_fields, with_kept
from kuberoll_operator.servers import claim_refs
from kuberoll_operator.settings import Settings
from kuberoll_operator.status.job_status import compute_status, next_deadline
from kuberoll_operator.transitions import transitions
from kuberoll_operator.turns import Turns
from kuberoll_operator.waiting.causes import awaits_start
from kuberoll_operator.waiting.questions import questions

SLOW_SECONDS: Final = 60.0
"""Seconds before an error that somebody has to fix (RBAC, quotas, other field managers) is retried."""

_log = logging.getLogger(__name__)


class Reconciler:
    """Brings the cluster to the state that jobs ask for, one job at a time."""

    def __init__(
        self,
        client: Client,
        cache: Cache,
        progress: ReportPoller,
        recorder: Recorder,
        metrics: Metrics,
        settings: Settings,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client, self._cache, self._progress = client, cache, progress
        self._recorder, self._metrics, self._settings = recorder, metrics, settings
        self._now = now
        self._applier = Applier(client)
        self._quota = QuotaReader(client)
        self._signs = SignReader(client)
        self._claims = ClaimReader(client)
        self._jobs = JobReader(client, cache)
        self._turns = Turns(settings.turn_seconds)
        self._told: dict[Key, tuple[str, int | None]] = {}

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile one job once.

        Returns:
            Seconds until the next reconcile, even without an event; None if only an event requires one.

        Raises:
            ApiError: A failure that may be transient; the job's status is unchanged.
            NotLeader: Another operator may hold the lease.
        """
        try:
            return await self._reconcile(key)
        except (ApiError, NotLeader):
            # It may be due to an outdated version of the job.
            self._jobs.forget(key)
            raise

    async def _reconcile(self, key: Key) -> float | None:
        raw = await self._jobs.read(key)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            # Kubernetes deletes its children; there is no finalizer of ours.
            self._progress.forget(key)
            self._applier.forget_job(key, gone=True)
            self._signs.forget(key)
            self._jobs.forget(key)
            self._turns.forget(key)
            self._told.pop(key, None)
            return None
        if raw["spec"].get("managedBy", names.MANAGED_BY) != names.MANAGED_BY:
            return None
        try:
            given, removed = without_removed(raw)
            job = with_defaults(RolloutJob.model_validate(given), raw, self._settings)
        except ValidationError as error:
            return await self._reject(raw, error)
        lost = [*removed, *lost_fields(raw, job)]
        await self._tell_of_removed(key, raw, lost)
        observed = observe(self._cache, key, raw, self._progress.latest)
        job = with_kept(job, lost, observed.get("Job", names.workers(job.metadata.name)))
        observed = await self._with_quota(job, observed)
        observed = await self._with_output_claim(key, job, observed)
        observed = await self._with_unmountable(key, job, observed)
        observed, next_signs = await self._with_signs(key, observed)
        queued = queueing.queue_of(job, self._settings) is not None
        if queued:
            # Kueue has an order of its own.
            self._turns.forget(key)
        else:
            observed = replace(observed, first=self._turns.first(key, raw, self._now()))
        for name in missing_secrets(observed.pods):
            self._applier.mark_missing(key, name)
        planned = plan(compute_facts(job, raw, observed, self._settings, self._now()))
        if existing := await self._existing_children(key, planned, observed):
            observed = replace(observed, children={**observed.children, **existing})
            planned = plan(compute_facts(job, raw, observed, self._settings, self._now()))
        if planned.delete_job:
            await self._client.delete(ROLLOUT_JOBS, *key, uid=raw["metadata"]["uid"])
            return None
        observed = await self._execute(key, planned, observed)
        now = self._now()
        old, new = status_of(raw), compute_status(compute_facts(job, raw, observed, self._settings, now))
        if not queued:
            self._turns.note(key, raw, new, now)
        if new != old:
            await self._write_status(raw, old, new, transitions(old, new), now)
        if is_true(new, conditions.COMPLETE) or is_true(new, conditions.FAILED):
            self._progress.forget(key)
            self._applier.forget_job(key, gone=False)
            self._signs.forget(key)
            self._turns.forget(key)
        # The next steps depend on the recorded status, and our own writes trigger no event.
        if _without_counts(new) != _without_counts(old):
            return 0.0
        settings = self._settings
        due = next_deadline(job, new, now, interval=settings.progress_seconds, idle=settings.idle_engines_seconds)
        # Some things that a queued job waits for are not watched, such as its priority class.
        missing = observed.errors or observed.unmountable
        waits = [SLOW_SECONDS] if missing or new.get("phase") == "Queued" else []
        if observed.first is not None:
            # Nothing tells this job that the other one has room.
            waits.append(settings.progress_seconds)
        waits += [seconds for seconds in (next_signs, next_loss(observed.pods, now)) if seconds is not None]
        if claim_refs(observed):
            # A claim whose sandbox ended in its first minute is replaced later.
            waits.append(SLOW_SECONDS)
        if job.spec.generation.autoscaling is not None and new.get("phase") == "Running":
            # Autoscaling depends on how long a change has been called for: no event tells that.
            waits.append(self._settings.progress_seconds)
        return min([*waits, *([] if due is None else [due])], default=None)

    async def _with_quota(self, job: RolloutJob, observed: Observed) -> Observed:
        """The observation with the cluster-wide objects that the job's Workload refers to."""
        if not self._settings.kueue or queueing.queue_of(job, self._settings) is None:
            return observed
        flavors = queueing.flavors_of(observed.get("Workload", names.workload(job.metadata.name)))
        return replace(observed, quota=await self._quota.read(flavors, queueing.priority_class_of(job)))

    async def _with_output_claim(self, key: Key, job: RolloutJob, observed: Observed) -> Observed:
        """The observation with the claim of the output, while there are no workers whose pods could not change."""
        name, live = output_claim(job.spec.output.uri), observed.get("Job", names.workers(job.metadata.name))
        if name is None or (live is not None and not live["spec"].get("suspend")):
            return observed
        return replace(observed, output_claim=await self._claims.read(key.namespace, name))

    async def _with_unmountable(self, key: Key, job: RolloutJob, observed: Observed) -> Observed:
        """The observation with what is missing of the ConfigMaps that pods wait for.

        They are not the operator's, and so not watched; they are only read while a pod waits for its volumes.
        """
        if not any(awaits_start(pod) for pod in observed.pods):
            return observed
        config_maps = resource_of("v1", "ConfigMap")
        problems = [
            use.problem(await self._client.get(config_maps, key.namespace, use.name)) for use in config_map_uses(job)
        ]
        return replace(observed, unmountable=[problem for problem in problems if problem is not None])

    async def _with_signs(self, key: Key, observed: Observed) -> tuple[Observed, float | None]:
        """The observation with what says why its objects wait, and the seconds until that is to be read again."""
        now = self._now()
        signs, due = await self._signs.read(key, questions(observed, now), now)
        return replace(observed, signs=signs), due

    async def _existing_children(self, key: Key, planned: Plan, observed: Observed) -> dict[tuple[str, str], Object]:
        """Existing objects with the names of children that are about to be created.

        Only objects with the job's label are watched. Without this check, an apply would overwrite fields of another
        owner's object that happens to have the same name.
        """
        new = [
            item
            for item in planned.apply
            if item["kind"] not in CREATE_ONLY_KINDS and observed.get(item["kind"], item["metadata"]["name"]) is None
        ]
        found = await asyncio.gather(
            *(self._client.get(resource_of_object(item), key.namespace, item["metadata"]["name"]) for item in new),
            return_exceptions=True,
        )
        # An object that cannot be read fails when it is written.
        return {
            (item["kind"], item["metadata"]["name"]): live
            for item, live in zip(new, found, strict=True)
            if isinstance(live, dict)
        }

    async def _execute(self, key: Key, planned: Plan, observed: Observed) -> Observed:
        """Execute a plan.

        Returns:
            The observation with the children as written, and the errors of those that the API server rejected.
        """
        children, errors = dict(observed.children), dict(observed.errors)
        for wanted in planned.apply:
            place = (wanted["kind"], wanted["metadata"]["name"])
            try:
                found = await self._applier.apply(wanted, children.get(place))
            except ApiError as error:
                errors[place] = self._write_error(error)
                continue
            if found is not None:
                resource = resource_of_object(wanted)
                self._cache.add_written(resource, found)
                children[place] = found
        pods = {pod["metadata"]["name"]: pod for pod in observed.pods}
        for change in planned.patch:
            resource = resource_of(change.ref.api_version, change.ref.kind)
            try:
                found = await self._client.patch_status(
                    resource,
                    key.namespace,
                    change.ref.name,
                    change.status,
                    names.STATUS_MANAGER,
                    version=change.version,
                )
            except Forbidden as error:
                if resource != PODS:
                    raise
                # The status says what else brings a lost pod's successor.
                errors[change.ref.kind, change.ref.name] = self._write_error(error)
                continue
            self._cache.add_written(resource, found)
            if resource == PODS:
                pods[change.ref.name] = found
            else:
                children[change.ref.kind, change.ref.name] = found
        for item in planned.delete:
            live = children.get((item.kind, item.name))
            if live is None:
                continue
            uid = live["metadata"]["uid"]
            try:
                await self._client.delete(resource_of(item.api_version, item.kind), key.namespace, item.name, uid=uid)
            except ApiError as error:
                # A successor with another uid was created after the decision.
                if not isinstance(error, Conflict):
                    errors[item.kind, item.name] = self._write_error(error)
            self._applier.forget(key, uid)
        return replace(observed, children=children, errors=errors, pods=list(pods.values()))

    def _write_error(self, error: ApiError) -> WriteError:
        """The error as it is recorded in the status.

        Raises:
            ApiError: The error itself, if it may be transient: such errors are not recorded.
        """
        found = write_error(error)
        if found is None:
            raise error
        _log.warning("rejected: %s", error)
        self._metrics.record_error(found.reason)
        return found

    async def _write_status(
        self, raw: Object, old: Mapping[str, Any], new: Mapping[str, Any], events: list[Any], now: datetime
    ) -> None:
        metadata = raw["metadata"]
        # With the resource version: a status only replaces the one that it was computed from.
        kept = {name: metadata[name] for name in ("namespace", "name", "uid", "resourceVersion")}
        item = {"apiVersion": raw["apiVersion"], "kind": raw["kind"], "metadata": kept, "status": dict(new)}
        found = await self._client.apply(item, names.STATUS_MANAGER, subresource="status", force=True)
        self._cache.add_written(ROLLOUT_JOBS, found)
        self._jobs.remember(Key(metadata["namespace"], metadata["name"]), found)
        self._metrics.record_status(raw, old, new, now)
        contents: list[EventContent] = list(events)
        await self._recorder.record(found, contents)

    async def _tell_of_removed(self, key: Key, raw: Object, paths: list[Path]) -> None:
        """Record once for each generation of a job, and start of the operator, which fields it goes on without."""
        told = (raw["metadata"]["uid"], raw["metadata"].get("generation"))
        status = status_of(raw)
        over = is_true(status, conditions.COMPLETE) or is_true(status, conditions.FAILED)
        if not paths or over or self._told.get(key) == told:
            return
        self._told[key] = told
        event = lost_event(list(dict.fromkeys(paths)))
        _log.warning("%s: %s", raw["metadata"]["name"], event.note)
        await self._recorder.record(raw, [event])

    async def _reject(self, raw: Object, error: ValidationError) -> float | None:
        """Handle an object that the API server accepted and the model rejects.

        A job that has not started fails. A job that has started was valid then: this operator is older or newer than
        the one that started it, and does not end a run for that.
        """
        old = status_of(raw)
        mistakes = "; ".join(f"{format_path(path)}: {message}" for path, message in explain(error, raw))
        if "startTime" in old or is_true(old, conditions.FAILED):
            if not is_true(old, conditions.FAILED):
                _log.error(
                    "%s: not valid for this version of the operator, and left unchanged: %s",
                    raw["metadata"]["name"],
                    mistakes,
                )
                self._metrics.record_error(Reason.INVALID_SPEC)
            return None
        now = self._now()
        new = invalid_status(raw, mistakes, now)
        self._metrics.record_error(Reason.INVALID_SPEC)
        await self._write_status(raw, old, new, transitions(old, new), now)
        return None


def write_error(error: ApiError) -> WriteError | None:
    """The error as it is recorded in the status; None if it may be transient."""
    match error:
        case QuotaExceeded():
            return WriteError(Reason.QUOTA, error.message)
        case Forbidden():
            return WriteError(Reason.FORBIDDEN, error.message)
        case Invalid():
            return WriteError(Reason.INVALID_TEMPLATE, error.message)
        case FieldConflict():
            managers = ", ".join(error.managers) or "another manager"
            return WriteError(Reason.FIELD_CONFLICT, f"fields are managed by {managers}: {error.message}"[:1000])
    return None


def invalid_status(raw: Object, message: str, now: datetime) -> dict[str, Any]:
    """Status of a job with an invalid spec: Failed, with all mistakes."""
    time, generation = format_time(now), raw["metadata"].get("generation", 0)
    told = message[:1000]
    failed = [
        {
            "type": kind,
            "status": "True",
            "reason": Reason.INVALID_SPEC,
            "message": told,
            "lastTransitionTime": time,
            "observedGeneration": generation,
        }
        for kind in (conditions.FAILURE_TARGET, conditions.FAILED)
    ]
    return {"observedGeneration": generation, "phase": "Failed", "conditions": failed}


def _without_counts(status: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in status.items() if key not in {"progress", "summary"}}


class Pool:
    """Pool of workers on a queue: a fixed number of concurrent reconciles, each with a deadline.

    Args:
        resync: Seconds, with a spread of 20 %, after which every job is reconciled again.
    """

    def __init__(
        self,
        queue: WorkQueue[Key],
        reconcile: Callable[[Key], Awaitable[float | None]],
        metrics: Metrics,
        *,
        size: int,
        seconds: float,
        resync: float,
    ) -> None:
        self._queue, self._reconcile, self._metrics = queue, reconcile, metrics
        self._size, self._seconds, self._resync = size, seconds, resync
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: set[asyncio.Task[None]] = set()
        self._stopping = False

    def start(self) -> None:
        """Start the workers."""
        self._tasks = {asyncio.create_task(self._work(), name=f"reconciles {number}") for number in range(self._size)}

    async def stop(self, seconds: float) -> None:
        """Take no more keys; running reconciles have this many seconds to finish."""
        self._stopping = True
        for task in self._tasks - self._busy:
            task.cancel()
        if self._busy and seconds > 0:
            await asyncio.wait(set(self._busy), timeout=seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        this = asyncio.current_task()
        assert this is not None
        while not self._stopping:
            key = await self._queue.get()
            self._busy.add(this)
            try:
                await self._handle(key)
            finally:
                self._busy.discard(this)
                self._queue.done(key)

    async def _handle(self, key: Key) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        self._metrics.record_wait(self._queue.age(key))
        result, at_least = "retry", 0.0
        try:
            async with asyncio.timeout(self._seconds):
                again = await self._reconcile(key)
        except (NotLeader, TimeoutError) as error:
            self._metrics.record_error(type(error).__name__)
            _log.warning("%s/%s: %s", *key, str(error) or f"not done within {self._seconds:.0f} s")
        except ApiError as error:
            self._metrics.record_error(error.reason or type(error).__name__)
            at_least = _pause(error)
            _log.warning("%s/%s: %s", *key, error)
        except Exception:
            result = "error"
            self._metrics.record_error("Exception")
            _log.exception("%s/%s: reconcile failed", *key)
        else:
            self._metrics.record_reconcile("success", loop.time() - start)
            self._queue.forget(key)
            # Spread, so that jobs that were all listed at the start are not always reconciled at the same time.
            resync = self._resync * (0.8 + 0.4 * random.random())
            self._queue.add_after(key, resync if again is None else min(again, resync))
            return
        self._metrics.record_reconcile(result, loop.time() - start)
        self._queue.failed(key, at_least)


def _pause(error: ApiError) -> float:
    """Minimum backoff in seconds."""
    if isinstance(error, TooMany):
        return error.retry_after or 1.0
    return SLOW_SECONDS if isinstance(error, Forbidden | Invalid) else 0.0
