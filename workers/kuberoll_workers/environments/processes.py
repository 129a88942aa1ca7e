"""Environments in child processes, which are killed when a step takes too long and replaced when they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import orjson

from kuberoll_workers.environments import landlock, mounts, sandbox, wire
from kuberoll_workers.environments.batches import Batch, CloseBatch
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.interface import ChatMessage, EnvironmentInterface, EnvironmentReturn, Metadata
from kuberoll_workers.environments.outcome import (
    SHUTDOWN_SECONDS,
    EnvironmentFault,
    StepRaised,
    StepTimedOut,
    timeout_message,
)
from kuberoll_workers.environments.registry import PlainSpec, UnusableEnvironment
from kuberoll_workers.environments.sandbox import Sandbox

START_SECONDS = 300.0
"""Time limit for the start of a process, including the creation of the environment."""
_END_SECONDS = 20.0

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class ProcessExecutor:
    """Runs an environment in child processes, each with its own instance; the process of a hung step is killed."""

    batched = True

    def __init__(
        self, spec: PlainSpec, *, processes: int, timeout: float, spare: int = 0, sandbox: Sandbox | None = None
    ) -> None:
        """
        Args:
            processes: Maximum number of processes; each is started when it is first needed.
            timeout: Time limit of one step, in seconds.
            spare: Number of further processes, for the trajectories that would wait for a step that may hang.
            sandbox: Files and variables of the processes; None for the defaults.
        """
        self.parallel = processes
        self.spare = spare
        self.timeout = timeout
        self._spec = spec
        self._sandbox = sandbox or Sandbox()
        self._slots = asyncio.Semaphore(processes + spare)
        self._idle: list[_Process] = []
        self._ending: set[asyncio.Task[str]] = set()
        self._hooks: Hooks | None = None

    async def hooks(self) -> Hooks:
        """See `Executor.hooks`."""
        if self._hooks is None:
            async with self._slots:
                self._idle.append(await self._start())
        assert self._hooks is not None
        return self._hooks

    def instances(self) -> Sequence[ProcessExecutor]:
        """See `Executor.instances`."""
        made = []
        for _ in range(self.parallel):
            one = ProcessExecutor(self._spec, processes=1, timeout=self.timeout, sandbox=self._sandbox)
            one._hooks = self._hooks
            if self._idle:
                one._idle.append(self._idle.pop())
            made.append(one)
        return made

    async def run(
        self,
        batch: Batch[_Result],
        *,
        limit: float | None = None,
        began: Callable[[], None] | None = None,
    ) -> Sequence[_Result | EnvironmentFault]:
        """See `Executor.run`.

        Args:
            limit: Another time limit, in seconds.
            began: Called when a process is there, and the call begins.
        """
        arguments: Any = batch
        try:
            message = wire.encode(wire.request_of(arguments))
        except (TypeError, UnicodeEncodeError) as error:
            raise StepRaised(
                f"{batch.method} could not be sent to the process: its inputs are not plain data: {error}"
            ) from error
        async with self._slots:
            if not self._idle and self._holds_no_episode(batch):
                return [None] * len(batch)  # type: ignore[list-item]
            process = self._idle.pop() if self._idle else await self._start()
            whole = False
            if began is not None:
                began()
            try:
                async with asyncio.timeout(self.timeout if limit is None else limit):
                    answer = await process.ask(message)
                results = wire.decode_results(answer, arguments)
                whole = True
                return results
            except EnvironmentFault:
                whole = True
                raise
            except TimeoutError as error:
                raise StepTimedOut(timeout_message(self.timeout, batch.method)) from error
            except wire.InvalidMessage as error:
                raise StepRaised(f"the environment's process violates its protocol: {error}") from error
            except (EOFError, OSError) as error:
                end = await self._end(process)
                raise StepRaised(f"the environment's process {end}") from error
            finally:
                # In all other cases a step is still running in it, or it cannot be trusted.
                if whole:
                    self._idle.append(process)
                else:
                    self._end(process)

    def _holds_no_episode(self, batch: Batch[Any]) -> bool:
        """True if the batch only closes episodes that ended with their process."""
        stateful = self._hooks is not None and self._hooks.stateful
        return stateful and self.parallel == 1 and isinstance(batch, CloseBatch)

    def end_spares(self) -> None:
        """End idle processes beyond the usual number."""
        while len(self._idle) > self.parallel:
            self._end(self._idle.pop())

    async def close(self) -> None:
        """Shut the environments in idle processes down, and end all processes."""
        if self._hooks is not None and self._hooks.shutdown:
            await asyncio.gather(*map(_shut_down, self._idle))
        for process in self._idle:
            self._end(process)
        self._idle.clear()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _start(self) -> _Process:
        _prepare()
        starting = asyncio.ensure_future(asyncio.to_thread(_Process, self._sandbox))
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread starts it nevertheless.
            starting.add_done_callback(
                lambda started: started.cancelled() or started.exception() or self._end(started.result())
            )
            raise
        except OSError as error:
            raise StepRaised(f"the environment's process could not be started: {error}") from error
        try:
            async with asyncio.timeout(START_SECONDS):
                self._hooks = await process.start(self._spec, self._sandbox)
        except EnvironmentFault as fault:
            self._end(process)
            raise StepRaised(str(fault), fault.traceback) from fault
        except TimeoutError as error:
            self._end(process)
            raise StepTimedOut(
                f"environment {self._spec.name!r}: it was not created within {START_SECONDS:g} s"
            ) from error
        except (EOFError, OSError, wire.InvalidMessage) as error:
            end = await self._end(process)
            raise StepRaised(
                f"environment {self._spec.name!r}: its process {end} while the environment was being created"
            ) from error
        except BaseException:
            self._end(process)
            raise
        return process

    def _end(self, process: _Process) -> asyncio.Task[str]:
        """End a process, once; the task's result describes how it ended."""
        if process.ending is None:
            process.ending = asyncio.create_task(process.end())
            self._ending.add(process.ending)
            process.ending.add_done_callback(self._ending.discard)
        return process.ending


