"""Causes of exceptions that environments raise: real libraries, a real server that answers badly, and nobody at all."""

from __future__ import annotations

import asyncio
import errno
import http.server
import itertools
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import httpx
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.causes import REASONS, Evidence
from kuberoll_workers.environments.exception_causes import cause_of
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
