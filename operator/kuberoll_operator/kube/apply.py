"""Server-side apply of children, without a write if nothing has changed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from kuberoll_operator import names
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import Conflict
from kuberoll_operator.kube.resources import RAY_SERVICES, SECRETS
from kuberoll_operator.model import Key, Object

FORCED_KINDS = frozenset({RAY_SERVICES.kind})
"""Kinds whose fields are taken back from other field managers, and which are written only if their digest differs.

KubeRay adds its finalizer and its defaults to a RayService by an update of the whole object, and owns the worker groups
after that: without force every second apply is a conflict. Later additions of others (Kueue's node selectors) are left
alone, or both would write forever.
"""

CREATE_ONLY_KINDS = frozenset({SECRETS.kind})
"""Kinds that are created and never read or changed: their names contain a digest of their content.

Except those of the component ACCESS, whose names users must know: see `CONFLICT_SECONDS`.
"""

CONFLICT_SECONDS = 600.0
"""Time in which an object is tried again whose name has no digest and is taken.

It may be that of a deleted job of the same name, which the garbage collector is about to remove; it cannot be read.
"""

HASH_PREFIX = "sha256:"
"""Prefix of the digests that the cache keeps instead of a ConfigMap's values."""


class Applier:
    """Writes children, and remembers their state after the write."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._last_writes: dict[Key, dict[str, tuple[str, object]]] = {}
        self._created: dict[Key, set[tuple[str, str]]] = {}
        self._conflicts: dict[Key, dict[tuple[str, str], float]] = {}

    async def apply(self, wanted: Object, live: Object | None) -> Object | None:
        """Make the live object equal to the wanted one; returns the API server's answer, None if nothing was written.

        Args:
            live: The live object as it was last seen; None if it was not. Never another owner's.

        Raises:
            ApiError: As `Client.apply`.
        """
        if wanted["kind"] in CREATE_ONLY_KINDS:
            await self._create(wanted)
            return None
        if live is not None and self._unchanged(wanted, live):
            return None
        found = await self._client.apply(wanted, names.MANAGER, force=wanted["kind"] in FORCED_KINDS)
        self._last_writes.setdefault(_job_of(wanted), {})[found["metadata"]["uid"]] = (
            _digest(wanted),
            _write_version(found),
        )
        return found

    def forget(self, key: Key, uid: str) -> None:
        """Forget a deleted object of a job."""
        self._last_writes.get(key, {}).pop(uid, None)

    def forget_job(self, key: Key, *, gone: bool) -> None:
        """Forget a job that has finished or is gone; if it is gone, its objects too, which Kubernetes deletes."""
        self._created.pop(key, None)
        self._conflicts.pop(key, None)
        if gone:
            self._last_writes.pop(key, None)

    def mark_missing(self, key: Key, name: str) -> None:
        """Note that an object that was created for a job, and is never read, does not exist."""
        for place in [place for place in self._created.get(key, ()) if place[1] == name]:
            self._created[key].discard(place)

    async def _create(self, wanted: Object) -> None:
        metadata = wanted["metadata"]
        key = _job_of(wanted)
        created = self._created.setdefault(key, set())
        # A successor of the same name has another uid and its own objects.
        place = (metadata["ownerReferences"][0]["uid"], metadata["name"])
        if place in created:
            return
        try:
            await self._client.create(wanted)
        except Conflict as error:
            if error.reason != "AlreadyExists":
                raise
            if metadata["labels"][names.COMPONENT_LABEL] == names.ACCESS:
                now = self._clock()
                if now - self._conflicts.setdefault(key, {}).setdefault(place, now) < CONFLICT_SECONDS:
                    return
        created.add(place)

    def _unchanged(self, wanted: Object, live: Object) -> bool:
        # The digest tells what was written last; other writers change fields without it.
        if _digest(live) != _digest(wanted):
            return False
        if wanted["kind"] in FORCED_KINDS:
            return True
        # Values that the API server normalizes (quantities) never compare equal, but are unchanged since the last
        # write.
        last = self._last_writes.get(_job_of(wanted), {}).get(live["metadata"]["uid"])
        return covers(live, wanted) or last == (_digest(wanted), _write_version(live))


def covers(live: Any, wanted: Any) -> bool:
    """True if the live value contains everything that is wanted, and possibly more."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(key in live and covers(live[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        if not isinstance(live, list) or len(live) != len(wanted):
            return False
        return all(covers(one, other) for one, other in zip(live, wanted, strict=True))
    if isinstance(wanted, str) and isinstance(live, str) and live.startswith(HASH_PREFIX):
        return live in (wanted, hash_text(wanted))
    return bool(live == wanted)


def hash_text(text: str) -> str:
    """A text as the cache keeps it: prefix and digest."""
    return HASH_PREFIX + hashlib.sha256(text.encode()).hexdigest()


def _job_of(wanted: Object) -> Key:
    return Key(wanted["metadata"]["namespace"], wanted["metadata"]["labels"][names.JOB_LABEL])


def _digest(item: Object) -> str:
    return str((item["metadata"].get("annotations") or {}).get(names.DIGEST, ""))


def _write_version(item: Object) -> object:
    """A value that changes whenever somebody writes the object's spec."""
    return item["metadata"].get("generation") or item["metadata"].get("resourceVersion")
