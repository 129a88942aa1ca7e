"""Rewards computed anew are those of the stored responses, or the trajectory stays as it was."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.analysis import rescore
from kuberoll_workers.analysis.rescore import InitialStates, Replayer, RescoreCounts, Rescoring
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import Timing, TokenCounts, TrajectoryKey, TrajectoryRecord, encode_line
from kuberoll_workers.dataset.inputs import prompt_groups, scan
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Episode,
    EpisodeEnd,
    EpisodeStart,
    GroupMember,
    GroupScore,
    Metadata,
)
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.outcome import EpisodeLost
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.output.records import failures, trajectories
from kuberoll_workers.output.run_directory import MANIFEST, RunRefused, new_manifest
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.storage import open_storage
from kuberoll_workers.rollouts.episodes import MAX_RECOVERIES
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from kuberoll_workers.rollouts.seeds import task_seed
from kuberoll_workers.rollouts.settings import RetryPolicy
from tests.output.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]

ROWS = [{"prompt": f"count from {start}", "metadata": {"at": start}} for start in range(4)]
ROOT = Path(__file__).resolve().parents[2]
RETRIES = RetryPolicy(environment_attempts=2, backoff_seconds=0.0)


class Counting(EnvironmentInterface):
    """Adds what the policy writes to its state; ends at 10, which is worth `worth`."""

    def __init__(self, worth: float = 1.0) -> None:
        self.worth = worth

    def said(self, at: int) -> str:
        return f"at {at}"

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        sums = [
            (state or {})["at"] + int(log[-1]["content"])
            for log, state in zip(message_log_batch, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": self.said(at)} for at in sums],
            metadata=[{"at": at} for at in sums],
            next_stop_strings=None,
            rewards=[self.worth * (at >= 10) for at in sums],
            terminateds=[at >= 10 for at in sums],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


class Drawing(Counting):
    """Says something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = itertools.count()

    def said(self, at: int) -> str:
        return f"at {at}, draw {next(self.draws)}"


class Polite(Counting):
    """Says the same in other words."""

    def said(self, at: int) -> str:
        return f"now at {at}, please"


class Harder(Counting):
    """Ends at 10 only when a 9 was written."""

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        returned = super().step(message_log_batch, metadata)
        ends = [log[-1]["content"] == "9" for log in message_log_batch]
        return returned._replace(terminateds=ends)


class Sooner(Counting):
    """Ends with everything that is written."""

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        returned = super().step(message_log_batch, metadata)
        return returned._replace(terminateds=[True for _ in returned.terminateds])


class Breaking(Counting):
    """Cannot score a 9."""

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        if any(log[-1]["content"] == "9" for log in message_log_batch):
            raise KeyError("nine")
        return super().step(message_log_batch, metadata)


def job() -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": "kuberoll.io/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "counting"},
            "spec": {
                "generation": {"model": {"source": "none"}, "engine": "Simulated"},
                "environments": [{"name": "count", "entrypoint": f"{__name__}:Counting"}],
                "dataset": {"source": {"rows": ROWS}, "repeats": 2},
            },
        }
    )


def played(task_index: int, rollout_index: int, responses: list[int]) -> TrajectoryRecord:
    """What the loop stores when the policy writes these numbers."""
    at, messages = task_index, [Message("user", ROWS[task_index]["prompt"], token_array([1]))]  # type: ignore[arg-type]
    rewards = []
    for turn, number in enumerate(responses, start=1):
        at += number
        messages.append(Message("assistant", str(number), token_array([number]), [-0.5], turn, sampled=True))
        messages.append(Message("environment", f"at {at}", token_array([at]), None, turn))
        rewards.append(float(at >= 10))
    return TrajectoryRecord(
        task_index=task_index, rollout_index=rollout_index, task_name="count", idx=None, messages=messages,
        total_reward=float(sum(rewards)), rewards=rewards, stop_reason="terminated" if at >= 10 else "max_turns",
        turn_count=len(responses), tokens=TokenCounts(1, len(responses), len(responses)),
        timing=Timing([0.0] * len(responses), [0.0] * len(responses)), metadata={"at": at}, seed=1, attempt=0,
    )  # fmt: skip


