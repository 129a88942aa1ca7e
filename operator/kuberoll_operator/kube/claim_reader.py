"""PersistentVolumeClaims of outputs, read before workers are made; their access modes never change."""

from __future__ import annotations

import logging
from typing import Final

from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import Forbidden
from kuberoll_operator.kube.remembered import RememberingReader
from kuberoll_operator.kube.resources import PERSISTENT_VOLUME_CLAIMS
from kuberoll_operator.model import Object

REMEMBER_SECONDS: Final = 600.0
"""A claim may be deleted, and another one be made of its name."""

_log = logging.getLogger(__name__)


class ClaimReader:
    """Reads claims, as far as the operator may."""

    def __init__(self, client: Client) -> None:
        self._reader = RememberingReader(client, seconds=REMEMBER_SECONDS)
        self._warned = False

    async def read(self, namespace: str, name: str) -> Object | None:
        """A claim; None if it does not exist, or may not be read.

        Raises:
            ApiError: It could not be read this time.
        """
        try:
            return await self._reader.get(PERSISTENT_VOLUME_CLAIMS, namespace, name)
        except Forbidden as error:
            if not self._warned:
                _log.warning("workers of ReadWriteOnce volumes are not kept together: claims cannot be read: %s", error)
            self._warned = True
            return None
