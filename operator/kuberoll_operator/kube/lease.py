"""Leader election by a Lease: one of several operators writes, and it stops before another could start."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError, Conflict, NotFound
from kuberoll_operator.kube.resources import LEASES
from kuberoll_operator.model import Object

_log = logging.getLogger(__name__)


def _seconds_with_suspensions() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


HOLDER_CLOCKS = (time.time, *((_seconds_with_suspensions,) if hasattr(time, "CLOCK_BOOTTIME") else ()))
"""Clocks that go on while a machine is suspended, or are set right after it was paused."""


class LeadershipLost(Exception):
    """Another operator holds the lease."""


class Elector:
    """Acquires and renews one Lease.

    The holder renews it every `retry_seconds`, by one request. It counts itself leader for `renew_seconds` from the
    start of the last successful renewal; others take the lease when they have seen no renewal for `lease_seconds`. Each
    operator measures on its own clocks, so differing clocks do no harm. The difference of the two times is left for
    writes in flight to end.

    The monotonic clock may stand still while a machine is suspended or paused. So the holder believes the fastest of
    its clocks, and whoever waits for the lease the monotonic one. A pause that no clock of the machine shows, not even
    the time of day, remains unseen.

    A holder that was late, because its process got no CPU or the API server did not answer, writes nothing until it has
    renewed the lease, and continues if no other operator has taken it in the meantime.

    Args:
        client: Client whose writes do not depend on the leadership.
        owner: Owner reference of the lease, so that it is deleted with its owner; None to keep it.
        clock: Monotonic seconds.
        holder_clocks: Further clocks, in seconds, that may show time in which the monotonic one stood still.
    """

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        name: str,
        identity: str,
        lease_seconds: float = 15.0,
        renew_seconds: float = 10.0,
        retry_seconds: float = 2.0,
        owner: Object | None = None,
        clock: Callable[[], float] = time.monotonic,
        holder_clocks: Sequence[Callable[[], float]] = HOLDER_CLOCKS,
    ) -> None:
        if not retry_seconds < renew_seconds < lease_seconds:
            raise ValueError(f"not in this order: {retry_seconds=}, {renew_seconds=}, {lease_seconds=}")
        self.identity = identity
        self._client, self._namespace, self._name = client, namespace, name
        self._lease, self._renew, self._retry = lease_seconds, renew_seconds, retry_seconds
        self._owner = owner
        self._clock = clock
        self._holder_clocks = (clock, *holder_clocks)
        # The holder's clocks at the start of the last renewal.
        self._renewed: list[float] | None = None
        # The lease as it was last read or written.
        self._lease_object: Object | None = None
        # State of another holder's lease, and the time since which it is unchanged.
        self._seen: tuple[object, float] = (None, 0.0)
        self._last_attempt: float | None = None

    @property
    def leading(self) -> bool:
        """True if this operator may write."""
        return self.remaining() > 0

    def remaining(self) -> float:
        """Seconds for which the leadership is certain; 0 if it is not."""
        if self._renewed is None:
            return 0.0
        passed = max(now - then for now, then in zip(self._read_holder_clocks(), self._renewed, strict=True))
        return max(0.0, self._renew - passed)

    def write_seconds(self) -> float:
        """Seconds in which a write that starts now must end; 0 if none may start."""
        return self.remaining() and self.remaining() + (self._lease - self._renew) / 2

    def attempt_age(self) -> float | None:
        """Seconds since the last attempt to get the lease, successful or not; None if there was none."""
        return None if self._last_attempt is None else self._clock() - self._last_attempt

    async def acquire(self) -> None:
        """Return as soon as this operator is the leader."""
        while True:
            if await self._try():
                break
            await asyncio.sleep(self._retry)
        _log.info("leading as %s", self.identity)

    async def hold(self) -> None:
        """Renew the lease until another operator holds it.

        Raises:
            LeadershipLost: Always, at that point.
        """
        while True:
            await asyncio.sleep(min(self._retry, self.remaining()) if self.leading else self._retry)
            if not await self._try() and self._holder() not in (self.identity, "", None):
                break
        self._renewed = None
        raise LeadershipLost(f"the lease {self._namespace}/{self._name} is held by {self._holder()}")

    async def release(self) -> None:
        """Release the lease, so that the next leader need not wait; does nothing if it is not held."""
        leading, self._renewed = self.leading, None
        if not leading:
            return
        try:
            # Read again: the last renewal may have been cancelled before its answer.
            lease = await self._client.get(LEASES, self._namespace, self._name)
            if lease is None or lease["spec"].get("holderIdentity") != self.identity:
                return
            spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
            await self._client.replace({**lease, "spec": spec})
        except ApiError as error:
            _log.warning("the lease was not released and will expire: %s", error)
        else:
            _log.info("released the lease")

    async def _try(self) -> bool:
        """Get or renew the lease if possible; False on errors, too."""
        start = self._last_attempt = self._clock()
        clocks = self._read_holder_clocks()
        try:
            held = self._holder() == self.identity and await self._renew_as_known()
            if not held and not await self._take(start):
                return False
        except Conflict:
            # Another operator was faster; the next read shows which.
            return False
        except ApiError as error:
            _log.warning("the lease cannot be read or renewed: %s", error)
            return False
        self._renewed = clocks
        return True

    def _read_holder_clocks(self) -> list[float]:
        return [clock() for clock in self._holder_clocks]

    async def _renew_as_known(self) -> bool:
        """Renew the lease without reading it; False if somebody has written it since."""
        try:
            self._lease_object = await self._client.replace(self._desired_lease(self._lease_object))
        except (Conflict, NotFound):
            return False
        return True

    async def _take(self, now: float) -> bool:
        """Read the lease, and take it if it is free or held by this operator."""
        lease = await self._client.get(LEASES, self._namespace, self._name)
        if lease is not None and not self._free(lease, now):
            return False
        wanted = self._desired_lease(lease)
        self._lease_object = await (self._client.create(wanted) if lease is None else self._client.replace(wanted))
        return True

    def _free(self, lease: Object, now: float) -> bool:
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity")
        state = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if holder in (self.identity, "", None):
            return True
        self._lease_object = lease
        if state != self._seen[0]:
            self._seen = (state, now)
            return False
        return now - self._seen[1] >= float(spec.get("leaseDurationSeconds") or self._lease)

    def _holder(self) -> str | None:
        return ((self._lease_object or {}).get("spec") or {}).get("holderIdentity")

    def _desired_lease(self, lease: Object | None) -> Object:
        before: dict[str, Any] = (lease or {}).get("spec") or {}
        now = _now()
        spec: dict[str, Any] = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, round(self._lease)),
            "renewTime": now,
            "acquireTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0),
        }
        if before.get("holderIdentity") == self.identity:
            spec["acquireTime"] = before.get("acquireTime") or now
        elif lease is not None:
            spec["leaseTransitions"] += 1
        metadata: dict[str, Any] = {"namespace": self._namespace, "name": self._name}
        if self._owner is not None:
            metadata["ownerReferences"] = [self._owner]
        if lease is not None:
            metadata["resourceVersion"] = lease["metadata"]["resourceVersion"]
        return {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
