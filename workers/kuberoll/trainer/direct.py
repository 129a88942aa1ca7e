"""The direct path: parts of a run's journals from the workers that have just written them, before they are listed."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Collection
from typing import Final, NamedTuple
from urllib.parse import urlencode

import msgspec

from kuberoll.trainer.workers import WorkerAddress, WorkerSource
from kuberoll_workers.output.fed_parts import PARTS_PATH, PLAN_PATH, FedPart, FedParts

_POLL_SECONDS: Final = 5.0
"""Seconds that a worker holds a request; so long it may write early for a consumer that does not wait any more."""
_TIMEOUT_SECONDS: Final = 15.0
_TELL_SECONDS: Final = 2.0
_FIND_SECONDS: Final = 1.0
_LINGER_SECONDS: Final = 0.5
"""Seconds between two waits in which the consumer still counts as waiting."""
_RETRY_SECONDS: Final = (0.1, 5.0)
_REFUSED_SECONDS: Final = 30.0
_MOST_BYTES: Final = 256 << 20

_log = logging.getLogger(__name__)


class Arrivals(NamedTuple):
    """What has come from workers.

    Attributes:
        parts: In the order in which each worker wrote them.
        gap: True if there may be parts that did not come: the journals have them.
    """

    parts: list[FedPart]
    gap: bool


class DirectPath:
    """Asks the workers of a run for parts while a consumer waits, with a thread for each worker.

    Nothing depends on it: what does not come, or comes twice, is in the journals once.
    """

    def __init__(self, source: WorkerSource, *, shards: Collection[int]) -> None:
        """
        Args:
            shards: All shards of the run.
        """
        self._source = source
        self._shards = frozenset(shards)
        self._changed = threading.Condition()
        self._wanted_until = 0.0
        self._arrived: dict[WorkerAddress, FedParts] = {}
        self._gap = False
        self._served: dict[WorkerAddress, Collection[int]] = {}
        self._listed: frozenset[WorkerAddress] = frozenset()
        self._polling: set[WorkerAddress] = set()
        # Plans that were written, and those that the workers were told of.
        self._plans = self._told = 0
        self._begun = False
        self._closed = False

    @property
    def covers_run(self) -> bool:
        """True if a worker answers for every shard: then all that is written comes this way."""
        with self._changed:
            return self._shards <= {shard for shards in self._served.values() for shard in shards}

    def wait(self, seconds: float) -> None:
        """Wait until something has come, or for some seconds; workers write for those who wait."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._begin()
            self._wanted_until = deadline + _LINGER_SECONDS
            self._changed.notify_all()
            while not self._arrived and not self._gap and not self._closed:
                if (left := deadline - time.monotonic()) <= 0:
                    return
                self._changed.wait(left)

    def take(self) -> Arrivals:
        """What has come since the last call."""
        with self._changed:
            arrived, self._arrived = self._arrived, {}
            gap, self._gap = self._gap, False
            self._changed.notify_all()
        return Arrivals([part for answer in arrived.values() for part in answer.parts], gap)

    def plan_written(self) -> None:
        """Tell the workers that there is a new plan; those that it does not reach read it when they look."""
        with self._changed:
            self._plans += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End all threads, soon."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            for work, name in ((self._find, "kuberoll-workers"), (self._tell, "kuberoll-plans")):
                threading.Thread(target=work, name=name, daemon=True).start()

    def _find(self) -> None:
        """Keep a thread for each worker that is listed."""
        while True:
            found = self._found()
            with self._changed:
                self._listed = found
                for address in found - self._polling:
                    self._polling.add(address)
                    threading.Thread(
                        target=self._poll, args=(address,), name=f"kuberoll-worker-{address}", daemon=True
                    ).start()
                self._changed.wait_for(lambda: self._closed, _FIND_SECONDS)
                if self._wait_until_wanted():
                    return

    def _found(self) -> frozenset[WorkerAddress]:
        try:
            return frozenset(self._source.find())
        except Exception:
            # Sources of others have exceptions of their own, and the next look may succeed.
            _log.warning("the workers of the run cannot be found; the journals are read", exc_info=True)
            return frozenset()

    def _wait_until_wanted(self) -> bool:
        """Wait until a consumer waits; True if the path is closed."""
        while not self._closed and time.monotonic() >= self._wanted_until:
            self._changed.wait()
        return self._closed

    def _tell(self) -> None:
        """Tell the workers that answer of new plans; one that is not told reads them when it looks."""
        workers: dict[WorkerAddress, _Worker] = {}
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._told != self._plans)
                if self._closed:
                    break
                self._told, answering = self._plans, set(self._served)
            for address in workers.keys() - answering:
                workers.pop(address).close()
            for address in answering:
                worker = workers.setdefault(address, _Worker(address, timeout=_TELL_SECONDS))
                try:
                    worker.tell_plan()
                except (_Refused, OSError, http.client.HTTPException):
                    workers.pop(address).close()
        for worker in workers.values():
            worker.close()

    def _poll(self, address: WorkerAddress) -> None:
        """Ask a worker until it is gone."""
        worker = _Worker(address, timeout=_TIMEOUT_SECONDS)
        epoch, place, pause = "", 0, _RETRY_SECONDS[0]
        while True:
            with self._changed:
                # An answer that nobody has taken is all that a worker may have here.
                while address in self._arrived and not self._closed:
                    self._changed.wait()
                if self._wait_until_wanted():
                    break
            try:
                answer = worker.parts(epoch, place)
            except _Refused as error:
                _log.warning("the direct path to worker %s is closed: %s; the journals are read", address, error)
                pause = _REFUSED_SECONDS
            except (OSError, http.client.HTTPException, msgspec.MsgspecError):
                pause = min(2 * pause, _RETRY_SECONDS[1]) if pause < _REFUSED_SECONDS else _RETRY_SECONDS[0]
            else:
                epoch, place, pause = answer.epoch, answer.next, _RETRY_SECONDS[0]
                self._give(address, answer)
                if not answer.ended:
                    continue
            worker.close()
            with self._changed:
                if self._served.pop(address, None) is not None:
                    # What it wrote last may have been on its way.
                    self._gap = True
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed, pause)
                if self._closed or address not in self._listed:
                    break
        worker.close()
        with self._changed:
            self._polling.discard(address)

    def _give(self, address: WorkerAddress, answer: FedParts) -> None:
        with self._changed:
            self._served[address] = answer.shards
            self._gap = self._gap or answer.gap
            if answer.parts:
                self._arrived[address] = answer
            if answer.parts or answer.gap:
                self._changed.notify_all()


