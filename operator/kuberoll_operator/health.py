"""Liveness, readiness and metrics of the operator over HTTP."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry

from kuberoll_api.http_server import metrics_route

WATCH_SECONDS = 300.0
QUEUE_SECONDS = 300.0


class Health:
    """Checks behind `/healthz` and `/readyz`.

    Alive: the loop answers, no watch hangs, no job has waited or been reconciled for minutes, and the leader renews its
    lease. A restart would help against each of these faults. It would not help against an unreachable API server, which
    is therefore not among them.

    Ready: everything has been listed once, and this operator leads or is a standby.
    """

    def __init__(
        self,
        *,
        watch: Callable[[], tuple[float, str]],
        unsynced: Callable[[], list[str]],
        queue: Callable[[], float],
        leading: Callable[[], bool],
        lease_attempt_age: Callable[[], float | None],
        lease_seconds: float,
    ) -> None:
        self._watch, self._unsynced, self._queue = watch, unsynced, queue
        self._leading, self._lease_attempt_age, self._lease_seconds = leading, lease_attempt_age, lease_seconds

    def live_problems(self) -> list[str]:
        """Reasons to restart the process; empty if it is healthy."""
        found = []
        age, kind = self._watch()
        if age > WATCH_SECONDS:
            found.append(f"watch: no activity of {kind} for {age:.0f} s")
        if self._leading() and (waited := self._queue()) > QUEUE_SECONDS:
            found.append(f"queue: a job has waited for {waited:.0f} s")
        return found + self._lease_problems()

    def ready_problems(self) -> list[str]:
        """Reasons why the operator is not ready; empty if it is."""
        unsynced = self._unsynced()
        found = [f"cache: not yet listed completely: {', '.join(unsynced)}"] if unsynced else []
        return found + self._lease_problems()

    def _lease_problems(self) -> list[str]:
        age = self._lease_attempt_age()
        if age is None or age <= 2 * self._lease_seconds:
            return []
        return [f"lease: neither renewed nor requested for {age:.0f} s"]


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
