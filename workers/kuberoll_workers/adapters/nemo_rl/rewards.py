"""One environment step for a batch: NeMo RL's `calculate_rewards`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from typing import Any

from kuberoll_workers.adapters.nemo_rl.calls import CallerContext, run_sync
from kuberoll_workers.adapters.nemo_rl.conversion import refuse_unknown_tasks
from kuberoll_workers.adapters.nemo_rl.environments import open_executors
from kuberoll_workers.adapters.nemo_rl.limits import RolloutLimits
from kuberoll_workers.adapters.nemo_rl.message_logs import get_keys_from_message_log
from kuberoll_workers.environments.batches import StepBatch
from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.environments.outcome import EnvironmentFault, StepOutcome


def calculate_rewards(
    batch: Any, task_to_env: Mapping[str, Any], *, limits: RolloutLimits | None = None
) -> EnvironmentReturn:
    """Step the environments over the newest messages: one call for each task, all at once.

    Args:
        batch: Columns `message_log`, `task_name` and `extra_env_info`. Environments see roles and contents.
        task_to_env: Environments by task name: Ray actor handles, or objects with a plain or coroutine `step`.
        limits: Only `step_seconds` is used.

    Returns:
        In the order of the batch: observations, metadata, next_stop_strings, rewards (float32; a dict of tensors where
        the environments name their rewards), terminateds (bool), and answers, a sixth element, where an environment
        returned such.

    Raises:
        ValueError: A task has no environment; nothing was called then. Or some rewards have names and others have not.
        EnvironmentFault: The first environment that failed; all others have ended.
    """
    tasks: list[str] = list(batch["task_name"])
    refuse_unknown_tasks(tasks, task_to_env)
    rows: dict[str, list[int]] = {}
    for row, task in enumerate(tasks):
        rows.setdefault(task, []).append(row)
    logs = [get_keys_from_message_log(log, ("role", "content")) for log in batch["message_log"]]
    # Copies, as an actor gets them: an environment in this process might change what it is given.
    states = copy.deepcopy(list(batch["extra_env_info"]))
    step_seconds = (limits or RolloutLimits()).step_seconds

    async def step_all() -> list[Sequence[StepOutcome | EnvironmentFault] | BaseException]:
        async with open_executors(task_to_env, rows, step_seconds=step_seconds) as executors:
            steps = (
                executors[task].run(StepBatch.of_columns([logs[row] for row in group], [states[row] for row in group]))
                for task, group in rows.items()
            )
            return await asyncio.gather(*steps, return_exceptions=True)

    returned = run_sync(step_all, CallerContext()) if rows else []
    outcomes: list[StepOutcome | None] = [None] * len(tasks)
    answered = False
    for group, result in zip(rows.values(), returned, strict=True):
        if isinstance(result, BaseException):
            raise result
        for row, outcome in zip(group, result, strict=True):
            if isinstance(outcome, EnvironmentFault):
                raise outcome
            outcomes[row] = outcome
        answered |= getattr(result, "answered", False)
    return _joined([outcome for outcome in outcomes if outcome is not None], answered=answered)


def _joined(outcomes: Sequence[StepOutcome], *, answered: bool) -> EnvironmentReturn:
    import torch

    joined = EnvironmentReturn(
        observations=[{"role": outcome.role, "content": outcome.content} for outcome in outcomes],
        metadata=[outcome.metadata for outcome in outcomes],
        next_stop_strings=[
            None if outcome.stop_strings is None else list(outcome.stop_strings) for outcome in outcomes
        ],
        rewards=_rewards(outcomes),
        terminateds=torch.tensor([outcome.terminated for outcome in outcomes], dtype=torch.bool),
    )
    return joined._replace(answers=[outcome.answer for outcome in outcomes]) if answered else joined


def _rewards(outcomes: Sequence[StepOutcome]) -> Any:
    import torch

    names = {tuple(outcome.reward_parts) for outcome in outcomes}
    if names <= {()}:
        return torch.tensor([outcome.reward for outcome in outcomes], dtype=torch.float32)
    if len({frozenset(group) for group in names}) > 1:
        raise ValueError(f"the environments of one batch name different rewards, or some none: {sorted(names)}")
    return {
        name: torch.tensor([outcome.reward_parts[name] for outcome in outcomes], dtype=torch.float32)
        for name in outcomes[0].reward_parts
    }
