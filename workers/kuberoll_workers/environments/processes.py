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
from typing import Any, NamedTuple, TypeVar

import orjson

from kuberoll_api.environment_types import AGENT_TYPE
from kuberoll_workers.data.causes import Cause, Evidence, cause_of_exit, error_name, evidence_of_exit
from kuberoll_workers.data.tracebacks import parse_stack
from kuberoll_workers.environments import landlock, messages, mounts, process_access
from kuberoll_workers.environments.batches import Batch, CloseBatch
from kuberoll_workers.environments.channel import Caller, is_waiting
from kuberoll_workers.environments.child import STACK_FILE, STACK_SIGNAL
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.interface import ChatMessage, EnvironmentInterface, EnvironmentReturn, Metadata
from kuberoll_workers.environments.outcome import (
    SHUTDOWN_SECONDS,
    EnvironmentFault,
    StepRaised,
    StepTimedOut,
    timed_out,
    timeout_message,
)
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.registry import PlainSpec, UnusableEnvironment

START_SECONDS = 300.0
"""Time limit for the start of a process, including the creation of the environment."""
_END_SECONDS = 20.0
_OWN_END_SECONDS = 5.0
# A process that can print its stack does so in milliseconds.
_STACK_SECONDS = 0.5
_STACK_LOOKS = 25
_STACK_BYTES = 32 << 10

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class ProcessExecutor:
    """Runs an environment in child processes, each with its own instance; the process of a hung step is killed."""

    batched = True

    def __init__(
        self, spec: PlainSpec, *, processes: int, timeout: float, spare: int = 0, access: ProcessAccess | None = None
    ) -> None:
        """
        Args:
            processes: Maximum number of processes; each is started when it is first needed.
            timeout: Time limit of one step, in seconds.
            spare: Number of further processes, for the trajectories that would wait for a step that may hang.
            access: Files and variables of the processes; None for the defaults.
        """
        self.parallel = processes
        self.spare = spare
        self.timeout = timeout
        self._spec = spec
        self._access = access or ProcessAccess()
        self._repeats = spec.type != AGENT_TYPE
        self._slots = asyncio.Semaphore(processes + spare)
        self._idle: list[_Process] = []
        self._ending: set[asyncio.Task[ProcessEnd]] = set()
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
            one = ProcessExecutor(self._spec, processes=1, timeout=self.timeout, access=self._access)
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
            message = messages.wrap_call(batch.method, messages.request_of(arguments))
        except (TypeError, UnicodeEncodeError) as error:
            raise StepRaised(
                f"{batch.method} could not be sent to the process: its inputs are not plain data: {error}"
            ) from error
        seconds = self.timeout if limit is None else limit
        async with self._slots:
            if not self._idle and self._holds_no_episode(batch):
                return [None] * len(batch)  # type: ignore[list-item]
            process = self._idle.pop() if self._idle else await self._start()
            if began is not None:
                began()
            try:
                return await self._asked(process, message, arguments, seconds)
            except _ProcessLost as lost:
                if not (process.calls > 1 and self._may_repeat(batch)):
                    raise lost.fault from lost
            # An earlier call may have left behind in the process what has ended it.
            try:
                return await self._asked(await self._start(), message, arguments, seconds)
            except _ProcessLost as lost:
                raise lost.fault from lost

    async def _asked(self, process: _Process, message: bytes, batch: Any, seconds: float) -> Sequence[Any]:
        """The results of one call of a process, which is kept if it has answered and ended if not.

        Raises:
            _ProcessLost: It has ended, or sent something else than its answer.
            EnvironmentFault: The call failed.
        """
        whole = False
        process.calls += 1
        try:
            async with asyncio.timeout(seconds):
                answer = await process.channel.ask(message)
            results = messages.unwrap_results(answer, batch)
            whole = True
            return results
        except EnvironmentFault:
            whole = True
            raise
        except TimeoutError as error:
            stack = parse_stack(await process.printed_stack())
            fault = timed_out(seconds, batch.method, stack)
            if stack is None or is_waiting(stack):
                # It was stopped, or somebody else has taken the call: the environment's code does not run.
                raise _ProcessLost(str(fault), fault) from error
            raise fault from error
        except messages.InvalidMessage as error:
            raise _ProcessLost(f"the environment's process violates its protocol: {error}") from error
        except (EOFError, OSError) as error:
            end = await self._end(process, patience=_OWN_END_SECONDS)
            words = f"the environment's process {end.words}"
            raise _ProcessLost(words, StepRaised(words, cause=end.cause)) from error
        finally:
            # In all other cases a step is still running in it, or it cannot be trusted.
            if whole and process.channel.sound:
                self._idle.append(process)
            else:
                self._end(process)

    def _may_repeat(self, batch: Batch[Any]) -> bool:
        """True for a call that another process can make as well, for whoever is not at fault for this one's end."""
        stateful = self._hooks is not None and self._hooks.stateful
        return self._repeats and not stateful and len(batch) == 1 and not isinstance(batch, CloseBatch)

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
        starting = asyncio.ensure_future(asyncio.to_thread(_Process, self._access))
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread starts it nevertheless.
            starting.add_done_callback(
                lambda started: started.cancelled() or started.exception() or self._end(started.result())
            )
            raise
        except OSError as error:
            raise StepRaised(
                f"the environment's process could not be started: {error}",
                cause=Cause("NotStarted", Evidence(error=error_name(error.errno))),
            ) from error
        process.on_fault = lambda: self._discard(process)
        try:
            async with asyncio.timeout(START_SECONDS):
                self._hooks = await process.start(self._spec, self._access)
        except EnvironmentFault as fault:
            self._end(process)
            raise StepRaised(str(fault), fault.traceback, cause=fault.cause) from fault
        except TimeoutError as error:
            self._end(process)
            raise StepTimedOut(
                f"environment {self._spec.name!r}: it was not created within {START_SECONDS:g} s"
            ) from error
        except (EOFError, OSError, messages.InvalidMessage) as error:
            end = await self._end(process, patience=_OWN_END_SECONDS)
            raise StepRaised(
                f"environment {self._spec.name!r}: its process {end.words} while the environment was being created",
                cause=end.cause,
            ) from error
        except BaseException:
            self._end(process)
            raise
        return process

    def _discard(self, process: _Process) -> None:
        """End a process that is gone, or has sent what nobody asked for, while it was idle."""
        if process in self._idle:
            self._idle.remove(process)
            self._end(process)

    def _end(self, process: _Process, *, patience: float = 0.0) -> asyncio.Task[ProcessEnd]:
        """End a process, once; the task's result describes how it ended.

        Args:
            patience: As in `_Process.end`.
        """
        if process.ending is None:
            process.ending = asyncio.create_task(process.end(patience=patience))
            self._ending.add(process.ending)
            process.ending.add_done_callback(self._ending.discard)
        return process.ending


