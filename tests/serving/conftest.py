"""A Serve app of the simulated engine, started once for all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.serving.hosts import PATIENCE_SECONDS, StartingHost, starting, until_ready


class ServingHost(NamedTuple):
    """A host that answers at `url`."""

    host: StartingHost
    url: str


@pytest.fixture(scope="session")
def simulated_host() -> Iterator[ServingHost]:
    simulated = {"firstTokenSeconds": 0.0, "meanTokens": 20}
    with starting(engine_args={"max_model_len": 1000}, simulated=simulated, replicas=2) as host:
        yield ServingHost(host, until_ready(host)[-1]["url"])
        # As by a parent that is gone.
        assert host.process.stdin is not None
        host.process.stdin.close()
        host.process.wait(timeout=PATIENCE_SECONDS)
