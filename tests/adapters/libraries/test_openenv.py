"""Servers of OpenEnv's own package, as child processes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.adapters.http import ServerError
from kuberoll_workers.adapters.openenv import OpenEnvEnvironment
from kuberoll_workers.authoring import check_environment
from kuberoll_workers.environments import Episode, EpisodeEnd, UnusableEnvironment, UnusableRow
from tests.adapters.libraries.foreign import packages, server
from tests.adapters.libraries.support import ISOLATIONS, run
from tests.environments.support import log_of

pytestmark = pytest.mark.processes

# OpenEnv 0.10 needs the MCP SDK 1, and vLLM 0.32 the MCP SDK 2: they cannot be installed side by side.
REQUIREMENTS = [
    "openenv==0.10.0",
    "mcp==1.30.0",
    "aiofile==3.12.3",
    "authlib==1.9.9",
    "backports.tarfile==1.2.0",
    "beartype==0.23.1",
    "caio==0.12.10",
    "cyclopts==5.4.0",
    "docstring_parser==0.18.0",
    "exceptiongroup==1.3.1",
    "fastmcp==3.4.10",
    "fastmcp_slim==3.4.10",
    "griffelib==2.4.1",
    "httpx_sse==0.4.3",
    "jaraco.classes==3.4.0",
    "jaraco_context==6.1.2",
    "jaraco_functools==4.6.0",
    "jeepney==0.9.0",
    "jsonref==1.1.0",
    "keyring==25.7.0",
    "lazy_importer==0.1.0",
    "more_itertools==11.2.1",
    "openapi_pydantic==0.6.0",
    "py_key_value_aio==0.4.6",
    "pyperclip==1.11.0",
    "rich_rst==2.2.0",
    "secretstorage==3.5.0",
    "tomli==2.5.0",
    "tomli_w==1.2.0",
    "uncalled_for==0.6.1",
]
SESSIONS = 64


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Addresses of servers by kind and number of sessions, which are started on demand."""
    path = packages("openenv-0.10.0", REQUIREMENTS)
    directory = tmp_path_factory.mktemp("servers")
    found: dict[tuple[str, int], str] = {}
    with ExitStack() as stack:

        def address(kind: str, sessions: int = SESSIONS) -> str:
            if (kind, sessions) not in found:
                arguments = (kind, str(directory / f"made-{sessions}"), str(sessions))
                started = server("serve_openenv.py", *arguments, path=path, log=directory / f"{kind}-{sessions}")
                found[kind, sessions] = stack.enter_context(started)
            return found[kind, sessions]

        yield address


def episode(name: str = "0-0-0", seed: int = 5, metadata: Any = None) -> Episode:
    return Episode(id=name, messages=[], metadata=metadata, seed=seed, max_turns=10)


def show(observation: dict[str, Any]) -> str:
    """Text of an observation."""
    return f"<<{observation['text']}>>"


def read(text: str) -> dict[str, Any]:
    """An action that is a word for a number."""
    return {"value": ("zero", "one", "two").index(text)}


async def step(environment: OpenEnvEnvironment, reply: str, state: Any) -> Any:
    return await environment.step([log_of(reply)], [state])


async def begin(environment: OpenEnvEnvironment, **changes: Any) -> Any:
    (start,) = await environment.reset([episode(**changes)])
    assert start is not None
    return start


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_run_with_the_environment_that_openenv_writes(tmp_path: Path, servers: Any, isolation: str) -> None:
    words = ["a", "four", "a longer message than ten"]
    config = {"url": servers("echo"), "action": "message", "observation": "echoed_message"}
    records = run(
        tmp_path,
        {"name": "echo", "type": "openenv", "config": config, "isolation": isolation},
        words,
        dataset={"source": {"generator": {"count": 16}}, "repeats": 4},
        rollout={"maxTurns": 3, "maxSequenceLength": 100_000, "concurrency": 32},
    )
    assert len(records) == 64
    for record in records:
        contents = [message.content for message in record.messages]
        assert contents[1] == "My Echo environment ready!\n"
        assert contents[3::2] == [f"\n{word}\n" for word in contents[2::2]]
        assert record.rewards == pytest.approx([min(0.1 * len(word), 1.0) for word in contents[2::2]])
        assert (record.stop_reason, record.turn_count) == ("max_turns", 3)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_run_with_ends(tmp_path: Path, servers: Any, isolation: str) -> None:
    config = {"url": servers("number"), "parameters": {"highest": 4}, "observation": "text", "recovery": "replay"}
    records = run(
        tmp_path,
        {"name": "number", "type": "openenv", "config": config, "isolation": isolation},
        [*(f'<action>{{"value": {value}}}</action>' for value in range(1, 5)), "<action>[1]</action>", "hm"],
        dataset={"source": {"generator": {"count": 16}}, "repeats": 4},
        rollout={"maxTurns": 30, "maxSequenceLength": 100_000, "concurrency": 32},
    )
    assert len(records) == 64
    for record in records:
        assert record.metadata is not None
        right = random.Random(record.metadata["seed"]).randint(1, 4)
        steps = [message.content for message in record.messages if '{"value": ' in message.content]
        assert record.stop_reason == "terminated"
        assert steps[-1] == f'<action>{{"value": {right}}}</action>'
        assert steps.count(steps[-1]) == 1
        assert record.metadata["steps"] == len(steps)
        assert record.total_reward == pytest.approx(1 / len(steps))


