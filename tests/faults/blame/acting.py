"""An environment whose steps call a judge, use up what there is, or are wrong, as their row's metadata says."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import http.client
import os
import queue
import resource
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kuberoll_workers.environments.interface import EnvironmentReturn, Unavailable, UnusableRow

SECONDS = 0.4
"""Time limit of the judge's clients."""


class JudgeFailed(Exception):
    """An environment's own words for its judge's failure."""


def by_requests(url: str) -> Any:
    import requests

    answer = requests.post(url, json={}, timeout=SECONDS)
    answer.raise_for_status()
    return answer.json()


def by_session_with_retries(url: str) -> Any:
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    with requests.Session() as session:
        retry = Retry(total=1, backoff_factor=0.01, status_forcelist=[500, 502, 503, 504], allowed_methods=None)
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        answer = session.post(url, json={}, timeout=SECONDS)
    answer.raise_for_status()
    return answer.json()


def by_urllib3(url: str) -> Any:
    import urllib3

    with urllib3.PoolManager(retries=False, timeout=SECONDS) as pool:
        answer = pool.request("POST", url)
    if answer.status >= 400:
        raise urllib3.exceptions.HTTPError(f"the judge answered {answer.status}")
    return answer.json()


def by_httpx(url: str) -> Any:
    import httpx

    return httpx.post(url, json={}, timeout=SECONDS).raise_for_status().json()


def by_httpx_async(url: str) -> Any:
    import httpx

    async def ask() -> Any:
        async with httpx.AsyncClient(timeout=SECONDS) as client:
            return (await client.post(url, json={})).raise_for_status().json()

    return asyncio.run(ask())


def by_urllib(url: str) -> Any:
    with urllib.request.urlopen(url, data=b"{}", timeout=SECONDS) as answer:
        return answer.read()


def by_http_client(url: str) -> Any:
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=SECONDS)
    try:
        connection.request("POST", parts.path, b"{}")
        return connection.getresponse().read()
    finally:
        connection.close()


def by_aiohttp(url: str) -> Any:
    import aiohttp

    async def ask() -> Any:
        limit = aiohttp.ClientTimeout(total=SECONDS)
        async with (
            aiohttp.ClientSession(raise_for_status=True, timeout=limit) as session,
            session.post(url, json={}) as answer,
        ):
            return await answer.json()

    return asyncio.run(ask())


def by_aiohttp_in_time(url: str) -> Any:
    """With a time limit that is not the library's."""
    import aiohttp

    async def ask() -> Any:
        async with (
            asyncio.timeout(SECONDS),
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.post(url, json={}) as answer,
        ):
            return await answer.json()

    return asyncio.run(ask())


def by_httpx_waited_for(url: str) -> Any:
    import httpx

    async def ask() -> Any:
        async with httpx.AsyncClient(timeout=None) as client:
            return (await asyncio.wait_for(client.post(url, json={}), SECONDS)).raise_for_status().json()

    return asyncio.run(ask())


def by_openai(url: str) -> Any:
    import openai

    with openai.OpenAI(base_url=url, api_key="none", timeout=SECONDS, max_retries=0) as client:
        return client.chat.completions.create(model="judge", messages=[{"role": "user", "content": "?"}])


CLIENTS: dict[str, Callable[[str], Any]] = {
    "requests": by_requests,
    "session": by_session_with_retries,
    "httpx": by_httpx,
    "httpx_async": by_httpx_async,
    "httpx_waited_for": by_httpx_waited_for,
    "urllib": by_urllib,
    "urllib3": by_urllib3,
    "http_client": by_http_client,
    "aiohttp": by_aiohttp,
    "aiohttp_in_time": by_aiohttp_in_time,
    "openai": by_openai,
}


def _plainly(call: Callable[[], Any]) -> Any:
    return call()


def _from(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise JudgeFailed("the judge failed") from error


def _unlinked(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise JudgeFailed(f"the judge failed: {error}")  # noqa: B904 - as many write it


def _from_none(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception:
        raise JudgeFailed("the judge failed") from None


def _thrice(call: Callable[[], Any]) -> Any:
    last: Exception | None = None
    for _ in range(2):
        try:
            return call()
        except Exception as error:
            last = error
    raise JudgeFailed("the judge failed again and again") from last


def _in_group(call: Callable[[], Any]) -> Any:
    async def ask() -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(call))

    return asyncio.run(ask())


def _said(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception:
        raise Unavailable("the judge")  # noqa: B904 - the docs' way


WAYS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "plainly": _plainly,
    "from": _from,
    "unlinked": _unlinked,
    "from none": _from_none,
    "thrice": _thrice,
    "group": _in_group,
    "said": _said,
}
"""What an environment does with its client's exception."""


def _fill_disk() -> None:
    with Path("/dev/full").open("wb") as file:
        file.write(b"x")


def _fill_disk_by_text() -> None:
    with Path("/dev/full").open("w") as file:
        print("x" * 100_000, file=file)


def _fill_database() -> None:
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("PRAGMA max_page_count = 2")
        connection.execute("CREATE TABLE t (x)")
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
    finally:
        connection.close()


def _use_up_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept: list[socket.socket] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 8, hard))
    try:
        while True:
            kept.append(socket.socket())
    finally:
        for one in kept:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _by_errno(number: int) -> Callable[[], None]:
    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


