"""The operator's process: watches, leader election, reconciles, probes, and shutdown."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kuberoll_api.http_server import serving
from kuberoll_operator import discovery
from kuberoll_operator.cache import Cache
from kuberoll_operator.health import Health, routes
from kuberoll_operator.kube.access import load_access
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.events import Recorder
from kuberoll_operator.kube.lease import Elector, LeadershipLost
from kuberoll_operator.kube.owner import owner_of_pod
from kuberoll_operator.metrics import Metrics
from kuberoll_operator.model import Key
from kuberoll_operator.polling import ReportPoller
from kuberoll_operator.queue import WorkQueue
from kuberoll_operator.reconciler import Pool, Reconciler
from kuberoll_operator.settings import Settings
from kuberoll_operator.signals import set_on_end
from kuberoll_operator.watches import WATCHED, Watches

DRAIN_SECONDS = 20.0
"""Time that running reconciles have to finish when the operator stops; less than its pod's grace period."""

RESTART = -1
"""Result of `Operator.run` when the kinds that the cluster serves have changed: start a new Operator."""

_log = logging.getLogger(__name__)


class Operator:
    """The parts of the operator, wired together. It runs once.

    Attributes:
        port: Port of the probes while it runs.
    """

    def __init__(self, settings: Settings, *, kubeconfig: Path | None = None) -> None:
        self.settings = settings
        self.identity = settings.identity or f"{socket.gethostname()}_{secrets.token_hex(4)}"
        self.metrics = Metrics()
        self.queue: WorkQueue[Key] = WorkQueue()
        self.cache = Cache(self._changed)
        self.stop = asyncio.Event()
        self.port: int | None = None
        self._kubeconfig = kubeconfig
        self._elector: Elector | None = None
        self._watches: Watches | None = None
        self._working = False

    async def run(self, serving_at: Callable[[int], None] = lambda _: None) -> int:
        """Run until stopped, or until a fatal error.

        Args:
            serving_at: Called with the port of the probes.

        Returns:
            The process's exit status: 0 after a signal; 1 after a fatal error; RESTART if a new Operator must follow.

        Raises:
            AccessError: No API server is configured.
            OSError: The port of the probes is not available.
        """
        settings = self.settings
        access = await load_access(self._kubeconfig)
        async with AsyncExitStack() as stack:
            if settings.leader_election:
                own = await stack.enter_async_context(
                    Client(access, on_answer=self.metrics.record_request, seconds=5.0)
                )
                seconds = settings.lease_seconds
                owner = await owner_of_pod(own, settings.lease_namespace, settings.pod_name)
                self._elector = Elector(
                    own,
                    namespace=settings.lease_namespace,
                    name=settings.lease_name,
                    identity=self.identity,
                    lease_seconds=seconds,
                    renew_seconds=seconds * 2 / 3,
                    retry_seconds=seconds * 2 / 15,
                    owner=owner,
                )
            elector = self._elector
            client = await stack.enter_async_context(
                Client(
                    access,
                    remaining=elector.write_seconds if elector else lambda: None,
                    on_answer=self.metrics.record_request,
                )
            )
            health = Health(
                watch=self._oldest_activity,
                unsynced=self._unsynced,
                queue=self.queue.oldest_age,
                leading=self._leads,
                lease_attempt_age=elector.attempt_age if elector else lambda: None,
                lease_seconds=settings.lease_seconds,
            )
            self.metrics.watch(
                jobs=self.cache.jobs,
                depth=self.queue.depth,
                oldest=self.queue.oldest_age,
                leading=self._leads,
                cached=self.cache.sizes,
            )
            self.port = await stack.enter_async_context(
                serving(routes(health, self.metrics.registry), host=settings.http_host, port=settings.http_port)
            )
            serving_at(self.port)
            undecided = [name for name in discovery.OPTIONAL if getattr(settings, name) is None]
            known = await self._discover(client, undecided)
            if self.stop.is_set():
                return 0
            settings = settings.model_copy(update=known)
            optional = [resource for name, resource in discovery.OPTIONAL.items() if getattr(settings, name)]
            poller = await stack.enter_async_context(
                ReportPoller(
                    self.queue.add, seconds=settings.progress_seconds, token=lambda uid: settings.token_of(uid, "read")
                )
            )
            self._watches = watches = Watches(
                self.cache,
                lambda: load_access(self._kubeconfig),
                identity=self.identity,
                namespaces=settings.namespaces,
                resources=(*WATCHED, *optional),
            )
            recorder = Recorder(client, self.identity)
            reconciler = Reconciler(client, self.cache, poller, recorder, self.metrics, settings)
            pool = Pool(
                self.queue,
                reconciler.reconcile,
                self.metrics,
                size=settings.concurrency,
                seconds=settings.reconcile_seconds,
                resync=settings.resync_seconds,
            )
            return await self._run(watches, pool, self._changes(client, known))

    def _leads(self) -> bool:
        return self._working and (self._elector is None or self._elector.leading)

    def _changed(self, key: Key) -> None:
        # A standby would only collect keys that grow old; when it becomes the leader, it takes all jobs from the cache.
        if self._working:
            self.queue.add(key)

    def _work(self, pool: Pool) -> None:
        """Start reconciling: first all existing jobs, then those that change."""
        self._working = True
        for key, _ in self.cache.jobs():
            self.queue.add(key)
        pool.start()

    def _oldest_activity(self) -> tuple[float, str]:
        return (0.0, "") if self._watches is None else self._watches.oldest_activity()

    def _unsynced(self) -> list[str]:
        # The kinds to watch are discovered before anything is watched.
        if self._watches is None:
            return [resource.plural for resource in discovery.OPTIONAL.values()]
        return self._watches.unsynced()

    async def _discover(self, client: Client, names: Sequence[str]) -> dict[str, bool]:
        """Setting name -> True if its kind is served; empty if the operator stops before the API server answers."""
        self._listen()
        discovering = asyncio.create_task(discovery.served_kinds(client, names), name="discovery")
        stop_requested = asyncio.create_task(self.stop.wait(), name="stop")
        try:
            await asyncio.wait({discovering, stop_requested}, return_when=asyncio.FIRST_COMPLETED)
            return discovering.result() if discovering.done() else {}
        finally:
            for task in (discovering, stop_requested):
                task.cancel()
            await asyncio.gather(discovering, stop_requested, return_exceptions=True)

    async def _changes(self, client: Client, known: Mapping[str, bool]) -> None:
        """Return when the set of served kinds differs from the one at the start."""
        found = await discovery.wait_for_change(client, known)
        for name, resource in discovery.OPTIONAL.items():
            if found.get(name) != known.get(name):
                change = "are served now" if found[name] else "are no longer served"
                _log.info("%s %s: restarting the watches", resource.plural, change)

    async def _run(self, watches: Watches, pool: Pool, changes: Coroutine[Any, Any, object]) -> int:
        self._listen()
        watching = asyncio.create_task(watches.run(self._listen), name="watches")
        leading = asyncio.create_task(self._lead(watches, pool), name="leading")
        stop_requested = asyncio.create_task(self.stop.wait(), name="stop")
        changed = asyncio.create_task(changes, name="discovery")
        try:
            done, _ = await asyncio.wait(
                {watching, leading, stop_requested, changed}, return_when=asyncio.FIRST_COMPLETED
            )
            wanted = stop_requested in done or changed in done
            if wanted:
                _log.info("stopping: %d jobs wait, reconciles under access are finished", self.queue.depth())
            else:
                failed = leading if leading in done else watching
                error = failed.exception()
                expected = isinstance(error, LeadershipLost)
                _log.critical("stopping after a fatal error: %s", error, exc_info=None if expected else error)
            await pool.stop(0 if leading in done else DRAIN_SECONDS)
        finally:
            self._working = False
            for task in (changed, leading, stop_requested, watching):
                task.cancel()
            await asyncio.gather(changed, leading, stop_requested, watching, return_exceptions=True)
            if self._elector is not None:
                await self._elector.release()
        if not wanted:
            return 1
        return 0 if stop_requested in done else RESTART

    async def _lead(self, watches: Watches, pool: Pool) -> None:
        """Reconcile for as long as this operator is the leader.

        Raises:
            LeadershipLost: Another operator may have become the leader.
        """
        await watches.wait_synced()
        if self._elector is None:
            self._work(pool)
            await asyncio.Event().wait()
            return
        await self._elector.acquire()
        self._work(pool)
        try:
            await self._elector.hold()
        finally:
            self._working = False

    def _listen(self) -> None:
        set_on_end(self.stop)
