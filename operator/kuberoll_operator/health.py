"""Whether the operator lives and is ready, with the reason where it is not, and its metrics: over HTTP."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry

from kuberoll_api.http_server import metrics_route

WATCH_SECONDS = 300.0
QUEUE_SECONDS = 300.0


class Health:
    """What `/healthz` and `/readyz` go by.

    Alive: the loop answers; no watch hangs; no job has waited, or been reconciled, for minutes; who leads renews.
    Restarting the process would mend each of these. An API server that is away is none of them.

    Ready: everything has been seen once, and this operator leads or stands by for it.
    """

    def __init__(
        self,
        *,
        watch: Callable[[], tuple[float, str]],
        unsynced: Callable[[], list[str]],
        queue: Callable[[], float],
        leading: Callable[[], bool],
        lease_tried: Callable[[], float | None],
        lease_seconds: float,
    ) -> None:
        self._watch, self._unsynced, self._queue = watch, unsynced, queue
        self._leading, self._lease_tried, self._lease_seconds = leading, lease_tried, lease_seconds

    def live_problems(self) -> list[str]:
        """Why the process should be restarted; empty where it is well."""
        found = []
        age, kind = self._watch()
        if age > WATCH_SECONDS:
            found.append(f"watch: no sign of life of {kind} for {age:.0f} s")
        if self._leading() and (waited := self._queue()) > QUEUE_SECONDS:
            found.append(f"queue: a job has waited for {waited:.0f} s")
        return found + self._lease_problems()

    def ready_problems(self) -> list[str]:
        """Why the operator does not do its work; empty where it does."""
        unsynced = self._unsynced()
        found = [f"cache: not all seen yet of {', '.join(unsynced)}"] if unsynced else []
        return found + self._lease_problems()

    def _lease_problems(self) -> list[str]:
        age = self._lease_tried()
        if age is None or age <= 2 * self._lease_seconds:
            return []
        return [f"lease: neither renewed nor asked for since {age:.0f} s"]


def routes(health: Health, registry: CollectorRegistry) -> list[web.RouteDef]:
    """`/healthz`, `/readyz` and `/metrics`."""

    def answering(problems: Callable[[], list[str]]) -> Callable[[web.Request], object]:
        async def answer(_: web.Request) -> web.Response:
            found = problems()
            return web.Response(text="\n".join(found) or "ok", status=503 if found else 200)

        return answer

    return [
        web.get("/healthz", answering(health.live_problems)),  # type: ignore[arg-type]
        web.get("/readyz", answering(health.ready_problems)),  # type: ignore[arg-type]
        metrics_route(registry),
    ]
