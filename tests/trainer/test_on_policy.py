"""A run that a trainer holds back: the bound on lag, what may begin, and what becomes of what is too old."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from kuberoll.trainer import Rollouts, StateRefused
from kuberoll.trainer.pace_control import PacedByAnother
from kuberoll_api.contract import ServeArgs
from kuberoll_workers.output import records
from kuberoll_workers.output.consumer_plan import PLAN, read_plan
from kuberoll_workers.output.manifest import AGGREGATES
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, PolicyRefused
from kuberoll_workers.serving.engines.simulated import Simulated
from tests.rollouts.fakes import until
from tests.trainer.on_policy import PacedRun, job, train

pytestmark = pytest.mark.slow


def paced(tmp_path: Path, *, shards: int = 1, **on_policy: Any) -> PacedRun:
    return PacedRun(tmp_path / "run", job(shards=shards, rollout={"onPolicy": on_policy}))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("on_stale", ["Drop", "Finish"])
@pytest.mark.parametrize("max_lag", [0, 1, 4])
async def test_no_trajectory_is_older_than_the_bound(tmp_path: Path, max_lag: int, on_stale: str, shards: int) -> None:
    async with paced(tmp_path, shards=shards, maxLag=max_lag, onStale=on_stale) as run:
        rollouts = run.open()
        played = await train(run, rollouts, groups=4, steps=8)
        rollouts.stop()
        assert await run.ended()
    assert len(played.keys) == len(set(played.keys)) == 32
    assert max(played.lags) <= max_lag
    given_up = [record for record in run.dropped() if record.reason == "stale"]
    if on_stale == "Finish":
        assert not given_up
        assert rollouts.counts.stale_groups == 0
    # Whatever the trainer had is there, and nothing else is lost: it waits for a further consumer.
    assert {(record.task_index, record.rollout_index // 3) for record in run.stored()} >= set(played.keys)


async def test_finish_delivers_in_the_order_of_the_dataset(tmp_path: Path) -> None:
    async with paced(tmp_path, shards=2, maxLag=2, onStale="Finish") as run:
        rollouts = run.open()
        orders: list[tuple[int, int | None]] = []

        def note(batch: Any) -> None:
            orders.extend((group.key.task_index % 2, group.order) for group in batch.groups)

        await train(run, rollouts, groups=3, steps=6, check=note)
        rollouts.stop()
        assert await run.ended()
    assert orders == [(place % 2, place // 2) for place in range(18)]


async def test_nothing_begins_before_a_trainer_takes(tmp_path: Path) -> None:
    async with paced(tmp_path, maxLag=0) as run:
        rollouts = run.open()
        assert read_plan(run.storage, shards=1) is None
        batches = rollouts.batches_async(2, timeout=30)
        batch = await anext(batches)
        assert len(batch.groups) == 2
        # Strictly on-policy: what was taken was all that may have begun.
        await until(lambda: run.progress[0].trajectories == 6)
        with pytest.raises(TimeoutError, match=r"the newest that it knows of have version 0.*groups_per_version"):
            await anext(rollouts.batches_async(2, timeout=0.2))
        assert run.progress[0].trajectories == 6
        await run.engine.load_weights(None, "1")
        assert rollouts.published() == 1
        batch = await anext(rollouts.batches_async(2, timeout=30))
        assert set(batch.policy_version[batch.loss_mask].tolist()) == {1}
        rollouts.stop()
        assert await run.ended()


@pytest.mark.parametrize("shards", [1, 3])
async def test_never_more_groups_wait_than_may(tmp_path: Path, shards: int) -> None:
    async with paced(tmp_path, shards=shards, maxAhead=5) as run:
        rollouts = run.open()
        batches = rollouts.batches_async(2, timeout=30)
        for taken in range(0, 12, 2):
            # Everything that may begin has ended.
            await until(run.has_stored(3 * (taken + 5)))
            await anext(batches)
        rollouts.stop()
        assert await run.ended()


async def test_what_is_too_old_is_recorded_and_never_delivered(tmp_path: Path) -> None:
    async with paced(tmp_path, maxLag=1, maxAhead=8) as run:
        rollouts = run.open()
        batches = rollouts.batches_async(4, timeout=30)
        await anext(batches)
        await until(lambda: run.progress[0].trajectories == 3 * 8)
        # Two versions at once: what waits is too old.
        for version in (1, 2):
            await run.engine.load_weights(None, str(version))
            rollouts.published()
        batch = await anext(batches)
        assert min(batch.policy_version[batch.loss_mask].tolist()) >= 1
        assert rollouts.counts.stale_groups == 4
        rollouts.stop()
        assert await run.ended()
    stale = [record for record in run.dropped() if record.reason == "stale"]
    assert len(stale) == 12
    # Its line in the shard stays; the one in dropped.jsonl counts.
    keys = {record.key for record in stale}
    assert keys <= {record.key for record in run.stored()}
    counts = read_plan(run.storage, shards=1)
    assert counts is not None
    tokens = sum(record.tokens.generated for record in stale)
    assert counts.counts.stale_tokens == rollouts.counts.stale_tokens == tokens
    # The end of a run makes one file of the parts, which who goes on from a checkpoint reads from its beginning.
    state = json.loads(json.dumps(rollouts.state_dict()))
    run.storage.compact(records.DROPPED)
    resumed = run.open()
    resumed.load_state_dict(state)
    list(resumed.batches(4, wait=False))
    assert resumed.counts.stale_groups == 4
    assert resumed.counts.stale_tokens == tokens


async def test_a_trainer_whose_groups_are_all_too_old_is_told_so(tmp_path: Path) -> None:
    async with paced(tmp_path, maxLag=0) as run:
        rollouts = run.open()
        await anext(rollouts.batches_async(2, timeout=30))
        # The engine goes on with its old weights, as one does whose trainer has only said that it has new ones.
        rollouts.published()
        with pytest.raises(TimeoutError, match=r"[1-9]\d* were too old and 0 failed"):
            await anext(rollouts.batches_async(2, timeout=1))


async def test_trajectories_in_flight_are_stopped_when_they_are_too_old(tmp_path: Path) -> None:
    slow = {"firstTokenSeconds": 0.1, "sigma": 0.0}
    run = PacedRun(tmp_path / "run", job(simulated=slow, rollout={"onPolicy": {"maxLag": 0}}))
    async with run:
        rollouts = run.open()
        taking = asyncio.ensure_future(anext(rollouts.batches_async(2, timeout=60)))
        await until(lambda: run.metrics.activity().turns > 0)
        await run.engine.load_weights(None, "1")
        rollouts.published()
        batch = await taking
        assert set(batch.policy_version[batch.loss_mask].tolist()) == {1}
        rollouts.stop()
        assert await run.ended()
    stale = run.dropped()
    assert {record.reason for record in stale} == {"stale"}
    assert None in {record.stop_reason for record in stale}
    # Two groups as wholes: those of their trajectories that had finished, too.
    assert len({record.key for record in stale}) == 6
    # The trainer may have stopped before it saw the last of them.
    assert 0 < rollouts.counts.stale_tokens <= sum(record.tokens.generated for record in stale)


async def test_a_run_that_is_killed_goes_on_with_its_trainer(tmp_path: Path) -> None:
    keys: list[tuple[int, int]] = []
    state = None
    run = paced(tmp_path, shards=2, maxLag=1)
    for life in range(4):
        async with run:
            # The trainer is killed as well, and comes back from its checkpoint.
            rollouts = run.open()
            if state is not None:
                rollouts.load_state_dict(state)
            played = await train(run, rollouts, groups=4, steps=3)
            assert max(played.lags) <= 1, life
            keys += played.keys
            state = json.loads(json.dumps(rollouts.state_dict()))
    assert len(keys) == len(set(keys)) == 48


async def test_passes_without_end_end_when_the_trainer_says(tmp_path: Path) -> None:
    run = PacedRun(tmp_path / "run", job())
    async with run:
        rollouts = run.open()
        async for _ in rollouts.batches_async(8, timeout=60):
            if rollouts.counts.groups >= 40:
                break
        rollouts.stop()
        assert await run.ended()
    assert len(run.stored()) >= 120
    # More than a pass over the 12 rows.
    assert max(record.rollout_index for record in run.stored()) >= 9


async def test_one_consumer_sets_the_pace_and_others_read(tmp_path: Path) -> None:
    async with paced(tmp_path, maxLag=0) as run:
        rollouts = run.open(consumer="grpo")
        await train(run, rollouts, groups=2, steps=3)
        rollouts.stop()
        assert await run.ended()
        with pytest.raises(PacedByAnother, match="consumer 'grpo' sets the pace of this run"):
            run.open(consumer="eval")
        reader = run.open(consumer="eval", pace=False)
        assert sum(len(batch.groups) for batch in reader.batches(1, wait=False)) == 6
        with pytest.raises(RuntimeError, match="published: this consumer does not set the pace"):
            reader.published(9)
        with pytest.raises(ValueError, match="found 3, but 3 was published before"):
            rollouts.published(3)


@pytest.mark.parametrize("on_stale", ["Drop", "Finish"])
async def test_a_state_without_the_pace_is_refused_by_the_consumer_that_sets_it(tmp_path: Path, on_stale: str) -> None:
    async with paced(tmp_path, maxLag=1, onStale=on_stale) as run:
        rollouts = run.open()
        await anext(rollouts.batches_async(2, timeout=30))
        reader = run.open(pace=False)
        await anext(reader.batches_async(2, timeout=30))
        # The workers would wait for what it has had, and it for the workers.
        with pytest.raises(StateRefused, match=r"saved with pace=False.*open the run with pace=False"):
            run.open().load_state_dict(reader.state_dict())
        # The other way round nothing is lacking.
        reader.load_state_dict(rollouts.state_dict())
        assert len((await anext(reader.batches_async(2, timeout=30))).groups) == 2


def test_versions_are_whole_numbers_of_any_kind(tmp_path: Path) -> None:
    run = paced(tmp_path, maxLag=1)
    rollouts = run.open()
    assert rollouts.published(numpy.int64(3)) == 3  # type: ignore[arg-type]
    for version in (4.5, "4", True):
        with pytest.raises(ValueError, match="expected a whole number from 4"):
            rollouts.published(version)  # type: ignore[arg-type]
    # Workers could not read a plan with another one, and the trainer could not begin again.
    assert run.open().version == 3
    plan = read_plan(run.storage, shards=1)
    assert plan is not None
    assert plan.version == 3


def test_a_batch_is_never_larger_than_what_may_wait(tmp_path: Path) -> None:
    run = paced(tmp_path, maxAhead=4)
    with pytest.raises(ValueError, match="maxAhead of the run is 4"):
        run.open().batches(5)
    with pytest.raises(ValueError, match="maxAhead of the run is 4"):
        run.open(groups_per_version=2).batches(5)


def test_a_batch_is_never_larger_than_what_may_begin_with_a_version(tmp_path: Path) -> None:
    rollouts = paced(tmp_path, maxLag=1).open(groups_per_version=2)
    rollouts.batches(4)
    with pytest.raises(ValueError, match=r"groups: 5, but .* only 4 may begin .* greater groups_per_version"):
        rollouts.batches(5)


def test_a_plan_that_is_torn_is_refused_with_its_name(tmp_path: Path) -> None:
    run = paced(tmp_path, maxAhead=4)
    (run.output / PLAN).write_text("{")
    with pytest.raises(ValueError, match=r"consumer\.json: no plan of a consumer"):
        Rollouts.open(str(run.output), allow_simulated=True)


@pytest.mark.parametrize("on_stale", ["Drop", "Finish"])
@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize("groups", [{}, {"atomic": True}, {"dropEqualRewards": True}, {"oversample": 1}], ids=str)
async def test_a_run_with_an_end_ends_by_itself(
    tmp_path: Path, groups: dict[str, Any], max_lag: int, on_stale: str
) -> None:
    """The last batch is smaller, and the shards have different numbers of groups, some of which are never delivered."""
    given = job(
        shards=2,
        dataset={"source": {"generator": {"count": 7}}, "repeats": 3, "epochs": 2, "shuffleSeed": 1},
        rollout={"onPolicy": {"maxLag": max_lag, "onStale": on_stale}, "groups": groups},
    )
    async with PacedRun(tmp_path / "run", given) as run:
        rollouts = run.open()
        played = await train(run, rollouts, groups=4, steps=100)
        assert await run.ended()
    counts = rollouts.counts
    assert counts.groups + counts.filtered_groups + counts.stale_groups == 14
    assert len(set(played.keys)) == counts.groups == len(played.keys)
    assert max(played.lags) <= max_lag
    if on_stale == "Finish":
        assert counts.stale_groups == 0


class Refusing(Simulated):
    """An engine that refuses a whole task, and one trajectory of another."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if request.session_id.startswith(("1-", "4-0-")):
            raise PolicyRefused("not this one")
        return await super().generate(request)


