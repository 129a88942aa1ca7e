"""Requests a second and CPU time of the ways from a worker to a replica, with an engine that takes no time.

Everything runs on this machine: CPU time is that of all processes, the one that asks included. 512 tokens go there,
some 256 and their log-probabilities come back. First the router alone, over a client that answers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from benchmarks.figures import Figure
from kuberoll_api.contract import ServeArgs
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import EngineInfo, GenerationRequest, GenerationResult, SamplingParameters
from kuberoll_workers.policy.routing.discovery import Discovery, EndpointDiscovery, StaticDiscovery
from kuberoll_workers.policy.routing.router import RoutedPolicy
from kuberoll_workers.serving.app import GenerationServer, deployment_options
from kuberoll_workers.serving.ray_settings import free_ports, ray_environment, serve_environment

PROMPT = token_array(range(512))
Ask = Callable[[GenerationRequest], Awaitable[Any]]


class Instant:
    """A client that answers at once."""

    load = 3

    async def __aenter__(self) -> Instant:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return GenerationResult(token_ids=token_array([1]), logprobs=array("f", [0]), finish_reason="stop")

    async def check_health(self) -> None:
        return None

    async def info(self) -> EngineInfo:
        return EngineInfo(model="", engine="", max_model_len=1, vocab_size=1, policy_version="0")


def request(session: int, turn: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{session}-0-0-{turn}-0",
        session_id=f"{session}-0-0",
        token_ids=PROMPT,
        sampling=SamplingParameters(max_tokens=256, seed=1),
    )


async def router_alone(replicas: int, count: int) -> float:
    """CPU microseconds of the router, per request."""
    direct, requests = Instant(), [request(number % 500, number) for number in range(count)]
    async with RoutedPolicy(
        StaticDiscovery([f"r{number}" for number in range(replicas)]), lambda url: direct
    ) as policy:
        await policy.generate(requests[0])
        while policy.state().replicas.get("closed") != replicas:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        seconds = []
        for ask in (policy.generate, direct.generate):
            began = time.process_time()
            for one in requests:
                await ask(one)
            seconds.append(time.process_time() - began)
    return (seconds[0] - seconds[1]) / count * 1e6


class Handled(GenerationServer):
    """The app with a method for handles."""

    async def handled(self, body: bytes) -> bytes:
        return wire.encode_result(await self._engine.generate(wire.decode_request(body, wire.MSGPACK)))


def cpu_seconds() -> float:
    """Of this process and all below it."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


async def measure(name: str, ask: Ask, count: int, in_flight: int) -> tuple[float, float]:
    """Print requests per second and CPU time; return the CPU microseconds of a request: of all, and of this process."""
    numbers = iter(range(count))

    async def place(session: int) -> None:
        for number in numbers:
            await ask(request(session, number))

    async def round_of(places: int) -> None:
        await asyncio.gather(*(place(session) for session in range(places)))

    for session in range(in_flight):
        await ask(request(session, 0))
    before, own, began = cpu_seconds(), time.process_time(), time.perf_counter()
    await round_of(in_flight)
    wall, cpu, own = time.perf_counter() - began, cpu_seconds() - before, time.process_time() - own
    print(f"{name:44} {count / wall:8.0f} requests/s {cpu / count * 1e6:8.0f} µs CPU", flush=True)
    return cpu / count * 1e6, own / count * 1e6


async def ways(
    url: str, handle: Any, count: int, in_flight: int, proxy: str, *, only_first: bool
) -> tuple[float, float] | None:
    """Measure all ways, or only the first, whose CPU microseconds are returned: of all processes, and of this one."""
    async with ServeClient(url, limit=in_flight) as client:
        await client.wait_ready(60)
        if proxy == "python":
            await measure("Serve's Python proxy, msgpack", client.generate, count // 8, in_flight)
            return None
        discovery: Discovery = EndpointDiscovery(client, url)
        while len(addresses := await discovery.addresses()) < 2:
            print(f"waiting for both replicas: {addresses}", file=sys.stderr)
            await asyncio.sleep(0.5)
        async with RoutedPolicy(discovery, lambda direct: ServeClient(direct, limit=in_flight)) as policy:
            found = await measure("replicas' own ports, msgpack (RoutedPolicy)", policy.generate, count, in_flight)
        if only_first:
            return found
        await measure("HAProxy, msgpack", client.generate, count, in_flight)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:

        async def as_json(asked: GenerationRequest) -> None:
            body = wire.encode_request(asked, wire.JSON)
            headers = {"content-type": wire.JSON}
            async with session.post(f"{url}/v1/generate", data=body, headers=headers) as response:
                wire.decode_result(await response.read(), wire.JSON)

        await measure("HAProxy, JSON", as_json, count, in_flight)

    async def by_handle(asked: GenerationRequest) -> None:
        wire.decode_result(await handle.handled.remote(wire.encode_request(asked)), wire.MSGPACK)

    await measure("DeploymentHandle", by_handle, count // 4, in_flight)
    return None


def serve_and_measure(proxy: str, count: int, in_flight: int, written: Path | None) -> None:
    """In a process of its own: Ray reads its settings from the environment, once."""
    scratch = Path(tempfile.mkdtemp(prefix="kr-", dir="/tmp"))
    port, *others = free_ports(4)
    os.environ.update(ray_environment() | serve_environment("Session", scratch, others, haproxy=proxy == "haproxy"))
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    args = ServeArgs(
        model="none",
        tokenizer="none",
        engine="Simulated",
        simulated={"firstTokenSeconds": 0.0, "tokenSeconds": 0.0, "meanTokens": 256},
        replicas=2,
    )
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=str(scratch / "ray"))
    try:
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(port=port))
        options = deployment_options(args, gpus=0)
        app = serve.deployment(**options)(Handled).bind(msgspec.to_builtins(args))
        handle = serve.run(app, name=args.application, route_prefix="/")
        found = asyncio.run(
            ways(f"http://127.0.0.1:{port}", handle, count, in_flight, proxy, only_first=written is not None)
        )
        if written is not None:
            written.write_text(json.dumps(found))
        serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


def figures() -> Iterator[Figure]:
    """CPU time of the worker's side of a turn: routing, encoding, HTTP, decoding."""
    with tempfile.TemporaryDirectory() as directory:
        written = Path(directory) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.transport", "--proxy", "haproxy", "--written", str(written)]
        subprocess.run(command, check=True)
        both, own = json.loads(written.read_text())
    yield Figure("client_cpu_us_per_turn", own, "µs", goal=400.0)
    yield Figure("request_cpu_us_all_processes", both, "µs")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--proxy", choices=["haproxy", "python"], help=argparse.SUPPRESS)
    parser.add_argument("--written", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.proxy is not None:
        serve_and_measure(given.proxy, given.requests, given.in_flight, given.written)
        return
    for replicas in (1, 4, 32):
        print(f"the router alone, {replicas:2} replicas: {asyncio.run(router_alone(replicas, 20_000)):6.1f} µs CPU")
    for proxy in ("haproxy", "python"):
        command = [sys.executable, "-m", "benchmarks.transport", "--proxy", proxy]
        command += ["--requests", str(given.requests), "--in-flight", str(given.in_flight)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
