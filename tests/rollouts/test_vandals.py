"""An environment in the worker's own process may change whatever it is given: nothing but its answer counts."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kuberoll_workers.data.messages import ExtendedMessage, token_array
from kuberoll_workers.data.prompts import Prompt, Sample, SampleGroup
from kuberoll_workers.data.record import Timing, TrajectoryRecord, encode_line
from kuberoll_workers.environments.interface import EnvironmentReturn, EpisodeEnd, EpisodeStart, GroupMember, GroupScore
from kuberoll_workers.policy.interface import SamplingParameters
from kuberoll_workers.rollouts.scheduling import run_groups
from tests.rollouts.fakes import ScriptedPolicy, rollout_of, runners

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
RESPONSE = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def spoil(value: Any) -> None:
    """Change a value in place, at every depth."""
    if isinstance(value, dict):
        for inner in value.values():
            spoil(inner)
        value.clear()
        value["spoiled"] = True
    elif isinstance(value, list):
        for inner in value:
            spoil(inner)
        value.append({"role": "assistant", "content": "spoiled"})


class Polite:
    """Two turns, the first step of which fails once, with what each call is given."""

    recovery = "metadata"

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.failed: set[str] = set()

    def take(self, *values: Any) -> None:
        self.given += copy.deepcopy(values)

    def reset(self, episodes: list[Any]) -> list[EpisodeStart]:
        starts = []
        for episode in episodes:
            self.take(episode.messages, episode.metadata, episode.tools)
            starts.append(EpisodeStart(messages=[{"role": "user", "content": "Look."}], metadata={"id": episode.id}))
        return starts

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        names, turns = [state["id"] for state in metadata], [[*state.get("turns", [0])] for state in metadata]
        self.take(logs, metadata)
        for name in names:
            if name not in self.failed:
                self.failed.add(name)
                raise ValueError("once")
        states = [{"id": name, "turns": [*turn, 1]} for name, turn in zip(names, turns, strict=True)]
        observations = [[{"role": "tool", "tool_call_id": "c1", "content": "a tree"}] for _ in names]
        return EnvironmentReturn(observations, states, None, [1.0] * len(names), [len(turn) > 1 for turn in turns])

    def score_group(self, members: list[GroupMember]) -> list[GroupScore]:
        for member in members:
            self.take(member.messages, member.metadata)
        return [GroupScore(reward=0.5) for _ in members]

    def close(self, ends: list[EpisodeEnd]) -> None:
        for end in ends:
            self.take(end.metadata)


class Vandal(Polite):
    def take(self, *values: Any) -> None:
        super().take(*values)
        for value in values:
            spoil(value)


class AsynchronousVandal(Vandal):
    async def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:  # type: ignore[override]
        return super().step(logs, metadata)


async def played(environment: Any) -> tuple[list[bytes], list[Any]]:
    """Lines of two samples of one prompt whose history calls a tool, and what the environment was given."""
    prompt = Prompt(
        task_index=0,
        task_name="env",
        idx={"row": [1]},
        messages=(ExtendedMessage("assistant", "", token_array([5]), fields={"tool_calls": [copy.deepcopy(CALL)]}),),
        token_ids=token_array([5]),
        metadata={"nested": {"list": [1]}},
        stop_strings=None,
        sampling={},
        tools=copy.deepcopy(TOOLS),
    )
    lines: list[bytes] = []

    async def sink(result: Any) -> None:
        assert isinstance(result, TrajectoryRecord), result
        result.timing = Timing([], [])
        result.incidents = None
        lines.append(encode_line(result))

    async with runners({"env": environment}) as made:
        rollout = rollout_of(
            made,
            policy=ScriptedPolicy(lambda _: RESPONSE),
            sampling=SamplingParameters(max_tokens=200),
            # One at a time, so that the calls are in the same order every time.
            concurrency=1,
        )
        samples = tuple(Sample(prompt=prompt, rollout_index=index, seed=7) for index in range(2))
        await run_groups(rollout, [SampleGroup(samples=samples, keep=2)], sink)
    return lines, environment.given


@pytest.mark.parametrize("vandal", [Vandal, AsynchronousVandal])
async def test_what_an_environment_changes_in_place_changes_nothing(vandal: type[Vandal]) -> None:
    polite = await played(Polite())
    assert len(polite[0]) == 2
    assert b'"arguments":"{}"' in polite[0][0]
    assert await played(vandal()) == polite
