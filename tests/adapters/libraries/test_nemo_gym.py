"""Resources servers of NeMo Gym from its own package, as child processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.adapters.http import ServerError
from kuberoll_workers.adapters.nemo_gym import NemoGymEnvironment
from kuberoll_workers.authoring import check_environment
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.response_items import input_items, output_items
from kuberoll_workers.data.tools import checked_tools
from kuberoll_workers.environments import Episode, EpisodeEnd, UnusableEnvironment, UnusableRow
from kuberoll_workers.rollouts.scheduling import run_rollout
from tests.adapters.libraries.foreign import packages, server
from tests.adapters.libraries.support import ISOLATIONS, run
from tests.rollouts.fakes import ScriptedPolicy, rollout_of, runners, sample

pytestmark = pytest.mark.processes

# NeMo Gym 0.4.0 asks for Python 3.12 and for an older openai than KubeRoll's tests; what its resources servers import
# runs in Python 3.11.
REQUIREMENTS = [
    "nemo-gym==0.4.0",
    "openai==2.7.2",
    "anthropic==0.109.0",
    "antlr4-python3-runtime==4.9.3",
    "asttokens==3.0.0",
    "devtools==0.12.2",
    "executing==2.2.0",
    "gprof2dot==2025.4.14",
    "hydra-core==1.3.2",
    "omegaconf==2.3.0",
    "pydot==4.0.1",
    "yappi==1.6.10",
]


@pytest.fixture(scope="module")
def nemo_gym() -> Path:
    return packages("nemo-gym-0.4.0", REQUIREMENTS)


@pytest.fixture(scope="module")
def servers(nemo_gym: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Addresses of resources servers by name, which are started on demand."""
    logs = tmp_path_factory.mktemp("servers")
    found: dict[str, str] = {}
    with ExitStack() as stack:

        def address(name: str) -> str:
            if name not in found:
                script = ["serve_nemo_gym_shop.py"] if name == "shop" else ["serve_nemo_gym.py", name]
                started = server(*script, path=nemo_gym, log=logs / name)
                found[name] = stack.enter_context(started)
            return found[name]

        yield address


