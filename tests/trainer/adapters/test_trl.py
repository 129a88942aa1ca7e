"""What TRL's trainers get of a run, and what they do with it: the real trainers on a tiny model, without an engine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kuberoll.trainer import Rollouts
from kuberoll.trainer.adapters.rows import BatchUnfit
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import AnyRecord
from tests.output.support import failure
from tests.trainer.support import WrittenRun, trajectory

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-policy"
SAMPLING = {"generation.sampling.temperature": 1.0}
GROUPS, REPEATS = 6, 4


def played(task: int, rollout: int, *, version: int = 0) -> AnyRecord:
    """A trajectory of two turns whose tokens depend on it."""
    first, second = [20 + task, 30 + rollout], [40 + task + rollout]
    messages = [
        Message("user", "p", token_array([1, 5, 10 + task])),
        Message(
            "assistant", "a", token_array(first), array("f", [-1.0, -2.0]), 1, [(str(version), 0, 2)], sampled=True
        ),
        Message("environment", "o", token_array([6, 7]), turn=1),
        Message("assistant", "b", token_array(second), array("f", [-3.0]), 2, [(str(version + 1), 0, 1)], sampled=True),
    ]
    return trajectory(task, rollout, reward=float(rollout % 2), messages=messages)


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    """A finished run of `GROUPS` groups, of which the second lacks a trajectory."""
    run = WrittenRun(tmp_path / "run", groups=GROUPS, repeats=REPEATS, **SAMPLING)
    for task in range(GROUPS):
        for rollout in range(REPEATS):
            run.write(failure(task, rollout) if (task, rollout) == (1, 2) else played(task, rollout))
    run.end()
    return run


def trainer_for(run: Any, path: Path, *, trainer_class: Any = None, **changes: Any) -> Any:
    """TRL's trainer of the run's groups, two for each step."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from kuberoll.trainer.adapters.trl import RolloutFunction, environment_reward, stand_in_dataset, state_callback

    settings: dict[str, Any] = {
        "num_generations": REPEATS,
        "per_device_train_batch_size": 2 * REPEATS,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "save_steps": 1,
        "logging_steps": 1,
        "temperature": 1.0,
        **changes,
    }
    published: list[int] = []
    trainer = (trainer_class or GRPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        args=GRPOConfig(
            output_dir=str(path), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, **settings
        ),
        train_dataset=stand_in_dataset(2 * settings["max_steps"]),
        reward_funcs=environment_reward,
        rollout_func=RolloutFunction(run, publish=lambda model: published.append(trainer.state.global_step)),
        callbacks=[state_callback(run)],
    )
    trainer.published = published
    return trainer


def test_columns_are_whole_groups_and_what_failed_teaches_nothing(written: WrittenRun) -> None:
    from kuberoll.trainer.adapters.trl import trl_columns

    (batch,) = list(Rollouts.open(str(written.path)).batches(GROUPS))[:1]
    columns = trl_columns(batch, groups=GROUPS + 1, num_generations=REPEATS)
    assert {name: len(column) for name, column in columns.items()} == dict.fromkeys(columns, (GROUPS + 1) * REPEATS)
    by_place = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    finished = [entry for entry in by_place if entry["environment_reward"] is not None]
    assert len(finished) == GROUPS * REPEATS - 1
    for entry in finished:
        task, rollout = entry["task_index"], entry["rollout_index"]
        assert entry["prompt_ids"] == [1, 5, 10 + task]
        assert entry["completion_ids"] == [20 + task, 30 + rollout, 6, 7, 40 + task + rollout]
        assert entry["logprobs"] == [-1.0, -2.0, 0.0, 0.0, -3.0]
        assert entry["env_mask"] == [1, 1, 0, 0, 1]
        assert (entry["environment_reward"], entry["policy_version"]) == (rollout % 2, 0)
    # Groups are together, as TRL's advantages need them.
    tasks = np.array(columns["task_index"][: GROUPS * REPEATS]).reshape(GROUPS, REPEATS)
    assert (tasks == tasks[:, :1]).all()
    missing = [entry for entry in by_place if entry["environment_reward"] is None]
    assert len(missing) == 1 + REPEATS
    for entry in missing:
        assert entry["env_mask"] == [0]
        assert len(entry["completion_ids"]) == 1


