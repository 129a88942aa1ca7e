"""What is outside of a machine: names, addresses and real servers, all of them on loopback in truth."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import http.server
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kuberoll_workers.sandboxes.egress.addresses import Address
from kuberoll_workers.sandboxes.egress.connecting import Connector
from kuberoll_workers.sandboxes.egress.proxy import EgressProxy, Limits
from kuberoll_workers.sandboxes.egress.relay import PIECE_BYTES
from kuberoll_workers.sandboxes.egress.rules import AllowedHosts

PUBLIC = "93.184.215.14"
PATIENCE_SECONDS = 60.0
BEGIN, END = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


@dataclass
class Outside:
    """A world in which names have addresses, and addresses lead to ports of loopback.

    Attributes:
        names: Answers to the questions for a name, the last one again and again.
        routes: Ports of loopback.
        asked: Names that were resolved, in order.
        dialled: Addresses and ports that were connected to.
    """

    names: dict[str, list[list[str]]] = field(default_factory=dict)
    routes: dict[tuple[str, int], int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    dialled: list[tuple[str, int]] = field(default_factory=list)

    def put(self, name: str, port: int, local: int, address: str = PUBLIC) -> None:
        """Have a name, and a server at its address."""
        self.names[name] = [[address]]
        self.routes[address, port] = local

    async def resolve(self, name: str, port: int) -> list[str]:
        """Answer as told."""
        self.asked.append(name)
        answers = self.names.get(name)
        if not answers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def dial(self, address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to what is at an address."""
        self.dialled.append((address, port))
        local = self.routes.get((address, port))
        if local is None:
            raise ConnectionRefusedError("nothing is there")
        return await asyncio.open_connection("127.0.0.1", local, limit=PIECE_BYTES)

    def connector(self, private: AllowedHosts | None = None, *, own: Collection[Address] = ()) -> Connector:
        """What connects in this world."""
        return Connector(private=private, resolver=self.resolve, dialer=self.dial, own=lambda: own)

    @contextlib.asynccontextmanager
    async def proxy(
        self, *allowed: str, private: tuple[str, ...] = (), limits: Limits | None = None
    ) -> AsyncIterator[tuple[EgressProxy, int]]:
        """A proxy that lets out to these hosts, and its port."""
        proxy = EgressProxy(AllowedHosts.of(allowed), connector=self.connector(AllowedHosts.of(private)), limits=limits)
        port = await proxy.open()
        try:
            yield proxy, port
        finally:
            await proxy.close()


@contextlib.asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object],
) -> AsyncIterator[int]:
    """A server on loopback; yields its port. Its connections are closed with it."""
    writers: list[asyncio.StreamWriter] = []
    tasks: set[asyncio.Task[None]] = set()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        writers.append(writer)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await serve(reader, writer)  # type: ignore[misc]

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for writer in writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def recording(answer: bytes = b"") -> AsyncIterator[tuple[int, list[bytearray]]]:
    """A server that keeps what it is sent, by connection, and gives one answer to the first bytes of each."""
    received: list[bytearray] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = bytearray()
        received.append(mine)
        answered = False
        while data := await reader.read(PIECE_BYTES):
            mine += data
            if not answered and answer:
                answered = True
                writer.write(answer)
                await writer.drain()
        writer.close()

    async with listening(serve) as port:
        yield port, received


async def say(port: int, *pieces: bytes) -> bytes:
    """What a proxy answers to bytes, until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            return await read_all(reader)
    finally:
        writer.transport.abort()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """All that comes, until the connection is closed or broken."""
    read = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(PIECE_BYTES):
            read += data
    return bytes(read)


def hello(name: str | None) -> bytes:
    """A ClientHello as this Python's OpenSSL makes it."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def make_certificates(directory: Path, *names: str) -> tuple[Path, Path]:
    """An authority's certificate, and a server's key with its certificate for these names."""
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests' authority")])
    root = (
        x509.CertificateBuilder(issuer, issuer, authority.public_key(), x509.random_serial_number(), BEGIN, END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests' server")])
    leaf = (
        x509.CertificateBuilder(issuer, subject, server.public_key(), x509.random_serial_number(), BEGIN, END)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key = server.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "ca.pem").write_bytes(root.public_bytes(pem))
    (directory / "server.pem").write_bytes(key + leaf.public_bytes(pem))
    return directory / "ca.pem", directory / "server.pem"


class _Files(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Give back what came."""
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def files(directory: Path, pem: Path | None = None) -> Iterator[int]:
    """A server of a directory's files, with TLS if there is a certificate; yields its port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Files, directory=str(directory)))
    if pem is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        # The handshake is the connection's thread's.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
