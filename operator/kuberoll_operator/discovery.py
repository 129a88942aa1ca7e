"""Which APIs of others the cluster serves: asked when the operator starts, and now and again.

KubeRay, Kueue and LeaderWorkerSet may be installed or removed later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Final

from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError
from kuberoll_operator.kube.resources import LEADER_WORKER_SETS, RAY_SERVICES, WORKLOADS, Resource

ASK_SECONDS = 180.0
RETRY_SECONDS = 2.0

OPTIONAL: Final[Mapping[str, Resource]] = {
    "kuberay": RAY_SERVICES,
    "kueue": WORKLOADS,
    "leader_worker_set": LEADER_WORKER_SETS,
}
"""The kinds that are used where they are served, by the setting that says whether they are."""

_log = logging.getLogger(__name__)


async def served(
    client: Client, settings: Collection[str] = tuple(OPTIONAL), *, retry_seconds: float = RETRY_SECONDS
) -> dict[str, bool]:
    """Whether each of these kinds is served; waits for an API server that is away.

    Args:
        settings: Keys of OPTIONAL.
    """
    found: dict[str, bool] = {}
    for name in settings:
        while name not in found:
            try:
                found[name] = await client.serves(OPTIONAL[name])
            except ApiError as error:
                _log.warning("whether %s are served is not known yet: %s", OPTIONAL[name].plural, error)
                await asyncio.sleep(retry_seconds)
    return found


async def changes(client: Client, known: Mapping[str, bool], *, seconds: float = ASK_SECONDS) -> dict[str, bool]:
    """Returns, with what is served then, when one of the kinds was installed or removed."""
    while True:
        await asyncio.sleep(seconds)
        if (found := await served(client, tuple(known))) != dict(known):
            return found
