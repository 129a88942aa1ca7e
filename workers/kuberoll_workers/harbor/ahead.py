"""Machines that are started before their episodes begin, each for one episode."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Final

from kuberoll_workers.sandboxes.errors import SandboxLost
from kuberoll_workers.sandboxes.leases import Lease, Sandboxes
from kuberoll_workers.sandboxes.meters import FAILED, UNUSED, USED
from kuberoll_workers.sandboxes.starts import Reservation
from kuberoll_workers.telemetry import definitions as metrics

AHEAD_SECONDS: Final = 3600.0
"""Time after which a machine that nobody has needed is replaced, so that it never ends early for its trajectory."""
_SHORT_SECONDS: Final = 60.0

Starting = Callable[[Reservation], AbstractAsyncContextManager[Lease]]
"""Starts a machine, and has it ready for the time of the block."""

_log = logging.getLogger(__name__)


class MachinesAhead:
    """Machines by the names of the episodes that they are for.

    Each is taken by its episode, or removed. One that is lost, or too old, is replaced before anybody needs it. While
    others find no room, those that nobody needs yet give way to them, the last ones first.
    """

    def __init__(self, sandboxes: Sandboxes, *, seconds: float = AHEAD_SECONDS) -> None:
        self._sandboxes, self._seconds = sandboxes, seconds
        self._machines: dict[str, _Machine] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self._short_until = 0.0
        sandboxes.give_way = self._give_way

    @property
    def names(self) -> frozenset[str]:
        """Names of the episodes that have a machine, or will."""
        return frozenset(self._machines)

    @property
    def ready(self) -> int:
        """Number of machines that are ready and not taken."""
        return sum(machine.is_ready for machine in list(self._machines.values()))

    def prepare(self, name: str, start: Starting) -> None:
        """Begin to start a machine for an episode; does nothing while there is no room for those that are needed."""
        if name not in self._machines and time.monotonic() >= self._short_until:
            self._machines[name] = _Machine(self._sandboxes, start, self._seconds)
            self._sandboxes.meters.add(metrics.SANDBOXES_AHEAD)

    async def discard(self, name: str) -> None:
        """Remove the machine of an episode, unless that has taken it."""
        if (machine := self._pop(name)) is not None:
            await self._remove(machine, UNUSED)

    @contextlib.asynccontextmanager
    async def machine(self, name: str, start: Starting) -> AsyncIterator[Lease]:
        """The machine of an episode for the time of the block: the one that was started ahead, or else a new one.

        Raises:
            Exception: What `start` raises.
        """
        async with AsyncExitStack() as stack:
            if (lease := await self._take(name, stack)) is None:
                needed = Reservation()
                needed.need()
                lease = await stack.enter_async_context(start(needed))
            yield lease

    async def close(self) -> None:
        """Remove all machines that nobody has taken."""
        await asyncio.gather(*map(self.discard, list(self._machines)))
        if self._removals:
            await asyncio.wait(self._removals)

    async def _take(self, name: str, stack: AsyncExitStack) -> Lease | None:
        """Move an episode's machine into a stack, once it is ready; None: there is none, or it is lost."""
        if (machine := self._pop(name)) is None:
            return None
        try:
            found = await machine.take()
        except BaseException:
            await self._remove(machine, UNUSED)
            raise
        if found is None:
            self._count(FAILED)
            return None
        try:
            await found.lease.check()
        except SandboxLost as lost:
            self._count(FAILED)
            await found.close(lost)
            return None
        except BaseException:
            self._count(UNUSED)
            await asyncio.shield(found.close())
            raise
        self._count(USED)
        stack.push_async_exit(found.stack)
        return found.lease

    def _pop(self, name: str) -> _Machine | None:
        machine = self._machines.pop(name, None)
        if machine is not None:
            self._sandboxes.meters.add(metrics.SANDBOXES_AHEAD, by=-1)
        return machine

    async def _remove(self, machine: _Machine, result: str) -> None:
        self._count(result)
        # Whoever asks for it may be stopped.
        removal = asyncio.create_task(machine.end())
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        await asyncio.shield(removal)

    def _count(self, result: str) -> None:
        self._sandboxes.meters.add(metrics.SANDBOXES_PREPARED, result)

    def _give_way(self) -> None:
        self._short_until = time.monotonic() + _SHORT_SECONDS
        if self._machines:
            name = next(reversed(self._machines))
            _log.info("the sandbox that was started ahead for %s gives way to one that is needed now", name)
            removal = asyncio.create_task(self.discard(name))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)


class _Ready:
    """A machine that is ready, with the stack that ends it."""

    def __init__(self, lease: Lease, stack: AsyncExitStack) -> None:
        self.lease, self.stack = lease, stack

    async def close(self, lost: SandboxLost | None = None) -> None:
        """End it; that it is lost is no news to anybody."""
        with contextlib.suppress(SandboxLost):
            await self.stack.__aexit__(None if lost is None else type(lost), lost, None)


class _Machine:
    """A machine that waits for its episode."""

    def __init__(self, sandboxes: Sandboxes, start: Starting, seconds: float) -> None:
        self._sandboxes, self._start, self._seconds = sandboxes, start, seconds
        self._reservation = Reservation()
        self._ready: _Ready | None = None
        # It is ready, or will never be.
        self._settled = asyncio.Event()
        self._task = asyncio.create_task(self._keep())

    @property
    def is_ready(self) -> bool:
        """True while it can be taken at once."""
        return self._ready is not None

    async def take(self) -> _Ready | None:
        """Take it, once it is ready; None: it could not be started."""
        self._reservation.need()
        await self._settled.wait()
        ready, self._ready = self._ready, None
        await self._stop()
        return ready

    async def end(self) -> None:
        """Remove it."""
        await self._stop()
        if (ready := self._ready) is not None:
            self._ready = None
            await ready.close()

    async def _stop(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _keep(self) -> None:
        """Have a machine ready, and another one when it is lost or old."""
        try:
            while True:
                stack = AsyncExitStack()
                lease = await stack.enter_async_context(self._start(self._reservation))
                self._ready = ready = _Ready(lease, stack)
                self._settled.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._seconds):
                        await lease.lost.wait()
                if self._ready is not ready:
                    return
                self._ready = None
                self._settled.clear()
                self._sandboxes.meters.add(metrics.SANDBOXES_PREPARED, FAILED if lease.lost.is_set() else UNUSED)
                await asyncio.shield(ready.close())
        except Exception as error:
            # Its episode tries again, and says why it cannot.
            _log.info("a sandbox could not be started ahead: %s", error)
        finally:
            self._settled.set()
