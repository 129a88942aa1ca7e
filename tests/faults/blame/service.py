"""A service that environments call, such as a judge, and every way in which it is out of order."""

from __future__ import annotations

import collections
import datetime
import http.server
import ipaddress
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

SILENT, CUT, RESET, HALF, GARBAGE = "silent", "cut", "reset", "half", "garbage"


@dataclass(frozen=True, slots=True)
class Places:
    """Where a service is, and where none is.

    Attributes:
        url: The service; `/WHAT/KEY` does `WHAT`: a status, or one of the words above. `/once/WHAT/KEY` does so at the
            first request with this key, and answers properly from then on. `/seen/KEY` answers how often it was asked.
        secure: The same with a certificate that nobody has signed.
        nobody: A port that is taken, where nobody listens.
        unknown: A name that no resolver knows (RFC 6761).
    """

    url: str
    secure: str
    nobody: str
    unknown: str = "http://judge.invalid"


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, *, security: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.security = security
        self.asked: collections.Counter[str] = collections.Counter()
        self.over = threading.Event()
        self.lock = threading.Lock()

    def count(self, key: str) -> int:
        """How often it was asked before."""
        with self.lock:
            self.asked[key] += 1
            return self.asked[key] - 1

    def get_request(self) -> Any:
        connection, address = super().get_request()
        if self.security is not None:
            connection = self.security.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up are no news."""


class _Answering(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        # What a client puts behind the key, as OpenAI's does, says nothing.
        parts = self.path.split("/")[1:]
        if parts[0] == "seen":
            self._answer(200, str(self.server.count(f"seen {parts[1]}")).encode())
            return
        once = parts[0] == "once"
        what, key = parts[once : once + 2]
        if once and self.server.count(key):
            what = "200"
        self._do(what)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.do_GET()

    def _do(self, what: str) -> None:
        if what.isdecimal():
            self._answer(int(what), b'{"verdict": 1}')
        elif what == SILENT:
            self.server.over.wait()
        elif what == HALF:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"{")
        elif what == GARBAGE:
            self.wfile.write(b"\x00\xff this is no HTTP\r\n\r\n")
        elif what == RESET:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(directory: Path) -> Iterator[Places]:
    """A service, while the context lasts."""
    security = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    security.load_cert_chain(_unsigned(directory))
    with ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.bind(("127.0.0.1", 0))
        ports = [stack.enter_context(_running(_Server(security=made))) for made in (None, security)]
        yield Places(
            f"http://127.0.0.1:{ports[0]}",
            f"https://127.0.0.1:{ports[1]}",
            f"http://127.0.0.1:{taken.getsockname()[1]}",
        )


@contextmanager
def _running(server: _Server) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.socket.close()


def _unsigned(directory: Path) -> Path:
    """A file with a key and a certificate of its own signature."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "judge")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = directory / "judge.pem"
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return file
