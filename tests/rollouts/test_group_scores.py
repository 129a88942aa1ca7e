"""Group scoring: when a prompt group is complete, its environment scores its trajectories together."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.prompts import SampleGroup
from kuberoll_workers.data.record import (
    DroppedRecord,
    FailureRecord,
    Partial,
    TrajectoryRecord,
    encode_line,
)
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.output import records
from kuberoll_workers.output.journal import FileJournal
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.policy.interface import GenerationRequest, PolicyRefused
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.rollouts.groups import GroupPolicy, Result, rewards_differ
from kuberoll_workers.rollouts.scheduling import run_groups
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker.config import Progress, WorkerConfig
from kuberoll_workers.worker.run import run_worker
from tests.rollouts.counting import counting_engine
from tests.rollouts.fakes import ScriptedPolicy, rollout_of, sample, until

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "models" / "tiny-policy"
SCHEDULINGS = ["Concurrent", "Lockstep"]


@asynccontextmanager
async def tournament(
    directory: Path, *, name: str = "Tournament", isolation: str = "Inline", seconds: float = 60.0
) -> Any:
    entrypoint = f"tests.environments.grouping:{name}"
    spec = PlainSpec(name="env", type=None, entrypoint=entrypoint, config={"directory": str(directory)})
    executor = make_executor(
        spec,
        isolation=isolation,
        processes=2,
        timeout=seconds,
        access=ProcessAccess(writable=[str(directory)]),
    )
    runner = EnvironmentRunner(executor, max_batch=64)
    try:
        yield runner
    finally:
        await runner.close()


def group(index: int, size: int, *, keep: int | None = None, **metadata: Any) -> SampleGroup:
    state = {"turns": 1, **metadata}
    samples = tuple(sample(index, number, metadata=state) for number in range(size))
    return SampleGroup(samples=samples, keep=keep or size)


def length_of(request: GenerationRequest) -> int:
    """Responses of rollout n have n + 1 letters."""
    return int(request.session_id.split("-")[1]) + 1


async def play(
    directory: Path,
    groups: Sequence[SampleGroup],
    *,
    policy: GroupPolicy | None = None,
    answer: Any = lambda request: "x" * length_of(request),
    name: str = "Tournament",
    isolation: str = "Inline",
    seconds: float = 60.0,
    **changes: Any,
) -> dict[Any, Any]:
    results: dict[Any, Any] = {}

    async def sink(result: Result) -> None:
        assert result.key not in results
        # What is not plain data could not be stored.
        encode_line(result)
        results[result.key] = result

    async with tournament(directory, name=name, isolation=isolation, seconds=seconds) as runner:
        rollout = rollout_of({"env": runner}, policy=ScriptedPolicy(answer), **changes)
        await run_groups(rollout, groups, sink, policy=policy)
    return results


def scored(directory: Path) -> list[list[str]]:
    """Members of each call of `score_group`."""
    path = directory / "scored"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
@pytest.mark.parametrize(
    ("name", "isolation"),
    [
        ("Tournament", "Inline"),
        ("Tournament", "Process"),
        ("CoroutineTournament", "Inline"),
        ("RestartedTournament", "Process"),
    ],
)
async def test_a_complete_group_is_scored_together(tmp_path: Path, name: str, isolation: str, scheduling: str) -> None:
    groups = [group(0, 3, turns=2), group(1, 3, plain=True)]
    results = await play(tmp_path, groups, name=name, isolation=isolation, scheduling=scheduling)
    assert sorted(scored(tmp_path)) == [["0-0-0", "0-1-0", "0-2-0"], ["1-0-0", "1-1-0", "1-2-0"]]
    for (task, rollout), record in results.items():
        assert isinstance(record, TrajectoryRecord)
        # The turns keep their own rewards, the group's is beside them, and the total has both.
        assert record.rewards == [0.25] * (2 - task)
        assert record.group_reward == rollout / 2
        assert record.total_reward == 0.25 * (2 - task) + rollout / 2
        assert record.metadata is not None
        # A number leaves the state as it is.
        assert record.metadata.get("points") == (None if task == 1 and rollout == 1 else float(rollout))
        assert record.metadata["turns"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "kind", "cause"),
    [
        ("raise", "environment", "score_group raised ValueError: no judgement"),
        ("row", "data", "metadata.reference: missing"),
        ("short", "environment", "what score_group returned has 2 elements for 3 trajectories"),
        ("nan", "environment", "rewards[2] is nan; a reward must be finite as a 32-bit float"),
        ("huge", "environment", "rewards[0] is 1e+39; a reward must be finite as a 32-bit float"),
        ("text", "environment", "rewards[0] is str 'much'; it must be a number"),
        ("unplain", "environment", "metadata.a is set"),
    ],
)
@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_a_failure_hits_that_group_only(
    tmp_path: Path, isolation: str, trouble: str, kind: str, cause: str
) -> None:
    groups = [group(0, 3), group(1, 3, trouble=trouble), group(2, 3)]
    results = await play(tmp_path, groups, isolation=isolation)
    for (task, _), result in results.items():
        if task != 1:
            assert isinstance(result, TrajectoryRecord)
            continue
        assert isinstance(result, FailureRecord)
        assert (result.kind, result.stage) == (kind, "group")
        assert result.cause.startswith(cause)
        assert result.turn_count == 1
    assert len(results) == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "cause"),
    [("hang", "score_group took longer than"), ("exit", "the environment's process ended with exit code 7")],
)
async def test_a_process_that_hangs_or_dies_while_it_scores(tmp_path: Path, trouble: str, cause: str) -> None:
    groups = [group(0, 2), group(1, 2, trouble=trouble)]
    results = await play(tmp_path, groups, isolation="Process", seconds=3.0 if trouble == "hang" else 60.0)
    assert [type(results[0, n]) for n in range(2)] == [TrajectoryRecord] * 2
    assert all(results[1, n].cause.startswith(cause) and results[1, n].tries == 2 for n in range(2))


@pytest.mark.parametrize("name", ["Tournament", "CoroutineTournament"])
async def test_scoring_is_tried_again(tmp_path: Path, name: str) -> None:
    results = await play(tmp_path, [group(0, 2, trouble="raise-once")], name=name)
    assert [results[0, n].group_reward for n in range(2)] == [0.0, 1.0]
    assert len(scored(tmp_path)) == 2


async def test_failed_and_dropped_trajectories_are_left_out(tmp_path: Path) -> None:
    def answer(request: GenerationRequest) -> Any:
        return PolicyRefused("no") if request.session_id == "0-1-0" else "x" * length_of(request)

    results = await play(tmp_path, [group(0, 3), group(1, 4, keep=2)], answer=answer, concurrency=1)
    assert scored(tmp_path) == [["0-0-0", "0-2-0"], ["1-0-0", "1-1-0"]]
    assert isinstance(results[0, 1], FailureRecord)
    assert [results[0, n].group_reward for n in (0, 2)] == [0.0, 1.0]
    # The other two of the second group were not needed.
    assert set(results) == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}


async def test_oversampled_trajectories_are_not_scored(tmp_path: Path) -> None:
    results = await play(tmp_path, [group(0, 8, keep=3)], concurrency=8)
    kept = sorted(key for key, result in results.items() if isinstance(result, TrajectoryRecord))
    assert len(kept) == 3
    assert scored(tmp_path) == [[f"{task}-{rollout}-0" for task, rollout in kept]]
    dropped = [result for result in results.values() if isinstance(result, DroppedRecord)]
    assert {(record.reason, record.group_reward) for record in dropped} == {("oversampled", None)}


async def test_the_filter_sees_the_scores(tmp_path: Path) -> None:
    # The rewards of the turns are all the same; the second group's responses are, too.
    def answer(request: GenerationRequest) -> str:
        return "x" * length_of(request) if request.session_id.startswith("0") else "same"

    policy = GroupPolicy(keep=rewards_differ)
    results = await play(tmp_path, [group(0, 3), group(1, 3)], policy=policy, answer=answer)
    assert all(isinstance(results[0, n], TrajectoryRecord) for n in range(3))
    for number in range(3):
        record = results[1, number]
        assert isinstance(record, DroppedRecord)
        assert (record.reason, record.group_reward, record.total_reward) == ("filtered", 0.5, 0.75)


async def test_an_atomic_group_that_is_not_complete_is_not_scored(tmp_path: Path) -> None:
    def answer(request: GenerationRequest) -> Any:
        return PolicyRefused("no") if request.session_id == "0-1-0" else "x" * length_of(request)

    results = await play(tmp_path, [group(0, 2), group(1, 2)], policy=GroupPolicy(atomic=True), answer=answer)
    assert scored(tmp_path) == [["1-0-0", "1-1-0"]]
    assert [results[0, n].stage for n in range(2)] == ["group", "generation"]


async def test_an_atomic_group_that_cannot_be_scored_is_replaced(tmp_path: Path) -> None:
    groups = [group(0, 2, trouble="raise"), *(group(n, 2) for n in range(1, 5))]
    results = await play(tmp_path, groups, policy=GroupPolicy(atomic=True, wanted=2), concurrency=2)
    assert {task for (task, _), result in results.items() if isinstance(result, TrajectoryRecord)} == {1, 2}


async def test_trajectories_without_a_turn_are_not_scored(tmp_path: Path) -> None:
    full = SampleGroup(samples=tuple(sample(0, n, prompt="p" * 2000) for n in range(2)), keep=2)
    results = await play(tmp_path, [full, group(1, 2)])
    assert scored(tmp_path) == [["1-0-0", "1-1-0"]]
    assert [(results[0, n].stop_reason, results[0, n].group_reward) for n in range(2)] == [("truncated", None)] * 2


async def test_a_run_that_ends_while_it_scores_keeps_the_turns(tmp_path: Path) -> None:
    partials: list[Partial] = []

    async def sink(result: Result) -> None:
        raise AssertionError(result)

    async with tournament(tmp_path, isolation="Process") as runner:
        rollout = rollout_of({"env": runner})
        work = run_groups(rollout, [group(0, 2, trouble="hang")], sink, interrupted=partials.append)
        running = asyncio.create_task(work)
        await until(lambda: bool(scored(tmp_path)))
        running.cancel()
        await asyncio.wait((running,))
    assert sorted(partial.key for partial in partials) == [(0, 0), (0, 1)]
    # They are complete: nothing is generated again, and the state is that of before the scoring.
    assert {(partial.turns[-1].stop_reason, str(partial.turns[-1].metadata)) for partial in partials} == {
        ("terminated", "{'turns': 0, 'trouble': 'hang'}")
    }


ROWS = [{"prompt": f"task {number}", "metadata": {"turns": 1 + number % 2}} for number in range(4)]


def job(directory: Path, **spec: Any) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": "kuberoll.io/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "grouped"},
            "spec": {
                "generation": {"model": {"source": str(TINY)}, "engine": "Simulated"},
                "environments": [
                    {
                        "name": "env",
                        "entrypoint": "tests.environments.grouping:Tournament",
                        "config": {"directory": str(directory)},
                    }
                ],
                "dataset": {"source": {"rows": ROWS}, "repeats": 3},
                "rollout": {"concurrency": 5, "maxTurns": 2},
                **spec,
            },
        }
    )


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(str(TINY))


async def run(output: Path, tokenizer: HuggingFaceTokenizer, point: Any = lambda: None, **spec: Any) -> list[str]:
    """Run all shards of the job, or what is left of them; the requests that were made."""
    counting = await counting_engine(TINY, ["a", "bb", "ccc", "dd"], point)
    config = WorkerConfig(
        job=job(output.parent, **spec),
        base="/",
        tokenizer=str(TINY),
        endpoint="",
        max_model_len=512,
        output=str(output),
        turns=str(output),
        shards=[0, 1],
        shard_count=2,
    )
    await run_worker(
        config,
        metrics=RolloutMetrics("grouped"),
        drain=Drain(),
        progress=Progress(),
        policy=counting,
        tokenizer=tokenizer,
    )
    return counting.requests


def contents(output: Path) -> dict[Any, Any]:
    """What was stored, without the times. No trajectory is stored twice."""
    storage, found = DirectoryStorage(output), {}
    for shard in storage.shards():
        for record in records.trajectories(storage, shard):
            assert record.key not in found
            texts = [(m.role, m.content, list(m.token_ids)) for m in record.messages]
            found[record.key] = (texts, record.rewards, record.group_reward, record.total_reward, record.metadata)
    return found


class Crashes:
    """Copies of a run's directory at some of the moments in which its process could be killed."""

    def __init__(self, output: Path, copy: Path, at: int) -> None:
        self._output = output
        self._copy = copy
        self._left = at

    def point(self) -> None:
        self._left -= 1
        if self._left == -1:
            # Another thread may remove a file of turns meanwhile.
            with contextlib.suppress(shutil.Error):
                shutil.copytree(self._output, self._copy)

    @property
    def crashed(self) -> bool:
        return self._left < 0


