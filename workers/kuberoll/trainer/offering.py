"""Offers of weights: replicas come for a version that a trainer has in memory, and have it together.

Replicas that come at about the same time are one round: the weights are sent to all of them at once. One that comes
later, because it has just started or has failed before, has a round of its own.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Final

from kuberoll.trainer.senders import (
    SENDERS,
    DoNotFit,
    Rendezvous,
    ReplicaLine,
    Replicas,
    Sender,
    TransferFailed,
    check,
    receive_message,
)
from kuberoll.trainer.snapshots import Snapshot
from kuberoll_workers.data.weights.offers import Hello, Offer, decode_message

_log = logging.getLogger(__name__)

_HELLO_SECONDS = 10.0
_END_SECONDS = 10.0


@dataclass(slots=True, kw_only=True)
class _Offered:
    """A version that is offered.

    Attributes:
        expected: Replicas that are known of and have not had it.
        missing: Replicas that are known of and have not come.
        waiting: Those that have come for it.
        since: When the first of them came.
    """

    snapshot: Snapshot
    expected: int
    missing: int
    waiting: list[ReplicaLine] = field(default_factory=list)
    since: float = 0.0


class WeightsServer:
    """Sends the versions that are offered to the replicas that come for them, in threads of its own."""

    def __init__(
        self, *, address: str, port: int, backend: str, meeting: Rendezvous, gather_seconds: float, seconds: float
    ) -> None:
        """
        Args:
            address, port: Where to listen; port 0: any.
            backend: That of the replicas' engines.
            gather_seconds: For which a round waits for the replicas that are known of.
            seconds: For which a round may take.
        """
        self._backend: Final = backend
        self._meeting = meeting
        self._gather_seconds = gather_seconds
        self._seconds = seconds
        self._key: Final = secrets.token_urlsafe(24)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family)
        self.port: Final = int(self._listener.getsockname()[1])
        self._changed = threading.Condition()
        self._offered: dict[int, _Offered] = {}
        self._sending: int | None = None
        self._closed = False
        self._sender: Sender | None = None
        self._group = ""
        self._members = 0
        for work in (self._accept, self._send):
            threading.Thread(target=work, name=f"kuberoll-weights-{work.__name__.strip('_')}", daemon=True).start()

    def offer(self, snapshot: Snapshot, *, replicas: int) -> None:
        """Offer a version.

        Args:
            replicas: Number of those that are known to come for it.
        """
        with self._changed:
            self._offered[snapshot.version] = _Offered(snapshot=snapshot, expected=replicas, missing=replicas)
            self._changed.notify_all()

    def withdraw(self, version: int, why: str) -> Snapshot | None:
        """Offer a version no longer; return its snapshot, if no replica is receiving it."""
        with self._changed:
            offered = self._offered.pop(version, None)
            if offered is None:
                return None
            for line in offered.waiting:
                line.refuse(why)
            return None if self._sending == version else offered.snapshot

    def snapshot(self, version: int) -> Snapshot | None:
        """The snapshot of a version that is offered."""
        with self._changed:
            offered = self._offered.get(version)
            return None if offered is None else offered.snapshot

    def is_missed(self, version: int) -> bool:
        """Whether some replicas that are known of have not come for a version: perhaps they cannot."""
        with self._changed:
            offered = self._offered.get(version)
            return offered is not None and offered.missing > 0

    def uri(self, version: int, *, host: str, files: str | None) -> str:
        """The URI of the offer of a version."""
        return Offer(host=host, port=self.port, version=str(version), key=self._key, files=files).uri

    def close(self) -> None:
        """Offer nothing any more."""
        with self._changed:
            self._closed = True
            for version in list(self._offered):
                self.withdraw(version, "the trainer has ended")
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            # It wakes the thread that accepts.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HELLO_SECONDS)
            hello = decode_message(receive_message(connection), Hello)
            connection.settimeout(self._seconds)
        except (OSError, EOFError, ValueError):
            # Anybody may connect.
            connection.close()
            return
        line = ReplicaLine(connection, workers=hello.workers, group=hello.group)
        if not hmac.compare_digest(hello.key.encode(), self._key.encode()):
            line.refuse("the key is wrong: the offer is of another trainer, or of this one before it was restarted")
            return
        if hello.backend != self._backend:
            line.refuse(
                f"the trainer sends by {self._backend}, and this replica has weight_transfer_config.backend: "
                f"{hello.backend}: set one of the two"
            )
            return
        with self._changed:
            offered = self._offered.get(int(hello.version)) if hello.version.isdecimal() else None
            if offered is None:
                line.refuse(f"version {hello.version} is no longer offered")
                return
            if not offered.waiting:
                offered.since = time.monotonic()
            offered.waiting.append(line)
            offered.missing -= 1
            self._changed.notify_all()

    def _send(self) -> None:
        while (round_ := self._next_round()) is not None:
            snapshot, lines = round_
            try:
                self._have_all(snapshot, lines)
            except Exception as error:
                _log.warning("version %d was not sent: %s", snapshot.version, _words(error))
            finally:
                with self._changed:
                    self._sending = None

    def _next_round(self) -> tuple[Snapshot, list[ReplicaLine]] | None:
        """Wait for replicas that are to have a version together; None: there will be no more."""
        with self._changed:
            while not self._closed:
                wait = None
                for version in sorted(self._offered, reverse=True):
                    offered = self._offered[version]
                    if not offered.waiting:
                        continue
                    left = offered.since + self._gather_seconds - time.monotonic()
                    if len(offered.waiting) >= offered.expected or left <= 0:
                        lines, offered.waiting = offered.waiting, []
                        self._sending = version
                        return offered.snapshot, lines
                    wait = left if wait is None else min(wait, left)
                self._changed.wait(wait)
            return None

    def _have_all(self, snapshot: Snapshot, lines: list[ReplicaLine]) -> None:
        """Send a version to all replicas of a round, in a thread that may be given up.

        Raises:
            Exception: They do not all have it.
        """
        ended: list[BaseException] = []

        def work() -> None:
            try:
                self._round(snapshot, lines)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=work, name="kuberoll-weights-round", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if thread.is_alive():
            ended.append(TransferFailed(f"the replicas did not all have them after {self._seconds:g} s"))
            for line in lines:
                line.close()
        if ended:
            for line in lines:
                line.refuse(
                    f"the trainer could not send them: {_words(ended[0])}", files=not isinstance(ended[0], DoNotFit)
                )
            # What waits in the group fails then.
            self._leave_group()
            thread.join(_END_SECONDS)
            raise ended[0]
        with self._changed:
            if (offered := self._offered.get(snapshot.version)) is not None:
                offered.expected = max(1, offered.expected - len(lines))
        for line in lines:
            line.close()

    def _round(self, snapshot: Snapshot, lines: list[ReplicaLine]) -> None:
        # If one cannot have them, none does: they would have to return to the old ones.
        lines = check(lines, snapshot)
        same = len(lines) == self._members and all(line.group == self._group for line in lines)
        group = self._group if same else secrets.token_hex(8)
        replicas = Replicas(lines, group=group, version=snapshot.version)
        if not same:
            self._leave_group()
            sender = SENDERS[self._backend](self._meeting)
            self._sender = sender
            sender.open(replicas, snapshot)
            self._group, self._members = group, len(lines)
        assert self._sender is not None
        self._sender.send(replicas, snapshot)

    def _leave_group(self) -> None:
        sender, self._sender, self._group, self._members = self._sender, None, "", 0
        if sender is not None:
            with contextlib.suppress(Exception):
                sender.close()


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, TransferFailed) else f"{type(error).__name__}: {error}"


def own_address(url: str | None) -> str:
    """The address at which a policy's replicas reach this machine, if it is the one from which its URL is reached.

    Args:
        url: None: unknown; the address is that of this machine's name.
    """
    from urllib.parse import urlsplit

    from kuberoll_workers.data.weights.gloo import own_address as address_towards

    if url is None:
        return socket.gethostbyname(socket.gethostname())
    parts = urlsplit(url)
    return address_towards(parts.hostname or "localhost", parts.port or 80)
