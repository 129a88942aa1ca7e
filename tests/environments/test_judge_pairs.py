"""Judged pairs: a prompt group as a tournament, which nobody can win by standing first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.prompts import SampleGroup
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.environments import GroupMember, UnusableEnvironment, UnusableRow
from kuberoll_workers.environments.builtin.judge.pairs import JudgePairsEnvironment, pairs_of
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.rollouts.scheduling import run_groups
from tests.environments.judge_server import Judge, as_json, parts_of, serving
from tests.rollouts.fakes import ScriptedPolicy, rollout_of, sample


def longer(prompt: str) -> str:
    """A judge that prefers the longer answer."""
    first, second = (len(part) for part in parts_of(prompt)[-2:])
    return "[[C]]" if first == second else "[[A]]" if first > second else "[[B]]"


@pytest.fixture
async def judge() -> Judge:
    return Judge(answer=longer)


@pytest.fixture
async def url(judge: Judge) -> AsyncIterator[str]:
    async with serving(judge) as made:
        yield made


def member(number: int, text: str, *, group_reward: float | None = None, metadata: Any = None) -> GroupMember:
    return GroupMember(
        id=f"0-{number}-0",
        messages=[
            {"role": "user", "content": "Explain rain."},
            {"role": "assistant", "content": text},
            {"role": "environment", "content": ""},
        ],
        metadata=metadata,
        reward=0.0,
        stop_reason="terminated",
        group_reward=group_reward,
    )


async def scores(url: str, texts: Sequence[str], **config: Any) -> tuple[list[float], list[Any]]:
    environment = JudgePairsEnvironment({"url": url, **config})
    found = await environment.score_group([member(number, text) for number, text in enumerate(texts)])
    return [score.reward for score in found], [(score.metadata or {})["pairs"] for score in found]


async def test_a_tournament(judge: Judge, url: str) -> None:
    found, kept = await scores(url, ["xx", "x", "xxx", "yy"])
    # Won, lost and tied comparisons with three others.
    assert found == [1.5 / 3, 0.0, 1.0, 1.5 / 3]
    assert len(judge.bodies) == 2 * 6
    assert [(item["against"], item["result"]) for item in kept[0]["compared"]] == [
        ("0-1-0", "won"), ("0-2-0", "lost"), ("0-3-0", "tied"),
    ]  # fmt: skip
    # Word for word what the judge wrote, once for each pair.
    assert [(call["first"], call["text"]) for call in kept[0]["compared"][0]["calls"]] == [
        ("0-0-0", "[[A]]"), ("0-1-0", "[[B]]"),
    ]  # fmt: skip
    assert "calls" not in kept[1]["compared"][0]
    assert {parts_of(prompt)[0] for prompt in judge.prompts} == {"Explain rain."}


async def test_who_stands_first_wins_nothing(judge: Judge, url: str) -> None:
    judge.answer = lambda prompt: "[[A]]"
    assert (await scores(url, ["a", "b", "c"]))[0] == [0.5] * 3
    # Without a swap a biased judge is believed, but everybody stands first equally often.
    assert (await scores(url, ["a", "b", "c"], swap=False))[0] == [0.5] * 3


async def test_a_ring_asks_about_neighbors_only(judge: Judge, url: str) -> None:
    found, _ = await scores(url, ["x", "xx", "xxx", "xxxx"], pairs="Ring", swap=False)
    assert len(judge.bodies) == 4
    assert found == [0.0, 0.5, 0.5, 1.0]


@given(st.integers(0, 12))
def test_pairs(size: int) -> None:
    every, ring = list(pairs_of(size, ring=False)), list(pairs_of(size, ring=True))
    assert len(set(every)) == len(every) == size * (size - 1) // 2
    assert all(one < other for one, other in every)
    assert set(ring) <= set(every)
    if size > 2:
        counts = [sum(number in pair for pair in ring) for number in range(size)]
        assert counts == [2] * size


async def test_nobody_is_asked_about_what_is_clear(judge: Judge, url: str) -> None:
    found, _ = await scores(url, ["", "same", "same", "<think>never ends"])
    assert found == [0.5 / 3, 2.5 / 3, 2.5 / 3, 0.5 / 3]
    assert (await scores(url, ["alone"]))[0] == [0.5]
    assert judge.bodies == []


async def test_stored_members_are_not_compared_with_each_other_again(judge: Judge, url: str) -> None:
    environment = JudgePairsEnvironment({"url": url, "swap": False})
    members = [member(0, "x", group_reward=0.0), member(1, "xx"), member(2, "xxx", group_reward=1.0)]
    found = await environment.score_group(members)
    assert found[1].reward == 0.5
    assert len(judge.bodies) == 2


async def test_verdicts_that_cannot_be_read(judge: Judge, url: str) -> None:
    judge.answer = lambda prompt: "Both are nice."
    with pytest.raises(Exception, match=r"has no verdict: …'Both are nice.'. Set config.unparsed to Tie"):
        await scores(url, ["a", "bb"])
    assert (await scores(url, ["a", "bb"], unparsed="Tie"))[0] == [0.5, 0.5]


async def test_labels_and_json_of_one_s_own(judge: Judge, url: str) -> None:
    judge.answer = lambda prompt: as_json("one" if "[[A]]" in longer(prompt) else "two")
    prompt = "Reference: {reference} one: {first} two: {second} {verdict}"
    config = {"prompt": prompt, "labels": {"one": "first", "two": "second"}, "form": "JSON", "url": url}
    environment = JudgePairsEnvironment(config)
    members = [member(number, "x" * number, metadata={"answer": "water"}) for number in (1, 2)]
    assert [score.reward for score in await environment.score_group(members)] == [0.0, 1.0]
    assert parts_of(judge.prompts[0])[0] == "water"
    with pytest.raises(UnusableRow, match=r"metadata\.ground_truth: found None"):
        await environment.step([[]], [{}])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"prompt": "{first}"}, r"prompt: it must have \{first\} and \{second\}"),
        ({"prompt": "{first} {second} {response}"}, r"and no \{response\}"),
        ({"labels": {"a": "first", "b": "second"}}, "labels: give a prompt that defines them"),
        ({"prompt": "{first} {second}", "labels": {"a": "first", "b": "tie"}}, "one must mean first, and one second"),
        ({"pairs": "Some"}, r"config\.pairs: found 'Some'"),
    ],
)
def test_configs_are_checked(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableEnvironment, match=words):
        JudgePairsEnvironment(config)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_groups_of_a_run(judge: Judge, url: str, isolation: str) -> None:
    """Through the loop: scores are stored, the judge's failure hits its group, and requests are bounded together."""
    judge.answer = lambda prompt: "?" if "bad" in prompt else longer(prompt)
    spec = PlainSpec(name="env", type="judge_pairs", entrypoint=None, config={"url": url, "parallel": 4})
    runner = EnvironmentRunner(make_executor(spec, isolation=isolation, processes=1, timeout=60), max_batch=8)

    def answer(request: Any) -> str:
        task, rollout, _ = map(int, request.session_id.split("-"))
        return "bad" * (rollout + 1) if task == 1 else "x" * (rollout + 1)

    results: dict[Any, Any] = {}

    async def sink(result: Any) -> None:
        results[tuple(result.key)] = result

    groups = [SampleGroup(samples=tuple(sample(task, n, metadata={}) for n in range(3)), keep=3) for task in range(3)]
    try:
        await run_groups(rollout_of({"env": runner}, policy=ScriptedPolicy(answer)), groups, sink)
    finally:
        await runner.close()
    for (task, rollout), result in results.items():
        if task == 1:
            assert isinstance(result, FailureRecord)
            assert (result.kind, result.stage) == ("environment", "group")
            assert "NoVerdict" in result.cause
        else:
            assert isinstance(result, TrajectoryRecord)
            assert (result.rewards, result.group_reward, result.total_reward) == ([0.0], rollout / 2, rollout / 2)
    assert len(results) == 9
    assert judge.most <= 4


def test_metrics() -> None:
    won, lost, tied = ({"result": word} for word in ("won", "lost", "tied"))
    states = [{"pairs": {"compared": [won, tied]}}, {"pairs": {"compared": [lost, tied]}}, None]
    _, metrics = JudgePairsEnvironment({}).global_post_process_and_metrics({"extra_env_info": states})
    assert metrics == {"comparisons": 2, "tied_share": 0.5}
