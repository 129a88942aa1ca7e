"""Server-side apply of children, with no write for one that is as it should be."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from kuberoll_operator import names
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.resources import RAY_SERVICES
from kuberoll_operator.model import Object

FORCED = frozenset({RAY_SERVICES.kind})
"""Kinds that are taken back from other field managers, and only written where the digest is another.

KubeRay adds its finalizer and its defaults to a RayService by an update of the whole object, and owns the worker groups
after that: without force every second apply is a conflict. What others add to it after that (Kueue its node selectors)
is left alone, or both would write for ever.
"""

HASHED = "sha256:"
"""What the cache has of a ConfigMap's values: this and a digest."""


class Applier:
    """Writes children, and remembers how they were after that."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._left: dict[str, tuple[str, object]] = {}

    async def apply(self, wanted: Object, live: Object | None) -> Object | None:
        """Makes the live object what is wanted; None where it is so already, or the answer of the API server.

        Args:
            live: As it was last seen; None where it was not. Not another owner's.

        Raises:
            ApiError: As `Client.apply`.
        """
        if live is not None and self._unchanged(wanted, live):
            return None
        found = await self._client.apply(wanted, names.MANAGER, force=wanted["kind"] in FORCED)
        self._left[found["metadata"]["uid"]] = (_digest(wanted), _mark(found))
        return found

    def forget(self, uid: str) -> None:
        """The object is gone."""
        self._left.pop(uid, None)

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