class ProcessEnd(NamedTuple):
    """How a process ended.

    Attributes:
        code: As `subprocess` gives it; None: it lived, and was ended here.
        words: A predicate, for people.
    """

    code: int | None
    words: str

    @property
    def cause(self) -> Cause:
        """Whose doing its end is."""
        return cause_of_exit(self.code)


class _ProcessLost(Exception):
    """A process has ended, does not run, or has sent something else than the answer to its call, by whosever doing.

    Attributes:
        fault: What it is to the call.
    """

    def __init__(self, message: str, fault: EnvironmentFault | None = None) -> None:
        super().__init__(message)
        self.fault = fault or StepRaised(message)


class _Process:
    """One process of an environment, with its keeper.

    Attributes:
        calls: Number of calls that it was asked for.
    """

    def __init__(self, files: ProcessAccess) -> None:
        self.ending: asyncio.Task[ProcessEnd] | None = None
        self.calls = 0
        self.on_fault: Callable[[], None] | None = None
        self._scratch = tempfile.mkdtemp(prefix="kuberoll-environment-")
        # Opened before any of the environment's code can put something else in its place.
        self._stack = os.open(f"{self._scratch}/{STACK_FILE}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        ours, theirs = socket.socketpair()
        self.channel = Caller(ours, on_fault=self._faulted)
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
                env=process_access.variables(os.environ, files, scratch=self._scratch),
                pass_fds=(theirs.fileno(), watched),
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(watched)

    def _faulted(self) -> None:
        if self.on_fault is not None:
            self.on_fault()

    async def start(self, spec: PlainSpec, files: ProcessAccess) -> Hooks:
        """Create the environment in the process; returns its hooks.

        Raises:
            EnvironmentFault: The environment could not be created.
            EOFError, OSError: The process is gone.
            InvalidMessage: The process sent an invalid message.
        """
        return _hooks_in(await self.channel.ask(self.first_message(spec, files)))

    def first_message(self, spec: PlainSpec, files: ProcessAccess) -> bytes:
        """The message that creates the environment."""
        return messages.wrap_call(
            messages.CREATE,
            messages.encode(
                messages.CreateRequest(
                    name=spec.name,
                    type=spec.type,
                    entrypoint=spec.entrypoint,
                    config=messages.raw(orjson.dumps(spec.config)),
                    scratch=self._scratch,
                    protected=files.protected,
                    readable=files.readable,
                    writable=files.writable,
                )
            ),
        )

    async def printed_stack(self) -> str:
        """The calls that the process is in, as `faulthandler` prints them; empty if it does not print them."""
        if not self.channel.signal(STACK_SIGNAL):
            return ""
        printed = b""
        for _ in range(_STACK_LOOKS):
            await asyncio.sleep(_STACK_SECONDS / _STACK_LOOKS)
            before, printed = printed, os.pread(self._stack, _STACK_BYTES, 0)
            if printed and printed == before:
                break
        return printed.decode("utf-8", "replace")

    def ask_now(self, message: bytes) -> bytes:
        """A call without an event loop, for a process that was not started with one."""
        return self.channel.ask_now(message, seconds=START_SECONDS)

    def end_now(self) -> ProcessEnd:
        """`end` without an event loop."""
        os.close(self._control)
        self.channel.close()
        return self._wait()

    async def end(self, *, patience: float = 0.0) -> ProcessEnd:
        """End the process and all that it started; returns how it ended.

        Args:
            patience: Seconds that it is given to end by itself, where its channel is closed: what is killed here must
                not look like what somebody else has killed, and a channel closes a moment before its process is gone.
        """
        alone = patience == 0.0 or await asyncio.to_thread(self._ends_within, patience)
        os.close(self._control)
        self.channel.close()
        end = await asyncio.to_thread(self._wait)
        return end if alone else ProcessEnd(None, "has closed its channel, and lived on")

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._keeper.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _wait(self) -> ProcessEnd:
        try:
            code = self._keeper.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            code = self._keeper.wait()
        os.close(self._stack)
        shutil.rmtree(self._scratch, ignore_errors=True)
        if code >= 0:
            return ProcessEnd(code, f"ended with exit code {code}")
        hint = ": killed from outside, or for memory" if -code == signal.SIGKILL else ""
        return ProcessEnd(code, f"was ended by signal {evidence_of_exit(code).signal}{hint}")


class ProcessEnvironment(EnvironmentInterface):
    """Proxy of an environment in a child process of its own for each call, for checking jobs and generating rows."""

    def __init__(self, spec: PlainSpec, access: ProcessAccess | None = None) -> None:
        self._spec = spec
        self._access = access or ProcessAccess()

    def check(self) -> Hooks:
        """Check that the environment can be created; returns its hooks.

        Raises:
            UnusableEnvironment: It cannot.
        """
        with self._process() as (_, hooks):
            return hooks

    def generate_dataset(self, count: int, seed: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """The environment's rows, as they are generated.

        Raises:
            EnvironmentFault: The environment has no generator, it failed, or the process ended.
            UnusableEnvironment: It cannot be created.
        """
        with self._process() as (process, _):
            try:
                request = messages.encode(messages.RowsRequest(count, seed))
                answer = process.ask_now(messages.wrap_call(messages.GENERATE_DATASET, request))
                while rows := messages.decode_rows(messages.unwrap_answer(answer)):
                    yield from rows
                    answer = process.ask_now(messages.wrap_call(messages.MORE_ROWS))
            except TimeoutError as error:
                raise StepTimedOut(f"generate_dataset made no row for {START_SECONDS:g} s") from error
            except (EOFError, OSError, messages.InvalidMessage) as error:
                raise StepRaised("generate_dataset: the environment's process ended, or did not answer") from error

    def post_process(self, columns: bytes) -> bytes:
        """Metrics of `global_post_process_and_metrics` for these columns, both as JSON texts.

        Raises:
            EnvironmentFault: It failed, or the process ended.
            UnusableEnvironment: It cannot be created.
        """
        method = "global_post_process_and_metrics"
        with self._process() as (process, _):
            try:
                request = messages.encode(messages.PostProcessRequest(messages.raw(columns)))
                answer = process.ask_now(messages.wrap_call(messages.POST_PROCESS, request))
                return messages.decode_metrics(messages.unwrap_answer(answer))
            except TimeoutError as error:
                raise StepTimedOut(f"{method} took longer than {START_SECONDS:g} s") from error
            except (EOFError, OSError, messages.InvalidMessage) as error:
                raise StepRaised(f"{method}: the environment's process ended, or did not answer") from error

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        raise NotImplementedError("steps run in a ProcessExecutor")

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        raise NotImplementedError("aggregates are computed in the process that reads the trajectories")

    @contextlib.contextmanager
    def _process(self) -> Iterator[tuple[_Process, Hooks]]:
        _prepare()
        process = _Process(self._access)
        try:
            try:
                hooks = _hooks_in(process.ask_now(process.first_message(self._spec, self._access)))
            except EnvironmentFault as fault:
                raise UnusableEnvironment(str(fault), fault.traceback) from fault
            except (EOFError, OSError, messages.InvalidMessage) as error:
                raise UnusableEnvironment(
                    f"environment {self._spec.name!r}: its process ended, or took longer than {START_SECONDS:g} s, "
                    "while the environment was being created"
                ) from error
            yield process, hooks
        finally:
            process.end_now()


def _hooks_in(answer: bytes) -> Hooks:
    return messages.decode_answer(messages.unwrap_answer(answer), messages.CreateAnswer).hooks


async def _shut_down(process: _Process) -> None:
    try:
        async with asyncio.timeout(SHUTDOWN_SECONDS):
            messages.unwrap_empty(await process.channel.ask(messages.wrap_call(messages.SHUTDOWN)))
    except (EnvironmentFault, EOFError, OSError, messages.InvalidMessage) as error:
        # Of no consequence for the trajectories; a TimeoutError is an OSError.
        late = isinstance(error, TimeoutError)
        _log.warning("%s", timeout_message(SHUTDOWN_SECONDS, "shutdown") if late else f"shutdown: {error}")


@functools.cache
def _prepare() -> None:
    """Preparations before the first process of an environment is started."""
    process_access.hide_from_others()
    if landlock.abi() == 0:
        _log.warning(
            "this kernel has no Landlock: processes of environments can read and write whatever this user can; "
            "docs/explanation/security-environments.md says what still separates them"
        )
    if not mounts.is_available():
        open_sockets = landlock.abi() < landlock.SOCKETS_SINCE
        _log.warning(
            "this system gives processes of environments no namespaces: %sthey share /dev/shm and System V memory, and "
            "can change modes, owners and times of files of this user (docs/explanation/security-environments.md)",
            "they can connect to every Unix socket that this user can, " if open_sockets else "",
        )
