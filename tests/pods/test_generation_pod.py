"""Generation pods as processes, with a real Serve app of the simulated engine."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from kuberoll_api.contract import STATUS_PORT, access_token_variable
from kuberoll_workers.data.lifetime import RUN_ID_VARIABLE
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.local.watchdog import end_processes, processes_of
from kuberoll_workers.pods.generation import PORT_VARIABLE
from kuberoll_workers.policy.auth import Tokens
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import GenerationRequest, PolicyRefused, SamplingParameters
from kuberoll_workers.serving.ray_settings import free_ports
from tests.local.support import TINY
from tests.pods.support import PATIENCE_SECONDS, Pod, address, pod
from tests.serving.hosts import TOKENS

pytestmark = pytest.mark.ray

MODULE = "kuberoll_workers.pods.generation"


def config(simulated: dict[str, Any], **model: str) -> dict[str, Any]:
    return {
        "job": {
            "apiVersion": "kuberoll.io/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "test"},
            "spec": {
                "generation": {
                    "model": {"source": str(TINY), **model},
                    "engine": "Simulated",
                    "simulated": simulated,
                    "engineArgs": {"max_model_len": 512},
                    "replicas": 3,
                },
                "environments": [{"name": "puzzle", "type": "sliding_puzzle"}],
                "dataset": {"source": {"generator": {"count": 1}}},
            },
        },
        "endpoint": "http://unused.invalid",
        "port": 8000,
        "shard_count": 1,
        "output": "s3://unused",
        "base": "/unused",
    }


class GenerationPod:
    """A pod and the processes it started."""

    def __init__(self, started: Pod, port: int, run_id: str, file: Path) -> None:
        self.pod = started
        self._file = file
        self.url = f"http://{started.ip}:{port}"
        self._run_id = run_id

    def processes(self) -> list[psutil.Process]:
        return list(processes_of(self._run_id))

    def kill_replica(self) -> None:
        (replica,) = [process for process in self.processes() if "ServeReplica" in " ".join(process.cmdline())]
        replica.kill()

    def tell(self, told: dict[str, Any]) -> None:
        """Change the file of the job as a whole, as a mounted ConfigMap does."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(told))
        new.rename(self._file)

    async def until_weights(self, **expected: str | None) -> None:
        words = {"problem": None, **expected}
        await self.pod.until_answers(
            "/weights", lambda status, body: status == 200 and json.loads(body) == words, port=STATUS_PORT
        )

    async def until_health(self, status: int) -> str:
        return await self.pod.until_answers("/healthz", lambda found, _: found == status, port=STATUS_PORT)


@asynccontextmanager
async def generation_pod(
    place: Path, told: dict[str, Any], tokens: Tokens | None = TOKENS, group: Mapping[str, str] | None = None
) -> AsyncIterator[GenerationPod]:
    run_id, (port,) = uuid.uuid4().hex, free_ports(1)
    shown = {} if tokens is None else tokens.variables()
    variables = {RUN_ID_VARIABLE: run_id, PORT_VARIABLE: str(port), **shown, **(group or {})}
    try:
        async with pod(MODULE, told, place, shard=0, **variables) as started:
            yield GenerationPod(started, port, run_id, place / f"{started.ip}.json")
    finally:
        end_processes(run_id)


def request(number: int = 0) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(number),
        session_id=str(number),
        token_ids=token_array([1, 2]),
        sampling=SamplingParameters(max_tokens=5),
    )