@pytest.fixture
def half_written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Hooks that are called when half of the lines of a write are in the file."""
    hooks: list[Any] = []
    write = FileJournal._write_and_sync

    def in_halves(journal: FileJournal, data: bytes) -> None:
        middle = len(data) // 2
        write(journal, data[:middle])
        for hook in hooks:
            hook()
        write(journal, data[middle:])

    monkeypatch.setattr(FileJournal, "_write_and_sync", in_halves)
    return hooks


@given(moments=st.lists(st.integers(0, 60), min_size=1, max_size=3), atomic=st.booleans())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_run_that_is_killed_anywhere_has_the_records_of_one_that_was_not(
    tokenizer: HuggingFaceTokenizer, half_written: list[Any], moments: list[int], atomic: bool
) -> None:
    rollout = {"concurrency": 5, "maxTurns": 2, "groups": {"atomic": atomic}}
    with tempfile.TemporaryDirectory() as made:
        half_written.clear()
        whole = Path(made) / "whole"
        whole.mkdir()
        requests = asyncio.run(run(whole, tokenizer, rollout=rollout))
        expected = contents(whole)
        assert len(expected) == 12
        assert {reward for _, _, reward, _, _ in expected.values()} > {0.0, 1.0}

        # What a process leaves that is killed at such a moment; a run that resumes it may be killed, too.
        left = Path(made) / "run-0"
        left.mkdir()
        for number, moment in enumerate(moments, start=1):
            crashes = Crashes(left, Path(made) / f"run-{number}", moment)
            half_written[:] = [crashes.point]
            again = asyncio.run(run(left, tokenizer, crashes.point, rollout=rollout))
            assert len(again) <= len(requests)
            assert contents(left) == expected
            if not crashes.crashed:
                break
            left = Path(made) / f"run-{number}"
        half_written.clear()
        asyncio.run(run(left, tokenizer, rollout=rollout))
        assert contents(left) == expected
        assert not (left / "turns").exists()


async def test_what_could_not_be_scored_is_not_generated_again(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()

    (tmp_path / "broken").touch()
    first = await run(output, tokenizer)
    assert contents(output) == {}
    assert len(list(records.failures(DirectoryStorage(output)))) == 12
    assert len(first) == sum(3 * row["metadata"]["turns"] for row in ROWS)  # type: ignore[index]
    # The environment is mended, and the turns that are stored are scored.
    (tmp_path / "broken").unlink()
    assert await run(output, tokenizer) == []
    found = contents(output)
    assert len(found) == 12
    (tmp_path / "whole").mkdir()
    await run(tmp_path / "whole", tokenizer)
    assert found == contents(tmp_path / "whole")


async def test_a_sample_that_is_retried_is_scored_among_the_stored_ones(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    output.mkdir()
    await run(output, tokenizer)
    expected = contents(output)
    # One line of a group is lost, as a failed sample is: it is run again, alone.
    lost = (2, 1)
    path = output / "shard-00000.jsonl"
    lines = [
        line
        for line in path.read_bytes().splitlines(keepends=True)
        if b'{"task_index":2,"rollout_index":1,' not in line
    ]
    path.write_bytes(b"".join(lines))
    (tmp_path / "scored").unlink()
    requests = await run(output, tokenizer)
    assert {request.rsplit("-", 2)[0] for request in requests} == {"2-1-0"}
    # The whole group was shown again, and only the new trajectory was stored.
    assert scored(tmp_path) == [["2-0-0", "2-1-0", "2-2-0"]]
    assert contents(output)[lost] == expected[lost]
    assert contents(output) == expected
