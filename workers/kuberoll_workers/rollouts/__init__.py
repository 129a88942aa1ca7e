"""The heart: generate, step the environments, reward, repeat.

Exported are the asynchronous API of the loop, `docs/rollouts.md`, and NeMo RL's rollout functions as faces over it,
`docs/nemo-rl.md`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kuberoll_workers.data.prompts import Prompt, Sample, SampleGroup
    from kuberoll_workers.data.record import Partial
    from kuberoll_workers.rollouts.failures import TrajectoryFailed
    from kuberoll_workers.rollouts.groups import GroupPolicy, rewards_differ
    from kuberoll_workers.rollouts.nemo_rl.batched_data_dict import BatchedDataDict
    from kuberoll_workers.rollouts.nemo_rl.failures import RolloutFailed
    from kuberoll_workers.rollouts.nemo_rl.generation import (
        async_generate_response_for_sample_turn,
        generate_responses,
        generate_responses_async,
    )
    from kuberoll_workers.rollouts.nemo_rl.limits import RolloutLimits
    from kuberoll_workers.rollouts.nemo_rl.message_logs import (
        batched_message_log_to_flat_message,
        get_keys_from_message_log,
    )
    from kuberoll_workers.rollouts.nemo_rl.rewards import calculate_rewards
    from kuberoll_workers.rollouts.nemo_rl.rollout import (
        run_async_multi_turn_rollout,
        run_multi_turn_rollout,
        run_sample_multi_turn_rollout,
    )
    from kuberoll_workers.rollouts.scheduling import run_groups, run_rollout
    from kuberoll_workers.rollouts.settings import RolloutSettings
    from kuberoll_workers.rollouts.streaming import stream_groups, stream_trajectories
    from kuberoll_workers.rollouts.turns import Rollout

__all__ = [
    "BatchedDataDict",
    "GroupPolicy",
    "Partial",
    "Prompt",
    "Rollout",
    "RolloutFailed",
    "RolloutLimits",
    "RolloutSettings",
    "Sample",
    "SampleGroup",
    "TrajectoryFailed",
    "async_generate_response_for_sample_turn",
    "batched_message_log_to_flat_message",
    "calculate_rewards",
    "generate_responses",
    "generate_responses_async",
    "get_keys_from_message_log",
    "rewards_differ",
    "run_async_multi_turn_rollout",
    "run_groups",
    "run_multi_turn_rollout",
    "run_rollout",
    "run_sample_multi_turn_rollout",
    "stream_groups",
    "stream_trajectories",
]

# Imported when they are asked for: a worker that uses none of them does not pay for them.
_MODULES = {
    "BatchedDataDict": "rollouts.nemo_rl.batched_data_dict",
    "GroupPolicy": "rollouts.groups",
    "Partial": "data.record",
    "Prompt": "data.prompts",
    "Rollout": "rollouts.turns",
    "RolloutFailed": "rollouts.nemo_rl.failures",
    "RolloutLimits": "rollouts.nemo_rl.limits",
    "RolloutSettings": "rollouts.settings",
    "Sample": "data.prompts",
    "SampleGroup": "data.prompts",
    "TrajectoryFailed": "rollouts.failures",
    "async_generate_response_for_sample_turn": "rollouts.nemo_rl.generation",
    "batched_message_log_to_flat_message": "rollouts.nemo_rl.message_logs",
    "calculate_rewards": "rollouts.nemo_rl.rewards",
    "generate_responses": "rollouts.nemo_rl.generation",
    "generate_responses_async": "rollouts.nemo_rl.generation",
    "get_keys_from_message_log": "rollouts.nemo_rl.message_logs",
    "rewards_differ": "rollouts.groups",
    "run_async_multi_turn_rollout": "rollouts.nemo_rl.rollout",
    "run_groups": "rollouts.scheduling",
    "run_multi_turn_rollout": "rollouts.nemo_rl.rollout",
    "run_rollout": "rollouts.scheduling",
    "run_sample_multi_turn_rollout": "rollouts.nemo_rl.rollout",
    "stream_groups": "rollouts.streaming",
    "stream_trajectories": "rollouts.streaming",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"kuberoll_workers.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
