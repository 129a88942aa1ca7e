"""The driver of sandboxes in namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from kuberoll_workers.data.lifetime import RUN_ID_VARIABLE
from kuberoll_workers.sandboxes.connection import Ticket, connect
from kuberoll_workers.sandboxes.driver import Ending, SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxError, SandboxLost, SandboxUnavailable
from kuberoll_workers.sandboxes.guest.settings import Settings
from kuberoll_workers.sandboxes.images.errors import ImageError
from kuberoll_workers.sandboxes.images.overlay import overlay_options
from kuberoll_workers.sandboxes.images.references import HOST
from kuberoll_workers.sandboxes.images.store import Hold, Image, ImageStore
from kuberoll_workers.sandboxes.keys import context_of, make_key
from kuberoll_workers.sandboxes.namespaces.cgroups import Limits
from kuberoll_workers.sandboxes.namespaces.host import HostRoot, make_root, problem
from kuberoll_workers.sandboxes.namespaces.machine import Plan
from kuberoll_workers.sandboxes.runtime import PLACE, Runtime, find_runtime
from kuberoll_workers.sandboxes.users import UserNamespacesUnavailable, id_map

_PREFIX: Final = "kuberoll-sandboxes-"
_LOCK: Final = "lock"
_LOCK_SECONDS: Final = 60.0
_FIRST_SECONDS: Final = 30.0
_LISTENER: Final = 3
# Of what is in memory, beside what programs have; together less than all, so that something is left for the server.
_SHARE: Final = 4
_SHARED_BYTES: Final = 1 << 30
_USUAL_MEMORY: Final = 1 << 30
_PARALLEL_PULLS: Final = 4
_WITHOUT: Final = {
    "memory": "a limit of memory that is looked at 20 times a second, and not exact",
    "pids": "a limit of processes for each of their users, and not for all together",
    "cpu": "no limit of processors",
}

_log = logging.getLogger(__name__)


class NamespaceDriver:
    """Makes sandboxes in Linux namespaces, on overlays of unpacked images, or on the host's own root."""

    def __init__(self, *, cache: Path, scratch: Path | None = None) -> None:
        """
        Args:
            cache: Directory of images and of the runtime.
            scratch: Directory for sandboxes' own files; None: the system's for temporary files.
        """
        self._cache = cache
        self._scratch = scratch or Path(tempfile.gettempdir())
        self._key = make_key()
        self._context = context_of(self._key)
        self._pool = ThreadPoolExecutor(_PARALLEL_PULLS, "sandbox-images")
        self._runtime: Runtime | None = None
        self._store: ImageStore | None = None
        self._directory: Path | None = None
        self._lock: int | None = None
        self._channel: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._told = False
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._holds: dict[str, Hold] = {}
        self._host: HostRoot | None = None

    async def check(self) -> None:
        """See `Driver.check`."""
        if sys.platform != "linux":
            raise SandboxUnavailable("sandboxes in namespaces need Linux; install Docker or Podman, and start it")
        await self._started()

    def refusal(self, spec: SandboxSpec) -> str | None:
        """See `Driver.refusal`."""
        if spec.image == HOST and (reason := problem()) is not None:
            return reason
        if spec.network == "None":
            return None
        return (
            "network All needs Docker or Podman: a sandbox in namespaces has no network, or an allowlist "
            "(sandbox.network.allowedHosts)"
        )

    async def prepare(self, image: str) -> None:
        """See `Driver.prepare`."""
        if image == HOST:
            await self._started()
        await self._image(image)

    async def create(self, name: str, spec: SandboxSpec) -> Ticket:
        """See `Driver.create`."""
        if (reason := self.refusal(spec)) is not None:
            raise SandboxUnavailable(reason)
        await self._started()
        image = await self._image(spec.image)
        assert self._directory is not None
        assert self._runtime is not None
        try:
            if spec.image != HOST:
                self._holds[name] = await self._in_thread(self._opened_store().hold, image)
            plan = self._plan(name, spec, image)
        except ImageError as error:
            self._release(name)
            raise SandboxUnavailable(str(error)) from error
        limits = asdict(Limits(spec.cpus, spec.memory, spec.processes))
        try:
            answer = await self._ask({"do": "create", "name": name, "plan": asdict(plan), "limits": limits})
            if "error" in answer:
                raise SandboxUnavailable(f"a sandbox of {spec.image} cannot be made: {answer['error']}")
            ticket = Ticket(
                name=name,
                address=f"unix:{self._directory}/{name}/socket",
                certificate=self._key.certificate,
                private=self._key.private,
            )
            (await connect(ticket, self._context)).close()
        except BaseException:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(self.remove(name))
            raise
        return ticket

    async def ending(self, name: str) -> Ending | None:  # noqa: ARG002
        """See `Driver.ending`."""
        return None

    async def remove(self, name: str) -> None:
        """See `Driver.remove`."""
        if self._channel is not None and self._process is not None and self._process.returncode is None:
            await self._ask({"do": "remove", "name": name})
        self._release(name)

    async def close(self) -> None:
        """See `Driver.close`."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            await self._process.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        for name in list(self._holds):
            self._release(name)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        # The process has removed it; if it was killed, the next driver does.
        self._directory = None
        self._pool.shutdown(wait=False)

    def _plan(self, name: str, spec: SandboxSpec, image: Image) -> Plan:
        assert self._directory is not None
        assert self._runtime is not None
        workdir = spec.workdir or image.workdir or "/"
        settings = Settings(
            name=name,
            certificate=self._key.certificate,
            descriptor=_LISTENER,
            user=spec.user or image.user,
            workdir=workdir,
            environment={**image.environment, **spec.environment},
            lease_seconds=spec.lease_seconds,
            # Its driver comes as soon as it listens.
            start_seconds=min(spec.start_seconds, max(spec.lease_seconds, _FIRST_SECONDS)),
            total_seconds=spec.total_seconds,
        )
        mounted = overlay_options(image.layers)
        host = self._host if spec.image == HOST else None
        return Plan(
            name=name,
            layers=str(mounted.directory),
            overlay=mounted.options,
            directory=str(self._directory / name),
            runtime=str(self._runtime.directory),
            place=PLACE,
            argv=self._runtime.argv(),
            environment=self._runtime.environment(settings),
            workdir=workdir,
            read_only=spec.read_only,
            processes=spec.processes,
            storage=self._storage(spec),
            shared=_SHARED_BYTES if spec.memory is None else min(_SHARED_BYTES, spec.memory // _SHARE),
            shown=[] if host is None else list(host.shown),
            covered=[] if host is None else list(host.covered),
            listener=_LISTENER,
        )

    def _storage(self, spec: SandboxSpec) -> int | None:
        """Bytes of a sandbox's files that are in memory, where nothing frees them: a small part of it only."""
        if spec.storage is None or spec.storage <= (spec.memory or _USUAL_MEMORY) // _SHARE:
            return spec.storage
        if not self._told:
            self._told = True
            _log.warning(
                "a sandbox may write %d MiB: that is limited only up to a quarter of its memory, and so not here; "
                "Docker limits it where its storage can",
                spec.storage >> 20,
            )
        return None

    async def _image(self, reference: str) -> Image:
        if reference == HOST:
            return await self._host_image()
        try:
            image: Image = await self._in_thread(self._opened_store().image, reference)
        except (ImageError, UserNamespacesUnavailable) as error:
            raise SandboxUnavailable(str(error)) from error
        return image

    async def _host_image(self) -> Image:
        """The host's root; what it has of its own lasts as long as this driver."""
        async with self._starting:
            if self._host is None:
                assert self._directory is not None
                try:
                    self._host = await asyncio.to_thread(make_root, self._directory / "host", id_map())
                except (OSError, UserNamespacesUnavailable) as error:
                    raise SandboxUnavailable(f"the host's root cannot be a sandbox's: {error}") from error
            return self._host.image

    def _opened_store(self) -> ImageStore:
        if self._store is None:
            self._store = ImageStore(self._cache / "images", id_map())
        return self._store

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(function, *arguments))

    def _release(self, name: str) -> None:
        if (hold := self._holds.pop(name, None)) is not None:
            hold.close()

    async def _started(self) -> None:
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            if self._process is not None:
                raise SandboxLost("the process that makes sandboxes was killed, and all sandboxes with it")
            await asyncio.to_thread(remove_leftovers, self._scratch)
            self._runtime = await asyncio.to_thread(find_runtime, self._cache)
            self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._scratch))
            self._directory.chmod(0o711)
            self._lock = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            # The lock is the process's, too: sandboxes may outlive this one for a moment.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *_zygote(),
                *(str(theirs.fileno()), str(self._directory)),
                pass_fds=(theirs.fileno(), self._lock),
                env=_variables(),
            )
            theirs.close()
            ours.setblocking(False)
            self._channel = ours
            first = await self._receive()
            if first is None:
                raise SandboxUnavailable("the process that makes sandboxes has ended: see the log")
            if first["problem"] is not None:
                raise SandboxUnavailable(first["problem"])
            for controller in first["missing"]:
                _log.warning(
                    "this user may not make control groups, so that sandboxes have %s; with Docker or Podman they do",
                    _WITHOUT[controller],
                )
            self._reading = asyncio.create_task(self._read())

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._channel is not None
        name = f"{request['do']} {request['name']}"
        if (asked := self._waiting.get(name)) is not None:
            # Somebody waits for the same.
            return await asyncio.shield(asked)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        try:
            await asyncio.get_running_loop().sock_sendall(self._channel, json.dumps(request).encode())
            return await future
        except OSError as error:
            raise SandboxLost(f"the process that makes sandboxes is gone: {error}") from error
        finally:
            self._waiting.pop(name, None)

    async def _read(self) -> None:
        while (message := await self._receive()) is not None:
            if "ended" in message:
                self._release(message["name"])
                continue
            kind = "remove" if "removed" in message else "create"
            future = self._waiting.get(f"{kind} {message['name']}")
            if future is not None and not future.done():
                future.set_result(message)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxLost("the process that makes sandboxes was killed"))

    async def _receive(self) -> dict[str, Any] | None:
        assert self._channel is not None
        try:
            data = await asyncio.get_running_loop().sock_recv(self._channel, 1 << 20)
        except OSError:
            return None
        found: dict[str, Any] | None = json.loads(data) if data else None
        return found


def remove_leftovers(scratch: Path) -> None:
    """Remove directories of drivers that were killed together with the process that would have done it."""
    for directory in scratch.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            young = time.time() - directory.stat().st_mtime < _LOCK_SECONDS
            if young and not (directory / _LOCK).exists():
                # Just made, and not locked yet.
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # In a process of its own: this one has threads.
                subprocess.run([sys.executable, *_zygote(), "remove", str(directory)], env=_variables(), check=False)
            finally:
                os.close(lock)


def _zygote() -> tuple[str, ...]:
    return ("-P", "-m", "kuberoll_workers.sandboxes.namespaces.zygote")


def _variables() -> dict[str, str]:
    # It ends by itself when its worker has, and removes what is left: whoever ends what a killed worker has left, by
    # the run's id, must not end it before.
    kept = {name: value for name, value in os.environ.items() if name != RUN_ID_VARIABLE}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
