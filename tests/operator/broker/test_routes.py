"""The broker over HTTP: what is answered to whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from yarl import URL

from kuberoll_api.http_server import serving
from kuberoll_api.sandboxes import SandboxAnswer
from kuberoll_operator.broker.routes import MOST_BYTES, BrokerRoutes
from kuberoll_operator.kube.errors import ApiError
from kuberoll_operator.model import Key
from tests.operator.broker.memory import refused
from tests.operator.broker.support import WORKER, request
from tests.operator.broker.test_jobs import Reader, jobs_of
from tests.operator.support import NAMESPACE, condition

JOB = Key(NAMESPACE, "tasks")
TOKEN = {"Authorization": "Bearer token of one"}
BODY = request().model_dump_json(by_alias=True)


class Notes:
    """Instead of a broker: notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.error: ApiError | None = None

    async def want(self, sandbox: str, wanted: Any, context: Any, *, seconds: float) -> SandboxAnswer:
        self.asked.append(("want", sandbox, wanted.image, context.key))
        assert seconds == 20
        return SandboxAnswer(state="Running", address="10.0.0.1:8791")

    async def ending(self, sandbox: str, job: Key, *, seconds: float) -> SandboxAnswer:
        self.asked.append(("ending", sandbox, job, seconds))
        return SandboxAnswer(state="Ended", reason="evicted", event="Evicted")

    async def release(self, sandbox: str, job: Key) -> None:
        self.asked.append(("release", sandbox, job))
        if self.error is not None:
            raise self.error

    def renew(self, job: Key, worker: str, wanted: frozenset[str]) -> None:
        self.asked.append(("renew", job, worker, wanted))


class Place:
    """A broker's address, and a client."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session, self._url = session, f"http://127.0.0.1:{port}"
        self.broker, self.reader = Notes(), Reader()
        self.is_ready = True

    async def ask(
        self, method: str, path: str, body: str | bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and content of an answer; paths go out as they are written."""
        url = URL(f"{self._url}{path}", encoded=True)
        given = TOKEN if headers is None else headers
        async with self._session.request(method, url, data=body, headers=given) as answer:
            text = await answer.text()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text


@asynccontextmanager
async def running() -> AsyncIterator[Place]:
    async with aiohttp.ClientSession() as session:
        place = Place(session, 0)
        place.reader.put()
        routes = BrokerRoutes(place.broker, jobs_of(place.reader), lambda: place.is_ready).routes()  # type: ignore[arg-type]
        async with serving(routes, host="127.0.0.1", port=0, most_bytes=MOST_BYTES) as port:
            place._url = f"http://127.0.0.1:{port}"
            yield place


async def test_what_workers_ask_is_answered() -> None:
    async with running() as place:
        assert await place.ask("GET", "/v1/jobs/rollouts/tasks") == (204, "")
        found = await place.ask("PUT", "/v1/jobs/rollouts/tasks/sandboxes/sb-1", BODY)
        assert found == (200, {"state": "Running", "address": "10.0.0.1:8791", "reason": "", "event": ""})
        found = await place.ask("GET", "/v1/jobs/rollouts/tasks/sandboxes/sb-1?wait=2.5")
        assert found == (200, {"state": "Ended", "address": None, "reason": "evicted", "event": "Evicted"})
        assert (await place.ask("GET", "/v1/jobs/rollouts/tasks/sandboxes/sb-1?wait=long"))[0] == 400
        assert await place.ask("DELETE", "/v1/jobs/rollouts/tasks/sandboxes/sb-1") == (204, "")
        names = json.dumps({"names": ["sb-1", "sb-2"], "ofANewerRelease": 1})
        assert await place.ask("PUT", f"/v1/jobs/rollouts/tasks/workers/{WORKER}", names) == (204, "")
        assert place.broker.asked == [
            ("want", "sb-1", "example.org/task:1", JOB),
            ("ending", "sb-1", JOB, 2.5),
            ("release", "sb-1", JOB),
            ("renew", JOB, WORKER, frozenset({"sb-1", "sb-2"})),
        ]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic token of one"},
        {"Authorization": "token of one"},
        {"Authorization": "Bearer \xfftoken of one"},
    ],
)
async def test_whoever_has_no_token_is_told_nothing(headers: dict[str, str]) -> None:
    async with running() as place:
        for method, path in (
            ("GET", "/v1/jobs/rollouts/tasks"),
            ("PUT", "/v1/jobs/rollouts/tasks/sandboxes/sb-1"),
            ("DELETE", "/v1/jobs/rollouts/tasks/sandboxes/sb-1"),
            ("PUT", "/v1/jobs/rollouts/tasks/workers/w"),
            ("GET", "/v1/jobs/rollouts/none"),
        ):
            status, answer = await place.ask(method, path, BODY, headers)
            assert status == 401
            assert answer["error"]
        assert not place.broker.asked


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"environment": "tasks"}',
        b'{"names": 7}',
        b"[" * 100_000,
        BODY.replace("example.org/task:1", "x" * 5000).encode(),
        BODY.replace(WORKER, "../worker").encode(),
    ],
)
async def test_what_is_no_request_is_a_mistake(body: bytes) -> None:
    async with running() as place:
        status, answer = await place.ask("PUT", "/v1/jobs/rollouts/tasks/sandboxes/sb-1", body)
        assert status == 400
        assert answer["error"]
        assert not place.broker.asked