@pytest.mark.parametrize("on_stale", ["Drop", "Finish"])
@pytest.mark.parametrize("atomic", [False, True])
async def test_groups_that_fail_hold_nobody_back(tmp_path: Path, on_stale: str, atomic: bool) -> None:
    given = job(
        shards=2,
        dataset={"source": {"generator": {"count": 6}}, "repeats": 3, "epochs": 3},
        rollout={"onPolicy": {"maxLag": 1, "onStale": on_stale, "maxAhead": 4}, "groups": {"atomic": atomic}},
    )
    run = PacedRun(tmp_path / "run", given)
    run.engine = Refusing.of(ServeArgs.of(given.spec.generation))
    async with run:
        rollouts = run.open()
        played = await train(run, rollouts, groups=2, steps=100)
        assert await run.ended()
    counts = rollouts.counts
    # Three of the refused task, and with `atomic` the group of the refused trajectory.
    failed = 4 if atomic else 3
    assert (counts.failed_groups, counts.groups + counts.stale_groups) == (failed, 18 - failed)
    assert counts.short_groups <= (0 if atomic else 1)
    assert max(played.lags) <= 1
    assert not {key for key in played.keys if key[0] == 1}


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: b"{",
        lambda plan: msgspec.json.encode({**plan, "settled": []}),
        lambda plan: msgspec.json.encode({**plan, "room": [1, 2]}),
        lambda plan: msgspec.json.encode({**plan, "settled": [[3, 1]]}),
    ],
    ids=["torn", "no shards", "another run's shards", "intervals that are none"],
)
async def test_a_plan_that_is_nonsense_holds_back_and_is_mended_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], bytes]
) -> None:
    async with paced(tmp_path, maxLag=0) as run:
        rollouts = run.open()
        batches = rollouts.batches_async(2, timeout=30)
        await anext(batches)
        plan = run.output / PLAN
        plan.write_bytes(change(msgspec.json.decode(plan.read_bytes())))
        await until(lambda: "the plan of the run's consumer cannot be read" in caplog.text)
        await run.engine.load_weights(None, "1")
        rollouts.published()
        assert len((await anext(batches)).groups) == 2
        rollouts.stop()
        assert await run.ended()


