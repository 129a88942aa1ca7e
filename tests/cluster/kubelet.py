"""A kubelet and a scheduler for tests: one node, whose containers a runtime starts.

They are containers, or processes of this machine (`tests.cluster.pods`). NetworkPolicies are not enforced,
but by `tests.cluster.network_policies`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.cluster.api import Api, ApiError, Object
from tests.cluster.containers import Container, now
from tests.cluster.control_plane import ApiServer
from tests.cluster.runtime import Launch, Runtime
from tests.cluster.scheduling import in_use, why_not
from tests.cluster.services import Services
from tests.cluster.volumes import NotYet, variables
from tests.containers.runtime import ContainerExecution, ContainerRuntime

T = TypeVar("T")

NODE = "test-node"
_REFRESH_SECONDS = 2.0
_RETRY_SECONDS = 0.2
_LONGEST_BACKOFF_SECONDS = 10.0
_COMMAND_SECONDS = 60.0

DEFAULT_CAPACITY: Mapping[str, str] = {
    "cpu": "64",
    "memory": "256Gi",
    "ephemeral-storage": "1Ti",
    "pods": "500",
    "nvidia.com/gpu": "8",
}


class Host(Protocol):
    """What a pod needs of its node.

    Attributes:
        directory: Where the node has its files.
        address: Of the node.
        runtime: What starts containers.
        probe_seconds: Longest pause between two probes.
        backoff_seconds: Before the first restart of a container.
    """

    directory: Path
    address: str
    probe_seconds: float
    backoff_seconds: float

    @property
    def runtime(self) -> Runtime: ...

    async def find(self, kind: str, namespace: str, name: str) -> Object | None:
        """An object that pods refer to."""

    async def write_status(self, pod: Object, status: Object) -> Object:
        """Writes a pod's status; the pod as it is then."""

    async def remove(self, pod: Object) -> None:
        """Removes a pod that has ended and was deleted."""


