"""The driver of sandboxes that are containers of Docker or Podman."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from kuberoll_workers.data.causes import Evidence
from kuberoll_workers.data.extras import installation
from kuberoll_workers.sandboxes.connection import Ticket, connect
from kuberoll_workers.sandboxes.containers import body, owners
from kuberoll_workers.sandboxes.containers.engine import THREADS, Engine, open_engine
from kuberoll_workers.sandboxes.containers.images import HOST_REFUSED, EngineImage, obtain
from kuberoll_workers.sandboxes.containers.output import Output
from kuberoll_workers.sandboxes.containers.sockets import NAME, Sockets, base_of, bases, remove_leftovers
from kuberoll_workers.sandboxes.driver import Ending, SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxError, SandboxLost, SandboxUnavailable
from kuberoll_workers.sandboxes.guest.settings import Settings
from kuberoll_workers.sandboxes.images.references import HOST
from kuberoll_workers.sandboxes.keys import Key, context_of, make_key
from kuberoll_workers.sandboxes.places import make_places
from kuberoll_workers.sandboxes.runtime import Runtime, find_runtime

_PULLS: Final = 4
_NAMES: Final = "kuberoll-"
_REMOVE_SECONDS: Final = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05

_MISSING: Final = {
    "memory": "memory",
    "cpus": "processors",
    "processes": "the number of processes",
    "storage": "what a sandbox writes to its files",
}
_HINTS: Final = {
    "controller": "let users have all control groups: Delegate=cpu cpuset io memory pids in "
    "/etc/systemd/system/user@.service.d/delegate.conf",
    "/.kuberoll": "the engine does not see this machine's files: it must run on this machine, outside of containers",
    "bind source path": "the engine does not see this machine's files: it must run on this machine, outside of "
    "containers; if it was installed by snap, install it otherwise",
}

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """What a driver needs once it has started."""

    client: Any
    engine: Engine
    runtime: Runtime
    sockets: Sockets
    key: Key
    context: ssl.SSLContext


class DockerDriver:
    """Makes sandboxes that are containers of the engine on this machine, Docker or Podman."""

    def __init__(self, *, cache: Path, variables: Mapping[str, str] | None = None) -> None:
        """
        Args:
            cache: Directory of the runtime.
            variables: The environment, which tells where the engine is; None: this process's.
        """
        self._cache = cache
        self._variables = os.environ if variables is None else variables
        # Whoever pulls an image for minutes keeps nobody from removing a container.
        self._requests = ThreadPoolExecutor(THREADS, "sandbox-containers")
        self._pulls = ThreadPoolExecutor(_PULLS, "sandbox-images")
        self._starting = asyncio.Lock()
        self._ready: _Ready | None = None
        self._images: dict[str, asyncio.Task[EngineImage]] = {}
        self._made: dict[str, asyncio.Future[Any]] = {}
        self._undoing: set[asyncio.Task[None]] = set()
        self._unlimited: set[str] = set()

    async def check(self) -> None:
        """See `Driver.check`; what drivers left behind that were killed is removed."""
        await self._started()

    def refusal(self, spec: SandboxSpec) -> str | None:
        """See `Driver.refusal`."""
        return HOST_REFUSED if spec.image == HOST else None

    async def prepare(self, image: str) -> None:
        """See `Driver.prepare`."""
        await self._image(await self._started(), image)

    async def create(self, name: str, spec: SandboxSpec) -> Ticket:
        """See `Driver.create`."""
        ready = await self._started()
        try:
            async with asyncio.timeout(spec.start_seconds):
                return await self._create(ready, name, spec)
        except TimeoutError as error:
            raise SandboxUnavailable(
                f"the sandbox {name} of {spec.image} did not start within {spec.start_seconds:g} s; if its image is "
                "large, pull it before (docker pull, podman pull), or allow more time"
            ) from error

    async def ending(self, name: str) -> Ending | None:
        """See `Driver.ending`."""
        if (ready := self._ready) is None:
            return None
        try:
            state = (await self._in_thread(ready.client.inspect_container, f"{_NAMES}{name}"))["State"]
        except Exception:
            # Each engine's library has exceptions of its own, and the container may be gone.
            return None
        if state.get("Running"):
            return Ending("its container seems to run")
        code, killed = state.get("ExitCode"), bool(state.get("OOMKilled"))
        words = f"its container ended with exit code {code}" + (", for want of memory" if killed else "")
        return Ending(words, Evidence(exit_code=code, event="OOMKilled" if killed else None))

    async def remove(self, name: str) -> None:
        """See `Driver.remove`."""
        if self._ready is not None:
            await self._remove(self._ready, name)

    async def close(self) -> None:
        """See `Driver.close`."""
        for task in self._images.values():
            task.cancel()
        ready, self._ready = self._ready, None
        if ready is not None:
            removed = await asyncio.gather(
                *(self._remove(ready, name) for name in list(self._made)), return_exceptions=True
            )
            for error in removed:
                if isinstance(error, Exception):
                    _log.warning("a sandbox is left until its lease ends: %s", error)
            if self._undoing:
                await asyncio.wait(self._undoing)
            ready.sockets.close()
            ready.client.close()
        self._requests.shutdown(wait=False)
        self._pulls.shutdown(wait=False, cancel_futures=True)

    async def _started(self) -> _Ready:
        async with self._starting:
            if self._ready is None:
                self._ready = await self._in_thread(self._start)
            return self._ready

    def _start(self) -> _Ready:
        client, engine = open_engine(self._variables)
        try:
            runtime = find_runtime(self._cache)
            try:
                key = make_key()
            except ImportError as error:
                raise SandboxUnavailable(f"sandboxes need cryptography: {installation('cryptography')}") from error
            for base in set(bases(self._variables)):
                remove_leftovers(base)
            _sweep(client)
            return _Ready(
                client=client,
                engine=engine,
                runtime=runtime,
                sockets=Sockets(base_of(self._variables)),
                key=key,
                context=context_of(key),
            )
        except BaseException:
            client.close()
            raise

    async def _create(self, ready: _Ready, name: str, spec: SandboxSpec) -> Ticket:
        image = await self._image(ready, spec.image)
        settings = body.settings_of(name, spec, image, ready.key.certificate)
        ticket = Ticket(
            name=name,
            address=f"unix:{ready.sockets.path(name)}",
            certificate=ready.key.certificate,
            private=ready.key.private,
        )
        making = asyncio.get_running_loop().run_in_executor(
            self._requests, functools.partial(self._make, ready, name, spec, image, settings)
        )
        self._made[name] = making
        output: Output | None = None
        try:
            output = await asyncio.shield(making)
            await self._answering(ready, name, output)
            (await connect(ticket, ready.context)).close()
            await make_places(ticket)
        except BaseException:
            undoing = asyncio.create_task(self._undo(ready, name, making))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            await asyncio.shield(undoing)
            raise
        finally:
            if output is not None:
                output.close()
        return ticket

    async def _image(self, ready: _Ready, image: str) -> EngineImage:
        """An image that the engine has; who asks for one that is on its way waits for it."""
        if (task := self._images.get(image)) is None:
            task = asyncio.create_task(self._in_thread(obtain, ready.client, image, pool=self._pulls))
            self._images[image] = task
            task.add_done_callback(functools.partial(self._obtained, image))
        return await asyncio.shield(task)

    def _obtained(self, image: str, task: asyncio.Task[EngineImage]) -> None:
        self._images.pop(image, None)
        if not task.cancelled():
            # Who asked for it may have gone.
            task.exception()

    def _make(self, ready: _Ready, name: str, spec: SandboxSpec, image: EngineImage, settings: Settings) -> Output:
        """Create and start a container; in a thread.

        Raises:
            SandboxUnavailable: The engine does not.
        """
        import docker

        shared = ready.sockets.share(name)
        labels = {
            body.SANDBOX_LABEL: name,
            body.OWNER_LABEL: str(owners.this_process()),
            body.EXPIRES_LABEL: str(int(time.time() + spec.start_seconds + spec.total_seconds) + 1),
        }
        for limit in sorted(_wanted(spec) - ready.engine.limits - {"storage"}):
            self._miss(ready.engine, limit)
        client, output = ready.client, None
        make = functools.partial(
            body.body_of,
            spec,
            settings,
            engine=ready.engine,
            image=image,
            runtime=ready.runtime,
            shared=shared,
            labels=labels,
        )
        try:
            container = create_container(
                client,
                f"{_NAMES}{name}",
                make,
                limits_storage=spec.storage is not None and "storage" not in self._unlimited,
                missed=lambda: self._miss(ready.engine, "storage"),
            )
            # Before it starts: what ends is removed at once, with what it has written.
            output = Output(client, container)
            client.start(container)
        except BaseException as error:
            if output is not None:
                output.close()
            if isinstance(error, docker.errors.DockerException | OSError):
                raise SandboxUnavailable(
                    f"{ready.engine.name} does not start the sandbox {name} of {spec.image}: {explained(error)}"
                ) from error
            raise
        return output

    async def _answering(self, ready: _Ready, name: str, output: Output) -> None:
        """Wait until the server inside listens, and take its socket.

        Raises:
            SandboxLost: The container has ended.
        """
        ended = asyncio.create_task(output.read())
        listening = asyncio.create_task(_listening(ready.sockets.directory / f"{name}.d" / NAME))
        try:
            await asyncio.wait((ended, listening), return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():
                said = ended.result()
                code = await self._in_thread(output.exit_code)
                raise SandboxLost(f"the sandbox {name} ended while it started, {code}: {said or 'it wrote nothing'}")
            listening.result()
            ready.sockets.take(name)
        finally:
            for task in (ended, listening):
                task.cancel()
            await asyncio.wait((ended, listening))

    async def _undo(self, ready: _Ready, name: str, making: asyncio.Future[Output]) -> None:
        """Remove what was begun; the thread that makes it goes on until it is made."""
        await asyncio.wait((making,))
        if not making.cancelled() and making.exception() is None:
            making.result().close()
        try:
            await self._remove(ready, name)
        except SandboxError as error:
            _log.warning("what was begun of the sandbox %s is left until its lease ends: %s", name, error)

    async def _remove(self, ready: _Ready, name: str) -> None:
        if (making := self._made.get(name)) is not None and not making.done():
            await asyncio.wait((making,))
        try:
            await self._in_thread(remove_container, ready.client, f"{_NAMES}{name}")
        finally:
            ready.sockets.drop(name)
        self._made.pop(name, None)

    def _miss(self, engine: Engine, limit: str) -> None:
        """Say, once, that the engine cannot limit something."""
        if limit not in self._unlimited:
            self._unlimited.add(limit)
            _log.warning("%s cannot limit %s here: sandboxes go without that limit", engine.name, _MISSING[limit])

    async def _in_thread(
        self, function: Callable[..., _Result], *arguments: Any, pool: ThreadPoolExecutor | None = None
    ) -> _Result:
        call = functools.partial(function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(pool or self._requests, call)


def create_container(
    client: Any,
    name: str,
    make: Callable[..., dict[str, Any]],
    *,
    limits_storage: bool,
    missed: Callable[[], None],
) -> str:
    """Create a container, if need be without a limit of what it writes; its id.

    Args:
        make: Makes the body, with or without such a limit.
        limits_storage: True to try it with one. It is this container's: others that start meanwhile may find out, too.
        missed: Called when the engine cannot limit it.

    Raises:
        docker.errors.APIError: The engine does not.
    """
    import docker

    try:
        container = client.create_container_from_config(make(limits_storage=limits_storage), name)
    except docker.errors.APIError as error:
        if not limits_storage or "storage-opt" not in str(error):
            raise
        missed()
        container = client.create_container_from_config(make(limits_storage=False), name)
    return str(container["Id"])


def remove_container(client: Any, container: str) -> None:
    """Kill and remove a container, with its volumes; return when it is gone.

    Raises:
        SandboxError: The engine does not.
    """
    import docker

    deadline = time.monotonic() + _REMOVE_SECONDS
    pause = _FIRST_PAUSE
    while True:
        try:
            client.remove_container(container, force=True, v=True)
            return
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as error:
            # It may be on its way already, which engines say in several ways.
            try:
                client.inspect_container(container)
            except docker.errors.NotFound:
                return
            except (docker.errors.DockerException, OSError):
                pass
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"the engine does not remove the container {container}: {explained(error)}"
                ) from error
        except (docker.errors.DockerException, OSError) as error:
            raise SandboxError(f"the engine does not answer: {error}") from error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def explained(error: Exception) -> str:
    """What an engine said, with the way out where it is known."""
    said = str(getattr(error, "explanation", None) or error).strip()
    return "; ".join([said, *(hint for word, hint in _HINTS.items() if word in said)])


def is_left(labels: Mapping[str, str], here: owners.Owner, now: float) -> bool:
    """Tell whether a container was left behind.

    Args:
        labels: Its labels.
        here: This process.
        now: Seconds since 1970.
    """
    owner = owners.Owner.of(labels.get(body.OWNER_LABEL, ""))
    expires = labels.get(body.EXPIRES_LABEL, "")
    return (owner is not None and owners.is_gone(owner, here)) or (expires.isdecimal() and int(expires) < now)


def _sweep(client: Any) -> None:
    """Remove containers that were left behind."""
    here, now = owners.this_process(), time.time()
    for container in client.containers(all=True, filters={"label": body.SANDBOX_LABEL}):
        if is_left(container.get("Labels") or {}, here, now):
            try:
                remove_container(client, container["Id"])
            except SandboxError as error:
                _log.warning("a container of a process that is gone is left: %s", error)


def _wanted(spec: SandboxSpec) -> set[str]:
    wanted = {"memory": spec.memory, "cpus": spec.cpus, "processes": spec.processes}
    return {limit for limit, value in wanted.items() if value is not None}


async def _listening(path: Path) -> None:
    """Wait until somebody listens at a socket."""
    loop = asyncio.get_running_loop()
    pause = _FIRST_PAUSE
    while True:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
                end.setblocking(False)
                await loop.sock_connect(end, str(path))
            return
        await asyncio.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
