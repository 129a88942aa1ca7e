"""A stand-in for the Hugging Face hub, over HTTP: one model, whose branches can be pushed to."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-policy"


class Hub(ThreadingHTTPServer):
    """The routes of the Hugging Face hub that its client asks for a model's files.

    Attributes:
        commit: That its branches are at; another one is a push. A commit that is asked for has the same files.
        asked: Names of the files that were downloaded.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.directory = directory
        self.commit = "0" * 40
        self.asked: list[str] = []


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    @property
    def commit(self) -> str:
        """The commit of the revision in the path."""
        asked = next((part for part in self.path.split("/") if re.fullmatch("[0-9a-f]{40}", part)), None)
        return asked or self.server.commit

    def do_GET(self) -> None:
        names = sorted(path.name for path in self.server.directory.iterdir())
        if self.path.startswith("/api/models/me/tiny/revision/"):
            siblings = [{"rfilename": name} for name in names]
            self._answer(json.dumps({"id": "me/tiny", "sha": self.commit, "siblings": siblings}).encode())
        elif self.path.startswith("/api/models/me/tiny/tree/"):
            sizes = {name: (self.server.directory / name).stat().st_size for name in names}
            entries = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
            self._answer(json.dumps(entries).encode())
        elif (name := self.path.rpartition("/")[2]) in names and self.path.startswith("/me/tiny/resolve/"):
            if self.command == "GET":
                self.server.asked.append(name)
            self._answer((self.server.directory / name).read_bytes(), etag=name)
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _answer(self, body: bytes, etag: str | None = None) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        if etag is not None:
            self.send_header("etag", f'"{etag}"')
            self.send_header("x-repo-commit", self.commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

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
            server.shutdown()
            thread.join()