async def test_it_is_ready_when_it_generates_and_ends_when_it_has_answered(tmp_path: Path) -> None:
    async with generation_pod(tmp_path, config({"firstTokenSeconds": 1.5})) as generation:
        assert await generation.until_health(503) == "the engine is starting"
        await generation.until_health(200)
        async with (
            ServeClient(generation.url, limit=8, token=TOKENS.generate) as client,
            asyncio.timeout(PATIENCE_SECONDS),
        ):
            assert (await client.info()).max_model_len == 512
            assert len((await client.generate(request())).token_ids) > 0
            # One replica, whatever the job has in all.
            replicas = [process for process in generation.processes() if "ServeReplica" in process.name()]
            assert len(replicas) <= 1
            status, metrics = await generation.pod.get("/metrics", port=STATUS_PORT)
            assert (status, "ray_" in metrics) == (200, True)

            under_way = [asyncio.create_task(client.generate(request(number))) for number in range(4)]
            while (await client.info()).ongoing_requests < len(under_way):
                assert not any(task.done() for task in under_way)
            generation.pod.signal(signal.SIGTERM)
            for result in await asyncio.gather(*under_way):
                assert len(result.token_ids) > 0
        assert await generation.pod.end() == 0, generation.pod.log
        assert generation.processes() == []


def weighted(version: str | None) -> dict[str, Any]:
    told = config({})
    if version is not None:
        told["job"]["spec"]["weights"] = {"uri": f"/mnt/{version}", "version": version}
    return told


async def test_it_follows_the_weights_of_its_job(tmp_path: Path) -> None:
    async with generation_pod(tmp_path, weighted("step-1")) as generation:
        await generation.until_weights(wanted="step-1", served=None)
        await generation.until_health(200)
        await generation.until_weights(wanted="step-1", served="step-1")
        async with (
            ServeClient(generation.url, limit=1, token=TOKENS.generate) as client,
            asyncio.timeout(PATIENCE_SECONDS),
        ):
            assert [span[0] for span in (await client.generate(request())).policy_versions] == ["step-1"]
            generation.tell(weighted("step-2"))
            await generation.until_weights(wanted="step-2", served="step-2")
            assert [span[0] for span in (await client.generate(request())).policy_versions] == ["step-2"]
        generation.tell(weighted(None))
        await generation.until_weights(wanted="0", served="0")
        async with ServeClient(generation.url, limit=1) as client, asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(PolicyRefused, match="answered 401"):
                await client.generate(request())