def examples(nemo_gym: Path, name: str) -> list[dict[str, Any]]:
    """The package's example rows of a resources server."""
    lines = (nemo_gym / "resources_servers" / name / "data" / "example.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def episode(row: dict[str, Any], name: str = "0-0-0", max_turns: int = 8) -> Episode:
    messages = row["responses_create_params"]["input"]
    metadata = {key: value for key, value in row.items() if key != "responses_create_params"}
    return Episode(id=name, messages=messages, metadata=metadata, seed=1, max_turns=max_turns)


class Player:
    """An episode that a test plays, with calls of tools."""

    def __init__(self, environment: NemoGymEnvironment, begun: Episode) -> None:
        self.environment = environment
        self.begun = begun
        self.log: list[Any] = list(begun.messages)
        self.state: Any = None

    async def reset(self) -> None:
        (start,) = await self.environment.reset([self.begun])
        assert start is not None
        self.state = start.metadata

    async def step(self, text: str, *calls: tuple[str, dict[str, Any]]) -> tuple[Any, float, bool]:
        number = len(self.log)
        made = [
            {"id": f"{number}-{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
            for index, (name, given) in enumerate(calls)
        ]
        called = {"tool_calls": made, "text": text} if made else {}
        return await self.say({"role": "assistant", "content": text + "<tool_call>" * len(made), **called})

    async def say(self, message: dict[str, Any]) -> tuple[Any, float, bool]:
        self.log.append(message)
        result = await self.environment.step([self.log], [self.state])
        assert result.metadata is not None
        (self.state,) = result.metadata
        observed = result.observations[0]
        self.log += observed if isinstance(observed, list) else [observed]
        return observed, result.rewards[0], result.terminateds[0]


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_run_with_a_server_that_verifies(tmp_path: Path, nemo_gym: Path, servers: Any, isolation: str) -> None:
    rows = examples(nemo_gym, "mcqa")[:4]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    records = run(
        tmp_path,
        {"name": "mcqa", "type": "nemo_gym", "config": {"url": servers("mcqa")}, "isolation": isolation},
        [f"It is \\boxed{{{letter}}}" for letter in "ABCDEFGHIJ"]
        + [f"<think>\\boxed{{{letter}}}?</think>I do not know" for letter in "ABCDEFGHIJ"],
        dataset={"source": {"uri": str(tmp_path / "rows.jsonl")}, "repeats": 16},
    )
    assert len(records) == 64
    answers = {row["uuid"]: row["expected_answer"] for row in rows}
    for record in records:
        assert record.metadata is not None
        text = record.messages[-2].content if record.messages[-1].role == "environment" else record.messages[-1].content
        right = text == f"It is \\boxed{{{answers[record.metadata['uuid']]}}}"
        assert (record.total_reward, record.stop_reason) == (float(right), "terminated")
        extracted = text[-2] if text.startswith("It is") else None
        assert record.metadata["nemo_gym"]["verification"]["extracted_answer"] == extracted
    assert {record.total_reward for record in records} == {0.0, 1.0}


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_run_with_a_server_that_steps(tmp_path: Path, nemo_gym: Path, servers: Any, isolation: str) -> None:
    """The package's blackjack, whose hands are drawn anew for each session."""
    rows = examples(nemo_gym, "blackjack")[:4]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = {"url": servers("blackjack"), "agent": "gymnasium_agent"}
    records = run(
        tmp_path,
        {"name": rows[0]["agent_ref"]["name"], "type": "nemo_gym", "config": config, "isolation": isolation},
        ["<action>hit</action>", "I have enough. <action>stand</action>"],
        dataset={"source": {"uri": str(tmp_path / "rows.jsonl")}, "repeats": 16},
    )
    assert len(records) == 64
    rewards = {"win": 1.0, "draw": 0.0, "loss": -1.0, "bust": -1.0}
    for record in records:
        assert record.metadata is not None
        state = record.metadata["nemo_gym"]
        assert (record.stop_reason, state["terminated"], state["truncated"]) == ("terminated", True, False)
        assert record.total_reward == rewards[state["info"]["result"]]
        assert record.rewards[:-1] == [0.0] * (record.turn_count - 1)
        hands = [message.content for message in record.messages if message.content.startswith("Your hand: [")]
        assert len(hands) == record.turn_count == state["turn"]
        assert (record.messages[2].role, record.messages[2].turn) == ("user", 0)
        # The session is the same throughout: a hit adds one card.
        cards = [hand[: hand.index("]")].count(",") + 1 for hand in hands]
        assert cards == list(range(2, record.turn_count + 2))
    assert {record.turn_count for record in records} >= {1, 2}


async def test_observations_of_a_server_that_steps_are_the_users(nemo_gym: Path, servers: Any) -> None:
    config = {"url": servers("example_multi_turn_gymnasium"), "agent": "gymnasium_agent"}
    environment = NemoGymEnvironment(config)
    for row in examples(nemo_gym, "example_multi_turn_gymnasium"):
        for last, reward in ((f"It is {row['expected_answer']}.", 1.0), ("I do not know", 0.0)):
            player = Player(environment, episode(row))
            await player.reset()
            for question in row["follow_ups"]:
                assert await player.step("Hm.") == ([{"role": "user", "content": question}], 0.0, False)
            assert (await player.step(last))[1:] == (reward, True)


async def test_tools_of_a_server_that_steps(servers: Any) -> None:
    environment = NemoGymEnvironment({"url": servers("shop"), "agent": "gymnasium_agent"})
    look = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}
    row = {"responses_create_params": {"input": [{"role": "user", "content": "Hello."}]}, "wanted": "pear"}
    begun = dataclasses.replace(episode(row), tools=[look])
    player = Player(environment, begun)
    (start,) = await environment.reset([begun])
    assert start is not None
    assert start.messages == [{"role": "user", "content": "0 closed. What is pear?"}]
    player.state = start.metadata
    player.log += start.messages
    answers, reward, over = await player.step("I look.", ("price", {"item": "pear"}), ("price", {"item": "plum"}))
    assert (reward, over) == (0.125, False)
    assert answers == [
        {"role": "tool", "tool_call_id": "2-0", "name": "price", "content": "4"},
        {"role": "tool", "tool_call_id": "2-1", "name": "price", "content": "null"},
        # Without the calls, which are items of their own.
        {"role": "user", "content": "You said 'I look.'."},
    ]
    unreadable = [{"id": "a", "text": "{", "error": "it is not JSON"}]
    said = {"role": "assistant", "content": "<tool_call>{</tool_call>", "invalid_tool_calls": unreadable}
    answers, reward, over = await player.say(said)
    error = {"role": "tool", "tool_call_id": "a", "content": "Error: this call cannot be read: it is not JSON"}
    assert (answers, reward, over) == ([error], 0.0, False)
    assert (await player.step("4"))[1:] == (1.0, True)
    state = player.state["nemo_gym"]
    assert state["info"] == {"asked": ["pear", "plum"], "request": "0-0-0-2"}
    await environment.close([EpisodeEnd(id="0-0-0", metadata=player.state, reason="terminated")])
    (start,) = await environment.reset([begun])
    assert start is not None
    assert start.messages[0]["content"].startswith("1 closed")
    player = Player(environment, begun)
    await player.reset()
    assert (await player.step("enough"))[1:] == (0.0, True)
    assert player.state["nemo_gym"]["truncated"] is True


async def test_a_server_for_another_agent_says_which(nemo_gym: Path, servers: Any) -> None:
    stepped = NemoGymEnvironment({"url": servers("blackjack")})
    with pytest.raises(ServerError, match=r"answered 404: .*; for a server with /reset, set config.agent: gymnasium"):
        await stepped.reset([episode(examples(nemo_gym, "blackjack")[0])])
    seeded = NemoGymEnvironment({"url": servers("mcqa"), "agent": "gymnasium_agent"})
    with pytest.raises(ServerError, match=r"for a server with /seed_session, set config.agent: simple_agent"):
        await seeded.reset([episode(examples(nemo_gym, "mcqa")[0])])


async def test_sessions_of_episodes_at_the_same_time(nemo_gym: Path, servers: Any) -> None:
    """The counter of each session is its own, and its reward that of the calls of its episode."""
    environment = NemoGymEnvironment({"url": servers("example_session_state_mgmt")})
    rows = examples(nemo_gym, "example_session_state_mgmt")

    async def play(number: int) -> None:
        row = rows[number % len(rows)]
        wrong = number % 3
        player = Player(environment, episode(row, f"{number}-0-0"))
        await player.reset()
        missing = row["expected_count"] - row["initial_count"] + wrong
        for part in (1, missing - 1):
            answers, reward, over = await player.step("", ("increment_counter", {"count": part}))
            assert (json.loads(answers[0]["content"]), reward, over) == ({"success": True}, 0.0, False)
        calls: list[tuple[str, dict[str, Any]]] = [("get_counter_value", {})] * 2
        answers, _, _ = await player.step("I look twice.", *calls)
        assert [json.loads(answer["content"]) for answer in answers] == [{"count": row["expected_count"] + wrong}] * 2
        assert answers[0]["tool_call_id"] != answers[1]["tool_call_id"]
        assert await player.step("Done.") == ({"role": "environment", "content": ""}, float(not wrong), True)

    await asyncio.gather(*map(play, range(64)))


async def test_64_trajectories_of_the_loop_with_tools(nemo_gym: Path, servers: Any) -> None:
    """The policy of every third row adds one too much."""

    def amount(task: int) -> int:
        row = rows[task % len(rows)]
        return int(row["expected_count"] - row["initial_count"] + (task % 3 == 0))

    def reply(request: Any) -> str:
        task, _, _, turn, _ = map(int, request.request_id.split("-"))
        calls = [
            {"name": "increment_counter", "arguments": {"count": amount(task)}},
            {"name": "verify", "arguments": {}},
        ]
        texts = ["".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)]
        texts += ['<tool_call>{"name": "get_counter_value", "arguments": {}}</tool_call>', "Done."]
        return texts[turn - 1]

    rows = [
        {key: value for key, value in row.items() if key != "responses_create_params"}
        for row in examples(nemo_gym, "example_session_state_mgmt")
    ]
    results: list[Any] = []

    async def sink(result: Any) -> None:
        results.append(result)

    given = examples(nemo_gym, "example_session_state_mgmt")[0]["responses_create_params"]["tools"]
    tools = checked_tools(given, "tools")
    samples = [sample(task, metadata=rows[task % len(rows)], sampling={"max_tokens": 400}) for task in range(64)]
    samples = [dataclasses.replace(made, prompt=dataclasses.replace(made.prompt, tools=tools)) for made in samples]
    environment = NemoGymEnvironment({"url": servers("example_session_state_mgmt")})
    async with runners({"env": environment}) as made:
        rollout = rollout_of(made, policy=ScriptedPolicy(reply), max_sequence_length=100_000, concurrency=16)
        await run_rollout(rollout, samples, sink)
    assert len(results) == 64
    for record in results:
        assert isinstance(record, TrajectoryRecord), record
        row, wrong = rows[record.task_index % len(rows)], record.task_index % 3 == 0
        added, refused, count = [m.content for m in record.messages if m.role == "tool"]
        assert json.loads(added) == {"success": True}
        assert json.loads(refused) == {"error": "there is no tool 'verify'"}
        assert json.loads(count) == {"count": row["expected_count"] + wrong}
        assert (record.total_reward, record.turn_count) == (float(not wrong), 3)


