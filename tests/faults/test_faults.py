"""Jobs on a real cluster whose nodes, engines and workers fail: exactly the planned trajectories, and who says what.

Run it with `make cluster-faults`; it needs such a cluster, and prints what each job said with the seconds it took.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.output.run_files import RunFiles
from tests.faults.cluster import NEEDS, Cluster, Object, namespace, options

KUBEROLL = Path(sys.executable).with_name("kuberoll")
pytestmark = pytest.mark.faults

COUNT, REPEATS = 400, 4


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A namespace of the test's own on the cluster that the environment names."""
    if (given := options()) is None:
        sys.stderr.write(NEEDS)
        pytest.skip("needs a cluster of several nodes: make cluster-faults")
    with namespace(given) as found:
        yield found


def has(kind: str, *, status: str | None = None, reason: str | None = None, words: str = "") -> Any:
    """A check of a status: it has such a condition."""

    def holds(found: Object) -> bool:
        return any(
            item["type"] == kind
            and status in (None, item["status"])
            and reason in (None, item["reason"])
            and words in item.get("message", "")
            for item in found.get("conditions") or ()
        )

    return holds


def under_way(found: Object) -> bool:
    """True if a job has stored some of its trajectories."""
    return int((found.get("progress") or {}).get("completed") or 0) >= 100


def start(cluster: Cluster, name: str, **spec: Any) -> None:
    """Start a job with two engines and two workers, and wait until it is under way."""
    cluster.claim(name)
    cluster.job(name, {"generation": {"replicas": 2}, "workers": {"replicas": 2}, **spec})
    cluster.until(name, under_way)


def check_trajectories(cluster: Cluster, name: str, directory: Path) -> None:
    """Wait for the end of a job, copy its output, and check that each planned trajectory is there once."""
    status = cluster.until(name, lambda found: found.get("phase") in {"Succeeded", "Failed"})
    assert status["phase"] == "Succeeded"
    output = directory / name
    kubeconfig = {"KUBECONFIG": str(cluster.options["kubeconfig"])} if "kubeconfig" in cluster.options else {}
    wrapper = str(cluster.options.get("wrapper", "")).split()
    command = [*wrapper, str(KUBEROLL), "get", f"rlj/{name}", "-n", cluster.namespace, "-o", str(output)]
    subprocess.run(command, check=True, env={**os.environ, **kubeconfig})
    found = Counter(record.key for record in RunFiles(str(output)).trajectories())
    assert len(found) == COUNT * REPEATS
    assert set(found.values()) == {1}


def test_a_lost_node(cluster: Cluster, tmp_path: Path) -> None:
    if "break" not in cluster.options:
        pytest.skip("the options say no way to break a node")
    start(cluster, "lost")
    engine = cluster.pods("lost", "generation")[0]
    node = engine["spec"]["nodeName"]
    cluster.change_node("break", node)
    try:
        cluster.until("lost", has("GenerationReady", words=f"its node {node} does not answer"))
        # One that is replaced, without the node.
        cluster.until("lost", has("GenerationReady", status="True", words="2 of 2 replicas are ready"))
    finally:
        cluster.change_node("mend", node)
    check_trajectories(cluster, "lost", tmp_path)


@pytest.mark.parametrize(
    ("fault", "mend", "words"),
    [
        ("kill", "revive", "node {}"),
        ("stopKubelet", "startKubelet", "node {}"),
        ("fillDisk", "clearDisk", "from node {}"),
    ],
)
def test_a_node_that_fails_until_the_job_has_ended(
    cluster: Cluster, tmp_path: Path, fault: str, mend: str, words: str
) -> None:
    if fault not in cluster.options:
        pytest.skip(f"the options do not say how: {fault}")
    name = fault.lower()
    start(cluster, name)
    node = cluster.pods(name, "workers")[0]["spec"]["nodeName"]
    cluster.change_node(fault, node)
    try:
        cluster.until(name, has("WorkersReady", words=words.format(node)))
        # Without the node, and without somebody who says that it is gone.
        check_trajectories(cluster, name, tmp_path)
    finally:
        cluster.change_node(mend, node)


def test_names_that_nobody_resolves(cluster: Cluster, tmp_path: Path) -> None:
    if "removeDns" not in cluster.options:
        pytest.skip("the options say no way to remove the cluster's DNS")
    start(cluster, "dns")
    cluster.change_node("removeDns", "")
    try:
        before = int(cluster.get("rlj", "dns")["status"]["progress"]["completed"])
        cluster.until("dns", lambda found: int(found["progress"]["completed"]) >= before + 200)
    finally:
        cluster.change_node("restoreDns", "")
    check_trajectories(cluster, "dns", tmp_path)


