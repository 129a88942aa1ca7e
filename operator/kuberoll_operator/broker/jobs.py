"""Jobs whose workers ask for sandboxes: who they are, and what they may have."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from kuberoll_api import conditions
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.removed import without_removed
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError
from kuberoll_operator.kube.resources import ROLLOUT_JOBS
from kuberoll_operator.model import Key, Object, is_true, status_of
from kuberoll_operator.sandbox_pod import PodContext

# A job that is over, or has another owner, is noticed so much later; its workers are being ended then anyway.
KEPT_SECONDS: Final = 10.0
# Whoever has a wrong token does not make the broker ask more often.
_FRESH_SECONDS: Final = 1.0
_MOST_KEPT: Final = 10_000
# Names become parts of paths.
_NAME: Final = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


class UnknownWorker(Exception):
    """Whoever asks does not know the token of the job, or there is no such job: which of both is not said."""


class UnusableJob(Exception):
    """The job may have no sandboxes now; the message says why."""


@dataclass(frozen=True, slots=True)
class _Read:
    raw: Object | None
    at: float


class Jobs:
    """Reads RolloutJobs, and checks the tokens of their workers.

    Args:
        token_of: The token of a job's workers, by its uid.
        context: What its pods are made of.
        namespaces: Namespaces whose jobs have sandboxes; none: all.
    """

    def __init__(
        self,
        client: Client,
        token_of: Callable[[str], str],
        context: Callable[[RolloutJob, str, str], PodContext],
        *,
        namespaces: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._token_of, self._context = client, token_of, context
        self._namespaces, self._clock = frozenset(namespaces), clock
        self._jobs: dict[Key, _Read] = {}
        self._reading: dict[Key, asyncio.Task[_Read]] = {}

    async def find(self, key: Key, token: str) -> Object:
        """The job of a worker.

        Raises:
            UnknownWorker: The token is not this job's.
            ApiError: The job cannot be read.
        """
        raw = None
        if self._may_exist(key):
            raw = await self._read(key, KEPT_SECONDS)
            if raw is None or not self._knows(raw, token):
                # There may be another job of this name by now.
                raw = await self._read(key, _FRESH_SECONDS)
        if raw is None or not self._knows(raw, token):
            raise UnknownWorker(f"{key.namespace}/{key.name}: there is no such job, or the token is not its own")
        return raw

    def usable(self, raw: Object) -> PodContext:
        """What a job's pods are made of.

        Raises:
            UnusableJob: It may have none now.
        """
        status = status_of(raw)
        if raw["metadata"].get("deletionTimestamp"):
            raise UnusableJob("the job is being deleted")
        if is_true(status, conditions.COMPLETE) or is_true(status, conditions.FAILED):
            raise UnusableJob("the job is over")
        try:
            job = RolloutJob.model_validate(without_removed(raw)[0])
        except ValidationError as error:
            raise UnusableJob(f"the job is invalid: {error.errors(include_url=False)[0]['msg']}") from error
        if job.spec.suspend:
            raise UnusableJob("the job is suspended")
        return self._context(job, str(raw["metadata"]["uid"]), str(raw["metadata"]["namespace"]))

    def _knows(self, raw: Object, token: str) -> bool:
        wanted = self._token_of(str(raw["metadata"]["uid"]))
        return hmac.compare_digest(wanted.encode(), token.encode(errors="surrogateescape"))

    def _may_exist(self, key: Key) -> bool:
        is_watched = not self._namespaces or key.namespace in self._namespaces
        return is_watched and all(_NAME.fullmatch(name) for name in key)

    async def _read(self, key: Key, seconds: float) -> Object | None:
        """A job, as it was at most so many seconds ago; or as it was, while the API server does not answer.

        Workers have their sandboxes meanwhile, and go on to say so.
        """
        known = self._jobs.get(key)
        if known is not None and self._clock() - known.at <= seconds:
            return known.raw
        # All who ask at once wait for one answer.
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = asyncio.create_task(self._fetch(key))
            reading.add_done_callback(lambda _: self._reading.pop(key))
        try:
            return (await asyncio.shield(reading)).raw
        except ApiError:
            if known is None or known.raw is None:
                raise
            return known.raw

    async def _fetch(self, key: Key) -> _Read:
        found = _Read(await self._client.get(ROLLOUT_JOBS, key.namespace, key.name), self._clock())
        if len(self._jobs) >= _MOST_KEPT:
            self._jobs.clear()
        self._jobs[key] = found
        return found
