"""What a container is that is a sandbox: the body of `POST /containers/create` (Docker Engine API 1.41)."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kuberoll_api.sandboxes import CAPABILITIES
from kuberoll_workers.sandboxes.containers import sockets
from kuberoll_workers.sandboxes.containers.engine import Engine
from kuberoll_workers.sandboxes.containers.images import EngineImage
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.guest.settings import Settings
from kuberoll_workers.sandboxes.runtime import PLACE, Runtime

SANDBOX_LABEL: Final = "io.kuberoll.sandbox"
"""Label with the sandbox's name: all that is removed by a sweep has it."""
OWNER_LABEL: Final = "io.kuberoll.owner"
"""Label with the process that made the container (`owners.Owner`)."""
EXPIRES_LABEL: Final = "io.kuberoll.expires"
"""Label with the time, in seconds since 1970, when the container has ended in any case."""

# Files in memory count as the sandbox's own, and no killing frees them: together they take less than it may have, so
# that something is left for the server.
_SHM_BYTES: Final = 64 << 20
_SHM_SHARE: Final = 4
_FIRST_SECONDS: Final = 30.0
_LOG_BYTES: Final = 256 << 10
# Above what desktops give programs (200), which these may not lower, and below what the server gives commands (500).
_OOM_SCORE: Final = 300
# What a root that is read-only has room for anyway: its mode, and the part of the memory that it may take.
_WRITABLE: Final = {"/tmp": ("1777", 4), "/run": ("755", 16)}
# The server, and those in which it runs commands.
_OWN_PROCESSES: Final = 8


def settings_of(name: str, spec: SandboxSpec, image: EngineImage, certificate: str) -> Settings:
    """Settings of the server inside."""
    return Settings(
        name=name,
        certificate=certificate,
        path=f"{sockets.INSIDE}/{sockets.NAME}",
        user=spec.user or image.user,
        workdir=posixpath.normpath(posixpath.join("/", spec.workdir or image.workdir)),
        environment={**image.environment, **spec.environment},
        lease_seconds=spec.lease_seconds,
        # Its driver comes as soon as it listens, unless that was killed.
        start_seconds=min(spec.start_seconds, max(spec.lease_seconds, _FIRST_SECONDS)),
        total_seconds=spec.total_seconds,
    )


def body_of(
    spec: SandboxSpec,
    settings: Settings,
    *,
    engine: Engine,
    image: EngineImage,
    runtime: Runtime,
    shared: Path,
    labels: Mapping[str, str],
    limits_storage: bool,
) -> dict[str, Any]:
    """The body.

    Args:
        shared: Directory that the server makes its socket in.
        limits_storage: True to limit what the container writes.
    """
    host: dict[str, Any] = {
        "AutoRemove": True,
        "CapAdd": [*CAPABILITIES],
        "CapDrop": ["ALL"],
        "CgroupnsMode": "private",
        # The server is the first process, and takes care of orphans.
        "Init": False,
        "IpcMode": "private",
        "LogConfig": {"Type": "json-file", "Config": {"max-size": str(_LOG_BYTES), "max-file": "1"}},
        "NetworkMode": "none" if spec.network == "None" else "default",
        "OomScoreAdj": _OOM_SCORE,
        "ReadonlyRootfs": spec.read_only,
        "ShmSize": _SHM_BYTES
        if spec.memory is None
        else min(max(_SHM_BYTES, spec.memory // _SHM_SHARE), spec.memory // 2),
        **_mounts(runtime, shared, engine),
        **_limits(spec, engine),
    }
    if spec.storage is not None and limits_storage:
        host["StorageOpt"] = {"size": str(spec.storage)}
    body: dict[str, Any] = {
        "Image": image.id,
        "Hostname": "sandbox",
        "User": "0:0",
        "WorkingDir": "/",
        "Entrypoint": runtime.argv(),
        "Cmd": [],
        "Env": [f"{name}={text}" for name, text in runtime.environment(settings).items()],
        "Labels": dict(labels),
        "StopSignal": "SIGTERM",
        "HostConfig": host,
    }
    if image.checks_health:
        # Its command would be a process that nobody in the sandbox has started.
        body["Healthcheck"] = {"Test": ["NONE"]}
    if spec.read_only:
        host["Tmpfs"] = {
            place: f"rw,exec,nosuid,nodev,mode={mode}{_size(spec, share)}" for place, (mode, share) in _WRITABLE.items()
        }
        if settings.workdir != "/" and not any(_within(settings.workdir, place) for place in _WRITABLE):
            # Unlike a tmpfs, a volume begins with what the image has there; it is removed with the container.
            body["Volumes"] = {settings.workdir: {}}
    return body


def _mounts(runtime: Runtime, shared: Path, engine: Engine) -> dict[str, Any]:
    if engine.labels_files:
        # Only these have a word for it.
        return {"Binds": [f"{runtime.directory}:{PLACE}:ro,z", f"{shared}:{sockets.INSIDE}:z"]}
    return {
        # Unlike binds, they are an error if this machine's files are not the engine's.
        "Mounts": [
            {"Type": "bind", "Source": str(runtime.directory), "Target": PLACE, "ReadOnly": True},
            {"Type": "bind", "Source": str(shared), "Target": sockets.INSIDE},
        ]
    }


def _limits(spec: SandboxSpec, engine: Engine) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if spec.memory is not None and "memory" in engine.limits:
        # Both together: none of it may be swapped.
        limits.update(Memory=spec.memory, MemorySwap=spec.memory)
    if spec.cpus is not None and "cpus" in engine.limits:
        limits["NanoCpus"] = round(min(spec.cpus, engine.cpus) * 1e9)
    if "processes" in engine.limits:
        limits["PidsLimit"] = spec.processes + _OWN_PROCESSES
    return limits


def _size(spec: SandboxSpec, share: int) -> str:
    """An option of a mount that is in memory."""
    limits = [limit for limit in (spec.storage, spec.memory and spec.memory // share) if limit is not None]
    return f",size={min(limits)}" if limits else ""


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")
