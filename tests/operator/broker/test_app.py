"""The broker whole, against an emulator of the API server, in this process and as one of its own."""

from __future__ import annotations

import asyncio
import hmac
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from kuberoll_api.sandboxes import BROKER_VARIABLE, TOKEN_VARIABLE, SandboxAnswer, WorkerSandboxes
from kuberoll_operator.broker.__main__ import main
from kuberoll_operator.broker.app import BrokerApp
from kuberoll_operator.broker.settings import BrokerSettings
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.pods.client import BrokerClient
from tests.cluster.control_plane import free_port
from tests.operator.broker.support import WORKER, manifest, request
from tests.operator.emulator import Emulator, Fault
from tests.operator.support import NAMESPACE

ROOT = Path(__file__).parents[3]
KEY = "a key"
RUNNING = {
    "phase": "Running",
    "podIP": "10.1.2.3",
    "containerStatuses": [{"name": "sandbox", "imageID": "sha256:1", "state": {"running": {"startedAt": "x"}}}],
}


@asynccontextmanager
async def broker(
    kubeconfig: Path, *, port: int = 0, **given: Any
) -> AsyncIterator[tuple[BrokerApp, str, asyncio.Task[int]]]:
    """A broker in this process, its address and its end."""
    settings = BrokerSettings.from_environment({}, http_host="127.0.0.1", token_key=KEY, **given)
    found = BrokerApp(settings.model_copy(update={"http_port": port}), kubeconfig=kubeconfig)
    served: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(found.run(served.set_result))
    try:
        await asyncio.wait({task, served}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield found, f"http://127.0.0.1:{await served}", task
    finally:
        found.stop.set()
        await asyncio.gather(task, return_exceptions=True)


def put_job(server: Emulator) -> str:
    """Write the job; returns the token of its workers."""
    uid = server.put(manifest())["metadata"]["uid"]
    return hmac.new(KEY.encode(), f"{uid}/sandboxes".encode(), "sha256").hexdigest()


@asynccontextmanager
async def worker(url: str, token: str) -> AsyncIterator[BrokerClient]:
    client = BrokerClient.of({BROKER_VARIABLE: f"{url}/v1/jobs/{NAMESPACE}/tasks", TOKEN_VARIABLE: token})
    try:
        yield client
    finally:
        await client.close()


async def until_ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/readyz") as answer:
                if answer.status == 200:
                    return


def run_pod(server: Emulator, name: str) -> None:
    pod = server.get("pods", NAMESPACE, f"tasks-{name}")
    assert pod is not None
    server.put({**pod, "status": RUNNING})


def has_pod(server: Emulator, name: str) -> bool:
    return server.get("pods", NAMESPACE, f"tasks-{name}") is not None


async def metrics_of(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        return await answer.text()


async def test_a_worker_has_a_sandbox_and_gives_it_back(tmp_path: Path) -> None:
    server = Emulator()
    token = put_job(server)
    async with (
        server.running(tmp_path) as kubeconfig,
        broker(kubeconfig) as (app, url, task),
        worker(url, token) as client,
    ):
        await until_ready(url)
        await client.check()
        asking = asyncio.create_task(client.want("sb-1", request()))
        await server.until(lambda: has_pod(server, "sb-1"))
        run_pod(server, "sb-1")
        assert await asking == SandboxAnswer(state="Running", address="10.1.2.3:8791")
        text = await metrics_of(url)
        assert 'kuberoll_broker_sandboxes{state="Running"} 1.0' in text
        assert 'kuberoll_broker_starts_total{result="made"} 1.0' in text
        assert 'kuberoll_broker_api_requests_total{code="201",kind="Pod",verb="create"} 1.0' in text
        await client.renew(WORKER, WorkerSandboxes(names=["sb-1"]))
        await client.release("sb-1")
        assert not has_pod(server, "sb-1")
        assert [item.method for item in server.writes("pods")] == ["POST", "DELETE"]
        async with worker(url, "wrong") as stranger:
            with pytest.raises(SandboxUnavailable, match="401: rollouts/tasks: there is no such job"):
                await stranger.check()
        app.stop.set()
        assert await task == 0


async def test_whoever_waits_hears_what_for_when_it_wants_to(tmp_path: Path) -> None:
    server = Emulator()
    token = put_job(server)
    async with server.running(tmp_path) as kubeconfig, broker(kubeconfig) as (_, url, _), worker(url, token) as client:
        await until_ready(url)
        # Whoever could wait for longer would have to be waited for when the broker ends.
        for wait in (0.0, -1.0, 0.01):
            answer = await client.want("sb-1", request(), wait=wait)
            assert answer.state == "Waiting"
            assert answer.reason


async def test_what_a_watch_missed_is_made_up_for(tmp_path: Path) -> None:
    server = Emulator()
    token = put_job(server)
    async with server.running(tmp_path) as kubeconfig, broker(kubeconfig) as (_, url, _), worker(url, token) as client:
        await until_ready(url)
        await server.until(lambda: server.watching() == {"pods"})
        asking = asyncio.create_task(client.want("sb-1", request()))
        await server.until(lambda: has_pod(server, "sb-1"))
        run_pod(server, "sb-1")
        assert (await asking).state == "Running"
        server.remove("pods", NAMESPACE, "tasks-sb-1", unseen=True)
        server.end_watches(gone=True)
        while (answer := await client.want("sb-1", request())).state == "Running":
            pass
        assert (answer.state, answer.reason) == ("Ended", "its pod was deleted")


async def test_the_answer_that_was_lost_and_the_broker_that_was_replaced(tmp_path: Path) -> None:
    server = Emulator()
    token = put_job(server)
    server.faults.append(Fault(lambda asked: asked.method == "POST" and asked.plural == "pods", 0, after=True))
    async with server.running(tmp_path) as kubeconfig:
        async with broker(kubeconfig) as (_, url, _), worker(url, token) as client:
            await until_ready(url)
            asking = asyncio.create_task(client.want("sb-1", request()))
            await server.until(lambda: has_pod(server, "sb-1"))
        # It ends with its broker, and its worker asks the next one.
        [first] = await asyncio.gather(asking, return_exceptions=True)
        assert isinstance(first, BaseException) or first.state == "Waiting"
        async with broker(kubeconfig) as (_, url, _), worker(url, token) as client:
            await until_ready(url)
            asking = asyncio.create_task(client.want("sb-1", request()))
            run_pod(server, "sb-1")
            assert (await asking).state == "Running"
            assert (await client.want("sb-1", request(worker="another"))).state == "Refused"
            await client.release("sb-1")
    assert len([item for item in server.writes("pods") if item.method == "POST"]) == 1
    assert server.all("pods") == []


async def test_pods_of_others_are_not_even_listed(tmp_path: Path) -> None:
    server = Emulator()
    put_job(server)
    async with server.running(tmp_path) as kubeconfig, broker(kubeconfig, namespaces=(NAMESPACE,)) as (_, url, _):
        await until_ready(url)
        listed = [item for item in server.requests if item.plural == "pods"]
        assert listed
        for item in listed:
            assert item.path.startswith(f"/api/v1/namespaces/{NAMESPACE}/pods")
            assert item.query["labelSelector"] == "app.kubernetes.io/managed-by=kuberoll-broker,kuberoll.io/sandbox-of"


async def test_a_broker_that_may_not_watch_is_not_ready_and_lives(tmp_path: Path) -> None:
    server = Emulator()
    token = put_job(server)
    server.faults.append(Fault(lambda asked: asked.is_list and asked.plural == "pods", 403, times=None))
    async with server.running(tmp_path) as kubeconfig, broker(kubeconfig) as (_, url, _):
        await server.until(lambda: any(item.plural == "pods" for item in server.requests))
        async with aiohttp.ClientSession() as session:
            for path, status in (("/healthz", 200), ("/readyz", 503), (f"/v1/jobs/{NAMESPACE}/tasks", 503)):
                headers = {"Authorization": f"Bearer {token}"}
                async with session.get(f"{url}{path}", headers=headers) as answer:
                    assert answer.status == status


async def test_a_broker_whose_watch_fails_for_good_ends(tmp_path: Path) -> None:
    server = Emulator()
    async with server.running(tmp_path) as kubeconfig, broker(kubeconfig) as (_, url, task):
        await until_ready(url)
        await server.until(lambda: server.watching() == {"pods"})
        server.fail_watch("pods", 500)
        assert await task == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_and_leaves_the_pods(tmp_path: Path, number: signal.Signals) -> None:
    server = Emulator()
    token = put_job(server)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with server.running(tmp_path) as kubeconfig, worker(url, token) as client:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kuberoll_operator.broker", f"--kubeconfig={kubeconfig}"),
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"],
                "HOME": "/nonexistent",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "KUBEROLL_TOKEN_KEY": KEY,
                "KUBEROLL_HTTP_HOST": "127.0.0.1",
                "KUBEROLL_HTTP_PORT": str(port),
            },
        )
        try:
            await server.until(lambda: server.watching() == {"pods"})
            asking = asyncio.create_task(client.want("sb-1", request()))
            await server.until(lambda: has_pod(server, "sb-1"))
            process.send_signal(number)
            _, log = await process.communicate()
            assert process.returncode == 0, log.decode()
            # kopf's watch may log one of its own when it is cancelled between two events.
            lines = [line for line in log.splitlines() if b"didn't stop after athrow()" not in line]
            assert b"Traceback" not in b"\n".join(lines)
            [found] = await asyncio.gather(asking, return_exceptions=True)
            # Whoever waits asks again: it is not over.
            assert isinstance(found, BaseException) or found.state == "Waiting"
            assert has_pod(server, "sb-1")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "KUBEROLL_TOKEN_KEY: not set or empty"),
        ({"KUBEROLL_TOKEN_KEY": "x", "KUBEROLL_STARTS": "0"}, "KUBEROLL_STARTS"),
        ({"KUBEROLL_TOKEN_KEY": "x", "KUBEROLL_STARTS_PER_JOB": "many"}, "KUBEROLL_STARTS_PER_JOB"),
        ({"KUBEROLL_TOKEN_KEY": "x", "KUBEROLL_HTTP_PORT": "70000"}, "KUBEROLL_HTTP_PORT"),
    ],
)
def test_settings_that_cannot_be_used_are_named(environment: dict[str, str], words: str) -> None:
    given = {**dict.fromkeys(("KUBEROLL_TOKEN_KEY", "KUBECONFIG")), **environment}
    done = CliRunner().invoke(main, [], env=given)
    assert done.exit_code != 0
    assert words in done.output
    assert "Traceback" not in done.output