class _Process:
    """One process of an environment, with its keeper."""

    def __init__(self, files: Sandbox) -> None:
        self.ending: asyncio.Task[str] | None = None
        self._scratch = tempfile.mkdtemp(prefix="kuberoll-environment-")
        self._channel, theirs = socket.socketpair()
        watched, self._control = os.pipe()
        try:
            # Its own session: only the worker reacts to a Ctrl-C at the terminal.
            self._keeper = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "kuberoll_workers.environments.keeper"),
                    *(str(theirs.fileno()), str(watched), self._scratch),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=sandbox.variables(os.environ, files, scratch=self._scratch),
                pass_fds=(theirs.fileno(), watched),
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(watched)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self, spec: PlainSpec, files: Sandbox) -> Hooks:
        """Create the environment in the process; returns its hooks.

        Raises:
            EnvironmentFault: The environment could not be created.
            EOFError, OSError: The process is gone.
            InvalidMessage: The process sent an invalid message.
        """
        self._reader, self._writer = await asyncio.open_connection(sock=self._channel)
        return wire.decode_ready(await self.ask(self.first_message(spec, files)))

    def first_message(self, spec: PlainSpec, files: Sandbox) -> bytes:
        """The message that creates the environment."""
        return wire.encode(
            wire.Start(
                name=spec.name,
                type=spec.type,
                entrypoint=spec.entrypoint,
                config=orjson.dumps(spec.config),
                scratch=self._scratch,
                protected=list(files.protected),
                readable=list(files.readable),
                writable=list(files.writable),
            )
        )

    async def ask(self, message: bytes) -> bytes:
        """Send a message and wait for the answer.

        Raises:
            EOFError, OSError: The process is gone.
            InvalidMessage: The process sent an invalid message.
        """
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write(message)
        await self._writer.drain()
        return await self._reader.readexactly(wire.length(await self._reader.readexactly(wire.HEADER.size)))

    def ask_now(self, message: bytes) -> bytes:
        """`ask` without an event loop, for a process that was not started with one."""
        self._channel.settimeout(START_SECONDS)
        self._channel.sendall(message)
        return self.next_now()

    def next_now(self) -> bytes:
        """The next answer to the last `ask_now`."""
        return self._exactly(wire.length(self._exactly(wire.HEADER.size)))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self._channel.recv(min(size - len(data), 1 << 20))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def end_now(self) -> str:
        """`end` without an event loop."""
        os.close(self._control)
        self._channel.close()
        return self._wait()

    async def end(self) -> str:
        """End the process and all that it started; returns how it ended, as a predicate."""
        os.close(self._control)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        else:
            self._channel.close()
        return await asyncio.to_thread(self._wait)

    def _wait(self) -> str:
        try:
            code = self._keeper.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            code = self._keeper.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        hint = ": killed from outside, or for memory" if -code == signal.SIGKILL else ""
        return f"was ended by signal {name}{hint}"