def source_of(directory: Path, records: list[TrajectoryRecord]) -> RunFiles:
    directory.mkdir()
    for shard in range(2):
        mine = [encode_line(record) for record in records if record.task_index % 2 == shard]
        (directory / f"shard-{shard:05d}.jsonl").write_bytes(b"".join(mine))
    inputs = scan(job(), base=directory, environment=lambda name: Counting()).as_json()
    (directory / MANIFEST).write_bytes(json.dumps(_manifest(inputs)).encode())
    return RunFiles(str(directory))


def _manifest(inputs: dict[str, Any]) -> dict[str, Any]:
    manifest = new_manifest(job(), shards=2, inputs=inputs)
    return {name: getattr(manifest, name) for name in type(manifest).__slots__}


class Observed:
    def observe(self, amount: float) -> None:
        assert amount >= 0

    def failed(self) -> None:
        raise AssertionError


def run(
    source: RunFiles,
    output: Path | str,
    make: Callable[[], Any],
    *,
    force: bool = False,
    names: tuple[str, ...] = ("count",),
    concurrency: int = 3,
    group_size: int = 2,
    parquet: bool = False,
) -> dict[str, RescoreCounts]:
    async def go() -> dict[str, RescoreCounts]:
        environment = EnvironmentRunner(make_executor(make, isolation="Inline", processes=1, timeout=5), max_batch=8)
        groups = prompt_groups(job(), base=Path(), environment=lambda name: Counting())
        with tempfile.TemporaryFile() as file:
            rescoring = Rescoring(
                source,
                open_storage(str(output)),
                Replayer({"count": environment}, InitialStates(file, groups), retries=RETRIES),
                environments=names,
                concurrency=concurrency,
                seconds=Observed(),
                force=force,
                group_sizes={"count": group_size},
                parquet=parquet,
            )
            try:
                counts = await rescoring.run()
                # What is written no longer counts as waiting.
                assert rescoring._pending == 0
                return counts
            finally:
                await environment.close()

    if isinstance(output, Path):
        output.mkdir(exist_ok=True)
    return asyncio.run(go())


def read(output: Path) -> dict[TrajectoryKey, TrajectoryRecord]:
    storage = open_storage(str(output))
    return {r.key: r for shard in storage.shards() for r in trajectories(storage, shard)}


PLAYED = [
    played(0, 0, [3, 7]),
    played(0, 1, [1, 2]),
    played(1, 0, [9]),
    played(1, 1, []),
    played(2, 0, [1, 1, 6]),
    played(3, 0, [2]),
]


def test_the_same_environment_gives_the_same_run(tmp_path: Path) -> None:
    source = source_of(tmp_path / "run", PLAYED)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    tally = run(source, tmp_path / "new", Counting)["count"]
    assert (tally.stored, tally.changed, tally.failed, dict(tally.left)) == (6, 0, 0, {rescore.NO_TURNS: 1})
    assert tally.old_mean == tally.new_mean == 0.5
    new = read(tmp_path / "new")
    assert {key: encode_line(record) for key, record in new.items()} == {
        record.key: encode_line(record) for record in PLAYED
    }
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_finished_shards_become_tables_where_the_job_says_so(tmp_path: Path) -> None:
    run(source_of(tmp_path / "run", PLAYED), tmp_path / "new", Counting, parquet=True)
    assert sorted(path.name for path in (tmp_path / "new").glob("shard-*")) == [
        "shard-00000.parquet",
        "shard-00001.parquet",
    ]
    assert sorted(read(tmp_path / "new")) == sorted(record.key for record in PLAYED)


def test_new_rewards(tmp_path: Path) -> None:
    tally = run(source_of(tmp_path / "run", PLAYED), tmp_path / "new", lambda: Counting(0.25))["count"]
    assert (tally.stored, tally.changed, tally.old_mean, tally.new_mean) == (6, 3, 0.5, 0.125)
    new = read(tmp_path / "new")
    assert (new[TrajectoryKey(0, 0)].rewards, new[TrajectoryKey(0, 0)].total_reward) == ([0.0, 0.25], 0.25)
    assert new[TrajectoryKey(0, 1)].rewards == [0.0, 0.0]
    assert [list(m.token_ids) for m in new[TrajectoryKey(0, 0)].messages] == [
        list(m.token_ids) for m in PLAYED[0].messages
    ]
    assert json.loads((tmp_path / "new" / rescore.SUMMARY).read_text()) == {
        "format": 1,
        "environments": {
            "count": {
                "trajectories": 6,
                "changed": 3,
                "left": {rescore.NO_TURNS: 1},
                "failed": 0,
                "reward": {"old_mean": 0.5, "new_mean": 0.125},
                "examples": [],
            }
        },
    }


