"""The server of an environment: its answers, its refusals, its episodes and its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kuberoll_workers.environments.batches import GroupBatch
from kuberoll_workers.environments.interface import EnvironmentReturn, GroupMember, GroupScore
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.remote import protocol
from kuberoll_workers.environments.remote.serving import Serving, open_server
from tests.environments.episodic import events_in, unclosed
from tests.environments.remote.servers import ServerProcess, gather, get, post, rooms
from tests.rollouts.fakes import until

pytestmark = pytest.mark.slow

LOG = [{"role": "user", "content": "a prompt"}, {"role": "assistant", "content": "go"}]


class Prying:
    """Answers with what its process can see of the server."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._secrets = config["secrets"]

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        seen = {name: os.environ.get(name) for name in ("KUBEROLL_ENVIRONMENT_TOKEN", "KUBEROLL_TOKEN_GENERATE")}
        for path in (self._secrets, f"/proc/{os.getppid()}/environ", f"/proc/{os.getppid()}/cmdline"):
            try:
                seen[path] = Path(path).read_bytes().decode()
            except OSError:
                seen[path] = None
        seen["sockets"] = str(sum(one.status == "LISTEN" for one in psutil.Process().net_connections()))
        size = len(logs)
        texts = [{"role": "environment", "content": json.dumps(list(seen.values()))}] * size
        return EnvironmentReturn(texts, None, None, [0.0] * size, [True] * size)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {"sum": sum(batch["total_reward"])}


@asynccontextmanager
async def serving(name: str, directory: Path, **settings: Any) -> AsyncIterator[str]:
    spec = PlainSpec(
        name="rooms",
        type=None,
        entrypoint=f"tests.environments.episodic:{name}",
        config={"directory": str(directory)},
    )
    async with open_server(Serving(spec=spec, access=ProcessAccess(writable=[str(directory)]), **settings)) as (_, url):
        yield url


def episode(name: str, **metadata: Any) -> dict[str, Any]:
    return {"id": name, "messages": [], "seed": 7, "max_turns": 5, "metadata": metadata}


async def test_an_episode_from_its_reset_to_its_close(tmp_path: Path) -> None:
    async with serving("Rooms", tmp_path) as url:
        assert (await get(url, "/healthz")) == (200, "ok\n")
        status, info = await get(url, "/v1/info")
        assert (status, info["protocol"], info["recovery"], info["reset"]) == (200, 2, "replay", True)
        _, started = await post(url, "/v1/reset", {"episodes": [episode("a", row=1)]})
        assert started == {
            "starts": [
                {
                    "messages": [{"role": "user", "content": "room 7"}],
                    "metadata": {"row": 1, "room": "a"},
                    "stop_strings": ["!"],
                }
            ]
        }
        state = started["starts"][0]["metadata"]
        _, stepped = await post(url, "/v1/step", {"steps": [{"log": LOG, "metadata": state, "episode": "a"}]})
        assert stepped == {"outcomes": [{"role": "environment", "content": "step 1", "reward": 1.0}]}
        assert await post(url, "/v1/close", {"ends": [{"id": "a", "reason": "failed", "metadata": state}]}) == (200, {})
    assert [event.method for event in events_in(tmp_path)] == ["reset", "step", "close", "shutdown"]


async def test_faults_are_those_of_the_environment(tmp_path: Path) -> None:
    async with serving("PlainRooms", tmp_path) as url:

        def step(reply: str) -> dict[str, Any]:
            log = [*LOG[:-1], {"role": "assistant", "content": reply}]
            return {"steps": [{"log": log, "metadata": {"room": "a"}}]}

        status, fault = await post(url, "/v1/step", step("raise"))
        assert (status, fault["kind"], fault["text"]) == (422, "raised", "step raised ValueError: told to")
        assert fault["traceback"]["frames"][-1]["function"] == "obey"
        status, fault = await post(url, "/v1/step", step("crash"))
        assert (status, fault["kind"]) == (422, "raised")
        assert "ended with exit code 3" in fault["text"]
        status, fault = await post(url, "/v1/step", step("hang"), headers={protocol.TIMEOUT_HEADER: "0.5"})
        assert (status, fault["kind"]) == (422, "timeout")
        _, stepped = await post(url, "/v1/step", step("go"))
        assert stepped["outcomes"][0]["content"] == "step 1"


