"""Agents of several SDKs play a game with tools: with a scripted engine, and with the real one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import TrajectoryRecord
from tests.local import agent_sdks, branching
from tests.local.tool_policy import Scorer, train

pytestmark = [pytest.mark.engine, pytest.mark.long]

ROWS = [{"prompt": "What is 6 times 7?", "metadata": {"ground_truth": 42}}]
# As templates write calls, and otherwise: what is sampled is not what a chat is encoded to.
MULTIPLY = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"a":  40, "b": 2}}\n</tool_call>'
BOTH = f"I do both.{MULTIPLY}{ADD}"

SDKS: list[dict[str, Any]] = [
    {"name": "openai-sdk"},
    {"name": "openai-agents"},
    {"name": "openai-agents-responses", "like": "openai-agents", "config": {"api": "responses"}},
    {"name": "langchain"},
    {"name": "langchain-streams", "like": "langchain", "config": {"stream": True}},
    {"name": "pydantic-ai"},
]
REQUIRED: list[dict[str, Any]] = [
    {**item, "name": f"{item['name']}-required", "like": item["name"], "config": {"toolChoice": "required"}}
    for item in SDKS
    if item["name"] in ("openai-sdk", "pydantic-ai")
]
REPEATS = 4
# The tiny policy has learned the game in seconds: hotter, it often forgets how calls are written.
TEMPERATURE = 0.5
NAMES = [item["name"] for item in SDKS]


def of(records: Sequence[TrajectoryRecord], name: str) -> list[TrajectoryRecord]:
    return [record for record in records if record.task_name == name]


def fields(message: Message) -> dict[str, Any]:
    return getattr(message, "fields", {})


def sampled(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message.logprobs is not None]


def outcome(call: dict[str, Any]) -> str:
    """What the calculator gives."""
    numbers = json.loads(call["function"]["arguments"])
    a, b = numbers["a"], numbers["b"]
    return str(a * b if call["function"]["name"] == "multiply" else a + b)


def check_one_path(record: TrajectoryRecord) -> None:
    """Each call of the policy is a turn that continues the one before it, and each call of a tool is answered."""
    responses = sampled(record.messages)
    assert record.branches is None
    assert record.continuity is not None
    assert record.continuity["new"] == 1
    assert set(record.continuity) <= {"new", "clean", "realigned"}
    assert sum(record.continuity.values()) == record.turn_count == len(responses)
    assert record.tools is not None
    assert {tool["function"]["name"] for tool in record.tools} >= {"add", "multiply"}
    for number, response in enumerate(record.messages):
        calls = fields(response).get("tool_calls", ())
        answers = record.messages[number + 1 : number + 1 + len(calls)]
        if response is not responses[-1]:
            assert [call["id"] for call in calls] == [fields(answer)["tool_call_id"] for answer in answers]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> list[TrajectoryRecord]:
    texts = [MULTIPLY, BOTH, "42", " 42\n", "41"]
    return agent_sdks.play(
        tmp_path_factory.mktemp("scripted"),
        generation={
            "engine": "Simulated",
            "simulated": {"responses": [f"{text}<|end|>" for text in texts]},
            "engineArgs": {"max_model_len": 2048},
        },
        environments=SDKS,
        rows=ROWS,
        repeats=10,
        arguments=["--serve"],
    )


# The real engine's games show the same of each SDK but for the two calls beside each other.
@pytest.mark.parametrize("name", NAMES)
def test_agents_use_tools_and_are_rewarded_for_the_answer(scripted: list[TrajectoryRecord], name: str) -> None:
    records = of(scripted, name)
    assert len(records) == 10
    for record in records:
        check_one_path(record)
        responses = sampled(record.messages)
        for response in responses:
            made = [call["function"]["name"] for call in fields(response).get("tool_calls", ())]
            assert made == {MULTIPLY: ["multiply"], BOTH: ["multiply", "add"]}.get(response.content, [])
            if made:
                assert fields(response)["text"] == ("I do both." if len(made) == 2 else "")
        assert {message.content for message in record.messages if message.role == "tool"} <= {"42"}
        assert record.total_reward == (responses[-1].content.strip() == "42")
        if "tool_calls" not in fields(responses[-1]):
            assert record.answer == responses[-1].content.strip()
    # Draws of the script, which depend on the seeds alone: games with several turns and calls beside each other.
    assert {0.0, 1.0} == {record.total_reward for record in records}
    assert any(record.turn_count > 2 for record in records)
    assert any(message.content == BOTH for record in records for message in record.messages[:-2])


def transcripts() -> Iterator[list[tuple[str, bool]]]:
    """Games as the policy is to play them: parts of a sequence, and whether the policy writes them."""
    system = "Calculate with the tools. Answer with the number alone."
    question, turn, answer = "<|user|>What is 6 times 7?<|end|>", "<|assistant|>", "<|tool|>42<|end|>"
    game = (f"<|begin|>add;multiply;<|system|>{system}<|end|>{question}{turn}", False)
    won = ("42<|end|>", True)
    yield [game, (f"{MULTIPLY}<|end|>", True), (f"{answer}{turn}", False), won]
    yield [game, (f"{BOTH}<|end|>", True), (f"{answer * 2}{turn}", False), won]
    yield [game, (f"{ADD}<|end|>", True), (f"{answer}{turn}", False), (f"{MULTIPLY}<|end|>", True),
           (f"{answer}{turn}", False), won]  # fmt: skip
    yield [(f"<|begin|>{question}{turn}", False), won]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("policy") / "model", list(transcripts()))


@pytest.fixture(scope="module")
def played(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TrajectoryRecord]:
    directory = tmp_path_factory.mktemp("played")
    shutil.copy(branching.__file__, directory)
    branches = {"name": "branching", "like": "openai-sdk", "agent": {"entrypoint": "branching:play"}}
    return agent_sdks.play(
        directory,
        generation={
            "model": {"source": str(policy), "chatTemplate": agent_sdks.CHAT_TEMPLATE},
            "engineArgs": {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32},
            "sampling": {"maxTokens": 200, "temperature": TEMPERATURE, "seed": 1},
        },
        # In one process, which imports the SDKs once: those of the other run have processes of their own.
        environments=[{**item, "isolation": "Inline"} for item in (*SDKS, *REQUIRED, branches)],
        rows=ROWS,
        repeats=REPEATS,
    )


def test_every_path_scores_as_it_was_sampled(policy: Path, played: list[TrajectoryRecord]) -> None:
    """The engine has read, in each call, exactly the ids that the path has before it."""
    scorer = Scorer(policy, temperature=TEMPERATURE)
    compared = 0
    for record in played:
        demanded = {"openai-sdk-required": 1, "pydantic-ai-required": 100}.get(record.task_name, 0)
        choices = ["required"] * demanded
        for messages in (record.messages, *(branch.messages for branch in record.branches or ())):
            for message, scores in scorer.score(messages, record.tools or (), (*choices, *["auto"] * 100)):
                assert list(message.logprobs or ()) == pytest.approx(scores, abs=1e-3)
                compared += 1
    assert compared > len(played)


def test_tools_that_must_be_called_are(played: list[TrajectoryRecord]) -> None:
    for name in ("openai-sdk-required", "pydantic-ai-required"):
        records = of(played, name)
        assert len(records) == REPEATS
        for record in records:
            check_one_path(record)
            first, *_ = sampled(record.messages)
            assert fields(first)["tool_calls"]


def test_answers_of_tools_are_those_of_their_calls(played: list[TrajectoryRecord]) -> None:
    compared = 0
    for record in played:
        answers = {
            fields(message)["tool_call_id"]: message.content for message in record.messages if message.role == "tool"
        }
        for response in sampled(record.messages)[:-1]:
            for call in fields(response).get("tool_calls", ()):
                if call["function"]["name"] in ("add", "multiply") and answers[call["id"]].isdecimal():
                    assert answers[call["id"]] == outcome(call)
                    compared += 1
    assert compared > 0


@pytest.mark.parametrize("name", NAMES)
def test_games_are_played_by_the_real_engine(played: list[TrajectoryRecord], name: str) -> None:
    # The policy also writes calls that cannot be read; a parser of streams makes others of them.
    records = [record for record in of(played, name) if not any(map(garbled, sampled(record.messages)))]
    assert records
    for record in records:
        check_one_path(record)
    assert any(record.total_reward == 1.0 and record.turn_count > 1 for record in records)


def garbled(response: Message) -> bool:
    """True for a response that is neither calls nor an answer."""
    return "tool_calls" not in fields(response) and not response.content.strip().isdecimal()


def test_branches_of_an_agent_are_learned_from_once(played: list[TrajectoryRecord]) -> None:
    records = of(played, "branching")
    assert len(records) == REPEATS
    for record in records:
        assert record.continuity is not None
        # Two answers and a stream to one prompt, three ways on, and a history that nobody has sampled.
        assert sum(record.continuity.values()) == 7
        assert record.continuity["forked"] == 1
        assert record.branches is not None
        learned = [branch.messages[number] for branch in record.branches for number in branch.learn]
        learned += sampled(record.messages)
        assert record.metadata is not None
        assert sorted(message.content for message in learned) == sorted(record.metadata["answers"])
        assert len(learned) == 7
