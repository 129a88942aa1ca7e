"""PersistentVolumeClaims of outputs, read before workers are made; their access modes never change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import Forbidden
from kuberoll_operator.kube.resources import PERSISTENT_VOLUME_CLAIMS
from kuberoll_operator.model import Object

REMEMBER_SECONDS: Final = 600.0
"""A claim may be deleted, and another one be made of its name."""

_log = logging.getLogger(__name__)


class ClaimReader:
    """Reads claims, whose access modes never change."""

    def __init__(self, client: Client, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._known: dict[tuple[str, str], tuple[float, Object]] = {}

    async def read(self, namespace: str, name: str) -> Object | None:
        """A claim; None if it does not exist, or may not be read.

        Raises:
            ApiError: It could not be read this time.
        """
        now = self._clock()
        self._known = {key: item for key, item in self._known.items() if now - item[0] < REMEMBER_SECONDS}
        if (known := self._known.get((namespace, name))) is not None:
            return known[1]
        try:
            found = await self._client.get(PERSISTENT_VOLUME_CLAIMS, namespace, name)
        except Forbidden as error:
            _log.warning(
                "claims cannot be read, so that workers of ReadWriteOnce volumes are not kept together: %s", error
            )
            return None
        if found is not None:
            self._known[namespace, name] = now, found
        return found
