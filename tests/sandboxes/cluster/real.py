"""A real cluster whose pods are sandboxes: the broker is of this process, with the rights that the chart gives it.

| variable | |
|---|---|
| `KUBEROLL_TEST_KUBECONFIG` | kubeconfig of an administrator; nodes and pods are reachable from this machine |
| `KUBEROLL_TEST_PYTHON_IMAGE` | an image with `python3` that its nodes have or can pull |
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from kuberoll_api.sandboxes import BROKER_VARIABLE, RUNTIME_VARIABLE, TOKEN_VARIABLE
from kuberoll_operator import names
from kuberoll_operator.broker import app
from kuberoll_workers.sandboxes.pods.driver import PodDriver
from kuberoll_workers.sandboxes.runtime import find_runtime
from tests.charts.rendering import one, rendered
from tests.operator.broker.support import manifest
from tests.operator.broker.test_app import KEY, broker, until_ready
from tests.sandboxes.cluster.images import NodeImages, registries
from tests.sandboxes.cluster.kubectl import Kubectl, Object
from tests.sandboxes.layouts import busybox_layout
from tests.sandboxes.making import Making

VARIABLE: Final = "KUBEROLL_TEST_KUBECONFIG"
IMAGE_VARIABLE: Final = "KUBEROLL_TEST_PYTHON_IMAGE"
JOB: Final = "tasks"

_OWN_BROKER: Final = "kuberoll-broker-tests"
_RUNTIME: Final = "opt/runtime"
_SECONDS: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCluster:
    """A namespace of a cluster, with a job.

    Attributes:
        kubectl: For this namespace.
        images: For its nodes.
        runtime: Image that brings the programs of the server inside, of this checkout.
        broker: Kubeconfig of the broker.
        token: Of the job's workers.
    """

    namespace: str
    kubectl: Kubectl
    images: NodeImages
    runtime: str
    broker: Path
    token: str

    def pods(self) -> list[Object]:
        """The pods of sandboxes."""
        items: list[Object] = self.kubectl.read("get", "pods", f"--selector={names.SANDBOX_JOB_LABEL}={JOB}")["items"]
        return items

    async def pod(self, sandbox: str) -> Object:
        """See `PodCluster.pod`."""
        return await asyncio.to_thread(self.kubectl.read, "get", "pod", _pod_name(sandbox))

    def traces(self) -> set[str]:
        """Pods that there are; those that have ended are as good as directories."""
        return {
            f"directory of pod {pod['metadata']['name']}" if has_ended(pod) else f"pod {pod['metadata']['name']}"
            for pod in self.pods()
        }

    def runs(self, sandbox: str) -> bool:
        """True while a pod of this name runs."""
        return any(pod["metadata"]["name"] == _pod_name(sandbox) and not has_ended(pod) for pod in self.pods())

    async def end(self, sandbox: str, way: str) -> None:
        """See `PodCluster.end`."""
        await asyncio.to_thread(self._end, _pod_name(sandbox), way)

    def _end(self, name: str, way: str) -> None:
        if way == "evict":
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
            path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
            self.kubectl.run("create", f"--raw={path}", "--filename=-", given=body)
            return
        at_once = ["--force", "--grace-period=0"] if way == "force" else []
        self.kubectl.run("delete", "pod", name, "--wait=false", *at_once)

    @asynccontextmanager
    async def serving(self, **settings: Any) -> AsyncIterator[Making]:
        """Have the broker; yields how drivers of its workers are made."""
        with pytest.MonkeyPatch.context() as patch:
            # One that the cluster has already would take these pods for those of workers that are silent.
            patch.setattr(names, "BROKER", _OWN_BROKER)
            patch.setattr(app, "SELECTOR", f"app.kubernetes.io/managed-by={_OWN_BROKER},{names.SANDBOX_JOB_LABEL}")
            # Ctrl-C is for the tests, which clean up.
            patch.setattr(app, "set_on_end", lambda _: None)
            given = {"namespaces": (self.namespace,), "worker_image": self.runtime, **settings}
            async with broker(self.broker, **given) as (_, url, _):
                await until_ready(url)
                variables = {
                    BROKER_VARIABLE: f"{url}/v1/jobs/{self.namespace}/{JOB}",
                    TOKEN_VARIABLE: self.token,
                }
                arguments = {"environment": "tasks", "variables": variables}
                yield Making(f"{PodDriver.__module__}:{PodDriver.__name__}", arguments)


def has_ended(pod: Object) -> bool:
    """True if nothing of a pod runs any more."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


