"""A registry of images on this machine, with as much of the protocol as builders need to push and to look."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
import uuid
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit


class Registry(http.server.ThreadingHTTPServer):
    """Blobs and manifests, in memory.

    Args:
        host, port: Where it listens; empty: at all addresses; 0: at any port.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.uploads: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Registry
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        *_, kind, reference = self.path.split("/")
        if self.path == "/v2/":
            self._answer(200)
        elif (kind, reference) == ("tags", "list") and self.server.manifests:
            tags = [tag for tag in self.server.manifests if ":" not in tag]
            name = self.path.removeprefix("/v2/").removesuffix("/tags/list")
            self._answer(200, json.dumps({"name": name, "tags": tags}).encode(), {"Content-Type": "application/json"})
        elif kind == "blobs" and reference in self.server.blobs:
            self._answer(200, self.server.blobs[reference])
        elif kind == "manifests" and reference in self.server.manifests:
            media, content = self.server.manifests[reference]
            self._answer(200, content, {"Content-Type": media, "Docker-Content-Digest": _digest(content)})
        else:
            self._answer(404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._read()
        upload = uuid.uuid4().hex
        self.server.uploads[upload] = b""
        self._answer(202, headers={"Location": f"{urlsplit(self.path).path.rstrip('/')}/{upload}"})

    def do_PATCH(self) -> None:
        upload = urlsplit(self.path).path.rpartition("/")[2]
        self.server.uploads[upload] += self._read()
        end = len(self.server.uploads[upload]) - 1
        self._answer(202, headers={"Location": self.path, "Range": f"0-{end}"})

    def do_PUT(self) -> None:
        place = urlsplit(self.path)
        name, content = place.path.rpartition("/")[2], self._read()
        if "/uploads/" in place.path:
            content = self.server.uploads.pop(name) + content
            assert parse_qs(place.query)["digest"] == [_digest(content)]
            self.server.blobs[_digest(content)] = content
        else:
            media = self.headers["Content-Type"]
            self.server.manifests[name] = self.server.manifests[_digest(content)] = (media, content)
        self._answer(201, headers={"Docker-Content-Digest": _digest(content)})

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _answer(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        return


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@contextlib.contextmanager
def running_registry() -> Iterator[Registry]:
    """A registry, until the end of the block."""
    with Registry() as registry:
        thread = threading.Thread(target=registry.serve_forever, daemon=True)
        thread.start()
        try:
            yield registry
        finally:
            registry.shutdown()
            thread.join()
