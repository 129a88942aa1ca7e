"""Servers of other libraries that are killed in the middle of a run and started again: it ends as if they were not."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.data.tools import checked_tools
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import RetryPolicy
from kuberoll_workers.telemetry import RolloutMetrics
from tests.adapters.libraries import test_nemo_gym, test_openenv
from tests.adapters.libraries.foreign import Server, packages
from tests.adapters.libraries.test_lost_processes import turn_of
from tests.rollouts.fakes import ScriptedPolicy, rollout_of, sample

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300, func_only=True)]

TRAJECTORIES = 64


def called(*calls: dict[str, Any]) -> str:
    return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


def guess(request: Any) -> str:
    row, turn = turn_of(request)
    return f'<action>{{"value": {1 + (row + turn) % 8}}}</action>'


def shop(request: Any) -> str:
    row, turn = turn_of(request)
    return called({"name": "price", "arguments": {"item": "x" * row}}) if turn < 4 else f"{row + row % 2}"


COUNTER_ROWS = [{"initial_count": 3, "expected_count": expected} for expected in (9, 12)]


def count(request: Any) -> str:
    """Three times two is right for every other row."""
    _, turn = turn_of(request)
    call = {"name": "increment_counter", "arguments": {"count": 2}}
    return called(call) if turn < 4 else "Done."


class Subject(NamedTuple):
    """An environment and its server.

    Attributes:
        start: Starts the server with a file for its log.
        metadata: Of a row.
        kills: Rows and turns before which the server is killed.
        recovers: An episode has a state, which is lost with the server.
    """

    type: str
    config: dict[str, Any]
    path: str
    start: Callable[[Path], Server]
    metadata: Callable[[int], dict[str, Any]]
    reply: Callable[[Any], str]
    tools: Any = None
    kills: frozenset[tuple[int, int]] = frozenset({(3, 2), (41, 3)})
    recovers: bool = True


def openenv(log: Path) -> Server:
    path = packages("openenv-0.10.0", test_openenv.REQUIREMENTS)
    return Server("serve_openenv.py", "number", str(log.parent), "64", path=path, log=log)


def package_of_nemo_gym() -> Path:
    return packages("nemo-gym-0.4.0", test_nemo_gym.REQUIREMENTS)


def nemo_gym(name: str, log: Path) -> Server:
    return Server("serve_nemo_gym.py", name, path=package_of_nemo_gym(), log=log)


def example(name: str, row: int) -> dict[str, Any]:
    """Fields of a row of the package's examples."""
    found = test_nemo_gym.examples(package_of_nemo_gym(), name)
    return {key: value for key, value in found[row % len(found)].items() if key != "responses_create_params"}


def choose(request: Any) -> str:
    row, _ = turn_of(request)
    return f"It is \\boxed{{{'ABCDEFGHIJ'[row % 10]}}}"


def answer_half(request: Any) -> str:
    row, _ = turn_of(request)
    return f"It is {example(MULTI_TURN, row)['expected_answer']}." if row % 8 < 4 else "Hm."


MULTI_TURN = "example_multi_turn_gymnasium"


def mcp(log: Path) -> Server:
    return Server("serve_mcp.py", "http", path=log.parent, log=log)


INCREMENT = {
    "type": "function",
    "function": {
        "name": "increment_counter",
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}},
    },
}
SUBJECTS = {
    "openenv-replay": Subject(
        "openenv", {"observation": "text", "recovery": "replay"}, "", openenv, lambda row: {}, guess
    ),
    "openenv-restart": Subject("openenv", {"observation": "text"}, "", openenv, lambda row: {}, guess),
    "nemo_gym-steps": Subject(
        "nemo_gym",
        {"agent": "gymnasium_agent"},
        "",
        functools.partial(nemo_gym, MULTI_TURN),
        functools.partial(example, MULTI_TURN),
        answer_half,
        kills=frozenset({(3, 2), (41, 2)}),
    ),
    # One that only verifies.
    "nemo_gym-verifies": Subject(
        "nemo_gym",
        {"recovery": "metadata"},
        "",
        functools.partial(nemo_gym, "mcqa"),
        functools.partial(example, "mcqa"),
        choose,
        kills=frozenset({(3, 1), (41, 1)}),
        recovers=False,
    ),
    "nemo_gym-tools": Subject(
        "nemo_gym",
        {},
        "",
        functools.partial(nemo_gym, "example_session_state_mgmt"),
        lambda row: COUNTER_ROWS[row % 2],
        count,
        checked_tools([INCREMENT], "tools"),
    ),
    "mcp": Subject(
        "mcp", {"scorer": {"type": "string_match"}}, "/mcp", mcp, lambda row: {"ground_truth": str(row)}, shop
    ),
}


