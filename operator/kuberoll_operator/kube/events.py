"""Events of a job, as `kubectl describe` shows them: one for every transition, at most once."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from kuberoll_operator import names
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError, Conflict
from kuberoll_operator.kube.resources import EVENTS
from kuberoll_operator.model import Object

_NOTE_BYTES = 1000
_NAME_CHARACTERS = 20

_log = logging.getLogger(__name__)


class EventContent(Protocol):
    """Content of an event: `transitions.Event`."""

    @property
    def type(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def action(self) -> str: ...
    @property
    def note(self) -> str: ...


class Recorder:
    """Creates Events; a failure is logged and blocks nothing."""

    def __init__(self, client: Client, identity: str) -> None:
        self._client, self._identity = client, identity

    async def record(self, job: Object, events: Sequence[EventContent]) -> None:
        """Create events about a job.

        Args:
            job: The job after the write of the status that the events describe.
        """
        for event in events:
            try:
                await self._client.create(event_object(job, event, self._identity, datetime.now(UTC)))
            except Conflict:
                # The answer to an earlier attempt was lost.
                continue
            except ApiError as error:
                _log.warning("an event was not recorded: %s: %s", event.reason, error)


def event_object(job: Object, event: EventContent, identity: str, now: datetime) -> Object:
    """An Event for the API server; its name derives from the state of the job that it describes."""
    metadata = job["metadata"]
    state = (metadata["uid"], metadata.get("resourceVersion"), event.reason, event.action, event.note)
    mark = hashlib.sha256("\0".join(map(str, state)).encode()).hexdigest()[:_NAME_CHARACTERS]
    regarding: dict[str, Any] = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "uid": metadata["uid"],
    }
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"name": f"{metadata['name']}.{mark}", "namespace": metadata["namespace"]},
        "eventTime": now.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "type": event.type,
        "reason": event.reason,
        "action": event.action,
        "note": event.note.encode()[:_NOTE_BYTES].decode(errors="ignore"),
        "regarding": regarding,
        "reportingController": f"kuberoll.io/{names.MANAGER}",
        "reportingInstance": identity[:128],
    }
