"""A node without an API server: the test kubelet runs pods, a test says which and keeps the objects they refer to."""

from __future__ import annotations

import asyncio
import base64
import copy
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.cluster.kubelet import PodRunner
from tests.cluster.services import Services
from tests.containers.runtime import ContainerPod, ContainerRuntime

Object = dict[str, Any]

_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"


class ContainerNode:
    """Pods in containers, and the objects of one namespace.

    Attributes:
        directory: Where volumes are.
        probe_seconds: Longest pause between two probes.
    """

    backoff_seconds = 1.0

    def __init__(self, runtime: ContainerRuntime, directory: Path, *, probe_seconds: float = 0.5) -> None:
        self.runtime, self.directory, self.probe_seconds = runtime, directory, probe_seconds
        self.address = runtime.address
        self.services = Services(runtime, lambda: [runner.pod for runner in self._runners.values()])
        self._objects: dict[tuple[str, str], Object] = {}
        self._runners: dict[str, PodRunner] = {}
        self._changed = asyncio.Event()

    async def start(self) -> None:
        await self.runtime.start(self.services.resolve, self.services.lookup)

    async def close(self) -> None:
        """Ends all pods."""
        await asyncio.gather(*(runner.kill() for runner in self._runners.values()), return_exceptions=True)
        await self.services.close()
        await self.runtime.close()

    # What the test kubelet asks of its node.

    async def find(self, kind: str, namespace: str, name: str) -> Object | None:
        return self._objects.get((kind, name))

    async def write_status(self, pod: Object, status: Object) -> Object:
        made = {**pod, "status": copy.deepcopy(status)}
        self._runners[pod["metadata"]["name"]].pod = made
        self._changed.set()
        return made

    async def remove(self, pod: Object) -> None:
        self._changed.set()

    # What tests do.

    async def put(self, *items: Object) -> None:
        """Makes objects that pods refer to: ConfigMaps, Secrets, Services."""
        for item in items:
            if "stringData" in item:
                data = {key: base64.b64encode(value.encode()).decode() for key, value in item["stringData"].items()}
                item = {**item, "data": data}
            self._objects[item["kind"], item["metadata"]["name"]] = item
            if item["kind"] == "Service":
                await self.services.changed(item)

    def run(self, pod: Object) -> ContainerPod:
        """Starts a pod; what its containers can be asked by."""
        name = pod["metadata"]["name"]
        root = self.directory / f"pod-{uuid.uuid4().hex[:8]}"
        root.mkdir(parents=True)
        # The kubelet's publishing comes later: it finds the pod here.
        self._runners[name] = PodRunner(self, pod, root)
        home = self._runners[name].home
        assert isinstance(home, ContainerPod)
        return home

    async def crash(self, name: str) -> None:
        """SIGKILL to the containers of a pod, which are started again as its restartPolicy says."""
        for container in self._runners[name].containers:
            await container.kill()

    def pod(self, name: str) -> Object:
        """A pod as it is now."""
        return self._runners[name].pod

    def claim(self, namespace: str, name: str) -> Path:
        """The directory of a claim."""
        return self.directory / "claims" / namespace / name

    def log(self, name: str) -> str:
        """What the containers of a pod wrote."""
        found = sorted(self.runtime.logs.glob(f"*_{name}_*.log"))
        return "".join(f"--- {path.name}\n{self.runtime.text(path)}\n" for path in found)

    async def until(self, name: str, condition: Callable[[Object], bool], seconds: float) -> Object:
        """A pod as soon as it is as it should be.

        Raises:
            AssertionError: It was not in time, or ended before; with its status and log.
        """
        try:
            async with asyncio.timeout(seconds):
                while True:
                    pod = self.pod(name)
                    if condition(pod):
                        return pod
                    if phase(pod) in ("Succeeded", "Failed"):
                        raise AssertionError(f"{name} ended:\n{pod['status']}\n{self.log(name)[-6000:]}")
                    self._changed.clear()
                    changed = asyncio.create_task(self._changed.wait())
                    work = self._runners[name].work
                    await asyncio.wait([changed, work], return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
                    if work.done() and (error := work.exception()) is not None:
                        raise error
        except TimeoutError:
            late = f"{name} after {seconds:g} s:\n{self.pod(name).get('status')}\n{self.log(name)[-6000:]}"
            raise AssertionError(late) from None

    async def until_log(self, name: str, text: str, seconds: float) -> None:
        """Returns when a pod has written something.

        Raises:
            TimeoutError: It had not in time.
        """
        async with asyncio.timeout(seconds):
            while True:
                if text in self.log(name):
                    return
                await asyncio.sleep(0.05)

    async def delete(self, name: str, seconds: float | None = None) -> Object:
        """Deletes a pod and returns when it is gone: as it was last.

        Args:
            seconds: Grace period; None: the pod's own.
        """
        runner = self._runners[name]
        grace = runner.pod["spec"].get("terminationGracePeriodSeconds", 30) if seconds is None else seconds
        runner.terminate(grace)
        assert runner.end is not None
        await runner.end
        return runner.pod


def phase(pod: Object) -> str:
    """Pending, Running, Succeeded or Failed."""
    return str(pod.get("status", {}).get("phase", "Pending"))


def is_ready(pod: Object) -> bool:
    """Whether its containers all pass their readiness probes."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return bool(statuses) and all(item["ready"] for item in statuses)


def ended(pod: Object) -> Object:
    """The state `terminated` of its only container."""
    [status] = pod["status"]["containerStatuses"]
    return dict(status["state"]["terminated"])


def waiting(pod: Object) -> Object:
    """The state `waiting` of its first container; empty: it does not wait."""
    statuses = pod.get("status", {}).get("containerStatuses") or [{}]
    return dict(statuses[0].get("state", {}).get("waiting", {}))


def pod_of(
    owner: Object, name: str | None = None, *, index: int | None = None, template: Object | None = None
) -> Object:
    """A pod as a controller makes it of a Deployment's, a Job's or its own template, and as admission leaves it.

    Args:
        owner: The Deployment, Job or RayService.
        name: Of the pod; None: one of the owner's.
        index: Of an Indexed Job.
        template: In place of the owner's.
    """
    template = copy.deepcopy(owner["spec"]["template"] if template is None else template)
    namespace = owner["metadata"]["namespace"]
    name = name or f"{owner['metadata']['name']}-{uuid.uuid4().hex[:5]}"
    metadata = {**template.get("metadata", {}), "name": name, "namespace": namespace, "uid": str(uuid.uuid4())}
    spec = template["spec"]
    if index is not None:
        annotations = {**metadata.get("annotations", {}), "batch.kubernetes.io/job-completion-index": str(index)}
        metadata["annotations"] = annotations
        spec["hostname"] = f"{owner['metadata']['name']}-{index}"
        path = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": path})
    if spec.get("automountServiceAccountToken", True):
        _mount_token(spec)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _mount_token(spec: Object) -> None:
    sources: Iterable[Object] = (
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    )
    spec.setdefault("volumes", []).append({"name": "kube-api-access", "projected": {"sources": list(sources)}})
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        mount = {"name": "kube-api-access", "mountPath": _TOKEN, "readOnly": True}
        container.setdefault("volumeMounts", []).append(mount)
