"""Lifetime of a reader pod, from its creation to its removal, however the command ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from kuberoll_operator import names
from kuberoll_operator.backends.pods import diagnose
from kuberoll_operator.console.connection import Connection
from kuberoll_operator.console.errors import ConsoleError
from kuberoll_operator.console.execution import StreamLost, execution
from kuberoll_operator.console.reader import Reader
from kuberoll_operator.console.reader_pod import COMMAND, COMPONENT, CONTAINER, pod_name, reader_pod
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError, Forbidden, QuotaExceeded, TooMany, Unavailable
from kuberoll_operator.kube.resources import EVENTS, PODS, resource_of
from kuberoll_operator.model import Object

POLL_SECONDS: Final = 0.5
REMOVAL_SECONDS: Final = 15.0
START_SECONDS: Final = 300.0

RIGHTS: Final = (
    ("create", PODS, None),
    ("get", PODS, None),
    ("delete", PODS, None),
    ("get", PODS, "exec"),
    ("create", PODS, "exec"),
)
"""Permissions that reading needs, besides `get` of RolloutJobs and Jobs."""

_JOBS: Final = resource_of("batch/v1", "Job")


class ReaderSession:
    """Reader pod of one job; an async context manager that removes the pod at its end.

    Args:
        job: The RolloutJob, live.
        fallback_template: Returns the template for a job without Jobs to copy it from.
        note: Prints a line for the user.
        start_seconds: Time limit for the start of the pod.
    """

    def __init__(
        self,
        connection: Connection,
        job: Object,
        *,
        fallback_template: Callable[[], Object],
        note: Callable[[str], None],
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._connection, self._job, self._fallback_template = connection, job, fallback_template
        self._start_seconds, self._note = start_seconds, note
        self._namespace: str = job["metadata"]["namespace"]
        self._name: str | None = None

    async def __aenter__(self) -> ReaderSession:
        await self._check_rights()
        await self._remove_ended()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._name is not None:
            await self._remove(self._name)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Reader]:
        """Open a session; creates the pod if there is none, or if the last one has ended."""
        try:
            name = await self._ready_pod()
        except (TooMany, Unavailable) as error:
            raise StreamLost(str(error)) from error
        command = [*COMMAND, "--serve"]
        async with execution(self._connection.access, self._namespace, name, CONTAINER, command) as stream:
            reader = Reader(stream)
            await reader.greet()
            yield reader

    async def _check_rights(self) -> None:
        client = self._connection.client
        may = await asyncio.gather(
            *(client.is_allowed(verb, resource, self._namespace, subresource) for verb, resource, subresource in RIGHTS)
        )
        missing = [
            f"{verb} {'/'.join(filter(None, (resource.plural, subresource)))}"
            for (verb, resource, subresource), granted in zip(RIGHTS, may, strict=True)
            if not granted
        ]
        if missing:
            raise ConsoleError(
                f"missing permission: you may not {', '.join(missing)} in namespace {self._namespace}; the output is "
                "read through a pod there (docs/how-to/reading-output.md#rights)",
                code=2,
            )

    async def _ready_pod(self) -> str:
        if self._name is not None:
            pod = await self._connection.client.get(PODS, self._namespace, self._name)
            if pod is not None and _is_running(pod):
                return self._name
            await self._remove(self._name)
        # Remembered first: an interrupted request may have been executed.
        self._name = pod_name(self._job["metadata"]["name"])
        pod = reader_pod(self._job, await self._template(), self._name)
        try:
            await self._connection.client.create(pod)
        except QuotaExceeded as error:
            raise ConsoleError(f"the namespace's quota does not allow the reader pod: {error.message}") from error
        except Forbidden as error:
            # Permissions were checked before: this is an admission controller.
            raise ConsoleError(f"the reader pod was rejected: {error.message}") from error
        await self._until_running(self._name)
        return self._name

    async def _template(self) -> Object:
        name = self._job["metadata"]["name"]
        for job in (names.workers(name), names.finish(name), names.check(name)):
            found = await self._connection.client.get(_JOBS, self._namespace, job)
            if found is not None:
                template: Object = found["spec"]["template"]
                return template
        return self._fallback_template()

    async def _until_running(self, name: str) -> None:
        noted, last = "", ""
        try:
            async with asyncio.timeout(self._start_seconds):
                while True:
                    pod = await self._connection.client.get(PODS, self._namespace, name)
                    if pod is None:
                        raise StreamLost(f"the reader pod {name} is gone")
                    if _is_running(pod):
                        return
                    if pod.get("status", {}).get("phase") in {"Failed", "Succeeded"}:
                        raise ConsoleError(f"the reader pod has ended: {_end_of(pod)}")
                    problem = diagnose([pod], CONTAINER)
                    last = f"{problem.reason}: {problem.message}" if problem else last
                    if last and last != noted:
                        self._note(f"waiting for the reader pod: {last}")
                        noted = last
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            words = last or await self._last_event(name) or "no cause was given"
            raise ConsoleError(f"the reader pod did not start within {self._start_seconds:.0f} s: {words}") from None

    async def _last_event(self, name: str) -> str:
        """The last warning about the pod; empty if there is none, or events may not be read."""
        notes: list[tuple[str, str]] = []
        try:
            async for event in self._connection.client.items(EVENTS, self._namespace, fields=f"regarding.name={name}"):
                if event.get("type") == "Warning":
                    when = str(event["metadata"].get("creationTimestamp", ""))
                    notes.append((when, f"{event.get('reason')}: {event.get('note')}"))
        except ApiError:
            return ""
        return max(notes)[1] if notes else ""

    async def _remove_ended(self) -> None:
        """Remove ended reader pods of commands that were killed."""
        client, job = self._connection.client, self._job["metadata"]["name"]
        try:
            async for pod in client.items(PODS, self._namespace, names.selector_text(job, COMPONENT)):
                if pod.get("status", {}).get("phase") in {"Failed", "Succeeded"}:
                    await _delete(client, pod)
        except ApiError:
            # Reading does not require the permission to list pods.
            return

    async def _remove(self, name: str) -> None:
        """Delete the pod, even if the command is interrupted in the meantime."""
        removal = asyncio.ensure_future(self._deletion(name))
        try:
            await asyncio.shield(removal)
        except asyncio.CancelledError:
            await asyncio.wait({removal}, timeout=REMOVAL_SECONDS)
            raise
        self._name = None

    async def _deletion(self, name: str) -> None:
        client = self._connection.client
        try:
            async with asyncio.timeout(REMOVAL_SECONDS):
                pod = await client.get(PODS, self._namespace, name)
                if pod is not None:
                    await _delete(client, pod)
        except (ApiError, TimeoutError) as error:
            self._note(
                f"the reader pod {name} was not removed ({error}); it ends by itself two minutes after it was last "
                f"read from: kubectl delete pod {name} -n {self._namespace}"
            )


async def _delete(client: Client, pod: Object) -> None:
    await client.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], uid=pod["metadata"]["uid"])


def _is_running(pod: Object) -> bool:
    if pod["metadata"].get("deletionTimestamp"):
        return False
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return any(item["name"] == CONTAINER and "running" in (item.get("state") or {}) for item in statuses)


def _end_of(pod: Object) -> str:
    status = pod.get("status", {})
    for item in status.get("containerStatuses") or ():
        if ended := (item.get("state") or {}).get("terminated"):
            return str(ended.get("message") or f"exit code {ended.get('exitCode')}").strip()
    return str(status.get("message") or status.get("reason") or "no cause was given")
