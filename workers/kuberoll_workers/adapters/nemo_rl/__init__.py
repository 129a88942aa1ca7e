"""NeMo RL's rollout functions on top of the rollout loop: same names, arguments and return shapes."""

from __future__ import annotations

from kuberoll_workers.adapters.nemo_rl.batched_data_dict import BatchedDataDict
from kuberoll_workers.adapters.nemo_rl.failures import RolloutFailed
from kuberoll_workers.adapters.nemo_rl.generation import (
    async_generate_response_for_sample_turn,
    generate_responses,
    generate_responses_async,
)
from kuberoll_workers.adapters.nemo_rl.gym import (
    NemoGymRolloutResult,
    run_async_nemo_gym_rollout,
    run_nemo_gym_rollout_sync,
)
from kuberoll_workers.adapters.nemo_rl.limits import RolloutLimits
from kuberoll_workers.adapters.nemo_rl.message_logs import (
    batched_message_log_to_flat_message,
    get_keys_from_message_log,
)
from kuberoll_workers.adapters.nemo_rl.rewards import calculate_rewards
from kuberoll_workers.adapters.nemo_rl.rollout import (
    RolloutGroupResult,
    run_async_multi_turn_rollout,
    run_async_multi_turn_rollout_groups,
    run_multi_turn_rollout,
    run_sample_multi_turn_rollout,
)
from kuberoll_workers.adapters.nemo_rl.served import PublishedWeights, ServedGeneration

__all__ = [
    "BatchedDataDict",
    "NemoGymRolloutResult",
    "PublishedWeights",
    "RolloutFailed",
    "RolloutGroupResult",
    "RolloutLimits",
    "ServedGeneration",
    "async_generate_response_for_sample_turn",
    "batched_message_log_to_flat_message",
    "calculate_rewards",
    "generate_responses",
    "generate_responses_async",
    "get_keys_from_message_log",
    "run_async_multi_turn_rollout",
    "run_async_multi_turn_rollout_groups",
    "run_async_nemo_gym_rollout",
    "run_multi_turn_rollout",
    "run_nemo_gym_rollout_sync",
    "run_sample_multi_turn_rollout",
]
