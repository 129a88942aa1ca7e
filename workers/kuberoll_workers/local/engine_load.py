"""The tokens that a run's engine is generating, for the progress on the terminal."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import PolicyError

POLL_SECONDS = 1.0
_ANSWER_SECONDS = 5.0


class EngineLoad:
    """A poll of the replicas behind an endpoint.

    Attributes:
        tokens: Tokens generated so far for requests that are not answered yet, of all replicas.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._token = token
        self._clients: dict[str, ServeClient] = {}
        self.tokens = 0

    async def poll(self) -> None:
        """Update `tokens` each second until cancelled; a replica that does not answer counts as 0."""
        async with AsyncExitStack() as stack:
            endpoint = await self._client(stack, self._url)
            while True:
                try:
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        self.tokens = await self._count(stack, endpoint)
                except (PolicyError, TimeoutError):
                    self.tokens = 0
                await asyncio.sleep(POLL_SECONDS)

    async def _count(self, stack: AsyncExitStack, endpoint: ServeClient) -> int:
        urls = [url for _, url in await endpoint.replicas()]
        clients = [await self._client(stack, url) for url in urls] or [endpoint]
        return sum(info.tokens_in_flight for info in await asyncio.gather(*(client.info() for client in clients)))

    async def _client(self, stack: AsyncExitStack, url: str) -> ServeClient:
        if url not in self._clients:
            client = ServeClient(url, limit=1, token=self._token)
            self._clients[url] = await stack.enter_async_context(client)
        return self._clients[url]