def test_an_environment_that_draws_is_unscorable(tmp_path: Path) -> None:
    source = source_of(tmp_path / "run", PLAYED)
    tally = run(source, tmp_path / "new", Drawing)["count"]
    assert tally.left == {rescore.UNSCORABLE: 5, rescore.NO_TURNS: 1}
    # The first one that differs.
    assert tally.unscorable.startswith("trajectory 0-0, replayed twice: the observation of turn 1 is environment")
    summary = json.loads((tmp_path / "new" / rescore.SUMMARY).read_text())["environments"]["count"]
    assert (summary["unscorable"], list(summary["left"])) == (tally.unscorable, sorted(tally.left))
    assert {key: r.rewards for key, r in read(tmp_path / "new").items()} == {r.key: r.rewards for r in PLAYED}
    forced = run(source, tmp_path / "forced", Drawing, force=True)["count"]
    assert (forced.left, forced.changed, forced.stored) == ({rescore.NO_TURNS: 1}, 0, 6)
    assert len(forced.examples) == 5
    assert read(tmp_path / "forced")[TrajectoryKey(0, 0)].messages[2].content == "at 3"


@pytest.mark.parametrize(
    ("make", "left", "example"),
    [
        (Polite, 5, '0-0: the observation of turn 1 was environment "at 3", is environment "now at 3, please"'),
        (Harder, 2, "0-0: the episode now continues after turn 2, at which it originally ended"),
        (Sooner, 4, "0-0: the episode now ends after turn 1, but originally after turn 2"),
        (Sooner, 4, "3-0: the episode now ends with turn 1, at which originally only a limit stopped it"),
    ],
)  # fmt: skip
def test_what_is_answered_otherwise_is_left_as_it_was(
    tmp_path: Path, make: Callable[[], Any], left: int, example: str
) -> None:
    tally = run(source_of(tmp_path / "run", PLAYED), tmp_path / "new", make)["count"]
    assert tally.left == {rescore.MISMATCHED: left, rescore.NO_TURNS: 1}
    assert f"trajectory {example}" in tally.examples
    assert len(read(tmp_path / "new")) == 6


def test_a_truncated_response_ended_its_trajectory_whatever_the_environment_says_to_it(tmp_path: Path) -> None:
    record = played(0, 0, [1, 2])
    record.messages[-2].truncated, record.stop_reason = True, "truncated"
    source = source_of(tmp_path / "run", [record])

    class Ending(Counting):
        def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
            returned = super().step(message_log_batch, metadata)
            return returned._replace(terminateds=[log[-1]["content"] == "2" for log in message_log_batch])

    tally = run(source, tmp_path / "new", Ending)["count"]
    assert (dict(tally.left), tally.stored) == ({}, 1)


def test_a_trajectory_whose_messages_do_not_fit_its_turns_fails(tmp_path: Path) -> None:
    record = played(0, 0, [1, 2])
    record.messages.pop()
    tally = run(source_of(tmp_path / "run", [record]), tmp_path / "new", Counting)["count"]
    assert (tally.stored, tally.failed) == (0, 1)
    (failure,) = failures(open_storage(str(tmp_path / "new")))
    assert failure.cause == "rescoring: the trajectory has 3 messages for 2 turns"


def test_failures_of_rescoring_are_failures(tmp_path: Path) -> None:
    tally = run(source_of(tmp_path / "run", PLAYED), tmp_path / "new", Breaking)["count"]
    assert (tally.stored, tally.failed) == (5, 1)
    (failure,) = failures(open_storage(str(tmp_path / "new")))
    assert (failure.key, failure.kind, failure.tries) == ((1, 0), "environment", 2)
    assert failure.cause == "rescoring: step raised KeyError: 'nine'"
    whole = PLAYED[2]
    assert (failure.idx, failure.stage, failure.attempt, failure.turn_count) == (None, "environment", 0, 1)
    assert (failure.seed, failure.metadata) == (whole.seed, whole.metadata)
    assert [(m.role, m.content, list(m.token_ids)) for m in failure.messages] == [
        (m.role, m.content, list(m.token_ids)) for m in whole.messages
    ]
    assert (1, 0) not in read(tmp_path / "new")


