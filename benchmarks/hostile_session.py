"""Speed of a hundred agents' sessions beside one that does its worst, against their speed without it.

A replica's entrance and routes, over the simulated engine, have a process and a core of their own; the good agents and
the hostile one are processes on another core. Phases with and without the hostile session alternate, and the median of
the ratios is printed, with the time that the replica's process takes for a byte of each kind of body: what
`kuberoll_workers.serving.spending` assumes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import aiohttp
import psutil

AGENTS = 100
TURNS = 5
MOST_BYTES = 16_000_000

Attack = Callable[[aiohttp.ClientSession, str, str], Awaitable[None]]


def serve(port: Any, core: int | None, bounded: bool) -> None:
    """A replica, until its process is ended; its port goes through a pipe."""
    _pin(core)
    asyncio.run(_serve(port, bounded))


async def _serve(said: Any, bounded: bool) -> None:
    import socket

    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from kuberoll_api.model.generation import SimulatedEngine
    from kuberoll_workers.serving.arrivals import Calls
    from kuberoll_workers.serving.engines.simulated import Simulated
    from kuberoll_workers.serving.entrance import Entrance, Rules
    from kuberoll_workers.serving.openai_api import OpenAIRoutes
    from kuberoll_workers.serving.sessions.routes import SessionRoutes
    from kuberoll_workers.serving.slow_clients import limit_headers
    from kuberoll_workers.serving.spending import Spending
    from tests.policy.openai_serving import TINY

    class Unbounded(Spending):
        def delay(self, session: str, now: float) -> float:
            return 0.0

    engine = Simulated(
        model="none",
        tokenizer=str(TINY),
        settings=SimulatedEngine.model_validate({"responses": ["<action>up</action>"], "firstTokenSeconds": 0}),
        engine_args={"max_model_len": 1 << 20},
    )
    await engine.start()
    sessions = SessionRoutes(OpenAIRoutes(engine, model_name="tiny"), replica="r", address=_nowhere)

    async def replica(scope: Scope, receive: Receive, send: Send) -> None:
        response = await sessions.handle(Request(scope, receive), scope["path"])
        await (response or Response(status_code=404))(scope, receive, send)

    async def health() -> Response:
        return Response()

    def spender(request: Request, path: str) -> str | None:
        return sessions.session_of(path, request.headers.get("authorization", "").removeprefix("Bearer "))

    rules = Rules(
        authorize=lambda request, path: None,
        session=sessions.called,
        spender=spender,
        health=health,
        calls=Calls(512),
        spending=Spending() if bounded else Unbounded(),
    )
    limit_headers()
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    said.send(listening.getsockname()[1])
    config = uvicorn.Config(Entrance(replica, rules=rules), lifespan="off", log_level="error", timeout_keep_alive=600)
    await uvicorn.Server(config).serve(sockets=[listening])


async def _nowhere() -> None:
    return None


async def open_session(http: aiohttp.ClientSession) -> tuple[str, str]:
    """The path and the token of a new session."""
    async with http.post("/sessions", json={}) as found:
        session = await found.json()
    return f"/sessions/{session['id']}", session["token"]


async def measure(port: int, seconds: float, hostile: Callable[[], AbstractContextManager[Any]]) -> tuple[float, float]:
    """Calls a second of the good agents, without the hostile session and then beside it."""
    calls = 0
    async with client(port) as http:

        async def play() -> None:
            nonlocal calls
            while True:
                path, token = await open_session(http)
                messages: list[Any] = [{"role": "user", "content": "0 1 2 3 4 5 6 7 " * 20}]
                for _ in range(TURNS):
                    body = {"model": "tiny", "messages": messages}
                    headers = {"authorization": f"Bearer {token}"}
                    async with http.post(f"{path}/v1/chat/completions", json=body, headers=headers) as found:
                        answer = await found.json()
                    calls += 1
                    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
                    messages += [said, {"role": "user", "content": "and now " * 10}]
                async with http.delete(path) as found:
                    await found.read()

        tasks = [asyncio.create_task(play()) for _ in range(AGENTS)]

        async def rate(seconds: float) -> float:
            before, began = calls, time.monotonic()
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return (calls - before) / (time.monotonic() - began)

        await rate(2.0)
        alone = await rate(seconds)
        with hostile() as begun:
            await asyncio.to_thread(begun.recv)
            # It spends what it has saved.
            await rate(5.0)
            beside = await rate(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return alone, beside


def client(port: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        f"http://127.0.0.1:{port}",
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=600),
    )


def posting(route: str, body: bytes) -> Attack:
    async def attack(http: aiohttp.ClientSession, path: str, token: str) -> None:
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        async with http.post(path + route, data=body, headers=headers) as found:
            await found.read()

    return attack


async def asks_for_state(http: aiohttp.ClientSession, path: str, token: str) -> None:
    async with http.get(path, headers={"authorization": f"Bearer {token}"}) as found:
        await found.read()


async def abandons(http: aiohttp.ClientSession, path: str, token: str) -> None:
    """Begins a call whose body does not come, and leaves."""
    assert http._base_url is not None
    _, writer = await asyncio.open_connection("127.0.0.1", http._base_url.port)
    writer.write(
        f"POST {path}/v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\n"
        "Content-Length: 100000\r\n\r\n".encode()
    )
    await writer.drain()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def attacks() -> dict[str, Attack]:
    chat, completions = "/v1/chat/completions", "/v1/completions"
    message = {"role": "user", "content": "0 1 2 3"}

    def chat_of(messages: list[Any]) -> bytes:
        return json.dumps({"model": "tiny", "messages": messages}).encode()

    return {
        "calls": posting(chat, chat_of([message])),
        "text": posting(chat, chat_of([{"role": "user", "content": "0 1 2 3 " * (MOST_BYTES // 8)}])),
        "messages": posting(chat, chat_of([message] * (MOST_BYTES // 42))),
        "ids": posting(completions, json.dumps({"model": "tiny", "prompt": [1] * (MOST_BYTES // 3)}).encode()),
        "no JSON": posting(chat, b"[" * MOST_BYTES),
        "state": asks_for_state,
        "abandoned": abandons,
    }


def attack_for_ever(said: Any, port: int, name: str, width: int, core: int | None) -> None:
    """One session's attack, by so many callers at once; tells a pipe when it begins."""
    _pin(core)
    os.nice(10)
    attack = attacks()[name]

    async def one(http: aiohttp.ClientSession, path: str, token: str) -> None:
        while True:
            try:
                await attack(http, path, token)
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(0.05)

    async def all_of_it() -> None:
        async with client(port) as http:
            path, token = await open_session(http)
            said.send(True)
            await asyncio.gather(*(one(http, path, token) for _ in range(width)))

    asyncio.run(all_of_it())


