"""Servers of the MCP SDK, over stdio and HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kuberoll_workers.adapters.http import ServerError
from kuberoll_workers.adapters.mcp import McpEnvironment
from kuberoll_workers.authoring import check_environment
from kuberoll_workers.data.lifetime import RUN_ID_VARIABLE
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.environments import Episode, EpisodeEnd, UnusableEnvironment
from kuberoll_workers.local.watchdog import processes_of
from kuberoll_workers.rollouts.scheduling import run_rollout
from tests.adapters.libraries.foreign import server
from tests.adapters.libraries.support import assert_needs_its_extra
from tests.rollouts.fakes import ScriptedPolicy, rollout_of, runners, sample

pytestmark = pytest.mark.processes

SCRIPT = str(Path(__file__).parent / "serve_mcp.py")
STDIO = {"command": sys.executable, "args": [SCRIPT, "stdio"]}
SCORER = {"type": "string_match"}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("mcp")
    with server("serve_mcp.py", "http", path=directory, log=directory / "log") as found:
        yield f"{found}/mcp"


def config(**servers: Any) -> dict[str, Any]:
    return {"servers": servers or {"shop": STDIO}, "scorer": SCORER}


def episode(name: str = "a") -> Episode:
    return Episode(id=name, messages=[], metadata={"ground_truth": "2 items"}, seed=1, max_turns=8)


async def begin(environment: McpEnvironment, name: str = "a") -> Any:
    (start,) = await environment.reset([episode(name)])
    assert start is not None
    return start


async def call(environment: McpEnvironment, state: Any, name: str, **arguments: Any) -> str:
    function = {"name": name, "arguments": json.dumps(arguments)}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    result = await environment.step([[message]], [state])
    ((answer,),) = result.observations
    assert (answer["role"], answer["tool_call_id"]) == ("tool", "c")
    assert (list(result.rewards), list(result.terminateds), result.metadata) == ([0.0], [False], [state])
    return str(answer["content"])


@pytest.mark.parametrize("kind", ["stdio", "http", "headers"])
async def test_tools_of_a_server_and_the_scorers_reward(kind: str, address: str) -> None:
    servers = {"stdio": STDIO, "http": {"url": address}, "headers": {"url": address, "headers": {"X-Name": "shop"}}}
    environment = McpEnvironment(config(shop=servers[kind]))
    start = await begin(environment)
    assert start.tools is not None
    buy, price, look = start.tools
    assert (buy["function"]["name"], buy["function"]["description"]) == ("buy", "Put items into the basket.")
    assert buy["function"]["parameters"]["required"] == ["item"]
    assert (price["function"]["name"], look["function"]["name"]) == ("price", "look")
    assert (await call(environment, start.metadata, "buy", item="pear", count=2)).endswith(" items")
    assert "nothing is not for sale" in await call(environment, start.metadata, "buy", item="nothing")
    assert "count" in await call(environment, start.metadata, "buy", item="pear", count="many")
    assert await call(environment, start.metadata, "sell") == (
        "Error: there is no tool 'sell'; the tools are buy, price, look"
    )
    for answer, reward in (("2 items", 1.0), ("3 items", 0.0)):
        result = await environment.step([[{"role": "assistant", "content": answer}]], [start.metadata])
        assert (list(result.rewards), list(result.terminateds)) == ([reward], [True])
        assert result.metadata is not None
        (state,) = result.metadata
        assert state is not None
        assert state["mcp_episode"] == "a"
    await environment.shutdown()


async def test_each_episode_has_a_server_of_its_own_which_ends_with_it() -> None:
    environment = McpEnvironment(config())
    before = set(psutil.Process().children(recursive=True))
    one, other = await begin(environment, "one"), await begin(environment, "other")
    assert await call(environment, one.metadata, "buy", item="pear", count=2) == "2 items"
    assert await call(environment, other.metadata, "buy", item="pear") == "1 items"
    started = set(psutil.Process().children(recursive=True)) - before
    assert len(started) == 2
    await environment.close([EpisodeEnd(id="one", metadata=None, reason="terminated")])
    assert len([process for process in started if process.is_running()]) == 1
    with pytest.raises(ServerError, match="the session of the MCP tool buy is lost"):
        await call(environment, other.metadata, "buy", item="end")
    await environment.shutdown()
    assert not [process for process in started if process.is_running()]


async def test_the_watchdog_of_a_run_finds_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK passes few variables on, and a server need not end when its input does."""
    monkeypatch.setenv(RUN_ID_VARIABLE, "a-run-of-this-test")
    environment = McpEnvironment(config())
    await begin(environment)
    found = [process.pid for process in processes_of("a-run-of-this-test")]
    children = [process.pid for process in psutil.Process().children(recursive=True)]
    await environment.shutdown()
    assert found
    assert set(found) <= set(children)


