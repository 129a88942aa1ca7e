"""A run as the rollouts of TRL's `GRPOTrainer`; needs TRL 1.16 or newer.

docs/how-to/trainers.md has the example, and what TRL must be set to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kuberoll.trainer.adapters.rows import (
    BatchUnfit,
    Row,
    require_one_path,
    require_sampled_logprobs,
    require_sampling,
    rows_of,
)
from kuberoll.trainer.batch import Batch
from kuberoll.trainer.rollouts import Rollouts

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainerCallback

STATE_FILE: Final = "kuberoll_rollouts.json"
"""Name of the consumer's state in a checkpoint's directory."""

_SHARDED: Final = frozenset({"FSDP", "DEEPSPEED", "MEGATRON_LM"})

Publish = Callable[[Any], object]
Column = list[Any]


class RunEnded(Exception):
    """A run has delivered all its groups, and a trainer asks for more."""


class RolloutFunction:
    """A run's prompt groups as TRL's `rollout_func`.

    TRL asks for completions of its dataset's prompts. It gets whole prompt groups of the run instead, each once, in
    the order in which they finish: tasks, prompts and environments are the run's, and TRL's dataset only says how many
    steps an epoch has. Before it takes groups for a new step, the trainer's weights are published.

    With several processes the main one consumes and publishes, and each gets its part, in TRL's order.
    """

    def __init__(self, rollouts: Rollouts, *, publish: Publish | None = None, timeout: float | None = None) -> None:
        """
        Args:
            rollouts: The run, opened by each process; with several, only the main one reads it.
            publish: Called with the trainer's model, without the wrappers of accelerate, in the main process: before
                the groups of each step but step 0, when the run's own weights are the trainer's. None: the run keeps
                its weights.
            timeout: Seconds without a new group after which to give up; None: never.
        """
        self._rollouts = rollouts
        self._publish = publish
        self._timeout = timeout
        self._published_step = 0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Column]:
        """The next completions for one process of a trainer.

        Args:
            prompts: TRL's for this process, each repeated `num_generations` times. Only their number counts.

        Returns:
            Lists of one entry for each prompt. `prompt_ids`, `completion_ids`, `logprobs`: those of TRL's contract,
            where a completion goes from the first sampled token to the end of the last response. `env_mask`: 1 for
            sampled tokens. For reward functions: `environment_reward`, `task_name`, `task_index`, `rollout_index` and
            `policy_version`, the oldest of a completion's tokens. A trajectory that its group lacks because it failed
            has the reward None, an empty mask, and the tokens of another one: TRL leaves it out of the group's mean
            and gives it no advantage.

        Raises:
            RunEnded: No group is left.
            BatchUnfit: The run's groups are not what the trainer expects; the message says which setting to change.
            TimeoutError: No group came for `timeout` seconds.
            NotImplementedError: The model is sharded and is to be published.
        """
        accelerator = trainer.accelerator
        # What the main process raises is raised by all, or the others would wait for it forever.
        outcome: list[Any] = [None]
        if accelerator.is_main_process:
            try:
                outcome[0] = self._collect(len(prompts) * accelerator.num_processes, trainer)
            except Exception as error:
                if accelerator.num_processes == 1:
                    raise
                outcome[0] = error
        if accelerator.num_processes > 1:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(outcome, from_process=0)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        begin = accelerator.process_index * len(prompts)
        return {name: column[begin : begin + len(prompts)] for name, column in outcome[0].items()}

    def _collect(self, rows: int, trainer: Any) -> dict[str, Column]:
        if not trainer.model.training:
            raise BatchUnfit(
                "TRL evaluates with rollout_func, but the groups of a run are for training: leave eval_dataset out, "
                "and evaluate with a run of its own"
            )
        size = trainer.num_generations
        groups, rest = divmod(rows, size)
        if rest:
            raise BatchUnfit(
                f"TRL asks for {rows} completions at once, which are not whole groups of num_generations={size}: make "
                "per_device_train_batch_size times steps_per_generation times processes a multiple of it"
            )
        require_sampled_logprobs(self._rollouts.manifest.identity)
        self._publish_new_weights(trainer)
        batch = self._next(groups)
        require_sampling(batch, temperature=trainer.args.temperature)
        return trl_columns(batch, groups=groups, num_generations=size)

    def _publish_new_weights(self, trainer: Any) -> None:
        step = trainer.state.global_step
        if self._publish is None or step == self._published_step:
            return
        kind = str(getattr(trainer.accelerator.distributed_type, "value", ""))
        if kind in _SHARDED:
            raise NotImplementedError(
                f"publish: the model is sharded ({kind}), and its weights are nowhere whole: publish them in a "
                "callback of the trainer that gathers them, and leave publish out here"
            )
        self._publish(trainer.accelerator.unwrap_model(trainer.model))
        self._published_step = step

    def _next(self, groups: int) -> Batch:
        batch = next(self._rollouts.batches(groups, advantages=None, timeout=self._timeout), None)
        if batch is None:
            raise RunEnded(
                f"{self._rollouts.location} has delivered its {self._rollouts.counts.groups} prompt groups, and the "
                "trainer asks for more: end training with max_steps, or give the run more rows or epochs"
            )
        return batch


def trl_columns(batch: Batch, *, groups: int, num_generations: int) -> dict[str, Column]:
    """The columns that `RolloutFunction` returns, of `groups` times `num_generations` entries.

    Raises:
        BatchUnfit: A group should have another number of trajectories, or a trajectory has branches.
    """
    require_one_path(
        batch, "GRPOTrainer takes one row for each: use AsyncGRPOTrainer, whose RolloutWorker delivers all of them"
    )
    for group in batch.groups:
        if group.wanted != num_generations:
            raise BatchUnfit(
                f"the prompt groups of {group.task_name} have {group.wanted} trajectories (spec.dataset.repeats, or "
                f"the environment's repeats), and the trainer's num_generations is {num_generations}: set both the same"
            )
    columns: dict[str, Column] = {name: [] for name in (*_REQUIRED, *_EXTRA)}
    by_group: dict[int, list[Row]] = {}
    for row in rows_of(batch):
        by_group.setdefault(int(batch.group[row.number]), []).append(row)
    first = next(iter(by_group.values()))[0]
    for place in range(groups):
        members = by_group.get(place, [])
        for row in members:
            _append(columns, batch, row, counts=True)
        for _ in range(num_generations - len(members)):
            _append(columns, batch, members[0] if members else first, counts=False)
    return columns


_REQUIRED: Final = ("prompt_ids", "completion_ids", "logprobs")
_EXTRA: Final = ("env_mask", "environment_reward", "task_name", "task_index", "rollout_index", "policy_version")


def _append(columns: dict[str, Column], batch: Batch, row: Row, *, counts: bool) -> None:
    # One token stands for a completion that is missing.
    end = None if counts else 1
    group = batch.groups[int(batch.group[row.number])]
    values: dict[str, Any] = {
        "prompt_ids": row.prompt_ids.tolist(),
        "completion_ids": row.completion_ids[:end].tolist(),
        "logprobs": row.logprobs.tolist() if counts else [0.0],
        "env_mask": row.sampled.astype(int).tolist() if counts else [0],
        "environment_reward": float(batch.reward[row.number]) if counts else None,
        "task_name": group.task_name,
        "task_index": int(batch.task_index[row.number]),
        "rollout_index": int(batch.rollout_index[row.number]) if counts else None,
        "policy_version": row.oldest_version if counts else None,
    }
    for name, value in values.items():
        columns[name].append(value)


def off_policy(trainer_class: type[Any]) -> type[Any]:
    """A subclass of `GRPOTrainer` whose ratio compares the model with the weights that sampled each token.

    TRL itself takes completions of a `rollout_func` for those of its present weights, and begins with a ratio of 1,
    whatever weights they are of. Here the ratio is that to the stored log-probabilities, as in AsyncGRPOTrainer, so
    that clipping bounds how far a step goes from what was sampled.

    Args:
        trainer_class: TRL's `GRPOTrainer`, or a subclass.
    """

    class OffPolicy(trainer_class):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            return super()._compute_loss(model, {**inputs, "old_per_token_logps": inputs["sampling_per_token_logps"]})

    return OffPolicy


def environment_reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """The reward that each trajectory's environment gave: a reward function for `GRPOTrainer`.

    Returns:
        A reward for each completion; None for one that failed.

    Raises:
        BatchUnfit: The completions are not from a `RolloutFunction`.
    """
    rewards: list[float | None] | None = columns.get("environment_reward")
    if rewards is None:
        raise BatchUnfit("environment_reward: these completions have none; pass a RolloutFunction as rollout_func")
    assert len(rewards) == len(completions)
    return rewards


def stand_in_dataset(groups: int) -> Dataset:
    """A dataset whose prompts say nothing, for a trainer whose prompts are the run's.

    Args:
        groups: Number of prompt groups of an epoch.
    """
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [""] * groups})


def state_callback(rollouts: Rollouts) -> TrainerCallback:
    """A callback with which TRL's checkpoints have the consumer's state: a resumed trainer gets what it has not had.

    It is saved with each checkpoint, and loaded when training resumes from a checkpoint of `output_dir`; one without a
    state is a FileNotFoundError. TRL trains on the completions of one call for `steps_per_generation` times
    `num_iterations` passes; a checkpoint in between counts all of them as trained on.

    Args:
        rollouts: The one that the trainer's `RolloutFunction` has.
    """
    from transformers import TrainerCallback

    class SavedState(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                _state_file(args, state).write_text(json.dumps(rollouts.state_dict()))

        def on_train_begin(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.is_world_process_zero and state.global_step > 0:
                rollouts.load_state_dict(_read_state(_state_file(args, state), state.global_step))

    return SavedState()


def _read_state(path: Path, step: int) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: training resumes at step {step}, and nothing says which groups were had: resume from a "
            "checkpoint of output_dir, or load the state with rollouts.load_state_dict and leave state_callback out"
        )
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def _state_file(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE_FILE
