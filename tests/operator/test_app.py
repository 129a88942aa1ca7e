"""The operator whole: as a process, with its lease, probes and end, against an API emulator and a real API server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from kuberoll_operator.__main__ import main
from kuberoll_operator.app import RESTART, Operator
from kuberoll_operator.discovery import wait_for_change
from kuberoll_operator.kube.resources import RAY_SERVICES
from kuberoll_operator.model import Object, status_of
from kuberoll_operator.settings import Settings
from kuberoll_operator.watches import WATCHED
from tests.cluster.api import Api
from tests.cluster.conftest import api, api_server  # noqa: F401
from tests.cluster.control_plane import ApiServer
from tests.cluster.operator_process import install
from tests.operator.emulator import Emulator, Fault
from tests.operator.support import NAMESPACE, checked_manifest

ROOT = Path(__file__).parents[2]
BASE = {"http_host": "127.0.0.1", "lease_namespace": NAMESPACE, "token_key": "a key"}


@asynccontextmanager
async def operator(kubeconfig: Path, **given: object) -> AsyncIterator[tuple[Operator, asyncio.Task[int]]]:
    """An operator in this process."""
    settings = Settings.from_environment({}, **{**BASE, **given})
    found = Operator(settings.model_copy(update={"http_port": 0}), kubeconfig=kubeconfig)
    task = asyncio.create_task(found.run())
    try:
        yield found, task
    finally:
        found.stop.set()
        await asyncio.gather(task, return_exceptions=True)


def phase(server: Emulator, name: str = "puzzle") -> str | None:
    return status_of(server.get("rolloutjobs", NAMESPACE, name) or {}).get("phase")


async def get(found: Operator, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{found.port}{path}") as answer:
        return answer.status, await answer.text()


async def test_a_job_is_reconciled_from_its_events_and_the_probes_are_well(tmp_path: Path) -> None:
    server = Emulator()
    server.put(checked_manifest())
    async with server.running(tmp_path) as kubeconfig, operator(kubeconfig) as (found, task):
        await server.until(lambda: phase(server) == "Starting")
        # A job that comes later, and a child that goes.
        server.put(checked_manifest("late"))
        await server.until(lambda: phase(server, "late") == "Starting")
        server.remove("services", NAMESPACE, "puzzle-generation")
        await server.until(lambda: server.get("services", NAMESPACE, "puzzle-generation"))
        deployment = server.get("deployments", NAMESPACE, "puzzle-generation")
        assert deployment is not None
        server.put({**deployment, "status": {"observedGeneration": 1, "readyReplicas": 2}})
        await server.until(lambda: phase(server) == "Running")
        for path in ("/healthz", "/readyz"):
            assert await get(found, path) == (200, "ok")
        status, text = await get(found, "/metrics")
        assert status == 200
        assert 'kuberoll_operator_jobs{phase="Running"} 1.0' in text
        series = f'{{namespace="{NAMESPACE}",rolloutjob="puzzle",state="ready"}}'
        assert f"kuberoll_operator_generation_replicas{series} 2.0" in text
        assert "kuberoll_operator_leader 1.0" in text
        found.stop.set()
        assert await task == 0
        lease = server.get("leases", NAMESPACE, "kuberoll-operator")
        assert lease is not None
        assert lease["spec"]["holderIdentity"] == ""


async def test_kuberay_is_found_used_and_noticed_when_it_comes_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kuberoll_operator.discovery.wait_for_change", partial(wait_for_change, seconds=0.05))
    server = Emulator()
    server.put(checked_manifest(generation={"backend": "Auto"}))
    async with server.running(tmp_path) as kubeconfig:
        async with operator(kubeconfig) as (_, task):
            await server.until(lambda: server.get("deployments", NAMESPACE, "puzzle-generation"))
            server.serves.add(RAY_SERVICES)
            # Not as an error: whoever ran it goes on with another one.
            assert await task == RESTART
        async with operator(kubeconfig) as (_, task):
            server.put(checked_manifest("late", generation={"backend": "Auto"}))
            await server.until(lambda: server.get("rayservices", NAMESPACE, "late-gen"))
            assert server.get("rayservices", NAMESPACE, "puzzle-gen") is None
            assert server.get("deployments", NAMESPACE, "late-generation") is None
            await server.until(lambda: phase(server, "late") == "Starting")
            server.remove("rayservices", NAMESPACE, "late-gen")
            # It is watched.
            await server.until(lambda: server.get("rayservices", NAMESPACE, "late-gen"))
            server.serves.discard(RAY_SERVICES)
            assert await task == RESTART


@pytest.mark.slow
async def test_what_is_not_known_of_kuberay_is_waited_for(tmp_path: Path) -> None:
    server = Emulator()
    server.put(checked_manifest(generation={"backend": "Auto"}))
    server.serves.add(RAY_SERVICES)
    server.faults.append(Fault(lambda asked: asked.path == "/apis/ray.io/v1", status=503))
    async with server.running(tmp_path) as kubeconfig, operator(kubeconfig) as (found, _):
        await server.until(lambda: found.port)
        assert await get(found, "/readyz") == (503, "not listed yet: rayservices") or server.faults[0].times == 0
        await server.until(lambda: server.get("rayservices", NAMESPACE, "puzzle-gen"))


async def test_what_was_missed_while_the_server_forgot_is_made_up_for(tmp_path: Path) -> None:
    server = Emulator()
    server.put(checked_manifest())
    async with server.running(tmp_path) as kubeconfig, operator(kubeconfig, leader_election=False):
        await server.until(lambda: phase(server) == "Starting")
        await server.until(lambda: server.watching() >= {item.plural for item in WATCHED})
        server.remove("deployments", NAMESPACE, "puzzle-generation", unseen=True)
        server.end_watches(gone=True)
        await server.until(lambda: server.get("deployments", NAMESPACE, "puzzle-generation"))


@pytest.mark.slow
async def test_who_stands_by_is_ready_writes_nothing_and_takes_over(tmp_path: Path) -> None:
    server = Emulator()
    environment = {"KUBEROLL_HTTP_PORT": str(free_port()), "KUBEROLL_LEASE_NAMESPACE": NAMESPACE}
    async with server.running(tmp_path) as kubeconfig:  # noqa: SIM117
        # Not both in one process: kopf's tasks are all of one operator there.
        async with process(kubeconfig, environment, "--identity=first") as first:
            lease = await server.until(lambda: server.get("leases", NAMESPACE, "kuberoll-operator"))
            assert lease["spec"]["holderIdentity"] == "first"
            async with operator(kubeconfig, identity="second") as (second, _):
                server.put(checked_manifest())
                await server.until(lambda: phase(server) == "Starting")
                while (await get(second, "/readyz"))[0] != 200:
                    pass
                standby = (await get(second, "/metrics"))[1]
                assert "kuberoll_operator_leader 0.0" in standby
                # It neither ages nor counts jobs, which are the leader's.
                assert second.cache.jobs()
                assert "kuberoll_operator_queue_depth 0.0" in standby
                assert "kuberoll_operator_queue_oldest_seconds 0.0" in standby
                assert "kuberoll_operator_jobs{" not in standby
                first.terminate()
                await first.communicate()
                assert first.returncode == 0
                server.put(checked_manifest("next"))
                await server.until(lambda: phase(server, "next") == "Starting")
                lease = server.get("leases", NAMESPACE, "kuberoll-operator") or {}
                assert lease["spec"]["holderIdentity"] == "second"
                assert lease["spec"]["leaseTransitions"] == 1
                assert "kuberoll_operator_jobs{" in (await get(second, "/metrics"))[1]


async def test_who_loses_the_lease_ends_with_an_error(tmp_path: Path) -> None:
    server = Emulator()
    async with server.running(tmp_path) as kubeconfig, operator(kubeconfig, lease_seconds=3) as (_, task):
        lease = await server.until(lambda: server.get("leases", NAMESPACE, "kuberoll-operator"))
        server.put({**lease, "spec": {**lease["spec"], "holderIdentity": "thief"}})
        assert await task == 1
        lease = server.get("leases", NAMESPACE, "kuberoll-operator") or {}
        assert lease["spec"]["holderIdentity"] == "thief"


async def test_an_operator_whose_watches_have_ended_ends_and_releases_the_lease(tmp_path: Path) -> None:
    server = Emulator()
    async with server.running(tmp_path) as kubeconfig, operator(kubeconfig) as (_, task):
        await server.until(lambda: server.get("leases", NAMESPACE, "kuberoll-operator"))
        await server.until(lambda: server.watching() >= {item.plural for item in WATCHED})
        server.fail_watch("pods", 500)
        assert await task == 1
        lease = server.get("leases", NAMESPACE, "kuberoll-operator") or {}
        assert lease["spec"]["holderIdentity"] == ""


async def test_an_operator_without_rights_lives_says_what_it_misses_and_waits(tmp_path: Path) -> None:
    server = Emulator()
    server.put(checked_manifest())
    server.faults.append(Fault(lambda item: item.is_list and item.plural == "jobs", 403, times=None))
    async with server.running(tmp_path) as kubeconfig, operator(kubeconfig) as (found, _):
        await server.until(lambda: {"pods", "rolloutjobs"} <= server.watching())
        assert (await get(found, "/healthz"))[0] == 200
        status, text = await get(found, "/readyz")
        assert status == 503
        assert "jobs" in text
        assert server.writes("deployments") == []
        server.faults.clear()
        await server.until(lambda: phase(server) == "Starting")


@asynccontextmanager
async def process(
    kubeconfig: Path, environment: Mapping[str, str], *arguments: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m kuberoll_operator`, with a home that cannot be written to."""
    found = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kuberoll_operator",
        f"--kubeconfig={kubeconfig}",
        "--http-host=127.0.0.1",
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        env={
            "PATH": os.environ["PATH"],
            "HOME": "/nonexistent",
            "KUBEROLL_TOKEN_KEY": "a key",
            **environment,
        },
    )
    try:
        yield found
    finally:
        if found.returncode is None:
            found.kill()
        await found.communicate()