def _pin(core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[psutil.Process]:
    running = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    running.start()
    assert running.pid is not None
    try:
        yield psutil.Process(running.pid)
    finally:
        running.kill()
        running.join()


@contextmanager
def attack_process(*arguments: Any) -> Iterator[Any]:
    """An attack in a process of its own; yields the pipe that tells when it begins."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with process(attack_for_ever, sender, *arguments):
        yield receiver


def byte_seconds(port: int, replica: psutil.Process, name: str) -> float:
    """Time of the replica's process for one attack, alone: seconds a byte."""
    attack = attacks()[name]

    async def once() -> float:
        async with client(port) as http:
            path, token = await open_session(http)
            await attack(http, path, token)
            before = sum(replica.cpu_times()[:2])
            for _ in range(3):
                await attack(http, path, token)
            return (sum(replica.cpu_times()[:2]) - before) / 3

    return asyncio.run(once()) / MOST_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=16, help="callers of the hostile session")
    parser.add_argument("--unbounded", action="store_true", help="no session waits for what it has spent")
    parser.add_argument("names", nargs="*", default=list(attacks()))
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    server_core, client_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    print(f"{len(cores)} cores, load {os.getloadavg()[0]:.1f}")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with process(serve, sender, server_core, not arguments.unbounded) as replica:
        port = receiver.recv()
        _pin(client_core)
        # The first call imports vLLM.
        byte_seconds(port, replica, "calls")
        for name in arguments.names:
            ratios, rates = [], []
            for _ in range(arguments.rounds):
                hostile = partial(attack_process, port, name, arguments.width, client_core)
                alone, beside = asyncio.run(measure(port, arguments.seconds, hostile))
                ratios.append(beside / alone)
                rates.append(alone)
            text = f"{name:10} {statistics.median(ratios):5.2f} of {statistics.median(rates):6.1f} calls/s"
            if name in ("text", "messages", "ids", "no JSON"):
                text += f"   {byte_seconds(port, replica, name) * 1e9:6.1f} ns a byte"
            print(text, flush=True)


if __name__ == "__main__":
    main()
