"""What could not be scored is kept whole: it is scored later, from what is stored, and never generated again."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.causes import REASONS
from kuberoll_workers.data.messages import LOGPROB_TYPE, token_array
from kuberoll_workers.data.record import (
    FailureRecord,
    RecordError,
    TrajectoryRecord,
    decode_line,
    encode_line,
    set_turns_to_score,
)
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.environments.outcome import StepOutcome
from kuberoll_workers.output import records
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.output.unscored import turns_to_score
from kuberoll_workers.policy.interface import GenerationResult
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.rollouts.failures import TrajectoryFailed, leaves_unscored
from kuberoll_workers.rollouts.trajectory import Trajectory
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker.config import Progress, WorkerConfig
from kuberoll_workers.worker.run import run_worker
from tests.environments.judge_server import Judge, equality, serving
from tests.rollouts.counting import counting_engine
from tests.rollouts.fakes import sample
from tests.rollouts.fakes import settings as settings_of

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "models" / "tiny-policy"


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(str(TINY))


def job(environment: dict[str, Any], **spec: Any) -> RolloutJob:
    rows = [
        {"prompt": f"Say {word}.", "metadata": {"ground_truth": word, "turns": 2}}
        for word in ("yes", "no", "left", "right")
    ]
    return RolloutJob.model_validate(
        {
            "apiVersion": "kuberoll.io/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "judged"},
            "spec": {
                "generation": {"model": {"source": str(TINY)}, "engine": "Simulated"},
                "environments": [environment],
                "dataset": {"source": {"rows": rows}, "repeats": 2},
                "rollout": {"concurrency": 8, "retries": {"environmentAttempts": 2, "backoffSeconds": 0.01}},
                **spec,
            },
        }
    )


async def run(output: Path, tokenizer: HuggingFaceTokenizer, made: RolloutJob, *, journaled: bool = True) -> Any:
    """Run what is left of a job; what the engine was asked, and the worker's counts."""
    counting, progress = await counting_engine(TINY, ["yes", "no", "left", "up"]), Progress()
    config = WorkerConfig(
        job=made,
        base="/",
        tokenizer=str(TINY),
        endpoint="",
        max_model_len=512,
        output=str(output),
        turns=str(output) if journaled else None,
        shards=[0, 1],
        shard_count=2,
    )
    done = await run_worker(
        config,
        metrics=RolloutMetrics("judged"),
        drain=Drain(),
        progress=progress,
        policy=counting,
        tokenizer=tokenizer,
    )
    assert done
    return counting.requests, progress


def finished(output: Path) -> dict[Any, TrajectoryRecord]:
    storage, found = DirectoryStorage(output), dict[Any, TrajectoryRecord]()
    for shard in storage.shards():
        for record in records.trajectories(storage, shard):
            assert record.key not in found
            found[record.key] = record
    return found


def failed(output: Path) -> list[FailureRecord]:
    return list(records.failures(DirectoryStorage(output)))


def sampled(record: TrajectoryRecord | FailureRecord) -> list[Any]:
    return [
        (message.content, list(message.token_ids), list(message.logprobs or ()))
        for message in record.messages
        if message.sampled
    ]


@asynccontextmanager
async def judge_with_outages(*, out: bool) -> AsyncIterator[tuple[Judge, dict[str, Any]]]:
    """A real HTTP server; `judge.answer` decides whether it is out."""
    judge = Judge(answer=refuse if out else equality)
    async with serving(judge) as url:
        yield judge, {"name": "judge", "type": "judge", "config": {"url": url, "attempts": 1}}


def refuse(_: str) -> web.Response:
    return web.Response(status=503, text="overloaded")


@pytest.mark.parametrize("journaled", [True, False])
async def test_what_a_judge_could_not_score_is_scored_by_a_resumed_run(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer, journaled: bool
) -> None:
    async with judge_with_outages(out=True) as (judge, environment):
        asked, progress = await run(tmp_path, tokenizer, job(environment), journaled=journaled)
        assert (len(asked), progress.failed, progress.unscored, progress.trajectories) == (8, 8, 8, 0)
        # Twice: the run tries again before it ends.
        assert [failure.attempt for failure in failed(tmp_path)].count(1) == 8
        left = {failure.key: failure for failure in failed(tmp_path)}
        assert all(
            (failure.unscored, failure.kind, failure.reason) == (True, "infrastructure", "DependencyUnavailable")
            for failure in left.values()
        )
        assert not (tmp_path / "turns").exists()
        judge.answer = equality
        asked, progress = await run(tmp_path, tokenizer, job(environment), journaled=journaled)
    assert (asked, progress.trajectories, progress.failed, progress.unscored) == ([], 8, 0, 0)
    done = finished(tmp_path)
    assert {key: sampled(record) for key, record in done.items()} == {
        key: sampled(failure) for key, failure in left.items()
    }
    for record in done.values():
        said = sampled(record)[0][0]
        assert record.total_reward == (said == record.metadata["ground_truth"])  # type: ignore[index]
        assert record.stop_reason == "terminated"
        assert record.attempt == 2