def test_an_engine_that_stands_still(cluster: Cluster, tmp_path: Path) -> None:
    start(cluster, "still")
    name = cluster.pods("still", "generation")[0]["metadata"]["name"]
    stop = (
        "import os, signal; [os.kill(int(one), signal.{}) for one in os.listdir('/proc') "
        "if one.isdecimal() and int(one) != os.getpid()]"
    )
    # The first process of a container cannot stop itself; those that it has started can be stopped.
    cluster.kubectl("-n", cluster.namespace, "exec", name, "--", "python", "-c", stop.format("SIGSTOP"))
    cluster.note(f"{name} stands still")
    # The first process of the container still answers probes: only those that wait for answers notice.
    before = int(cluster.get("rlj", "still")["status"]["progress"]["completed"])
    cluster.until("still", lambda found: int(found["progress"]["completed"]) >= before + 50)
    cluster.kubectl("-n", cluster.namespace, "exec", name, "--", "python", "-c", stop.format("SIGCONT"), check=False)
    check_trajectories(cluster, "still", tmp_path)


def test_a_node_that_is_drained(cluster: Cluster, tmp_path: Path) -> None:
    start(cluster, "drained")
    node = cluster.pods("drained", "workers")[0]["spec"]["nodeName"]
    try:
        arguments = ["--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s"]
        selector = "--pod-selector=kuberoll.io/job=drained"
        cluster.kubectl("drain", node, *arguments, selector)
        cluster.note(f"{node} is drained")
        check_trajectories(cluster, "drained", tmp_path)
    finally:
        cluster.kubectl("uncordon", node)


def test_workers_on_a_volume_of_one_node(cluster: Cluster, tmp_path: Path) -> None:
    cluster.claim("one", "ReadWriteOnce")
    cluster.job("one", {"workers": {"replicas": 3}})
    cluster.until("one", under_way)
    assert len({pod["spec"].get("nodeName") for pod in cluster.pods("one", "workers")} - {None}) == 1
    check_trajectories(cluster, "one", tmp_path)


def with_secret(container: str) -> dict[str, Any]:
    """Options of pods whose container mounts a Secret that does not exist."""
    mounts = [{"name": "s", "mountPath": "/creds"}]
    volumes = [{"name": "s", "secret": {"secretName": "creds"}}]
    return {"podTemplate": {"spec": {"containers": [{"name": container, "volumeMounts": mounts}], "volumes": volumes}}}


UNMOUNTED = {name: with_secret(name) for name in ("worker", "generation")}
GPUS = {"resources": {"requests": {"cpu": "100m"}, "limits": {"example.com/gpu": "8"}}}


@pytest.mark.parametrize(
    ("name", "spec", "condition", "reason", "words"),
    [
        (
            "secret",
            {"workers": UNMOUNTED["worker"]},
            "WorkersChecked",
            "PodConfigError",
            "Secret creds does not exist",
        ),
        (
            "hub",
            {"generation": UNMOUNTED["generation"]},
            "GenerationReady",
            "PodConfigError",
            "Secret creds does not exist",
        ),
        ("gpu", {"generation": GPUS}, "GenerationReady", "Unschedulable", "wait until example.com/gpu is free"),
        ("claim", {"output": {"uri": "pvc://nowhere/a"}}, "WorkersChecked", "VolumeNotReady", "nowhere does not exist"),
        ("image", {"generation": {"image": "x.invalid/a:1"}}, "GenerationReady", "ImagePullError", "does not reach"),
    ],
)
def test_what_a_job_waits_for(
    cluster: Cluster, name: str, spec: dict[str, Any], condition: str, reason: str, words: str
) -> None:
    cluster.claim(name)
    cluster.job(name, spec)
    cluster.until(name, has(condition, status="False", reason=reason, words=words), seconds=180)


def test_a_quota_that_has_room_for_the_engine_alone(cluster: Cluster) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team", "namespace": cluster.namespace}}
    cluster.apply({**quota, "spec": {"hard": {"requests.cpu": "400m"}}})
    cluster.claim("quota")
    cluster.job("quota", {"generation": {"resources": {"requests": {"cpu": "350m", "memory": "256Mi"}}}})
    cluster.until("quota", has("WorkersReady", status="False", reason="QuotaExceeded", words="exceeded quota: team"))
