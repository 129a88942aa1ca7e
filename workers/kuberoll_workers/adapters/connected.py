"""Environments whose episodes are connections to servers."""

from __future__ import annotations

import abc
import asyncio
from typing import Generic, Protocol, TypeVar

from kuberoll_workers.adapters.background import BackgroundLoop
from kuberoll_workers.environments.interface import EnvironmentInterface, Episode, EpisodeEnd, EpisodeStart


class Connection(Protocol):
    """What an episode holds at its servers."""

    async def close(self) -> None:
        """End it."""
        ...


_Connection = TypeVar("_Connection", bound=Connection)


class ConnectedEnvironment(EnvironmentInterface, Generic[_Connection]):
    """An environment with a connection for each episode, which begins with it and ends with it.

    Connections live in a loop of their own: the loop of a batch may be another one each time.
    """

    def __init__(self) -> None:
        self._loop = BackgroundLoop()
        self._connections: dict[str, _Connection] = {}

    async def reset(self, episodes: list[Episode]) -> list[EpisodeStart | None]:  # type: ignore[override]
        """Begin the episodes side by side.

        Raises:
            ServerError: A server cannot be reached, or failed.
        """
        return list(await asyncio.gather(*map(self._begin, episodes)))

    @abc.abstractmethod
    async def _begin(self, episode: Episode) -> EpisodeStart:
        """Begin an episode, whose earlier connection is closed."""

    async def close(self, episodes: list[EpisodeEnd]) -> None:  # type: ignore[override]
        """End the connections of the episodes."""
        await asyncio.gather(*(self._free(episode.id) for episode in episodes))

    async def shutdown(self) -> None:  # type: ignore[override]
        """End all connections."""
        await asyncio.gather(*map(self._free, list(self._connections)))
        self._loop.stop()

    async def _free(self, name: str) -> None:
        connection = self._connections.pop(name, None)
        if connection is not None:
            await self._loop.run(connection.close())
