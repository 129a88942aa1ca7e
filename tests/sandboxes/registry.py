"""A registry of the tests' own: it serves the layouts that they write, to whoever has the password."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

SECRET: Final = "private"
"""Repositories whose names begin with it ask for a password."""


@contextmanager
def serving(layouts: Mapping[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve layouts, by the names of their repositories.

    Yields:
        Host and port, and the paths that were asked for, as they come.
    """
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            parts = self.path.split("/")
            if self.path == "/v2/":
                self._answer(200, b"{}")
            elif len(parts) != 5 or parts[2] not in layouts:
                self._answer(404, b'{"errors":[{"code":"NAME_UNKNOWN","message":"no such repository"}]}')
            elif parts[2].startswith(SECRET):
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="tests"')
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self._serve(layouts[parts[2]], parts[3], parts[4])

        do_HEAD = do_GET

        def _serve(self, layout: Path, kind: str, name: str) -> None:
            digest = name
            if kind == "manifests" and not name.startswith("sha256:"):
                digest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
            path = layout / "blobs" / Path(*digest.split(":"))
            if not path.exists():
                self._answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"no such manifest"}]}')
                return
            content = path.read_bytes()
            media = json.loads(content)["mediaType"] if kind == "manifests" else "application/octet-stream"
            self._answer(200, content, media)

        def _answer(self, status: int, content: bytes, media: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", media)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
            self.send_header("Docker-Content-Digest", f"sha256:{hashlib.sha256(content).hexdigest()}")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()
