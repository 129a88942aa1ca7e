"""A stand-in for the Hugging Face hub, over HTTP: one model, whose branches can be pushed to."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-policy"

_LARGE = (".safetensors", ".bin")
_BLOCK = 64 << 10


class Hub(ThreadingHTTPServer):
    """The routes of the Hugging Face hub that its client asks for a model's files.

    Attributes:
        commit: That its branches are at; another one is a push. A commit that is asked for has the same files.
        asked: Names of the files that were downloaded.
        sent: Bytes of files that were sent.
        token: That whoever reads must have; None: everybody may.
        false_digests: Names of files of which it states the digest of something else.
        bytes_per_second: Of all downloads together; None: not limited.
        held: While it is cleared, files with weights stop in the middle.
        halfway: Set when one has.
    """

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.directory = directory
        self.commit = "0" * 40
        self.asked: list[str] = []
        self.sent = 0
        self.token: str | None = None
        self.false_digests: set[str] = set()
        self.bytes_per_second: float | None = None
        self.held = threading.Event()
        self.held.set()
        self.halfway = threading.Event()
        self._line = threading.Lock()

    def pass_line(self, size: int) -> None:
        """Wait until that many bytes would have passed."""
        with self._line:
            self.sent += size
            if self.bytes_per_second is not None:
                time.sleep(size / self.bytes_per_second)

    def digest(self, name: str) -> str:
        """As the hub states it: SHA-256 of large files, git's name of others."""
        data = (self.directory / name).read_bytes()
        if name in self.false_digests:
            data = b"something else"
        if name.endswith(_LARGE):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    @property
    def commit(self) -> str:
        """The commit of the revision in the path."""
        asked = next(
            (part for part in self.path.partition("?")[0].split("/") if re.fullmatch("[0-9a-f]{40}", part)), None
        )
        return asked or self.server.commit

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        names = sorted(file.name for file in self.server.directory.iterdir())
        token = self.server.token
        if token is not None and self.headers.get("authorization") != f"Bearer {token}":
            self._refuse(401, "RepoNotFound")
        elif path.startswith("/api/models/me/tiny/revision/"):
            if path.rpartition("/")[2] not in ("main", self.commit):
                self._refuse(404, "RevisionNotFound")
                return
            blobs = "blobs=" in self.path
            siblings = [{"rfilename": name, **(self._blob(name) if blobs else {})} for name in names]
            self._answer(json.dumps({"id": "me/tiny", "sha": self.commit, "siblings": siblings}).encode())
        elif path.startswith("/api/models/me/tiny/tree/"):
            sizes = {name: (self.server.directory / name).stat().st_size for name in names}
            entries = [
                {"type": "file", "path": name, "size": size, "oid": self.server.digest(name)}
                for name, size in sizes.items()
            ]
            self._answer(json.dumps(entries).encode())
        elif (name := path.rpartition("/")[2]) in names and path.startswith("/me/tiny/resolve/"):
            if self.command == "GET":
                self.server.asked.append(name)
            self._send(name)
        else:
            self._refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def _blob(self, name: str) -> dict[str, object]:
        size = (self.server.directory / name).stat().st_size
        digest = self.server.digest(name)
        if not name.endswith(_LARGE):
            return {"size": size, "blobId": digest}
        return {"size": size, "blobId": "1" * 40, "lfs": {"sha256": digest, "size": size, "pointerSize": 134}}

    def _send(self, name: str) -> None:
        body = (self.server.directory / name).read_bytes()
        size, begin = len(body), 0
        if (asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))) is not None:
            begin = int(asked[1])
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("content-range", f"bytes {begin}-{size - 1}/{size}")
        self.send_header("content-length", str(size - begin))
        self.send_header("etag", f'"{self.server.digest(name)}"')
        self.send_header("x-repo-commit", self.commit)
        self.end_headers()
        if self.command != "GET":
            return
        for place in range(begin, size, _BLOCK):
            if name.endswith(_LARGE) and place - begin >= (size - begin) // 2 and not self.server.held.is_set():
                self.wfile.flush()
                self.server.halfway.set()
                self.server.held.wait()
            block = body[place : place + _BLOCK]
            self.server.pass_line(len(block))
            try:
                self.wfile.write(block)
            except ConnectionError:
                return

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("x-error-code", code)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return None


def variables(hub: Hub, home: Path) -> dict[str, str]:
    """Environment variables of a process that uses this hub, with a cache of its own."""
    url = f"http://127.0.0.1:{hub.server_port}"
    return {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def serving_hub(directory: Path) -> Iterator[Hub]:
    """A hub with one model, `me/tiny`, whose files are copied into the directory."""
    shutil.copytree(TINY, directory)
    with Hub(directory) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.held.set()
            server.shutdown()
            thread.join()