def free_port() -> int:
    from tests.cluster.control_plane import free_port

    return free_port()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_well(tmp_path: Path, number: signal.Signals) -> None:
    server = Emulator()
    server.put(checked_manifest())
    environment = {"KUBEROLL_HTTP_PORT": str(free_port()), "KUBEROLL_LEASE_NAMESPACE": NAMESPACE}
    async with server.running(tmp_path) as kubeconfig, process(kubeconfig, environment) as found:
        await server.until(lambda: phase(server) == "Starting")
        found.send_signal(number)
        _, log = await found.communicate()
        assert found.returncode == 0, log.decode()
        assert b"Traceback" not in log
        assert b"Task was destroyed" not in log
        lease = server.get("leases", NAMESPACE, "kuberoll-operator") or {}
        assert lease["spec"]["holderIdentity"] == ""


@pytest.mark.slow
async def test_a_process_whose_watches_have_ended_ends(tmp_path: Path) -> None:
    server = Emulator()
    environment = {"KUBEROLL_HTTP_PORT": str(free_port()), "KUBEROLL_LEADER_ELECTION": "false"}
    async with server.running(tmp_path) as kubeconfig, process(kubeconfig, environment) as found:
        await server.until(lambda: server.watching() >= {item.plural for item in WATCHED})
        server.fail_watch("jobs", 500)
        _, log = await found.communicate()
        assert found.returncode == 1
        assert b"stopping after a fatal error" in log


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--concurrency=many"], {}, "concurrency"),
        ([], {"KUBEROLL_HTTP_PORT": "0"}, "KUBEROLL_HTTP_PORT"),
        (["--log-level=loud"], {}, "LOUD"),
        (["--kubeconfig=/nowhere"], {}, "does not exist"),
        ([], {}, "KUBEROLL_TOKEN_KEY: not set or empty"),
        ([], {"KUBEROLL_TOKEN_KEY": ""}, "KUBEROLL_TOKEN_KEY: not set or empty"),
    ],
)
def test_settings_that_cannot_be_used_are_named(arguments: list[str], environment: dict[str, str], words: str) -> None:
    done = CliRunner().invoke(main, arguments, env=environment)
    assert done.exit_code != 0
    assert words in done.output
    assert "Traceback" not in done.output


