"""Served models that built-in environments ask: their addresses, keys and limits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from kuberoll_api.model.types import DNS_LABEL_PATTERN, JsonObject
from kuberoll_api.policy_access import api_url
from kuberoll_workers.environments.builtin.config import EnvironmentConfig
from kuberoll_workers.environments.model_client import ModelClient, RequestLimits
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.environments.served_models import ServedModel, policy_endpoint, service_endpoint

Url = Annotated[str, StringConstraints(min_length=1, max_length=2048, pattern=r"^https?://")]
_Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class ServerConfig(EnvironmentConfig):
    """A served model, and how it is asked."""

    url: Url | None = Field(
        default=None, description="Base URL of an OpenAI-compatible API, with or without /v1; absent: the policy's own."
    )
    service: Annotated[str, StringConstraints(pattern=DNS_LABEL_PATTERN, max_length=63)] | None = Field(
        default=None, description="Name of one of the job's spec.services, instead of url."
    )
    model: _Name | None = Field(default=None, description="The model's name there; absent: the first that it lists.")
    api_key_variable: _Name | None = Field(
        default=None,
        description="Environment variable with the API key; absent: none, or the token of the policy or service.",
    )
    request: JsonObject = Field(
        default_factory=dict, description="Further fields of each request, such as seed; null leaves a field out."
    )
    parallel: int = Field(default=16, ge=1, le=4096, description="Maximum number of requests at the same time.")
    attempts: int = Field(
        default=5, ge=1, le=100, description="Attempts of a request that is refused for load, or not answered."
    )
    request_seconds: float = Field(default=60.0, gt=0, le=86400, description="Time limit of one attempt.")

    @property
    def limits(self) -> RequestLimits:
        """Limits of its requests."""
        return RequestLimits(attempts=self.attempts, seconds=self.request_seconds, parallel=self.parallel)

    @property
    def place(self) -> str:
        """The model's place, for messages."""
        return self.url or ("the policy" if self.service is None else f"the service {self.service}")

    def address(self) -> ServedModel:
        """Address of the model.

        Raises:
            UnusableEnvironment: The variable of the key is not set, or there is no access to the policy or service.
        """
        if self.url is not None:
            return ServedModel(url=api_url(self.url), token=self._key())
        served = policy_endpoint() if self.service is None else service_endpoint(self.service)
        return served if self.api_key_variable is None else ServedModel(url=served.url, token=self._key())

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if self.url is not None and self.service is not None:
            raise ValueError("url and service name two servers; remove one")
        return self

    def _key(self) -> str | None:
        if self.api_key_variable is None:
            return None
        if not (key := os.environ.get(self.api_key_variable)):
            raise UnusableEnvironment(
                f"config.apiKeyVariable: {self.api_key_variable} is not set for this environment: set it with "
                "spec.workers.env, and with isolation Process name it in access.variables"
            )
        return key


class Server:
    """A served model that is asked from changing event loops, one after the other, with one bound on its requests."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._model = config.model
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[ModelClient, str]]:
        """A client, and the name of the model.

        Raises:
            ServerFailed: The server does not say which models it has.
        """
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._config.parallel))
        async with ModelClient(self._config.address(), self._config.limits, self._slots[1]) as client:
            if self._model is None:
                self._model = await client.first_model()
            yield client, self._model
