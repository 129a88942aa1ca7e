"""A containerd of the tests' own, with Debian's runc and network plugins, and a client of its CRI service."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from tests.cluster.control_plane import ServerProcess

ROOT = Path(__file__).parents[2]
PROTO = "tests/containers/cri.proto"
cri: Any = grpc.protos(PROTO)
_services: Any = grpc.services(PROTO)

PLUGINS = Path("/usr/lib/cni")
PAUSE = "localhost/kuberoll-tests/pause:1"
"""Image that holds a pod's namespaces: it sleeps."""

_RUNS = Path("/run/kuberoll-tests")
_POLL_SECONDS = 0.1
# Gigabytes are unpacked, on a machine that has other things to do: 600 s were seen to be too few.
_CTR_SECONDS = 1500


class MissingTools(Exception):
    """This machine cannot run containers; the message says why."""


def require_tools() -> None:
    """Returns where containers can be run.

    Raises:
        MissingTools: A program, or a right, is missing.
    """
    if os.geteuid() != 0:
        raise MissingTools("containers are run by root")
    missing = [name for name in ("buildah", "containerd", "ctr", "runc", "ip") if shutil.which(name) is None]
    if not (PLUGINS / "bridge").exists():
        missing.append(f"{PLUGINS}/bridge")
    if missing:
        raise MissingTools(
            f"no {', '.join(missing)}: Debian has buildah, containerd, runc, containernetworking-plugins"
        )


class Containerd:
    """A running containerd.

    Attributes:
        socket: Of its CRI service.
        gateway: The machine's address as pods see it.
        name_server: Address of the cluster's DNS server.
        services: Addresses for Services.
        name_space: Network namespace of the name server and of Services.
    """

    def __init__(self, directory: Path) -> None:
        """Starts it; everything that it writes is below the directory, but for its sockets."""
        self.directory = directory
        _RUNS.mkdir(exist_ok=True)
        # Sockets' paths are short.
        self.state = Path(tempfile.mkdtemp(prefix="c", dir=_RUNS))
        self.socket = self.state / "s"
        network = _free_network()
        pods, self.services = network.subnets()
        self.gateway, self.name_server = str(pods[1]), str(pods[2])
        self._bridge = self.name_space = f"krt{network.network_address.packed[1]}"
        self._watchdog = subprocess.Popen(
            [sys.executable, "-m", "tests.containers.watchdog", str(self.state), str(directory), self._bridge],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        self._process: ServerProcess | None = None
        try:
            self._start(pods)
        except BaseException:
            self.stop()
            raise

    def _start(self, pods: ipaddress.IPv4Network) -> None:
        self._network(pods)
        config = self.directory / "config.toml"
        config.write_text(self._config())
        self._process = ServerProcess(["containerd", "--config", str(config)], self.directory / "containerd.log")
        self._process.wait_until(self.socket.exists, 240)

    def _config(self) -> str:
        return f"""
version = 2
root = "{self.directory / "root"}"
state = "{self.state / "state"}"
disabled_plugins = ["io.containerd.internal.v1.restart", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{self.socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{self.directory / "opt"}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  # Where the tests run in a container themselves they may not ask for less than they have.
  restrict_oom_score_adj = true
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{PLUGINS}"
    conf_dir = "{self.directory / "cni"}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""

    def _network(self, pods: ipaddress.IPv4Network) -> None:
        folder = self.directory / "cni"
        folder.mkdir(parents=True)
        address = {
            "type": "host-local",
            "ranges": [[{"subnet": str(pods), "gateway": self.gateway, "rangeStart": str(pods[3])}]],
            "dataDir": str(self.directory / "ipam"),
        }
        plugin = {
            "type": "bridge",
            "bridge": self._bridge,
            "isGateway": True,
            "ipam": {**address, "routes": [{"dst": str(self.services), "gw": self.name_server}, {"dst": "0.0.0.0/0"}]},
        }
        text = json.dumps({"cniVersion": "1.0.0", "name": "kuberoll-tests", "plugins": [plugin]})
        (folder / "10-tests.conflist").write_text(text)
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.gateway}/{pods.prefixlen}", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        # Services and names have a namespace of their own: whatever port they take, nobody on the machine has it.
        space, inner = self.name_space, f"{self._bridge}i"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", f"{space}o", "type", "veth", "peer", "name", inner, "netns", space)
        _run("ip", "link", "set", f"{space}o", "master", self._bridge, "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "addr", "add", f"{self.name_server}/{pods.prefixlen}", "dev", inner)
        _run("ip", "-n", space, "link", "set", inner, "up")
        _run("ip", "-n", space, "route", "add", "local", str(self.services), "dev", "lo")
        _run("ip", "route", "add", str(self.services), "via", self.name_server)

    def socket_of(self, address: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket that is bound to an address of a Service, or of the name server."""

        def make() -> socket.socket:
            # Of this thread alone, which then ends.
            with Path(f"/run/netns/{self.name_space}").open() as space:
                if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "setns")
            made = socket.socket(socket.AF_INET, kind)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            return made

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make).result()

    def load(self, archive: subprocess.Popen[bytes]) -> None:
        """Takes images from the output of a process that writes an archive as `docker save` does."""
        self.ctr("images", "import", "-", stdin=archive)
        # Its layers are unpacked; the archives of them are not needed any more.
        self.ctr("content", "prune", "references")

    def ctr(self, *arguments: str, stdin: subprocess.Popen[bytes] | None = None) -> str:
        """Runs containerd's own client."""
        command = ["ctr", "--address", str(self.socket), "--namespace", "k8s.io", *arguments]
        source = None if stdin is None else stdin.stdout
        done = subprocess.run(command, stdin=source, capture_output=True, text=True, check=False, timeout=_CTR_SECONDS)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def stop(self) -> None:
        """Ends it, with what is left of its pods."""
        if self._process is not None:
            self._process.stop()
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingTools(f"{' '.join(command)}: {done.stderr.strip()}")


