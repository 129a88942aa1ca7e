"""Server of one environment: answers the HTTP protocol with instances of it in child processes.

The environment's code runs in the child processes only: it reaches neither this process's token nor its connections,
and a call that hangs or crashes costs its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

import orjson
from aiohttp import web

from kuberoll_api import contract
from kuberoll_workers.environments import messages
from kuberoll_workers.environments.batches import AnyBatch, CloseBatch, GroupBatch, ResetBatch, StepBatch, TrialsBatch
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.interface import EpisodeEnd, Metadata
from kuberoll_workers.environments.outcome import (
    EnvironmentFault,
    EpisodeLost,
    Outcomes,
    StepOutcome,
)
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.processes import ProcessEnvironment, ProcessExecutor
from kuberoll_workers.environments.registry import PlainSpec, UnusableEnvironment
from kuberoll_workers.environments.remote import protocol
from kuberoll_workers.environments.source_digest import source_digest

TIMEOUT_SECONDS: Final = 300.0
"""Default limit of the time that a request may ask for."""
IDLE_SECONDS: Final = 3600.0
"""Default time after which an episode that nobody uses is closed."""
KEEP_ALIVE_SECONDS: Final = 3600.0
"""Time that an idle connection stays open: longer than any client keeps one, so that none is closed under a request."""

_METHODS: Final = (StepBatch.method, ResetBatch.method, CloseBatch.method, GroupBatch.method, TrialsBatch.method)
_PLACES_PER_INSTANCE: Final = 2

_log = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.Response]]


class Busy(Exception):
    """A call that was not begun; it may be sent again."""


class _Lane:
    """Instances that any call may use: all of them, or, of a stateful environment, one."""

    def __init__(self, executor: ProcessExecutor) -> None:
        self.executor = executor
        self.places = asyncio.Semaphore(executor.parallel + executor.spare)
        self.episodes = 0

    async def run(self, batch: AnyBatch, *, seconds: float) -> Sequence[Any]:
        """Run a batch.

        Args:
            seconds: Time that it may wait for its turn, and time that it is given then.

        Raises:
            Busy: It has waited for too long.
            EnvironmentFault: See `Executor.run`.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.places.acquire()
        except TimeoutError as error:
            raise Busy(f"no instance of the environment was free for {seconds:g} s") from error
        try:
            arguments: Any = batch
            return await self.executor.run(arguments, limit=seconds)
        finally:
            self.places.release()


class _Episode:
    """An open episode of a stateful environment."""

    __slots__ = ("calls", "lane", "metadata", "used")

    def __init__(self, lane: _Lane, metadata: Metadata) -> None:
        self.lane = lane
        self.metadata = metadata
        self.calls = 0
        self.used = asyncio.get_running_loop().time()


