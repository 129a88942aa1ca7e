"""Leases of sandboxes: who has one keeps it alive, and learns when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Final

from kuberoll_api.metrics import Gauge
from kuberoll_workers.data.sandbox_uses import SandboxUse
from kuberoll_workers.sandboxes.driver import Driver, SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxError, SandboxLost
from kuberoll_workers.sandboxes.handle import Sandbox
from kuberoll_workers.sandboxes.meters import FAILED, REMOVED, STARTED, sandbox_meters
from kuberoll_workers.sandboxes.starts import Reservation, Starts
from kuberoll_workers.telemetry import definitions as metrics

_PING_SECONDS: Final = 15.0
_CHECK_SECONDS: Final = 10.0
# More would only have each other wait on one machine.
_PARALLEL_STARTS: Final = 8
# Longer than most starts take where there is room.
_PATIENCE_SECONDS: Final = 30.0
# A missed answer may be a busy machine's; the lease has room for this many.
_PINGS_PER_LEASE: Final = 4
_EXPLANATION_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


class Lease:
    """A sandbox that somebody has, until it is released.

    Attributes:
        sandbox: Its handle.
        start_seconds: Time that its start took, waiting for other starts included.
        use: What was had of it, once it has ended.
        lost: Set once it is known to be gone.
    """

    def __init__(self, sandbox: Sandbox, spec: SandboxSpec, start_seconds: float) -> None:
        self.sandbox = sandbox
        self.start_seconds = start_seconds
        self.use: SandboxUse | None = None
        self.lost = asyncio.Event()
        self._lost: SandboxLost | None = None
        self._renewing = asyncio.create_task(self._renew(spec.lease_seconds))

    async def check(self) -> None:
        """Check that the sandbox is there: what was done in one that is gone counts for nothing.

        Raises:
            SandboxLost: It is gone.
        """
        if self._lost is None:
            try:
                await self.sandbox.ping(seconds=_CHECK_SECONDS)
            except SandboxLost as error:
                self._lost = error
        if self._lost is not None:
            raise SandboxLost(str(self._lost)) from self._lost

    async def end(self) -> None:
        """Renew it no more, and close its handle."""
        self._renewing.cancel()
        await asyncio.wait((self._renewing,))
        await self.sandbox.close()

    async def _renew(self, seconds: float) -> None:
        pause = min(_PING_SECONDS, seconds / _PINGS_PER_LEASE)
        last = time.monotonic()
        while True:
            await asyncio.sleep(pause)
            try:
                await self.sandbox.ping(seconds=max(pause, 1.0))
                last = time.monotonic()
            except SandboxLost as error:
                if time.monotonic() - last > seconds:
                    self._lost = error
                    self.lost.set()
                    # Whoever waits for a command in it waits no longer.
                    self.sandbox.lose(error)
                    return


class Sandboxes:
    """Sandboxes of one environment.

    Attributes:
        meters: What is counted of them.
        give_way: Called whenever one that somebody needs has waited for `patience` seconds, and again after as many: as
            there may be no room for it beside those that nobody needs yet.
    """

    def __init__(
        self, driver: Driver, *, parallel_starts: int = _PARALLEL_STARTS, patience: float = _PATIENCE_SECONDS
    ) -> None:
        self._driver = driver
        self._starts = Starts(parallel_starts)
        self._patience = patience
        self.give_way: Callable[[], None] = lambda: None
        self._prefix = secrets.token_hex(4)
        self._count = 0
        self.meters = sandbox_meters()

    @property
    def in_use(self) -> int:
        """Number of those that are leased."""
        return int(self.meters.value(metrics.SANDBOXES_IN_USE))

    @property
    def started(self) -> int:
        """Number of those that were made."""
        return int(self.meters.value(metrics.SANDBOX_STARTS, STARTED))

    @property
    def lost(self) -> int:
        """Number of those that were gone before they were released."""
        return int(self.meters.value(metrics.SANDBOXES_LOST))

    async def check(self) -> None:
        """Check that sandboxes can be made; see `Driver.check`."""
        await self._driver.check()

    def refusal(self, spec: SandboxSpec) -> str | None:
        """Why there can never be such a sandbox; see `Driver.refusal`."""
        return self._driver.refusal(spec)

    @contextlib.asynccontextmanager
    async def lease(self, spec: SandboxSpec, reservation: Reservation | None = None) -> AsyncIterator[Lease]:
        """Have a sandbox for the time of the block, at whose end it is removed, however that comes.

        Args:
            reservation: Says when it is needed; None: at once.

        Raises:
            SandboxUnavailable: It cannot be made.
            SandboxLost: It ended while it started; or, at the end of a block without an error, it is gone.
        """
        self._count += 1
        name = f"sb-{self._prefix}-{self._count}"
        if reservation is None:
            reservation = Reservation()
            reservation.need()
        meters, asked, began = self.meters, time.time(), time.monotonic()
        try:
            with self._counted(metrics.SANDBOXES_WAITING, reservation), self._impatient(reservation):
                async with self._starts.place(reservation):
                    ticket = await self._driver.create(name, spec)
        except Exception as error:
            meters.add(metrics.SANDBOX_STARTS, FAILED)
            if isinstance(error, SandboxLost):
                meters.add(metrics.SANDBOXES_LOST)
            raise
        lease: Lease | None = None
        using = contextlib.ExitStack()
        try:
            lease = Lease(Sandbox(ticket), spec, time.monotonic() - began)
            using.enter_context(self._counted(metrics.SANDBOXES_IN_USE, reservation))
            meters.add(metrics.SANDBOX_STARTS, STARTED)
            meters.observe(metrics.SANDBOX_START_SECONDS, lease.start_seconds)
            try:
                yield lease
                # A result counts only if its sandbox was there all the time.
                await lease.check()
            except SandboxLost as lost:
                meters.add(metrics.SANDBOXES_LOST)
                raise await self._explained(name, lost) from lost
            except Exception as error:
                # Whatever it looks like to whom it happened: if the sandbox is gone, that is the reason.
                try:
                    await lease.check()
                except SandboxLost as lost:
                    meters.add(metrics.SANDBOXES_LOST)
                    raise await self._explained(name, lost) from error
                raise
            finally:
                using.close()
                await asyncio.shield(lease.end())
        finally:
            left = not await asyncio.shield(self._remove(name, spec))
            if lease is not None:
                ready, now = began + lease.start_seconds, time.monotonic()
                needed = now if reservation.needed_at is None else reservation.needed_at
                lease.use = SandboxUse(
                    asked=asked,
                    start_seconds=lease.start_seconds,
                    seconds=now - ready,
                    ahead_seconds=max(0.0, needed - ready),
                    left=left,
                )

    async def _explained(self, name: str, lost: SandboxLost) -> SandboxLost:
        """A loss with what whoever made the sandbox knows of it."""
        try:
            async with asyncio.timeout(_EXPLANATION_SECONDS):
                ending = await self._driver.ending(name)
        except Exception as error:
            _log.info("what became of the sandbox %s is not known: %s", name, error)
            return lost
        return lost if ending is None else SandboxLost(f"{lost}; {ending.text}", evidence=ending.evidence)

    async def close(self) -> None:
        """Remove all sandboxes."""
        await self._driver.close()

    @contextlib.contextmanager
    def _counted(self, gauge: Gauge, reservation: Reservation) -> Iterator[None]:
        """Count a sandbox in a gauge during the block, from when it is needed."""
        counted = 0

        def count() -> None:
            nonlocal counted
            counted = 1
            self.meters.add(gauge)

        with reservation.when_needed(count):
            try:
                yield
            finally:
                self.meters.add(gauge, by=-counted)

    @contextlib.contextmanager
    def _impatient(self, reservation: Reservation) -> Iterator[None]:
        """Ask those that nobody needs to give way, during a block that takes too long for one that is needed."""
        timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()

        def wait() -> None:
            nonlocal timer
            timer = loop.call_later(self._patience, ask)

        def ask() -> None:
            self.give_way()
            wait()

        with reservation.when_needed(wait):
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()

    async def _remove(self, name: str, spec: SandboxSpec) -> bool:
        """Remove a sandbox; returns whether that was done."""
        meters = self.meters
        try:
            await self._driver.remove(name)
        except SandboxError as error:
            # It ends by itself when nobody renews its lease.
            _log.warning("the sandbox %s could not be removed: %s", name, error)
            meters.add(metrics.SANDBOX_REMOVALS, FAILED)
            meters.add(metrics.SANDBOXES_LEFT)
            ended = partial(meters.add, metrics.SANDBOXES_LEFT, by=-1)
            asyncio.get_running_loop().call_later(spec.lease_seconds, ended)
            return False
        meters.add(metrics.SANDBOX_REMOVALS, REMOVED)
        return True