@pytest.mark.parametrize("wait", ["soon", "nan", "inf", "1e999", "%00", "1;2"])
async def test_what_is_no_time_to_wait_is_a_mistake(wait: str) -> None:
    async with running() as place:
        status, answer = await place.ask("PUT", f"/v1/jobs/rollouts/tasks/sandboxes/sb-1?wait={wait}", BODY)
        assert status == 400
        assert answer["error"]
        assert not place.broker.asked


@pytest.mark.parametrize(
    "body", [b"{", b'{"names": ["A"]}', b'{"names": ["a", "../b"]}', b'{"names": {}}', b'{"names": [null]}']
)
async def test_what_is_no_list_is_a_mistake(body: bytes) -> None:
    async with running() as place:
        assert (await place.ask("PUT", "/v1/jobs/rollouts/tasks/workers/w", body))[0] == 400
        assert not place.broker.asked


async def test_a_list_may_be_long_and_no_request_huge() -> None:
    async with running() as place:
        names = [f"sb-0a1b2c3d-{number}" for number in range(16_384)]
        path = "/v1/jobs/rollouts/tasks/workers/w"
        assert (await place.ask("PUT", path, json.dumps({"names": names})))[0] == 204
        assert (await place.ask("PUT", path, json.dumps({"names": [*names, "one-more"]})))[0] == 400
        assert (await place.ask("PUT", path, b" " * (MOST_BYTES + 1)))[0] == 413
        assert len(place.broker.asked) == 1


@pytest.mark.parametrize(
    "name", ["SB", "-a", "a-", "a" * 41, "a.b", "a_b", "%2e%2e", "a%2Fb", "a%00", "a%0A", "%F0%9F"]
)
async def test_what_is_no_name_of_a_sandbox_is_a_mistake(name: str) -> None:
    async with running() as place:
        for method in ("PUT", "DELETE"):
            status, _ = await place.ask(method, f"/v1/jobs/rollouts/tasks/sandboxes/{name}", BODY)
            assert status == 400
        assert not place.broker.asked


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs/rollouts/..%2Ftasks",
        "/v1/jobs/rollouts/tasks%2Fstatus",
        "/v1/jobs/rollouts/tasks%3Fx",
        "/v1/jobs/rollouts%2Frolloutjobs%2Ftasks%3F/tasks",
        "/v1/jobs/%2e%2e/%2e%2e%2f%2e%2e%2fsecrets",
        "/v1/jobs/rollouts/tasks%00",
    ],
)
async def test_names_of_jobs_lead_nowhere_else(path: str) -> None:
    async with running() as place:
        assert (await place.ask("GET", path))[0] == 401
        assert not place.reader.asked


@pytest.mark.parametrize(
    "path",
    ["/", "/v1/jobs", "/v1/jobs/rollouts", "/v1/jobs/rollouts/tasks/sandboxes", "/v1/jobs/rollouts/tasks/pods/x"],
)
async def test_there_is_nothing_else(path: str) -> None:
    async with running() as place:
        assert (await place.ask("PUT", path))[0] in (404, 405)


async def test_a_job_that_is_over_may_give_back_and_take_nothing() -> None:
    async with running() as place:
        place.reader.put(status={"conditions": [condition("Complete", True, "Done")]})
        status, answer = await place.ask("GET", "/v1/jobs/rollouts/tasks")
        assert (status, answer["error"]) == (409, "the job is over")
        status, answer = await place.ask("PUT", "/v1/jobs/rollouts/tasks/sandboxes/sb-1", BODY)
        assert (status, answer["state"], answer["reason"]) == (200, "Refused", "the job is over")
        assert (await place.ask("DELETE", "/v1/jobs/rollouts/tasks/sandboxes/sb-1"))[0] == 204
        assert [entry[0] for entry in place.broker.asked] == ["release"]


async def test_what_may_be_later_says_so() -> None:
    async with running() as place:
        place.broker.error = refused(500, "etcd is away")
        status, answer = await place.ask("DELETE", "/v1/jobs/rollouts/tasks/sandboxes/sb-1")
        assert status == 503
        assert "etcd is away" in answer["error"]
        place.is_ready = False
        status, answer = await place.ask("GET", "/v1/jobs/rollouts/tasks")
        assert (status, answer["error"]) == (503, "the broker does not know its pods yet")
    async with running() as place:
        place.reader.error = refused(500)
        assert (await place.ask("GET", "/v1/jobs/rollouts/tasks"))[0] == 503


async def test_whoever_hangs_up_harms_nobody() -> None:
    async with running() as place:
        for _ in range(10):
            asking = asyncio.create_task(place.ask("PUT", "/v1/jobs/rollouts/tasks/sandboxes/sb-1", BODY))
            await asyncio.sleep(0)
            asking.cancel()
        assert (await place.ask("GET", "/v1/jobs/rollouts/tasks"))[0] == 204