@contextmanager
def real_cluster(place: Path) -> Iterator[RealCluster]:
    """Have a namespace with a job; it is removed with all that is in it.

    Args:
        place: Directory for files.

    Raises:
        MissingBinaries: No kubectl.
    """
    kubectl = Kubectl(Path(os.environ[VARIABLE]))
    image = os.environ.get(IMAGE_VARIABLE, "docker.io/library/python:3.12-slim")
    namespace = f"kuberoll-test-{secrets.token_hex(4)}"
    objects = rendered(
        {"sandboxes": {"enabled": True}, "watch": {"namespaces": [namespace]}, "serviceAccount": {"create": True}},
        namespace=namespace,
    )
    with _custom_resource(kubectl, one(objects, "CustomResourceDefinition")), registries(kubectl, image) as images:
        runtime = images.push("runtime", _runtime_layout(place), place)
        try:
            # As docs/how-to/tasks-in-a-cluster.md has it.
            kubectl.make_namespace(namespace, "baseline")
            kubectl.apply(
                *(one(objects, kind, "kuberoll-broker") for kind in ("ServiceAccount", "Role", "RoleBinding")),
            )
            inside = Kubectl(Path(os.environ[VARIABLE]), namespace)
            inside.apply(_job(namespace))
            uid = inside.read("get", "rolloutjob", JOB)["metadata"]["uid"]
            yield RealCluster(
                namespace=namespace,
                kubectl=inside,
                images=images,
                runtime=runtime,
                broker=inside.kubeconfig_of("kuberoll-broker", place),
                token=hmac.new(KEY.encode(), f"{uid}/sandboxes".encode(), "sha256").hexdigest(),
            )
        finally:
            kubectl.remove_namespace(namespace)


@contextmanager
def _custom_resource(kubectl: Kubectl, definition: Object) -> Iterator[None]:
    """Have RolloutJobs, where the cluster does not know them."""
    name = definition["metadata"]["name"]
    if kubectl.run("get", "customresourcedefinition", name, "--ignore-not-found"):
        yield
        return
    kubectl.apply(definition)
    try:
        kubectl.run("wait", "customresourcedefinition", name, "--for=condition=Established", f"--timeout={_SECONDS}s")
        yield
    finally:
        # Somebody may have come to need it.
        if not kubectl.read("get", "rolloutjobs", "--all-namespaces")["items"]:
            kubectl.run("delete", "customresourcedefinition", name, f"--timeout={_SECONDS}s")


def _job(namespace: str) -> Object:
    """A job that no operator runs, and whose sandboxes ask for little."""
    # Kubelets that do not limit what is written say that their nodes have no room for it.
    found = manifest(JOB, resources={"requests": {"cpu": "10m", "memory": "32Mi", "ephemeral-storage": "0"}})
    metadata = {"name": JOB, "namespace": namespace}
    return {**found, "metadata": metadata, "spec": {**found["spec"], "managedBy": "example.com/nobody"}}


def _runtime_layout(place: Path) -> str:
    """What of an image of workers a sandbox's pod needs."""
    directory = find_runtime(place).directory
    files = {
        f"{_RUNTIME}/{path.relative_to(directory)}": path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
    return busybox_layout(place / "runtime-image", files=files, Env=["PATH=/bin", f"{RUNTIME_VARIABLE}=/{_RUNTIME}"])


def _pod_name(sandbox: str) -> str:
    return f"{JOB}-{sandbox}"
