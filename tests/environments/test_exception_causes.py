"""Causes of exceptions that environments raise: real libraries, a real server that answers badly, and nobody at all."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import http.server
import itertools
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.causes import REASONS, Cause, Evidence
from kuberoll_workers.data.tracebacks import stack_of
from kuberoll_workers.environments.exception_causes import cause_of, cause_of_wait
from kuberoll_workers.environments.interface import Unavailable
from kuberoll_workers.environments.outcome import StepRaised, fault_of
from kuberoll_workers.sandboxes.errors import SandboxLost, SandboxUnavailable
from kuberoll_workers.sandboxes.images.errors import ImageNotFound, RegistryUnreachable


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers with the status that the path names; `/cut` closes the connection without an answer."""

    def do_GET(self) -> None:
        if self.path == "/cut":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(int(self.path[1:]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def nobody() -> Iterator[str]:
    """A port that is taken, and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def by_requests(url: str) -> None:
    requests.get(url, timeout=5).raise_for_status()


def by_httpx(url: str) -> None:
    httpx.get(url, timeout=5).raise_for_status()


def by_urllib(url: str) -> None:
    urllib.request.urlopen(url, timeout=5).close()


def by_aiohttp(url: str) -> None:
    async def get() -> None:
        async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(url):
            pass

    asyncio.run(get())


CLIENTS = [by_requests, by_httpx, by_urllib, by_aiohttp]


def raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("get", CLIENTS)
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_service_that_fails_is_out_of_reach(server: str, get: Callable[[str], None], status: int) -> None:
    found = cause_of(raised(lambda: get(f"{server}/{status}")))
    assert (found.reason, found.kind) == ("DependencyUnavailable", "infrastructure")
    assert found.evidence == Evidence(http_status=status)


@pytest.mark.parametrize("get", CLIENTS)
@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_service_that_refuses_what_it_is_asked_is_the_environment_s_doing(
    server: str, get: Callable[[str], None], status: int
) -> None:
    assert cause_of(raised(lambda: get(f"{server}/{status}"))).kind == "environment"


@pytest.mark.parametrize("get", CLIENTS)
def test_nobody_listens(nobody: str, get: Callable[[str], None]) -> None:
    found = cause_of(raised(lambda: get(nobody)))
    assert (found.reason, found.evidence.error) == ("DependencyUnavailable", "ECONNREFUSED")


@pytest.mark.parametrize("get", CLIENTS)
def test_a_connection_that_is_cut(server: str, get: Callable[[str], None]) -> None:
    assert cause_of(raised(lambda: get(f"{server}/cut"))).kind == "infrastructure"


@pytest.mark.parametrize("get", CLIENTS)
def test_a_name_that_cannot_be_looked_up(get: Callable[[str], None]) -> None:
    # `.invalid` is reserved: no resolver knows it (RFC 6761).
    assert cause_of(raised(lambda: get("http://judge.invalid/"))).reason == "DependencyUnavailable"


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EMFILE", "ENOMEM", "EIO"])
def test_a_machine_that_has_no_more(name: str) -> None:
    found = cause_of(OSError(getattr(errno, name), "no more"))
    assert (found.reason, found.evidence.error) == ("ResourceExhausted", name)


@pytest.mark.parametrize(
    "error", [KeyError("x"), ValueError(), FileNotFoundError(2, "no"), TimeoutError(), MemoryError()]
)
def test_a_bug_is_the_environment_s(error: Exception) -> None:
    assert cause_of(error).reason == "EnvironmentRaised"


def test_an_error_that_was_handled_excuses_no_bug(nobody: str) -> None:
    def step() -> None:
        try:
            by_requests(nobody)
        except requests.ConnectionError:
            dict[str, str]()["fallback"]

    assert cause_of(raised(step)).reason == "EnvironmentRaised"


@pytest.mark.parametrize("hidden", [False, True])
def test_an_error_that_the_handler_raises_itself_has_the_handled_one_as_its_cause(nobody: str, hidden: bool) -> None:
    def step() -> None:
        try:
            by_requests(nobody)
        except requests.ConnectionError as error:
            if hidden:
                raise RuntimeError("the judge is gone") from None
            raise RuntimeError(f"the judge is gone: {error}")  # noqa: B904 - as many write it

    assert cause_of(raised(step)).evidence.error == "ECONNREFUSED"


def test_a_function_that_fails_for_the_handler_fails_by_itself(nobody: str) -> None:
    def fallback() -> None:
        raise RuntimeError("there is no fallback")

    def step() -> None:
        try:
            by_requests(nobody)
        except requests.ConnectionError:
            fallback()

    assert cause_of(raised(step)).reason == "EnvironmentRaised"


@pytest.mark.parametrize("get", CLIENTS)
def test_a_service_that_speaks_no_tls(server: str, get: Callable[[str], None]) -> None:
    found = cause_of(raised(lambda: get(server.replace("http:", "https:") + "/200")))
    assert found.reason == "DependencyUnavailable"


class Silent:
    """A port that takes connections and says nothing."""

    def __enter__(self) -> str:
        self._socket = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def in_total(url: str) -> None:
    async def get() -> None:
        limit = aiohttp.ClientTimeout(total=0.05)
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(url):
            pass

    asyncio.run(get())


def in_own_time(url: str) -> None:
    async def get() -> None:
        async with asyncio.timeout(0.05), aiohttp.ClientSession() as session, session.get(url):
            pass

    asyncio.run(get())


def awaited_for(url: str) -> None:
    async def get() -> None:
        async with httpx.AsyncClient(timeout=None) as client:
            await asyncio.wait_for(client.get(url), 0.05)

    asyncio.run(get())


def by_urllib_in_time(url: str) -> None:
    urllib.request.urlopen(url, timeout=0.05).close()


@pytest.mark.parametrize("get", [in_total, in_own_time, awaited_for, by_urllib_in_time])
def test_a_service_that_is_silent_until_python_s_own_timeout_error(get: Callable[[str], None]) -> None:
    with Silent() as url:
        error = raised(lambda: get(url))
    assert type(error) is TimeoutError
    assert cause_of(error).reason == "DependencyUnavailable"


def test_a_time_limit_of_the_environment_s_own_work_is_its_own() -> None:
    async def wait() -> None:
        async with asyncio.timeout(0.001):
            await asyncio.Event().wait()

    assert cause_of(raised(lambda: asyncio.run(wait()))).reason == "EnvironmentRaised"


def test_a_class_that_is_derived_from_a_library_s_is_as_that_is() -> None:
    class JudgeGone(httpx.ConnectError):
        pass

    assert cause_of(JudgeGone("gone")).reason == "DependencyUnavailable"
    assert cause_of(httpx.LocalProtocolError("own")).reason == "EnvironmentRaised"


def test_a_class_of_unavailable_whose_other_base_is_created_first() -> None:
    class JudgeError(RuntimeError):
        def __init__(self, text: str) -> None:
            RuntimeError.__init__(self, text)

    class JudgeGone(JudgeError, Unavailable):
        pass

    assert cause_of(JudgeGone("gone")) == Cause("DependencyUnavailable")


def test_a_connection_that_broke_without_a_number() -> None:
    assert cause_of(ConnectionResetError("Connection lost")).reason == "DependencyUnavailable"
    # It may be a pipe to a program of the environment's own.
    assert cause_of(BrokenPipeError()).reason == "EnvironmentRaised"


def test_a_lock_that_is_taken_is_no_lack_of_a_resource() -> None:
    with tempfile.NamedTemporaryFile() as file, Path(file.name).open() as other:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        error = raised(lambda: fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB))
    assert isinstance(error, BlockingIOError)
    assert cause_of(error).reason == "EnvironmentRaised"


def test_a_process_that_the_system_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("subprocess._fork_exec", full)
    error = raised(lambda: subprocess.run([sys.executable, "-V"], check=False, close_fds=True, preexec_fn=int))
    assert cause_of(error).reason == "ResourceExhausted"


def test_a_database_on_a_disk_that_is_full() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA max_page_count = 2")
    connection.execute("CREATE TABLE t (x)")
    found = cause_of(raised(lambda: connection.execute("INSERT INTO t VALUES (zeroblob(100000))")))
    connection.close()
    assert (found.reason, found.evidence.error) == ("ResourceExhausted", "SQLITE_FULL")
    assert cause_of(sqlite3.OperationalError("no such column")).reason == "EnvironmentRaised"


def test_an_exception_whose_attributes_fail_is_the_environment_s() -> None:
    class Odd(httpx.HTTPError):
        @property
        def status(self) -> int:
            raise RuntimeError("no status")

    assert cause_of(Odd("odd")).reason == "EnvironmentRaised"


def test_a_call_that_is_late_because_a_service_is_silent() -> None:
    def stack_within(call: Callable[[], Any]) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(raised(call)))
        thread.start()
        while True:
            frame = sys._current_frames().get(thread.ident or 0)
            stack = stack_of(frame)
            if stack is not None and ("socket.py" in stack.text or "wait" in stack.text):
                break
        thread.join()
        return stack

    with Silent() as url:
        late = stack_within(lambda: requests.get(url, timeout=0.5))
    assert cause_of_wait(late).reason == "DependencyUnavailable"

    def own() -> None:
        threading.Event().wait(0.2)
        raise ValueError

    assert cause_of_wait(stack_within(own)).reason == "EnvironmentSilent"
    assert cause_of_wait(None).reason == "EnvironmentSilent"


def test_an_error_that_another_was_raised_from_is_its_cause(nobody: str) -> None:
    def step() -> None:
        try:
            by_httpx(nobody)
        except httpx.ConnectError as error:
            raise RuntimeError("the judge is gone") from error

    assert cause_of(raised(step)).evidence.error == "ECONNREFUSED"


def test_the_first_error_knows_best_and_the_others_add_evidence() -> None:
    def chained(*errors: BaseException) -> BaseException:
        for outer, inner in itertools.pairwise(errors):
            outer.__cause__ = inner
        return errors[0]

    answer = urllib.error.HTTPError("http://registry/v2", 503, "busy", Any, None)  # type: ignore[arg-type]
    found = cause_of(chained(SandboxUnavailable("no"), RegistryUnreachable("503"), answer))
    assert (found.reason, found.evidence) == ("ImageUnavailable", Evidence(http_status=503))
    found = cause_of(chained(SandboxUnavailable("no"), ImageNotFound("no such image")))
    assert (found.reason, found.kind) == ("ImageRefused", "data")
    found = cause_of(chained(SandboxLost("gone"), ConnectionResetError(errno.ECONNRESET, "reset")))
    assert (found.reason, found.evidence.error) == ("SandboxLost", "ECONNRESET")


def test_what_an_environment_says_itself() -> None:
    found = cause_of(Unavailable("the judge", evidence=Evidence(http_status=500)))
    assert (found.reason, found.evidence.http_status) == ("DependencyUnavailable", 500)


def test_a_fault_that_was_raised_from_something_has_its_cause() -> None:
    fault = StepRaised("the task could not be played")
    fault.__cause__ = OSError(errno.ENOSPC, "full")
    assert fault_of(fault).cause.reason == "ResourceExhausted"


@given(
    st.recursive(st.sampled_from([KeyError, ValueError, OSError, Unavailable]), lambda kids: st.lists(kids, max_size=3))
)
def test_every_exception_has_a_cause(shape: Any) -> None:
    def made(shape: Any) -> Exception:
        if isinstance(shape, type):
            assert issubclass(shape, Exception)
            return shape("x")
        parts = [made(part) for part in shape]
        if len(parts) > 1:
            return ExceptionGroup("several", parts)
        outer = RuntimeError("one")
        outer.__cause__ = parts[0] if parts else None
        return outer

    error = made(shape)
    # A circle, as careless code makes it.
    error.__context__ = error.__context__ or ValueError("around")
    error.__context__.__context__ = None
    assert cause_of(error).reason in REASONS