async def test_an_interrupted_run_without_an_end_is_waited_for(tmp_path: Path) -> None:
    """Its aggregates are written as at the end of a run, and it goes on later."""
    run = PacedRun(tmp_path / "run", job())
    async with run:
        rollouts = run.open()
        batches = rollouts.batches_async(4, timeout=30)
        await anext(batches)
    (run.output / AGGREGATES).write_text("{}")
    with pytest.raises(TimeoutError):
        async for _ in rollouts.batches_async(4, timeout=0.2):
            pass
    async with run:
        assert len((await anext(rollouts.batches_async(4, timeout=30))).groups) == 4
        rollouts.stop()
        assert await run.ended()
    (run.output / AGGREGATES).write_text("{}")
    for consumer in (rollouts, run.open(pace=False)):
        async for _ in consumer.batches_async(4, timeout=30):
            pass


@pytest.mark.parametrize("on_stale", ["Drop", "Finish"])
async def test_groups_with_equal_rewards_hold_nobody_back(tmp_path: Path, on_stale: str) -> None:
    """Two that move at random mostly fail both: several groups are filtered out for each that a trainer has."""
    given = job(
        shards=3,
        dataset={"source": {"generator": {"count": 12}}, "repeats": 2, "epochs": None, "shuffleSeed": 1},
        rollout={"onPolicy": {"maxLag": 1, "onStale": on_stale}, "groups": {"dropEqualRewards": True}},
    )
    async with PacedRun(tmp_path / "run", given) as run:
        rollouts = run.open()
        played = await train(run, rollouts, groups=3, steps=3)
        rollouts.stop()
        assert await run.ended()
    assert len(played.keys) == 9
    assert rollouts.counts.filtered_groups > 0
