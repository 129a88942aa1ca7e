"""The consumer of a run: what it waits for, what it is given, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kuberoll.trainer import Counts, NotARun, Rollouts, StateRefused
from kuberoll_workers.data.record import FailureRecord, RecordError, TurnRecord, set_turns_to_score
from kuberoll_workers.output.storage import open_storage
from kuberoll_workers.output.store import ResultStore
from tests.output.s3 import s3, s3_server
from tests.output.support import Observed, dropped, failure
from tests.trainer.support import WrittenRun, manifest, trajectory
from tests.without_torch import without_torch

__all__ = ["s3", "s3_server"]

ALLOWED = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "msgspec", "numpy"}
# The lines of a run are written and read by it, too.
ALLOWED |= {"orjson"}
READ = """
import importlib.abc, json, sys
class Only(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {allowed} and not top.startswith(("kuberoll", "_")):
            raise ImportError(f"{{name}} is not installed")
sys.meta_path.insert(0, Only())
from kuberoll.trainer import Rollouts
rollouts = Rollouts.open({run!r})
rows = sum(len(batch) for batch in rollouts.batches(2))
heavy = {{"aiohttp", "fsspec", "kopf", "pyarrow", "ray", "torch", "transformers", "vllm"}}
print(json.dumps([rows, rollouts.state_dict()["counts"]["groups"], sorted(heavy & set(sys.modules))]))
"""


def tasks(rollouts: Rollouts, groups: int = 1, **options: Any) -> list[list[int]]:
    """The tasks of each batch."""
    return [[group.key.task_index for group in batch.groups] for batch in rollouts.batches(groups, **options)]


def members(rollouts: Rollouts, **options: Any) -> list[list[tuple[int, int]]]:
    """The trajectories of each group."""
    return [
        [tuple(record.key) for record in group.trajectories]  # type: ignore[misc]
        for batch in rollouts.batches(1, **options)
        for group in batch.groups
    ]


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    """Three groups of two."""
    return WrittenRun(tmp_path / "run", groups=3)


def test_a_trainer_needs_little(run: WrittenRun) -> None:
    for task in range(3):
        run.write(trajectory(task, 0), trajectory(task, 1))
    code = READ.format(allowed=ALLOWED, run=str(run.path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=without_torch()
    )
    assert done.returncode == 0, done.stderr
    # In place of PyTorch there is a None, which is how it is hidden.
    assert json.loads(done.stdout) == [6, 3, ["torch"]]


def test_without_its_packages_the_extra_is_named() -> None:
    code = "import sys; sys.modules['numpy'] = None; import kuberoll.trainer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "ModuleNotFoundError: kuberoll.trainer needs numpy, which is not installed: pip install 'kuberoll[trainer]'\n"
    )


def test_without_pytorch_only_tensors_are_missing(run: WrittenRun) -> None:
    run.write(trajectory(0, 0), trajectory(0, 1))
    code = (
        f"from kuberoll.trainer import Rollouts\n[batch] = Rollouts.open({str(run.path)!r}).batches(1, wait=False)\n"
        "print(batch.input_ids.shape)\nbatch.torch()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=without_torch()
    )
    assert done.stdout == "(2, 6)\n"
    assert "torch" in done.stderr.splitlines()[-1]


def test_a_group_is_delivered_when_its_last_trajectory_has_finished(run: WrittenRun) -> None:
    rollouts = Rollouts.open(str(run.path))
    run.write(trajectory(1, 0), trajectory(0, 1), trajectory(1, 1))
    assert tasks(rollouts, wait=False) == [[1]]
    run.write(trajectory(0, 0))
    assert tasks(rollouts, wait=False) == [[0]]
    assert tasks(rollouts, wait=False) == []


def test_failed_trajectories_are_not_waited_for(run: WrittenRun) -> None:
    rollouts = Rollouts.open(str(run.path))
    run.write(trajectory(0, 0), failure(0, 1), failure(1, 0), failure(1, 1), failure(2, 1))
    assert members(rollouts, wait=False) == [[(0, 0)]]
    run.write(trajectory(2, 0))
    # The run has ended: all three groups have.
    assert members(rollouts) == [[(2, 0)]]
    assert rollouts.counts == Counts(groups=2, trajectories=2, short_groups=2, failed_groups=1)


def unscored(task: int, rollout: int, **changes: Any) -> FailureRecord:
    """A trajectory whose response could not be scored."""
    found = trajectory(task, rollout)
    fields = {"stage": "environment", "messages": found.messages[:2], "turn_count": 1, **changes}
    record = failure(task, rollout, **fields)
    turn = TurnRecord(
        task_index=task, rollout_index=rollout, attempt=record.attempt, turn=1, messages=[], reward=0.0,
        reward_parts={}, metadata=None, stop_strings=None, answer=None, generation_seconds=0.1, environment_seconds=0.0,
    )  # fmt: skip
    set_turns_to_score(record, [turn])
    return record


def test_a_group_waits_for_what_can_still_be_scored(run: WrittenRun) -> None:
    rollouts = Rollouts.open(str(run.path))
    run.write(trajectory(0, 0), unscored(0, 1), unscored(1, 0), unscored(1, 1), trajectory(2, 0), failure(2, 1))
    assert members(rollouts, wait=False) == [[(2, 0)]]
    run.write(trajectory(0, 1, attempt=1), unscored(1, 0, attempt=1), failure(1, 1, attempt=1))
    assert members(rollouts, wait=False) == [[(0, 0), (0, 1)]]
    # The run gives up: nobody scores the rest of the group now.
    run.end()
    assert members(rollouts) == []
    assert rollouts.counts == Counts(groups=2, trajectories=3, short_groups=1, failed_groups=1)


def test_what_the_environment_has_broken_is_not_waited_for(run: WrittenRun) -> None:
    """The run does not try it again by itself."""
    rollouts = Rollouts.open(str(run.path))
    run.write(trajectory(0, 0), unscored(0, 1, kind="environment"))
    assert members(rollouts, wait=False) == [[(0, 0)]]


def test_what_is_unscored_at_the_end_leaves_a_short_group(run: WrittenRun) -> None:
    rollouts = Rollouts.open(str(run.path))
    run.write(*(trajectory(task, 0) for task in range(3)), *(unscored(task, 1) for task in range(3)))
    assert members(rollouts, wait=False) == []
    run.end()
    assert members(rollouts) == [[(0, 0)], [(1, 0)], [(2, 0)]]
    assert rollouts.counts.short_groups == 3


def test_a_run_that_is_held_back_does_not_wait_for_scores(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run", groups=1, **{"rollout.onPolicy.maxLag": 1})
    rollouts = Rollouts.open(str(run.path), pace=False)
    run.write(trajectory(0, 0), unscored(0, 1))
    assert members(rollouts, wait=False) == [[(0, 0)]]


def test_an_atomic_group_that_lacks_more_than_a_score_has_failed(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run", groups=2, **{"rollout.groups.atomic": True})
    rollouts = Rollouts.open(str(run.path))
    run.write(unscored(0, 0), failure(0, 1), unscored(1, 0), unscored(1, 1, stage="group"))
    assert members(rollouts, wait=False) == []
    assert rollouts.counts.failed_groups == 1
    run.write(trajectory(1, 0, attempt=1), trajectory(1, 1, attempt=1))
    assert members(rollouts) == [[(1, 0), (1, 1)]]


def test_what_a_resumed_run_finishes_late_never_delivers_a_group_twice(run: WrittenRun) -> None:
    rollouts = Rollouts.open(str(run.path))
    run.write(trajectory(0, 0), failure(0, 1), failure(1, 0), failure(1, 1))
    assert members(rollouts, wait=False) == [[(0, 0)]]
    state = rollouts.state_dict()
    run.write(trajectory(0, 1, attempt=1))
    assert members(rollouts, wait=False) == []
    assert rollouts.counts.late_trajectories == 1
    again = Rollouts.open(str(run.path))
    again.load_state_dict(state)
    assert members(again, wait=False) == []
    assert again.counts.late_trajectories == 1
    # Nothing of the other group was delivered, so all of it comes: when both have been tried again.
    run.write(trajectory(1, 0, attempt=1))
    assert members(rollouts, wait=False) == []
    run.write(trajectory(1, 1, attempt=1))
    assert members(rollouts, wait=False) == members(again, wait=False) == [[(1, 0), (1, 1)]]


def test_a_group_whose_retry_is_under_way_is_waited_for_until_the_run_has_ended(run: WrittenRun) -> None:
    run.write(failure(0, 0), failure(0, 1), trajectory(0, 0, attempt=1))
    rollouts = Rollouts.open(str(run.path))
    assert members(rollouts, wait=False) == []
    run.end()
    assert members(rollouts, wait=False) == [[(0, 0)]]


def test_groups_that_are_filtered_out_are_counted(run: WrittenRun) -> None:
    run.write(*[dropped(1, rollout, reason="filtered") for rollout in range(2)])
    for task in (0, 2):
        run.write(trajectory(task, 0), trajectory(task, 1))
    rollouts = Rollouts.open(str(run.path))
    assert tasks(rollouts) == [[0], [2]]
    assert rollouts.counts == Counts(groups=2, trajectories=4, filtered_groups=1)


def test_oversampled_trajectories_are_no_part_of_a_group(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run", groups=2, **{"rollout.groups.oversample": 1})
    run.write(trajectory(0, 2), trajectory(0, 0), dropped(0, 1), dropped(1, 0), failure(1, 1), trajectory(1, 2))
    rollouts = Rollouts.open(str(run.path))
    # A crash lost what the dropped one was dropped for: the group goes on.
    assert members(rollouts, wait=False) == [[(0, 0), (0, 2)]]
    run.write(trajectory(1, 0))
    assert members(rollouts) == [[(1, 0), (1, 2)]]


def test_atomic_groups_come_whole_or_not_at_all(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run", groups=9, **{"rollout.groups.atomic": True, "rollout.groups.wanted": 1})
    run.write(failure(0, 0), failure(0, 1, stage="group"), trajectory(1, 0), trajectory(1, 1))
    rollouts = Rollouts.open(str(run.path))
    # As many as are wanted: it does not wait for the rest of the dataset.
    assert tasks(rollouts) == [[1]]
    assert rollouts.counts == Counts(groups=1, trajectories=2, failed_groups=1)


def test_rows_with_equal_content_are_groups_of_one_task(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run", groups=2)
    run.write(*[trajectory(0, rollout) for rollout in (2, 0, 1, 3)])
    [first, second] = [batch.groups[0] for batch in Rollouts.open(str(run.path)).batches(1)]
    assert (first.key, second.key) == ((0, 0), (0, 1))


def test_the_last_batch_may_be_smaller(run: WrittenRun) -> None:
    for task in range(3):
        run.write(trajectory(task, 0), trajectory(task, 1))
    assert tasks(Rollouts.open(str(run.path)), 2) == [[0, 1], [2]]


def test_without_waiting_only_the_last_batch_is_smaller(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run", groups=9, repeats=1)
    rollouts = Rollouts.open(str(run.path))
    run.write(*map(trajectory, range(5)))
    given = []
    # The run goes on meanwhile.
    for batch, task in zip(rollouts.batches(3, wait=False), range(5, 9), strict=False):
        given.append(len(batch.groups))
        run.write(trajectory(task))
    assert given == [3, 3, 1]
    assert tasks(rollouts, 3, wait=False) == [[7]]


def test_a_stopped_run_is_waited_for_as_long_as_asked_and_nothing_is_lost(run: WrittenRun) -> None:
    run.write(trajectory(0, 0), trajectory(0, 1))
    rollouts = Rollouts.open(str(run.path))
    with pytest.raises(
        TimeoutError, match=r"no prompt group has ended .* 1 wait for their batch.* of 3 of the dataset"
    ):
        next(rollouts.batches(2, timeout=0.05))
    assert tasks(rollouts, 2, wait=False) == [[0]]


def test_inexact_trajectories_are_never_silently_in(run: WrittenRun) -> None:
    run.write(trajectory(0, 0), trajectory(0, 1, token_source="reencoded"))
    for rollout in range(2):
        run.write(trajectory(1, rollout, token_source="reencoded"), trajectory(2, rollout))
    with pytest.raises(ValueError, match="task 0, rollout 1: its token ids were encoded from a text"):
        next(Rollouts.open(str(run.path)).batches(3))
    skipping = Rollouts.open(str(run.path), inexact="skip")
    assert members(skipping) == [[(0, 0)], [(2, 0), (2, 1)]]
    assert skipping.counts == Counts(groups=2, trajectories=3, short_groups=1, inexact_trajectories=3)
    assert len(members(Rollouts.open(str(run.path), inexact="keep"))) == 3
    # What was left out is not late where it is read again.
    state = skipping.state_dict()
    state["read"] = {"files": {}, "parts": {}}
    skipping.load_state_dict(state)
    assert members(skipping) == []
    assert skipping.counts.late_trajectories == 0


def test_an_unreadable_line_is_left_out_and_one_of_another_run_refused(run: WrittenRun) -> None:
    with (run.path / "shard-00000.jsonl").open("ab") as shard:
        shard.write(b"\xef\xbb\xbf{not json}\r\n\n")
    run.write(trajectory(0, 0), trajectory(0, 1))
    rollouts = Rollouts.open(str(run.path))
    assert tasks(rollouts, wait=False) == [[0]]
    run.write(trajectory(1, 0, task_name="other"))
    with pytest.raises(RecordError, match=r"shard-00000.jsonl at byte \d+: task_name 'other' is not one of"):
        tasks(rollouts, wait=False)


def test_a_state_is_small_and_read_by_its_own_consumer_of_its_own_run(tmp_path: Path) -> None:
    groups = 200
    run = WrittenRun(tmp_path / "run", groups=groups, shards=2)
    for task in range(groups):
        run.write(trajectory(task, 0), trajectory(task, 1))
    rollouts = Rollouts.open(str(run.path), consumer="grpo")
    sizes = []
    for _ in rollouts.batches(20):
        state = rollouts.state_dict()
        sizes.append(len(json.dumps(state)))
    assert max(sizes) - min(sizes) < 100
    with pytest.raises(StateRefused, match="it is of consumer 'grpo', and this is 'eval'"):
        Rollouts.open(str(run.path), consumer="eval").load_state_dict(state)
    for changed in ({"format": 1}, {"closed": 7}, {"closed": [[0, 0, 1, [3, 1]]]}):
        with pytest.raises(StateRefused):
            rollouts.load_state_dict({**state, **changed})
    with pytest.raises(StateRefused, match="format None"):
        rollouts.load_state_dict({})
    other = WrittenRun(tmp_path / "other", groups=groups)
    with pytest.raises(StateRefused, match=r"it is of another run .*shards: 2, here 1"):
        Rollouts.open(str(other.path), consumer="grpo").load_state_dict(state)


def test_a_resumed_consumer_begins_where_lines_are_needed(run: WrittenRun) -> None:
    run.write(trajectory(0, 0), trajectory(1, 0), trajectory(0, 1))
    rollouts = Rollouts.open(str(run.path))
    assert tasks(rollouts, wait=False) == [[0]]
    [(offset, *_)] = rollouts.state_dict()["read"]["files"].values()
    assert offset == len((run.path / "shard-00000.jsonl").read_bytes().split(b"\n")[0]) + 1
    # Where the file is another one than it was, all of it is read.
    state = rollouts.state_dict()
    lines = (run.path / "shard-00000.jsonl").read_bytes().splitlines(keepends=True)
    (run.path / "shard-00000.jsonl").write_bytes(b"".join([lines[1], lines[0], lines[2]]))
    run.write(trajectory(1, 1))
    rollouts.load_state_dict(state)
    assert members(rollouts, wait=False) == [[(1, 0), (1, 1)]]


def test_an_iterator_ends_where_another_state_is_loaded(run: WrittenRun) -> None:
    for task in range(3):
        run.write(trajectory(task, 0), trajectory(task, 1))
    rollouts = Rollouts.open(str(run.path))
    beginning = rollouts.state_dict()
    batches = rollouts.batches(1)
    next(batches)
    rollouts.load_state_dict(beginning)
    with pytest.raises(RuntimeError, match="a state was loaded"):
        next(batches)
    assert tasks(rollouts) == [[0], [1], [2]]


@pytest.mark.slow
async def test_a_run_in_an_object_store_is_read_part_by_part(s3: tuple[Any, str]) -> None:
    _, bucket = s3
    location = f"{bucket}/run"
    storage = open_storage(location)
    storage.write("manifest.json", json.dumps(manifest(groups=4, shards=1)).encode())

    def store() -> ResultStore:
        return ResultStore(
            storage,
            shards=[0],
            shard_count=1,
            repeats={"env": 2},
            turns=None,
            seconds=Observed(),
            stored=lambda _: None,
        )

    rollouts = Rollouts.open(location, poll_seconds=0.05)
    writer = store()
    for key in ((0, 0), (1, 0), (0, 1)):
        await writer.result(trajectory(*key))
    await writer.result(failure(2, 0))
    await writer.close()
    had = [[group.key.task_index async for batch in rollouts.batches_async(1, wait=False) for group in batch.groups]]
    state = rollouts.state_dict()
    writer = store()
    for key in ((1, 1), (2, 1), (3, 0), (3, 1)):
        await writer.result(trajectory(*key))
    await writer.close()
    await writer.finalize(parquet=False)
    had.append([group.key.task_index async for batch in rollouts.batches_async(1) for group in batch.groups])
    # In the order of the parts' names, which are random; the short one at the end.
    assert (had[0], sorted(had[1][:2]), had[1][2:]) == ([0], [1, 3], [2])
    again = Rollouts.open(location)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert [group.key.task_index async for batch in again.batches_async(1) for group in batch.groups][2:] == [2]
    assert again.counts == rollouts.counts


def test_what_is_no_run_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    with pytest.raises(NotARun, match="expected rolloutjob://NAMESPACE/NAME"):
        Rollouts.open("rolloutjob://name")
    with pytest.raises(ValueError, match="mount the claim, and open the directory"):
        Rollouts.open("pvc://claim/run")
    with pytest.raises(NotARun, match="nowhere://bucket"):
        # At once: no run will ever begin there.
        Rollouts.open("nowhere://bucket/run", timeout=3600)
    with pytest.raises(NotARun, match=r"found neither manifest.json nor shard-\*.jsonl"):
        Rollouts.open(str(tmp_path))
    (tmp_path / "shard-00000.jsonl").write_text("")
    with pytest.raises(NotARun, match=r"no manifest.json, so nobody knows which trajectories make a prompt group"):
        Rollouts.open(str(tmp_path))
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(NotARun, match="not a run's manifest"):
        Rollouts.open(str(tmp_path))
    without = manifest(groups=1)
    del without["inputs"]["rows"]
    (tmp_path / "manifest.json").write_text(json.dumps(without))
    with pytest.raises(NotARun, match="rows: found None, expected a whole number from 1"):
        Rollouts.open(str(tmp_path))


def test_a_simulated_run_is_no_data_to_train_on(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run", groups=1, **{"generation.engine": "Simulated"})
    with pytest.raises(NotARun, match=r"no model wrote the responses.*allow_simulated=True"):
        Rollouts.open(str(run.path))
    assert Rollouts.open(str(run.path), allow_simulated=True).counts == Counts()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inexact": "drop"}, "inexact: found 'drop'"),
        ({"poll_seconds": 0.0}, "poll_seconds: found 0.0"),
        ({"consumer": ""}, "consumer: found an empty name"),
    ],
)
def test_arguments_are_checked(run: WrittenRun, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rollouts.open(str(run.path), **options)


def test_arguments_of_batches_are_checked_at_once(run: WrittenRun) -> None:
    with pytest.raises(ValueError, match="groups: found 0"):
        Rollouts.open(str(run.path)).batches(0)
    with pytest.raises(ValueError, match="advantages: found 'ppo'"):
        Rollouts.open(str(run.path)).batches(1, advantages="ppo")  # type: ignore[arg-type]