async def test_actions_and_observations_by_function(servers: Any) -> None:
    names = {"action": f"{__name__}:read", "observation": f"{__name__}:show"}
    environment = OpenEnvEnvironment({"url": servers("number"), **names, "parameters": {"highest": 1}})
    start = await begin(environment)
    assert start.messages == [{"role": "user", "content": "<<Guess a number from 1 to 1.>>\n"}]
    assert start.stop_strings is None
    result = await step(environment, "two", start.metadata)
    assert result.observations[0]["content"] == "\n<<less>>\n"
    result = await step(environment, "one", start.metadata)
    assert (list(result.rewards), list(result.terminateds)) == ([0.5], [True])
    await environment.shutdown()


async def test_seed_and_arguments_of_reset_are_the_rows(servers: Any) -> None:
    environment = OpenEnvEnvironment({"url": servers("number"), "parameters": {"highest": 4}})
    start = await begin(environment, metadata={"seed": 7, "reset": {"highest": 1000}})
    assert json.loads(start.messages[0]["content"]) == {"text": "Guess a number from 1 to 1000."}
    reply = json.dumps({"value": random.Random(7).randint(1, 1000)})
    result = await step(environment, f"<action>{reply}</action>", start.metadata)
    assert list(result.terminateds) == [True]
    with pytest.raises(UnusableRow, match=r"metadata\.reset: found 3"):
        await begin(environment, metadata={"reset": 3})
    with pytest.raises(UnusableRow, match=r"metadata\.seed: found -1"):
        await begin(environment, metadata={"seed": -1})
    await environment.shutdown()


@pytest.mark.parametrize(
    ("reply", "note"),
    [
        ("go", "This is no action: write one, as in <action>{…}</action>."),
        ("<action>1</action>", "This is no action: '1' is not a JSON object."),
        ("<action>{</action>", "This is no action: '{' is not JSON."),
        (f"<action>{'[' * 100_000}</action>", "is not JSON"),
        ('<action>{"value": "x"}</action>', "value: Input should be a valid integer"),
        ('<action>{"value": 1, "more": 2}</action>', "more: Extra inputs are not permitted"),
    ],
)
async def test_what_is_no_action_is_an_observation(servers: Any, reply: str, note: str) -> None:
    environment = OpenEnvEnvironment({"url": servers("number"), "unreadableReward": -0.25})
    start = await begin(environment)
    result = await step(environment, reply, start.metadata)
    assert note in result.observations[0]["content"]
    assert (list(result.rewards), list(result.terminateds)) == ([-0.25], [False])
    assert result.metadata == [start.metadata]
    await environment.shutdown()


async def test_an_error_of_the_environment_is_a_failure(servers: Any) -> None:
    environment = OpenEnvEnvironment({"url": servers("number")})
    start = await begin(environment)
    with pytest.raises(ServerError, match=r"/ws: step: EXECUTION_ERROR: zero"):
        await step(environment, '<action>{"value": 0}</action>', start.metadata)
    wrong = OpenEnvEnvironment({"url": servers("number"), "observation": "picture"})
    with pytest.raises(
        ServerError, match=r"config\.observation: the observation has no field 'picture'; it has .*text"
    ):
        await begin(wrong)
    await asyncio.gather(environment.shutdown(), wrong.shutdown())


async def test_each_session_ends_with_its_episode(servers: Any) -> None:
    """A server with one session refuses the second one until the first is closed."""
    environment = OpenEnvEnvironment({"url": servers("number", 1)})
    await begin(environment, name="a")
    with pytest.raises(ServerError, match=r"raise max_concurrent_envs .*, or lower spec\.rollout\.concurrency"):
        await begin(environment, name="b")
    await environment.close([EpisodeEnd(id=name, metadata=None, reason="failed") for name in "ab"])
    for _ in range(8):
        # The second one takes the place of the first.
        await begin(environment, name="c")
        start = await begin(environment, name="c")
        await step(environment, '<action>{"value": 1}</action>', start.metadata)
        await environment.close([EpisodeEnd(id="c", metadata=None, reason="terminated")])
    await environment.shutdown()


async def test_a_server_that_is_not_there_is_named() -> None:
    environment = OpenEnvEnvironment({"url": "http://127.0.0.1:9/", "connectSeconds": 0})
    with pytest.raises(ServerError, match=r"^http://127\.0\.0\.1:9/ws: Connection refused"):
        await begin(environment)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_the_contract(servers: Any, isolation: str) -> None:
    config = {"url": servers("number"), "observation": "text", "recovery": "replay"}
    results = {result.check: result.status for result in check_environment("openenv", config, isolation=isolation)}
    for check in ("generator", "returns", "plain", "nonsense", "closing", "determinism", "batches", "replay"):
        assert results[check] == "ok"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.url: "),
        ({"url": "echo:8000"}, "config.url: found 'echo:8000'"),
        ({"url": "http://echo", "action": "no_module:act"}, "config.action: no_module:act cannot be imported"),
        ({"url": "http://echo", "recovery": "metadata"}, "config.recovery: found 'metadata'"),
    ],
)
def test_a_wrong_config_names_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableEnvironment, match=message):
        OpenEnvEnvironment(config)