class PodRunner:
    """One pod from its binding to its end."""

    def __init__(self, node: Host, pod: Object, root: Path) -> None:
        self._node, self.pod = node, pod
        self.namespace, self.name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self.uid = pod["metadata"]["uid"]
        self.home = node.runtime.pod(pod, root, node.directory / "claims" / self.namespace)
        self._began = now()
        self._publishing = asyncio.Lock()
        self._published: Object | None = None
        self._ending = False
        self._stopped = asyncio.Event()
        self.containers = [self._container(spec) for spec in pod["spec"]["containers"]]
        self.init_containers = [self._container(spec) for spec in pod["spec"].get("initContainers", ())]
        self._initialized = not self.init_containers
        self.work = asyncio.create_task(self._run(), name=f"pod {self.namespace}/{self.name}")
        self.end: asyncio.Task[None] | None = None

    def _container(self, spec: Object) -> Container:
        grace = self.pod["spec"].get("terminationGracePeriodSeconds", 30)
        return Container(spec, self.home, self._node.probe_seconds, self.publish, grace)

    # The pod's life.

    async def _run(self) -> None:
        await self.home.open()
        await self.publish()
        for container in (*self.init_containers, *self.containers):
            if not await self.home.has_image(container.spec["image"]):
                await self._no_image(container)
                return
        await self._until_there(lambda: self.home.make_volumes(self._find))
        for container in self.init_containers:
            if not await self._keep_running(container, "Never"):
                return
        self._initialized = True
        policy = self.pod["spec"].get("restartPolicy", "Always")
        refreshing = asyncio.create_task(self._refresh_volumes(), name=f"volumes of {self.namespace}/{self.name}")
        try:
            async with asyncio.TaskGroup() as tasks:
                for container in self.containers:
                    tasks.create_task(self._keep_running(container, policy))
        finally:
            refreshing.cancel()

    async def _refresh_volumes(self) -> None:
        # A kubelet takes about a minute.
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            with contextlib.suppress(NotYet):
                await self.home.make_volumes(self._find)

    async def _find(self, kind: str, name: str) -> Object | None:
        return await self._node.find(kind, self.namespace, name)

    async def _until_there(self, step: Callable[[], Coroutine[Any, Any, T]], container: Container | None = None) -> T:
        while True:
            try:
                return await step()
            except NotYet as missing:
                if container is not None:
                    container.state = {"waiting": {"reason": "CreateContainerConfigError", "message": str(missing)}}
                    await self.publish()
                await asyncio.sleep(_RETRY_SECONDS)

    async def _no_image(self, container: Container) -> None:
        image = container.spec["image"]
        error = (
            f'failed to pull and unpack image "{image}": failed to resolve reference "{image}": pull access denied, '
            "repository does not exist or may require authorization"
        )
        container.state = {"waiting": {"reason": "ErrImagePull", "message": error}}
        await self.publish()
        await asyncio.sleep(_RETRY_SECONDS)
        message = f'Back-off pulling image "{image}": ErrImagePull: {error}'
        container.state = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
        await self.publish()

    async def _keep_running(self, container: Container, policy: str) -> bool:
        """Runs it until it is not to be started again; tells whether it ended well."""
        backoff = self._node.backoff_seconds
        while True:
            launch = await self._until_there(lambda: self._launch(container), container)
            if self._ending:
                return False
            code = await container.run(launch)
            if self._ending or policy == "Never" or (policy == "OnFailure" and code == 0):
                return code == 0
            message = (
                f"back-off {backoff:g}s restarting failed container={container.name} "
                f"pod={self.name}_{self.namespace}({self.uid})"
            )
            container.last_state, container.restarts = container.state, container.restarts + 1
            container.state = {"waiting": {"reason": "CrashLoopBackOff", "message": message}}
            await self.publish()
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _LONGEST_BACKOFF_SECONDS)

    async def _launch(self, container: Container) -> Launch:
        container.variables = await variables(self._with_address(), container.spec, self._find)
        return await self.home.launch(container.spec, container.variables, container.restarts)

    def _with_address(self) -> Object:
        # What the downward API gives is what the kubelet knows, not what it has already written.
        status = {"podIP": self.home.address, "hostIP": self._node.address, "podIPs": self._addresses()}
        return {**self.pod, "status": {**self.pod.get("status", {}), **status}}

    # Its end.

    def terminate(self, grace: float) -> None:
        """Once: SIGTERM, SIGKILL after so many seconds, then the pod is no more."""
        if self.end is None:
            self.end = asyncio.create_task(self._terminate(grace), name=f"end of {self.namespace}/{self.name}")

    async def _terminate(self, grace: float) -> None:
        self._ending = True
        for container in (*self.init_containers, *self.containers):
            container.stop(grace)
        if any(container.execution is not None for container in (*self.init_containers, *self.containers)):
            # They end themselves: this waits for the one who waits for the processes.
            await asyncio.wait({self.work}, timeout=grace)
        await self.kill()
        await self.publish()
        await self._node.remove(self.pod)

    async def kill(self) -> None:
        """SIGKILL to everything; returns when all is gone and the last state is known."""
        self._ending = True
        for container in (*self.init_containers, *self.containers):
            await container.kill()
        if any(container.execution is not None for container in self.containers):
            await asyncio.wait({self.work}, timeout=10)
        self.work.cancel()
        await asyncio.wait({self.work})
        await self.home.close()

    # Its status.

    async def publish(self) -> None:
        """Writes the status if it changed."""
        async with self._publishing:
            status = self._status()
            if status == self._published:
                return
            self.pod = await self._node.write_status(self.pod, status)
            self._published = status

    def _status(self) -> Object:
        containers = self.containers
        codes = [container.exit_code for container in containers]
        init_failed = any(container.exit_code for container in self.init_containers)
        restarts = self.pod["spec"].get("restartPolicy", "Always") == "Always"
        ended = all(code is not None for code in codes) and (self._ending or not restarts)
        if init_failed or (ended and any(codes)):
            phase = "Failed"
        elif ended:
            phase = "Succeeded"
        elif any("running" in item.state or item.restarts or item.exit_code is not None for item in containers):
            phase = "Running"
        else:
            phase = "Pending"
        ready = all(container.ready for container in containers)
        unready = [container.name for container in containers if not container.ready]
        why_unready = (
            {"reason": "PodCompleted"}
            if phase in ("Succeeded", "Failed")
            else {
                "reason": "ContainersNotReady",
                "message": f"containers with unready status: [{' '.join(unready)}]",
            }
        )
        return {
            "phase": phase,
            "hostIP": self._node.address,
            "podIP": self.home.address,
            "podIPs": self._addresses(),
            "startTime": self._began,
            "conditions": [
                _condition("PodScheduled", True),
                _condition("Initialized", self._initialized),
                _condition("ContainersReady", ready, **({} if ready else why_unready)),
                _condition("Ready", ready, **({} if ready else why_unready)),
            ],
            "containerStatuses": [container.status() for container in containers],
            "initContainerStatuses": [container.status() for container in self.init_containers],
        }

    def _addresses(self) -> list[Object]:
        return [{"ip": self.home.address}] if self.home.address else []


