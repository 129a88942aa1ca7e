"""The broker's process: watch, leases, HTTP, probes and shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from kuberoll_api.http_server import serving
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.sandboxes import TOKEN_SCOPE
from kuberoll_operator.broker.broker import Broker
from kuberoll_operator.broker.jobs import Jobs
from kuberoll_operator.broker.metrics import BrokerMetrics
from kuberoll_operator.broker.pods import SELECTOR
from kuberoll_operator.broker.routes import MOST_BYTES, BrokerRoutes
from kuberoll_operator.broker.settings import BrokerSettings
from kuberoll_operator.health import Health, routes
from kuberoll_operator.kube.access import load_access
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.resources import PODS
from kuberoll_operator.sandbox_pod import PodContext
from kuberoll_operator.signals import set_on_end
from kuberoll_operator.watches import Watches

_log = logging.getLogger(__name__)


class BrokerApp:
    """The parts of the broker, wired together. It runs once.

    Attributes:
        stop: Set it to end.
    """

    def __init__(self, settings: BrokerSettings, *, kubeconfig: Path | None = None) -> None:
        self.settings = settings
        self.stop = asyncio.Event()
        self._kubeconfig = kubeconfig

    async def run(self, serving_at: Callable[[int], None] = lambda _: None) -> int:
        """Run until stopped, or until a fatal error; returns the process's exit status.

        Args:
            serving_at: Called with the port.

        Raises:
            AccessError: No API server is configured.
            OSError: The port is not available.
        """
        settings = self.settings
        access = await load_access(self._kubeconfig)
        async with AsyncExitStack() as stack:
            metrics = BrokerMetrics()
            client = await stack.enter_async_context(Client(access, on_answer=metrics.record_request))
            broker = Broker(client, starts=settings.starts, starts_per_job=settings.starts_per_job)
            metrics.watch(broker)
            watches = Watches(
                broker.pods,
                lambda: load_access(self._kubeconfig),
                identity="kuberoll-broker",
                namespaces=settings.namespaces,
                resources=(PODS,),
                selector=SELECTOR,
            )
            jobs = Jobs(
                client, lambda uid: settings.token_of(uid, TOKEN_SCOPE), self._context, namespaces=settings.namespaces
            )
            health = Health(
                watch=watches.oldest_activity,
                unsynced=watches.unsynced,
                queue=lambda: 0.0,
                leading=lambda: False,
                lease_attempt_age=lambda: None,
                lease_seconds=0.0,
            )
            served = [
                # Who asks one that ends is to ask the next one.
                *BrokerRoutes(broker, jobs, lambda: not watches.unsynced() and not broker.closed).routes(),
                *routes(health, metrics.registry),
            ]
            port = await stack.enter_async_context(
                serving(served, host=settings.http_host, port=settings.http_port, most_bytes=MOST_BYTES)
            )
            serving_at(port)
            stack.push_async_callback(broker.close)
            return await self._run(watches, broker)

    def _context(self, job: RolloutJob, uid: str, namespace: str) -> PodContext:
        settings = self.settings
        return PodContext(
            job=job,
            uid=uid,
            namespace=namespace,
            worker_image=settings.worker_image,
            image_pull_policy=settings.image_pull_policy,
            run_as_user=settings.run_as_user,
            run_as_group=settings.run_as_group,
        )

    async def _run(self, watches: Watches, broker: Broker) -> int:
        self._listen()
        watching = asyncio.create_task(watches.run(self._listen), name="watches")
        sweeping = asyncio.create_task(self._sweep(watches, broker), name="sweeping")
        stop_requested = asyncio.create_task(self.stop.wait(), name="stop")
        tasks = {watching, sweeping, stop_requested}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stop_requested in done:
                return 0
            [failed, *_] = done
            _log.critical("stopping after a fatal error: %s", failed.exception(), exc_info=failed.exception())
            return 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    async def _sweep(watches: Watches, broker: Broker) -> None:
        await watches.wait_synced()
        # From now on workers can tell what they have.
        broker.begin()
        await broker.run()

    def _listen(self) -> None:
        set_on_end(self.stop)
