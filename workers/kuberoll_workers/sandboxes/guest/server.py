"""The server inside a sandbox: one process, the first of the sandbox's PID namespace.

No signal of what runs in the sandbox ends it: the kernel passes the first process of a PID namespace only those that it
handles. When it ends, so does the sandbox. It obeys whoever can show the key of its certificate. As it has no key of
its own, the roles of TLS are turned round: who connects is TLS's server, and this one its client, which checks the
certificate.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

from . import keepers, operations, processes, users
from .frames import CHUNK_BYTES, HOST_NAME, VERSION, Decoder, Header, InvalidFrame, encode
from .settings import Settings

_HANDSHAKE_SECONDS: Final = 10.0
_MOST_STRANGERS: Final = 16
# Above the first nothing more is read from a command, below the second it is again.
_FULL_BYTES, _FREE_BYTES = 1 << 20, 256 << 10
_MOST_DISCARDED: Final = 256
_DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_RETRY_SECONDS: Final = 0.2
_MOST_KEEPERS: Final = 4
_FUNCTIONS: Final[dict[str, tuple[str, ...]]] = {
    "read": ("offset", "size"),
    "mark": (),
    "changed": ("since", "search"),
    "write": ("mode", "parents"),
    "unpack": ("trusted",),
    "pack": (),
    "make": ("mode",),
    "remove": (),
}
"""Operations that are functions of `files` or `changes`, with their arguments beside the path."""

Ready = Callable[[], Any]


class Server:
    """The server."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        self.settings = settings
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.load_verify_locations(cadata=settings.certificate)
        self._connections: set[Connection] = set()
        self._discarded: dict[int, None] = {}
        self._keepers: list[keepers.Keeper] = []
        self._busy = 0
        self._listeners: dict[int, operations.Listener] = {}
        self._began = self.heard = time.monotonic()
        self._known = False
        listener.setblocking(False)
        self.read(listener.fileno(), self._accept)
        self._wake, write = os.pipe()
        for descriptor in (self._wake, write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.read(self._wake, self._reap)
        self._termination = processes.watch_termination()
        self.read(self._termination, self._terminate)

    def serve(self) -> str:
        """Serve until the sandbox's time is over; returns why."""
        while True:
            now = time.monotonic()
            if (reason := self._over(now)) is not None:
                return reason
            lacking = not self._keepers and not self._busy
            events = self._selector.select(0.0 if lacking else self._wait(now))
            if lacking and not events:
                # Nobody waits for anything: the moment to prepare what comes next.
                with contextlib.suppress(OSError):
                    self._prepare()
                    continue
                events = self._selector.select(_RETRY_SECONDS)
            for key, _ in events:
                # One before it may have closed it.
                if self._selector.get_map().get(key.fd) is key:
                    try:
                        key.data()
                    except Exception as error:
                        # A fault in one operation must not end the sandbox.
                        processes.log(f"{type(error).__name__}: {error}")

    # Of `operations.Watcher`.

    def read(self, descriptor: int, ready: Ready) -> None:
        """See `operations.Watcher`."""
        self._watch(descriptor, selectors.EVENT_READ, ready)

    def write(self, descriptor: int, ready: Ready) -> None:
        """See `operations.Watcher`."""
        self._watch(descriptor, selectors.EVENT_WRITE, ready)

    def forget(self, descriptor: int) -> None:
        """See `operations.Watcher`."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def discard(self, descriptor: int) -> None:
        """See `operations.Watcher`."""
        if len(self._discarded) >= _MOST_DISCARDED:
            self._drop(next(iter(self._discarded)))
        self._discarded[descriptor] = None

        def drain() -> None:
            try:
                if os.read(descriptor, CHUNK_BYTES):
                    return
            except BlockingIOError:
                return
            except OSError:
                pass
            self._drop(descriptor)

        self.read(descriptor, drain)

    def listen(self, port: int) -> int:
        """Listen at a port of the sandbox; returns its number."""
        listener = operations.Listener(port, self)
        self._listeners[listener.port] = listener
        return listener.port

    def listener(self, port: int) -> operations.Listener | None:
        """What listens at a port."""
        return self._listeners.get(port)

    def take_back(self, keeper: keepers.Keeper, *, free: bool) -> None:
        """See `operations.Watcher`."""
        self._busy -= 1
        if free and len(self._keepers) < _MOST_KEEPERS:
            self._keep(keeper)
        else:
            keeper.drop()

    # Of `Connection`.

    def task(self, job: keepers.Job) -> keepers.Task:
        """Have a keeper do something.

        Raises:
            OSError: There can be no further process.
        """
        while True:
            if not self._keepers:
                self._prepare()
            keeper = self._keepers.pop()
            self.forget(keeper.control.fileno())
            try:
                task = keeper.begin(job)
            except BrokenPipeError:
                # Somebody has killed it.
                keeper.drop()
            else:
                self._busy += 1
                return task

    def end_others(self) -> int:
        """Kill everything in the sandbox but this process; returns how many are left."""
        while self._keepers:
            self._lose(self._keepers[-1])
        return processes.end_others()

    def leave(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._connections.discard(connection)

    def hear(self) -> None:
        """Note that a handle is there."""
        self._known, self.heard = True, time.monotonic()

    def _prepare(self) -> None:
        self._keep(keepers.fork())

    def _keep(self, keeper: keepers.Keeper) -> None:
        self._keepers.append(keeper)
        # It says something only when it is gone: somebody has killed it.
        self.read(keeper.control.fileno(), lambda: self._lose(keeper))

    def _lose(self, keeper: keepers.Keeper) -> None:
        self._keepers.remove(keeper)
        self.forget(keeper.control.fileno())
        keeper.drop()

    def _watch(self, descriptor: int, events: int, ready: Ready) -> None:
        if descriptor in self._selector.get_map():
            self._selector.modify(descriptor, events, ready)
        else:
            self._selector.register(descriptor, events, ready)

    def _terminate(self) -> None:
        # Root in the sandbox may send it, too.
        if processes.is_from_outside(self._termination):
            os._exit(0)

    def _drop(self, descriptor: int) -> None:
        self._discarded.pop(descriptor, None)
        self.forget(descriptor)
        os.close(descriptor)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            end, _ = self._listener.accept()
            if _is_from_here(end):
                # Whoever is inside could crowd out all others.
                end.close()
                return
            strangers = [one for one in self._connections if not one.trusted]
            if len(strangers) >= _MOST_STRANGERS:
                min(strangers, key=lambda one: one.began).close()
            self._connections.add(Connection(end, self, self._context))

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, CHUNK_BYTES)
        processes.reap()

    def _over(self, now: float) -> str | None:
        settings = self.settings
        if now - self._began > settings.total_seconds:
            return f"it has existed for {settings.total_seconds:g} s"
        limit = settings.lease_seconds if self._known else settings.start_seconds
        if now - self.heard > limit:
            return f"nobody has been heard of for {limit:g} s"
        return None

    def _wait(self, now: float) -> float:
        """Seconds until something is due; what is over its time is ended."""
        due = min(now + 5.0, self._began + self.settings.total_seconds)
        limit = self.settings.lease_seconds if self._known else self.settings.start_seconds
        due = min(due, self.heard + limit)
        for connection in list(self._connections):
            due = min(due, connection.check(now))
        return max(0.0, due - now + 0.001)


class Connection:
    """A connection of a handle, or of somebody who is not yet known to be one.

    Attributes:
        began: When it was made.
        trusted: True if the other side has shown the key.
    """

    def __init__(self, end: socket.socket, server: Server, context: ssl.SSLContext) -> None:
        self.began = time.monotonic()
        self.trusted = False
        self._socket = end
        self._server = server
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=False, server_hostname=HOST_NAME.encode())
        self._shaken = False
        self._decoder = Decoder()
        self._sending = bytearray()
        self._writing = self._paused = self._closed = False
        self._operation: operations.Operation | None = None
        # Reading and writing are watched apart.
        self._writer = os.dup(end.fileno())
        end.setblocking(False)
        server.read(end.fileno(), self._receive)
        self._advance()

    def close(self) -> None:
        """Close it, and end what it has begun."""
        if self._closed:
            return
        self._closed = True
        self._server.leave(self)
        self._server.forget(self._socket.fileno())
        self._server.forget(self._writer)
        os.close(self._writer)
        self._socket.close()
        if self._operation is not None:
            self._operation.abandon()

    def check(self, now: float) -> float:
        """End what is over its time; returns when that is next so."""
        if not self.trusted:
            if now >= self.began + _HANDSHAKE_SECONDS:
                self.close()
            return self.began + _HANDSHAKE_SECONDS
        operation = self._operation
        if operation is None or operation.deadline is None:
            return now + 3600.0
        if now >= operation.deadline:
            operation.late, operation.deadline = True, None
            operation.kill()
            return now + 3600.0
        return operation.deadline

    def send(self, header: Header, payload: bytes = b"") -> None:
        """Send a frame; the end of an operation is the last one of it."""
        if header["kind"] == "end":
            self._operation = None
        if self._closed:
            return
        self._tls.write(encode(header, payload))
        self._flush()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._in.write(data)
        self._advance()

    def _advance(self) -> None:
        try:
            if not self._shaken:
                self._tls.do_handshake()
                self._shaken = True
            while not self._closed and (data := self._tls.read(CHUNK_BYTES)):
                for header, payload in self._decoder.feed(data):
                    self._take(header, payload)
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLError, InvalidFrame) as error:
            processes.log(f"a connection was refused: {error}")
            self._flush()
            self.close()
            return
        self._flush()

    def _flush(self) -> None:
        if self._closed:
            return
        if self._out.pending:
            self._sending += self._out.read()
        try:
            while self._sending:
                sent = self._socket.send(self._sending[: CHUNK_BYTES * 4])
                del self._sending[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if bool(self._sending) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._server.write(self._writer, self._flush)
            else:
                self._server.forget(self._writer)
        operation = self._operation
        if operation is None:
            self._paused = False
        elif len(self._sending) > _FULL_BYTES and not self._paused:
            self._paused = True
            operation.pause()
        elif len(self._sending) < _FREE_BYTES and self._paused:
            self._paused = False
            operation.resume()

    def _take(self, header: Header, payload: bytes) -> None:
        if self._closed:
            return
        kind = header["kind"]
        if not self.trusted:
            self._greet(header)
            return
        self._server.hear()
        if self._operation is not None:
            self._continue(self._operation, kind, payload)
            return
        if kind in ("input", "inputEnd", "kill"):
            # They crossed the operation's end.
            if payload:
                self.send({"kind": "taken", "bytes": len(payload)})
            return
        try:
            self._begin(kind, header)
        except OSError as error:
            self.send({"kind": "end", **keepers.failure(error)})
        except (users.UnknownUser, KeyError, TypeError, ValueError) as error:
            self.send({"kind": "end", "error": f"{type(error).__name__}: {error}", "errno": 22})

    def _greet(self, header: Header) -> None:
        if header["kind"] != "hello" or header.get("sandbox") != self._server.settings.name:
            # Another sandbox may have had this address before.
            self.send({"kind": "end", "error": f"this is the sandbox {self._server.settings.name}", "errno": 0})
            self.close()
            return
        self.trusted = True
        self._server.hear()
        self.send({"kind": "hello", "version": VERSION, "workdir": self._server.settings.workdir})

    def _continue(self, operation: operations.Operation, kind: str, payload: bytes) -> None:
        if kind == "input":
            operation.input(payload)
        elif kind == "inputEnd":
            operation.end_input()
        elif kind == "kill":
            operation.kill()
        else:
            raise InvalidFrame(f"{kind} in the middle of an operation")

    def _begin(self, kind: str, header: Header) -> None:
        server = self._server
        if kind == "ping":
            self.send({"kind": "pong"})
        elif kind == "exec":
            self._execute(header)
        elif kind in _FUNCTIONS:
            path = os.path.join(server.settings.workdir, str(header["path"]))
            arguments = {"path": path, **{name: header.get(name) for name in _FUNCTIONS[kind]}}
            if kind == "changed" and arguments["search"] is None:
                arguments["search"] = server.settings.environment.get("PATH", _DEFAULT_PATH)
            task = server.task({"function": kind, **arguments, "user": self._user(header)})
            self._operation = operations.TaskOperation(task, server, self.send, limit=None)
        elif kind == "connect":
            self._operation = operations.RelayOperation(operations.connect(int(header["port"])), server, self.send)
        elif kind == "listen":
            self.send({"kind": "end", "port": server.listen(int(header["port"]))})
        elif kind == "accept":
            if (listener := server.listener(int(header["port"]))) is None:
                raise ValueError("nothing listens at this port")
            self._operation = operations.AcceptOperation(listener, server, self.send)
        elif kind == "clear":
            self._clear()
        else:
            raise InvalidFrame(f"an unknown operation {kind}")

    def _execute(self, header: Header) -> None:
        settings = self._server.settings
        user = self._user(header)
        environment = {
            "PATH": _DEFAULT_PATH,
            "HOME": user.home,
            **settings.environment,
            **header.get("environment", {}),
        }
        task = self._server.task(
            {
                "argv": [str(word) for word in header["argv"]],
                "workdir": header.get("workdir") or settings.workdir,
                "environment": {str(name): str(value) for name, value in environment.items()},
                "merged": bool(header.get("merged")),
                "user": user,
            }
        )
        operation = operations.TaskOperation(task, self._server, self.send, limit=header.get("limit"))
        if (timeout := header.get("timeout")) is not None:
            operation.deadline = time.monotonic() + float(timeout)
        self._operation = operation

    def _user(self, header: Header) -> users.User:
        name = header.get("user") or self._server.settings.user
        if name:
            return users.find(name)
        own = str(os.geteuid())
        found = users.find(own)
        return found._replace(gid=os.getegid(), groups=found.groups if own == "0" else ())

    def _clear(self) -> None:
        if os.getpid() != 1:
            raise OSError(95, "this server is not the first process of a PID namespace")
        self.send({"kind": "end", "left": self._server.end_others()})


def _is_from_here(end: socket.socket) -> bool:
    """True for a connection from one of this machine's own addresses."""
    if end.family == socket.AF_UNIX:
        return False
    try:
        with socket.socket(end.family, socket.SOCK_DGRAM) as probe:
            if end.family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # The system gives a machine's own addresses only; those of a link are its own on that link.
            host, _, *scope = end.getpeername()
            probe.bind((host, 0, *scope))
    except OSError:
        return False
    return True


def listening(settings: Settings) -> socket.socket:
    """The socket that the server listens at."""
    if settings.descriptor is not None:
        return socket.socket(fileno=settings.descriptor)
    if settings.path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(settings.path)
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.bind(settings.path)
        # Who may open it is decided by its directory; whom it obeys by the certificate.
        os.chmod(settings.path, 0o666)
        end.listen(128)
        return end
    assert settings.port is not None
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", settings.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", settings.port), backlog=128)


def main(settings: Settings) -> NoReturn:
    """Serve, and end with everything that runs in the sandbox."""
    os.umask(0o022)
    processes.close_to_others()
    processes.become_reaper()
    users.remember()
    server = Server(settings, listening(settings))
    reason = server.serve()
    processes.log(f"the sandbox ends: {reason}")
    os._exit(0)
