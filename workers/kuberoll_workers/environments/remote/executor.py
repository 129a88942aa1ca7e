"""Executor of an environment on servers: spreads calls over them, keeps episodes with theirs, takes out dead ones."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from kuberoll_workers.data.causes import Cause, Evidence
from kuberoll_workers.environments import messages
from kuberoll_workers.environments.batches import (
    AnyBatch,
    Batch,
    CloseBatch,
    GroupBatch,
    ResetBatch,
    StepBatch,
    TrialsBatch,
)
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.interface import EpisodeEnd
from kuberoll_workers.environments.outcome import (
    SHUTDOWN_SECONDS,
    EnvironmentFault,
    EpisodeLost,
    Outcomes,
    StepRaised,
    timeout_message,
)
from kuberoll_workers.environments.remote import protocol
from kuberoll_workers.environments.remote.addresses import Address, Addresses
from kuberoll_workers.environments.remote.balance import least
from kuberoll_workers.environments.remote.replica import ConnectionLost, Replica

CHECK_SECONDS: Final = 5.0
"""Time between two health checks of a server, and time limit of one."""
PATIENCE_SECONDS: Final = 300.0
"""Time that a call waits while no server answers, or all are busy."""
_DOWN_SECONDS: Final = 1.0
_FAILED_CHECKS: Final = 3
_TRIES: Final = 3
_SHORTEST_CHECK: Final = 0.1
_BUSY_SECONDS: Final = 0.25
_MARGIN_SECONDS: Final = 10.0
_MOST_OWING: Final = 256

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


_OUT_OF_REACH: Final = Cause("EnvironmentUnreachable")


class _Busy(Exception):
    """A call that the server has not begun."""


class RemoteExecutor:
    """Runs an environment on servers of the HTTP protocol.

    A call goes to the server with the fewest calls of this worker; the calls of a stateful environment's episode go to
    the server that reset it. A server that loses a connection, or fails its health checks, is taken out, and tried
    again; it begins little then while others answer (`balance.Rest`). A call whose connection is lost is repeated if
    its environment has its state in the metadata; a stateful episode, and an agent's, is lost then. One that was slow,
    and not gone, still holds such episodes: before it is used again, they are closed.
    """

    batched = True

    def __init__(
        self,
        source: Addresses,
        *,
        name: str,
        timeout: float,
        token: str | None = None,
        scope: str = "",
        owned: bool = False,
        repeats: bool = True,
        check_seconds: float = CHECK_SECONDS,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """
        Args:
            source: The servers.
            name: Name of the environment, for messages.
            timeout: Time limit of one call, in seconds.
            token: Bearer token of the servers.
            scope: Prefix of the names of stateful episodes, where other runs use the same servers.
            owned: The servers are this worker's alone, and are shut down at the end.
            repeats: Calls whose connection is lost are repeated. False: their episodes are lost, as those of agents,
                which may go on in their session.
            check_seconds: Time between two health checks, in seconds.
            patience: Time that a call waits while no server answers, or all are busy, in seconds.
        """
        self._source = source
        self._name = name
        self.timeout = timeout
        self._token = token
        self._scope = f"{scope}." if scope else ""
        self._owned = owned
        self._repeats = repeats
        self._check_seconds = check_seconds
        self._patience = patience
        self._replicas: dict[Address, Replica] = {}
        self._homes: dict[str, Replica] = {}
        self._owed: dict[Address, dict[str, EpisodeEnd]] = {}
        self._hooks: Hooks | None = None
        self._refusal: EnvironmentFault | None = None
        self._trouble = "none is known"
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._greetings: set[asyncio.Task[None]] = set()

    @property
    def parallel(self) -> int:
        """Number of calls worth running concurrently, with the servers that answer now."""
        return max(1, sum(replica.parallel for replica in self._replicas.values() if replica.up))

    async def hooks(self) -> Hooks:
        """See `Executor.hooks`."""
        if self._hooks is None:
            self._watch()
            try:
                async with asyncio.timeout(self._patience), self._changed:
                    await self._changed.wait_for(lambda: self._hooks is not None or self._refusal is not None)
            except TimeoutError as error:
                raise self._nobody() from error
        if self._hooks is None:
            refusal, self._refusal = self._refusal, None
            assert refusal is not None
            raise refusal
        return self._hooks

    def instances(self) -> Sequence[RemoteExecutor]:
        """See `Executor.instances`."""
        return [self]

    async def run(self, batch: Batch[_Result]) -> Sequence[_Result | EnvironmentFault]:
        """See `Executor.run`."""
        arguments: Any = batch
        hooks = await self.hooks()
        return await (self._run_stateful(arguments) if hooks.stateful else self._anywhere(arguments))

    async def close(self) -> None:
        """Shut the servers down if they are this worker's, and close all connections."""
        tasks = [*self._greetings, *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._owned and self._hooks is not None and self._hooks.shutdown:
            await asyncio.gather(*(self._shut_down(replica) for replica in self._replicas.values() if replica.up))
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))
        await self._source.close()

    async def _run_stateful(self, batch: AnyBatch) -> Sequence[Any]:
        if isinstance(batch, ResetBatch):
            return await self._reset(batch)
        if isinstance(batch, CloseBatch):
            await asyncio.gather(*(self._close(CloseBatch([end])) for end in batch.ends))
            return [None] * len(batch)
        if isinstance(batch, GroupBatch | TrialsBatch):
            return await self._anywhere(batch)
        if len(batch) == 1:
            return await self._step(batch)
        steps: Any = await asyncio.gather(*(self._step_alone(StepBatch([item])) for item in batch.items))
        return Outcomes([one[0] for one in steps], answered=any(getattr(one, "answered", False) for one in steps))

    async def _step_alone(self, batch: StepBatch) -> Sequence[Any]:
        try:
            return await self._step(batch)
        except EnvironmentFault as fault:
            return [fault]

    async def _step(self, batch: StepBatch) -> Sequence[Any]:
        name = batch.items[0].episode
        if name is None:
            return await self._anywhere(batch)
        home = self._homes.get(name)
        if home is None or not home.up:
            raise EpisodeLost(f"the server that has reset the episode {name} is gone")
        sent = StepBatch([dataclasses.replace(batch.items[0], episode=self._scope + name)]) if self._scope else batch
        try:
            return await self._until_free(home, sent)
        except ConnectionLost as error:
            raise EpisodeLost(f"the server of the episode {name} is gone: {error}") from error

    async def _reset(self, batch: ResetBatch) -> Sequence[Any]:
        named = [dataclasses.replace(one, id=self._scope + one.id) for one in batch.episodes]
        sent = ResetBatch(named) if self._scope else batch
        body = self._body(sent)
        for episode in batch.episodes:
            self._leave(episode.id)

        async def ask(replica: Replica) -> Sequence[Any]:
            for episode in batch.episodes:
                self._homes[episode.id] = replica
            replica.episodes += len(batch)
            try:
                return await self._ask(replica, sent, body)
            except (_Busy, ConnectionLost) as error:
                for episode in batch.episodes:
                    self._leave(episode.id)
                if isinstance(error, ConnectionLost):
                    # It may have begun them.
                    for one in sent.episodes:
                        self._owe(replica, EpisodeEnd(id=one.id, metadata=one.metadata, reason="lost"))
                raise

        return await self._somewhere(sent, ask, load=lambda replica: replica.episodes)

    async def _close(self, batch: CloseBatch) -> None:
        name = batch.ends[0].id
        home = self._leave(name)
        if home is None:
            return
        end = dataclasses.replace(batch.ends[0], id=self._scope + name)
        # One that was not listed for a while has another object now.
        replica = self._replicas.get(home.address, home)
        if not replica.up:
            self._owe(replica, end)
            return
        try:
            await self._until_free(replica, CloseBatch([end]))
        except ConnectionLost:
            self._owe(replica, end)

    def _owe(self, replica: Replica, end: EpisodeEnd) -> None:
        """Remember to close an episode when its server, if it is the same one, answers again."""
        self._owed.setdefault(replica.address, {})[end.id] = end
        if len(self._owed) > _MOST_OWING:
            # Gone for good; if it is not, it closes by itself what nobody uses.
            del self._owed[next(iter(self._owed))]

    async def _settle(self, replica: Replica) -> None:
        """Close the episodes that were given up while the server did not answer; another process does not know them.

        Raises:
            ConnectionLost: It does not answer.
            TimeoutError: It is still slow.
        """
        while owed := self._owed.get(replica.address):
            ends = list(owed.values())
            async with asyncio.timeout(self._limit):
                status, data = await replica.post(
                    f"{protocol.PREFIX}/{CloseBatch.method}", self._body(CloseBatch(ends)), seconds=self.timeout
                )
            if status == protocol.STATUS_BUSY:
                raise ConnectionLost(_cause(replica, status, data))
            if status != 200:
                cause = _cause(replica, status, data)
                _log.warning("environment %s: episodes could not be closed: %s", self._name, cause)
            for end in ends:
                if owed.get(end.id) is end:
                    del owed[end.id]
        self._owed.pop(replica.address, None)

    @property
    def _limit(self) -> float:
        """Time limit of one call: a server lets it wait for as long as it gives the environment."""
        return 2 * self.timeout + _MARGIN_SECONDS

    def _leave(self, name: str) -> Replica | None:
        home = self._homes.pop(name, None)
        if home is not None:
            home.episodes -= 1
        return home

    async def _until_free(self, replica: Replica, batch: AnyBatch) -> Sequence[Any]:
        """Send a batch to one server, again while it is busy."""
        body = self._body(batch)
        try:
            async with asyncio.timeout(self._patience):
                while True:
                    try:
                        return await self._ask(replica, batch, body)
                    except _Busy:
                        await asyncio.sleep(_BUSY_SECONDS)
        except TimeoutError as error:
            raise StepRaised(f"{replica.address.url}: busy for {self._patience:g} s", cause=_OUT_OF_REACH) from error

    async def _anywhere(self, batch: AnyBatch) -> Sequence[Any]:
        body = self._body(batch)

        async def ask(replica: Replica) -> Sequence[Any]:
            try:
                return await self._ask(replica, batch, body)
            except ConnectionLost as error:
                if self._repeats:
                    raise
                raise EpisodeLost(f"the server of the episode is gone: {error}") from error

        return await self._somewhere(batch, ask, load=lambda replica: len(replica.calls))

    async def _somewhere(self, batch: AnyBatch, ask: Any, *, load: Any) -> Sequence[Any]:
        """Send a batch to the least loaded server, and to others while servers are lost or busy."""
        lost = 0
        deadline = asyncio.get_running_loop().time() + self._patience
        while True:
            replica = await self._least(load)
            try:
                results: Sequence[Any] = await ask(replica)
                return results
            except _Busy as error:
                now = asyncio.get_running_loop().time()
                if now > deadline:
                    text = f"all servers of the environment are busy: {error}"
                    raise StepRaised(text, cause=_OUT_OF_REACH) from error
                replica.rest.begin(now)
                if all(one.rest.lasts(now) for one in self._accepting() or ()):
                    await asyncio.sleep(_BUSY_SECONDS)
            except ConnectionLost as error:
                lost += 1
                if lost >= _TRIES:
                    text = f"{batch.method}: {lost} servers were gone during the call; {error}"
                    # One that is lost again and again is lost by what it is asked.
                    raise StepRaised(text, cause=Cause("EnvironmentCrashed")) from error

    async def _least(self, load: Any) -> Replica:
        """The server with the least load for what it can do at a time."""
        if (found := self._accepting()) is None:
            try:
                async with asyncio.timeout(self._patience), self._changed:
                    await self._changed.wait_for(lambda: self._accepting() is not None)
            except TimeoutError as error:
                raise self._nobody() from error
            found = self._accepting()
            assert found is not None
        return least(found, load, asyncio.get_running_loop().time())

    def _accepting(self) -> list[Replica] | None:
        return [one for one in self._replicas.values() if one.up and one.accepting and one.listed] or None

    async def _ask(self, replica: Replica, batch: AnyBatch, body: bytes) -> Sequence[Any]:
        """One call of a server.

        Raises:
            _Busy: It was not begun.
            ConnectionLost: The server is gone.
            EnvironmentFault: The call failed.
        """
        limit = self._limit
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                replica.calls.add(scope)
                try:
                    status, data = await replica.post(f"{protocol.PREFIX}/{batch.method}", body, seconds=self.timeout)
                finally:
                    replica.calls.discard(scope)
            if status in (200, protocol.STATUS_FAULT):
                replica.rest.record_answer(asyncio.get_running_loop().time())
            if status == 200:
                return messages.decode_results(data, batch)
            if status == protocol.STATUS_FAULT:
                raise messages.decode_fault(data)
        except messages.InvalidMessage as error:
            raise StepRaised(f"the environment's server violates its protocol: {error}") from error
        except ConnectionLost as error:
            self._lose(replica, str(error))
            raise
        except TimeoutError as error:
            text = f"{replica.address.url}: no answer for {limit:g} s" if replica.up else self._trouble
            self._lose(replica, text)
            raise ConnectionLost(text) from error
        if status == protocol.STATUS_BUSY:
            raise _Busy(_cause(replica, status, data))
        raise StepRaised(f"{batch.method}: {_cause(replica, status, data)}", cause=_cause_of_status(status))

    def _body(self, batch: AnyBatch) -> bytes:
        try:
            return messages.request_of(batch)
        except (TypeError, UnicodeEncodeError) as error:
            raise StepRaised(
                f"{batch.method} could not be sent to the server: its inputs are not plain data: {error}"
            ) from error

    def _lose(self, replica: Replica, trouble: str) -> None:
        self._trouble = trouble
        if replica.up:
            _log.warning("environment %s: server taken out: %s", self._name, trouble)
            replica.rest.begin(asyncio.get_running_loop().time())
        replica.lose()
        self._wake.set()

    def _nobody(self) -> StepRaised:
        return StepRaised(
            f"environment {self._name!r}: no server has answered for {self._patience:g} s: {self._trouble}",
            cause=_OUT_OF_REACH,
        )

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._keep_watching())

    async def _keep_watching(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._check()
            except EnvironmentFault as fault:
                self._trouble, self._refusal = str(fault), fault
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(min(_SHORTEST_CHECK, self._check_seconds))
            down = any(not replica.up for replica in self._replicas.values()) or not self._replicas
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_DOWN_SECONDS, self._check_seconds) if down else self._check_seconds):
                    await self._wake.wait()

    async def _check(self) -> None:
        """Take over the current servers, and check their health."""
        listed = set(await self._source.addresses())
        if not listed:
            self._trouble = "none is listed"
        for address in listed - self._replicas.keys():
            self._replicas[address] = Replica(address, token=self._token)
        for address, replica in list(self._replicas.items()):
            replica.listed = address in listed
            # One that is not listed may end the episodes that it holds.
            if not replica.listed and not replica.calls and (not replica.up or not replica.episodes):
                del self._replicas[address]
                replica.up = False
                await replica.close()
        await asyncio.gather(*map(self._probe, self._replicas.values()))

    async def _probe(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(self._check_seconds):
                status, _ = await replica.get(protocol.HEALTH)
        except (ConnectionLost, TimeoutError, messages.InvalidMessage) as error:
            self._trouble = str(error) or f"{replica.address.url}: no answer for {self._check_seconds:g} s"
            replica.failures += 1
            if replica.up and replica.failures >= _FAILED_CHECKS:
                self._lose(replica, self._trouble)
            return
        replica.failures = 0
        replica.accepting = status == 200
        if not replica.accepting:
            self._trouble = f"{replica.address.url}: draining"
        elif not replica.up and not any(task.get_name() == replica.address.url for task in self._greetings):
            # It may have to create the environment first, which takes a while.
            task = asyncio.create_task(self._greet(replica), name=replica.address.url)
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    async def _greet(self, replica: Replica) -> None:
        """Ask a server what it is, and use it if it fits."""
        try:
            async with asyncio.timeout(self._patience):
                status, data = await replica.get(f"{protocol.PREFIX}/info")
            if status == protocol.STATUS_FAULT:
                raise messages.decode_fault(data)
            if status != 200:
                raise StepRaised(_cause(replica, status, data), cause=_cause_of_status(status))
            info = messages.decode_answer(data, protocol.Info)
            if info.protocol != protocol.VERSION:
                raise StepRaised(
                    f"{replica.address.url}: it speaks version {info.protocol} of the protocol; "
                    f"this worker needs {protocol.VERSION}"
                )
            if self._hooks is not None and info.hooks != self._hooks:
                raise StepRaised(f"{replica.address.url}: it serves another environment than the servers before it")
            await self._settle(replica)
        except (ConnectionLost, TimeoutError, messages.InvalidMessage) as error:
            self._trouble = str(error) or f"{replica.address.url}: no answer to {protocol.PREFIX}/info"
            return
        except EnvironmentFault as fault:
            self._trouble = str(fault)
            if self._hooks is None:
                self._refusal = fault
            else:
                _log.warning("environment %s: %s", self._name, fault)
        else:
            replica.info = info
            replica.up = True
            self._hooks = info.hooks
            self._refusal = None
        async with self._changed:
            self._changed.notify_all()

    async def _shut_down(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(SHUTDOWN_SECONDS):
                status, data = await replica.post(f"{protocol.PREFIX}/shutdown", b"{}", seconds=SHUTDOWN_SECONDS)
            if status != 200:
                _log.warning("shutdown: %s", _cause(replica, status, data))
        except TimeoutError:
            _log.warning("%s", timeout_message(SHUTDOWN_SECONDS, "shutdown"))
        except (ConnectionLost, messages.InvalidMessage) as error:
            _log.warning("shutdown: %s", error)


def _cause_of_status(status: int) -> Cause | None:
    """The cause of an answer otherwise than the protocol says; None: the server's own doing.

    What gives one is no server of an environment, but a proxy or a gateway before it.
    """
    if status in (401, 403, 407):
        return Cause("AccessRefused", Evidence(http_status=status))
    if status >= 500 or status in (408, 429):
        return Cause("EnvironmentUnreachable", Evidence(http_status=status))
    return None


def _cause(replica: Replica, status: int, data: bytes) -> str:
    """The server's answer, for messages."""
    text = " ".join(data[:500].decode("utf-8", "replace").split())
    return f"{replica.address.url} answered {status}: {text or 'nothing'}"
