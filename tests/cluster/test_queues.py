"""Jobs in a queue: admitted as a whole, preempted with nothing lost; by Kueue itself where this machine has it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.cluster import kueue
from tests.cluster.api import Api, Object, is_true
from tests.cluster.control_plane import ApiServer
from tests.cluster.jobs import rollout_job
from tests.cluster.test_lifecycle import (
    PATIENCE,
    Cluster,
    check_complete,
    cluster,
    complete,
    installed,
    message,
    phase,
    reason,
)

__all__ = ["cluster", "installed"]

pytestmark = pytest.mark.timeout(400)


@pytest_asyncio.fixture
async def queued(
    api: Api, control_plane: ApiServer, tmp_path: Path, cluster: Cluster, request: pytest.FixtureRequest
) -> AsyncIterator[Cluster]:
    """A cluster with room for one job at a time: two engines, of one GPU each."""
    given: dict[str, Any] = getattr(request, "param", {})
    async with kueue.queues(api, control_plane, tmp_path, cluster.namespace, gpus=2, configuration=given):
        cluster.operator(kueue="true")
        yield cluster


def in_queue(namespace: str, name: str, priority: str = "low", **spec: Any) -> Object:
    item = rollout_job(namespace, name, **spec)
    item["spec"]["generation"]["replicas"] = 2
    item["spec"]["workers"]["resources"] = {"requests": {"cpu": "10m"}}
    labels = {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": priority}
    return {**item, "metadata": {**item["metadata"], "labels": labels}}


# As docs/how-to/queues.md has it: without the external framework Kueue would hold a job's own Job and pods for ever.
MANAGES_ALL = {
    "manageJobsWithoutQueueName": True,
    "managedJobsNamespaceSelector": {
        "matchExpressions": [
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", "kueue-system"]}
        ]
    },
    "integrations": {
        "frameworks": ["batch/job", "pod", "deployment"],
        "externalFrameworks": ["RolloutJob.v1alpha1.kuberoll.io"],
    },
}


@pytest.mark.skipif(
    "KUBEROLL_TEST_KUEUE" not in os.environ, reason="needs Kueue itself: KUBEROLL_TEST_KUEUE names its binary"
)
@pytest.mark.parametrize("queued", [MANAGES_ALL], indirect=True, ids=["manages all"])
async def test_kueue_that_manages_all_jobs_leaves_a_job_s_children_alone(queued: Cluster) -> None:
    await queued.create(in_queue(queued.namespace, "first"))
    check_complete(queued, await queued.job(complete, "first"), name="first")
    [asked] = await queued.api.list("Workload", queued.namespace)
    assert asked["metadata"]["name"] == "first-workload"


async def test_a_job_waits_for_the_whole_of_what_it_needs(queued: Cluster) -> None:
    namespace = queued.namespace
    await queued.create(in_queue(namespace, "first", seconds=0.3))
    await queued.job(phase("Running"), "first")
    await queued.create(in_queue(namespace, "second"))
    waiting = await queued.job(phase("Queued"), "second")
    assert "waiting for quota in queue team" in message(waiting, "Suspended")
    assert "startTime" not in waiting["status"]
    assert await queued.api.list("Deployment", namespace, labels="kuberoll.io/job=second") == []
    check_complete(queued, await queued.job(complete, "first"), name="first")
    await queued.api.wait("Workload", namespace, "first-workload", lambda item: is_true(item, "Finished"))
    check_complete(queued, await queued.job(complete, "second"), name="second")


async def test_a_preempted_job_loses_and_repeats_nothing(queued: Cluster) -> None:
    namespace = queued.namespace
    await queued.create(in_queue(namespace, "puzzles", seconds=0.5, rollout={"concurrency": 1}))
    await queued.stored(2)
    await queued.create(in_queue(namespace, "urgent", "high"))
    await queued.job(lambda item: reason("Suspended", "Evicted")(item) or reason("Suspended", "Queued")(item))
    # While the one stops, the other has nothing yet: there is never more than there is quota for.
    await queued.job(phase("Running"), "urgent", seconds=PATIENCE)
    assert queued.kubelet.used("nvidia.com/gpu") <= 2
    stopped = await queued.job(reason("Suspended", "Queued"))
    assert "it was evicted (Preempted" in message(stopped, "Suspended")
    check_complete(queued, await queued.job(complete, "urgent"), name="urgent")
    check_complete(queued, await queued.job(complete))
    assert queued.kubelet.used("nvidia.com/gpu") == 0


async def test_a_suspended_job_makes_room(queued: Cluster) -> None:
    namespace = queued.namespace
    await queued.create(in_queue(namespace, "puzzles", seconds=0.5, rollout={"concurrency": 1}))
    await queued.stored(1)
    await queued.create(in_queue(namespace, "second"))
    await queued.job(phase("Queued"), "second")
    await queued.patch({"suspend": True})
    check_complete(queued, await queued.job(complete, "second"), name="second")
    await queued.patch({"suspend": False})
    check_complete(queued, await queued.job(complete))
