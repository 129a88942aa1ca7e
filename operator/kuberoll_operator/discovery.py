"""Discovery of optional APIs: at the start of the operator, and periodically afterwards.

KubeRay, Kueue, LeaderWorkerSet and agent-sandbox may be installed or removed later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Final

from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError
from kuberoll_operator.kube.resources import LEADER_WORKER_SETS, RAY_SERVICES, SANDBOX_CLAIMS, WORKLOADS, Resource

ASK_SECONDS = 180.0
RETRY_SECONDS = 2.0

OPTIONAL: Final[Mapping[str, Resource]] = {
    "kuberay": RAY_SERVICES,
    "kueue": WORKLOADS,
    "leader_worker_set": LEADER_WORKER_SETS,
    "agent_sandbox": SANDBOX_CLAIMS,
}
"""Kinds that are used if the cluster serves them, by the setting that tells if it does."""

_log = logging.getLogger(__name__)


async def served_kinds(
    client: Client, settings: Collection[str] = tuple(OPTIONAL), *, retry_seconds: float = RETRY_SECONDS
) -> dict[str, bool]:
    """Setting name -> True if its kind is served; waits while the API server cannot be reached.

    Args:
        settings: Keys of OPTIONAL.
    """
    found: dict[str, bool] = {}
    for name in settings:
        while name not in found:
            try:
                found[name] = await client.serves(OPTIONAL[name])
            except ApiError as error:
                _log.warning("cannot tell yet if %s are served: %s", OPTIONAL[name].plural, error)
                await asyncio.sleep(retry_seconds)
    return found


async def wait_for_change(
    client: Client, known: Mapping[str, bool], *, seconds: float = ASK_SECONDS
) -> dict[str, bool]:
    """Wait until one of the kinds is installed or removed; returns what is served then."""
    while True:
        await asyncio.sleep(seconds)
        if (found := await served_kinds(client, tuple(known))) != dict(known):
            return found
