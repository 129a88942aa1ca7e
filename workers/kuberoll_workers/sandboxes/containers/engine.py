"""The container engine of this machine: where it is, and what it can do."""

from __future__ import annotations

import errno
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kuberoll_workers.data.extras import installation
from kuberoll_workers.sandboxes.errors import SandboxUnavailable

SECONDS: Final = 300.0
"""Time in which an engine answers a request; a busy one creates containers one after another."""
THREADS: Final = 8
"""Requests to an engine at a time."""

_OLDEST_API: Final = (1, 41)
_OLDEST_PODMAN: Final = 4
_UNIX: Final = "unix://"
_INSTALL: Final = (
    "install Docker (https://docs.docker.com/engine/install), or Podman 4 or later, and start its service: "
    "systemctl --user start podman.socket"
)
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that makes containers of Linux on this machine.

    Attributes:
        url: Of its socket.
        name: Its name and version.
        podman: True if it is Podman.
        cpus: Number of processors that it has.
        limits: What it can limit of `memory`, `cpus` and `processes`.
        labels_files: True if containers may open only files that are labelled for them (SELinux).
    """

    url: str
    name: str
    podman: bool
    cpus: int
    limits: frozenset[str]
    labels_files: bool


def urls(variables: Mapping[str, str]) -> list[str]:
    """Where an engine may be, the first first.

    Args:
        variables: The environment.

    Raises:
        SandboxUnavailable: It names one elsewhere.
    """
    if given := variables.get("DOCKER_HOST"):
        if given.startswith(_UNIX):
            return [given]
        raise SandboxUnavailable(
            f"DOCKER_HOST is {given}: sandboxes need an engine on this machine, which shares a directory with their "
            "containers; unset it, or name a socket (unix:///var/run/docker.sock)"
        )
    places = ["/var/run/docker.sock"]
    if own := variables.get("XDG_RUNTIME_DIR"):
        places += [f"{own}/docker.sock", f"{own}/podman/podman.sock"]
    return [f"{_UNIX}{place}" for place in (*places, "/run/podman/podman.sock")]


def has_engine(variables: Mapping[str, str]) -> bool:
    """True if an engine on this machine answers, or one elsewhere is named, which `open_engine` refuses.

    Args:
        variables: The environment.
    """
    if sys.platform != "linux":
        return False
    try:
        return any(_unreachable(url) is None for url in urls(variables))
    except SandboxUnavailable:
        return True


def open_engine(variables: Mapping[str, str]) -> tuple[Any, Engine]:
    """Find the engine; returns the SDK's client of it, too.

    Raises:
        SandboxUnavailable: There is none, or it is of no use; the message says why, and the way out.
    """
    if sys.platform != "linux":
        raise SandboxUnavailable(
            "containers of this system are in a virtual machine, which shares no sockets with it: run kuberoll in a "
            "Linux machine, or the job in a cluster"
        )
    try:
        import docker
    except ImportError as error:
        raise SandboxUnavailable(f"sandboxes in containers need docker: {installation('docker')}") from error
    reasons = []
    for url in urls(variables):
        if (reason := _unreachable(url)) is not None:
            reasons.append(f"{url.removeprefix(_UNIX)}: {reason}")
            continue
        try:
            client = docker.APIClient(base_url=url, version="auto", timeout=SECONDS, max_pool_size=2 * THREADS)
            try:
                return client, describe(url, client.version(api_version=False), client.info(), os.uname().release)
            except BaseException:
                client.close()
                raise
        except docker.errors.DockerException as error:
            raise SandboxUnavailable(f"the container engine at {url} does not work: {error}") from error
    raise SandboxUnavailable(f"no container engine can be used ({'; '.join(reasons)}): {_way_out(reasons)}")


def describe(url: str, version: Mapping[str, Any], info: Mapping[str, Any], kernel: str) -> Engine:
    """What an engine is by its own words (`GET /version`, `GET /info`).

    Args:
        kernel: Release of this machine's kernel.

    Raises:
        SandboxUnavailable: Sandboxes cannot be made with it.
    """
    components = {one.get("Name"): one.get("Version") for one in version.get("Components") or ()}
    podman = "Podman Engine" in components
    number = str(version.get("Version") or "?")
    name = f"{'Podman' if podman else 'Docker'} {number}"
    where = f"{name} at {url}"
    if version.get("Os", "linux") != "linux" or info.get("OSType", "linux") != "linux":
        raise SandboxUnavailable(f"{where} makes containers of Windows: switch it to Linux containers")
    if tuple(_numbers(version.get("ApiVersion"))) < _OLDEST_API:
        oldest = ".".join(map(str, _OLDEST_API))
        raise SandboxUnavailable(f"{where} is too old: API {oldest} is needed, which Docker has since 20.10")
    if podman and _numbers(number)[:1] < [_OLDEST_PODMAN]:
        raise SandboxUnavailable(f"{where} is too old: Podman {_OLDEST_PODMAN} or later is needed")
    if (there := info.get("KernelVersion") or kernel) != kernel:
        raise SandboxUnavailable(
            f"{where} is in another machine than this process (its kernel is {there}, here it is {kernel}): Docker "
            "Desktop and `podman machine` have one of their own; install Docker Engine, or Podman itself, and name its "
            "socket in DOCKER_HOST"
        )
    machine = platform.machine()
    theirs = str(info.get("Architecture") or machine)
    if theirs not in (machine, _ARCHITECTURES.get(machine)):
        raise SandboxUnavailable(f"{where} is for {theirs}, and this Python for {machine}: use a Python for {theirs}")
    options = [str(option) for option in info.get("SecurityOptions") or ()]
    rootless = bool(info.get("Rootless")) or "name=rootless" in options
    # Only with version 2 may users other than root have control groups.
    limited = not (rootless and str(info.get("CgroupVersion")) == "1")
    words = {"memory": "MemoryLimit", "cpus": "CpuCfsQuota", "processes": "PidsLimit"}
    return Engine(
        url=url,
        name=name,
        podman=podman,
        cpus=int(info.get("NCPU") or os.cpu_count() or 1),
        limits=frozenset(limit for limit, word in words.items() if limited and info.get(word, True)),
        labels_files="name=selinux" in options,
    )


def _unreachable(url: str) -> str | None:
    """Why nobody answers at a socket; None: somebody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        try:
            end.connect(url.removeprefix(_UNIX))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                return "nobody listens there any more"
            return "there is no such socket" if error.errno == errno.ENOENT else os.strerror(error.errno or 0)
    return None


def _way_out(reasons: Sequence[str]) -> str:
    if any(reason.endswith(os.strerror(errno.EACCES)) for reason in reasons):
        return (
            "join the group that may use Docker (sudo usermod -aG docker $USER, and log in again), or use Podman "
            "without root: systemctl --user start podman.socket"
        )
    return _INSTALL


def _numbers(text: object) -> list[int]:
    """The numbers of a version, up to what is none."""
    found = []
    for part in str(text or "").split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return found
