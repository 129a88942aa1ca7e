"""Leases of sandboxes: who has one keeps it alive, and learns when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Final

from kuberoll_workers.sandboxes.driver import Driver, SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxError, SandboxLost
from kuberoll_workers.sandboxes.handle import Sandbox

_PING_SECONDS: Final = 15.0
_CHECK_SECONDS: Final = 10.0
# A missed answer may be a busy machine's; the lease has room for this many.
_PINGS_PER_LEASE: Final = 4

_log = logging.getLogger(__name__)


class Lease:
    """A sandbox that somebody has, until it is released.

    Attributes:
        sandbox: Its handle.
        start_seconds: Time that its start took, waiting for other starts included.
    """

    def __init__(self, sandbox: Sandbox, spec: SandboxSpec, start_seconds: float) -> None:
        self.sandbox = sandbox
        self.start_seconds = start_seconds
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
                    return


class Sandboxes:
    """Sandboxes of one environment.

    Attributes:
        in_use: Number of those that are leased.
        started: Number of those that were made.
        lost: Number of those that were gone before they were released.
    """

    def __init__(self, driver: Driver, *, parallel_starts: int = 8) -> None:
        self._driver = driver
        self._starting = asyncio.Semaphore(parallel_starts)
        self._prefix = secrets.token_hex(4)
        self._count = 0
        self.in_use = self.started = self.lost = 0

    async def check(self) -> None:
        """Check that sandboxes can be made; see `Driver.check`."""
        await self._driver.check()

    def refusal(self, spec: SandboxSpec) -> str | None:
        """Why there can never be such a sandbox; see `Driver.refusal`."""
        return self._driver.refusal(spec)

    @contextlib.asynccontextmanager
    async def lease(self, spec: SandboxSpec) -> AsyncIterator[Lease]:
        """Have a sandbox for the time of the block, at whose end it is removed, however that comes.

        Raises:
            SandboxUnavailable: It cannot be made.
            SandboxLost: It ended while it started; or, at the end of a block without an error, it is gone.
        """
        self._count += 1
        name = f"sb-{self._prefix}-{self._count}"
        began = time.monotonic()
        async with self._starting:
            ticket = await self._driver.create(name, spec)
        try:
            lease = Lease(Sandbox(ticket), spec, time.monotonic() - began)
            self.in_use += 1
            self.started += 1
            try:
                yield lease
                # A result counts only if its sandbox was there all the time.
                await lease.check()
            except SandboxLost:
                self.lost += 1
                raise
            except Exception as error:
                # Whatever it looks like to whom it happened: if the sandbox is gone, that is the reason.
                try:
                    await lease.check()
                except SandboxLost as lost:
                    self.lost += 1
                    raise lost from error
                raise
            finally:
                self.in_use -= 1
                await asyncio.shield(lease.end())
        finally:
            await asyncio.shield(self._remove(name))

    async def close(self) -> None:
        """Remove all sandboxes."""
        await self._driver.close()

    async def _remove(self, name: str) -> None:
        try:
            await self._driver.remove(name)
        except SandboxError as error:
            # It ends by itself when nobody renews its lease.
            _log.warning("the sandbox %s could not be removed: %s", name, error)
