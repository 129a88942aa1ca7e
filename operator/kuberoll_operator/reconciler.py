"""One reconcile of one job: get, observe, plan, write, tell; the same whatever it was that called for it."""

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
from kuberoll_api.paths import format_path
from kuberoll_operator import names, queueing
from kuberoll_operator.backends.pods import missing_secrets
from kuberoll_operator.cache import Cache
from kuberoll_operator.facts import compute_facts
from kuberoll_operator.kube.apply import CREATED_ONLY, Applier
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
from kuberoll_operator.kube.events import Happening, Recorder
from kuberoll_operator.kube.quota import QuotaReader
from kuberoll_operator.kube.resources import ROLLOUT_JOBS, resource_of, resource_of_object
from kuberoll_operator.metrics import Metrics
from kuberoll_operator.model import Key, Object, Observed, Plan, WriteError, is_true, status_of
from kuberoll_operator.observe import observe
from kuberoll_operator.plan import plan
from kuberoll_operator.progress import ProgressPoller
from kuberoll_operator.queue import WorkQueue
from kuberoll_operator.settings import Settings
from kuberoll_operator.status.job_status import compute_status, format_time, next_deadline
from kuberoll_operator.transitions import transitions

SLOW_SECONDS: Final = 60.0
"""Pause before what somebody has to mend (RBAC, quotas, other managers) is tried again."""

_log = logging.getLogger(__name__)


