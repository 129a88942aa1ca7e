"""TRL's AsyncGRPOTrainer on a run: the real trainer and its real data path, without an engine."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kuberoll.trainer import Rollouts
from tests.rollouts.fakes import until
from tests.trainer.adapters.test_trl import GROUPS, MODEL, REPEATS, SAMPLING, played
from tests.trainer.support import WrittenRun

pytestmark = pytest.mark.slow


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    run = WrittenRun(tmp_path / "run", groups=GROUPS, repeats=REPEATS, **SAMPLING)
    run.write(*[played(task, rollout, version=task) for task in range(GROUPS) for rollout in range(REPEATS)])
    run.end()
    return run


def attention_on_a_cpu(
    query: Any,
    key: Any,
    value: Any,
    queries: Any,
    keys: Any,
    _longest: Any,
    _path: Any,
    *,
    softmax_scale: Any,
    **_: Any,
) -> Any:
    """What FlashAttention's kernel computes for sequences laid end to end; it has no version for CPUs."""
    import torch

    parts = []
    for begin, end, first, last in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        q, k, v = query[begin:end], key[first:last], value[first:last]
        # The last query sees all keys.
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen, scale=softmax_scale
            ).transpose(0, 1)
        )
    return torch.cat(parts)


def test_the_asynchronous_trainer_trains_on_the_samples_of_a_run(
    written: WrittenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    from kuberoll.trainer.adapters.trl import stand_in_dataset
    from kuberoll.trainer.adapters.trl_async import RolloutWorker, WeightTransfer

    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention_on_a_cpu))
    # It asks CUDA what a GPU it has.
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    published: list[dict[str, Any]] = []

    def publish(weights: Any) -> Any:
        published.append({name: tensor.clone() for name, tensor in weights.items()})
        return SimpleNamespace(version=len(published))

    rollouts = Rollouts.open(str(written.path))
    worker = RolloutWorker(rollouts, queue_size=2 * REPEATS)
    trainer = AsyncGRPOTrainer(
        model=str(MODEL),
        args=AsyncGRPOConfig(
            str(tmp_path / "out"),
            per_device_train_batch_size=REPEATS,
            max_steps=GROUPS - 1,
            learning_rate=1e-3,
            token_budget=-1,
            max_staleness=100,
            use_cpu=True,
            bf16=False,
            report_to=[],
            gradient_checkpointing=False,
        ),
        train_dataset=stand_in_dataset(GROUPS),
        rollout_worker=worker,
        weight_transfer=WeightTransfer(publish, worker),
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logs) == GROUPS - 1
    for log in logs:
        assert math.isfinite(log["loss"])
        assert log["grad_norm"] > 0
        assert log["reward"] == log["rewards/environment"] == 0.5
        assert log["batch/trained_tokens_per_step"] == 3 * REPEATS
    # Once before training, then after each step; each time other weights, all of the model's.
    assert len(published) == 1 + GROUPS - 1
    assert set(published[0]) == {name for name, _ in trainer.model.named_parameters()}
    assert any((published[0][name] != published[-1][name]).any() for name in published[0])
    assert rollouts.counts.groups >= GROUPS - 1


def test_the_samples_of_a_group(written: WrittenRun) -> None:
    from kuberoll.trainer.adapters.trl_async import samples_of

    first = next(Rollouts.open(str(written.path)).batches(1))
    samples = list(samples_of(first, group_id=5, count_of=lambda version: 10 + version))
    assert len(samples) == REPEATS
    for rollout, sample in enumerate(samples):
        assert sample.input_ids.tolist() == [1, 5, 10, 20, 30 + rollout, 6, 7, 40 + rollout]
        assert sample.completion_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
        assert sample.old_log_probs.tolist() == [0, 0, 0, -1, -2, 0, 0, -3]
        assert (sample.group_id, sample.model_version) == (5, 10)
        assert sample.metrics["reward"] == rollout % 2
        assert [message["role"] for message in sample.completion] == ["assistant", "environment", "assistant"]
    assert sum(sample.advantage for sample in samples) == pytest.approx(0)


def test_the_trainer_is_told_why_no_sample_comes(written: WrittenRun) -> None:
    from kuberoll.trainer.adapters.trl import RunEnded
    from kuberoll.trainer.adapters.trl_async import RolloutWorker

    worker = RolloutWorker(Rollouts.open(str(written.path)), queue_size=0)
    worker.check_health(60)
    worker.start()
    for _ in range(GROUPS * REPEATS):
        worker.rollout_buffer.get(timeout=60)
    worker.stop()
    with pytest.raises(RunEnded, match=f"has delivered its {GROUPS} prompt groups"):
        worker.check_health(60)
    worker.stop()


def test_a_run_that_stands_still_is_named(tmp_path: Path) -> None:
    from kuberoll.trainer.adapters.trl_async import RolloutWorker

    run = WrittenRun(tmp_path / "run", groups=GROUPS, repeats=REPEATS)
    worker = RolloutWorker(Rollouts.open(str(run.path)))
    worker.start()
    try:
        with pytest.raises(RuntimeError, match=r"no prompt group for .* see whether the run goes on"):
            worker.check_health(-1)
    finally:
        worker.stop()


async def test_a_run_that_waits_for_weights_says_what_is_to_be_set(tmp_path: Path) -> None:
    from kuberoll.trainer.adapters.trl_async import RolloutWorker

    run = WrittenRun(tmp_path / "run", groups=GROUPS, repeats=REPEATS, **{"rollout.onPolicy.maxLag": 1})
    worker = RolloutWorker(Rollouts.open(str(run.path)))

    def told() -> str:
        with pytest.raises(RuntimeError) as raised:
            worker.check_health(-1)
        return str(raised.value)

    worker.start()
    try:
        # It takes groups one by one.
        await until(lambda: "waits for weights after every 1 groups" in told())
        assert "open it with groups_per_version" in told()
    finally:
        worker.stop()