async def play(
    subject: Subject,
    server: Server,
    isolation: Any,
    kills: Set[tuple[int, int]],
    kill: Callable[[Server], None] = Server.restart,
    *,
    connect_seconds: float = 200.0,
) -> tuple[dict[Any, Any], float]:
    """What has become of the trajectories, by key, and the number of episodes that were recovered."""
    url = f"{server.url}{subject.path}"
    place = {"servers": {"shop": {"url": url}}} if subject.type == "mcp" else {"url": url}
    # On a machine that has other things to do, a server takes a while to start.
    config = {**subject.config, **place, "connectSeconds": connect_seconds}
    spec = PlainSpec(name="env", type=subject.type, entrypoint=None, config=config)
    runner = EnvironmentRunner(
        make_executor(spec, isolation=isolation, processes=2, timeout=240), max_batch=TRAJECTORIES
    )
    left = set(kills)

    def answer_after_kill(request: Any) -> str:
        if turn_of(request) in left:
            left.discard(turn_of(request))
            kill(server)
        return subject.reply(request)

    results: list[Any] = []

    async def sink(result: Any) -> None:
        results.append(result)

    metrics = RolloutMetrics("test")
    samples = [
        sample(row, metadata=dict(subject.metadata(row)), sampling={"max_tokens": 400}) for row in range(TRAJECTORIES)
    ]
    samples = [
        replace(made, prompt=replace(made.prompt, seed=100 + made.prompt.task_index, tools=subject.tools))
        for made in samples
    ]
    try:
        rollout = rollout_of(
            {"env": runner},
            policy=ScriptedPolicy(answer_after_kill),
            metrics=metrics,
            concurrency=16,
            max_sequence_length=100_000,
            # Both kills may hit the same step of a trajectory.
            retries=RetryPolicy(environment_attempts=3, backoff_seconds=0.0),
        )
        await run_rollout(rollout, samples, sink)
    finally:
        await runner.close()
    assert not left
    found = {record.key: record for record in results}
    assert len(found) == len(results) == TRAJECTORIES
    items = [item for family in metrics.registry.collect() for item in family.samples]
    recovered = sum(item.value for item in items if item.name == "kuberoll_episode_recoveries_total")
    return found, recovered


# Clients of servers are the same in either isolation, and those of NeMo Gym's servers for each of them; each server
# takes seconds to start.
USUAL = {
    ("openenv-replay", "Process"),
    ("openenv-restart", "Inline"),
    ("mcp", "Process"),
}


@pytest.mark.parametrize(
    ("name", "isolation"),
    [
        pytest.param(name, isolation, marks=() if (name, isolation) in USUAL else [pytest.mark.long])
        for name in sorted(SUBJECTS)
        for isolation in ("Inline", "Process")
    ],
)
async def test_a_killed_server_changes_no_trajectory(tmp_path: Path, name: str, isolation: str) -> None:
    subject = SUBJECTS[name]
    server = subject.start(tmp_path / "log")
    try:
        expected, none = await play(subject, server, isolation, set())
        results, recovered = await play(subject, server, isolation, subject.kills)
    finally:
        server.close()
    assert (none, recovered > 0) == (0, subject.recovers)
    for key, record in results.items():
        assert isinstance(record, TrajectoryRecord), repr(record)
        before = expected[key]
        assert [message.content for message in record.messages] == [message.content for message in before.messages]
        assert (record.rewards, record.stop_reason) == (before.rewards, before.stop_reason)
    assert len({record.total_reward for record in results.values()}) > 1


@pytest.mark.parametrize("name", sorted(SUBJECTS))
async def test_a_server_that_stays_away_is_a_failure_of_each_trajectory(tmp_path: Path, name: str) -> None:
    """Never a reward."""
    subject = SUBJECTS[name]
    server = subject.start(tmp_path / "log")
    try:
        (first, *_) = sorted(subject.kills)
        results, _ = await play(subject, server, "Inline", {first}, Server.close, connect_seconds=0.0)
    finally:
        server.close()
    failures = [record for record in results.values() if isinstance(record, FailureRecord)]
    assert first[0] in {record.task_index for record in failures}
    assert TRAJECTORIES - 1 in {record.task_index for record in failures}
    for failure in failures:
        assert (failure.reason, failure.stage) == ("EnvironmentUnreachable", "environment"), failure.cause
        assert "Disconnected" in failure.cause or "Unreachable" in failure.cause, failure.cause