async def test_an_episode_that_is_lost_again_and_again_fails() -> None:
    lost = 0

    async def step() -> None:
        nonlocal lost
        lost += 1
        raise EpisodeLost("gone")

    with tempfile.TemporaryFile() as file:
        replayer = Replayer({}, InitialStates(file, []), retries=RETRIES)
        with pytest.raises(TrajectoryFailed, match="gone") as caught:
            await replayer._retrying(step)
    # It is no try of the environment's: those would have been two.
    assert (caught.value.cause.reason, caught.value.stage) == ("EpisodeLost", "environment")
    assert caught.value.tries == lost == MAX_RECOVERIES + 1


def test_texts_that_differ_are_cut_to_sixty_characters() -> None:
    def shown(*texts: str) -> str:
        return rescore._short([{"role": "user", "content": text} for text in texts])

    assert shown("x" * 58) == f'user "{"x" * 58}"'
    assert shown("x" * 59) == f'user "{"x" * 56}...'
    assert shown("a", "b") == 'user "a", user "b"'


def test_a_trajectory_of_another_dataset_fails(tmp_path: Path) -> None:
    other, beyond = played(0, 0, [1]), played(0, 0, [1])
    other.messages[0].content, beyond.task_index = "something else", 99
    assert run(source_of(tmp_path / "run", [other, beyond]), tmp_path / "new", Counting)["count"].failed == 2
    causes = sorted(failure.cause for failure in failures(open_storage(str(tmp_path / "new"))))
    assert causes == [
        "rescoring: task 0 of the dataset has another prompt than the trajectory",
        "rescoring: the dataset has 4 tasks, and no task 99",
    ]
    stages = {(failure.kind, failure.stage, failure.tries) for failure in failures(open_storage(str(tmp_path / "new")))}
    assert stages == {("data", "prompt", 1)}


def test_a_rescoring_goes_on_where_it_was(tmp_path: Path) -> None:
    source, output = source_of(tmp_path / "run", PLAYED), tmp_path / "new"
    run(source, output, lambda: Counting(0.25))
    shard = output / "shard-00000.jsonl"
    lines = shard.read_bytes().splitlines(keepends=True)
    # Killed in the middle of a line.
    shard.write_bytes(lines[0] + lines[1][:10])
    tally = run(source, output, lambda: Counting(0.25))["count"]
    assert (tally.earlier, tally.stored, tally.changed, tally.new_mean) == (4, 6, 3, 0.125)
    assert len(shard.read_bytes().splitlines()) == len(lines)
    assert len(read(output)) == 6


class Ranking(Counting):
    """Scores each trajectory by the share of its group that wrote no more than it."""

    def __init__(self, calls: list[list[str]], worth: float = 1.0) -> None:
        super().__init__(worth)
        self.calls = calls

    def score_group(self, members: list[GroupMember]) -> list[GroupScore]:
        self.calls.append([member.id for member in members])
        assert all(member.group_reward is None for member in members)
        ends = [(member.metadata or {})["at"] for member in members]
        if 13 in ends:
            raise ValueError("unlucky")
        shares = [sum(other <= end for other in ends) / len(ends) for end in ends]
        return [
            GroupScore(reward=share, metadata={"at": end, "of": len(ends)})
            for share, end in zip(shares, ends, strict=True)
        ]


GROUPED = [
    played(0, 0, [3, 7]),
    played(0, 1, [1, 2]),
    # A group of which one failed, and the second group of a row that occurs twice.
    played(1, 0, [9]),
    played(1, 2, [8]),
    played(1, 3, [1, 8]),
    # One without a turn.
    played(2, 0, [1, 1, 6]),
    played(2, 1, []),
]