def answers_of(outages: Sequence[bool]) -> Callable[[str], Any]:
    """Answers of a judge that is out for some of the first requests."""
    left = iter(outages)
    return lambda prompt: refuse(prompt) if next(left, False) else equality(prompt)


def said(text: str, **fields: Any) -> Any:
    return lambda _: web.Response(text=text, **fields)


@pytest.mark.parametrize(
    ("answer", "reason", "evidence"),
    [
        (refuse, "DependencyUnavailable", {"http_status": 503}),
        (said("wait", status=429), "DependencyUnavailable", {"http_status": 429}),
        (said("<html>a proxy</html>"), "DependencyUnavailable", None),
        (said('{"error": "out of memory"}', content_type="application/json"), "DependencyUnavailable", None),
        (said("who are you", status=401), "AccessRefused", {"http_status": 401}),
        (said("too long", status=400), "EnvironmentRaised", None),
        (lambda _: "I do not know.", "EnvironmentRaised", None),
    ],
)
async def test_whatever_a_judge_answers_in_place_of_a_verdict_the_response_is_kept(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer, answer: Any, reason: str, evidence: Any
) -> None:
    async with judge_with_outages(out=False) as (judge, environment):
        judge.answer = answer
        _, progress = await run(tmp_path, tokenizer, job(environment))
        assert (progress.failed, progress.unscored) == (8, 8)
        assert {failure.reason for failure in failed(tmp_path)} == {reason}
        assert all(failure.evidence == evidence for failure in failed(tmp_path))
        judge.answer = equality
        again, progress = await run(tmp_path, tokenizer, job(environment))
    assert (again, progress.trajectories) == ([], 8)


