"""Keeps one engine at the weights that are wanted of it, which may change at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from kuberoll_api.contract import WeightsSource
from kuberoll_workers.serving.engines.interface import OWN_VERSION, Engine, WeightsRefused

_log = logging.getLogger("ray.serve")

_FIRST_WAIT_SECONDS = 2.0
_LONGEST_WAIT_SECONDS = 60.0


def wanted_weights(config: Mapping[str, Any] | None) -> WeightsSource | None:
    """The weights that a `user_config` asks for; None: the model's own.

    Raises:
        ValueError: It is not what `user_config` makes.
    """
    given = (config or {}).get("weights")
    return None if given is None else msgspec.convert(given, WeightsSource)


def version_of(weights: WeightsSource | None) -> str:
    """What the trajectories call them."""
    return OWN_VERSION if weights is None else weights.version


class LiveWeights:
    """Has an engine follow what is wanted.

    Weights that cannot be used leave the engine with those it has, and are tried again, until they can be or others
    are wanted: a trainer may have named them before it had written them.

    Attributes:
        problem: Why the wanted ones are not served; None: they are, or are being loaded.
    """

    def __init__(self, engine: Engine, *, first_wait: float = _FIRST_WAIT_SECONDS) -> None:
        self._engine = engine
        self._first_wait = first_wait
        self._wanted: WeightsSource | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.problem: str | None = None

    @property
    def served_version(self) -> str:
        """The version of the weights that the engine has."""
        return self._engine.info().policy_version

    async def load_initial(self, wanted: WeightsSource | None) -> None:
        """Load what a new replica is to serve, before it serves anything.

        Raises:
            WeightsRefused, PolicyUnavailable: It cannot serve that, and is not to serve anything else.
        """
        self._wanted = wanted
        if version_of(wanted) != self.served_version:
            await self._load(wanted)

    def set_wanted(self, wanted: WeightsSource | None) -> None:
        """Change the weights soon, without waiting for it."""
        self._wanted = wanted
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Change them no more."""
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
                self.problem = str(error)
                _log.warning("the weights %s cannot be used: %s", version_of(wanted), error)
            except Exception as error:
                # The engine's health says so too, and Serve replaces the replica.
                self.problem = f"{type(error).__name__}: {error}"
                _log.exception("the weights %s broke the engine", version_of(wanted))
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