@pytest.mark.parametrize(("kind", "trajectories"), [("http", 64), ("stdio", 8)])
async def test_trajectories_of_the_loop(kind: str, trajectories: int, address: str) -> None:
    def reply(request: Any) -> str:
        task, _, _, turn, _ = map(int, request.request_id.split("-"))
        call = {"name": "price", "arguments": {"item": "x" * task}}
        replies = [f"<tool_call>{json.dumps(call)}</tool_call>", '<tool_call>{"name": </tool_call>', answer_of(task)]
        return replies[turn - 1]

    def answer_of(task: int) -> str:
        return f"{task + task % 2}"

    results: list[Any] = []

    async def sink(result: Any) -> None:
        results.append(result)

    samples = [
        sample(task, metadata={"ground_truth": str(task)}, sampling={"max_tokens": 400}) for task in range(trajectories)
    ]
    environment = McpEnvironment(config(shop={"url": address} if kind == "http" else STDIO))
    async with runners({"env": environment}) as made:
        rollout = rollout_of(made, policy=ScriptedPolicy(reply), max_sequence_length=100_000, concurrency=8)
        await run_rollout(rollout, samples, sink)
    assert len(results) == trajectories
    for record in results:
        assert isinstance(record, TrajectoryRecord), record
        price, unreadable = [message.content for message in record.messages if message.role == "tool"]
        assert price == str(record.task_index)
        assert unreadable.startswith("Error: this call cannot be read: ")
        assert record.total_reward == float(record.task_index % 2 == 0)
        assert record.tools is not None
        assert (record.stop_reason, record.turn_count, len(record.tools)) == ("terminated", 3, 3)


def test_the_contract(address: str) -> None:
    rows = [{"prompt": "What is 1 + 1?", "metadata": {"ground_truth": "2"}}]
    found = check_environment("mcp", config(shop={"url": address}), rows=rows)
    results = {result.check: result.status for result in found}
    for check in ("rows", "returns", "plain", "nonsense", "closing", "determinism", "batches", "inputs", "metrics"):
        assert results[check] == "ok"


async def test_a_server_that_is_not_there_is_named() -> None:
    for spec in ({"url": "http://127.0.0.1:9/mcp"}, {"command": "/no/such/program"}):
        environment = McpEnvironment({**config(shop=spec), "connectSeconds": 0})
        with pytest.raises(ServerError, match=r"^MCP server shop: "):
            await begin(environment)
        await environment.shutdown()
    environment = McpEnvironment(config(one=STDIO, two=STDIO))
    with pytest.raises(ValueError, match=r"config\.servers\.two: another server has a tool 'buy', too"):
        await begin(environment)
    await environment.shutdown()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"servers": {}, "scorer": SCORER}, "config.servers: "),
        ({"servers": {"shop": {}}, "scorer": SCORER}, "config.servers.shop: set exactly one of command"),
        (config(shop={"command": "x", "url": "http://x"}), "config.servers.shop: set exactly one of command"),
        ({"servers": {"shop": STDIO}}, "config.scorer: "),
        ({"servers": {"shop": STDIO}, "scorer": {"type": "nothing"}}, "there is no built-in environment 'nothing'"),
        (
            {"servers": {"shop": STDIO}, "scorer": {"entrypoint": "tests.environments.episodic:Rooms",
                                                    "config": {"directory": "."}}},
            "config.scorer: it has episodes of its own",
        ),
    ],
)  # fmt: skip
def test_a_wrong_config_names_the_field(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableEnvironment, match=message):
        McpEnvironment(given)


def test_a_machine_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_needs_its_extra(monkeypatch, "mcp", "mcp", "mcp", config())