class _Refused(Exception):
    """A worker does not serve this consumer; the message has its words and the remedy."""


class _Worker:
    """Requests to one worker, over one connection."""

    def __init__(self, address: WorkerAddress, *, timeout: float) -> None:
        self._address = address
        self._connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)

    def parts(self, epoch: str, place: int) -> FedParts:
        """Wait for parts.

        Raises:
            _Refused: It has none for this consumer.
            OSError, HTTPException, MsgspecError: It does not answer, or is no worker.
        """
        query = urlencode({"epoch": epoch, "after": place, "seconds": _POLL_SECONDS})
        return msgspec.msgpack.decode(self._ask("GET", f"{PARTS_PATH}?{query}"), type=FedParts)

    def tell_plan(self) -> None:
        """Say that there is a new plan.

        Raises:
            _Refused, OSError, HTTPException: As `parts`.
        """
        self._ask("POST", PLAN_PATH)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._connection.close()

    def _ask(self, method: str, path: str) -> bytes:
        kept = self._connection.sock is not None
        try:
            answer, body = self._answer(method, path)
        except (http.client.RemoteDisconnected, ConnectionError):
            self._connection.close()
            if not kept:
                raise
            # Servers close connections on which nothing was asked for a while, such as a training step.
            answer, body = self._answer(method, path)
        if answer.status in (401, 403):
            raise _Refused(f"{body[:200].decode(errors='replace')}; give a token that its workers know")
        if answer.status == 404:
            raise _Refused("it does not serve one: its output is a directory, or no access of the job has only `read`")
        if answer.status >= 300:
            raise http.client.HTTPException(f"{method} {path}: {answer.status}")
        return body

    def _answer(self, method: str, path: str) -> tuple[http.client.HTTPResponse, bytes]:
        self._connection.request(method, path, headers={"Authorization": f"Bearer {self._address.token}"})
        answer = self._connection.getresponse()
        return answer, answer.read(_MOST_BYTES)
