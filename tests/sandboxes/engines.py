"""Engines of the tests' own: Podman's service and Docker's daemon, with Debian's runc, in directories of their own."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker

from tests.cluster.control_plane import ServerProcess


class MissingTools(Exception):
    """This machine cannot run an engine; the message says why."""


class ContainerEngine(ABC):
    """An engine that runs.

    Attributes:
        url: Of its socket.
    """

    programs: tuple[str, ...]
    """Programs that it consists of."""
    package: str
    """Debian's package of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server: ServerProcess | None = None
        self.url = f"unix://{directory}/engine.sock"

    @abstractmethod
    def command(self) -> list[str]:
        """The command that starts it."""

    def variables(self) -> dict[str, str]:
        """Its environment."""
        return dict(os.environ)

    def start(self) -> None:
        """Start it.

        Raises:
            MissingTools: This machine cannot run it; the message says why.
        """
        if os.geteuid() != 0:
            raise MissingTools("containers are run by root")
        missing = [program for program in (*self.programs, "runc") if shutil.which(program) is None]
        if missing:
            raise MissingTools(f"no {', '.join(missing)}: Debian has {self.package}")
        # Conmon leaves a file where its engine works.
        command = ["env", f"--chdir={self._directory}", *self.command()]
        self._server = ServerProcess(command, self._directory / "log", self.variables())
        self._server.wait_until(self._answers)

    def stop(self) -> None:
        """Remove all containers, and end it."""
        if self._server is None:
            return
        with contextlib.closing(self.client()) as client:
            for container in client.containers(all=True):
                with contextlib.suppress(docker.errors.APIError):
                    client.remove_container(container["Id"], force=True, v=True)
        self._server.stop()
        for mount in self.mounts():
            subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(self._directory, ignore_errors=True)

    def client(self) -> Any:
        """The SDK's client of it."""
        return docker.APIClient(base_url=self.url, version="auto", timeout=60)

    def mounts(self) -> list[str]:
        """Mounts below its directory, the last first."""
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return [path for path in (line.split()[1] for line in lines[::-1]) if path.startswith(str(self._directory))]

    def traces(self) -> set[str]:
        """All that there is of its containers on this machine."""
        with contextlib.closing(self.client()) as client:
            containers = {f"container {one['Id']}" for one in client.containers(all=True)}
            volumes = {f"volume {one['Name']}" for one in client.volumes()["Volumes"] or ()}
            networks = {f"network {one['Name']}" for one in client.networks()}
        return (
            containers
            | volumes
            | networks
            | {f"mount {path}" for path in self.mounts()}
            | self._groups()
            | self._shims()
        )

    def _groups(self) -> set[str]:
        """Control groups of containers."""
        return {
            f"group {path}"
            for parent in ("docker", "libpod_parent")
            for path in _below(parent)
            if self._is_own(path.name)
        }

    def _is_own(self, group: str) -> bool:
        return (self._directory / "root/containers" / group).exists() or not group.startswith("libpod-")

    def _shims(self) -> set[str]:
        """Processes that watch over containers."""
        found = set()
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (directory / "cmdline").read_bytes()
                if (b"conmon" in words or b"containerd-shim" in words) and str(self._directory).encode() in words:
                    found.add(f"process {directory.name}")
        return found

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as end:
            return end.connect_ex(self.url.removeprefix("unix://")) == 0


class Podman(ContainerEngine):
    """Podman's service."""

    programs = ("podman", "conmon")
    package = "podman, runc"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 20)
        (directory / "containers.conf").write_text(
            # Limits that this process may not raise keep containers from starting; crun does not start where both kinds
            # of control groups are mounted.
            f'[containers]\ndefault_ulimits = ["nofile={hard}:{hard}", "nproc={hard}:{hard}"]\n'
            '[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\nevents_logger = "file"\n'
            f'[network]\nnetwork_config_dir = "{directory}/networks"\n'
        )
        # As Docker does by itself.
        (directory / "registries.conf").write_text('[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n')

    def command(self) -> list[str]:
        return [*self.podman(), "system", "service", "--time=0", self.url]

    def podman(self) -> list[str]:
        """Podman's command, for this engine."""
        places = {"root": "root", "runroot": "run", "tmpdir": "tmp"}
        return ["podman", *(f"--{option}={self._directory}/{name}" for option, name in places.items())]

    def run(self, *arguments: str, folder: Path | None = None) -> str:
        """Run podman; returns what it writes."""
        done = subprocess.run(
            [*self.podman(), *arguments], env=self.variables(), cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def variables(self) -> dict[str, str]:
        return {
            **os.environ,
            "CONTAINERS_CONF": f"{self._directory}/containers.conf",
            "CONTAINERS_REGISTRIES_CONF": f"{self._directory}/registries.conf",
        }


class Docker(ContainerEngine):
    """Docker's daemon, without a network."""

    programs = ("dockerd", "containerd")
    package = "docker.io"

    def command(self) -> list[str]:
        place = self._directory
        places = [f"--data-root={place}/root", f"--exec-root={place}/run", f"--pidfile={place}/pid"]
        options = ["--iptables=false", "--ip6tables=false", "--bridge=none", "--exec-opt=native.cgroupdriver=cgroupfs"]
        return ["dockerd", f"--host={self.url}", *places, *options]


@contextlib.contextmanager
def running(engine: type[ContainerEngine], directory: Path) -> Iterator[ContainerEngine]:
    """Have an engine for the time of the block."""
    directory.mkdir()
    found = engine(directory)
    try:
        found.start()
        yield found
    finally:
        found.stop()


def _below(parent: str) -> Iterator[Path]:
    for pattern in (f"/sys/fs/cgroup/{parent}", f"/sys/fs/cgroup/*/{parent}"):
        for place in Path("/").glob(pattern.lstrip("/")):
            yield from (path for path in place.iterdir() if path.is_dir())