def test_groups_are_scored_again(tmp_path: Path) -> None:
    calls: list[list[str]] = []
    source = source_of(tmp_path / "run", GROUPED)
    tally = run(source, tmp_path / "new", lambda: Ranking(calls))["count"]
    assert (tally.stored, tally.changed, tally.failed, dict(tally.left)) == (7, 6, 0, {rescore.NO_TURNS: 1})
    assert sorted(calls) == [["0-0-0", "0-1-0"], ["1-0-0"], ["1-2-0", "1-3-0"], ["2-0-0"]]
    new = read(tmp_path / "new")
    assert {tuple(key): (record.group_reward, record.total_reward) for key, record in new.items()} == {
        (0, 0): (1.0, 2.0), (0, 1): (0.5, 0.5), (1, 0): (1.0, 2.0), (1, 2): (0.5, 0.5), (1, 3): (1.0, 2.0),
        (2, 0): (1.0, 2.0), (2, 1): (None, 0.0),
    }  # fmt: skip
    assert new[TrajectoryKey(0, 1)].metadata == {"at": 3, "of": 2}
    assert new[TrajectoryKey(0, 0)].rewards == [0.0, 1.0]

    # Rescored once more, the old scores are neither seen nor added again; without the method they are gone.
    scored = source_of(tmp_path / "scored", list(new.values()))
    again = run(scored, tmp_path / "again", lambda: Ranking(calls))["count"]
    assert (again.changed, again.failed) == (0, 0)
    assert {key: encode_line(record) for key, record in read(tmp_path / "again").items()} == {
        key: encode_line(record) for key, record in new.items()
    }
    run(scored, tmp_path / "plain", Counting)
    assert {key: encode_line(record) for key, record in read(tmp_path / "plain").items()} == {
        record.key: encode_line(record) for record in GROUPED
    }


def test_a_group_that_cannot_be_scored_again_fails_alone(tmp_path: Path) -> None:
    source = source_of(tmp_path / "run", [*GROUPED, played(3, 0, [4, 6]), played(3, 1, [8])])
    tally = run(source, tmp_path / "new", lambda: Ranking([]))["count"]
    assert (tally.stored, tally.failed) == (7, 2)
    found = {(tuple(f.key), f.stage, f.cause) for f in failures(open_storage(str(tmp_path / "new")))}
    cause = "rescoring: score_group raised ValueError: unlucky"
    assert found == {((3, 0), "group", cause), ((3, 1), "group", cause)}


def test_a_group_is_left_whole_if_one_of_it_is_answered_otherwise(tmp_path: Path) -> None:
    changed = played(0, 1, [1, 2])
    changed.messages[-1].content = "something else"
    source = source_of(tmp_path / "run", [played(0, 0, [3, 7]), changed, played(1, 0, [9])])
    tally = run(source, tmp_path / "new", lambda: Ranking([]))["count"]
    assert (tally.stored, tally.changed, dict(tally.left)) == (3, 1, {rescore.MISMATCHED: 2})


def test_a_rescoring_that_was_killed_scores_whole_groups(tmp_path: Path) -> None:
    calls: list[list[str]] = []
    source, output = source_of(tmp_path / "run", GROUPED), tmp_path / "new"
    run(source, output, lambda: Ranking([]))
    whole = {key: encode_line(record) for key, record in read(output).items()}
    shard = output / "shard-00000.jsonl"
    (kept, torn) = [line for line in shard.read_bytes().splitlines(keepends=True) if b'{"task_index":0' in line]
    shard.write_bytes(kept + torn[:10])
    tally = run(source, output, lambda: Ranking(calls))["count"]
    assert sorted(calls) == [["0-0-0", "0-1-0"], ["2-0-0"]]
    assert (tally.stored, tally.earlier) == (7, 4)
    assert {key: encode_line(record) for key, record in read(output).items()} == whole


