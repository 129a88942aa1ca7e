"""CPU of a chat completion in an agent's session: the whole replica, and vLLM's API server parts alone.

Both call vLLM's ASGI application over the same simulated engine, in one process and without HTTP: `vLLM` plainly,
`session` as a replica does, with the checks of the body, the continuation of the chat, and the record of what is
sampled. The difference is KubeRoll's own part of a call. Rounds alternate, and the median of each is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Scope

from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.serving.engines.simulated import Simulated
from kuberoll_workers.serving.openai_api import OpenAIRoutes
from kuberoll_workers.serving.sessions.routes import SessionRoutes
from tests.policy.openai_serving import TINY

PATH = "/v1/chat/completions"
TURNS = 20


async def call(application: ASGIApp, path: str, body: Any, method: str = "POST") -> Any:
    """The JSON that an application answers."""
    data, parts = json.dumps(body).encode(), []
    waiting = [data]

    async def receive() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))

    scope: Scope = {
        "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": path,
        "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(b"host", b"a"), (b"content-type", b"application/json")], "server": ("a", 80), "client": ("b", 1),
    }  # fmt: skip
    await application(scope, receive, send)
    return json.loads(b"".join(parts))


async def episode(ask: Callable[[list[Any]], Awaitable[Any]]) -> None:
    """A chat of `TURNS` turns."""
    messages: list[Any] = [{"role": "user", "content": "0 1 2 3 4 5 6 7 " * 20}]
    for _ in range(TURNS):
        answer = await ask(messages)
        said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        messages += [said, {"role": "user", "content": "and now " * 10}]


async def measured(rounds: int, episodes: int, others: int) -> dict[str, float]:
    engine = Simulated(
        model="none",
        tokenizer=str(TINY),
        settings=SimulatedEngine.model_validate({"responses": ["<action>up</action>"], "firstTokenSeconds": 0}),
        engine_args={"max_model_len": 8192},
    )
    await engine.start()
    api = OpenAIRoutes(engine, model_name="tiny")
    sessions = SessionRoutes(api, replica="r", address=_nowhere)

    async def replica(scope: Scope, receive: Any, send: Any) -> None:
        response = await sessions.handle(Request(scope, receive), scope["path"])
        assert response is not None
        await response(scope, receive, send)

    plain = await _plain_application(engine)

    async def plainly() -> None:
        await episode(lambda messages: call(plain, PATH, {"model": "tiny", "messages": messages}))

    async def in_session() -> None:
        opened = await call(replica, "/sessions", {})
        base = f"/sessions/{opened['id']}"
        await episode(lambda messages: call(replica, base + PATH, {"model": "tiny", "messages": messages}))
        await call(replica, base, None, "DELETE")

    for _ in range(others):
        await call(replica, "/sessions", {})
    found: dict[str, list[float]] = {"vLLM": [], "session": []}
    for _ in range(rounds + 1):
        for name, play in (("vLLM", plainly), ("session", in_session)):
            began = time.process_time()
            for _ in range(episodes):
                await play()
            found[name].append((time.process_time() - began) / (episodes * TURNS) * 1e3)
    await engine.shutdown()
    # The first round imports and warms up.
    return {name: statistics.median(times[1:]) for name, times in found.items()}


async def _plain_application(engine: Simulated) -> ASGIApp:
    from kuberoll_workers.serving.openai_api.application import make_application

    client: Any = await engine.open_client()
    return await make_application(
        client, names=["tiny"], tool_parser=None, reasoning_parser=None, chat_template=None, template_variables={}
    )


async def _nowhere() -> None:
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--episodes", type=int, default=10, help="of 20 turns, in each round")
    parser.add_argument("--sessions", type=int, default=1000, help="that are open besides")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    found = asyncio.run(measured(arguments.rounds, arguments.episodes, arguments.sessions))
    for name, value in found.items():
        print(f"{name:8} {value:6.2f} ms of CPU a call")
    own, ratio = found["session"] - found["vLLM"], found["session"] / found["vLLM"]
    print(f"own part {own:6.2f} ms of CPU a call ({ratio:.2f} ×)")


if __name__ == "__main__":
    main()
