"""Requests to the broker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
from pydantic import ValidationError

from kuberoll_api.sandboxes import (
    BROKER_VARIABLE,
    TOKEN_VARIABLE,
    WAIT_SECONDS,
    SandboxAnswer,
    SandboxRequest,
    WorkerSandboxes,
)
from kuberoll_workers.network.connections import tcp_connector
from kuberoll_workers.sandboxes.errors import SandboxUnavailable

_SECONDS: Final = 15.0
_CONNECT_SECONDS: Final = 5.0
_CHARACTERS: Final = 500


class BrokerUnreachable(Exception):
    """The broker does not answer, or cannot now: the same request may succeed later."""


class BrokerClient:
    """A client of the broker, for one job."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url.rstrip("/"), token
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of(cls, variables: Mapping[str, str] | None = None) -> BrokerClient:
        """The client of this worker.

        Args:
            variables: The environment; None: this process's.

        Raises:
            SandboxUnavailable: It has no broker.
        """
        given = os.environ if variables is None else variables
        missing = [name for name in (BROKER_VARIABLE, TOKEN_VARIABLE) if not given.get(name)]
        if missing:
            raise SandboxUnavailable(
                f"{' and '.join(missing)}: not set, so this worker knows no broker; the operator sets them where the "
                "chart's sandboxes.enabled is true"
            )
        return cls(given[BROKER_VARIABLE], given[TOKEN_VARIABLE])

    async def check(self) -> None:
        """Check that the broker is there and knows this job.

        Raises:
            SandboxUnavailable: It does not.
            BrokerUnreachable: It does not answer.
        """
        await self._request("GET", "")

    async def want(self, name: str, request: SandboxRequest, *, wait: float = WAIT_SECONDS) -> SandboxAnswer:
        """Ask for a sandbox, or go on asking.

        Args:
            wait: Seconds after which the broker says what it waits for; at most `WAIT_SECONDS`.

        Raises:
            SandboxUnavailable, BrokerUnreachable: As for `check`.
        """
        body = request.model_dump_json(by_alias=True, exclude_defaults=True)
        return self._answer(
            await self._request("PUT", f"/sandboxes/{name}?wait={wait:g}", body, seconds=wait + _SECONDS)
        )

    async def ending(self, name: str, *, wait: float) -> SandboxAnswer:
        """Ask what became of a sandbox that is lost.

        Args:
            wait: Seconds for which the broker waits for news of it.

        Raises:
            SandboxUnavailable, BrokerUnreachable: As for `check`.
        """
        return self._answer(await self._request("GET", f"/sandboxes/{name}?wait={wait:g}", seconds=wait + _SECONDS))

    def _answer(self, text: str) -> SandboxAnswer:
        try:
            return SandboxAnswer.model_validate_json(text)
        except ValidationError as error:
            raise SandboxUnavailable(f"{self._url} is no broker of this release: it answers {text[:80]!r}") from error

    async def release(self, name: str) -> None:
        """Have a sandbox removed.

        Raises:
            SandboxUnavailable, BrokerUnreachable: As for `check`.
        """
        await self._request("DELETE", f"/sandboxes/{name}")

    async def renew(self, worker: str, has: WorkerSandboxes) -> None:
        """Say what this worker has.

        Raises:
            SandboxUnavailable, BrokerUnreachable: As for `check`.
        """
        await self._request("PUT", f"/workers/{worker}", has.model_dump_json(by_alias=True))

    async def close(self) -> None:
        """Close its connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _request(self, method: str, path: str, body: str | None = None, *, seconds: float = _SECONDS) -> str:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=tcp_connector(limit=0),
                headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
            )
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(method, f"{self._url}{path}", data=body, timeout=timeout) as answer:
                text, status = await answer.text(errors="replace"), answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BrokerUnreachable(
                f"the broker {self._url} does not answer: {str(error) or type(error).__name__}"
            ) from error
        if status >= 500 or status == 429:
            raise BrokerUnreachable(f"the broker {self._url} answers {status}: {text[:_CHARACTERS]}")
        if status >= 300:
            raise SandboxUnavailable(f"the broker {self._url} answers {status}: {_words(text)}")
        return text


def _words(text: str) -> str:
    import json

    try:
        found: Any = json.loads(text)
        return str(found["error"])
    except (ValueError, KeyError, TypeError):
        return text[:_CHARACTERS]