async def test_only_the_tools_of_the_row_can_be_called(nemo_gym: Path, servers: Any) -> None:
    environment = NemoGymEnvironment({"url": servers("example_session_state_mgmt")})
    begun = episode(examples(nemo_gym, "example_session_state_mgmt")[0])
    look = {"type": "function", "function": {"name": "get_counter_value", "parameters": {"type": "object"}}}
    player = Player(environment, dataclasses.replace(begun, tools=[look]))
    await player.reset()
    answers, _, _ = await player.step("", ("increment_counter", {"count": 1}), ("get_counter_value", {}))
    assert [json.loads(answer["content"]) for answer in answers] == [
        {"error": "there is no tool 'increment_counter'"},
        {"count": 3},
    ]


async def test_tools_with_state_solve_the_packages_examples(nemo_gym: Path, servers: Any) -> None:
    environment = NemoGymEnvironment({"url": servers("workplace_assistant")})
    solved = 0
    for row in examples(nemo_gym, "workplace_assistant"):
        truth = row["ground_truth"]
        calls = [(call["name"], json.loads(call["arguments"])) for call in truth]
        right, wrong = Player(environment, episode(row)), Player(environment, episode(row))
        await right.reset()
        if calls:
            answers, _, _ = await right.step("", *calls)
            assert len(answers) == len(calls)
            solved += 1
        assert (await right.step("Done."))[1:] == (1.0, True)
        await wrong.reset()
        await wrong.step("", ("email_send_email", {"recipient": "x@example.com", "subject": "x", "body": "x"}))
        assert (await wrong.step("Done."))[1:] == (0.0, True)
    assert solved > 0


