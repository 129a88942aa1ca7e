"""Agents through the loop: real HTTP, vLLM's own API over a simulated engine, and the sessions of a replica."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kuberoll_api.model.environments import Environment
from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord, decode_line, encode_line
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.outcome import StepOutcome
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.output.parquet import read_parquet, write_parquet
from kuberoll_workers.players.session_trajectories import agent_trajectory
from kuberoll_workers.players.sessions import player_of
from kuberoll_workers.policy.agent_sessions import ClosedSession, SessionMessage, SessionPath, SessionTiming
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.routing.discovery import StaticDiscovery
from kuberoll_workers.policy.routing.router import RoutedPolicy
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import RetryPolicy
from kuberoll_workers.telemetry import RolloutMetrics
from tests.policy.openai_serving import serving_openai, tokenizer_with_ends
from tests.rollouts import agent_functions, fakes
from tests.rollouts.agent_functions import LOOK
from tests.serving.test_openai_api import Scripted

pytestmark = pytest.mark.slow

FUNCTIONS = "tests.rollouts.agent_functions"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_with_ends(tmp_path_factory.mktemp("tokenizer"))


class Fleet:
    """A replica with sessions, and what is needed to run agents against it."""

    def __init__(self, url: str, engine: Scripted, tokenizer: HuggingFaceTokenizer) -> None:
        self.url, self.engine, self.tokenizer = url, engine, tokenizer

    async def roll(
        self, samples: Sequence[Sample], agent: Any, *, isolation: str = "Inline", processes: int = 2, **changes: Any
    ) -> list[Any]:
        spec = Environment.model_validate(
            {"name": "env", "agent": agent, "isolation": isolation, "config": changes.pop("config", {})}
        )
        urls = changes.pop("urls", [self.url])
        metrics = changes.pop("metrics", None) or RolloutMetrics("test")
        executor = make_executor(
            PlainSpec.of(spec), isolation=isolation, processes=processes, timeout=spec.call_seconds
        )
        runner = EnvironmentRunner(executor, max_batch=spec.call_size)
        results: dict[Any, Any] = {}

        async def sink(result: Any) -> None:
            assert result.key not in results
            results[result.key] = result

        changes.setdefault("max_sequence_length", 2048)
        try:
            async with RoutedPolicy(StaticDiscovery(urls), lambda url: ServeClient(url, limit=64)) as policy:
                rollout = Rollout(
                    policy=policy,
                    environments={"env": runner},
                    tokenizer=self.tokenizer,
                    settings=fakes.settings(**changes),
                    metrics=metrics,
                    players={"env": player_of(spec)},
                )
                await run_rollout(rollout, samples, sink)
        finally:
            await runner.close()
        return [results[item.key] for item in samples]


@asynccontextmanager
async def fleet_at(place: Path) -> AsyncIterator[Fleet]:
    engine = Scripted(tokenizer=place, window=2048)
    await engine.start()
    async with serving_openai(engine, tool_parser="hermes") as url:
        yield Fleet(url, engine, HuggingFaceTokenizer.load(str(place)))
    await engine.shutdown()


@pytest.fixture
async def fleet(place: Path) -> AsyncIterator[Fleet]:
    async with fleet_at(place) as made:
        yield made


def of(record: TrajectoryRecord, role: str) -> list[Any]:
    return [message for message in record.messages if message.role == role]


def all_ids(messages: Sequence[Any]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_the_calls_of_an_agent_are_the_turns_of_its_trajectory(fleet: Fleet, isolation: str) -> None:
    samples = [fakes.sample(0, index, prompt="hi", metadata={"turns": 3}) for index in range(4)]
    records = await fleet.roll(samples, {"entrypoint": f"{FUNCTIONS}:talk"}, isolation=isolation)
    for record in records:
        assert isinstance(record, TrajectoryRecord)
        assert (record.stop_reason, record.turn_count, record.rewards) == ("terminated", 3, [0.0, 0.0, 3.0])
        assert record.reward_parts == {"turns": [0.0, 0.0, 3.0]}
        assert record.token_source == "engine"
        assert record.branches is None
        roles = [message.role for message in record.messages]
        assert roles == ["user", "assistant", "user", "assistant", "user", "assistant", "environment"]
        assert [message.content for message in of(record, "user")] == ["hi", "and 0?", "and 1?"]
        assert record.metadata == {"said": record.answer}
        assert all(len(message.logprobs) == len(message.token_ids) > 0 for message in of(record, "assistant"))
        # What the engine read in the last call, and what it sampled then, are the whole.
        whole = all_ids(record.messages)
        assert any(
            whole[: len(request.token_ids)] == request.token_ids.tolist()
            and len(request.token_ids) + len(record.messages[-2].token_ids) == len(whole)
            for request in fleet.engine.requests
        )
        assert record.continuity is not None
        assert sum(record.continuity.values()) == 3


async def test_an_agent_s_calls_of_tools_are_as_those_of_environments(fleet: Fleet) -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    fleet.engine.answers = [[*fleet.tokenizer.encode(text), 1] for text in (f"I look.{call}{call}", call)]
    (record,) = await fleet.roll([fakes.sample(prompt="hi")], {"entrypoint": f"{FUNCTIONS}:look_around"})
    assert isinstance(record, TrajectoryRecord), record.cause
    assert record.tools == [LOOK]
    first, last = of(record, "assistant")
    # Without the token that ended it, which is in its ids.
    assert (first.content, last.content) == (f"I look.{call}{call}", call)
    assert (first.fields["text"], last.fields["text"]) == ("I look.", "")
    answers = [message.fields["tool_call_id"] for message in of(record, "tool")]
    assert [made["id"] for made in first.fields["tool_calls"]] == answers
    # Nobody has answered it.
    assert [made["id"] for made in last.fields["tool_calls"]] == ["call00201"]
    assert record.continuity == {"new": 1, "realigned": 1}


async def test_the_same_seed_gives_the_same_trajectory(fleet: Fleet) -> None:
    samples = [
        fakes.sample(0, index, prompt="hi", metadata={"turns": 2}, seed=seed) for index, seed in enumerate((5, 5, 6))
    ]
    records = await fleet.roll(samples, {"entrypoint": f"{FUNCTIONS}:talk"})
    seeds = [request.sampling.seed for request in fleet.engine.requests]
    assert len(seeds) == 6
    assert len(set(seeds)) == 4
    assert all_ids(records[0].messages) == all_ids(records[1].messages)


async def test_a_history_of_the_agent_s_own_is_a_branch(fleet: Fleet, tmp_path: Path) -> None:
    (record,) = await fleet.roll([fakes.sample(prompt="hi")], {"entrypoint": f"{FUNCTIONS}:rewrite"})
    assert record.continuity == {"new": 1, "forked": 1}
    assert record.turn_count == 1
    (branch,) = record.branches
    assert [message.content for message in branch.messages][:2] == ["hi", "second"]
    assert branch.learn == [2]
    assert len(branch.messages[2].logprobs) == len(branch.messages[2].token_ids) > 0
    line = encode_line(record)
    assert encode_line(decode_line(line, TrajectoryRecord, where="a:1")) == line
    write_parquet(tmp_path / "a.parquet", [record])
    (read,) = read_parquet(tmp_path / "a.parquet", where="a", unreadable=lambda error: pytest.fail(str(error)))
    assert encode_line(read) == line


async def test_limits_of_the_job_are_limits_of_the_session(fleet: Fleet) -> None:
    agent = {"entrypoint": f"{FUNCTIONS}:talk"}
    (record,) = await fleet.roll([fakes.sample(prompt="hi", metadata={"turns": 5})], agent, max_turns=2)
    assert isinstance(record, FailureRecord)
    assert (record.kind, record.stage) == ("environment", "environment")
    assert "this session has had its 2 calls (spec.rollout.maxTurns)" in record.cause
    (record,) = await fleet.roll([fakes.sample(prompt="hi", metadata={"turns": 5})], agent, max_sequence_length=40)
    assert isinstance(record, FailureRecord)
    assert "maxSequenceLength" in record.cause


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("refuse", "step raised KeyError: 'answer'"),
        ("sleep", "run took longer than agent.timeouts.runSeconds (0.2 s)"),
        ("silent", "the agent ended without an answered call of the policy: there is no trajectory"),
        ("confused", "the agent returned str 'much'; it must return a reward"),
    ],
)
async def test_a_failure_of_an_agent_is_its_own(fleet: Fleet, function: str, cause: str) -> None:
    agent = {"entrypoint": f"{FUNCTIONS}:{function}", "timeouts": {"runSeconds": 0.2 if function == "sleep" else 60}}
    (record,) = await fleet.roll([fakes.sample(prompt="hi")], agent)
    assert isinstance(record, FailureRecord)
    assert record.kind == "environment"
    assert record.cause.startswith(cause)


async def test_what_an_agent_did_before_it_failed_is_in_its_record(fleet: Fleet) -> None:
    metrics = RolloutMetrics("test")
    retries = RetryPolicy(environment_attempts=2, backoff_seconds=0.01)
    agent = {"entrypoint": f"{FUNCTIONS}:confused"}
    (record,) = await fleet.roll([fakes.sample(prompt="hi")], agent, metrics=metrics, retries=retries)
    assert isinstance(record, FailureRecord)
    assert [message.role for message in record.messages] == ["user", "assistant"]
    assert all_ids(record.messages[:1]) == fleet.engine.requests[-1].token_ids.tolist()
    metrics.flush()

    def count(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"rolloutjob": "test", "environment": "env", **labels})

    assert count("kuberoll_agent_calls_total", continuity="new") == 2
    assert count("kuberoll_tokens_total", kind="generated") == 2 * len(record.messages[1].token_ids)


def test_the_time_outside_of_calls_is_the_environment_s(place: Path) -> None:
    def read(*ids: int) -> SessionMessage:
        return SessionMessage(role="context", content="", token_ids=list(ids))

    def said(*ids: int) -> SessionMessage:
        return SessionMessage(role="assistant", content="", token_ids=list(ids), logprobs=[0.0], learn=True)

    path = SessionPath(
        messages=[read(1), said(2), read(3), said(4)],
        timing=SessionTiming(generation_seconds=[1.0, 2.0], ended_at=[12.0, 16.0]),
    )
    closed = ClosedSession(opened_at=10.0, calls=2, trajectories=[path])
    end = StepOutcome("environment", "", None, None, 1.0, terminated=True)
    made = agent_trajectory(fakes.sample(), fakes.settings(), closed, end, lambda _: "", seconds=9.5)
    timing = made.record().timing
    assert timing.environment_seconds == [1.0, 2.0 + 3.5]
    assert timing.ended_at == [12.0, 19.5]


@pytest.mark.parametrize("function", ["meet", "meet_and_hide"])
async def test_an_agent_whose_replica_is_gone_starts_over_at_another(place: Path, function: str) -> None:
    meeting = agent_functions.Meeting()
    agent_functions.MEETING.set(meeting)
    async with AsyncExitStack() as one, AsyncExitStack() as two:
        stacks: dict[str, AsyncExitStack] = {}
        for stack in (one, two):
            fleet = await stack.enter_async_context(fleet_at(place))
            stacks[fleet.url] = stack
        rolling = asyncio.create_task(
            fleet.roll(
                [fakes.sample(0, 0, prompt="hi")],
                {"entrypoint": f"{FUNCTIONS}:{function}"},
                urls=list(stacks),
                # A lost session is no attempt of the agent's.
                retries=RetryPolicy(environment_attempts=1),
            )
        )
        await meeting.reached.wait()
        await stacks[meeting.urls[0].partition("/sessions/")[0]].aclose()
        meeting.over.set()
        (record,) = await rolling
    assert isinstance(record, TrajectoryRecord)
    assert (record.turn_count, record.total_reward) == (1, 1.0)
    assert record.branches is not None
    assert len({url.partition("/sessions/")[0] for url in meeting.urls}) == 2


async def test_a_class_goes_through_its_phases(fleet: Fleet) -> None:
    (record,) = await fleet.roll(
        [fakes.sample(prompt="hi", metadata={"turns": 1})], {"entrypoint": f"{FUNCTIONS}:Phased"}, config={"level": 3}
    )
    assert record.metadata == {"seen": ["setup", '{"level": 3}', "run", "score"]}
    assert record.total_reward == 2.0
    from tests.rollouts.agent_functions import Phased

    assert Phased.closed.count("0-0-0") == 1


PROGRAM = """
import json, os, sys, urllib.request
episode = json.load(sys.stdin)
assert episode == json.load(open(os.environ["KUBEROLL_EPISODE"]))
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": episode["messages"]}).encode()
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request))
open("answer.txt", "w").write(answer["choices"][0]["message"]["content"])
print("thinking")
if not os.path.exists("setup.txt"):
    print(json.dumps({"reward": {"format": 0.5, "answer": 1}, "metadata": {"where": os.getcwd()}, "answer": "four"}))
