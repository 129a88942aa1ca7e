"""Whether the cluster has KubeRay: asked when the operator starts, and now and again, as it may be installed later."""

from __future__ import annotations

import asyncio
import logging

from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError
from kuberoll_operator.kube.resources import RAY_SERVICES

ASK_SECONDS = 180.0
RETRY_SECONDS = 2.0

_log = logging.getLogger(__name__)


async def serves_kuberay(client: Client, *, retry_seconds: float = RETRY_SECONDS) -> bool:
    """Whether RayServices are served; waits for an API server that is away."""
    while True:
        try:
            return await client.serves(RAY_SERVICES)
        except ApiError as error:
            _log.warning("whether KubeRay is there is not known yet: %s", error)
            await asyncio.sleep(retry_seconds)


async def kuberay_changes(client: Client, known: bool, *, seconds: float = ASK_SECONDS) -> bool:
    """Returns, with what is so then, when KubeRay was installed or removed."""
    while True:
        await asyncio.sleep(seconds)
        if (found := await serves_kuberay(client)) is not known:
            return found