async def test_the_last_turn_is_verified_with_its_calls(nemo_gym: Path, servers: Any) -> None:
    environment = NemoGymEnvironment({"url": servers("example_session_state_mgmt")})
    row = examples(nemo_gym, "example_session_state_mgmt")[0]
    player = Player(environment, episode(row, max_turns=1))
    await player.reset()
    count = row["expected_count"] - row["initial_count"]
    _, reward, over = await player.step("", ("increment_counter", {"count": count}))
    assert (reward, over) == (1.0, True)


async def test_a_call_that_cannot_be_read_is_answered(nemo_gym: Path, servers: Any) -> None:
    environment = NemoGymEnvironment({"url": servers("example_session_state_mgmt")})
    player = Player(environment, episode(examples(nemo_gym, "example_session_state_mgmt")[0]))
    await player.reset()
    invalid = [{"id": "a", "error": "it is not JSON"}]
    player.log.append({"role": "assistant", "content": "<tool_call>{</tool_call>", "invalid_tool_calls": invalid})
    result = await environment.step([player.log], [player.state])
    content = '{"error":"Invalid tool call: it is not JSON"}'
    answers: list[Any] = list(result.observations)
    assert answers == [[{"role": "tool", "tool_call_id": "a", "content": content}]]
    assert list(result.terminateds) == [False]