async def test_one_bad_episode_of_a_batch_fails_alone(tmp_path: Path) -> None:
    async with serving("Rooms", tmp_path, processes=2) as url:
        await post(url, "/v1/reset", {"episodes": [episode("a"), episode("b")]})
        log = [*LOG[:-1], {"role": "assistant", "content": "raise"}]
        steps = [
            {"log": log, "metadata": {"room": "a"}, "episode": "a"},
            {"log": LOG, "metadata": {"room": "b"}, "episode": "b"},
            {"log": LOG, "metadata": {"room": "c"}, "episode": "c"},
        ]
        _, stepped = await post(url, "/v1/step", {"steps": steps})
        raised, well, unknown = stepped["outcomes"]
        assert raised["fault"]["kind"] == "raised"
        assert well["content"] == "step 1"
        assert unknown["fault"]["kind"] == "lost"


class Ranking(Prying):
    """Scores a group by the length of its answers."""

    recovery = "restart"

    def score_group(self, members: list[Any]) -> list[GroupScore]:
        return [GroupScore(reward=float(len(member.answer or "")), metadata={"id": member.id}) for member in members]


async def test_a_group_is_scored_together() -> None:
    spec = PlainSpec(name="ranking", type=None, entrypoint=f"{__name__}:Ranking", config={"secrets": "/nowhere"})
    members: list[dict[str, Any]] = [
        {"id": name, "messages": LOG, "reward": 0.0, "stop_reason": "terminated", "answer": answer}
        for name, answer in (("a", "long"), ("b", None))
    ]
    async with open_server(Serving(spec=spec)) as (_, url):
        assert (await get(url, "/v1/info"))[1]["score_group"] is True
        scored = await post(url, "/v1/score_group", {"members": members})
    assert scored == (
        200,
        {"scores": [{"reward": 4.0, "metadata": {"id": "a"}}, {"reward": 0.0, "metadata": {"id": "b"}}]},
    )
    made: Any = make_executor(spec, isolation="Remote", processes=1, timeout=30)
    try:
        batch = GroupBatch([GroupMember(**item, metadata=None, group_reward=None) for item in members])
        assert [[score.reward for score in scores] for scores in await made.run(batch)] == [[4.0, 0.0]]
    finally:
        await made.close()


async def test_a_reset_that_comes_twice_closes_the_episode_before(tmp_path: Path) -> None:
    async with serving("Rooms", tmp_path) as url:
        for _ in range(2):
            await post(url, "/v1/reset", {"episodes": [episode("a", room="a")]})
    events = events_in(tmp_path)
    assert [event.method for event in events] == ["reset", "close", "reset", "close", "shutdown"]
    assert {event.detail for event in events if event.method == "close"} == {"lost"}
    assert unclosed(events) == []


async def test_what_was_not_begun_leaves_episodes_as_they_were(tmp_path: Path) -> None:
    """A busy server has neither closed an episode nor begun one."""
    async with serving("GatedRooms", tmp_path) as url:
        for name in ("a", "b"):
            await post(url, "/v1/reset", {"episodes": [episode(name, room=name)]})
        waiting = [{"log": LOG, "metadata": {"room": "a"}, "episode": "a"}]
        step = asyncio.create_task(post(url, "/v1/step", {"steps": waiting}))
        await until(lambda: any(event.method == "step" for event in events_in(tmp_path)))
        end = {"ends": [{"id": "b", "reason": "terminated", "metadata": {"room": "b"}}]}
        soon = {protocol.TIMEOUT_HEADER: "0.2"}
        assert (await post(url, "/v1/close", end, headers=soon))[0] == protocol.STATUS_BUSY
        assert (await post(url, "/v1/reset", {"episodes": [episode("c")]}, headers=soon))[0] == protocol.STATUS_BUSY
        (tmp_path / "go").touch()
        assert (await step)[0] == 200
        assert await post(url, "/v1/close", end) == (200, {})
        [outcome] = (await post(url, "/v1/step", {"steps": [{"log": LOG, "episode": "c"}]}))[1]["outcomes"]
        assert outcome["fault"]["kind"] == "lost"
    closed = [event.episode for event in events_in(tmp_path) if event.method == "close"]
    assert sorted(closed) == ["a", "b"]


async def test_an_episode_that_nobody_uses_is_closed(tmp_path: Path) -> None:
    async with serving("Rooms", tmp_path, idle_seconds=0.2) as url:
        await post(url, "/v1/reset", {"episodes": [episode("a", room="a")]})
        while ("close", "a") not in {(event.method, event.episode) for event in events_in(tmp_path)}:
            _, stepped = await post(url, "/v1/reset", {"episodes": [episode("b", room="b")]})
            assert "starts" in stepped


