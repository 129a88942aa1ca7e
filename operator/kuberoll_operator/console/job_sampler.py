"""Repeated sampling of jobs and their workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import aiohttp

from kuberoll_api import contract
from kuberoll_operator import names
from kuberoll_operator.console.connection import Connection
from kuberoll_operator.console.errors import describe_error
from kuberoll_operator.console.rates import JobRow, JobSample, PodCounts, counts_of, progress_of, row_of
from kuberoll_operator.kube.errors import Forbidden
from kuberoll_operator.kube.resources import PODS, ROLLOUT_JOBS
from kuberoll_operator.model import Object

ANSWER_SECONDS: Final = 3.0
CONCURRENCY: Final = 32

STATUS_SECONDS: Final = 20.0
"""Seconds in which the operator writes the progress of a job that runs again."""

_EVERY: Final = "come from the status, which is updated about every 15 s"
_BY_STATUS: Final = f"rates {_EVERY}"
_JOBS_NAMED: Final = 5

_Key = tuple[str, str]


class JobSampler:
    """Jobs of a namespace.

    Args:
        namespace: None for all namespaces.

    Attributes:
        notes: Why some numbers of the last sample are missing or old, for the user.
        by_status: Running jobs of the last sample whose workers do not answer: their rates come from the status.
    """

    def __init__(self, connection: Connection, namespace: str | None) -> None:
        self._connection, self._namespace = connection, namespace
        self._before: dict[_Key, JobSample] = {}
        self._by_status: dict[_Key, tuple[JobSample, JobSample]] = {}
        self._room = asyncio.Semaphore(CONCURRENCY)
        self._refused: str | None = None
        self.notes: list[str] = []
        self.by_status: list[_Key] = []

    async def sample(self) -> list[JobRow]:
        """The jobs now, with rates since the last call."""
        client = self._connection.client
        jobs = [job async for job in client.items(ROLLOUT_JOBS, self._namespace)]
        running = [job for job in jobs if (job.get("status") or {}).get("phase") == "Running"]
        counts, asked = await self._counts(running)
        self.by_status = sorted(_key(job) for job in running if _key(job) not in counts)
        rows, looks = [], {}
        for job in sorted(jobs, key=_key):
            look = JobSample(job, time.monotonic(), counts.get(_key(job), {}))
            looks[_key(job)] = look
            rows.append(row_of(look, self._before_of(look)))
        self._before = looks
        self.notes = [self._refused] if self._refused else self._silent(asked - sum(map(len, counts.values())), asked)
        return rows

    def _silent(self, silent: int, asked: int) -> list[str]:
        """Notes about workers that do not answer, and the jobs that are therefore read otherwise."""
        if not silent:
            return []
        found = [f"{silent} of {asked} workers do not answer through the API server"]
        if self.by_status:
            told = [name if self._namespace else f"{namespace}/{name}" for namespace, name in self.by_status]
            more = f" and {len(told) - _JOBS_NAMED} more" if len(told) > _JOBS_NAMED else ""
            # An API server is no pod: where NetworkPolicies are enforced, that of the workers does not let it in.
            found.append(f"rates of {', '.join(told[:_JOBS_NAMED])}{more} {_EVERY}; a NetworkPolicy may be the reason")
        return found

    def _before_of(self, look: JobSample) -> JobSample | None:
        """The sample to compare with: the last one, or for rates from the status the last with other numbers."""
        key = _key(look.job)
        last = self._before.get(key)
        if look.pods and last is not None and last.pods.keys() & look.pods.keys():
            return last
        earlier, newest = self._by_status.get(key, (look, look))
        stamp = progress_of(look.job).get("lastUpdated")
        if stamp != progress_of(newest.job).get("lastUpdated"):
            earlier, newest = newest, look
        self._by_status[key] = (earlier, newest)
        return earlier

    async def _counts(self, jobs: Sequence[Object]) -> tuple[dict[_Key, dict[str, PodCounts]], int]:
        """Counters of the jobs' workers, and the number of workers that were asked."""
        wanted = {_key(job) for job in jobs}
        if self._refused or not wanted:
            return {}, 0
        found: dict[_Key, dict[str, PodCounts]] = {}
        try:
            selector = f"{names.COMPONENT_LABEL}={names.WORKERS},{names.JOB_LABEL}"
            pods = [
                pod
                async for pod in self._connection.client.items(PODS, self._namespace, selector)
                if _job_of(pod) in wanted and _is_ready(pod)
            ]
            async with self._connection.access.session() as session:
                answers = await asyncio.gather(*(self._ask(session, pod) for pod in pods))
        except Forbidden as error:
            self._refused = f"{_BY_STATUS} ({describe_error(error)})"
            return {}, 0
        except _MayNotProxy:
            self._refused = (
                f"{_BY_STATUS} (missing permission: you may not get pods/proxy, which reaches the workers; "
                "docs/how-to/reading-output.md#rights)"
            )
            return {}, 0
        for pod, answer in zip(pods, answers, strict=True):
            if answer is not None:
                found.setdefault(_job_of(pod), {})[pod["metadata"]["uid"]] = answer
        return found, len(pods)

    async def _ask(self, session: aiohttp.ClientSession, pod: Object) -> PodCounts | None:
        metadata = pod["metadata"]
        path = PODS.path(metadata["namespace"], f"{metadata['name']}:{contract.PROGRESS_PORT}", "proxy/metrics")
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        try:
            async with self._room, session.get(self._connection.access.server + path, timeout=timeout) as answer:
                if answer.status == 403 and answer.content_type == "application/json":
                    text = await answer.text()
                    if '"reason":"Forbidden"' in text.replace(" ", "") and "pods/proxy" in text:
                        raise _MayNotProxy
                if answer.status != 200:
                    return None
                return counts_of(await answer.text())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None


class _MayNotProxy(Exception):
    pass


def _key(job: Object) -> _Key:
    return job["metadata"]["namespace"], job["metadata"]["name"]


def _job_of(pod: Object) -> _Key:
    return pod["metadata"]["namespace"], pod["metadata"]["labels"][names.JOB_LABEL]


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