class ProcessEnvironment(EnvironmentInterface):
    """Proxy of an environment in a child process of its own for each call, for checking jobs and generating rows."""

    def __init__(self, spec: PlainSpec, sandbox: Sandbox | None = None) -> None:
        self._spec = spec
        self._sandbox = sandbox or Sandbox()

    def check(self) -> None:
        """Check that the environment can be created.

        Raises:
            UnusableEnvironment: It cannot.
        """
        with self._process():
            pass

    def generate_dataset(self, count: int, seed: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """The environment's rows, as they are generated.

        Raises:
            EnvironmentFault: The environment has no generator, it failed, or the process ended.
            UnusableEnvironment: It cannot be created.
        """
        with self._process() as process:
            try:
                answer = process.ask_now(wire.encode(wire.Generate(count, seed)))
                while rows := wire.decode_rows(answer):
                    yield from rows
                    answer = process.next_now()
            except TimeoutError as error:
                raise StepTimedOut(f"generate_dataset made no row for {START_SECONDS:g} s") from error
            except (EOFError, OSError, wire.InvalidMessage) as error:
                raise StepRaised("generate_dataset: the environment's process ended, or did not answer") from error

    def post_process(self, columns: bytes) -> bytes:
        """Metrics of `global_post_process_and_metrics` for these columns, both as JSON texts.

        Raises:
            EnvironmentFault: It failed, or the process ended.
            UnusableEnvironment: It cannot be created.
        """
        method = "global_post_process_and_metrics"
        with self._process() as process:
            try:
                return wire.decode_metrics(process.ask_now(wire.encode(wire.PostProcess(columns))))
            except TimeoutError as error:
                raise StepTimedOut(f"{method} took longer than {START_SECONDS:g} s") from error
            except (EOFError, OSError, wire.InvalidMessage) as error:
                raise StepRaised(f"{method}: the environment's process ended, or did not answer") from error

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        raise NotImplementedError("steps run in a ProcessExecutor")

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        raise NotImplementedError("aggregates are computed in the process that reads the trajectories")

    @contextlib.contextmanager
    def _process(self) -> Iterator[_Process]:
        _prepare()
        process = _Process(self._sandbox)
        try:
            try:
                wire.decode_ready(process.ask_now(process.first_message(self._spec, self._sandbox)))
            except EnvironmentFault as fault:
                raise UnusableEnvironment(str(fault), fault.traceback) from fault
            except (EOFError, OSError, wire.InvalidMessage) as error:
                raise UnusableEnvironment(
                    f"environment {self._spec.name!r}: its process ended, or took longer than {START_SECONDS:g} s, "
                    "while the environment was being created"
                ) from error
            yield process
        finally:
            process.end_now()


async def _shut_down(process: _Process) -> None:
    try:
        async with asyncio.timeout(SHUTDOWN_SECONDS):
            wire.decode_closed(await process.ask(wire.encode(wire.Shutdown())))
    except (EnvironmentFault, EOFError, OSError, wire.InvalidMessage) as error:
        # Of no consequence for the trajectories; a TimeoutError is an OSError.
        late = isinstance(error, TimeoutError)
        _log.warning("%s", timeout_message(SHUTDOWN_SECONDS, "shutdown") if late else f"shutdown: {error}")


@functools.cache
def _prepare() -> None:
    """Preparations before the first process of an environment is started."""
    sandbox.hide_from_others()
    if landlock.abi() == 0:
        _log.warning(
            "this kernel has no Landlock: processes of environments can read and write whatever this user can; "
            "docs/security.md says what still separates them"
        )
    if not mounts.is_available():
        open_sockets = landlock.abi() < landlock.SOCKETS_SINCE
        _log.warning(
            "this system gives processes of environments no namespaces: %sthey share /dev/shm and System V memory, and "
            "can change modes, owners and times of files of this user; docs/security.md has more",
            "they can connect to every Unix socket that this user can, " if open_sockets else "",
        )