async def test_the_policy_cannot_call_the_servers_own_endpoints(nemo_gym: Path, servers: Any) -> None:
    environment = NemoGymEnvironment({"url": servers("example_session_state_mgmt")})
    row = examples(nemo_gym, "example_session_state_mgmt")[0]
    player = Player(environment, episode(row))
    await player.reset()
    names = ["seed_session", "verify", "../verify", "verify?x=1", "verify/", ""]
    answers, _, _ = await player.step("", *((name, {"initial_count": row["expected_count"]}) for name in names))
    assert [json.loads(answer["content"]) for answer in answers] == [
        {"error": f"there is no tool {name!r}"} for name in names
    ]
    answers, _, _ = await player.step("", ("no_such_tool", {}))
    assert json.loads(answers[0]["content"]) == {"detail": "Not Found"}
    assert (await player.step("Done."))[1] == 0.0


async def test_a_row_that_the_server_refuses_names_its_field(servers: Any) -> None:
    row = {"responses_create_params": {"input": [{"role": "user", "content": "count"}]}, "initial_count": "many"}
    environment = NemoGymEnvironment({"url": servers("example_session_state_mgmt")})
    with pytest.raises(UnusableRow, match=r"^metadata\.initial_count: Input should be a valid integer"):
        await environment.reset([episode(row)])
    row["initial_count"] = 1  # type: ignore[assignment]
    player = Player(environment, episode(row))
    await player.reset()
    with pytest.raises(UnusableRow, match=r"^metadata\.expected_count: Field required"):
        await player.step("Done.")


async def test_a_server_that_is_not_there_is_named() -> None:
    environment = NemoGymEnvironment({"url": "http://127.0.0.1:9/", "connectSeconds": 0})
    with pytest.raises(ServerError, match=r"^http://127\.0\.0\.1:9/seed_session: Connection refused"):
        await environment.reset([episode({"responses_create_params": {"input": []}})])


@pytest.mark.parametrize("recovery", ["restart", "metadata"])
def test_the_contract(nemo_gym: Path, servers: Any, recovery: str) -> None:
    rows = [
        {"messages": row.pop("responses_create_params")["input"], "metadata": row}
        for row in examples(nemo_gym, "mcqa")[:2]
    ]
    config = {"url": servers("mcqa"), "recovery": recovery}
    results = {result.check: result.status for result in check_environment("nemo_gym", config, rows=rows)}
    assert results["nonsense"] == results["closing"] == results["batches"] == "ok"
    assert results["state"] == ("ok" if recovery == "metadata" else "skipped")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.url: "),
        ({"url": "gym:8000"}, "config.url: found 'gym:8000'"),
        ({"url": "http://gym", "recovery": "replay"}, "config.recovery: found 'replay'"),
    ],
)
def test_a_wrong_config_names_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableEnvironment, match=message):
        NemoGymEnvironment(config)


def test_messages_are_items_of_the_responses_api() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "<think>How?</think>\n", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "dark"},
        {"role": "assistant", "content": "Hm.</think> It is dark."},
    ]
    function_call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    answer = {"type": "function_call_output", "call_id": "c", "output": "dark"}
    reasoning, called, answered, second, message = output_items(chat)
    assert (called, answered) == (function_call, answer)
    assert [item["summary"][0]["text"] for item in (reasoning, second)] == ["How?", "Hm."]
    assert message["content"][0]["text"] == "It is dark."
    user, earlier, *rest = input_items(chat[:3])
    assert (user["role"], earlier["content"], rest) == ("user", "<think>How?</think>\n", [function_call, answer])
