"""Modelled replicas behind the interfaces that the real router uses: discovery, clients, health."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NoReturn, Protocol, Self

from kuberoll_workers.data.messages import LOGPROB_TYPE, TOKEN_TYPE
from kuberoll_workers.policy.agent_sessions import AgentSession, SessionSettings
from kuberoll_workers.policy.client import Overloaded, Unreachable
from kuberoll_workers.policy.interface import (
    EngineInfo,
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
)
from kuberoll_workers.policy.routing.replica import Address
from kuberoll_workers.simulation import engine_model
from kuberoll_workers.simulation.engine_model import NANOSECONDS, EngineLimits, EngineModel
from kuberoll_workers.simulation.idle import EngineState, IdleLedger

_KEPT_LENGTHS: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an engine has to know of a request.

    Attributes:
        trajectory: Number of the trajectory within the replay.
        group: Its prompt group.
        common: Tokens of the group's common prompt.
        generated: Tokens that it generates.
        first: It is the trajectory's first turn.
        possible: Prompt tokens that a cache without bounds would have, if the group stays on one replica.
    """

    trajectory: int
    group: int
    common: int
    generated: int
    first: bool
    possible: int


Lookup = Callable[[GenerationRequest], Task]


class RequestWatcher(Protocol):
    """Hears which requests wait in workers."""

    def sent(self, request: GenerationRequest) -> None:
        """A worker sends a request to a replica."""

    def returned(self, request: GenerationRequest) -> None:
        """A request is back in its worker without an answer."""


@lru_cache(_KEPT_LENGTHS)
def tokens_of_length(length: int) -> array[int]:
    """So many token ids, all 0; one array for all who ask, never to be changed."""
    return array(TOKEN_TYPE, bytes(4 * length))


@lru_cache(_KEPT_LENGTHS)
def _logprobs_of_length(length: int) -> array[float]:
    return array(LOGPROB_TYPE, bytes(4 * length))


class Waits:
    """Seconds that requests waited, each once.

    Attributes:
        router: In a worker, before they were sent.
        engine: In an engine, before they were scheduled first.
    """

    def __init__(self) -> None:
        self.router = array("f")
        self.engine = array("f")