def test_object_stores(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    local = source_of(tmp_path / "run", PLAYED)
    store = fsspec.filesystem("memory")
    for shard in local.storage.shards():
        store.pipe_file(f"/old/{shard}/worker-00000001.jsonl", (tmp_path / "run" / f"{shard}.jsonl").read_bytes())
    try:
        tally = run(RunFiles("memory://old"), "memory://new", lambda: Counting(0.25))["count"]
        assert (tally.stored, tally.changed, tally.new_mean) == (6, 3, 0.125)
        assert sorted(record.key for record in RunFiles("memory://new").trajectories()) == sorted(
            record.key for record in PLAYED
        )
        again = run(RunFiles("memory://old"), "memory://new", lambda: Counting(0.25))["count"]
        assert (again.earlier, again.stored) == (6, 6)
    finally:
        for folder in ("/old", "/new"):
            if store.exists(folder):
                store.rm(folder, recursive=True)


def test_other_environments_are_taken_over(tmp_path: Path) -> None:
    tally = run(source_of(tmp_path / "run", PLAYED), tmp_path / "new", Counting, names=())["count"]
    assert tally.left == {rescore.NOT_SELECTED: 6}


def test_the_run_itself_is_never_the_output(tmp_path: Path) -> None:
    source = source_of(tmp_path / "run", PLAYED)
    manifest = source.manifest()
    assert manifest is not None
    options: dict[str, Any] = {"inputs": manifest.inputs, "force": True}
    with (
        pytest.raises(rescore.RescoreRefused, match="never changed"),
        rescore.open_rescored(source, str(tmp_path / "x" / ".." / "run"), job(), resume=True, **options),
    ):
        pass
    with rescore.open_rescored(source, str(tmp_path / "new"), job(), resume=False, **options):
        pass
    stored = json.loads((tmp_path / "new" / MANIFEST).read_text())
    assert stored["rescored_from"]["location"] == str(tmp_path / "run")
    assert stored["inputs"] == manifest.inputs
    with (
        pytest.raises(RunRefused, match="--resume"),
        rescore.open_rescored(source, str(tmp_path / "new"), job(), resume=False, **options),
    ):
        pass
    rescore.refuse_other_dataset(source, manifest.inputs)
    with pytest.raises(rescore.RescoreRefused, match=r"4 rows then, 5 now"):
        rescore.refuse_other_dataset(source, {"digest": "other", "rows": 5})


def test_a_rescored_run_keeps_its_generation_and_has_the_scoring_of_the_new_job(tmp_path: Path) -> None:
    source = source_of(tmp_path / "run", PLAYED)
    path = tmp_path / "run" / MANIFEST
    stored = json.loads(path.read_text())
    stored["identity"] |= {"environments[0].config.worth": 2, "generation.seed": 7}
    path.write_text(json.dumps(stored))
    inputs = scan(job(), base=tmp_path, environment=lambda name: Counting()).as_json()
    found = rescore.rescored_manifest(RunFiles(str(tmp_path / "run")), job(), inputs=inputs | {"rows": 99})
    assert found.identity["generation.seed"] == 7
    assert found.identity["environments[0].entrypoint"] == f"{__name__}:Counting"
    assert "environments[0].config.worth" not in found.identity
    assert list(found.identity) == sorted(found.identity)
    assert (found.shards, found.inputs["rows"]) == (2, 4)
    assert found.rescored_from == {
        "location": source.location,
        "job": stored["job"],
        "created": stored["created"],
        "versions": stored["versions"],
    }
    path.unlink()
    without = rescore.rescored_manifest(RunFiles(str(tmp_path / "run")), job(), inputs=inputs)
    assert (without.shards, without.rescored_from) == (2, {"location": source.location})


class Watched(Counting):
    """Knows, at each step, how many trajectories of the output are written."""

    def __init__(self, output: Path) -> None:
        super().__init__(0.25)
        self.output = output
        self.written: list[int] = []

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        files = [path.read_bytes() for path in self.output.glob("shard-*.jsonl")]
        self.written.append(sum(data.count(b"\n") for data in files))
        return super().step(message_log_batch, metadata)


def test_what_waits_to_be_written_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescore, "_PENDING_BYTES", 0)
    records = [played(task, 0, [1]) for task in (0, 2)] + [played(0, number, [1]) for number in range(1, 10)]
    environment = Watched(tmp_path / "new")
    run(source_of(tmp_path / "run", records), tmp_path / "new", lambda: environment, force=True, concurrency=1)
    assert environment.written == list(range(11))


