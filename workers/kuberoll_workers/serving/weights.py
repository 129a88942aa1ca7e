"""Loading of the weights that one engine is to serve, which may change at any time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from kuberoll_api.contract import WeightsSource
from kuberoll_workers.serving.engines.interface import OWN_VERSION, Engine, WeightsRefused
from kuberoll_workers.serving.publications import Publication, Publications

_log = logging.getLogger("ray.serve")

_FIRST_WAIT_SECONDS = 2.0
_LONGEST_WAIT_SECONDS = 60.0


def configured_weights(config: Mapping[str, Any] | None) -> WeightsSource | None:
    """The weights that a `user_config` names; None: the model's own.

    Raises:
        ValueError: It is malformed.
    """
    given = (config or {}).get("weights")
    return None if given is None else msgspec.convert(given, WeightsSource)


def version_of(weights: WeightsSource | None) -> str:
    """The version of weights as trajectories record it."""
    return OWN_VERSION if weights is None else weights.version


class LiveWeights:
    """Loads the wanted weights into an engine.

    If they cannot be used, the engine keeps its present ones, and loading is retried until it succeeds or others are
    wanted: a trainer may publish weights before it has written them.

    Attributes:
        problem: Why the wanted weights are not served; None: they are served or being loaded.
        on_break: Called with weights that broke the engine.
    """

    def __init__(self, engine: Engine, *, first_wait: float = _FIRST_WAIT_SECONDS) -> None:
        self._engine = engine
        self._first_wait = first_wait
        self._wanted: WeightsSource | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.problem: str | None = None
        self.on_break: Callable[[WeightsSource | None], Awaitable[None]] | None = None
        self._broken = False

    @property
    def served_version(self) -> str:
        """The version of the weights that the engine has."""
        return self._engine.info().policy_version

    async def load_initial(self, wanted: WeightsSource | None) -> None:
        """Load the weights of a new replica, before it serves requests.

        Raises:
            WeightsRefused, PolicyUnavailable: They cannot be loaded; the replica must not serve others instead.
        """
        self._wanted = wanted
        if version_of(wanted) != self.served_version:
            await self._load(wanted)

    def set_wanted(self, wanted: WeightsSource | None) -> None:
        """Set the wanted weights; they are loaded in the background."""
        if self._broken:
            return
        if wanted != self._wanted:
            # It was one with others.
            self.problem = None
        self._wanted = wanted
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Stop loading."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self) -> None:
        wait = self._first_wait
        while True:
            self._changed.clear()
            wanted = self._wanted
            try:
                if version_of(wanted) != self.served_version:
                    await self._load(wanted)
                    _log.info("serving the weights %s", version_of(wanted))
                self.problem = None
                if wanted == self._wanted:
                    return
                continue
            except WeightsRefused as error:
                if wanted != self._wanted:
                    continue
                self.problem = str(error)
                _log.warning("the weights %s cannot be used: %s", version_of(wanted), error)
            except Exception as error:
                # The engine's health check fails too, and Serve replaces the replica.
                self._broken, self.problem = True, f"{type(error).__name__}: {error}"
                _log.exception("the weights %s broke the engine", version_of(wanted))
                if self.on_break is not None:
                    await self.on_break(wanted)
                return
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
                wait = self._first_wait
            except TimeoutError:
                wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    async def _load(self, wanted: WeightsSource | None) -> None:
        uri = None if wanted is None else wanted.uri
        await self._engine.load_weights(uri, version_of(wanted))


class WeightsFollower:
    """Has a replica's engine load the newest published weights.

    The log of publications is read when a replica starts, when it is told of a new entry, and periodically, so that no
    entry is missed.
    """

    def __init__(self, publications: Publications, live: LiveWeights, args: Mapping[str, Any]) -> None:
        """`args` are the application's arguments."""
        self._publications = publications
        self._live = live
        self._args = args
        self._configured: WeightsSource | None = None
        # Whether the log may lack the configuration.
        self._unlogged = False
        self._followed: Publication | None = None
        self._reading = asyncio.Lock()
        self._news = False
        self._task: asyncio.Task[None] | None = None
        live.on_break = self._withdraw

    async def start(self, configured: WeightsSource | None) -> None:
        """Load the newest weights, before the replica serves requests.

        Args:
            configured: The weights that the application's configuration names.

        Raises:
            WeightsRefused, PolicyUnavailable: They cannot be loaded; the replica must not serve others instead.
        """
        self._configured, self._unlogged = configured, True
        self._followed = newest = await self._read()
        await self._live.load_initial(newest.weights)

    def configure(self, configured: WeightsSource | None) -> None:
        """Take over changed weights from the application's configuration, in place of published ones."""
        self._configured, self._unlogged = configured, True
        self.follow_soon()

    async def follow(self) -> WeightsSource | None:
        """Read the log, have the newest weights loaded in the background, and return them."""
        async with self._reading:
            newest, followed = await self._read(), self._followed
            if newest.configuration == self._configuration() and (followed is None or newest.number > followed.number):
                self._followed = followed = newest
                self._live.set_wanted(newest.weights)
            return None if followed is None else followed.weights

    def follow_soon(self) -> None:
        """Do the same in the background; errors are logged."""
        self._news = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._follow_quietly())

    async def stop(self) -> None:
        """Stop following, and loading."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._live.stop()

    async def _withdraw(self, broken: WeightsSource | None) -> None:
        """Withdraw weights that broke this engine: they would break the others, and the replica that replaces this one.

        Where none is left that takes requests, nobody could publish others.
        """
        followed = self._followed
        if followed is None or followed.weights != broken:
            return
        try:
            restored = await asyncio.to_thread(self._publications.withdraw, followed.number)
        except Exception:
            _log.exception("the weights %s cannot be withdrawn", version_of(broken))
            return
        if restored is not None:
            _log.warning("withdrew the weights %s: back to %s", version_of(broken), version_of(restored.weights))

    async def _follow_quietly(self) -> None:
        while self._news:
            self._news = False
            try:
                await self.follow()
            except Exception:
                # The next health check tries again.
                _log.exception("the published weights cannot be read")

    async def _read(self) -> Publication:
        configured = self._configured
        if not self._unlogged and (newest := await asyncio.to_thread(self._publications.newest)) is not None:
            return newest
        newest = await asyncio.to_thread(self._publications.configure, self._configuration(), configured)
        self._unlogged = configured != self._configured
        return newest

    def _configuration(self) -> str:
        """Digest of the application's configuration: of its arguments and its weights."""
        content = msgspec.json.encode([self._args, self._configured], order="deterministic")
        return hashlib.blake2b(content, digest_size=16).hexdigest()
