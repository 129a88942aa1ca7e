"""Watches of the cluster, with kopf as engine: it lists, watches and reconnects; its events go into the cache.

The handlers do nothing else. kopf is set up to patch, annotate and post nothing, without finalizers and peers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import kopf
from yarl import URL

from kuberoll_operator import names
from kuberoll_operator.cache import Scope
from kuberoll_operator.kube.access import Access
from kuberoll_operator.kube.resources import CHILDREN, PODS, ROLLOUT_JOBS, Resource
from kuberoll_operator.model import Object

WATCHED = (ROLLOUT_JOBS, *CHILDREN, PODS)
SELECTOR = f"app.kubernetes.io/managed-by={names.MANAGER},{names.JOB_LABEL}"

WATCH_SECONDS = 120
PAGE = 500
STOP_SECONDS = 5.0


class WatchesEnded(Exception):
    """The watches have ended."""


class Sink(Protocol):
    """Whom the watches tell; `cache.Cache` says more of each method."""

    def add_page(
        self,
        resource: Resource,
        scope: Scope,
        items: Iterable[Object],
        version: str,
        *,
        last: bool,
        first: bool = True,
    ) -> None:
        """Take a page of a list; after the last one, what was on no page is gone."""
        ...

    def add_event(self, resource: Resource, item: Object, *, deleted: bool) -> None:
        """Take an event."""
        ...

    def synced(self, resource: Resource, scope: Scope) -> bool:
        """True if all objects of this kind and scope have been listed once."""
        ...


class Watches:
    """Watches of all kinds, in all namespaces or in some.

    Args:
        identity: Name of this operator for kopf, which has no use for it without peers.
        selector: Labels of what is watched, RolloutJobs apart.
    """

    def __init__(
        self,
        cache: Sink,
        access: Callable[[], Awaitable[Access]],
        *,
        identity: str = "kuberoll-operator",
        namespaces: tuple[str, ...] = (),
        resources: tuple[Resource, ...] = WATCHED,
        selector: str = SELECTOR,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._access, self._clock = cache, access, clock
        # Without it kopf looks up the user's name, and a container's user may not have one. Its type, a kind of str, is
        # not public.
        self._identity: Any = identity
        self._resources, self._selector = resources, selector
        self.scopes: tuple[Scope, ...] = namespaces or (None,)
        self._lists = {resource.path(scope): (resource, scope) for resource in resources for scope in self.scopes}
        self._activity = {place: clock() for place in self._lists.values()}
        self._synced = asyncio.Event()
        self._sessions: list[aiohttp.ClientSession] = []

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Watch until cancelled.

        Args:
            started: Called when kopf has installed its signal handlers, so that the caller can replace them.

        Raises:
            WatchesEnded: An error in a watch that relisting does not fix. kopf neither continues after it nor cleans
                up; a new process is needed.
        """
        # Not kopf.operator: when it ends, it cancels every task that was created since it began, even other people's.
        tasks = await kopf.spawn_tasks(
            registry=self._registry(),
            settings=operator_settings(self._resources, self._selector),
            identity=self._identity,
            standalone=True,
            clusterwide=self.scopes == (None,),
            namespaces=[scope for scope in self.scopes if scope is not None],
        )
        started()
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            errors = [task.exception() for task in done if not task.cancelled()]
            raise WatchesEnded(f"kopf has ended: {errors}") from next(filter(None, errors), None)
        finally:
            await _end(tasks if not any(task.done() for task in tasks) else [])
            # When one watch fails, kopf closes the connections of the others, which then wait forever for new ones.
            await _end([*tasks, *_tasks_of_kopf()])
            for session in self._sessions:
                await session.close()

    async def wait_synced(self) -> None:
        """Return when everything has been listed once."""
        await self._synced.wait()

    def unsynced(self) -> list[str]:
        """Plural names of kinds that have not been listed completely yet."""
        return sorted(
            {resource.plural for resource, scope in self._lists.values() if not self._is_synced(resource, scope)}
        )

    def oldest_activity(self) -> tuple[float, str]:
        """Seconds since the last activity of the watch that has been silent longest, and its kind.

        The start of a request counts as activity: a hanging watch grows old, an unreachable API server does not.
        """
        since, resource = min((since, place[0].plural) for place, since in self._activity.items())
        return self._clock() - since, resource

    def _is_synced(self, resource: Resource, scope: Scope) -> bool:
        return self._cache.synced(resource, scope)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            access = await self._access()
            session = access.session(traces=[self._trace()])
            # On a new login kopf has closed the last session.
            self._sessions = [session, *(one for one in self._sessions if not one.closed)]
            return kopf.AiohttpSession(server=access.server, aiohttp_session=session)

        for resource in self._resources:
            kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)(self._handler(resource))
        return registry

    def _handler(self, resource: Resource) -> Callable[..., Awaitable[None]]:
        async def seen(event: Any, **_: Any) -> None:
            item = event["object"]
            scope = None if self.scopes == (None,) else item["metadata"]["namespace"]
            self._activity[resource, scope] = self._clock()
            # Listed objects are in the cache already.
            if event["type"] is not None:
                self._cache.add_event(resource, item, deleted=event["type"] == "DELETED")

        seen.__name__ = f"seen_{resource.plural}"
        return seen

    def _trace(self) -> aiohttp.TraceConfig:
        """Trace of kopf's requests.

        kopf passes on single objects. Only its requests show that a list is complete, which reveals the objects that
        were deleted while nothing watched.
        """

        async def began(_: object, __: object, params: aiohttp.TraceRequestStartParams) -> None:
            if (place := self._lists.get(params.url.path)) is not None:
                self._activity[place] = self._clock()

        async def read(_: object, __: object, params: aiohttp.TraceResponseChunkReceivedParams) -> None:
            self._read(params.url, params.chunk)

        trace = aiohttp.TraceConfig()
        trace.on_request_start.append(began)
        trace.on_response_chunk_received.append(read)
        return trace

    def _read(self, url: URL, content: bytes) -> None:
        place = self._lists.get(url.path)
        if place is None or "watch" in url.query:
            return
        try:
            page = json.loads(content)
        except ValueError:
            return
        if not isinstance(page, dict) or not str(page.get("kind", "")).endswith("List"):
            return
        metadata = page.get("metadata") or {}
        first, last = "continue" not in url.query, not metadata.get("continue")
        version = metadata.get("resourceVersion", "")
        self._cache.add_page(*place, page.get("items") or (), version, first=first, last=last)
        if last and not self.unsynced():
            self._synced.set()


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for them up to STOP_SECONDS."""
    for task in tasks:
        task.cancel()
    if tasks:
        for task in (await asyncio.wait(tasks, timeout=STOP_SECONDS))[0]:
            # Retrieved, so that asyncio does not log it.
            _ = task.cancelled() or task.exception()


def _tasks_of_kopf() -> list[asyncio.Task[Any]]:
    """Running tasks whose coroutine is in kopf's code; only this module calls kopf."""
    home = str(Path(kopf.__file__).parent)
    return [task for task in asyncio.all_tasks() if _file_of(task).startswith(home)]


def _file_of(task: asyncio.Task[Any]) -> str:
    code = getattr(task.get_coro(), "cr_code", None)
    return "" if code is None else str(code.co_filename)


class _EndlessBackoff:
    """Pauses between attempts of kopf's requests: it waits for an unreachable API server without limit."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1, 2, 3, 5, 8)
        while True:
            yield 10


class _NoDifferences(kopf.DiffBaseStorage):
    """Disables kopf's record of last handled objects: it is not used, and would be a third of kopf's work."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:  # noqa: ARG002
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:  # noqa: ARG002
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:  # noqa: ARG002
        return


def operator_settings(resources: tuple[Resource, ...] = WATCHED, selector: str = SELECTOR) -> kopf.OperatorSettings:
    """kopf's settings."""
    settings = kopf.OperatorSettings()
    for resource in resources:
        if resource != ROLLOUT_JOBS:
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = selector
    # A silent watch is renewed after this time, so that its age means something.
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.chunk_size = PAGE
    settings.networking.request_timeout = 60
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = _EndlessBackoff()
    settings.persistence.diffbase_storage = _NoDifferences()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.queueing.idle_timeout = 1.0
    settings.process.ultimate_exiting_timeout = None
    return settings