"""


async def test_a_program_is_an_agent(fleet: Fleet) -> None:
    samples = [fakes.sample(0, index, prompt="hi") for index in range(3)]
    records = await fleet.roll(samples, {"command": [sys.executable, "-c", PROGRAM]}, isolation="Process")
    for record in records:
        assert isinstance(record, TrajectoryRecord), record.cause
        assert (record.total_reward, record.answer, record.turn_count) == (1.5, "four", 1)
    # Each has had a directory of its own, which is gone.
    assert len({record.metadata["where"] for record in records}) == 3
    assert not any(os.path.exists(record.metadata["where"]) for record in records)  # noqa: ASYNC240, PTH110


async def test_programs_share_their_directory(fleet: Fleet) -> None:
    agent = {
        "setup": ["sh", "-c", "echo ready > setup.txt"],
        "command": [sys.executable, "-c", PROGRAM],
        "score": ["sh", "-c", 'test -s answer.txt && echo 0.25 > "$KUBEROLL_RESULT"'],
    }
    (record,) = await fleet.roll([fakes.sample(prompt="hi")], agent)
    assert isinstance(record, TrajectoryRecord), record.cause
    assert record.total_reward == 0.25


async def test_what_a_program_leaves_behind_holds_nothing_up(fleet: Fleet, tmp_path: Path) -> None:
    left = tmp_path / "left"
    program = f"{PROGRAM}\nimport subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n"
    program += f"open({str(left)!r}, 'w').write(str(child.pid))"
    (record,) = await fleet.roll([fakes.sample(prompt="hi")], {"command": [sys.executable, "-c", program]})
    assert isinstance(record, TrajectoryRecord), record.cause
    assert record.total_reward == 1.5
    pid = int(left.read_text())
    await fakes.until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (["sh", "-c", "echo no money >&2; exit 3"], "agent.command: sh ended with exit code 3: no money"),
        (["sh", "-c", "kill -9 $$"], "agent.command: sh ended with signal 9"),
        (["no-such-agent"], "agent.command: no-such-agent could not be started: No such file or directory"),
        (["sh", "-c", "echo done"], "agent.command: the last line of its output is no JSON; write the reward"),
        (["sh", "-c", 'echo \'{"reward": "high"}\''], "agent.command: the last line of its output has the reward"),
    ],
)
async def test_a_program_that_fails_says_why(fleet: Fleet, command: list[str], cause: str) -> None:
    (record,) = await fleet.roll([fakes.sample(prompt="hi")], {"command": command})
    assert isinstance(record, FailureRecord)
    assert cause in record.cause
