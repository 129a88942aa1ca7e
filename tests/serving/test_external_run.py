"""A run against an endpoint that somebody else keeps: no engine is started, and none is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.support import TINY, manifest, run_to_end, trajectories
from tests.serving.conftest import ServingHost

pytestmark = pytest.mark.ray


def test_external_endpoints(simulated_host: ServingHost, tmp_path: Path) -> None:
    job = manifest(
        tmp_path / "job.yaml",
        generation={"backend": "External", "external": {"url": simulated_host.url}, "model": {"source": str(TINY)}},
        rollout={"maxTurns": 3, "scheduling": "Lockstep"},
    )
    code, text = run_to_end(job, "--output", tmp_path / "out", "--metrics-port", "0")
    assert code == 0, text
    assert len(trajectories(tmp_path / "out")) == 32
    assert simulated_host.host.process.poll() is None


def test_an_external_endpoint_that_is_not_there(tmp_path: Path) -> None:
    job = manifest(
        tmp_path / "job.yaml",
        generation={
            "backend": "External",
            "external": {"url": "http://127.0.0.1:9"},
            "model": {"source": str(TINY)},
        },
        startupDeadlineSeconds=1,
    )
    code, text = run_to_end(job, "--output", tmp_path / "out", "--metrics-port", "0")
    assert code == 1
    assert "spec.generation.external.url: http://127.0.0.1:9 was not ready within 1 s" in text