def test_trl_trains_on_each_group_once_and_resumes_with_those_it_has_not_had(
    written: WrittenRun, tmp_path: Path
) -> None:
    whole = trainer_for(Rollouts.open(str(written.path)), tmp_path / "whole")
    whole.train()
    assert whole.published == [1, 2]
    logs = [entry for entry in whole.state.log_history if "reward" in entry]
    assert len(logs) == 3
    # The group with a failure has the rewards 0, 1, 1; all others 0, 1, 0, 1.
    assert sorted(log["reward"] for log in logs) == pytest.approx([0.5, 0.5, 4 / 7])
    assert all(math.isfinite(log["loss"]) and log["grad_norm"] > 0 for log in logs)

    first = Rollouts.open(str(written.path))
    trainer_for(first, tmp_path / "halves", max_steps=1).train()
    assert first.counts.groups == 2
    second = Rollouts.open(str(written.path))
    resumed = trainer_for(second, tmp_path / "halves", max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert second.counts.groups == GROUPS
    # The run may have other weights than the checkpoint's.
    assert resumed.published == [1, 2]
    theirs, ours = whole.model.state_dict(), resumed.model.state_dict()
    assert all((theirs[name] == ours[name]).all() for name in theirs)


def test_a_checkpoint_without_a_state_is_not_resumed_silently(written: WrittenRun, tmp_path: Path) -> None:
    trainer_for(Rollouts.open(str(written.path)), tmp_path / "out", max_steps=1).train()
    (tmp_path / "out" / "checkpoint-1" / "kuberoll_rollouts.json").unlink()
    with pytest.raises(FileNotFoundError, match="nothing says which groups were had"):
        trainer_for(Rollouts.open(str(written.path)), tmp_path / "out").train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_generations": 2}, "have 4 trajectories .* num_generations is 2"),
        ({"temperature": 0.7}, "task ., rollout . was sampled with temperature: 1, and the trainer.s is 0.7"),
    ],
)
def test_settings_that_disagree_are_named(
    written: WrittenRun, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchUnfit, match=message):
        trainer_for(Rollouts.open(str(written.path)), tmp_path / "out", **changes).train()


def test_a_trainer_that_asks_for_more_than_the_run_has_is_told(written: WrittenRun, tmp_path: Path) -> None:
    from kuberoll.trainer.adapters.trl import RunEnded

    with pytest.raises(RunEnded, match=f"has delivered its {GROUPS} prompt groups"):
        trainer_for(Rollouts.open(str(written.path)), tmp_path / "out", max_steps=4).train()


def test_the_ratio_to_what_was_sampled(written: WrittenRun, tmp_path: Path) -> None:
    import torch
    from trl import GRPOTrainer

    from kuberoll.trainer.adapters.trl import off_policy

    clipped = {}
    for trainer_class in (GRPOTrainer, off_policy(GRPOTrainer)):
        rollouts = Rollouts.open(str(written.path))
        trainer = trainer_for(rollouts, tmp_path / trainer_class.__name__, trainer_class=trainer_class, max_steps=1)
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train()
        (log,) = [entry for entry in trainer.state.log_history if "reward" in entry]
        assert math.isfinite(log["loss"])
        clipped[trainer_class.__name__] = log["clip_ratio/region_mean"]
        assert any((before[name] != value).any() for name, value in trainer.model.state_dict().items())
    # Nobody sampled these tokens with the log-probabilities that the run says, and only one of them looks.
    assert clipped["GRPOTrainer"] == 0
    model = trainer_for(Rollouts.open(str(written.path)), tmp_path / "again").model
    row = next(Rollouts.open(str(written.path)).batches(2)).torch()
    with torch.no_grad():
        own = model(input_ids=row["input_ids"], attention_mask=row["attention_mask"]).logits[:, :-1].log_softmax(-1)
    ratio = (own.gather(-1, row["input_ids"][:, 1:, None])[..., 0] - row["logprobs"][:, 1:]).exp()
    outside = ((ratio < 0.8) & (row["advantages"][:, None] < 0)) | ((ratio > 1.2) & (row["advantages"][:, None] > 0))
    sampled = row["loss_mask"][:, 1:]
    assert clipped["OffPolicy"] > 0
    assert clipped["OffPolicy"] == pytest.approx(outside[sampled].float().mean().item())


@pytest.mark.parametrize(
    "steps", [pytest.param(GROUPS // 2, marks=pytest.mark.long), pytest.param(GROUPS, marks=pytest.mark.long)]
)
def test_processes_share_what_the_main_one_reads(written: WrittenRun, tmp_path: Path, steps: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "tests.trainer.adapters.trl_process", str(written.path), str(tmp_path), str(steps)],
        capture_output=True, text=True, check=False, timeout=500, cwd=Path(__file__).parents[3],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    # Two groups for each step, one for each process.
    assert [len(rank["given"]) for rank in ranks] == [GROUPS // 2] * 2
    for tasks, _ in (call for rank in ranks for call in rank["given"]):
        assert len(tasks) == REPEATS
        assert len({*tasks}) == 1
    assert {tasks[0] for rank in ranks for tasks, _ in rank["given"]} == {*range(GROUPS)}
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert [rank["published"] for rank in ranks] == [[*range(1, steps if steps < GROUPS else GROUPS // 2 + 1)], []]
    # When there is nothing left, all of them are told.
    for rank in ranks:
        assert rank["error"].startswith("RunEnded: " if steps == GROUPS else "")
        assert bool(rank["error"]) == (steps == GROUPS)


def test_samples_of_the_asynchronous_trainer() -> None:
    from kuberoll.trainer.adapters.trl_async import VersionNumbers

    versions = VersionNumbers()
    assert [versions.count_of(version) for version in (0, 3)] == [0, 3]
    for version, count in ((4, 1), (5, 2), (9, 3)):
        versions.published(version)
        versions.counted(count)
    assert [versions.count_of(version) for version in (0, 3, 4, 5, 8, 9)] == [0, 0, 1, 2, 2, 3]
    assert versions.count_of(-1) == 3
