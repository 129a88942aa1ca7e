"""The test kubelet itself, against the control plane: pods and Jobs of trivial commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.api import Api, Object, condition, is_true
from tests.cluster.jobs import CLAIM, make_claim
from tests.cluster.kubelet import Kubelet
from tests.cluster.volumes import expand, substitute
from tests.containers.images import PYTHON

# Where pods are containers, what they need is made before, in fixtures.
pytestmark = pytest.mark.timeout(120, func_only=True)

SERVER = """
import http.server, os, pathlib
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        up = self.path != "/gate" or pathlib.Path(os.environ.get("GATE", "/")).exists()
        self.send_response(200 if up else 503)
        self.end_headers()
        self.wfile.write(os.environ["POD_NAME"].encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer((os.environ["POD_IP"], 8000), Handler).serve_forever()
"""
FOREVER = "import signal; signal.pause()"
IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); " + (
    "[time.sleep(1) for _ in range(600)]"
)


def field_ref(path: str) -> Object:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


ADDRESS = [{"name": "POD_IP", **field_ref("status.podIP")}, {"name": "POD_NAME", **field_ref("metadata.name")}]


def container(code: str, **more: Any) -> Object:
    return {"name": "main", "image": PYTHON, "command": ["python3", "-c", code], "env": ADDRESS, **more}


def pod(namespace: str, name: str, *containers: Object, labels: Object | None = None, **spec: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "spec": {
            "containers": list(containers),
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            **spec,
        },
    }


def phase(item: Object | None) -> str | None:
    return None if item is None else item.get("status", {}).get("phase")


def state(item: Object | None) -> Object:
    statuses = (item or {}).get("status", {}).get("containerStatuses") or [{"state": {}, "lastState": {}}]
    return dict(statuses[0])


def ready_replicas(item: Object | None) -> int:
    return int((item or {}).get("status", {}).get("readyReplicas", 0))


def running(item: Object | None) -> bool:
    return "running" in state(item)["state"]


async def test_a_pod_runs_to_its_end(api: Api, kubelet: Kubelet, namespace: str) -> None:
    code = (
        "import os; log = os.environ.get('KUBEROLL_TERMINATION_LOG', '/dev/termination-log');"
        "open(log, 'w').write('by ' + os.environ['WHO']);"
        "print(os.environ['POD_IP'])"
    )
    env = [*ADDRESS, {"name": "WHO", "value": "$(POD_NAME)"}]
    await api.create(pod(namespace, "one", container(code, env=env)))
    done = await api.wait("Pod", namespace, "one", lambda item: phase(item) == "Succeeded")
    ended = state(done)["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (0, "Completed", "by one")
    assert done is not None
    assert done["status"]["podIP"] in kubelet.logs(namespace, "one")
    assert is_true(done, "PodScheduled")
    assert condition(done, "Ready") is not None
    assert not is_true(done, "Ready")


async def test_a_failed_container_tells_the_end_of_its_log(api: Api, kubelet: Kubelet, namespace: str) -> None:
    code = "raise SystemExit('no such model')"
    main = container(code, terminationMessagePolicy="FallbackToLogsOnError")
    await api.create(pod(namespace, "bad", main))
    done = await api.wait("Pod", namespace, "bad", lambda item: phase(item) == "Failed")
    ended = state(done)["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (1, "Error", "no such model\n")


async def test_restarts_back_off_and_show_the_last_end(api: Api, kubelet: Kubelet, namespace: str) -> None:
    await api.create(pod(namespace, "crash", container("raise SystemExit(3)"), restartPolicy="Always"))
    seen = await api.wait("Pod", namespace, "crash", lambda item: state(item).get("restartCount", 0) >= 2)
    assert state(seen)["lastState"]["terminated"]["exitCode"] == 3
    waiting = await api.wait("Pod", namespace, "crash", lambda item: "waiting" in state(item)["state"])
    assert state(waiting)["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert phase(waiting) == "Running"


async def test_what_is_asked_for_must_be_there(api: Api, kubelet: Kubelet, namespace: str) -> None:
    def gpus(name: str, count: int) -> Object:
        limits = {"limits": {"nvidia.com/gpu": str(count)}}
        return pod(namespace, name, container(FOREVER, resources=limits), terminationGracePeriodSeconds=1)

    await api.create(gpus("holds", 6))
    await api.wait("Pod", namespace, "holds", running)
    assert kubelet.used("nvidia.com/gpu") == 6
    await api.create(gpus("waits", 4))
    waits = await api.wait("Pod", namespace, "waits", lambda item: condition(item, "PodScheduled") is not None)
    scheduled = condition(waits, "PodScheduled")
    assert scheduled is not None
    assert (scheduled["status"], scheduled["reason"]) == ("False", "Unschedulable")
    assert scheduled["message"].startswith("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    await api.delete("Pod", namespace, "holds")
    await api.wait("Pod", namespace, "waits", running)
    assert kubelet.used("nvidia.com/gpu") == 4


async def test_a_claim_must_be_there_and_is_shared(api: Api, kubelet: Kubelet, namespace: str) -> None:
    code = "import pathlib, sys; pathlib.Path(sys.argv[1], 'out').open('a').write('x')"
    volumes = [{"name": "out", "persistentVolumeClaim": {"claimName": "store"}}]

    def writer(name: str) -> Object:
        main = container(code, args=["/out"], volumeMounts=[{"name": "out", "mountPath": "/out"}])
        return pod(namespace, name, main, volumes=volumes)

    await api.create(writer("first"))
    waits = await api.wait("Pod", namespace, "first", lambda item: condition(item, "PodScheduled") is not None)
    assert 'persistentvolumeclaim "store" not found' in str(condition(waits, "PodScheduled"))
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "store", "namespace": namespace}, "spec": spec}
    await api.create({"apiVersion": "v1", **claim})
    await api.wait("Pod", namespace, "first", lambda item: phase(item) == "Succeeded")
    await api.create(writer("second"))
    await api.wait("Pod", namespace, "second", lambda item: phase(item) == "Succeeded")
    assert (kubelet.claim(namespace, "store") / "out").read_text() == "xx"


async def test_config_maps_are_mounted(api: Api, kubelet: Kubelet, namespace: str) -> None:
    content = f'{{"endpoint": "http://web.{namespace}.svc:8000", "scratch": "/var/scratch/turns"}}'
    code = "import json, pathlib, sys; c = json.load(open(sys.argv[1])); pathlib.Path(c['scratch']).mkdir(); print(c)"
    mounts = [{"name": "config", "mountPath": "/etc/app"}, {"name": "scratch", "mountPath": "/var/scratch"}]
    main = container(code, args=["/etc/app/job.json"], volumeMounts=mounts)
    volumes = [{"name": "config", "configMap": {"name": "app"}}, {"name": "scratch", "emptyDir": {}}]
    await api.create(pod(namespace, "reads", main, volumes=volumes))
    await api.wait("Pod", namespace, "reads", lambda item: "waiting" in state(item)["state"])
    metadata = {"name": "app", "namespace": namespace}
    await api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"job.json": content}})
    await api.wait("Pod", namespace, "reads", lambda item: phase(item) == "Succeeded")
    said = kubelet.logs(namespace, "reads")
    if kubelet.in_containers:
        assert f"http://web.{namespace}.svc:8000" in said
        assert "/var/scratch/turns" in said
    else:
        assert "http://127." in said
        assert str(kubelet.directory) in said


async def test_an_image_that_cannot_be_pulled(api: Api, kubelet: Kubelet, namespace: str) -> None:
    await api.create(pod(namespace, "pull", container(FOREVER, image="missing/model:1")))
    seen = await api.wait(
        "Pod",
        namespace,
        "pull",
        lambda item: state(item)["state"].get("waiting", {}).get("reason") == "ImagePullBackOff",
    )
    assert 'Back-off pulling image "missing/model:1"' in state(seen)["state"]["waiting"]["message"]
    assert phase(seen) == "Pending"


async def test_services_lead_to_ready_pods(api: Api, kubelet: Kubelet, namespace: str) -> None:
    import aiohttp

    await make_claim(api, namespace)
    gate = kubelet.claim(namespace, CLAIM) / "gate"
    env = [*ADDRESS, {"name": "GATE", "value": "/gates/gate"}]
    volumes = [{"name": "gates", "persistentVolumeClaim": {"claimName": CLAIM}}]
    mounts = [{"name": "gates", "mountPath": "/gates"}]
    probe = {"httpGet": {"path": "/gate", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    listens = [{"name": "http", "containerPort": 8000}]
    main = container(SERVER, env=env, readinessProbe=probe, ports=listens, volumeMounts=mounts)
    server = pod(namespace, "web-0", main, labels={"app": "web"}, volumes=volumes, terminationGracePeriodSeconds=1)
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    service = {
        "metadata": {"name": "web", "namespace": namespace},
        "spec": {"selector": {"app": "web"}, "ports": ports},
    }
    await api.create({"apiVersion": "v1", "kind": "Service", **service})
    await api.create(server)
    await api.wait("Pod", namespace, "web-0", running)
    url = kubelet.resolve(f"http://web.{namespace}.svc:80/")
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(url)
        gate.touch()
        await api.wait("Pod", namespace, "web-0", lambda item: is_true(item, "Ready"))
        async with session.get(url) as answer:
            assert await answer.text() == "web-0"
        gate.unlink()
        await api.wait("Pod", namespace, "web-0", lambda item: not is_true(item, "Ready"))


async def test_a_dead_container_is_restarted_by_its_liveness(api: Api, kubelet: Kubelet, namespace: str) -> None:
    probe = {"httpGet": {"path": "/gate", "port": 8000}, "periodSeconds": 1, "failureThreshold": 1}
    env = [*ADDRESS, {"name": "GATE", "value": "/never/there"}]
    main = container(SERVER, env=env, livenessProbe=probe)
    await api.create(pod(namespace, "stuck", main, restartPolicy="Always", terminationGracePeriodSeconds=1))
    seen = await api.wait("Pod", namespace, "stuck", lambda item: state(item).get("restartCount", 0) >= 1)
    # SIGTERM does nothing to a container's first process that has not asked for it.
    assert state(seen)["lastState"]["terminated"]["exitCode"] == (137 if kubelet.in_containers else 143)


async def test_deletion_waits_for_the_grace_period(api: Api, kubelet: Kubelet, namespace: str) -> None:
    await api.create(pod(namespace, "slow", container(IGNORES_SIGTERM), terminationGracePeriodSeconds=1))
    await api.wait("Pod", namespace, "slow", running)
    await api.delete("Pod", namespace, "slow")
    assert await api.wait("Pod", namespace, "slow", lambda item: item is None) is None
    assert kubelet.running(namespace) == []


def job(namespace: str, name: str, code: str, completions: int, **spec: Any) -> Object:
    template = pod(namespace, name, container(code), terminationGracePeriodSeconds=1)["spec"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "completions": completions,
            "parallelism": completions,
            "completionMode": "Indexed",
            "backoffLimitPerIndex": 2,
            "maxFailedIndexes": 0,
            "podReplacementPolicy": "Failed",
            "template": {"spec": template},
            **spec,
        },
    }


async def test_an_indexed_job_completes(api: Api, kubelet: Kubelet, namespace: str) -> None:
    await api.create(job(namespace, "count", "import os; print('index', os.environ['JOB_COMPLETION_INDEX'])", 3))
    done = await api.wait("Job", namespace, "count", lambda item: is_true(item, "Complete"))
    assert done is not None
    assert done["status"]["completedIndexes"] == "0-2"
    said = kubelet.logs(namespace, "count")
    assert all(f"index {number}" in said for number in range(3))


async def test_an_exit_code_can_fail_a_job(api: Api, kubelet: Kubelet, namespace: str) -> None:
    rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [78]}}
    await api.create(job(namespace, "refused", "raise SystemExit(78)", 1, podFailurePolicy={"rules": [rule]}))
    done = await api.wait("Job", namespace, "refused", lambda item: is_true(item, "Failed"))
    failed = condition(done, "Failed")
    assert failed is not None
    assert failed["reason"] == "PodFailurePolicy"


async def test_an_eviction_does_not_count_and_is_replaced(api: Api, kubelet: Kubelet, namespace: str) -> None:
    ignore = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    once = "import os, signal; os.path.exists('/dev/null') and signal.pause()"
    await api.create(job(namespace, "moved", once, 1, backoffLimitPerIndex=0, podFailurePolicy={"rules": [ignore]}))
    await api.wait("Job", namespace, "moved", lambda item: bool(item and item.get("status", {}).get("ready")))
    [first] = await api.list("Pod", namespace)
    kubelet.evict(namespace, first["metadata"]["name"])
    await api.wait("Pod", namespace, first["metadata"]["name"], lambda item: item is None)
    replaced = await api.wait("Job", namespace, "moved", lambda item: bool(item and item["status"].get("ready")))
    assert replaced is not None
    assert "failed" not in replaced["status"]
    [second] = await api.list("Pod", namespace)
    assert second["metadata"]["uid"] != first["metadata"]["uid"]


async def test_a_suspended_job_has_no_pods(api: Api, kubelet: Kubelet, namespace: str) -> None:
    await api.create(job(namespace, "pauses", FOREVER, 2))
    await api.wait("Job", namespace, "pauses", lambda item: bool(item and item.get("status", {}).get("ready") == 2))
    await api.patch("Job", namespace, "pauses", {"spec": {"suspend": True}})
    await api.wait("Job", namespace, "pauses", lambda item: is_true(item, "Suspended"))
    for item in await api.list("Pod", namespace):
        await api.wait("Pod", namespace, item["metadata"]["name"], lambda found: found is None)
    assert kubelet.running(namespace) == []


async def test_a_deployment_is_collected_with_its_owner(api: Api, kubelet: Kubelet, namespace: str) -> None:
    metadata: Object = {"name": "owner", "namespace": namespace}
    owner = await api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    template = pod(namespace, "x", container(FOREVER), restartPolicy="Always", terminationGracePeriodSeconds=1)
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "owned", "namespace": namespace, "ownerReferences": [reference]},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "owned"}},
            "template": {"metadata": {"labels": {"app": "owned"}}, "spec": template["spec"]},
        },
    }
    await api.create(deployment)
    await api.wait("Deployment", namespace, "owned", lambda item: ready_replicas(item) == 2)
    await api.delete("ConfigMap", namespace, "owner")
    await api.wait("Deployment", namespace, "owned", lambda item: item is None)
    for item in await api.list("Pod", namespace):
        await api.wait("Pod", namespace, item["metadata"]["name"], lambda found: found is None)
    assert kubelet.running(namespace) == []


def test_paths_are_replaced_whole() -> None:
    mounts = {"/etc/app": Path("/a"), "/etc/app-data": Path("/b"), "/tmp": Path("/c")}
    text = '/etc/app/job.json "/etc/app-data/x" /opt/etc/app /etc/application /tmp/x --config=/etc/app'
    assert substitute(text, mounts) == '/a/job.json "/b/x" /opt/etc/app /etc/application /tmp/x --config=/a'


def test_variables_are_expanded_as_kubernetes_does() -> None:
    assert expand("$(A)-$(B)-$$(A)-$A", {"A": "1"}) == "1-$(B)-$(A)-$A"
