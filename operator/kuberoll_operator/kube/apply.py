"""Server-side apply of children, with no write for one that is as it should be."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from kuberoll_operator import names
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import Conflict
from kuberoll_operator.kube.resources import RAY_SERVICES, SECRETS
from kuberoll_operator.model import Key, Object

FORCED = frozenset({RAY_SERVICES.kind})
"""Kinds that are taken back from other field managers, and only written where the digest is another.

KubeRay adds its finalizer and its defaults to a RayService by an update of the whole object, and owns the worker groups
after that: without force every second apply is a conflict. What others add to it after that (Kueue its node selectors)
is left alone, or both would write for ever.
"""

CREATED_ONLY = frozenset({SECRETS.kind})
"""Kinds that are created and neither read nor changed: their names say what is in them."""

HASHED = "sha256:"
"""What the cache has of a ConfigMap's values: this and a digest."""


class Applier:
    """Writes children, and remembers how they were after that."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._left: dict[str, tuple[str, object]] = {}
        self._created: dict[Key, set[tuple[str, str]]] = {}

    async def apply(self, wanted: Object, live: Object | None) -> Object | None:
        """Makes the live object what is wanted; None where it is so already, or the answer of the API server.

        Args:
            live: As it was last seen; None where it was not. Not another owner's.

        Raises:
            ApiError: As `Client.apply`.
        """
        if wanted["kind"] in CREATED_ONLY:
            await self._create(wanted)
            return None
        if live is not None and self._unchanged(wanted, live):
            return None
        found = await self._client.apply(wanted, names.MANAGER, force=wanted["kind"] in FORCED)
        self._left[found["metadata"]["uid"]] = (_digest(wanted), _mark(found))
        return found

    def forget(self, uid: str) -> None:
        """The object is gone."""
        self._left.pop(uid, None)

    def forget_job(self, key: Key) -> None:
        """The job is gone, or over."""
        self._created.pop(key, None)

    def missing(self, key: Key, name: str) -> None:
        """An object that was created for a job, and cannot be seen, is not there."""
        for place in [place for place in self._created.get(key, ()) if place[1] == name]:
            self._created[key].discard(place)

    async def _create(self, wanted: Object) -> None:
        metadata = wanted["metadata"]
        key = Key(metadata["namespace"], metadata["labels"][names.JOB_LABEL])
        created = self._created.setdefault(key, set())
        # A successor of the same name has another uid, and objects of its own.
        place = (metadata["ownerReferences"][0]["uid"], metadata["name"])
        if place in created:
            return
        try:
            await self._client.create(wanted)
        except Conflict as error:
            if error.reason != "AlreadyExists":
                raise
        created.add(place)

    def _unchanged(self, wanted: Object, live: Object) -> bool:
        # The digest says what was written last; whoever changed a field since then left the digest as it was.
        if _digest(live) != _digest(wanted):
            return False
        if wanted["kind"] in FORCED:
            return True
        # What the API server spells differently (quantities) is not covered for ever, and as it was left all the same.
        return covers(live, wanted) or self._left.get(live["metadata"]["uid"]) == (_digest(wanted), _mark(live))


def covers(live: Any, wanted: Any) -> bool:
    """Whether everything that is wanted is in the live value; more may be."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(key in live and covers(live[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        if not isinstance(live, list) or len(live) != len(wanted):
            return False
        return all(covers(one, other) for one, other in zip(live, wanted, strict=True))
    if isinstance(wanted, str) and isinstance(live, str) and live.startswith(HASHED):
        return live in (wanted, hashed(wanted))
    return bool(live == wanted)


def hashed(text: str) -> str:
    """A text as the cache keeps it."""
    return HASHED + hashlib.sha256(text.encode()).hexdigest()


def _digest(item: Object) -> str:
    return str((item["metadata"].get("annotations") or {}).get(names.DIGEST, ""))


def _mark(item: Object) -> object:
    """What differs when somebody has written the object's spec since."""
    return item["metadata"].get("generation") or item["metadata"].get("resourceVersion")
