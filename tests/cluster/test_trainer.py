"""A trainer and its RolloutJob: opened by its name, weights by `spec.weights`, and Complete when the trainer stops."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path

import numpy
import pytest

from kuberoll.trainer import Deltas, NotARun, Publisher, Rollouts, Workers
from kuberoll.trainer.jobs import JobWeights, find_job
from tests.cluster.api import is_true
from tests.cluster.control_plane import ApiServer
from tests.cluster.jobs import rollout_job
from tests.cluster.test_lifecycle import Cluster, cluster, complete, installed, message
from tests.output.s3 import S3Server, s3, s3_server

__all__ = ["cluster", "installed", "s3", "s3_server"]

pytestmark = pytest.mark.timeout(400, func_only=True)


@pytest.fixture
def kubeconfig(control_plane: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig))


def test_a_job_that_is_not_there(kubeconfig: None, cluster: Cluster) -> None:
    with pytest.raises(NotARun, match="cannot read it: Not Found"):
        Rollouts.open(f"rolloutjob://{cluster.namespace}/nothing")


async def test_a_trainer_of_a_job(kubeconfig: None, cluster: Cluster, ray_pods: None, tmp_path: Path) -> None:
    cluster.operator()
    job = rollout_job(
        cluster.namespace,
        light=False,
        count=8,
        repeats=2,
        seconds=0.01,
        rollout={"onPolicy": {"maxLag": 1, "maxAhead": 16}},
    )
    job["spec"]["dataset"]["epochs"] = None
    await cluster.create(job)
    location = f"rolloutjob://{cluster.namespace}/puzzles"
    # Nobody takes anything yet: the job says whom it waits for.
    held = await cluster.job(lambda item: is_true(item, "HeldBack"), seconds=200)
    assert "no trainer has opened the run" in message(held, "HeldBack")
    with pytest.raises(NotARun, match="mount the claim here, and open the job with directory="):
        Rollouts.open(location)
    publisher = Publisher(
        endpoint=find_job(location), location=tmp_path / "weights", transport=Deltas(anchor_every=3), timeout=120
    )
    rollouts = await asyncio.to_thread(
        lambda: Rollouts.open(
            location, directory=str(cluster.output()), allow_simulated=True, timeout=60, publisher=publisher
        )
    )
    lags: list[int] = []
    weights = numpy.zeros((8, 8), dtype="float32")
    async for batch in rollouts.batches_async(4, timeout=120):
        newest = rollouts.version
        lags += [newest - int(version) for version in batch.policy_version[batch.loss_mask]]
        if newest == 3:
            break
        weights[newest, newest] = 1.0
        assert (await rollouts.publish_async({"weight": weights.copy()})).version == newest + 1
    assert max(lags) <= 1
    assert rollouts.counts.groups >= 16
    item = await cluster.api.get("RolloutJob", cluster.namespace, "puzzles")
    assert item["spec"]["weights"]["version"] == "3"
    assert item["status"]["generation"]["policyVersion"] == "3"
    assert not is_true(item, "HeldBack") or "no trainer" not in message(item, "HeldBack")
    rollouts.stop()
    done = await cluster.job(complete, seconds=200)
    assert is_true(done, "Complete"), cluster.said()
    assert done["status"]["progress"]["completed"] >= 32
    assert done["status"]["progress"]["percentage"] == 100
    with pytest.raises(Exception, match="it is over"):
        JobWeights(publisher.endpoint.api, cluster.namespace, "puzzles").weights()  # type: ignore[attr-defined]


async def test_groups_of_a_job_that_writes_to_an_object_store(
    kubeconfig: None, cluster: Cluster, s3: tuple[S3Server, str]
) -> None:
    """A token of the job's access opens its workers, which write their parts when the trainer waits for them."""
    cluster.operator()
    store = [{"name": name, "value": value} for name, value in os.environ.items() if name.startswith("AWS_")]
    reads = {"name": "reader", "podSelector": {"matchLabels": {"app": "trainer"}}, "scopes": ["read"]}
    job = rollout_job(
        cluster.namespace,
        count=24,
        seconds=0.2,
        generation={"access": [reads]},
        workers={"env": store},
        output={"uri": f"{s3[1]}/run", "parts": {"maxSeconds": 3600}},
    )
    await cluster.create(job)

    await cluster.job(lambda item: is_true(item, "WorkersReady"), seconds=200)
    pods = await cluster.api.list("Pod", cluster.namespace, labels="app.kubernetes.io/component=workers")
    given = await cluster.api.get("Secret", cluster.namespace, "puzzles-access-reader")
    token = base64.b64decode(given["data"]["KUBEROLL_POLICY_TOKEN"]).decode()
    workers = Workers(*(pod["status"]["podIP"] for pod in pods), token=token)
    rollouts = await asyncio.to_thread(
        lambda: Rollouts.open(
            f"rolloutjob://{cluster.namespace}/puzzles", allow_simulated=True, timeout=100, direct=workers
        )
    )
    delivered: list[int] = []
    async for batch in rollouts.batches_async(2, timeout=100):
        if not delivered:
            # No part is due before the job's end.
            assert not complete(await cluster.api.get("RolloutJob", cluster.namespace, "puzzles"))
        delivered += [group.trajectories[0].task_index for group in batch.groups]
    assert sorted(delivered) == list(range(24))
    assert rollouts.counts.direct_parts > 2
    assert is_true(await cluster.job(complete, seconds=200), "Complete"), cluster.said()