class Reconciler:
    """Makes the cluster what jobs want, one job at a time."""

    def __init__(
        self,
        client: Client,
        cache: Cache,
        progress: ProgressPoller,
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

    async def reconcile(self, key: Key) -> float | None:
        """Looks at a job and does what is next.

        Returns:
            Seconds until it is to be looked at again, whatever happens; None: not for its own sake.

        Raises:
            ApiError: What may be better in a moment; the job's status is as it was.
            NotLeader: The lease may be another's.
        """
        raw = await self._client.get(ROLLOUT_JOBS, key.namespace, key.name)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            # What it owns goes with it; no finalizer of ours holds it.
            self._progress.forget(key)
            self._applier.forget_job(key)
            return None
        if raw["spec"].get("managedBy", names.MANAGED_BY) != names.MANAGED_BY:
            return None
        try:
            job = RolloutJob.model_validate(raw)
        except ValidationError as error:
            return await self._refuse(raw, error)
        observed = await self._with_quota(job, observe(self._cache, key, raw, self._progress.latest))
        for name in missing_secrets(observed.pods):
            self._applier.missing(key, name)
        planned = plan(compute_facts(job, raw, observed, self._settings, self._now()))
        if strangers := await self._unseen(key, planned, observed):
            observed = replace(observed, children={**observed.children, **strangers})
            planned = plan(compute_facts(job, raw, observed, self._settings, self._now()))
        if planned.delete_job:
            await self._client.delete(ROLLOUT_JOBS, *key, uid=raw["metadata"]["uid"])
            return None
        observed = await self._carry_out(key, planned, observed)
        now = self._now()
        old, new = status_of(raw), compute_status(compute_facts(job, raw, observed, self._settings, now))
        if new != old:
            await self._write_status(raw, old, new, transitions(old, new), now)
        if is_true(new, conditions.COMPLETE) or is_true(new, conditions.FAILED):
            self._progress.forget(key)
            self._applier.forget_job(key)
        # Some of what is next is decided by what is written down, and one's own writes are no events.
        if _lasting(new) != _lasting(old):
            return 0.0
        due = next_deadline(job, new, now, interval=self._settings.progress_seconds)
        # What a job in a queue may wait for is not watched: a priority class, for one.
        waits = [SLOW_SECONDS] if observed.errors or new.get("phase") == "Queued" else []
        if job.spec.generation.autoscaling is not None and new.get("phase") == "Running":
            # How long more or fewer replicas have been called for is a matter of time alone.
            waits.append(self._settings.progress_seconds)
        return min([*waits, *([] if due is None else [due])], default=None)

    async def _with_quota(self, job: RolloutJob, observed: Observed) -> Observed:
        """What is observed, with what the job's Workload refers to."""
        if not self._settings.kueue or queueing.queue_of(job, self._settings) is None:
            return observed
        flavors = queueing.flavors_of(observed.get("Workload", names.workload(job.metadata.name)))
        return replace(observed, quota=await self._quota.read(flavors, queueing.priority_class_of(job)))

    async def _unseen(self, key: Key, planned: Plan, observed: Observed) -> dict[tuple[str, str], Object]:
        """What there is already of the children that are to be made.

        Only what carries the job's label is watched: without this look, an apply would write into an object of
        somebody else that happens to have the child's name.
        """
        new = [
            item
            for item in planned.apply
            if item["kind"] not in CREATED_ONLY and observed.get(item["kind"], item["metadata"]["name"]) is None
        ]
        found = await asyncio.gather(
            *(self._client.get(resource_of_object(item), key.namespace, item["metadata"]["name"]) for item in new),
            return_exceptions=True,
        )
        # One that cannot be read is found out about when it is written.
        return {
            (item["kind"], item["metadata"]["name"]): live
            for item, live in zip(new, found, strict=True)
            if isinstance(live, dict)
        }

    async def _carry_out(self, key: Key, planned: Plan, observed: Observed) -> Observed:
        """Writes and removes what is planned.

        Returns:
            The children as they are then, with what the API server refused.
        """
        children, errors = dict(observed.children), dict(observed.errors)
        for wanted in planned.apply:
            place = (wanted["kind"], wanted["metadata"]["name"])
            try:
                found = await self._applier.apply(wanted, children.get(place))
            except ApiError as error:
                errors[place] = self._refusal(error)
                continue
            if found is not None:
                resource = resource_of_object(wanted)
                self._cache.written(resource, found)
                children[place] = found
        for change in planned.patch:
            resource = resource_of(change.ref.api_version, change.ref.kind)
            found = await self._client.patch_status(
                resource, key.namespace, change.ref.name, change.status, names.STATUS_MANAGER, version=change.version
            )
            self._cache.written(resource, found)
            children[change.ref.kind, change.ref.name] = found
        for item in planned.delete:
            live = children.get((item.kind, item.name))
            if live is None:
                continue
            uid = live["metadata"]["uid"]
            try:
                await self._client.delete(resource_of(item.api_version, item.kind), key.namespace, item.name, uid=uid)
            except ApiError as error:
                # Its successor has another uid, and was made after this was decided.
                if not isinstance(error, Conflict):
                    errors[item.kind, item.name] = self._refusal(error)
            self._applier.forget(uid)
        return replace(observed, children=children, errors=errors)

    def _refusal(self, error: ApiError) -> WriteError:
        """The error as the status tells it.

        Raises:
            ApiError: The error itself, where it may be better in a moment: the status does not tell of that.
        """
        found = write_error(error)
        if found is None:
            raise error
        _log.warning("refused: %s", error)
        self._metrics.error(found.reason)
        return found

    async def _write_status(
        self, raw: Object, old: Mapping[str, Any], new: Mapping[str, Any], events: list[Any], now: datetime
    ) -> None:
        metadata = raw["metadata"]
        # The version: a status is only written over the one that it was computed from.
        kept = {name: metadata[name] for name in ("namespace", "name", "uid", "resourceVersion")}
        item = {"apiVersion": raw["apiVersion"], "kind": raw["kind"], "metadata": kept, "status": dict(new)}
        found = await self._client.apply(item, names.STATUS_MANAGER, subresource="status", force=True)
        self._cache.written(ROLLOUT_JOBS, found)
        self._metrics.status_written(raw, old, new, now)
        happenings: list[Happening] = list(events)
        await self._recorder.record(found, happenings)

    async def _refuse(self, raw: Object, error: ValidationError) -> float | None:
        """An object that the API server took and the model does not.

        A job that has not begun is failed. One that has was valid when it did: this operator is older or newer than
        the one that began it, and does not end a run for that.
        """
        old = status_of(raw)
        mistakes = "; ".join(f"{format_path(path)}: {message}" for path, message in explain(error, raw))
        if "startTime" in old or is_true(old, conditions.FAILED):
            if not is_true(old, conditions.FAILED):
                _log.error("%s: not understood, and left as it is: %s", raw["metadata"]["name"], mistakes)
                self._metrics.error(Reason.INVALID_SPEC)
            return None
        now = self._now()
        new = refused_status(raw, mistakes, now)
        self._metrics.error(Reason.INVALID_SPEC)
        await self._write_status(raw, old, new, transitions(old, new), now)
        return None


def write_error(error: ApiError) -> WriteError | None:
    """What the status tells of an error; None where it may be better in a moment."""
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


def refused_status(raw: Object, message: str, now: datetime) -> dict[str, Any]:
    """The status of a job that cannot be understood: Failed, with all its mistakes."""
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


def _lasting(status: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in status.items() if key not in {"progress", "summary"}}


class Pool:
    """Workers on a queue: so many reconciles at once, each with a deadline.

    Args:
        resync: Every job is looked at again after about so many seconds.
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
        """Begins to work."""
        self._tasks = {asyncio.create_task(self._work(), name=f"reconciles {number}") for number in range(self._size)}

    async def stop(self, seconds: float) -> None:
        """Takes no more keys; what is under way has so many seconds to end."""
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
        self._metrics.waited(self._queue.age(key))
        result, at_least = "retry", 0.0
        try:
            async with asyncio.timeout(self._seconds):
                again = await self._reconcile(key)
        except (NotLeader, TimeoutError) as error:
            self._metrics.error(type(error).__name__)
            _log.warning("%s/%s: %s", *key, str(error) or f"not done within {self._seconds:.0f} s")
        except ApiError as error:
            self._metrics.error(error.reason or type(error).__name__)
            at_least = _pause(error)
            _log.warning("%s/%s: %s", *key, error)
        except Exception:
            result = "error"
            self._metrics.error("Exception")
            _log.exception("%s/%s: reconcile failed", *key)
        else:
            self._metrics.reconciled("success", loop.time() - start)
            self._queue.forget(key)
            # Spread, so that jobs that were all seen at the start are not looked at all at once for ever.
            resync = self._resync * (0.8 + 0.4 * random.random())
            self._queue.add_after(key, resync if again is None else min(again, resync))
            return
        self._metrics.reconciled(result, loop.time() - start)
        self._queue.failed(key, at_least)


def _pause(error: ApiError) -> float:
    """Seconds to wait at least."""
    if isinstance(error, TooMany):
        return error.retry_after or 1.0
    return SLOW_SECONDS if isinstance(error, Forbidden | Invalid) else 0.0