async def test_only_who_has_the_token_may_ask(tmp_path: Path) -> None:
    async with serving("PlainRooms", tmp_path, token="right") as url:
        for token in (None, "wrong", "righ", ""):
            assert (await get(url, "/v1/info", token=token))[0] == 401
            assert (await post(url, "/v1/step", {"steps": []}, token=token))[0] == 401
            assert (await post(url, "/v1/shutdown", {}, token=token))[0] == 401
        assert (await get(url, "/v1/info", token="right"))[0] == 200
        assert (await get(url, "/healthz"))[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/step", b"\x80\x04K\x01."),
        ("/v1/step", b"{"),
        ("/v1/step", b'{"steps": [{"log": "text"}]}'),
        ("/v1/step", b'{"steps": [{"log": [], "metadata": [1]}]}'),
        ("/v1/step", b'{"steps": [{"log": [], "metadata": {"a": ' + b"[" * 300 + b"]" * 300 + b"}}]}"),
        ("/v1/reset", b'{"episodes": [{"id": 1}]}'),
        ("/v1/close", b'{"ends": [{"id": "a", "reason": "bored"}]}'),
    ],
)
async def test_what_is_not_of_the_protocol_is_refused(tmp_path: Path, path: str, body: bytes) -> None:
    async with serving("PlainRooms", tmp_path) as url:
        assert (await post(url, path, body))[0] == 400
        assert (await post(url, "/v1/step", {"steps": []}, headers={protocol.TIMEOUT_HEADER: "-1"}))[0] == 400
        assert (await post(url, "/v2/step", {"steps": []}))[0] == 404
        assert (await get(url, "/healthz"))[0] == 200


async def test_rows_and_metrics_are_the_environment_s(tmp_path: Path) -> None:
    spec = PlainSpec(name="puzzle", type="sliding_puzzle", entrypoint=None, config={"size": 2})
    async with open_server(Serving(spec=spec)) as (_, url):
        _, made = await post(url, "/v1/generate_dataset", {"count": 2, "seed": 0})
        assert [row["metadata"]["moves"] for row in made["rows"]] == [0, 0]
    spec = PlainSpec(name="prying", type=None, entrypoint=f"{__name__}:Prying", config={"secrets": "/nowhere"})
    async with open_server(Serving(spec=spec)) as (_, url):
        answer = await post(url, "/v1/post_process", {"columns": {"total_reward": [1.0, 2.5]}})
        assert answer == (200, {"metrics": {"sum": 3.5}})
        status, fault = await post(url, "/v1/post_process", {"columns": {}})
        assert (status, fault["kind"]) == (422, "raised")
        assert "KeyError: 'total_reward'" in fault["text"]


@pytest.mark.processes
async def test_the_environment_reaches_neither_the_token_nor_the_server(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("of the file\n")
    server = ServerProcess(
        f"{__name__}:Prying",
        *("--config", json.dumps({"secrets": str(secret)}), "--token-file", str(secret)),
        variables={"KUBEROLL_TOKEN_GENERATE": "of the policy", "KUBEROLL_ENVIRONMENT_TOKEN": "of the variable"},
    )
    try:
        server.ready()
        _, stepped = await post(server.url, "/v1/step", {"steps": [{"log": LOG}]}, token="of the file")
        assert json.loads(stepped["outcomes"][0]["content"]) == [None, None, None, None, None, "0"]
    finally:
        server.close()


@pytest.mark.processes
async def test_a_stopped_server_lets_its_episodes_end(tmp_path: Path) -> None:
    server = rooms("Rooms", tmp_path)
    try:
        server.ready()
        await post(server.url, "/v1/reset", {"episodes": [episode("a", room="a")]})
        server.kill(signal.SIGTERM)
        while (await get(server.url, "/healthz"))[0] != 503:
            pass
        assert (await post(server.url, "/v1/reset", {"episodes": [episode("b")]}))[0] == 503
        step = {"steps": [{"log": LOG, "metadata": {"room": "a"}, "episode": "a"}]}
        answers = await gather(*(post(server.url, "/v1/step", step) for _ in range(2)))
        assert [answer["outcomes"][0]["content"] for _, answer in answers] == ["step 1", "step 2"]
        end = {"ends": [{"id": "a", "reason": "terminated", "metadata": {"room": "a"}}]}
        assert await post(server.url, "/v1/close", end) == (200, {})
        assert server.process.wait(240) == 0
    finally:
        server.close()
    assert [event.method for event in events_in(tmp_path)] == ["reset", "step", "step", "close", "shutdown"]


@pytest.mark.processes
def test_an_environment_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    server = ServerProcess("tests.environments.episodic:Rooms")
    text = server.close() if server.process.wait(240) is None else server.process.communicate()[0]
    assert server.process.returncode == 2
    assert "KeyError: 'directory'" in text
    assert "episodic.py" in text
