"""One bad episode among ten harms itself only: the other nine are stored, whatever it does, and it fails."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from kuberoll_workers.data.plain import MAX_MESSAGE
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.output import records
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import RetryPolicy
from tests.environments import misbehaving
from tests.environments.misbehaving import (
    HANGING,
    HARMLESS,
    KILLING,
    METADATA,
    RAISED,
    RETURNED,
    REWARDS,
    SLEEP,
)
from tests.output.support import store_at
from tests.rollouts.fakes import rollout_of, sample

pytestmark = pytest.mark.slow

BAD = 3
RETRIES = RetryPolicy(backoff_seconds=0.0, environment_attempts=1)
SPEC = PlainSpec(name="env", type=None, entrypoint="tests.environments.misbehaving:Misbehaving", config={})

IN_WORDS = {
    "meta_nan": r"metadata.history[2].score is nan",
    "meta_bigint": "metadata.n is an integer beyond 64 bits",
    "meta_surrogate": "metadata.n holds a lone surrogate, U+D800",
    "meta_deep": "nested more than 250 levels deep",
    "meta_huge": "at most 16777216 can be stored",
    "big32": "a reward must be finite as a 32-bit float",
    "reward_sum": "the sum of rewards[0] is 6e+38",
    "raise_surrogate": r"step raised ValueError: \ud800",
    "exit": "step raised SystemExit: 3",
    "stop_iteration": "step raised StopIteration",
    "cancelled": "step raised CancelledError",
    "two_arguments": "step raised TwoArguments: a b",
    "evil_text": "its message cannot be shown: __str__ raised KeyboardInterrupt",
    "hang": "step took longer than stepTimeoutSeconds",
    "os_exit": "the environment's process ended with exit code 3",
    "kill": "the environment's process was ended by signal SIGKILL",
    "segfault": "the environment's process was ended by signal SIGSEGV",
    "endless_message": "violates its protocol",
    "deaf": "has closed its channel, and lived on",
}


async def play(tmp_path: Path, kind: str | list[str], isolation: str, *, seconds: float) -> tuple[list[Any], list[Any]]:
    """Nine good episodes and one bad, or several bad ones, with all that a worker does: what is stored, what failed."""
    kinds = [kind] if isinstance(kind, str) else kind
    store = store_at(tmp_path)
    runner = EnvironmentRunner(make_executor(SPEC, isolation=isolation, processes=1, timeout=seconds), max_batch=64)
    bad = dict(enumerate(kinds, start=BAD))
    samples = [
        sample(index, metadata={"n": index, **({"do": bad[index]} if index in bad else {})})
        for index in range(9 + len(kinds))
    ]
    try:
        async with asyncio.timeout(240):
            await run_rollout(
                rollout_of({"env": runner}, concurrency=10, turn_sink=store.turn, retries=RETRIES),
                samples,
                store.result,
            )
    finally:
        await runner.close()
        await store.close()
    storage = DirectoryStorage(tmp_path)
    return list(records.trajectories(storage, "shard-00000")), list(records.failures(storage))


def check(kind: str | list[str], stored: list[Any], failed: list[Any], *, fault: str = "environment") -> None:
    bad = dict(enumerate([kind] if isinstance(kind, str) else kind, start=BAD))
    good = [index for index in range(9 + len(bad)) if index not in bad]
    assert sorted(record.task_index for record in stored) == good
    assert all(record.metadata == {"n": record.task_index} for record in stored)
    assert sorted(failure.task_index for failure in failed) == list(bad)
    for failure in failed:
        does = bad[failure.task_index]
        assert (failure.kind, failure.stage) == (fault, "environment")
        assert 0 < len(failure.cause) < MAX_MESSAGE + 100
        assert IN_WORDS.get(does, "") in failure.cause
        # The state before the bad step is kept: a later try begins with it.
        assert failure.metadata == {"n": failure.task_index, "do": does}


@pytest.mark.parametrize("kind", [*METADATA, *REWARDS, *RAISED, *RETURNED])
async def test_a_bad_value_fails_its_own_trajectory(tmp_path: Path, kind: str) -> None:
    check(kind, *await play(tmp_path, kind, "Inline", seconds=120))


@pytest.mark.parametrize(
    "kinds", [METADATA, REWARDS, RAISED, RETURNED], ids=["metadata", "reward", "raised", "returned"]
)
async def test_bad_values_in_a_process_fail_their_own_trajectories(tmp_path: Path, kinds: dict[str, Any]) -> None:
    check(list(kinds), *await play(tmp_path, list(kinds), "Process", seconds=120))


@pytest.mark.parametrize("isolation", ["Inline", "Process"])
@pytest.mark.parametrize("kind", HANGING)
async def test_what_never_ends_fails_by_the_time_limit(tmp_path: Path, kind: str, isolation: str) -> None:
    check(kind, *await play(tmp_path, kind, isolation, seconds=3))


@pytest.mark.parametrize("kind", KILLING)
async def test_a_process_that_is_ended_is_replaced(tmp_path: Path, kind: str) -> None:
    # Nobody can tell who has sent these signals; what ends by itself does not end by them.
    fault = "infrastructure" if kind in ("kill", "terminate", "group_kill") else "environment"
    check(kind, *await play(tmp_path, kind, "Process", seconds=4), fault=fault)


@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_an_unusable_row_is_the_data_s_fault(tmp_path: Path, isolation: str) -> None:
    stored, failed = await play(tmp_path, "unusable_row", isolation, seconds=60)
    check("unusable_row", stored, failed, fault="data")
    assert failed[0].cause == "\\ud800" * 5


@pytest.mark.parametrize(
    ("kind", "isolation"),
    [*((kind, "Process") for kind in HARMLESS), ("tensor_metadata", "Process"), ("tensor_metadata", "Inline")],
)
async def test_what_harms_nobody_is_stored(tmp_path: Path, kind: str, isolation: str) -> None:
    stored, failed = await play(tmp_path, kind, isolation, seconds=60)
    assert (len(stored), failed) == (10, [])
    (bad,) = [record for record in stored if record.task_index == BAD]
    assert bad.metadata == ({"n": [1.0, 2.0], "f": 1.5, "t": [1, 2]} if kind == "tensor_metadata" else {"n": BAD})


@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_changed_inputs_are_the_environment_s_own(tmp_path: Path, isolation: str) -> None:
    stored, failed = await play(tmp_path, "changes_inputs", isolation, seconds=60)
    assert (len(stored), failed) == (10, [])
    # None keeps the old state, and the old state is as it was.
    assert {"n": BAD, "do": "changes_inputs"} in [record.metadata for record in stored]


async def test_nothing_that_an_environment_started_is_left(tmp_path: Path) -> None:
    await play(tmp_path, ["bomb", "child"], "Process", seconds=4)
    assert [process for process in psutil.process_iter(["cmdline"]) if SLEEP in (process.info["cmdline"] or [])] == []


async def test_no_pickle_of_a_child_is_opened(tmp_path: Path) -> None:
    await play(tmp_path, "meta_reducing", "Process", seconds=60)
    assert misbehaving.UNPICKLED.name not in os.listdir(misbehaving.UNPICKLED.parent)