class EnvironmentServer:
    """One environment behind the HTTP protocol."""

    def __init__(
        self,
        spec: PlainSpec,
        *,
        processes: int = 1,
        spare: int = 0,
        access: ProcessAccess | None = None,
        token: str | None = None,
        token_digest: str | None = None,
        timeout: float = TIMEOUT_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """
        Args:
            processes: Maximum number of instances, each in a process of its own.
            spare: Number of further processes, for calls that would wait for one that hangs.
            access: Files and variables of the processes; None for the defaults.
            token: Bearer token that requests need; None: none, unless there is a digest.
            token_digest: Digest of the token (`kuberoll_api.contract.token_digest`), instead of it.
            timeout: Limit of the time that a request may ask for, in seconds.
            idle_seconds: Time after which an episode of a stateful environment that nobody uses is closed.
        """
        self._spec = spec
        self._access = access
        self._executor = ProcessExecutor(spec, processes=processes, spare=spare, timeout=timeout, access=access)
        self._token_digest = token_digest if token is None else contract.token_digest(token)
        self._timeout = timeout
        self._idle_seconds = idle_seconds
        self._hooks: Hooks | None = None
        self._lanes: list[_Lane] = []
        self._episodes: dict[str, _Episode] = {}
        self._creating = asyncio.Lock()
        self._calls = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._sweeper: asyncio.Task[None] | None = None
        self.draining = False
        self.shutdown_requested = asyncio.Event()

    def application(self) -> web.Application:
        """The web application."""
        made = web.Application(client_max_size=messages.MAX_BYTES)
        made.router.add_get(protocol.HEALTH, self._health)
        made.router.add_get(f"{protocol.PREFIX}/info", self._guarded(self._info))
        handlers: dict[str, _Handler] = {name: functools.partial(self._call, name) for name in _METHODS}
        handlers |= {
            messages.POST_PROCESS: self._post_process,
            messages.GENERATE_DATASET: self._generate_dataset,
            messages.SHUTDOWN: self._shutdown,
        }
        for name, handler in handlers.items():
            made.router.add_post(f"{protocol.PREFIX}/{name}", self._guarded(handler))
        return made

    async def start(self) -> Hooks:
        """Create the environment, if it is not there yet.

        Raises:
            EnvironmentFault: It cannot be created.
        """
        async with self._creating:
            if self._hooks is None:
                hooks = await self._executor.hooks()
                executors = self._executor.instances() if hooks.stateful else [self._executor]
                self._lanes = [_Lane(executor) for executor in executors]
                self._hooks = hooks
                if hooks.stateful:
                    self._sweeper = asyncio.create_task(self._sweep())
        return self._hooks

    async def drain(self, seconds: float) -> None:
        """Begin nothing new, and wait until the calls that run and the open episodes have ended, for at most that long.

        Steps of open episodes are answered meanwhile.
        """
        self.draining = True
        self._note()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._quiet.wait()

    async def close(self) -> None:
        """Shut the environment down, and end its processes."""
        self.draining = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for name, episode in list(self._episodes.items()):
            await self._close_episode(name, episode)
        executors = [lane.executor for lane in self._lanes] or [self._executor]
        await asyncio.gather(*(executor.close() for executor in executors))

    def _guarded(self, handler: _Handler) -> _Handler:
        """A handler of authorized requests, whose exceptions are answers."""

        async def answer(request: web.Request) -> web.Response:
            response = await answer_of(request)
            if (call := request.headers.get(protocol.CALL_HEADER)) is not None:
                response.headers[protocol.CALL_HEADER] = call
            return response

        async def answer_of(request: web.Request) -> web.Response:
            scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
            if self._token_digest is not None and not (
                hmac.compare_digest(contract.token_digest(shown.strip()), self._token_digest)
                and scheme.lower() == "bearer"
            ):
                return _text(401, "the Authorization header must be: Bearer and the server's token")
            try:
                return await handler(request)
            except messages.RequestRefused as error:
                return _text(400, str(error))
            except Busy as error:
                return _text(protocol.STATUS_BUSY, str(error))
            except EnvironmentFault as fault:
                return _json(messages.encode(messages.fault_message(fault)), protocol.STATUS_FAULT)

        return answer

    async def _health(self, _: web.Request) -> web.Response:
        return _text(503, "draining") if self.draining else _text(200, "ok")

    async def _info(self, _: web.Request) -> web.Response:
        hooks = await self.start()
        info = protocol.Info(
            protocol=protocol.VERSION,
            name=self._spec.name,
            reset=hooks.reset,
            close=hooks.close,
            shutdown=hooks.shutdown,
            recovery=hooks.recovery,
            score_group=hooks.score_group,
            declares_tools=hooks.declares_tools,
            trials=hooks.trials,
            parallel=(
                len(self._lanes) * _PLACES_PER_INSTANCE
                if hooks.stateful
                else self._executor.parallel + self._executor.spare
            ),
            digest=await asyncio.to_thread(source_digest, self._spec),
        )
        return _json(messages.encode(info))

    async def _call(self, method: str, request: web.Request) -> web.Response:
        seconds = self._seconds(request)
        batch = messages.batch_of(await request.read(), method)
        hooks = await self.start()
        if self.draining and (isinstance(batch, ResetBatch) or (isinstance(batch, StepBatch) and not hooks.stateful)):
            raise Busy("the server is draining")
        self._calls += 1
        self._note()
        try:
            results = await (self._run_stateful(batch, seconds) if hooks.stateful else self._run(batch, seconds))
            return _json(messages.answer_of(batch, results))
        finally:
            self._calls -= 1
            self._note()

    async def _run(self, batch: AnyBatch, seconds: float) -> Sequence[Any]:
        return await self._lanes[0].run(batch, seconds=seconds)

    async def _run_stateful(self, batch: AnyBatch, seconds: float) -> Sequence[Any]:
        if isinstance(batch, ResetBatch):
            return await self._reset(batch, seconds)
        if isinstance(batch, GroupBatch | TrialsBatch):
            return await min(self._lanes, key=lambda lane: lane.episodes).run(batch, seconds=seconds)
        if isinstance(batch, CloseBatch):
            closings = (self._end(end, seconds) for end in batch.ends)
            for failure in await asyncio.gather(*closings, return_exceptions=True):
                if failure is not None:
                    raise failure
            return [None] * len(batch)
        steps = await asyncio.gather(*(self._step(StepBatch([item]), seconds) for item in batch.items))
        return Outcomes([outcome for outcome, _ in steps], answered=any(answered for _, answered in steps))

    async def _step(self, batch: StepBatch, seconds: float) -> tuple[StepOutcome | EnvironmentFault, bool]:
        """One step of a stateful environment: its outcome, and whether the environment returns answers."""
        name = batch.items[0].episode
        episode = None if name is None else self._episodes.get(name)
        if name is not None and episode is None:
            return EpisodeLost(f"this server has not reset the episode {name}, or has closed it"), False
        lane = self._lanes[0] if episode is None else episode.lane
        if episode is not None:
            episode.calls += 1
            episode.metadata = batch.items[0].metadata
        try:
            results: Any = await lane.run(batch, seconds=seconds)
            return results[0], results.answered
        except EnvironmentFault as fault:
            return fault, False
        finally:
            if episode is not None:
                episode.calls -= 1
                episode.used = asyncio.get_running_loop().time()

    async def _reset(self, batch: ResetBatch, seconds: float) -> Sequence[Any]:
        lane = min(self._lanes, key=lambda lane: lane.episodes)
        for episode in batch.episodes:
            # Its worker is gone, or has not received the answer to the reset before this one.
            if (stale := self._episodes.get(episode.id)) is not None:
                await self._close_episode(episode.id, stale)
                if episode.id in self._episodes:
                    raise Busy(f"the episode {episode.id} before this one could not be closed yet")
        for episode in batch.episodes:
            self._episodes[episode.id] = _Episode(lane, episode.metadata)
            lane.episodes += 1
        try:
            return await lane.run(batch, seconds=seconds)
        except Busy:
            for episode in batch.episodes:
                self._forget(episode.id)
            raise

    async def _end(self, end: EpisodeEnd, seconds: float) -> None:
        """Close an episode; one that is not open is closed already.

        Raises:
            Busy: The call was not begun; the episode stays open.
            EnvironmentFault: See `Executor.run`.
        """
        episode = self._forget(end.id)
        if episode is None:
            return
        try:
            await episode.lane.run(CloseBatch([end]), seconds=seconds)
        except Busy:
            if end.id not in self._episodes:
                self._episodes[end.id] = episode
                episode.lane.episodes += 1
            raise

    def _forget(self, name: str) -> _Episode | None:
        episode = self._episodes.pop(name, None)
        if episode is not None:
            episode.lane.episodes -= 1
        return episode

    async def _close_episode(self, name: str, episode: _Episode) -> None:
        """Close an episode whose worker is gone."""
        if self._episodes.get(name) is episode:
            try:
                await self._end(EpisodeEnd(id=name, metadata=episode.metadata, reason="lost"), self._timeout)
            except (EnvironmentFault, Busy) as error:
                _log.warning("episode %s could not be closed: %s", name, error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(60.0, self._idle_seconds / 4))
            oldest = asyncio.get_running_loop().time() - self._idle_seconds
            for name, episode in list(self._episodes.items()):
                if not episode.calls and episode.used < oldest:
                    _log.warning("episode %s: not used for %g s, closed", name, self._idle_seconds)
                    await self._close_episode(name, episode)
            self._note()

    def _note(self) -> None:
        if self._calls or (self.draining and self._episodes):
            self._quiet.clear()
        else:
            self._quiet.set()

    async def _post_process(self, request: web.Request) -> web.Response:
        columns = messages.decode_request(await request.read(), messages.PostProcessRequest).columns

        def metrics() -> bytes:
            with self._alone() as environment:
                return environment.post_process(bytes(columns))

        found = await asyncio.to_thread(metrics)
        return _json(messages.encode(messages.PostProcessAnswer(messages.raw(found))))

    async def _generate_dataset(self, request: web.Request) -> web.Response:
        wanted = messages.decode_request(await request.read(), messages.RowsRequest)

        def rows() -> list[bytes]:
            with self._alone() as environment:
                return [orjson.dumps(row) for row in environment.generate_dataset(wanted.count, wanted.seed)]

        made = await asyncio.to_thread(rows)
        return _json(messages.encode(messages.RowsAnswer([messages.raw(row) for row in made])))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[ProcessEnvironment]:
        try:
            yield ProcessEnvironment(self._spec, self._access)
        except UnusableEnvironment as error:
            raise EnvironmentFault(str(error), error.traceback) from error

    async def _shutdown(self, _: web.Request) -> web.Response:
        await self.close()
        self.shutdown_requested.set()
        return _json(messages.EMPTY)

    def _seconds(self, request: web.Request) -> float:
        text = request.headers.get(protocol.TIMEOUT_HEADER)
        if text is None:
            return self._timeout
        try:
            seconds = float(text)
        except ValueError as error:
            raise messages.RequestRefused(f"{protocol.TIMEOUT_HEADER}: {text!r} is not a number of seconds") from error
        if not 0 < seconds < math.inf:
            raise messages.RequestRefused(f"{protocol.TIMEOUT_HEADER}: {text!r} is not a positive number of seconds")
        return min(seconds, self._timeout)


def _text(status: int, text: str) -> web.Response:
    return web.Response(text=f"{text}\n", status=status)


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
