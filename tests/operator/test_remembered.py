"""What is read once and remembered for a while."""

from __future__ import annotations

import logging

import pytest

from kuberoll_operator.kube.claim_reader import ClaimReader
from kuberoll_operator.kube.errors import Forbidden
from kuberoll_operator.kube.remembered import RememberingReader
from kuberoll_operator.kube.resources import PERSISTENT_VOLUME_CLAIMS, Resource
from kuberoll_operator.model import Object


class Api:
    """An API server that has one object, or none, or no rights for it."""

    def __init__(self, live: Object | None) -> None:
        self.live = live
        self.reads = 0
        self.error: Exception | None = None

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return self.live


async def test_an_object_is_read_again_after_its_time() -> None:
    api, now = Api({"spec": {}}), [0.0]
    reader = RememberingReader(api, seconds=60, clock=lambda: now[0])  # type: ignore[arg-type]
    for now[0], reads in ((0.0, 1), (59.9, 1), (60.0, 2), (61.0, 2)):
        assert await reader.get(PERSISTENT_VOLUME_CLAIMS, "team", "runs") == {"spec": {}}
        assert api.reads == reads
    await reader.get(PERSISTENT_VOLUME_CLAIMS, "other", "runs")
    assert api.reads == 3


async def test_an_object_that_does_not_exist_may_appear_at_any_moment() -> None:
    api = Api(None)
    reader = RememberingReader(api, seconds=60)  # type: ignore[arg-type]
    assert await reader.get(PERSISTENT_VOLUME_CLAIMS, "team", "runs") is None
    api.live = {"spec": {}}
    assert await reader.get(PERSISTENT_VOLUME_CLAIMS, "team", "runs") == {"spec": {}}


async def test_claims_that_may_not_be_read_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    api = Api(None)
    api.error = Forbidden("persistentvolumeclaims is forbidden", code=403, request="get")
    reader = ClaimReader(api)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await reader.read("team", "runs") is None
    assert len(caplog.records) == 1
