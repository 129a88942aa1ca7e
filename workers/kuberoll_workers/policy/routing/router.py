"""A policy over several replicas, which may come, go, fail and be overloaded."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from kuberoll_workers.data.incidents import note_resent
from kuberoll_workers.policy.agent_sessions import AgentSession, ClosedSession, SessionSettings
from kuberoll_workers.policy.client import Overloaded, ServeClient, SessionsFull, Unreachable, answering_within
from kuberoll_workers.policy.interface import (
    FatalRequest,
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
    Silent,
)
from kuberoll_workers.policy.outage import Outage, OutageWatch
from kuberoll_workers.policy.routing.deaths import SUSPICIOUS_DEATHS, DeathLog
from kuberoll_workers.policy.routing.discovery import Discovery
from kuberoll_workers.policy.routing.open_sessions import OpenSessions
from kuberoll_workers.policy.routing.replica import Address, ReplicaClient
from kuberoll_workers.policy.routing.scheduler import WINDOW, Replica, RequestScheduler, Ticket
from kuberoll_workers.policy.routing.session_places import SessionPlaces
from kuberoll_workers.policy.routing.sessions import Session
from kuberoll_workers.policy.routing.silence import Loss, SilenceWatch
from kuberoll_workers.telemetry import RoutingMetrics, RoutingState, Unanswering

Connect = Callable[[str], AbstractAsyncContextManager[ReplicaClient]]
"""Creates the client of a replica from its base URL."""

_Answer = TypeVar("_Answer")

REFRESH_SECONDS: Final = 2.0
TRIES: Final = 3

_SEARCH_SECONDS = 0.25
_LOOK_SECONDS = 1.0
# With the silence before it, and the time between two looks, less than the 15 s that a lost replica may cost.
_CHECK_SECONDS = 6.0
# Time for which a replica that has an agent's session may be lost: what the agent has done so far is lost with it.
_SESSION_PATIENCE_SECONDS = 10.0
_CALM_SECONDS = 0.1
_OPENING_SECONDS = 0.5
_TIMER_SLACK_SECONDS = 0.001
_CLOSING_SECONDS = 60.0
_CLOSING_PAUSES = (0.2, 1.0)

_log = logging.getLogger(__name__)


class ReplicaLost(PolicyUnavailable):
    """The replica gives no sign of life, and another one is there.

    Attributes:
        stalled: As in `Loss`.
    """

    reason = "PolicyLost"

    def __init__(self, message: str, *, stalled: bool) -> None:
        super().__init__(message)
        self.stalled = stalled


class RoutedPolicy:
    """Sends each request to the best replica; an async context manager.

    A call waits while there is no replica, or none takes more requests; the caller sets the time limit. Requests that
    can be retried on another replica are, without using up the caller's attempts.
    """

    def __init__(
        self,
        discovery: Discovery,
        connect: Connect,
        *,
        sticky: bool = True,
        share: float = 1.0,
        metrics: RoutingMetrics | None = None,
        jitter_seed: int | None = None,
        scheduler: RequestScheduler | None = None,
    ) -> None:
        """Store the parts; nothing is sent before the context is entered.

        Args:
            sticky: Keep the turns of a trajectory on one replica, and a prompt group too, as far as load allows.
            share: Fraction of each replica's key-value cache for the trajectories of this process; 0: no limit.
            jitter_seed: Seed of the jitter of pauses; None: random.
            scheduler: Decides where and when requests are sent, instead of `sticky` and `jitter_seed`; None: one that
                does as these say.
        """
        self._discovery = discovery
        self._connect = connect
        self._share = share
        self._metrics = metrics if metrics is not None else RoutingMetrics("")
        self._admission = scheduler or RequestScheduler(
            sticky=sticky, moved=self._metrics.record_move, seed=jitter_seed
        )
        self._clients: dict[str, ReplicaClient] = {}
        self._urls: dict[str, str] = {}
        # The last list, if all of its replicas and no others are here: the same one needs no further look.
        self._joined: Sequence[Address] | None = None
        self._connections: dict[str, AsyncExitStack] = {}
        self._joining: set[str] = set()
        self._checks: dict[str, asyncio.Task[str | None]] = {}
        # By replica: the requests in flight, each with the scope that ends when the replica is lost.
        self._in_flight: defaultdict[str, dict[Ticket, asyncio.Timeout]] = defaultdict(dict)
        # By replica: trajectories in flight at its death that had been in flight at another one's death, too.
        self._repeated: defaultdict[str, set[Session]] = defaultdict(set)
        self._deaths = DeathLog()
        # Suspects are sent one at a time, so that an engine's death has one cause.
        self._quarantine = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wake = asyncio.Event()
        # The last trouble by replica; that of discovery under "".
        self._troubles: dict[str, str] = {}
        self._outages = OutageWatch()
        self._session_places = SessionPlaces()
        self._silence = SilenceWatch()
        self._open_sessions = OpenSessions()
        # By replica that has not joined yet: its base URL.
        self._tried: dict[str, str] = {}
        self._loop: asyncio.AbstractEventLoop
        # What the clock on the wall is ahead of the loop's, at the start: a time is then told the same way each time.
        self._ahead = 0.0

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._ahead = time.time() - self._loop.time()
        self._metrics.read_state = self.state
        self._start(self._refresh_replicas())
        self._start(self._watch_silence())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stack in self._connections.values():
            await stack.aclose()

    def state(self) -> RoutingState:
        """The state for the metrics."""
        replicas = self._admission.replicas.values()
        states = Counter(replica.breaker.state if replica.listed else "leaving" for replica in replicas)
        return RoutingState(
            waiting=self._admission.waiting + self._session_places.waiting,
            window=sum(replica.window.limit for replica in replicas if replica.usable),
            replicas=dict(states),
            idle=sum(replica.usable and not (replica.window.in_flight or replica.outside) for replica in replicas),
            usable=sum(replica.usable for replica in replicas),
            unanswering=list(self._unanswering()),
        )

    def _unanswering(self) -> Iterator[Unanswering]:
        for name, silence in self._outages.silent(self._loop.time()).items():
            url = self._urls.get(name) or self._tried.get(name) or self._open_sessions.url(name) or name
            yield Unanswering(url, silence.since + self._ahead, silence.reason, silence.requests)

    def outage(self) -> Outage | None:
        """The outage that requests wait for now; None: there is none."""
        admission = self._admission
        now = self._loop.time()
        if not (admission.waiting or admission.in_flight):
            # Requests that failed may be sent again later.
            return self._outages.last(now) or self._session_places.outage(now)
        usable = [replica.id for replica in admission.replicas.values() if replica.usable]
        return self._outages.update(now, usable=usable) or self._session_places.outage(now)

    def end_session(self, session_id: str) -> None:
        """Release a trajectory that has ended."""
        self._admission.end_session(session_id, self._loop.time())

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one sequence.

        Raises:
            PolicyUnavailable: It failed several times although the replicas are healthy.
            PolicyRefused: The request is invalid.
            FatalRequest: It killed engines.
        """
        prompt = len(request.token_ids)

        async def send(client: ReplicaClient, tries: int) -> tuple[GenerationResult, int]:
            # The engine may still work on the old request, so a retry needs another id.
            name = f"{request.request_id}.{tries}" if tries else request.request_id
            result = await client.generate(dataclasses.replace(request, request_id=name) if tries else request)
            return result, prompt + len(result.token_ids)

        result = await self._routed(Ticket(request.session_id, prompt), send)
        self._metrics.record_answer(result.policy_versions)
        return result

    async def open_session(self, session_id: str, settings: SessionSettings) -> AgentSession:
        """See `AgentPolicy`."""

        async def send(client: ReplicaClient, _: int) -> tuple[AgentSession, int]:
            return await client.open_session(settings), 0

        places, tries = self._session_places, 0
        ticket = Ticket(session_id, 0)
        opened = False
        try:
            while not opened:
                try:
                    session = await self._routed(ticket, send)
                    opened = True
                except SessionsFull as error:
                    pause = places.record_refusal(error, self._loop.time(), tries=tries)
                    tries += 1
                    await asyncio.sleep(pause)
        finally:
            if tries:
                places.record_end(opened=opened)
        places.record_opening()
        if ticket.replica is not None and (url := self._urls.get(ticket.replica.id)) is not None:
            self._open_sessions.add(session.id, ticket.replica.id, url)
            self._silence.begin(ticket.replica.id, self._loop.time())
        return session

    @asynccontextmanager
    async def attend_session(self, session: AgentSession) -> AsyncIterator[None]:
        """See `AgentPolicy`."""
        scope = asyncio.timeout(None)
        replica = self._open_sessions.attend(session.id, scope)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            lost = self._lost(replica)
            self._forget_session(session)
            raise lost from error

    async def close_session(self, session: AgentSession) -> ClosedSession:
        """See `AgentPolicy`."""
        self._forget_session(session)
        # Another connection than the replica's: it may have left the list meanwhile.
        async with ServeClient(session.url, limit=1, token=session.token) as client:
            for seconds in _CLOSING_PAUSES:
                try:
                    return await self._close_once(client, session)
                except PolicyUnavailable as error:
                    # Closing can be repeated, and a whole episode depends on it.
                    _log.debug("session %s could not be closed: %s", session.id, error)
                    await asyncio.sleep(seconds)
            return await self._close_once(client, session)

    def _forget_session(self, session: AgentSession) -> None:
        self._session_places.record_closing()
        if (replica := self._open_sessions.remove(session.id)) is not None and not self._in_flight.get(replica):
            self._silence.end(replica)

    async def _close_once(self, client: ServeClient, session: AgentSession) -> ClosedSession:
        async with answering_within(session.url, _CLOSING_SECONDS):
            return await client.close_session()

    async def _routed(
        self, ticket: Ticket, send: Callable[[ReplicaClient, int], Awaitable[tuple[_Answer, int]]]
    ) -> _Answer:
        """Send a request to the best replica, and to others while it fails there.

        Args:
            send: Called with the replica's client, and with the number of times that the request was sent and broke;
                returns the answer, and the length of the trajectory's context with it, tokens.
        """
        admission, metrics, time = self._admission, self._metrics, self._loop.time
        failures, broken = 0, 0
        quarantined = False
        try:
            while True:
                if not admission.submit(ticket, time()):
                    await self._wait_for_grant(ticket)
                replica = ticket.replica
                assert replica is not None
                client = self._clients[replica.id]
                flights = self._in_flight[replica.id]
                sent = time()
                try:
                    result, tokens = await self._sent(ticket, replica, send(client, broken))
                except Overloaded as error:
                    metrics.record_request("overloaded")
                    self._silence.hear(replica.id, time())
                    if len(flights) == 1:
                        # Else it is busy with the others.
                        self._outages.record_trouble(replica.id, str(error), time(), busy=True)
                    pause = admission.record_overload(ticket, time(), retry_after=error.retry_after)
                    self._loop.call_later(pause + _TIMER_SLACK_SECONDS, self._dispatch, replica)
                    self._watch(replica)
                    continue
                except Unreachable as error:
                    metrics.record_request("unreachable")
                    admission.record_failure(ticket, time())
                    self._watch(replica, error)
                    note_resent(error.cause, str(error), time() - sent)
                    continue
                except (PolicyRefused, SessionsFull):
                    metrics.record_request("refused")
                    self._silence.hear(replica.id, time())
                    admission.record_failure(ticket, time(), blame=False)
                    raise
                except PolicyUnavailable as error:
                    lost = isinstance(error, ReplicaLost)
                    metrics.record_request("lost" if lost else "failed", time() - sent)
                    admission.record_failure(ticket, time())
                    self._watch(replica, error)
                    if isinstance(error, ReplicaLost) and not error.stalled:
                        # A node or a network is lost through no fault of a request.
                        broken += 1
                        note_resent(error.cause, str(error), time() - sent)
                        continue
                    problem = str(error) if lost else await self._health_problem(replica)
                    if problem is None:
                        failures += 1
                        if failures >= TRIES:
                            raise
                    else:
                        self._record_death(ticket, replica, error, problem, quarantined=quarantined)
                        if not quarantined and _is_suspect(ticket):
                            flights.pop(ticket, None)
                            await self._quarantine.acquire()
                            quarantined = True
                    broken += 1
                    note_resent(error.cause, str(error), time() - sent)
                    continue
                except BaseException:
                    metrics.record_request("aborted", time() - sent)
                    admission.record_failure(ticket, time(), blame=False)
                    raise
                finally:
                    flights.pop(ticket, None)
                    if not flights and replica.id not in self._open_sessions:
                        self._silence.end(replica.id)
                self._outages.record_answer(replica.id)
                self._silence.hear(replica.id, time())
                self._repeated.pop(replica.id, None)
                admission.record_answer(ticket, tokens, time(), load=client.load)
                return result
        except BaseException:
            admission.abandon(ticket, time())
            raise
        finally:
            if quarantined:
                self._quarantine.release()

    async def _sent(
        self, ticket: Ticket, replica: Replica, answer: Awaitable[tuple[_Answer, int]]
    ) -> tuple[_Answer, int]:
        """Await an answer of a replica for as long as the replica is not lost.

        Raises:
            ReplicaLost: It is.
        """
        self._silence.begin(replica.id, self._loop.time())
        scope = self._in_flight[replica.id][ticket] = asyncio.timeout(None)
        try:
            async with scope:
                return await answer
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise self._lost(replica.id) from error

    def _lost(self, replica: str | None) -> ReplicaLost:
        loss = None if replica is None else self._silence.lost.get(replica)
        if loss is None:
            return ReplicaLost("it gives no sign of life", stalled=False)
        return ReplicaLost(loss.problem, stalled=loss.stalled)

    async def _wait_for_grant(self, ticket: Ticket) -> None:
        granted: asyncio.Future[None] = self._loop.create_future()
        ticket.wake = lambda: None if granted.done() else granted.set_result(None)
        if not self._admission.replicas:
            self._wake.set()
        try:
            await granted
        except asyncio.CancelledError:
            if ticket.waiting:
                self._admission.withdraw(ticket)
            else:
                self._admission.record_failure(ticket, self._loop.time(), blame=False)
            raise

    def _record_death(
        self, ticket: Ticket, replica: Replica, error: PolicyUnavailable, problem: str, *, quarantined: bool
    ) -> None:
        self._admission.mark_down(replica, self._loop.time())
        self._watch(replica, error, problem)
        session = ticket.session
        assert session is not None
        session.deaths += 1
        # It is the only one in flight that was in flight at an earlier death, too.
        common = self._repeated[replica.id] == {session}
        if (common or quarantined) and session.deaths >= self._deaths.needed(session, self._loop.time()):
            self._deaths.explain(session)
            raise FatalRequest(
                f"this request was in flight when the engine died {session.deaths} times in a row, the last time as "
                f"the only such request, and is not sent again: {error}"
            ) from error

    async def _health_problem(self, replica: Replica) -> str | None:
        """Why a replica that failed a request is not healthy; checked once for all requests that failed together."""
        check = self._checks.get(replica.id)
        if check is None:
            check = self._checks[replica.id] = self._start(self._checked(replica.id, self._flying(replica.id)))
            check.add_done_callback(lambda _: self._checks.pop(replica.id, None))
        # The first caller may be cancelled while others still wait for the result.
        return await asyncio.shield(check)

    def _flying(self, name: str) -> set[Session]:
        return {ticket.session for ticket in self._in_flight.get(name, ()) if ticket.session is not None}

    async def _checked(self, name: str, flying: set[Session]) -> str | None:
        problem = await self._problem_at(self._urls.get(name))
        if problem is None:
            return None
        self._note_death(name, flying)
        return str(problem)

    def _note_death(self, name: str, flying: set[Session]) -> None:
        self._repeated[name] |= {session for session in flying if session.deaths}
        self._deaths.record(name, flying, self._loop.time())

    async def _problem_at(self, url: str | None) -> PolicyUnavailable | PolicyRefused | None:
        """Why the replica at a URL is not healthy; None: it is."""
        if url is None:
            return PolicyUnavailable("it has left")
        try:
            # Over another connection: requests in flight may use all that the client may have, and theirs may be dead.
            async with answering_within(url, _CHECK_SECONDS), self._connect(url) as client:
                await client.check_health()
        except (PolicyUnavailable, PolicyRefused) as error:
            return error
        return None

    def _watch(self, replica: Replica, error: PolicyUnavailable | None = None, problem: str | None = None) -> None:
        """Start to probe a replica whose breaker is open.

        Args:
            error: The error of a request; None: the replica is overloaded.
            problem: Why the replica is not healthy; None: unknown.
        """
        if error is not None:
            self._wake.set()
            if not replica.breaker.closed:
                self._record_trouble(replica.id, problem or str(error), self._loop.time())
        if replica.breaker.state == "open" and (name := f"revive {replica.id}") not in self._joining:
            _log.warning("replica %s gets no requests for now: %s", replica.id, error or "it is overloaded")
            self._joining.add(name)
            self._start(self._revive(replica, name))

    async def _revive(self, replica: Replica, name: str) -> None:
        breaker, time = replica.breaker, self._loop.time
        try:
            while self._admission.replicas.get(replica.id) is replica and not breaker.closed:
                await asyncio.sleep(max(0.0, breaker.retry_at - time()) + _TIMER_SLACK_SECONDS)
                if (url := self._urls.get(replica.id)) is None:
                    # It has left the list meanwhile, and nothing of ours was there.
                    return
                if breaker.begin_probe(time()):
                    if (problem := await self._problem_at(url)) is None:
                        self._outages.record_recovery(replica.id)
                        self._silence.hear(replica.id, time())
                    else:
                        self._outages.record_trouble(replica.id, str(problem), time())
                    breaker.record_probe(problem is None, time())
        finally:
            self._joining.discard(name)
        if breaker.closed:
            self._admission.mark_recovered(replica, time())

    def _dispatch(self, replica: Replica) -> None:
        self._admission.dispatch(replica, self._loop.time())

    async def _refresh_replicas(self) -> None:
        """Refresh the list of replicas for as long as there are requests, or agents that make them by themselves."""
        admission = self._admission
        while True:
            if admission.waiting or admission.in_flight or self._open_sessions or not admission.replicas:
                await self._discover()
                await self._close_unused()
                await asyncio.sleep(_CALM_SECONDS)
            searching = admission.waiting and not any(replica.usable for replica in admission.replicas.values())
            try:
                async with asyncio.timeout(_SEARCH_SECONDS if searching else REFRESH_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _watch_silence(self) -> None:
        """Check replicas that have requests in flight and give no sign of life, and leave those that are lost."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            # Nobody else asks those that have left the list, and have agents' sessions still.
            left = [name for name in self._silence.lost if name not in self._admission.replicas]
            for name in (*self._silence.due(self._loop.time()), *left):
                if (work := f"silence {name}") not in self._joining:
                    self._joining.add(work)
                    self._start(self._look_into(name, work))
            self._leave_lost()

    async def _look_into(self, name: str, work: str) -> None:
        since = self._silence.silent_since(name)
        try:
            flying = self._flying(name)
            found = await self._problem_at(self._urls.get(name) or self._open_sessions.url(name))
            now = self._loop.time()
            if found is None:
                self._silence.hear(name, now)
                self._outages.record_recovery(name)
                return
            problem, stalled = str(found), not isinstance(found, Silent | Unreachable)
            if since is None or not self._silence.lose(name, since, Loss(problem, now, stalled)):
                return
            if stalled:
                self._note_death(name, flying)
            if (replica := self._admission.replicas.get(name)) is not None:
                self._record_trouble(name, problem, since)
                self._admission.mark_down(replica, now)
                self._watch(replica, PolicyUnavailable(problem), problem)
            self._leave_lost()
        finally:
            self._joining.discard(work)

    def _record_trouble(self, name: str, problem: str, since: float) -> None:
        requests = len(self._in_flight.get(name, ())) + self._open_sessions.count(name)
        self._outages.record_trouble(name, problem, since, requests=requests)

    def _leave_lost(self) -> None:
        """End what waits for lost replicas, if there is another to send it to: else one of them may yet answer."""
        if not (lost := self._silence.lost) or not any(one.usable for one in self._admission.replicas.values()):
            return
        now = self._loop.time()
        for name, loss in lost.items():
            scopes = list(self._in_flight.get(name, {}).values())
            if now - loss.at >= _SESSION_PATIENCE_SECONDS:
                scopes += self._open_sessions.scopes(name)
            for scope in scopes:
                if scope.when() is None:
                    scope.reschedule(now)

    async def _discover(self) -> None:
        try:
            addresses = await self._discovery.addresses()
        except PolicyUnavailable as error:
            self._log_trouble("", str(error))
            return
        self._log_trouble("", "" if addresses else "there is no replica; waiting for one")
        if addresses == self._joined:
            return
        listed = {address.id for address in addresses}
        for replica in self._admission.replicas.values():
            if replica.listed and replica.id not in listed:
                self._deaths.record_departure(replica.id, self._flying(replica.id), self._loop.time())
        self._admission.set_listed(listed, self._loop.time())
        self._troubles = {name: text for name, text in self._troubles.items() if not name or name in listed}
        self._outages.keep({*listed, *self._admission.replicas})
        self._tried = {address.id: address.url for address in addresses}
        new = [
            address
            for address in addresses
            if address.id not in self._admission.replicas and address.id not in self._joining
        ]
        opening = None if self._admission.replicas else _Opening(len(new))
        for address in new:
            self._joining.add(address.id)
            self._start(self._join(address, opening))
        self._joined = addresses if listed == set(self._admission.replicas) else None

    async def _join(self, address: Address, opening: _Opening | None) -> None:
        """Add a replica if it responds; else the next refresh tries again.

        Args:
            opening: The first replicas, with which it is added; None: there are others.
        """
        ready = False
        stack = AsyncExitStack()
        try:
            client = await stack.enter_async_context(self._connect(address.url))
            try:
                info = await client.info()
                budget, window = int(info.kv_cache_tokens * self._share), info.max_ongoing_requests or WINDOW
            except PolicyRefused as error:
                # Its operator has to change something, and may do so at any time.
                self._log_trouble(address.id, str(error), answers=True)
                return
            except PolicyUnavailable as error:
                self._log_trouble(address.id, str(error))
                if await self._problem_at(address.url) is not None:
                    return
                budget, window = 0, WINDOW
            # A replica that left and came back may still have old connections.
            await self._disconnect(address.id)
            if opening is not None:
                ready = True
                await opening.arrive()
            self._clients[address.id] = client
            self._urls[address.id] = address.url
            self._connections[address.id] = stack.pop_all()
            last = opening is None or opening.pass_one()
            self._admission.add_replica(Replica(address.id, budget=budget, window=window), self._loop.time(), last=last)
            self._troubles.pop(address.id, None)
            _log.info("replica %s at %s", address.id, address.url)
        finally:
            self._joining.discard(address.id)
            if opening is not None and not ready:
                opening.leave()
            await stack.aclose()

    async def _close_unused(self) -> None:
        if self._connections.keys() != self._admission.replicas.keys():
            for name in [name for name in self._connections if name not in self._admission.replicas]:
                await self._disconnect(name)

    async def _disconnect(self, name: str) -> None:
        self._clients.pop(name, None)
        self._urls.pop(name, None)
        self._outages.record_recovery(name)
        self._in_flight.pop(name, None)
        self._repeated.pop(name, None)
        stack = self._connections.pop(name, None)
        if stack is not None:
            await stack.aclose()

    def _log_trouble(self, name: str, trouble: str, *, answers: bool = False) -> None:
        """Log a trouble of a replica or of discovery, unless it was the last one logged.

        Args:
            answers: True if the replica has answered that it cannot be used.
        """
        if trouble and trouble != self._troubles.get(name):
            _log.warning("replicas: %s", trouble)
        if trouble:
            self._outages.record_trouble(name, trouble, self._loop.time(), busy=answers)
        else:
            self._outages.record_recovery(name)
        self._troubles[name] = trouble

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Opening:
    """The first replicas, which are added together: else all that waits would go to the one that answers first."""

    def __init__(self, coming: int) -> None:
        """`coming` is the number of replicas that are asked."""
        self._coming = coming
        self._ready = 0
        self._open = asyncio.Event()

    async def arrive(self) -> None:
        """Wait for the others, but not long for those that do not answer."""
        self._ready += 1
        self._open_if_all()
        try:
            async with asyncio.timeout(_OPENING_SECONDS):
                await self._open.wait()
        except TimeoutError:
            self._open.set()

    def leave(self) -> None:
        """Count a replica that is not added now."""
        self._coming -= 1
        self._open_if_all()

    def pass_one(self) -> bool:
        """Count a replica that is added; True if no other one waits to be."""
        self._ready -= 1
        self._coming -= 1
        return not self._ready

    def _open_if_all(self) -> None:
        if self._ready >= self._coming:
            self._open.set()


def _is_suspect(ticket: Ticket) -> bool:
    return ticket.session is not None and ticket.session.deaths >= SUSPICIOUS_DEATHS