def _condition(kind: str, value: bool, **more: str) -> Object:
    # Null removes what an earlier state said.
    return {"type": kind, "status": str(value), "reason": None, "message": None, **more}


class Node:
    """The node's work, within one event loop. `Kubelet` is its face to the tests."""

    def __init__(
        self,
        api: Api,
        directory: Path,
        *,
        runtime: Runtime,
        capacity: Mapping[str, str],
        probe_seconds: float,
        backoff_seconds: float,
        direct_services: bool,
    ) -> None:
        self.api, self.directory, self.runtime = api, directory, runtime
        self.probe_seconds, self.backoff_seconds = probe_seconds, backoff_seconds
        self.capacity = dict(capacity)
        self.pods: dict[str, Object] = {}
        self.runners: dict[str, PodRunner] = {}
        self.address = runtime.address
        self.services = Services(runtime, lambda: list(self.pods.values()), direct=direct_services)
        self._count = 0
        self._reschedule = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: set[PodRunner] = set()

    async def start(self) -> None:
        """Registers the node and begins."""
        await self.runtime.start(self.services.resolve, self.services.lookup)
        await self.api.apply(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}},
            }
        )
        await self.set_capacity(self.capacity)
        # Admission gives every new node the taint of one that is not ready.
        await self.api.patch("Node", None, NODE, {"spec": {"taints": None}})
        for work in (self._watch_services(), self._watch_pods(), self._schedule()):
            self._tasks.append(asyncio.create_task(work))

    async def stop(self) -> None:
        """Ends all pods' processes; the API server is told nothing."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        runners = [*self.runners.values(), *self._leaving]
        for runner in runners:
            if runner.end is not None:
                runner.end.cancel()
        await asyncio.gather(*(runner.kill() for runner in runners), return_exceptions=True)
        await self.services.close()
        await self.runtime.close()
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def set_capacity(self, capacity: Mapping[str, str]) -> None:
        self.capacity = dict(capacity)
        status = {
            "capacity": self.capacity,
            "allocatable": self.capacity,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now()}],
            "addresses": [{"type": "InternalIP", "address": self.address}],
        }
        await self.api.patch("Node", None, NODE, {"status": status}, subresource="status")
        self._reschedule.set()

    async def find(self, kind: str, namespace: str, name: str) -> Object | None:
        return await self.api.find(kind, namespace, name)

    async def write_status(self, pod: Object, status: Object) -> Object:
        metadata = pod["metadata"]
        if (known := self.pods.get(metadata["uid"])) is not None:
            # Services lead to a pod when a test can see that it is ready, not when the watch has told of it.
            self.pods[metadata["uid"]] = {**known, "status": status}
        body = {"metadata": {"uid": metadata["uid"]}, "status": status}
        try:
            return await self.api.patch(
                "Pod", metadata["namespace"], metadata["name"], body, subresource="status", how="strategic-merge"
            )
        except ApiError as error:
            # 404: the pod is gone; 409: another one has its name.
            if error.status not in (404, 409):
                raise
            return pod

    async def remove(self, pod: Object) -> None:
        metadata = pod["metadata"]
        with contextlib.suppress(ApiError):
            await self.api.delete("Pod", metadata["namespace"], metadata["name"], grace=0, uid=metadata["uid"])

    async def _watch_services(self) -> None:
        async for kind, item in self.api.changes("Service"):
            if kind == "SYNC":
                await self.services.keep({_key(service) for service in item["items"]})
                for service in item["items"]:
                    await self.services.changed(service)
            elif kind == "DELETED":
                await self.services.removed(*_key(item))
            else:
                await self.services.changed(item)

    async def _watch_pods(self) -> None:
        async for kind, item in self.api.changes("Pod"):
            if kind == "SYNC":
                left = {pod["metadata"]["uid"] for pod in item["items"]}
                for uid in set(self.pods) - left:
                    await self._removed(uid)
                for pod in item["items"]:
                    self._changed(pod)
            elif kind == "DELETED":
                await self._removed(item["metadata"]["uid"])
            else:
                self._changed(item)

    def _changed(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        self.pods[uid] = pod
        self._reschedule.set()
        if pod["spec"].get("nodeName") != NODE:
            return
        phase = pod.get("status", {}).get("phase")
        if uid not in self.runners and phase not in ("Succeeded", "Failed"):
            self._count += 1
            root = self.directory / f"{self._count:x}"
            root.mkdir()
            self.runners[uid] = PodRunner(self, pod, root)
        runner = self.runners.get(uid)
        if runner is not None:
            runner.home.update(pod)
        if runner is not None and "deletionTimestamp" in pod["metadata"]:
            runner.terminate(pod["metadata"].get("deletionGracePeriodSeconds", 30))

    async def _removed(self, uid: str) -> None:
        self.pods.pop(uid, None)
        self._reschedule.set()
        if (runner := self.runners.pop(uid, None)) is not None:
            # Forced: nobody waits for its processes any more, but they are not to stay.
            runner.end = runner.end or asyncio.create_task(runner.kill())
            self._leaving.add(runner)
            runner.end.add_done_callback(lambda _, left=runner: self._leaving.discard(left))  # type: ignore[misc]

    async def _schedule(self) -> None:
        while True:
            # What a pod waits for may be something that is not watched here: a claim, a label of the node.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reschedule.wait(), _RETRY_SECONDS if self._unplaced() else None)
            self._reschedule.clear()
            for pod in list(self.pods.values()):
                if not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]:
                    try:
                        await self._place(pod)
                    except ApiError as error:
                        if error.status not in (404, 409):
                            raise

    def _unplaced(self) -> bool:
        return any(not pod["spec"].get("nodeName") for pod in self.pods.values())

    async def _place(self, pod: Object) -> None:
        namespace, name = _key(pod)
        if pod["spec"].get("schedulingGates"):
            return
        node = await self.api.get("Node", None, NODE)
        claims = [item["metadata"]["name"] for item in await self.api.list("PersistentVolumeClaim", namespace)]
        message = why_not(pod, node, in_use(self.pods.values()), claims)
        if message is not None:
            said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            known = pod.get("status", {}).get("conditions", ())
            if not any(item["type"] == "PodScheduled" and item.get("message") == message for item in known):
                body = {"status": {"conditions": [said]}}
                await self.api.patch("Pod", namespace, name, body, subresource="status", how="strategic-merge")
            return
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": namespace},
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
        }
        await self.api.request("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/binding", binding)
        # The watch will say the same a little later; the next pod must not take the same place.
        pod["spec"]["nodeName"] = NODE


def _key(item: Object) -> tuple[str, str]:
    return item["metadata"]["namespace"], item["metadata"]["name"]


@contextlib.contextmanager
def running_kubelet(
    server: ApiServer, make_runtime: Callable[[Path], Runtime], *, direct_services: bool = False
) -> Iterator[Kubelet]:
    """One node with 8 GPUs.

    Args:
        make_runtime: Makes what starts its containers, which writes their logs to a directory.
        direct_services: See `Services`.
    """
    kubelet = Kubelet(server.url, server.token, server.authority, make_runtime, direct_services=direct_services)
    try:
        yield kubelet
    finally:
        kubelet.stop()


class Kubelet:
    """A running test kubelet, in a thread of its own. Its methods are for other threads."""

    def __init__(
        self,
        url: str,
        token: str,
        authority: Path,
        make_runtime: Callable[[Path], Runtime],
        *,
        capacity: Mapping[str, str] = DEFAULT_CAPACITY,
        probe_seconds: float = 0.5,
        backoff_seconds: float = 0.3,
        direct_services: bool = False,
    ) -> None:
        # Not pytest's directory: the paths of sockets below it would be too long.
        self.directory = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))
        self._loop = asyncio.new_event_loop()
        self._stop: Future[None] = Future()
        self._started: Future[None] = Future()
        self._api = Api(url, token, authority)
        self._options: dict[str, Any] = {
            "capacity": capacity,
            "probe_seconds": probe_seconds,
            "backoff_seconds": backoff_seconds,
            "direct_services": direct_services,
        }
        self._make_runtime = make_runtime
        self._node: Node | None = None
        self._thread = threading.Thread(target=self._main, name="kubelet")
        self._thread.start()
        self._started.result(60)

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            raise

    async def _live(self) -> None:
        async with self._api:
            runtime = self._make_runtime(self.directory / "logs")
            self._node = Node(self._api, self.directory, runtime=runtime, **self._options)
            await self._node.start()
            self._started.set_result(None)
            try:
                await asyncio.wrap_future(self._stop)
            finally:
                await self._node.stop()

    @property
    def node(self) -> Node:
        assert self._node is not None
        return self._node

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def set_capacity(self, **changed: str) -> None:
        """Changes what the node has: `set_capacity(**{"nvidia.com/gpu": "1"})`."""
        self._do(self.node.set_capacity({**self.node.capacity, **changed}))

    def used(self, resource: str) -> int:
        """How much of a resource the node's pods hold."""

        async def ask() -> Decimal:
            return in_use(self.node.pods.values()).get(resource, Decimal())

        return int(self._do(ask()))

    def crash(self, namespace: str, pod: str, container: str | None = None) -> None:
        """SIGKILL to a container's processes, as the kernel does when memory is short."""

        async def kill() -> None:
            for runner in self.node.runners.values():
                if (runner.namespace, runner.name) == (namespace, pod):
                    for item in runner.containers:
                        if container in (None, item.name):
                            await item.kill()

        self._do(kill())

    def exec_url(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> str:
        """The address at which a WebSocket runs a command in a container of the runtime.

        Raises:
            LookupError: No such container runs.
        """

        async def ask() -> str:
            return await self._execution(namespace, pod, container).exec_url(command)

        return self._do(ask())

    def execute(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> int:
        """The exit code of a command in a container of the runtime.

        Raises:
            LookupError: No such container runs.
        """

        async def ask() -> int:
            return await self._execution(namespace, pod, container).execute(command, _COMMAND_SECONDS)

        return self._do(ask())

    def _execution(self, namespace: str, pod: str, container: str) -> ContainerExecution:
        for runner in self.node.runners.values():
            if (runner.namespace, runner.name) == (namespace, pod):
                for item in runner.containers:
                    if item.name == container and isinstance(item.execution, ContainerExecution):
                        return item.execution
        raise LookupError(f"{namespace}/{pod} has no container {container} that runs")

    def evict(self, namespace: str, pod: str) -> None:
        """Through the API, as a drain of the node does: condition DisruptionTarget, then deletion."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        self._do(self._api.request("POST", path, body))

    def claim(self, namespace: str, name: str) -> Path:
        """The directory of a PersistentVolumeClaim."""
        path = self.directory / "claims" / namespace / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def in_containers(self) -> bool:
        """Whether pods are containers."""
        return isinstance(self.node.runtime, ContainerRuntime)

    def resolve(self, text: str) -> str:
        """The text with names of Services as addresses of this machine."""

        async def ask() -> str:
            return self.node.services.resolve(text)

        return self._do(ask())

    def logs(self, namespace: str, pod_prefix: str = "") -> str:
        """What the containers of pods wrote, one after the other."""
        found = sorted((self.directory / "logs").glob(f"{namespace}_{pod_prefix}*.log"))
        return "".join(f"--- {path.name}\n{self.node.runtime.text(path)}\n" for path in found)

    def running(self, namespace: str) -> list[str]:
        """Names of containers of a namespace that have processes: `pod/container`."""

        async def ask() -> list[str]:
            return [
                f"{runner.name}/{container.name}"
                for runner in self.node.runners.values()
                if runner.namespace == namespace
                for container in (*runner.init_containers, *runner.containers)
                if runner.home.is_running(container.name)
            ]

        return self._do(ask())

    def stop(self) -> None:
        """Ends everything that it started."""
        if not self._stop.done():
            self._stop.set_result(None)
        self._thread.join()
        shutil.rmtree(self.directory, ignore_errors=True)