def _free_network() -> ipaddress.IPv4Network:
    """A network that this machine has no route to."""
    routes = subprocess.run(["ip", "-json", "route", "show", "table", "all"], capture_output=True, check=True).stdout
    taken = [
        ipaddress.ip_network(item["dst"], strict=False)
        for item in json.loads(routes)
        if item["dst"] != "default" and ":" not in item["dst"] and item.get("type") != "broadcast"
    ]
    start = os.getpid() % 100
    for number in range(100):
        network = ipaddress.IPv4Network(f"10.{100 + (start + number) % 100}.0.0/22")
        if not any(network.overlaps(other) for other in taken):
            return network
    raise MissingTools("no free network in 10.100.0.0 to 10.199.0.0")


class Cri:
    """The runtime's CRI service, for one event loop."""

    def __init__(self, path: Path) -> None:
        self._channel = grpc.aio.insecure_channel(f"unix://{path}")
        self._runtime = _services.RuntimeServiceStub(self._channel)
        self._images = _services.ImageServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def wait_ready(self, seconds: float = 60.0) -> None:
        """Returns when the runtime and its network are ready.

        Raises:
            TimeoutError: They were not in time.
        """
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    found = await self._runtime.Status(cri.StatusRequest(), wait_for_ready=True)
                    if all(item.status for item in found.status.conditions):
                        return
                await asyncio.sleep(_POLL_SECONDS)

    async def image(self, name: str) -> Any | None:
        """An image that is there: `id`, `uid`, `username`; None: it is not."""
        asked = cri.ImageStatusRequest(image=cri.ImageSpec(image=name))
        found = await self._images.ImageStatus(asked)
        return found.image if found.HasField("image") else None

    async def run_pod(self, config: Any) -> tuple[str, str]:
        """Makes a pod's namespaces; its id and address."""
        made = await self._runtime.RunPodSandbox(cri.RunPodSandboxRequest(config=config))
        asked = cri.PodSandboxStatusRequest(pod_sandbox_id=made.pod_sandbox_id)
        found = await self._runtime.PodSandboxStatus(asked)
        return made.pod_sandbox_id, found.status.network.ip

    async def remove_pod(self, pod: str) -> None:
        """Ends a pod with all that is in it."""
        await self._runtime.StopPodSandbox(cri.StopPodSandboxRequest(pod_sandbox_id=pod))
        await self._runtime.RemovePodSandbox(cri.RemovePodSandboxRequest(pod_sandbox_id=pod))

    async def create(self, pod: str, config: Any, pod_config: Any) -> str:
        """Makes a container; its id."""
        asked = cri.CreateContainerRequest(pod_sandbox_id=pod, config=config, sandbox_config=pod_config)
        return str((await self._runtime.CreateContainer(asked)).container_id)

    async def start(self, container: str) -> None:
        await self._runtime.StartContainer(cri.ContainerRequest(container_id=container))

    async def stop(self, container: str, grace: float) -> None:
        """SIGTERM, then SIGKILL after so many seconds; returns when it has ended."""
        asked = cri.StopContainerRequest(container_id=container, timeout=int(grace))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._runtime.StopContainer(asked)

    async def remove(self, container: str) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._runtime.RemoveContainer(cri.ContainerRequest(container_id=container))

    async def status(self, container: str) -> Any:
        return (await self._runtime.ContainerStatus(cri.ContainerRequest(container_id=container))).status

    async def wait(self, container: str) -> Any:
        """The status of a container that has ended; the kubelet asks again and again, too."""
        while True:
            found = await self.status(container)
            if found.state == cri.CONTAINER_EXITED:
                return found
            await asyncio.sleep(_POLL_SECONDS)

    async def execute(self, container: str, command: list[str], seconds: float) -> tuple[int, str]:
        """Runs a command in a container; its exit code and output. 124: it took longer, and was killed."""
        asked = cri.ExecSyncRequest(container_id=container, cmd=command, timeout=max(1, int(seconds)))
        try:
            done = await self._runtime.ExecSync(asked)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return 124, str(error.details())
            return 126, str(error.details())
        return done.exit_code, (done.stdout + done.stderr).decode(errors="replace")

    async def exec_url(self, container: str, command: list[str]) -> str:
        """The address at which a WebSocket runs a command in a container, once, with all three of its streams."""
        asked = cri.ExecRequest(container_id=container, cmd=command, stdin=True, stdout=True, stderr=True)
        return str((await self._runtime.Exec(asked)).url)


@contextlib.contextmanager
def running_containerd() -> Iterator[Containerd]:
    """A containerd with no images.

    Raises:
        MissingTools: This machine cannot run one.
    """
    require_tools()
    found = Containerd(Path(tempfile.mkdtemp(prefix="kuberoll-tests-", dir="/var/tmp")))
    try:
        yield found
    finally:
        found.stop()