def place_in_group(leader: str, index: int, size: int = 2) -> dict[str, str]:
    """What LeaderWorkerSet tells a pod's containers."""
    return {"LWS_LEADER_ADDRESS": leader, "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(index)}


async def test_a_replica_that_spans_pods_is_ready_when_all_of_them_are_there(tmp_path: Path) -> None:
    told, ip = config({}), address()
    async with generation_pod(tmp_path, told, group={"POD_IP": ip, **place_in_group(ip, 0)}) as leader:
        await leader.pod.until_answers("/livez", lambda status, _: status == 200, port=STATUS_PORT)
        assert await leader.until_health(503) == "the engine is starting"
        async with generation_pod(tmp_path, told, group=place_in_group(leader.pod.ip, 1)) as follower:
            await leader.until_health(200)
            # It lends what it has, and answers for nothing.
            assert "a part of the replica" in await follower.until_health(503)
            assert (await follower.pod.get("/livez", port=STATUS_PORT))[0] == 200
            assert any("raylet" in process.name() for process in follower.processes())
            assert not any("ServeReplica" in " ".join(process.cmdline()) for process in follower.processes())
            async with (
                ServeClient(leader.url, limit=1, token=TOKENS.generate) as client,
                asyncio.timeout(PATIENCE_SECONDS),
            ):
                assert len((await client.generate(request())).token_ids) > 0
            follower.pod.signal(signal.SIGTERM)
            assert await follower.pod.end() == 0, follower.pod.log
            assert follower.processes() == []
        leader.pod.signal(signal.SIGTERM)
        assert await leader.pod.end() == 0, leader.pod.log
        assert leader.processes() == []


async def test_a_part_without_a_leader_says_so(tmp_path: Path) -> None:
    told = config({})
    told["job"]["spec"]["startupDeadlineSeconds"] = 1
    async with generation_pod(tmp_path, told, group=place_in_group(address(), 1)) as follower:
        assert await follower.pod.end() == 1
        assert "has not started within 1 s" in follower.pod.text()
    async with generation_pod(tmp_path, config({}), None, place_in_group(address(), 1)) as follower:
        assert await follower.pod.end() == 78
        assert "the policy's token" in follower.pod.text()


@pytest.mark.long
async def test_a_lost_engine_is_not_ready_until_it_is_back(tmp_path: Path) -> None:
    tokenizer, away = tmp_path / "tokenizer", tmp_path / "away"
    shutil.copytree(TINY, tokenizer)
    async with generation_pod(tmp_path, config({"responses": ["x"]}, tokenizer=str(tokenizer))) as generation:
        await generation.until_health(200)
        tokenizer.rename(away)
        generation.kill_replica()
        assert "the engine is" in await generation.until_health(503)
        assert await generation.pod.get("/livez", port=STATUS_PORT) == (200, "ok")
        away.rename(tokenizer)
        await generation.until_health(200)
        async with (
            ServeClient(generation.url, limit=1, token=TOKENS.generate) as client,
            asyncio.timeout(PATIENCE_SECONDS),
        ):
            assert len((await client.generate(request())).token_ids) > 0
        generation.pod.signal(signal.SIGTERM)
        assert await generation.pod.end() == 0, generation.pod.log
        assert generation.processes() == []


@pytest.mark.long
async def test_a_lost_engine_that_does_not_come_back_ends_its_pod(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(TINY, tokenizer)
    told = config({"responses": ["x"]}, tokenizer=str(tokenizer))
    told["job"]["spec"]["startupDeadlineSeconds"] = 1
    async with generation_pod(tmp_path, told) as generation:
        await generation.until_health(200)
        shutil.rmtree(tokenizer)
        generation.kill_replica()
        assert await generation.pod.end() == 1, generation.pod.log
        # The reason, or that it is lost, where nothing has failed yet but the time is up.
        assert str(tokenizer) in generation.pod.text() or "the engine is" in generation.pod.text()
        assert generation.processes() == []


@pytest.mark.long
async def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    told = config({"responses": ["x"]}, tokenizer="/nowhere/at-all")
    async with generation_pod(tmp_path, told) as generation:
        assert await generation.pod.end() == 1
        assert "/nowhere/at-all" in generation.pod.text()
        assert "Traceback" not in generation.pod.text()
        assert len(generation.pod.text().encode()) <= 2000
        assert generation.processes() == []


async def test_a_pod_without_tokens_is_refused(tmp_path: Path) -> None:
    async with generation_pod(tmp_path, config({}), tokens=None) as generation:
        assert await generation.pod.end() == 78
        assert "KUBEROLL_TOKEN_GENERATE, KUBEROLL_TOKEN_WEIGHTS, KUBEROLL_TOKEN_READ: not set" in generation.pod.text()


async def test_a_pod_with_a_token_that_is_no_secret_is_refused(tmp_path: Path) -> None:
    tokens = msgspec.structs.replace(TOKENS, further={access_token_variable("generate", "trainer"): "guess"})
    async with generation_pod(tmp_path, config({}), tokens=tokens) as generation:
        assert await generation.pod.end() == 78
        assert "KUBEROLL_TOKEN_GENERATE_ACCESS_TRAINER: a token has at least 16 visible" in generation.pod.text()


async def test_a_pod_without_a_job_is_refused(tmp_path: Path) -> None:
    async with generation_pod(tmp_path, {**config({}), "job": {"kind": "RolloutJob"}}) as generation:
        assert await generation.pod.end() == 78
        assert "apiVersion" in generation.pod.text()


async def test_urls_of_a_session_are_those_of_the_pod(tmp_path: Path) -> None:
    """Loopback, where its Ray is, is nobody's but its own."""
    async with generation_pod(tmp_path, config({})) as generation:
        await generation.until_health(200)
        headers = {"Authorization": f"Bearer {TOKENS.generate}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(f"{generation.url}/sessions") as answer:
                session = await answer.json()
            assert session["url"] == f"{generation.url}/sessions/{session['id']}"
            async with http.get(session["url"]) as answer:
                assert (answer.status, (await answer.json())["calls"]) == (200, 0)
