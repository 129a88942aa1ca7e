"""RolloutJobs as they are, read only when they have changed."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from kuberoll_operator.cache import Cache
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.resources import ROLLOUT_JOBS
from kuberoll_operator.model import Key, Object

MOST_CHARACTERS: Final = 16_000_000
"""Of the specs of jobs that are remembered, as JSON; a job's rows may be a megabyte."""


class _Read(NamedTuple):
    """A job, and the version of it that the watch had told of when it was read or written."""

    raw: Object
    seen: str | None
    characters: int


class JobReader:
    """Reads whole jobs; the cache of the watch only has what is needed of all of them.

    A job that was read is as the API server has it while the watch tells of nothing else: then another read would find
    the same, but for what is on its way, which the next event brings. Whatever is decided by a version that is not the
    last is refused where it matters (a status names the version that it was computed from), and decided again.
    """

    def __init__(self, client: Client, cache: Cache) -> None:
        self._client, self._cache = client, cache
        self._jobs: dict[Key, _Read] = {}
        self._characters = 0

    async def read(self, key: Key) -> Object | None:
        """A job; None if it does not exist.

        Raises:
            ApiError: It could not be read.
        """
        seen = self._cache.version(ROLLOUT_JOBS, key)
        known = self._jobs.get(key)
        if known is not None and seen is not None and seen in {known.seen, known.raw["metadata"]["resourceVersion"]}:
            # The one that was used least recently is the first.
            self._jobs[key] = self._jobs.pop(key)
            return known.raw
        self.forget(key)
        raw = await self._client.get(ROLLOUT_JOBS, key.namespace, key.name)
        if raw is not None:
            self.remember(key, raw)
        return raw

    def remember(self, key: Key, raw: Object) -> None:
        """Note a job as the API server has answered it."""
        self.forget(key)
        self._jobs[key] = read = _Read(raw, self._cache.version(ROLLOUT_JOBS, key), len(json.dumps(raw)))
        self._characters += read.characters
        while self._characters > MOST_CHARACTERS:
            self.forget(next(iter(self._jobs)))

    def forget(self, key: Key) -> None:
        """Forget a job, so that the next read is one."""
        known = self._jobs.pop(key, None)
        self._characters -= 0 if known is None else known.characters