class ModelledReplica:
    """A replica: an engine model whose steps are timers of the event loop.

    Attributes:
        id: Never used again after its end.
        alive: False before it is ready, and after it has died.
    """

    def __init__(
        self,
        name: str,
        limits: EngineLimits,
        *,
        window: int,
        request_seconds: float,
        lookup: Lookup,
        ledger: IdleLedger,
        waits: Waits,
    ) -> None:
        """
        Args:
            window: Number of requests that it takes at once.
            request_seconds: Time of each outside of the engine.
        """
        self.id = name
        self.engine = EngineModel(limits)
        self.alive = False
        self._limits = limits
        self._window = window
        self._request_seconds = request_seconds
        self._lookup = lookup
        self._ledger = ledger
        self._waits = waits
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns: int | None = None
        self._updating = False
        self._paused_until = 0
        self._state: EngineState = "starting"
        ledger.add("starting", self._loop.time())

    @property
    def ongoing(self) -> int:
        return len(self._answers)

    def start(self) -> None:
        """Begin to answer."""
        self.alive = True
        self._set_state("idle")

    def die(self) -> None:
        """Stop at once; requests in flight get no answer."""
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()
        self._set_state("gone")
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(PolicyUnavailable(f"{self.id}: connection reset by peer"))

    def leave(self) -> None:
        """End for good after its death, when another one has replaced it."""
        self._ledger.remove(self._state, self._loop.time())

    def pause(self, seconds: float, *, clear: bool) -> None:
        """Load weights: take no steps for so long, from the end of the present one on."""
        if self.alive:
            now = self._now()
            self._paused_until = now + round(seconds * NANOSECONDS)
            self.engine.pause(now, self._paused_until, clear=clear)
            self._loop.call_at(self._paused_until / NANOSECONDS, self._update)
            self._update()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `ReplicaClient`."""
        if not self.alive:
            raise Unreachable(f"{self.id}: connection refused")
        task = self._lookup(request)
        sequence = engine_model.Sequence(
            trajectory=task.trajectory,
            group=task.group,
            common=task.common,
            prompt=len(request.token_ids),
            wanted=max(1, task.generated),
        )
        if self._request_seconds:
            # On its way to the replica. What it takes on its way back could as well be part of this.
            await asyncio.sleep(self._request_seconds)
            if not self.alive:
                raise PolicyUnavailable(f"{self.id}: connection reset by peer")
        if self.ongoing >= self._window:
            raise Overloaded(f"{self.id}: {self._window} requests are in flight")
        try:
            self.engine.submit(sequence, self._now())
        except engine_model.RequestTooLong as error:
            raise PolicyRefused(str(error)) from error
        answer: asyncio.Future[None] = self._loop.create_future()
        self._answers[sequence.number] = answer
        # At the end of this turn of the loop: what comes at one time is scheduled together.
        if not self._updating:
            self._updating = True
            self._loop.call_soon(self._update)
        try:
            await answer
        except asyncio.CancelledError:
            if self.alive:
                self.engine.abort(sequence, self._now())
                self._update()
            raise
        finally:
            del self._answers[sequence.number]
        self._waits.engine.append((sequence.started_ns - sequence.submitted_ns) / NANOSECONDS)
        return GenerationResult(
            token_ids=tokens_of_length(task.generated),
            logprobs=_logprobs_of_length(task.generated),
            finish_reason="stop",
            cached_tokens=sequence.cached,
        )

    def _update(self) -> None:
        self._updating = False
        if not self.alive:
            return
        now = self._now()
        for sequence in self.engine.advance(now):
            answer = self._answers.get(sequence.number)
            if answer is not None and not answer.done():
                answer.set_result(None)
        paused = now < self._paused_until
        self._set_state("busy" if self.engine.busy else "weights" if paused else "idle")
        due = self.engine.next_ns
        if due != self._armed_ns or due is None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None if due is None else self._loop.call_at(due / NANOSECONDS, self._fire)
            self._armed_ns = due

    def _fire(self) -> None:
        self._armed_ns = None
        self._update()

    def _now(self) -> int:
        return round(self._loop.time() * NANOSECONDS)

    def _set_state(self, state: EngineState) -> None:
        self._ledger.change(self._state, state, self._loop.time())
        self._state = state

    def check_health(self) -> None:
        """See `ReplicaClient`."""
        if not self.alive:
            raise Unreachable(f"{self.id}: connection refused")

    def info(self) -> EngineInfo:
        """See `ReplicaClient`."""
        self.check_health()
        return EngineInfo(
            model="modelled",
            engine="modelled",
            max_model_len=self._limits.kv_cache_tokens,
            vocab_size=1,
            policy_version="0",
            ongoing_requests=self.ongoing,
            max_ongoing_requests=self._window,
            kv_cache_tokens=self._limits.kv_cache_tokens,
        )


class ModelledClient:
    """One worker's client of a replica; an async context manager, as the real one."""

    def __init__(self, replica: ModelledReplica, watcher: RequestWatcher) -> None:
        self._replica = replica
        self._watcher = watcher
        self.load: int | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *ended: object) -> None:
        """Do nothing: there is no connection."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self._watcher.sent(request)
        try:
            result = await self._replica.generate(request)
        except (Overloaded, PolicyUnavailable):
            self._watcher.returned(request)
            raise
        self.load = self._replica.ongoing
        return result

    async def open_session(self, settings: SessionSettings) -> AgentSession:
        del settings
        self._refuse()

    async def check_health(self) -> None:
        self._replica.check_health()

    async def info(self) -> EngineInfo:
        return self._replica.info()

    def _refuse(self) -> NoReturn:
        raise PolicyRefused("modelled replicas have no sessions")


class Fleet:
    """All replicas: those that are up, those to come, and those that died.

    Attributes:
        replicas: In the order in which they were created.
    """

    def __init__(self) -> None:
        self.replicas: list[ModelledReplica] = []
        self._by_id: dict[str, ModelledReplica] = {}
        self._addresses: Sequence[Address] = ()

    def add(self, replica: ModelledReplica) -> None:
        """Add a replica, which is not listed before `list_alive`."""
        self.replicas.append(replica)
        self._by_id[replica.id] = replica

    def list_alive(self) -> None:
        """List the replicas that are up now."""
        self._addresses = [Address(replica.id, replica.id) for replica in self.replicas if replica.alive]

    async def addresses(self) -> Sequence[Address]:
        """See `Discovery`."""
        return self._addresses

    def connector(self, watcher: RequestWatcher) -> Callable[[str], ModelledClient]:
        """A function that creates the client of a replica, for one worker."""

        def connect(url: str) -> ModelledClient:
            return ModelledClient(self._by_id[url], watcher)

        return connect
