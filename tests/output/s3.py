"""A real S3-compatible server, whose uploads can be made to fail or to be slow."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

Start = Callable[..., Any]


class S3Server:
    """moto's server behind a door.

    Attributes:
        url: Where it answers.
        puts: Paths of the uploads that were let in.
        fail_next: How many uploads are answered with `status` before the next is let in.
        lose_next: How many uploads are carried out, but answered with `status`.
        refused: Endings of paths whose uploads are answered with `status`, always.
        held: While it is cleared, uploads wait.
        waiting: Set when an upload has come.
        upload_seconds: What an upload takes longer.
        listings: How many listings were answered.
    """

    def __init__(self) -> None:
        self.puts: list[str] = []
        self.fail_next = 0
        self.lose_next = 0
        self.refused: tuple[str, ...] = ()
        self.status = "503 Slow Down"
        self.upload_seconds = 0.0
        self.listings = 0
        self.held = threading.Event()
        self.held.set()
        self.waiting = threading.Event()
        self._app: Any = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._door, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _door(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].count("/") > 1:
            self.waiting.set()
            self.held.wait()
            if self.fail_next > 0 or environ["PATH_INFO"].endswith(self.refused):
                self.fail_next = max(0, self.fail_next - 1)
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                return Response("<Error><Code>SlowDown</Code></Error>", status=self.status)(environ, start)
            time.sleep(self.upload_seconds)
            self.puts.append(environ["PATH_INFO"])
            if self.lose_next > 0:
                self.lose_next -= 1
                list(self._app(environ, lambda *_: lambda _: None))
                return Response("<Error><Code>InternalError</Code></Error>", status=self.status)(environ, start)
        self.listings += "list-type" in environ.get("QUERY_STRING", "")
        answer: Iterable[bytes] = self._app(environ, start)
        return answer

    def close(self) -> None:
        self.held.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One for all tests; each takes a bucket of its own."""
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[S3Server, str]]:
    """The server and the URI of an empty bucket, for this process and the processes it starts."""
    import fsspec

    for name, value in {
        "AWS_ENDPOINT_URL": s3_server.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        # The store's library tries again too; with its own waits tests would take long.
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").clear_instance_cache()
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    fsspec.filesystem("s3").mkdir(bucket)
    yield s3_server, f"s3://{bucket}"
    s3_server.fail_next = s3_server.lose_next = 0
    s3_server.refused = ()
    s3_server.upload_seconds = 0.0
    s3_server.held.set()
    fsspec.filesystem("s3").clear_instance_cache()