async def test_a_judge_that_is_not_there(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    async with judge_with_outages(out=False) as (_, environment):
        pass
    _, progress = await run(
        tmp_path, tokenizer, job({**environment, "config": {**environment["config"], "model": "m"}})
    )
    assert (progress.failed, progress.unscored) == (8, 8)
    assert {failure.reason for failure in failed(tmp_path)} == {"DependencyUnavailable"}


async def test_a_judge_that_comes_back_during_the_run_costs_nothing(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    async with judge_with_outages(out=True) as (judge, environment):
        # All but one are refused at first, twice.
        refused = iter(range(14))
        judge.answer = lambda prompt: equality(prompt) if next(refused, None) is None else refuse(prompt)
        asked, progress = await run(tmp_path, tokenizer, job(environment))
    assert (len(asked), progress.trajectories, progress.failed, progress.unscored) == (8, 8, 0, 0)
    # What was scored before counts once, too.
    assert progress.resumed == 0
    assert len(finished(tmp_path)) == 8
    assert len(failed(tmp_path)) in (6, 7)


def rooms(directory: Path, name: str, **config: Any) -> dict[str, Any]:
    """An environment of `outages`."""
    return {
        "name": "rooms",
        "entrypoint": f"tests.rollouts.outages:{name}",
        "isolation": "Inline",
        "config": {"directory": str(directory), **config},
    }


ONE_ATTEMPT = {"environmentAttempts": 1, "backoffSeconds": 0.01}


@pytest.mark.parametrize("name", ["Rooms", "ReplayedRooms", "ClosedRooms"])
@pytest.mark.parametrize("scheduling", ["Concurrent", "Lockstep"])
async def test_a_step_in_the_middle_is_taken_again_without_its_response(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer, name: str, scheduling: str
) -> None:
    environment = rooms(tmp_path, name)
    made = job(
        environment,
        rollout={
            "concurrency": 8,
            "maxTurns": 4,
            "scheduling": scheduling,
            "retries": ONE_ATTEMPT,
        },
    )
    output = tmp_path / "output"
    output.mkdir()
    (tmp_path / "out-2").touch()
    asked, progress = await run(output, tokenizer, made)
    assert progress.unscored == progress.failed == 8
    left = {failure.key: failure for failure in failed(output)}
    assert {failure.turn_count for failure in left.values()} == {2}
    (tmp_path / "out-2").unlink()
    again, progress = await run(output, tokenizer, made)
    # The third turn only: two turns of each had been sampled.
    assert (len(asked), len(again), progress.trajectories) == (16, 8, 8)
    assert all(request.split("-")[3] == "3" for request in again)
    for key, record in finished(output).items():
        assert record.rewards == [1.0, 2.0, 3.0]
        assert sampled(record)[:2] == sampled(left[key])
        assert record.metadata is not None
        assert record.metadata["turn"] == 3


async def test_an_environment_that_cannot_restore_its_state_starts_over(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    environment = rooms(tmp_path, "RestartedRooms")
    made = job(environment, rollout={"maxTurns": 4, "retries": ONE_ATTEMPT})
    output = tmp_path / "output"
    output.mkdir()
    (tmp_path / "out-2").touch()
    _, progress = await run(output, tokenizer, made)
    assert (progress.failed, progress.unscored) == (8, 0)
    (tmp_path / "out-2").unlink()
    again, progress = await run(output, tokenizer, made)
    assert (len(again), progress.trajectories) == (24, 8)


@pytest.mark.parametrize("atomic", [False, True])
async def test_a_group_whose_scorer_was_out_is_scored_as_a_whole_later(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer, atomic: bool
) -> None:
    environment = {
        "name": "env",
        "entrypoint": "tests.environments.grouping:Tournament",
        "isolation": "Inline",
        "config": {"directory": str(tmp_path)},
    }
    made = job(
        environment,
        rollout={
            "maxTurns": 2,
            "groups": {"atomic": atomic},
            "retries": ONE_ATTEMPT,
        },
    )
    output = tmp_path / "output"
    output.mkdir()
    (tmp_path / "broken").touch()
    asked, progress = await run(output, tokenizer, made, journaled=False)
    assert (len(asked), progress.failed, progress.unscored) == (16, 8, 8)
    (tmp_path / "broken").unlink()
    again, progress = await run(output, tokenizer, made, journaled=False)
    assert (again, progress.trajectories) == ([], 8)
    assert all(record.group_reward is not None for record in finished(output).values())


async def test_an_atomic_group_waits_for_the_score_of_one(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    async with judge_with_outages(out=True) as (judge, environment):
        # One of the four groups has a response that cannot be judged now.
        judge.answer = lambda prompt: refuse(prompt) if "right" in prompt else equality(prompt)
        made = job(
            environment,
            rollout={
                "groups": {"atomic": True},
                "retries": ONE_ATTEMPT,
            },
        )
        asked, progress = await run(tmp_path, tokenizer, made)
        assert (len(asked), progress.trajectories, progress.failed, progress.unscored) == (8, 6, 2, 2)
        judge.answer = equality
        again, progress = await run(tmp_path, tokenizer, made)
    assert (again, progress.trajectories) == ([], 2)
    assert len(finished(tmp_path)) == 8


@given(
    outages=st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=4),
    atomic=st.booleans(),
    journaled=st.booleans(),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whenever_the_judge_is_out_each_response_is_sampled_once(
    tokenizer: HuggingFaceTokenizer, outages: list[list[bool]], atomic: bool, journaled: bool
) -> None:
    """Each part of the run finds the judge out for some of its requests; the last finds it well."""

    async def play(output: Path) -> None:
        asked: list[str] = []
        async with judge_with_outages(out=False) as (judge, environment):
            rollout = {"groups": {"atomic": atomic}, "retries": ONE_ATTEMPT}
            for part in [*outages, []]:
                judge.answer = answers_of(part)
                requests, _ = await run(output, tokenizer, job(environment, rollout=rollout), journaled=journaled)
                asked += requests
        assert len(asked) == 8
        done = finished(output)
        assert len(done) == 8
        for record in done.values():
            assert record.metadata is not None
            assert record.total_reward == (sampled(record)[0][0] == record.metadata["ground_truth"])

    with tempfile.TemporaryDirectory() as made:
        asyncio.run(play(Path(made)))


async def test_what_is_not_tried_again_still_counts_as_failed(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    """Of atomic groups one sample has failed for good: scoring the others would complete none."""
    environment = rooms(tmp_path, "Rooms", broken="left")
    rollout = {
        "maxTurns": 4,
        "groups": {"atomic": True},
        "retries": ONE_ATTEMPT,
    }
    output = tmp_path / "output"
    output.mkdir()
    (tmp_path / "out-2").touch()
    _, progress = await run(output, tokenizer, job(environment, rollout=rollout))
    counts: dict[Any, FailureRecord] = {}
    for failure in failed(output):
        counts[failure.key] = max(failure, counts.get(failure.key, failure), key=lambda one: one.attempt)
    assert (progress.trajectories, progress.failed) == (0, 8)
    assert progress.unscored == sum(failure.unscored for failure in counts.values())
    assert 0 < progress.unscored < 8


FAILED = TrajectoryFailed("gone", reason="DependencyUnavailable", stage="environment")
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
IDS = st.lists(st.integers(0, 99), min_size=1, max_size=4)


@given(
    turns=st.lists(st.tuples(IDS, WORDS, IDS, st.floats(-1e3, 1e3)), max_size=4),
    last=IDS,
    state=st.dictionaries(WORDS, st.integers(0, 9), max_size=2),
)
@settings(deadline=None)
def test_a_stored_line_restores_the_trajectory(
    turns: Sequence[tuple[list[int], str, list[int], float]], last: list[int], state: dict[str, Any]
) -> None:
    """State, tokens and rewards are those of the attempt that was left unscored, whatever its turns are."""

    def play(trajectory: Trajectory) -> None:
        for ids, text, observed, reward in turns:
            respond(trajectory, ids)
            outcome = StepOutcome(
                role="environment", content=text, metadata={**state, "turn": trajectory.turn}, stop_strings=("x",),
                reward=reward, terminated=False, reward_parts={"part": reward}, answer=text or None,
            )  # fmt: skip
            trajectory.add_step(outcome, token_array(observed), 0.5, ended_at=1.0)
        respond(trajectory, last)

    changes = settings_of(max_turns=9, max_sequence_length=10_000)
    trajectory = Trajectory(sample(3, 1, metadata=state), changes)
    play(trajectory)
    record = trajectory.failure_record(FAILED)
    set_turns_to_score(record, trajectory.turns_to_score())
    line = encode_line(record)
    partial = turns_to_score(decode_line(line, FailureRecord, where="here"))
    assert partial is not None
    again = Trajectory(replace(sample(3, 1, metadata=state, partial=partial), attempt=1), changes)
    assert again.awaits_step
    for name in ("context", "chat", "messages", "metadata", "rewards", "reward_parts", "total_reward", "answer",
                 "turn", "generated_tokens", "environment_tokens", "generation_seconds", "ended_at"):  # fmt: skip
        assert getattr(again, name) == getattr(trajectory, name), name
    again.check_tokens()
    # And so does that of the attempt after it.
    second = again.failure_record(FAILED)
    set_turns_to_score(second, again.turns_to_score())
    assert json.loads(encode_line(second)) == {**json.loads(line), "attempt": 1, "turns": attempts(line, 1)}


def attempts(line: bytes, attempt: int) -> Any:
    return [{**turn, "attempt": attempt} for turn in json.loads(line)["turns"]]


def respond(trajectory: Trajectory, ids: Sequence[int]) -> None:
    result = GenerationResult(
        token_ids=token_array(ids),
        logprobs=array(LOGPROB_TYPE, [-math.log(2)] * len(ids)),
        finish_reason="stop",
        policy_versions=(("0", 0, len(ids)),),
    )
    trajectory.add_response(result, "x" * len(ids), 0.25)


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("turns", [1, 2])
def test_which_failure_leaves_a_trajectory_unscored(reason: Any, turns: int) -> None:
    failure = TrajectoryFailed("gone", reason=reason, stage="environment")
    row = REASONS[reason]
    expected = row.keeps_turns or (turns == 1 and row.kind == "environment")
    assert leaves_unscored(failure, turns=turns, awaits_step=True, ended=False) is expected
    # Without a response that waits there is nothing to score.
    assert not leaves_unscored(failure, turns=turns, awaits_step=False, ended=True)
    of_group = TrajectoryFailed("gone", reason=reason, stage="group")
    assert leaves_unscored(of_group, turns=turns, awaits_step=False, ended=True)
    assert not leaves_unscored(of_group, turns=turns, awaits_step=True, ended=False)


def test_turns_that_are_not_those_of_the_messages_are_refused() -> None:
    trajectory = Trajectory(sample(0), settings_of())
    respond(trajectory, [1, 2])
    record = trajectory.failure_record(FAILED)
    set_turns_to_score(record, trajectory.turns_to_score())
    record.messages = record.messages[:-1]
    with pytest.raises(RecordError, match="without a response"):
        turns_to_score(record)
    assert record.turns is not None
    record.turns[0].turn = 2
    with pytest.raises(RecordError, match="not those of its messages"):
        turns_to_score(record)
