"""Registries for tests: the real one (distribution), with and without accounts, and what may stand before it."""

from __future__ import annotations

import base64
import datetime
import http.client
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

USER, PASSWORD = "me", "secret"
# Of bcrypt, which the registry wants.
_ACCOUNTS = f"{USER}:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n"


@dataclass(frozen=True, slots=True)
class Running:
    """A registry, by HTTP on this machine.

    Attributes:
        host: `127.0.0.1:PORT`.
        storage: Its directory.
    """

    host: str
    storage: Path


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextmanager
def registry(directory: Path, auth: Mapping[str, Any] | None = None, accounts: bool = False) -> Iterator[Running]:
    """A registry with an empty storage.

    Args:
        auth: Its setting of that name.
        accounts: Whether it knows `USER`, and nobody else.
    """
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    if accounts:
        (directory / "htpasswd").write_text(_ACCOUNTS)
        auth = {"htpasswd": {"realm": "tests", "path": str(directory / "htpasswd")}}
    port = free_port()
    config = {
        "version": "0.1",
        "log": {"accesslog": {"disabled": True}, "level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(directory / "storage")}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{port}"},
        **({"auth": auth} if auth else {}),
    }
    path = directory / "config.yml"
    # JSON is YAML, too.
    path.write_text(json.dumps(config))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", path], stdout=log, stderr=log)
    try:
        end = time.monotonic() + 30
        while True:
            with suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/v2/")
                connection.getresponse().read()
                connection.close()
                break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"docker-registry does not serve: {(directory / 'log').read_text()[-2000:]}")
            os.sched_yield()
        yield Running(f"127.0.0.1:{port}", directory / "storage")
    finally:
        process.terminate()
        process.wait(30)


class Buildah:
    """buildah, with a storage of its own."""

    def __init__(self, directory: Path) -> None:
        for name in ("buildah", "runc"):
            if shutil.which(name) is None:
                pytest.skip(f"{name} is not installed")
        if os.geteuid():
            pytest.skip("only root builds images here")
        self._directory = directory

    def __call__(self, *arguments: str | Path, **more: Any) -> str:
        """Run it; what it prints."""
        done: subprocess.CompletedProcess[str] = subprocess.run(
            ["buildah", "--root", self._directory / "root", "--runroot", self._directory / "run",
             "--storage-driver", "vfs", *arguments],
            capture_output=True, text=True, timeout=600, check=False,
            # Not by the credentials of the code under test.
            env={**os.environ, "BUILDAH_RUNTIME": "runc", "DOCKER_CONFIG": "", "HOME": str(self._directory)}, **more,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"buildah {' '.join(map(str, arguments))}: {done.stderr[-3000:]}")
        return done.stdout

    def push(self, image: str, target: str, *options: str) -> None:
        """Push an image to a registry here."""
        self("push", "--tls-verify=false", *options, image, f"docker://{target}")

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """What it unpacks of an image."""
        container = self("from", "--pull-never", image).strip()
        try:
            yield Path(self("mount", container).strip())
        finally:
            self("rm", container)


class Tokens:
    """A service that gives tokens, as Docker Hub's does: a stand-in, whose tokens the real registry checks."""

    def __init__(self, directory: Path) -> None:
        self.asked: list[tuple[str | None, list[tuple[str, str]]]] = []
        self.seconds = 300
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(1)
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .sign(self._key, hashes.SHA256())
        )
        self._der = certificate.public_bytes(serialization.Encoding.DER)
        directory.mkdir(parents=True, exist_ok=True)
        self._bundle = directory / "bundle.pem"
        self._bundle.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    @contextmanager
    def served(self) -> Iterator[Mapping[str, Any]]:
        """The setting `auth` of a registry that believes it."""
        with serving(self._answer) as host:
            yield {
                "token": {
                    "realm": f"http://{host}/token?account=any",
                    "service": "tests, with a comma",
                    "issuer": "tests",
                    "rootcertbundle": str(self._bundle),
                }
            }

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        query = urllib.parse.parse_qsl(urllib.parse.urlsplit(request.path).query)
        header = request.headers.get("Authorization")
        user = base64.b64decode(header.removeprefix("Basic ")).decode() if header else None
        self.asked.append((user, query))
        if user not in (None, f"{USER}:{PASSWORD}"):
            reply(request, 401, b"{}")
            return
        access = []
        for scope in (value for name, value in query if name == "scope"):
            kind, repository, actions = scope.split(":")
            # Anybody may read what is public.
            allowed = actions.split(",") if user or repository.startswith("public/") else []
            access.append({"type": kind, "name": repository, "actions": allowed})
        now = int(time.time())
        claims = {
            "iss": "tests",
            "sub": user or "",
            "aud": "tests, with a comma",
            "exp": now + self.seconds,
            "nbf": now - 100,
            "iat": now,
            "jti": uuid.uuid4().hex,
            "access": access,
        }
        headers = {"x5c": [base64.b64encode(self._der).decode()]}
        token = jwt.encode(claims, self._key, algorithm="ES256", headers=headers)
        reply(request, 200, json.dumps({"token": token}).encode())


def reply(
    request: BaseHTTPRequestHandler, status: int, content: bytes, headers: Mapping[str, str] | None = None
) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(content)


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server on this machine; its host and port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(ConnectionError):
                answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a registry answers to a request."""

    status: int
    headers: Mapping[str, str]
    content: bytes


def forward(request: BaseHTTPRequestHandler, host: str) -> Forwarded:
    """Ask a registry the same."""
    connection = http.client.HTTPConnection(host, timeout=30)
    try:
        kept = {name: value for name, value in request.headers.items() if name in ("Accept", "Range", "Authorization")}
        connection.request("GET", request.path, headers=kept)
        response = connection.getresponse()
        content = response.read()
        names = ("Content-Type", "Content-Range", "Docker-Content-Digest", "Www-Authenticate")
        headers = {name: value for name, value in response.getheaders() if name in names}
        return Forwarded(response.status, headers, content)
    finally:
        connection.close()