async def test_replays_do_not_wait_for_slow_uploads(s3: tuple[S3Server, str], tmp_path: Path) -> None:
    server, uri = s3
    replayed = 0

    class Releasing(Counting):
        """Lets uploads in when all is replayed."""

        def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
            nonlocal replayed
            replayed += len(message_log_batch)
            if replayed == 10:
                server.held.set()
            return super().step(message_log_batch, metadata)

    source = source_of(tmp_path / "run", [played(0, number, [1]) for number in range(10)])
    server.held.clear()
    tally = await asyncio.to_thread(run, source, f"{uri}/new", Releasing, force=True, concurrency=1)
    assert tally["count"].stored == 10
    assert len(list(RunFiles(f"{uri}/new").trajectories())) == 10


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_is_replayed_at_once_than_is_allowed(tmp_path: Path, concurrency: int) -> None:
    class Slow(Counting):
        """A step ends when as many others as there may be have begun."""

        def __init__(self) -> None:
            super().__init__()
            self.most = self.running = 0

        async def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:  # type: ignore[override]
            self.running += len(message_log_batch)
            self.most = max(self.most, self.running)
            while self.most < concurrency:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0)
            self.running -= len(message_log_batch)
            return super().step(message_log_batch, metadata)

    environment = Slow()
    source = source_of(tmp_path / "run", [played(0, number, [1]) for number in range(9)])
    run(source, tmp_path / "new", lambda: environment, force=True, concurrency=concurrency)
    assert environment.most == concurrency


@pytest.mark.parametrize("names", [("count",), ("count", "absent")])
def test_some_of_each_environment_s_trajectories_are_replayed_twice_first(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    replayed: list[str] = []

    class Listening(Counting):
        def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
            replayed.extend(log[-1]["content"] for log in message_log_batch)
            return super().step(message_log_batch, metadata)

    records = [played(0, number, [1] if number % 2 else []) for number in range(50)]
    tally = run(source_of(tmp_path / "run", records), tmp_path / "new", Listening, names=names)["count"]
    assert (tally.stored, dict(tally.left)) == (50, {rescore.NO_TURNS: 25})
    assert f"The first {rescore.PROBED} are tried" in (ROOT / "docs" / "how-to" / "rescoring.md").read_text()
    # Those without a turn say nothing; of the others as many as are probed, twice, and then all.
    assert len(replayed) == 2 * rescore.PROBED + 25


class Opened(Counting):
    """Begins each episode at a number that depends on its seed, which it keeps in an object."""

    recovery = "replay"

    def __init__(self, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.sums: dict[str, int] = {}

    def reset(self, episodes: list[Episode]) -> list[EpisodeStart | None]:
        starts: list[EpisodeStart | None] = []
        for episode in episodes:
            self.sums[episode.id] = at = episode.seed % 3 + self.offset
            message = {"role": "user", "content": f"at {at}"}
            starts.append(EpisodeStart(messages=[message], metadata={"id": episode.id}))
        return starts

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        sums = []
        for log, state in zip(message_log_batch, metadata, strict=True):
            assert state is not None
            self.sums[state["id"]] += int(log[-1]["content"])
            sums.append(self.sums[state["id"]])
        observations = [{"role": "environment", "content": self.said(at)} for at in sums]
        return EnvironmentReturn(observations, None, None, [at / 10 for at in sums], [at >= 10 for at in sums])

    def close(self, episodes: list[EpisodeEnd]) -> None:
        for end in episodes:
            del self.sums[end.id]


def opened_run(directory: Path) -> RunFiles:
    """A run with one trajectory of `Opened`, with other rewards."""
    begun = task_seed(0, 2) % 3
    record = played(2, 0, [9 - begun, 4])
    texts = [f"at {begun}", str(9 - begun), "at 9", "4", "at 13"]
    record.messages.insert(1, Message("user", "", token_array()))
    for message, text in zip(record.messages[1:], texts, strict=True):
        message.content = text
    return source_of(directory, [record])


def test_episodes_are_begun_and_closed(tmp_path: Path) -> None:
    environment = Opened()
    counts = run(opened_run(tmp_path / "run"), tmp_path / "new", lambda: environment)["count"]
    assert (counts.stored, counts.changed, counts.failed) == (1, 1, 0)
    assert not counts.left
    assert environment.sums == {}
    (record,) = read(tmp_path / "new").values()
    assert record.rewards == [0.9, 1.3]


def test_an_episode_that_begins_otherwise_is_left(tmp_path: Path) -> None:
    counts = run(opened_run(tmp_path / "run"), tmp_path / "new", lambda: Opened(offset=1))["count"]
    assert (counts.changed, counts.left.total()) == (0, 1)
    assert "reset returns other messages than before" in counts.examples[0]
    (record,) = read(tmp_path / "new").values()
    assert record.rewards == [0.0, 1.0]