def test_every_setting_has_a_flag_with_its_variable() -> None:
    text = CliRunner().invoke(main, ["--help"], terminal_width=200).output
    for name in Settings.model_fields:
        if name == "token_key":
            # What stands in a command line can be read by all on the machine.
            assert "--token-key" not in text
            continue
        assert f"--{name.replace('_', '-')}" in text
        assert f"KUBEROLL_{name.upper()}" in "".join(text.split())


async def test_on_a_real_api_server(api_server: ApiServer, api: Api, tmp_path: Path) -> None:  # noqa: F811
    await install(api)
    namespace = f"app-{uuid.uuid4().hex[:8]}"
    await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    wanted = checked_manifest()
    wanted["metadata"]["namespace"] = namespace
    await api.create({key: value for key, value in wanted.items() if key != "status"})
    await api.patch("RolloutJob", namespace, "puzzle", {"status": wanted["status"]}, subresource="status")
    given: dict[str, object] = {"lease_namespace": namespace, "namespaces": (namespace,)}
    async with operator(api_server.kubeconfig, **given) as (found, task):

        def in_phase(name: str) -> object:
            return lambda item: item is not None and item.get("status", {}).get("phase") == name

        await api.wait("RolloutJob", namespace, "puzzle", in_phase("Starting"))  # type: ignore[arg-type]
        assert await get(found, "/readyz") == (200, "ok")
        ready: Object = {"observedGeneration": 1, "replicas": 2, "readyReplicas": 2}
        await api.patch("Deployment", namespace, "puzzle-generation", {"status": ready}, subresource="status")
        job = await api.wait("RolloutJob", namespace, "puzzle", in_phase("Running"))  # type: ignore[arg-type]
        assert job is not None
        assert job["status"]["workers"]["shards"] == 4
        written = {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in await children(api, job)}
        # A touch that is no change: looked at, and nothing written.
        await api.patch("RolloutJob", namespace, "puzzle", {"metadata": {"labels": {"touched": "yes"}}})
        await api.delete("Service", namespace, "puzzle-workers")
        await api.wait("Service", namespace, "puzzle-workers", lambda item: item is not None)
        again = {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in await children(api, job)}
        assert {name for name in written if again[name] != written[name]} == set()
        events = [item for item in await api.list("Event", namespace) if item["regarding"]["name"] == "puzzle"]
        assert sorted(item["reason"] for item in events) == ["GenerationReady", "GenerationStarting"]
        found.stop.set()
        assert await task == 0
        lease = await api.get("Lease", namespace, "kuberoll-operator")
        assert lease["spec"]["holderIdentity"] == ""
    await api.delete("Namespace", None, namespace)


async def children(api: Api, job: Object) -> list[Object]:  # noqa: F811
    """What the job owns, less the Service that the test deletes."""
    found = [
        item
        for kind in ("ConfigMap", "Deployment", "Service", "Job", "NetworkPolicy")
        for item in await api.list(kind, job["metadata"]["namespace"])
        if item["metadata"].get("ownerReferences") and (kind, item["metadata"]["name"]) != ("Service", "puzzle-workers")
    ]
    assert len(found) >= 5
    return found