def _killed_from_outside(number: int) -> Callable[[], None]:
    """By another process, as the kernel's or the kubelet's kill is; it cannot be told by whom."""

    def act() -> None:
        subprocess.run(["sh", "-c", f"kill -{number} {os.getpid()}"], check=False)
        threading.Event().wait()

    return act


RESOURCES: dict[str, Callable[[], Any]] = {
    "disk full": _fill_disk,
    "disk full, text": _fill_disk_by_text,
    "database full": _fill_database,
    "descriptors": _use_up_descriptors,
    "quota of the disk": _by_errno(errno.EDQUOT),
    "disk broken": _by_errno(errno.EIO),
    "network file system gone": _by_errno(errno.ESTALE),
    "no route": _by_errno(errno.EHOSTUNREACH),
    "killed": _killed_from_outside(signal.SIGKILL),
    "terminated": _killed_from_outside(signal.SIGTERM),
}
"""What machines do to environments."""


def _fallback_with_a_bug(url: str) -> None:
    try:
        by_urllib(url)
    except OSError:
        dict[str, int]()["fallback"]


def _lock_twice(_: str) -> None:
    with tempfile.NamedTemporaryFile() as file, Path(file.name).open() as other:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _own_time_limit(_: str) -> None:
    async def late() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    asyncio.run(late())


def _own_program_late(_: str) -> None:
    subprocess.run(["sleep", "60"], timeout=0.05, check=False)


def _own_pipe(_: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        os.write(writing, b"x")
    finally:
        os.close(writing)


def _judge_misread(url: str) -> None:
    by_urllib(url)
    int("no number")


def _raised(error: Exception) -> Callable[[str], None]:
    def act(_: str) -> None:
        raise error

    return act


BUGS: dict[str, Callable[[str], Any]] = {
    "bug in the fallback": _fallback_with_a_bug,
    "lock taken twice": _lock_twice,
    "own time limit": _own_time_limit,
    "own program late": _own_program_late,
    "own pipe": _own_pipe,
    "queue empty": lambda _: queue.Queue().get_nowait(),
    "no file": lambda _: Path("/nowhere/at/all").read_text(),
    "directory": lambda _: Path("/tmp").read_text(),
    "no program": lambda _: subprocess.run(["/nowhere/at/all"], check=False),
    "program fails": lambda _: subprocess.run(["false"], check=True),
    "assertion": _raised(AssertionError()),
    "no key": lambda _: dict[str, int]()["k"],
    "division": lambda _: 1 / 0,
    "no import": lambda _: __import__("nowhere_at_all"),
    "syntax": lambda _: compile("(", "x", "exec"),
    "not implemented": _raised(NotImplementedError()),
    "unicode": lambda _: b"\xff".decode(),
    "database": lambda _: sqlite3.connect(":memory:").execute("SELECT nothing"),
    "no such scheme": lambda _: by_requests("judge"),
    "no such scheme, httpx": lambda _: by_httpx("judge"),
    "no such scheme, urllib": lambda _: by_urllib("judge:1"),
}
"""What an environment's code does wrong; each is given a URL where nobody is."""


class Acting:
    """One turn; the reward is the row's `worth`."""

    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        for state in metadata:
            if not (state.get("once") and by_urllib_seen(state)):
                act(state)
        size = len(logs)
        observations = [{"role": "environment", "content": "well"}] * size
        return EnvironmentReturn(observations, None, None, [state["worth"] for state in metadata], [True] * size)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


def by_urllib_seen(state: dict[str, Any]) -> bool:
    """True if the row's step was begun before."""
    with urllib.request.urlopen(f"{state['service']}/seen/{state['key']}") as answer:
        return bool(answer.read() != b"0")


def act(state: dict[str, Any]) -> None:
    """Do what a row says."""
    does, what = state["do"]
    if does == "judge":
        client, url, way = what
        WAYS[way](lambda: CLIENTS[client](url))
    elif does == "resource":
        RESOURCES[what]()
    elif does == "bug":
        BUGS[what](state["nobody"])
    elif does == "misread":
        _judge_misread(what)
    elif does == "row":
        raise UnusableRow(what)
    elif does == "row from":
        raise UnusableRow("the row names no file that there is") from FileNotFoundError(what)
    elif does == "sleep":
        threading.Event().wait(what)
